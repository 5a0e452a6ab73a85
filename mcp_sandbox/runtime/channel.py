"""Frames to and from one runner: many calls at once over one byte stream.

The channel proves the token, matches replies to calls, limits how much either side may send
(credit) and bounds everything it keeps. It trusts no byte of the other side: any violation of the
protocol ends the channel and every call under way.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.lowlevel import checkpoint

from mcp_sandbox import errors
from mcp_sandbox.models import Background, FolderIdentity, ProcessRow, RunnerHello
from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runtime.call import (
    CallResult,
    JsonObject,
    PendingCall,
    Sink,
    read_background,
    read_process_row,
    split_body,
)
from mcp_sandbox.telemetry.calls import span

HANDSHAKE_S = 10.0
# The runner always reads; if it does not take a frame within this time, it is stuck.
SEND_S = 10.0
# How long the runner may take to confirm that all processes of a cancelled call are dead.
CANCEL_S = 8.0
# A runner silent for SILENT_S during a call is pinged; without answer in ASKED_S it is given up.
SILENT_S = 3.0
ASKED_S = 8.0
_MOST_ENDED = 32
# After so many frames other tasks get a turn, so that many small frames do not delay them.
_AT_A_STRETCH = 64


@asynccontextmanager
async def own_tasks() -> AsyncGenerator[TaskGroup]:
    """Yield a group of tasks that end with the block; raise the first error of these or it."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


