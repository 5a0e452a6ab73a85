"""Byte streams to the runner through a relay that the engine starts in the container.

For engines that do not share this machine's sockets: a remote one, a virtual machine, a runtime
with its own kernel. The engine answers one HTTP request with a stream of frames: a byte for the
output (1 or 2), three zero bytes, a length, and so many bytes.
"""

import json
import ssl
import struct
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteReceiveStream, ByteStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.stapled import StapledByteStream

from mcp_sandbox.backends import local_socket
from mcp_sandbox.backends.docker.engine import AWAY, Engine, EngineHangs, explain_silence
from mcp_sandbox.errors import BackendUnavailable, SandboxGone, Unreachable

_TIMEOUT_S = 5.0
_PING = b"GET /_ping HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n\r\n"
_CUT = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)
_HEADER = struct.Struct(">BxxxL")
_STDOUT, _STDERR = 1, 2
_MAX_HEAD = 16 * 1024
_MAX_COMPLAINT = 4096
_MAX_EARLY = 1024 * 1024
_CONNECTED = b"connected\n"
_QUIET_S = 5.0
Alive = Callable[[], Awaitable[bool]]


async def dial(engine: Engine) -> ByteStream:
    """Connect to the engine; raise BackendUnavailable if it cannot be reached."""
    try:
        with anyio.fail_after(_TIMEOUT_S):
            return await _connect(engine)
    except (OSError, anyio.ConnectionFailed) as exc:
        raise explain_silence(engine.url, str(exc)) from exc


async def hangs(engine: Engine) -> bool:
    """Return whether the engine answers nothing at all, not even that it is away."""
    with anyio.move_on_after(_TIMEOUT_S) as limit, suppress(OSError, *_CUT):
        async with await _connect(engine) as raw:
            await raw.send(_PING)
            await raw.receive()
    return limit.cancelled_caught


async def _connect(engine: Engine) -> ByteStream:
    parts = urlsplit(engine.url)
    if parts.scheme == "unix":
        return await local_socket.dial(parts.path)
    if parts.scheme == "ssh":
        return await _connect_ssh(parts.hostname or "", parts.username, parts.port)
    host = parts.hostname or "localhost"
    if engine.tls is None:
        return await anyio.connect_tcp(host, parts.port or 2375)
    return await anyio.connect_tcp(
        host,
        parts.port or 2376,
        ssl_context=await anyio.to_thread.run_sync(engine.tls.context),
        tls_hostname=host,
        # The engine closes the connection at the end of a stream, without TLS's own end.
        tls_standard_compatible=False,
    )


async def _connect_ssh(host: str, user: str | None, port: int | None) -> ByteStream:
    options = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    command = ["ssh", *options, "--", host, "docker", "system", "dial-stdio"]
    ssh = await anyio.open_process(command, stderr=None)
    assert ssh.stdin is not None and ssh.stdout is not None  # noqa: S101, PT018 - pipes by default
    return _ProcessStream(ssh.stdin, ssh.stdout, ssh)


