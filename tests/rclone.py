"""A real S3 server: `rclone serve s3` of a folder, on a port of its own, for one test module."""

import atexit
import functools
import math
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Literal, Self

import anyio
from anyio.abc import SocketAttribute, SocketStream

from mcp_sandbox.config.sections import StorageConfig

PROGRAM = str(Path(sys.executable).parent / "rclone")
ACCESS, SECRET = "a-key-of-tests", "a-secret-of-tests"
BUCKET = "chats"
# Lists and manifests are smaller.
_LARGE = 100_000


class S3Server:
    """The server; `folder` holds a folder for each bucket, and may be changed under its feet."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder, self.host = folder, host
        (folder / BUCKET).mkdir(parents=True)
        with socket.create_server((host, 0)) as free:
            self.port: int = free.getsockname()[1]
        for name, value in (("access", ACCESS), ("secret", SECRET)):
            file = folder.with_name(name)
            file.write_text(value)
            file.chmod(0o600)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def settings(self, **given: object) -> StorageConfig:
        usual = {
            "endpoint": self.endpoint,
            "bucket": BUCKET,
            "access_key": f"file:{self.folder.with_name('access')}",
            "secret_key": f"file:{self.folder.with_name('secret')}",
        }
        return StorageConfig.model_validate({**usual, **given})

    def variables(self) -> dict[str, str]:
        """The settings as a program gets them."""
        names = ("endpoint", "bucket", "access_key", "secret_key")
        given = self.settings().model_dump()
        return {f"MCP_SANDBOX_STORAGE__{name.upper()}": given[name] for name in names}

    def start(self, access: str = ACCESS) -> None:
        if self._process:
            self._process.wait(10)
        command = [PROGRAM, "serve", "s3", "--addr", f"{self.host}:{self.port}"]
        options = ["--auth-key", f"{access},{SECRET}", "--config", "/dev/null"]
        self._process = subprocess.Popen(
            [*command, *options, str(self.folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(500):
            with socket.socket() as tried:
                if tried.connect_ex((self.host, self.port)) == 0:
                    return
            time.sleep(0.02)
        raise TimeoutError("rclone does not listen")

    def strike(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal: SIGKILL ends it, SIGSTOP hangs it, SIGCONT lets it go on."""
        if self._process:
            self._process.send_signal(number)

    def restart(self, access: str = ACCESS) -> None:
        """Have it look at its files anew, which were changed, and know another key."""
        self.strike()
        self.start(access)

    def close(self) -> None:
        self.strike()
        if self._process:
            self._process.wait(10)


@functools.cache
def shared() -> S3Server:
    """Return the server that all tests of this process have, until it ends."""
    folder = tempfile.TemporaryDirectory(prefix="mcp-sandbox-s3-")
    server = S3Server(Path(folder.name) / "buckets")
    atexit.register(folder.cleanup)
    atexit.register(server.close)
    return server


class FaultyLine:
    """A line to a store on which a test lets large bodies crawl, stall or break off."""

    def __init__(self, store: S3Server) -> None:
        self.port = 0
        self.fault: Literal["", "crawl", "stall", "cut"] = ""
        self._store = store

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _join(self, client: SocketStream) -> None:
        sizes = Counter[str]()
        async with client, await anyio.connect_tcp("127.0.0.1", self._store.port) as server:
            async with anyio.create_task_group() as tasks:
                for way in ((client, server, "up"), (server, client, "down")):
                    tasks.start_soon(self._carry, *way, sizes, tasks.cancel_scope)

    async def _carry(
        self,
        source: SocketStream,
        target: SocketStream,
        way: str,
        sizes: Counter[str],
        line: anyio.CancelScope,
    ) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while not (self.fault == "cut" and sizes[way] > _LARGE):
                data = await source.receive()
                # A request and its answer take turns.
                sizes.update({way: len(data)})
                del sizes["down" if way == "up" else "up"]
                while self.fault and self.fault != "cut" and sizes[way] > _LARGE:
                    await target.send(data[:1])
                    data = data[1:]
                    await anyio.sleep(0.02 if self.fault == "crawl" else math.inf)
                await target.send(data)
        line.cancel()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Self]:
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            self.port = listener.extra(SocketAttribute.local_port)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, self._join)
                yield self
                tasks.cancel_scope.cancel()
