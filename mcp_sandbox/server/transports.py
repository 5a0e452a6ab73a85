"""How MCP messages come and go: one JSON object a line, over stdin and stdout or any byte stream.

The line transport answers what it cannot parse instead of dropping it, bounds a line's length,
and can be cancelled while it waits for input, which a thread that reads stdin cannot.
"""

import fcntl
import json
import logging
import os
import re
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteReceiveStream, ByteSendStream, ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp import types
from mcp.server import Server
from mcp.shared.message import ServerMessageMetadata, SessionMessage
from pydantic import ValidationError

from mcp_sandbox.errors import TooLarge
from mcp_sandbox.json_size import check_json_size
from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.tool import ClientTimeout

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 32 << 20
"""Room for the largest content of write_file with every character escaped twice over."""
_HEAD_BYTES = 64 << 10
MOST_UNANSWERED = 256
"""Requests of one client at a time; each may hold a result that the client does not take."""
_TOO_MANY = -32000
_CANCELLED = "notifications/cancelled"
# "Request timed out" (Claude CLI), "timed out after 4s" (Python SDK); an interruption says else.
_TIMED_OUT = "timed out"
GRACE_S = 1.0
"""How long the requests of a client that closed its side may take to be answered still."""
# Whatever stands in a line is one of these, so that their number bounds the work. The closing quote
# is optional so that a string without end is taken whole, and only once.
_TOKEN = re.compile(rb'("(?:[^"\\]++|\\.)*+"?|[{}\[\]:,]|-?\d++)|[^"{}\[\]:,\d-]++|-', re.DOTALL)
# A list of numbers can have millions, and everybody else waits while they are looked at.
_MOST_TOKENS = 50_000
# A pipe or socket that is ready for writing takes this much without blocking.
_ATOMIC_BYTES = 4096


async def serve_stdio(server: Server[Any]) -> None:
    """Serve the client on stdin and stdout until it closes stdin.

    Meanwhile file descriptor 0 is empty and 1 is stderr, so that nothing but JSON-RPC gets out.
    """
    with _claimed_stdio() as stream:
        await serve_lines(server, stream, stream)


async def serve_lines(
    server: Server[Any],
    receive: ByteReceiveStream,
    send: ByteSendStream,
    *,
    leaving: anyio.Event | None = None,
    most_bytes: int = MAX_LINE_BYTES,
) -> None:
    """Serve one client over a byte stream until it closes its side; that cancels its calls.

    Once `leaving` is set, return as soon as all its requests are answered. No message of the
    client may be longer than `most_bytes`.
    """
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage | Exception]()
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage]()
    wire = _ClientStream(send, most_bytes)
    with sole_error():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.read, BufferedByteReceiveStream(receive), to_server)
            tasks.start_soon(wire.write, from_server)
            async with anyio.create_task_group() as serving:
                if leaving:
                    serving.start_soon(wire.leave, leaving, tasks.cancel_scope)
                how = server.create_initialization_options()
                await server.run(from_client, to_client, how)
                serving.cancel_scope.cancel()
            # A client that does not read must not keep the server from ending.
            tasks.cancel_scope.deadline = anyio.current_time() + GRACE_S


@dataclass(frozen=True)
class Overlong:
    """A line that was thrown away: its beginning and how long it was."""

    head: bytes
    size: int


