"""Raw byte connections to an engine: unix socket, TCP, TCP with TLS, and ssh.

Needed for streams that HTTP libraries cannot carry in both directions. No requests are made here.
"""

from dataclasses import dataclass
from urllib.parse import urlsplit

import anyio
from anyio.abc import ByteStream, Process

from mcp_sandbox.backends.docker.engine import Engine
from mcp_sandbox.errors import BackendUnavailable

_TIMEOUT_S = 30.0


async def dial(engine: Engine) -> ByteStream:
    """Connect to the engine.

    Raises:
        BackendUnavailable: it cannot be reached.
    """
    try:
        with anyio.fail_after(_TIMEOUT_S):
            return await _connect(engine)
    except (OSError, anyio.ConnectionFailed) as exc:
        raise BackendUnavailable(
            f"the Docker engine at {engine.url} cannot be reached ({exc}): "
            "check that `docker info` works with the same address"
        ) from exc


async def _connect(engine: Engine) -> ByteStream:
    parts = urlsplit(engine.url)
    if parts.scheme == "unix":
        return await anyio.connect_unix(parts.path)
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
        # The engine just closes the connection at the end of a stream.
        tls_standard_compatible=False,
    )


async def _connect_ssh(host: str, user: str | None, port: int | None) -> ByteStream:
    options = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    command = ["ssh", *options, "--", host, "docker", "system", "dial-stdio"]
    return _ProcessStream(await anyio.open_process(command, stderr=None))


@dataclass(frozen=True)
class _ProcessStream(ByteStream):
    """Standard input and output of a program as one stream; closing it ends the program."""

    process: Process

    async def receive(self, max_bytes: int = 65536) -> bytes:
        assert self.process.stdout is not None  # noqa: S101 - a pipe was asked for
        return await self.process.stdout.receive(max_bytes)

    async def send(self, item: bytes) -> None:
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        await self.process.stdin.send(item)

    async def send_eof(self) -> None:
        assert self.process.stdin is not None  # noqa: S101 - a pipe was asked for
        await self.process.stdin.aclose()

    async def aclose(self) -> None:
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.aclose()
