"""Talks to E2B's library, whose errors come out as ours."""

import asyncio  # noqa: TID251 - the library's own tasks are asyncio's
import binascii
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import httpx
from anyio.abc import ByteStream
from connectrpc.errors import ConnectError
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    ServiceBusyException,
)

from mcp_sandbox import models
from mcp_sandbox.errors import BackendUnavailable, SandboxGone, Unreachable

Metadata = Mapping[str, str]
Listed = tuple[models.SandboxId, Metadata, models.SandboxState]
_REQUEST_S, _CREATE_S = 15.0, 60.0
# E2B's own answers to too many requests and to failures of its own are waited for this often.
_RETRIES = 2
_PIECE = 1024 * 1024
_CONNECTED = "connected\n"
_CONNECT_S = 8.0
_CLOSE_S = 5.0
# So often within its timeout the end of a sandbox that is held is put off.
_RENEWALS = 4
_OURS = (SandboxGone, BackendUnavailable)


class Client:
    """One account of E2B.

    Every method raises Unreachable: E2B does not answer, BackendUnavailable: it refuses, and
    SandboxGone: it knows nothing of the sandbox, or has ended it.
    """

    def __init__(self, domain: str, timeout_s: float, key: Callable[[], Awaitable[str]]) -> None:
        self._domain, self._timeout_s, self._key = domain or None, int(timeout_s), key

    async def create(self, template: str, metadata: Metadata, *, online: bool) -> "Box":
        """Make a sandbox; when its time is over, one of a chat is paused, and another ended."""
        with _translated("make a sandbox", _CREATE_S):
            box = await AsyncSandbox.create(
                template,
                timeout=self._timeout_s,
                metadata=dict(metadata),
                allow_internet_access=online,
                lifecycle={"on_timeout": "pause" if "chat" in metadata else "kill"},
                **await self._options(),
            )
            return Box(box, self._timeout_s, metadata)

    async def connect(self, sandbox_id: str) -> "Box":
        """Find a sandbox; a paused one goes on."""
        with _translated("reach a sandbox"):
            options = await self._options()
            box = await AsyncSandbox.connect(sandbox_id, timeout=self._timeout_s, **options)
            return Box(box, self._timeout_s, (await box.get_info()).metadata)

    async def pause(self, sandbox_id: str) -> None:
        with _translated("pause a sandbox"):
            await AsyncSandbox.pause(sandbox_id, **await self._options())

    async def kill(self, sandbox_id: str) -> None:
        with suppress(SandboxGone), _translated("end a sandbox"):
            await AsyncSandbox.kill(sandbox_id, **await self._options())

    async def list(self, metadata: Metadata) -> list[Listed]:
        """Return those with that metadata, with all that they have, and how each is."""
        found: list[Listed] = []
        with _translated("list the sandboxes"):
            query = SandboxQuery(metadata=dict(metadata))
            pages = AsyncSandbox.list(query, **await self._options())
            while pages.has_next:
                for info in await pages.next_items():
                    state: models.SandboxState = (
                        "paused" if info.state == SandboxState.PAUSED else "running"
                    )
                    found.append((models.SandboxId(info.sandbox_id), info.metadata, state))
        return found

    async def _options(self) -> dict[str, Any]:
        own = {"api_key": await self._key(), "request_timeout": _REQUEST_S, "retries": _RETRIES}
        return {**own, "domain": self._domain} if self._domain else own


