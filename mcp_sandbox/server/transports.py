"""How MCP messages come and go: one JSON object a line, over stdin and stdout or any byte stream.

The line transport answers what it cannot parse instead of dropping it, bounds a line's length,
and can be cancelled while it waits for input, which a thread that reads stdin cannot.
"""

import logging
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.lines import MAX_LINE_BYTES, Lines, Overlong, find_request_id
from mcp_sandbox.server.server import SandboxServer
from mcp_sandbox.server.stdio import claimed_stdio

logger = logging.getLogger(__name__)

_LEAVE = (signal.SIGINT, signal.SIGTERM)
MOST_UNANSWERED = 256
"""Requests of one client at a time; each may hold a result that the client does not take."""
_TOO_MANY = -32000
GRACE_S = 1.0
"""How long the requests of a client that closed its side may take to be answered still."""


async def serve_stdio(server: SandboxServer) -> None:
    """Serve the client on stdin and stdout until it closes stdin.

    Meanwhile file descriptor 0 is empty and 1 is stderr, so that nothing but JSON-RPC gets out.
    """
    with claimed_stdio() as (receive, send):
        await serve_lines(server, receive, send)


async def serve_lines(
    server: SandboxServer,
    receive: ByteReceiveStream,
    send: ByteSendStream,
    *,
    leaving: anyio.Event | None = None,
) -> None:
    """Serve one client over a byte stream until it closes its side; that cancels its calls.

    Once `leaving` is set, return as soon as all its requests are answered.
    """
    to_server, from_client = anyio.create_memory_object_stream[SessionMessage | Exception]()
    to_client, from_server = anyio.create_memory_object_stream[SessionMessage]()
    wire = _Wire(send)
    with sole_error():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.read, Lines(receive), to_server)
            tasks.start_soon(wire.write, from_server)
            async with anyio.create_task_group() as serving:
                if leaving:
                    serving.start_soon(wire.leave, leaving, tasks.cancel_scope)
                await server.serve(from_client, to_client)
                serving.cancel_scope.cancel()
            # A client that does not read must not keep the server from ending.
            tasks.cancel_scope.deadline = anyio.current_time() + GRACE_S


@asynccontextmanager
async def stopped_by_signals() -> AsyncGenerator[None]:
    """Cancel the body at SIGINT or SIGTERM; from then on further signals do nothing.

    Clients send one after the other; the second must not cut short how the process ends.
    """
    with sole_error():
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as body:
                await tasks.start(_cancel_on_signal, body)
                yield
            tasks.cancel_scope.cancel()
    if body.cancel_called:
        for number in _LEAVE:
            signal.signal(number, signal.SIG_IGN)


async def _cancel_on_signal(
    body: anyio.CancelScope, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(*_LEAVE) as signals:
        task_status.started()
        async for _ in signals:
            body.cancel()


class _Wire:
    """One client's line stream, and which of its requests are unanswered.

    A request to be told of changes lasts as long as the client likes, so nobody waits for it.
    """

    def __init__(self, send: ByteSendStream) -> None:
        self._send = send
        self._lock = anyio.Lock()
        self._unanswered: set[RequestId] = set()
        self._listening: set[RequestId] = set()
        self._answered = anyio.Event()

    async def read(
        self, lines: Lines, to_server: MemoryObjectSendStream[SessionMessage | Exception]
    ) -> None:
        """Hand the client's messages to the server until the client closes its side."""
        async with to_server:
            while (line := await lines.next()) is not None:
                message = await self._parsed(line)
                if message is not None and await self._has_room_for(message):
                    self._note_request(message)
                    await to_server.send(SessionMessage(message))
            # `printf … | mcp-sandbox stdio` closes its side before it has read the answers.
            with anyio.move_on_after(GRACE_S):
                await self._wait_until_answered()

    async def write(self, from_server: MemoryObjectReceiveStream[SessionMessage]) -> None:
        """Send the server's messages to the client."""
        async with from_server:
            async for item in from_server:
                await self._send_message(item.message)
                self._note_answer(item.message)

    async def leave(self, leaving: anyio.Event, serving: anyio.CancelScope) -> None:
        """End the serving after `leaving`, between two requests of the client."""
        await leaving.wait()
        await self._wait_until_answered()
        serving.cancel()

    async def _parsed(self, line: bytes | Overlong) -> JSONRPCMessage | None:
        if isinstance(line, Overlong):
            problem = f"a message may have {MAX_LINE_BYTES:,} bytes, this one had {line.size:,}"
            await self._refuse(find_request_id(line.head), INVALID_REQUEST, problem)
            return None
        try:
            return jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            if first["type"] == "json_invalid":
                await self._refuse(find_request_id(line), PARSE_ERROR, first["msg"])
            else:
                problem = "not a JSON-RPC 2.0 message"
                await self._refuse(find_request_id(line), INVALID_REQUEST, problem)
            return None

    async def _has_room_for(self, message: JSONRPCMessage) -> bool:
        """Refuse one request too many, which also waits for a client that does not read."""
        open_requests = len(self._unanswered) + len(self._listening)
        if not isinstance(message, JSONRPCRequest) or open_requests < MOST_UNANSWERED:
            return True
        problem = f"{MOST_UNANSWERED} requests are unanswered: wait for answers before you ask"
        await self._refuse(message.id, _TOO_MANY, problem)
        return False

    async def _refuse(self, request_id: RequestId | None, code: int, problem: str) -> None:
        logger.warning("refused a message of the client: %s", problem)
        error = ErrorData(code=code, message=problem)
        await self._send_message(JSONRPCError(jsonrpc="2.0", id=request_id, error=error))

    async def _send_message(self, message: JSONRPCMessage) -> None:
        data = _encoded(message)
        async with self._lock:
            try:
                await self._send.send(data)
            except anyio.BrokenResourceError:
                logger.debug("the client reads no more: dropped a message to it")

    def _note_request(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCRequest):
            is_stream = message.method == "subscriptions/listen"
            (self._listening if is_stream else self._unanswered).add(message.id)
        elif isinstance(message, JSONRPCNotification) and message.params:
            # A cancelled request is never answered.
            self._settle(message.params.get("requestId"))

    def _note_answer(self, message: JSONRPCMessage) -> None:
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            self._settle(message.id)

    def _settle(self, request_id: object) -> None:
        if isinstance(request_id, str | int):
            self._unanswered.discard(request_id)
            self._listening.discard(request_id)
            self._answered.set()

    async def _wait_until_answered(self) -> None:
        while self._unanswered:
            self._answered = anyio.Event()
            await self._answered.wait()


def _encoded(message: JSONRPCMessage) -> bytes:
    try:
        text = message.model_dump_json(by_alias=True, exclude_unset=True)
    except ValueError:
        # A lone surrogate or another value that JSON cannot carry must not end the connection.
        logger.exception("a message to the client cannot be written as JSON")
        error = ErrorData(code=INTERNAL_ERROR, message="the answer cannot be written as JSON")
        request_id = message.id if isinstance(message, JSONRPCResponse) else None
        text = JSONRPCError(jsonrpc="2.0", id=request_id, error=error).model_dump_json()
    return text.encode() + b"\n"
