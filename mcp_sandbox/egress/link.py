"""Messages with descriptors between a server and the process of its ways out.

They are framed like a runner's, on a pair of sockets that nobody else has. Either side tells, or
asks and gets an answer. What comes from that process is hostile: it reads what strangers send.
"""

import logging
import os
import socket
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runtime.call import JsonObject
from mcp_sandbox.runtime.channel import own_tasks

logger = logging.getLogger(__name__)

HUNG_UP = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, OSError)
Files = Sequence[socket.socket]
Told = Callable[[JsonObject, bytes, Files], None]
Asked = Callable[[JsonObject], Awaitable[JsonObject]]
BROKEN = (
    protocol.ProtocolError,
    *(LookupError, TypeError, ValueError, AttributeError, OverflowError),
)
"""What a message that is not as agreed raises, wherever it is read."""

_BATCH, _MOST_FILES, _AT_A_STRETCH, _MOST_ASKED = 256 << 10, 4, 16, 1024


async def carry(one: ByteStream, other: ByteStream) -> None:
    """Carry the bytes of two connections to each other, until either ends."""
    async with one, other, own_tasks() as tasks:
        tasks.start_soon(_forward, one, other)
        await _forward(other, one)


async def _forward(source: ByteStream, sink: ByteStream) -> None:
    with suppress(*HUNG_UP):
        async for data in source:
            await sink.send(data)
    with suppress(*HUNG_UP):
        await sink.send_eof()


class Rate:
    """So many at once, and so many a second."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._when_s = burst, 0.0

    def take(self) -> float:
        """Take one; return after how many seconds it may be used."""
        now_s = time.monotonic()
        more = (now_s - self._when_s) * self._per_s
        left = min(self._burst, self._left + more) - 1
        self._left, self._when_s = max(-self._burst, left), now_s
        return max(0.0, -self._left / self._per_s)


class Link:
    """One end. `told` gets what is told, `asked` answers; the messages are told in their order."""

    def __init__(self, sock: socket.socket, told: Told, asked: Asked) -> None:
        sock.setblocking(False)
        self._socket, self._told, self._asked = sock, told, asked
        self._decoder = protocol.Decoder()
        self._frames: Iterator[tuple[JsonObject, bytes]] = iter(())
        self._came = deque[socket.socket]()
        self._going = deque[tuple[bytes, Files]]()
        self._more = anyio.Event()
        self._answers: dict[int, JsonObject | None] = {}
        self._answered = anyio.Event()
        self._numbers, self._asking, self.ended = count(1), 0, False

    async def run(self) -> None:
        """Serve it until the other side has ended, or broken what is agreed."""
        try:
            async with own_tasks() as self._tasks:
                self._tasks.start_soon(self._write)
                while not self.ended:
                    if self.drain():
                        await checkpoint()
                    else:
                        await anyio.wait_readable(self._socket)
        finally:
            self.ended = True
            self._answered.set()
            for each in (
                self._socket,
                *self._came,
                *(file for _, fs in self._going for file in fs),
            ):
                each.close()

    def tell(self, kind: str, *files: socket.socket, payload: bytes = b"", **said: object) -> None:
        """Send a message, and descriptors, which are closed here."""
        if self.ended:
            for each in files:
                each.close()
            return
        self._going.append(
            (protocol.encode({"t": kind, "fds": len(files), **said}, payload), files)
        )
        self._flush()

    async def ask(self, kind: str, *, payload: bytes = b"", **said: object) -> JsonObject:
        """Return the answer. Raises BrokenResourceError: the other side ends before it answers."""
        number = next(self._numbers)
        self._answers[number] = None
        self.tell(kind, payload=payload, ask=number, **said)
        try:
            while (answer := self._answers[number]) is None:
                if self.ended:
                    raise anyio.BrokenResourceError
                await self._answered.wait()
            return answer
        finally:
            del self._answers[number]

    def drain(self, most: int = _AT_A_STRETCH) -> bool:
        """Take so much of what has come by now; return whether there may be more."""
        try:
            for _ in range(most):
                if self.ended:
                    break
                if frame := next(self._frames, None):
                    self._take(*frame)
                elif data := self._receive():
                    self._frames = self._decoder.feed(data)
                else:
                    self.close()
        except BlockingIOError:
            return False
        except ConnectionError:
            self.close()
        except (*BROKEN, OSError) as exc:
            logger.warning("the process of the ways out broke what is agreed: %.200s", exc)
            self.close()
        return not self.ended

    def close(self) -> None:
        """End it, as if the other side had."""
        self.ended = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> bytes:
        room = socket.CMSG_SPACE(_MOST_FILES * array("i").itemsize)
        data, ancillary, flags, _ = self._socket.recvmsg(_BATCH, room, socket.MSG_CMSG_CLOEXEC)
        is_broken = bool(flags & socket.MSG_CTRUNC)
        for each in (number for *_, numbers in ancillary for number in array("i", numbers)):
            try:
                self._came.append(socket.socket(fileno=each))
                self._came[-1].setblocking(False)
            except OSError:
                is_broken = True
                os.close(each)
        if is_broken or len(self._came) > 2 * _MOST_FILES:
            raise protocol.ProtocolError("descriptors that a message may not have")
        return data

    def _take(self, header: JsonObject, payload: bytes) -> None:
        if header["t"] == "answer":
            if header["of"] in self._answers:
                self._answers[header["of"]] = header
                before, self._answered = self._answered, anyio.Event()
                before.set()
            return
        if not 0 <= header["fds"] <= min(_MOST_FILES, len(self._came)):
            raise protocol.ProtocolError("a message without its descriptors")
        files = [self._came.popleft() for _ in range(header["fds"])]
        if "ask" not in header:
            self._told(header, payload, files)
            return
        self._asking += 1
        # Answers that it does not read count, too.
        if self._asking + len(self._going) > _MOST_ASKED:
            raise protocol.ProtocolError("too much is asked at once")
        self._tasks.start_soon(self._answer, int(header["ask"]), header)

    async def _answer(self, number: int, header: JsonObject) -> None:
        try:
            # An answer that is too long for a message is none.
            self.tell("answer", of=number, **(await self._asked(header)))
        except (*BROKEN, SandboxError) as exc:
            why = f"it cannot be answered: {str(exc)[:200]}"
            self.tell("answer", of=number, refused=why, verdict="failed")
        self._asking -= 1

    def _flush(self) -> None:
        while self._going and not self.ended:
            data, files = self._going[0]
            numbers = array("i", [each.fileno() for each in files])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if files else []
            try:
                sent = self._socket.sendmsg([data], rights)
            except BlockingIOError:
                self._more.set()
                return
            except OSError:
                # The reader learns of the end.
                return
            for each in files:
                each.close()
            self._going.popleft()
            if sent < len(data):
                self._going.appendleft((data[sent:], ()))

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            await anyio.wait_writable(self._socket)
            self._more = anyio.Event()
            self._flush()