class Box:
    """A running sandbox; its commands run as its root."""

    def __init__(self, box: AsyncSandbox, timeout_s: int, metadata: Metadata) -> None:
        self.id, self.metadata = models.SandboxId(box.sandbox_id), metadata
        self._box, self._timeout_s = box, timeout_s
        self._renewed_s = time.monotonic()

    async def write(self, path: str, data: bytes) -> None:
        with _translated("write a file"):
            await self._box.files.write(path, data, user="root")

    async def run(self, script: str) -> str:
        """Return what a script prints; raises BackendUnavailable with its errors if it fails."""
        with _translated("prepare a sandbox"):
            try:
                done = await self._box.commands.run(script, user="root", timeout=_REQUEST_S)
            except CommandExitException as exc:
                said = (exc.stderr or exc.stdout).strip()[-500:]
                raise BackendUnavailable(
                    f"the runner does not start in a sandbox of E2B ({said}): its template needs "
                    "Python 3.9 or newer, bash, tar and util-linux"
                ) from exc
            return done.stdout

    async def renew(self) -> None:
        """Put off the pause of a sandbox that is held, where it is time for it."""
        if time.monotonic() - self._renewed_s > self._timeout_s / _RENEWALS:
            self._renewed_s = time.monotonic()
            with _translated("put off the pause of a sandbox"):
                await self._box.set_timeout(self._timeout_s)

    async def open(self, relay: str) -> ByteStream:
        """Start the relay, and return the stream that it copies once it is connected."""
        stream = RelayStream(self)
        with _translated("connect to a sandbox"):
            stream.handle = await self._box.commands.run(
                relay,
                background=True,
                stdin=True,
                user="root",
                timeout=0,
                on_stdout=stream.take,
                on_stderr=stream.hear,
                retain_output=False,
            )
            stream.watch()
        try:
            with anyio.move_on_after(_CONNECT_S):
                await stream.settled.wait()
        finally:
            if not stream.connected:
                await stream.aclose()
        if not stream.connected:
            # The relay itself says so, or nobody knows.
            kind = SandboxGone if "relay:" in stream.said else Unreachable
            raise kind(f"the runner does not listen ({stream.said.strip() or 'no answer'})")
        return stream


class RelayStream(ByteStream):
    """A program's input as it is, and its output, which the library decodes, as lines of base64."""

    handle: Any

    def __init__(self, box: Box) -> None:
        self._box = box
        self._text, self._rest = "", b""
        self._give, self._pieces = anyio.create_memory_object_stream[bytes](16)
        self.settled, self.connected, self.said = anyio.Event(), False, ""

    def watch(self) -> None:
        """Have the stream end when the program does, or the connection to it."""
        # Nobody cancels this one: it would take the library's own task with it.
        self._ended = asyncio.ensure_future(self.handle.wait())
        self._ended.add_done_callback(self._end)

    def _end(self, ended: "asyncio.Future[object]") -> None:
        if not ended.cancelled() and (exc := ended.exception()) and not self.connected:
            self.said += str(exc)
        self._give.close()
        self.settled.set()

    async def take(self, text: str) -> None:
        """Take some output; while nobody reads it, no more is asked for."""
        *lines, self._text = (self._text + text).split("\n")
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            for line in lines:
                await self._give.send(binascii.a2b_base64(line))

    def hear(self, text: str) -> None:
        self.said = (self.said + text)[-500:]
        if not self.connected and _CONNECTED in self.said:
            self.connected = True
            self.settled.set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        self._rest = self._rest or await self._pieces.receive()
        data, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        try:
            for start in range(0, len(item), _PIECE):
                with _translated("send to a sandbox"):
                    await self.handle.send_stdin(bytes(item[start : start + _PIECE]))
            await self._box.renew()
        except _OURS as exc:
            raise anyio.BrokenResourceError from exc

    async def send_eof(self) -> None:
        """Do nothing: the runner ends a connection when the relay goes."""

    async def aclose(self) -> None:
        self._pieces.close()
        with (
            anyio.move_on_after(_CLOSE_S, shield=True),
            suppress(*_OURS),
            _translated("disconnect"),
        ):
            await self.handle.kill()
        await self.handle.disconnect()


@contextmanager
def _translated(doing: str, within_s: float = 0.0) -> Generator[None]:
    try:
        with anyio.fail_after(within_s or _REQUEST_S):
            yield
    except SandboxNotFoundException as exc:
        raise SandboxGone(
            f"E2B has ended this sandbox or knows none such ({exc}); the next call starts a new one"
        ) from exc
    except AuthenticationException as exc:
        raise BackendUnavailable(f"E2B refuses the key ({exc}): correct e2b.api_key") from exc
    except (SandboxException, ServiceBusyException, ConnectError, httpx.HTTPError, OSError) as exc:
        status = getattr(exc, "status_code", None)
        why = "has too many requests from us" if status == 429 else "could not"
        # Its proxy may also be late in knowing a sandbox, which holds files and must not go.
        is_refusal = status and status < 500 and status != 429
        raise (BackendUnavailable if is_refusal else Unreachable)(
            f"E2B {why} {doing} ({exc or type(exc).__name__}): try again in a moment; if it goes "
            "on, look at its status page, e2b.domain and the network"
        ) from exc