async def read_line(
    stream: BufferedByteReceiveStream, max_bytes: int = MAX_LINE_BYTES
) -> bytes | Overlong | None:
    """Return the next line that is not blank, without its end; None when the stream has ended."""
    head, dropped = b"", 0
    while True:
        try:
            line = await stream.receive_until(b"\n", max_bytes + 1)
        except anyio.DelimiterNotFound:
            head = head or stream.buffer[:_HEAD_BYTES]
            dropped += len(await stream.receive(2 * max_bytes + _HEAD_BYTES))
        except (anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return None
        else:
            if dropped:
                return Overlong(head, dropped + len(line))
            if line.strip():
                return line


def find_request_id(line: bytes) -> str | int | None:
    """Return the id of a request that no parser takes, so that it can be refused by its id.

    Looks at the top level only and takes no notice of anything that is wrong elsewhere. Behind
    more than 50,000 tokens it is not found.
    """
    depth = 0
    recent: list[bytes] = []
    for match in islice(_TOKEN.finditer(line), _MOST_TOKENS):
        token = match[1]
        if token is None:
            continue
        if depth == 1 and recent[-2:] == [b'"id"', b":"]:
            with suppress(ValueError):
                value = json.loads(token)
                return value if isinstance(value, str | int) else None
            return None
        depth += (token in b"{[") - (token in b"}]")
        recent = [*recent[-1:], token]
    return None


class _ClientStream:
    """One client's line stream, and which of its requests are unanswered.

    A request to be told of changes lasts as long as the client likes, so it is not waited for.
    """

    def __init__(self, send: ByteSendStream, most_bytes: int) -> None:
        self._send = send
        self._most_bytes = most_bytes
        self._lock = anyio.Lock()
        # Whether its answer is waited for.
        self._open: dict[types.RequestId, bool] = {}
        # Of the tool calls under way.
        self._patience: dict[types.RequestId | None, ClientTimeout] = {}
        self._answered = anyio.Event()

    async def read(
        self,
        lines: BufferedByteReceiveStream,
        to_server: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Hand the client's messages to the server until the client closes its side."""
        async with to_server:
            while (line := await read_line(lines, self._most_bytes)) is not None:
                message = await self._parsed(line)
                if message is None or not await self._has_room_for(message):
                    continue
                self._note_request(message)
                if not self._is_lost_patience(message):
                    await to_server.send(SessionMessage(message, self._about(message)))
            # `printf … | mcp-sandbox stdio` closes its side before it has read the answers.
            with anyio.move_on_after(GRACE_S):
                await self._wait_until_answered()

    async def write(self, from_server: MemoryObjectReceiveStream[SessionMessage]) -> None:
        async with from_server:
            async for item in from_server:
                if not isinstance(item.message, types.JSONRPCResponse | types.JSONRPCError):
                    await self._send_message(item.message)
                    continue
                patience = self._patience.pop(item.message.id, None)
                if patience is None or not patience.lost:
                    await self._send_message(item.message)
                self._settle(item.message.id)

    async def leave(self, leaving: anyio.Event, serving: anyio.CancelScope) -> None:
        """End the serving after `leaving`, between two requests of the client."""
        await leaving.wait()
        await self._wait_until_answered()
        serving.cancel()

    async def _parsed(self, line: bytes | Overlong) -> types.JSONRPCMessage | None:
        if isinstance(line, Overlong):
            problem = f"a message may have {self._most_bytes:,} bytes, this one had {line.size:,}"
            await self._refuse(find_request_id(line.head), types.INVALID_REQUEST, problem)
            return None
        try:
            check_json_size(line)
            return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
        except TooLarge as exc:
            code, problem = types.INVALID_REQUEST, str(exc)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            code, problem = types.INVALID_REQUEST, "not a JSON-RPC 2.0 message"
            if first["type"] == "json_invalid":
                code, problem = types.PARSE_ERROR, first["msg"]
        await self._refuse(find_request_id(line), code, problem)
        return None

    async def _has_room_for(self, message: types.JSONRPCMessage) -> bool:
        """Refuse one request too many, which also waits for a client that does not read."""
        if not isinstance(message, types.JSONRPCRequest) or len(self._open) < MOST_UNANSWERED:
            return True
        problem = f"{MOST_UNANSWERED} requests are unanswered: wait for answers before you ask"
        await self._refuse(message.id, _TOO_MANY, problem)
        return False

    async def _refuse(self, request_id: types.RequestId | None, code: int, problem: str) -> None:
        logger.warning("refused a message of the client: %s", problem)
        error = types.ErrorData(code=code, message=problem)
        await self._send_message(types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error))

    async def _send_message(self, message: types.JSONRPCMessage) -> None:
        data = _encoded(message)
        async with self._lock:
            try:
                await self._send.send(data)
            except anyio.BrokenResourceError:
                logger.debug("the client reads no more: dropped a message to it")

    def _about(self, message: types.JSONRPCMessage) -> ServerMessageMetadata | None:
        """Return what the called tool learns of its client's patience."""
        self._patience.pop(_cancelled_by(message)[0], None)
        if not isinstance(message, types.JSONRPCRequest) or message.method != "tools/call":
            return None
        self._patience[message.id] = ClientTimeout()
        return ServerMessageMetadata(request_context=self._patience[message.id])

    def _is_lost_patience(self, message: types.JSONRPCMessage) -> bool:
        """Return whether a client gives up by its own time limit, and no person interrupted it.

        It has forgotten the call. What that has started goes on, and the agent is told of its end.
        """
        request_id, reason = _cancelled_by(message)
        patience = self._patience.get(request_id)
        if patience is None or _TIMED_OUT not in reason.lower():
            return False
        patience.lost = True
        patience.leave.cancel()
        return True

    def _note_request(self, message: types.JSONRPCMessage) -> None:
        if isinstance(message, types.JSONRPCRequest):
            self._open[message.id] = message.method != "subscriptions/listen"
        elif isinstance(message, types.JSONRPCNotification) and message.params:
            # A cancelled request is never answered.
            self._settle(message.params.get("requestId"))

    def _settle(self, request_id: object) -> None:
        if isinstance(request_id, str | int):
            self._open.pop(request_id, None)
            self._answered.set()

    async def _wait_until_answered(self) -> None:
        while any(self._open.values()):
            self._answered = anyio.Event()
            await self._answered.wait()


def _cancelled_by(message: types.JSONRPCMessage) -> tuple[types.RequestId, str]:
    """Return the request that a message says is cancelled, and why; "" if it says nothing such."""
    if not isinstance(message, types.JSONRPCNotification) or message.method != _CANCELLED:
        return "", ""
    params = message.params or {}
    request_id = params.get("requestId")
    if isinstance(request_id, bool) or not isinstance(request_id, str | int):
        request_id = ""
    return request_id, str(params.get("reason"))


def _encoded(message: types.JSONRPCMessage) -> bytes:
    try:
        text = message.model_dump_json(by_alias=True, exclude_unset=True)
    except ValueError:
        # A lone surrogate or another value that JSON cannot carry must not end the connection.
        logger.exception("a message to the client cannot be written as JSON")
        error = types.ErrorData(
            code=types.INTERNAL_ERROR, message="the answer cannot be written as JSON"
        )
        request_id = message.id if isinstance(message, types.JSONRPCResponse) else None
        text = types.JSONRPCError(jsonrpc="2.0", id=request_id, error=error).model_dump_json()
    return text.encode() + b"\n"


@contextmanager
def _claimed_stdio() -> Generator["_Descriptors"]:
    """Take stdin and stdout away from everybody else until the block is left."""
    reading = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3)
    writing = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        yield _Descriptors(reading, writing)
    finally:
        # What others printed meanwhile goes to stderr, not to the client.
        sys.stdout.flush()
        os.dup2(reading, 0)
        os.dup2(writing, 1)
        for descriptor in (reading, writing, nothing):
            os.close(descriptor)


class _Descriptors(ByteStream):
    """Reads and writes two file descriptors without a thread, so that waiting can be cancelled."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while True:
            await _ready(anyio.wait_readable, self._reading)
            try:
                data = os.read(self._reading, max_bytes)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise anyio.BrokenResourceError from exc
            if not data:
                raise anyio.EndOfStream
            return data

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            await _ready(anyio.wait_writable, self._writing)
            try:
                rest = rest[os.write(self._writing, rest[:_ATOMIC_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as exc:
                raise anyio.BrokenResourceError from exc

    async def send_eof(self) -> None:
        await anyio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


async def _ready(wait: Callable[[int], Awaitable[None]], descriptor: int) -> None:
    try:
        await wait(descriptor)
    except PermissionError:
        # Files and /dev/null cannot be waited for: they are always ready.
        await anyio.lowlevel.checkpoint()