@dataclass(eq=False)
class _ProcessStream(StapledByteStream):
    """Standard input and output of a program as one stream; closing it ends the program."""

    process: Process

    async def aclose(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.aclose()


class _Watched(ByteReceiveStream):
    """The engine's output; it also ends when the container does.

    If a container with another kernel is killed, the engine may leave the connection open.
    """

    def __init__(self, raw: ByteStream, alive: Alive) -> None:
        self._raw = raw
        self._alive = alive

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while True:
            with anyio.move_on_after(_QUIET_S):
                return await self._raw.receive(max_bytes)
            try:
                if not await self._alive():
                    raise anyio.EndOfStream
            except BackendUnavailable as exc:
                # One that is away for new connections may still serve this one.
                if isinstance(exc, EngineHangs) or not isinstance(exc, Unreachable):
                    raise anyio.BrokenResourceError from exc

    async def aclose(self) -> None:
        await self._raw.aclose()


class ExecStream(ByteStream):
    """Standard input and output of a program in a container, as one stream.

    `alive` returns whether the container still runs; it is called if nothing comes for a while.
    """

    def __init__(self, raw: ByteStream, alive: Alive) -> None:
        self._raw = raw
        self._source = BufferedByteReceiveStream(_Watched(raw, alive))
        self._output_left = 0
        self.early = bytearray()
        self.complaint = bytearray()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self.early:
            taken = bytes(self.early[:max_bytes])
            del self.early[:max_bytes]
            return taken
        while not self._output_left:
            await self._next_frame()
        with _broken_tls():
            data = await self._source.receive(min(max_bytes, self._output_left))
        self._output_left -= len(data)
        return data

    async def send(self, item: bytes) -> None:
        try:
            with _broken_tls():
                await self._raw.send(item)
        except anyio.EndOfStream as exc:
            # A TLS stream raises this if it finds the end while it writes.
            raise anyio.BrokenResourceError from exc

    async def send_eof(self) -> None:
        try:
            await self._raw.send_eof()
        except NotImplementedError:
            # TLS has no half-close; to close the whole stream is the nearest to it.
            await self.aclose()

    async def aclose(self) -> None:
        await self._raw.aclose()

    async def upgraded(self) -> None:
        """Read the head of the engine's answer; what follows is the program's output.

        Raises SandboxGone if the engine refuses to start the program, Unreachable if it is away.
        """
        try:
            head = await self._source.receive_until(b"\r\n\r\n", _MAX_HEAD)
        except (anyio.IncompleteRead, anyio.DelimiterNotFound) as exc:
            raise anyio.EndOfStream from exc
        status = head.split(b"\r\n", 1)[0].decode("ascii", "replace")
        (code,) = status.split(" ")[1:2] or [""]
        if code in map(str, AWAY):
            raise Unreachable(f"the engine did not answer for the sandbox ({status})")
        if code not in ("101", "200"):
            raise SandboxGone(
                f"the engine did not start a relay in the sandbox ({status}); "
                "the next call starts a new sandbox on the same files"
            )

    async def wait_for(self, message: bytes) -> None:
        """Wait until the program has written `message` to its standard error.

        Raises anyio.EndOfStream if the program ended first.
        """
        while message not in self.complaint:
            await self._next_frame()
            if self._output_left + len(self.early) > _MAX_EARLY:
                raise anyio.BrokenResourceError
            if self._output_left:
                self.early += await self._source.receive_exactly(self._output_left)
                self._output_left = 0

    async def _next_frame(self) -> None:
        try:
            with _broken_tls():
                kind, length = _HEADER.unpack(await self._source.receive_exactly(_HEADER.size))
            if kind == _STDOUT:
                self._output_left = length
            elif kind == _STDERR and len(self.complaint) + length <= _MAX_COMPLAINT:
                self.complaint += await self._source.receive_exactly(length)
            else:
                raise anyio.BrokenResourceError
        except anyio.IncompleteRead as exc:
            raise anyio.EndOfStream from exc


@contextmanager
def _broken_tls() -> Generator[None]:
    try:
        yield
    except ssl.SSLError as exc:
        raise anyio.BrokenResourceError from exc


async def open_exec(engine: Engine, path: str, *, deadline_s: float, alive: Alive) -> ExecStream:
    """Start the prepared relay at the API path `path`; return once it is connected.

    Raises:
        SandboxGone: the relay did not start, or did not reach the runner.
        Unreachable: the engine cannot be reached, or cut the connection.
    """
    raw = await dial(engine)
    stream = ExecStream(raw, alive)
    try:
        with anyio.fail_after(deadline_s):
            await raw.send(_upgrade_request(path))
            await stream.upgraded()
            await stream.wait_for(_CONNECTED)
    except (anyio.EndOfStream, anyio.BrokenResourceError, TimeoutError) as exc:
        await anyio.aclose_forcefully(raw)
        said = stream.complaint.decode(errors="replace").strip()
        if not (said or stream.early) and await alive() and not isinstance(exc, TimeoutError):
            raise Unreachable("the engine cut a connection to the sandbox: try again") from exc
        raise SandboxGone(
            f"the relay in the sandbox did not reach its runner ({said or 'no reason given'}); "
            "the next call starts a new sandbox on the same files"
        ) from exc
    except BaseException:
        await anyio.aclose_forcefully(raw)
        raise
    return stream


def _upgrade_request(path: str) -> bytes:
    body = json.dumps({"Detach": False, "Tty": False}).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: docker",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: Upgrade",
        "Upgrade: tcp",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body
