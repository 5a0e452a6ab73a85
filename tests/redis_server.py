"""A real Redis on a port of its own, that forgets all when it ends."""

import signal
import socket
import subprocess
import time

PROGRAM = "redis-server"


class RedisServer:
    """The server; `strike` kills or hangs it. `options` are more of its command line."""

    def __init__(self, *options: str, host: str = "127.0.0.1") -> None:
        self._options, self.host = options, host
        with socket.create_server((host, 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def start(self) -> None:
        if self._process:
            self._process.wait(10)
        options = ["--save", "", "--appendonly", "no", "--protected-mode", "no"]
        options += ["--port", str(self.port)]
        self._process = subprocess.Popen(
            [PROGRAM, *options, "--bind", self.host, *self._options], stdout=subprocess.DEVNULL
        )
        for _ in range(500):
            with socket.socket() as tried:
                if tried.connect_ex((self.host, self.port)) == 0:
                    return
            time.sleep(0.02)
        raise TimeoutError("redis-server does not listen")

    def strike(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal: SIGKILL ends it, SIGSTOP hangs it, SIGCONT lets it go on."""
        if self._process:
            self._process.send_signal(number)

    def close(self) -> None:
        self.strike()
        if self._process:
            self._process.wait(10)