class Channel:
    """A connection to one runner; call `open` before any other method."""

    def __init__(
        self, stream: ByteStream, token: bytes, role: Literal["host", "doors"] = "host"
    ) -> None:
        """`doors`: used only for these, keeps no sandbox alive, and frames are not sealed."""
        self.hello = RunnerHello("", 0, 0)
        self.background = Background()
        self.on_background: Callable[[], object] = Background
        # Ended processes that no user or agent has been told of, by id.
        self.ended: dict[str, ProcessRow] = {}
        # It ended because the runner no longer answers.
        self.silent = False
        self.stream = stream
        self._token = token
        self._role = role
        self._decoder = protocol.Decoder()
        self._seal: protocol.Seal | None = None
        self._calls: dict[int, PendingCall] = {}
        self._last_id = 0
        self._send_lock = anyio.Lock()
        # Why no further call can succeed, or None.
        self.broken: errors.SandboxGone | None = None
        self._ended, self._busy = anyio.Event(), anyio.Event()
        self.wait_broken = self._ended.wait
        self._heard = 0

    async def open(self, tasks: TaskGroup) -> None:
        """Prove the token both ways, then read in `tasks` until the stream ends; as `prove`."""
        await self.prove()
        self.begin(tasks)

    def begin(self, tasks: TaskGroup) -> None:
        """Read in `tasks` until the stream ends; the token has been proved."""
        tasks.start_soon(self._read_frames)
        if self._role == "host":
            tasks.start_soon(self._watch)

    async def prove(self) -> None:
        """Prove the token both ways.

        Raises:
            SandboxGone: the other side is not the runner that was started with this token, or is
                one of another version.
        """
        try:
            with anyio.fail_after(HANDSHAKE_S):
                await self._shake_hands()
        except (TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError) as exc:
            await anyio.aclose_forcefully(self.stream)
            raise errors.SandboxGone("the sandbox hung up before it could be used") from exc
        except (protocol.ProtocolError, KeyError, TypeError, ValueError) as exc:
            await anyio.aclose_forcefully(self.stream)
            raise errors.SandboxGone(f"the sandbox is not the one that was started: {exc}") from exc
        except BaseException:
            await anyio.aclose_forcefully(self.stream)
            raise

    async def aclose(self) -> None:
        """Close the connection; calls under way fail, and the runner ends what they started."""
        if self._role == "doors":
            # A relay may end later: no client may get a door that this side has left.
            with suppress(errors.SandboxGone):
                for number in list(self._calls):
                    await self.send({"t": "cancel", "id": number})
        await self._break("the connection was closed")

    async def call(  # noqa: PLR0913 - a call's four ways to go on
        self,
        op: str,
        args: JsonObject,
        *,
        body: bytes | AsyncIterable[bytes] = b"",
        timeout_s: float = 60.0,
        sink: Sink | None = None,
        stop: anyio.CancelScope | None = None,
        leave: anyio.CancelScope | None = None,
    ) -> CallResult:
        """Send one call and wait for its end. It is never sent twice.

        `sink` gets (name, bytes) pieces as they come; without one they are dropped. Cancelling
        `stop` kills what the call started, and the call still returns its result; cancelling
        `leave` returns the result so far, and what the call started goes on.

        Raises:
            CallerError: the runner could not do it, and says why.
            SandboxGone: the connection broke, or no end came within `timeout_s`.
        """
        if self.broken:
            raise self.broken
        call = PendingCall(sink)
        number = self.number(call)
        try:
            with span(f"runtime {op}"), anyio.fail_after(timeout_s):
                header = {"t": "call", "id": number, "op": op, "args": args}
                if sink and stop and leave is None:
                    return await self._converse(number, call, header, body, stop)
                with stop or anyio.CancelScope():
                    if leave is None:
                        return await self._converse(number, call, header, body)
                    is_over = leave.deadline <= anyio.current_time()
                    # The body is sent completely, even if `leave` is cancelled meanwhile.
                    await self._begin(number, call, {**header, "release": is_over}, body)
                    with anyio.CancelScope() if is_over else leave:
                        return await self._result(number, call)
                    await self.send({"t": "release", "id": number}, b"")
                    return await self._result(number, call)
                await self._drop(number, call)
                return await self._result(number, call)
        except errors.TooLarge:
            # Nothing was sent, or the call has been answered.
            call.ended = True
            raise
        except TimeoutError as exc:
            gone = await self._give_up(f"the sandbox did not answer within {timeout_s:g} s")
            raise gone from exc
        finally:
            if not call.ended and not self.broken:
                await self._drop(number, call)
            self.forget(number)

    def number(self, call: PendingCall) -> int:
        """Return the number of a new call; until `forget` it gets the frames of this number."""
        self._last_id += 1
        self._calls[self._last_id] = call
        self._busy.set()
        return self._last_id

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    async def _converse(
        self,
        number: int,
        call: PendingCall,
        header: JsonObject,
        body: bytes | AsyncIterable[bytes],
        stop: anyio.CancelScope | None = None,
    ) -> CallResult:
        if not stop and isinstance(body, bytes) and len(body) <= protocol.WINDOW:
            await self._begin(number, call, header, body)
            return await self._result(number, call)
        async with own_tasks() as tasks:
            tasks.start_soon(self._begin, number, call, header, body)
            if stop:
                tasks.start_soon(self._heed, stop, number, call)
            return await self._result(number, call)

    async def _begin(
        self, number: int, call: PendingCall, header: JsonObject, body: bytes | AsyncIterable[bytes]
    ) -> None:
        """Send the body in frames as credit allows; the first has the complete code."""
        if isinstance(body, bytes) and len(body) <= protocol.WINDOW:
            await self.send(header, body)
            return
        if not isinstance(body, bytes):
            # The source may fail before it gives anything, and then the call is cancelled.
            await self.send({**header, "more": True}, b"")
            header = {"t": "data", "id": number}
        async for piece in split_body(body):
            while call.credit < len(piece) and not call.ended:
                await call.event.wait()
            if call.ended:
                return
            call.credit -= len(piece)
            await self.send({**header, "more": True}, piece)
            header = {"t": "data", "id": number}
        await self.send({**header, "more": False}, b"")

    async def _result(self, number: int, call: PendingCall) -> CallResult:
        while True:
            while call.pieces and call.sink:
                name, data = call.pieces.pop(0)
                await call.sink(name, data)
                # Data that came before the connection broke is still delivered.
                with suppress(errors.SandboxGone):
                    await self.send({"t": "credit", "id": number, "n": len(data)}, b"")
            if call.error:
                raise call.error
            if call.reply:
                return call.reply
            await call.event.wait()

    async def _heed(self, stop: anyio.CancelScope, number: int, call: PendingCall) -> None:
        """Stop the call once `stop` is cancelled; its sink still gets all output."""
        with stop:
            await anyio.sleep_forever()
        await self._cancel(number, call)

    async def _drop(self, number: int, call: PendingCall) -> None:
        call.keeps, call.pieces = False, []
        await self._cancel(number, call)

    async def _cancel(self, number: int, call: PendingCall) -> None:
        """Stop what the call started; return when the runner says that all of it is dead."""
        with anyio.move_on_after(CANCEL_S, shield=True):
            await self.send({"t": "cancel", "id": number}, b"")
            while not call.ended:
                await call.event.wait()
            return
        await self._give_up("the sandbox did not stop a cancelled call")

    async def send(self, header: JsonObject, payload: bytes | memoryview = b"") -> None:
        """Send one frame; it cannot be cancelled, as half a frame would break the channel."""
        try:
            with anyio.fail_after(SEND_S, shield=True):
                async with self._send_lock:
                    await self.stream.send(protocol.encode(header, payload, self._seal))
        except TimeoutError as exc:
            raise await self._give_up(f"the sandbox took nothing for {SEND_S:g} s") from exc
        except protocol.ProtocolError as exc:
            raise errors.TooLarge(f"the call is too large: {exc}") from exc
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            raise await self._break("the connection to the sandbox broke") from exc

    async def _give_up(self, reason: str) -> errors.SandboxGone:
        self.silent = self.silent or not self.broken
        return await self._break(reason)

    async def _break(self, reason: str) -> errors.SandboxGone:
        """End the channel and fail every call under way; return the error of the first break."""
        if not self.broken:
            self.broken = errors.SandboxGone(
                f"{reason}; what was under way is lost. The next call gets a new sandbox"
            )
            for call in self._calls.values():
                call.error = self.broken
                call.ended = True
                call.wake()
            self.on_background = Background
            self._ended.set()
            self._busy.set()
        with anyio.CancelScope(shield=True):
            await anyio.aclose_forcefully(self.stream)
        return self.broken

    async def _shake_hands(self) -> None:
        theirs = await self._one_frame()
        if theirs.get("version") != protocol.VERSION:
            raise protocol.ProtocolError(
                f"its runner speaks version {theirs.get('version')!r}, this server speaks "
                f"{protocol.VERSION}: build the image again with `mcp-sandbox images build`"
            )
        mine, nonce = os.urandom(protocol.NONCE_BYTES), bytes.fromhex(theirs["nonce"])
        proof = protocol.prove(self._token, self._role, nonce, mine)
        hello = {"t": "hello", "for": self._role, "nonce": mine.hex(), "proof": proof}
        await self.stream.send(protocol.encode(hello))
        welcome = await self._one_frame()
        expected = protocol.prove(self._token, "runner", mine, nonce)
        if not protocol.equals_secret(expected, welcome.get("proof")):
            raise protocol.ProtocolError(str(welcome.get("message", "it does not know the token")))
        if self._role == "doors":
            return
        self._decoder.seal = protocol.Seal(self._token, "to-host", nonce + mine)
        self._seal = protocol.Seal(self._token, "to-runner", nonce + mine)
        project = welcome.get("project")
        self.hello = RunnerHello(
            python=str(welcome["python"]),
            workspace_inode=int(welcome["workspace_inode"]),
            workspace_changed_ns=int(welcome["workspace_changed_ns"]),
            project=None if project is None else FolderIdentity(*map(int, project)),
            life=str(welcome.get("life", "")),
        )
        self.background = read_background(welcome)
        self._note_ended({"processes": welcome["ended"]})

    def _note_ended(self, message: JsonObject) -> None:
        for each in message["processes"][:_MOST_ENDED]:
            row = read_process_row(each)
            self.ended[row.id] = row
        while len(self.ended) > _MOST_ENDED:
            del self.ended[next(iter(self.ended))]

    async def _watch(self) -> None:
        """Check whether a runner that is silent during a call still answers."""
        while not self.broken:
            self._busy = anyio.Event()
            if not self._calls:
                await self._busy.wait()
            heard = self._heard
            with anyio.move_on_after(SILENT_S):
                await self._ended.wait()
            if self._calls and heard == self._heard and not self.broken:
                with suppress(errors.SandboxGone):
                    await self.call("ping", {}, timeout_s=ASKED_S)

    async def _one_frame(self) -> JsonObject:
        """Return the next frame of the handshake: only one may come before it is answered."""
        while True:
            for header, _ in self._decoder.feed(await self.stream.receive(65536)):
                return header

    async def _read_frames(self) -> None:
        # Data received together with the runner's welcome is already in the decoder.
        data = b""
        try:
            while True:
                for count, (header, payload) in enumerate(self._decoder.feed(data)):
                    self._take(header, payload)
                    if count % _AT_A_STRETCH == _AT_A_STRETCH - 1:
                        await checkpoint()
                data = await self.stream.receive(262144)
                self._heard += 1
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._break("the sandbox ended")
        except (protocol.ProtocolError, KeyError, TypeError, ValueError, OverflowError) as exc:
            await self._break(f"the sandbox sent something that is not its protocol ({exc})")
        finally:
            # If it is cancelled, too: nobody else reads what a call waits for.
            await self._break("the connection was closed")

    def _take(self, header: JsonObject, payload: bytes) -> None:
        call = self._calls.get(header.get("id", 0))
        if call is None:
            # The frame belongs to no call, or to one that has ended.
            if header["t"] == "broken":
                raise protocol.ProtocolError(str(header["message"])[:500])
            if header["t"] == "background":
                self.background = read_background(header)
                self.on_background()
            if header["t"] == "ended":
                self._note_ended(header)
            return
        call.take(header, payload)
