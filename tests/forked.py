"""Command lines of ours that start in no time: forks of one process that has loaded all of it.

Loading takes a second of a core, and the tests start hundreds. What runs is the whole program with
its own arguments, environment and files, as a real process; that it also begins from nothing is
shown where clients start it.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from tests import steps

_ROOT = Path(__file__).parents[1]
_LOADED = ("cli", "app.daemon", "daemon.daemon", "web.uvicorn_server", "server.server", "app.chats")
_MOST_BYTES = 1 << 20


class _Pipe(ByteReceiveStream):
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.wait_readable(self._descriptor)
        if data := os.read(self._descriptor, max_bytes):
            return data
        raise anyio.EndOfStream

    async def aclose(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class _Input(ByteSendStream):
    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    async def send(self, item: bytes) -> None:
        left = memoryview(item)
        while left:
            if self._descriptor < 0:
                raise anyio.ClosedResourceError
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                await anyio.wait_writable(self._descriptor)
            except BrokenPipeError as exc:
                raise anyio.BrokenResourceError from exc

    async def aclose(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


class Program:
    """A running command line. Leaving it closes its streams and waits until it has ended."""

    def __init__(self, told: socket.socket, stdin: int, stdout: int, stderr: int) -> None:
        self.stdin = _Input(stdin)
        self.stdout = _Pipe(stdout)
        self.stderr = _Pipe(stderr)
        self._told = told
        self.pid = int.from_bytes(told.recv(4), "little")
        self._code: int | None = None

    @property
    def returncode(self) -> int | None:
        if self._code is None:
            self._told.setblocking(False)
            try:
                self._code = int.from_bytes(self._told.recv(4), "little", signed=True)
            except BlockingIOError:
                return None
        return self._code

    def cpu_s(self) -> float:
        """How long it has worked by now."""
        text = Path("/proc", str(self.pid), "stat").read_text()
        return sum(map(int, text.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        while (code := self.returncode) is None:
            await anyio.wait_readable(self._told)
        return code

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.stdin.aclose()
            await self.stdout.aclose()
            await self.stderr.aclose()
            if error is not None:
                self.kill()
            await self.wait()
            self._told.close()


def start(
    arguments: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdin: bytes | None = b"",
    beside: int = 0,
    module: str = "mcp_sandbox",
) -> Program:
    """Start `mcp-sandbox ARGUMENT...`, or another module, in the namespaces of `beside`.

    It reads `stdin`, or with None what is sent to it.
    """
    with ExitStack() as opened:
        if stdin is None:
            given, writing = os.pipe()
            opened.callback(os.close, given)
        else:
            file = opened.enter_context(tempfile.TemporaryFile())
            file.write(stdin)
            file.seek(0)
            given, writing = file.fileno(), os.open(os.devnull, os.O_WRONLY)
        told, telling = socket.socketpair()
        opened.enter_context(telling)
        stdout, stderr = os.pipe(), os.pipe()
        for end in (stdout[1], stderr[1]):
            opened.callback(os.close, end)
        fds = [telling.fileno(), given, stdout[1], stderr[1]]
        said = {"arguments": arguments, "env": dict(env), "cwd": cwd, "beside": beside}
        order = json.dumps({**said, "module": module}).encode()
        socket.send_fds(_forking(), [order], fds)
        return Program(told, writing, stdout[0], stderr[0])


@functools.cache
def long_steps() -> int:
    """The descriptor by which each program here notes long steps of its loop; see `steps`."""
    # Opened anew to append, as many write.
    return os.open(f"/proc/self/fd/{os.memfd_create('long-steps')}", os.O_RDWR | os.O_APPEND)


@functools.cache
def _forking() -> socket.socket:
    """The line to the process that forks; it ends when this one does."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = [its.fileno(), long_steps()]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", *map(str, kept)],
        pass_fds=kept,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(_ROOT)},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    its.close()

    @atexit.register
    def end() -> None:
        mine.close()
        process.wait()

    return mine


def _forked(line: socket.socket) -> Mapping[str, Any] | None:
    """Fork for each order; return the order in the fork, None when there are no more."""
    with selectors.DefaultSelector() as ready, line:
        ready.register(line, selectors.EVENT_READ)
        running = dict[int, tuple[int, socket.socket]]()
        while True:
            for key, _ in ready.select():
                if key.fd in running:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    pid, telling = running.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with telling:
                        telling.send(code.to_bytes(4, "little", signed=True))
                    continue
                order, fds, _, _ = socket.recv_fds(line, _MOST_BYTES, 4)
                if not order:
                    return None
                telling = socket.socket(fileno=fds[0])
                pid = os.fork()
                if pid == 0:
                    for each, (_, other) in running.items():
                        os.close(each)
                        other.close()
                    telling.close()
                    for number, descriptor in enumerate(fds[1:]):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    return json.loads(order)  # type: ignore[no-any-return]
                for descriptor in fds[1:]:
                    os.close(descriptor)
                telling.send(pid.to_bytes(4, "little"))
                watched = os.pidfd_open(pid)
                ready.register(watched, selectors.EVENT_READ)
                running[watched] = pid, telling


def _enter(pid: int) -> None:
    """Enter the network and the mounts of a process, as its user where that is another."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net", "mnt"):
        its = Path(f"/proc/{pid}/ns/{kind}")
        if its.stat().st_ino == Path(f"/proc/self/ns/{kind}").stat().st_ino:
            continue
        descriptor = os.open(its, os.O_RDONLY)
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns {its}")
        os.close(descriptor)


def _run(order: Mapping[str, Any]) -> None:
    if order["beside"]:
        _enter(order["beside"])
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv = ["mcp-sandbox", *order["arguments"]]
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    for name in _LOADED:
        importlib.import_module(f"mcp_sandbox.{name}")
    gc.freeze()
    noted = int(sys.argv[2])
    os.set_inheritable(noted, False)
    steps.watch(lambda line: os.write(noted, line.encode()), tests_too=True)
    orders = socket.socket(fileno=int(sys.argv[1]))
    given = _forked(orders)
    if given is not None:
        _run(given)
