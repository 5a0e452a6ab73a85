"""The tools of the host that a program inside may call: for each run an MCP server of its own.

They are functions of Python, programs, and tools of other MCP servers, which begin and end with
the run. What is offered is named one by one; tools of ours are never among them. Whoever calls is
hostile: what comes is bounded and checked against the tool's schema before anything sees it.
"""

import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream, ByteSendStream, ByteStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from jsonschema import SchemaError, ValidationError
from jsonschema.validators import validator_for
from mcp import Client, MCPError
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.server import MCPServer, Server
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool as FunctionTool
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import SessionMessage
from mcp.types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    ErrorData,
    JSONRPCError,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    jsonrpc_message_adapter,
)
from referencing import Registry

from mcp_sandbox.config import BridgeConfig, BridgeProcessConfig, BridgeServerConfig
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.server.transports import Overlong, find_request_id, next_line, serve_lines
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

HOST = "host"
"""The name under which an assistant names functions and programs of the configuration."""
MOST_REQUEST, MOST_REPLY = 1 << 20, 4 << 20
_AT_ONCE, _WAITING, _PER_S, _CONNECTIONS = 4, 32, 20, 8
_CALL_S, _END_S = 60.0, 2.0

Call = Callable[[dict[str, Any]], Awaitable[CallToolResult]]
Told = Callable[[str, bool, float], Awaitable[None]]
"""Told the name of a tool that has been called, whether it failed, and ms."""


@dataclass(frozen=True)
class _HostTool:
    shown: Tool
    call: Call
    limit_s: float = _CALL_S


class Bridge:
    """The tools of one run, which is `of`: a word for the log."""

    def __init__(self, tools: Sequence[_HostTool], of: str, told: Told) -> None:
        self._tools = {each.shown.name: each for each in tools}
        self.names = [*self._tools]
        self._of = of
        self._told = told
        self._room = anyio.CapacityLimiter(_AT_ONCE)
        self._latest = deque[float](maxlen=_PER_S)
        self._connections = 0
        self._core = Server[Any]("host", on_list_tools=self._list, on_call_tool=self._answer)

    async def handle(self, stream: ByteStream) -> None:
        """Serve one connection from inside until it ends."""
        if self._connections >= _CONNECTIONS:
            return
        self._connections += 1
        try:
            await serve_lines(self._core, stream, stream, most_bytes=MOST_REQUEST)
        finally:
            self._connections -= 1

    async def _list(
        self, _: ServerRequestContext[Any], __: PaginatedRequestParams | None
    ) -> ListToolsResult:
        return ListToolsResult(tools=[each.shown for each in self._tools.values()])

    async def _answer(
        self, _: ServerRequestContext[Any], asked: CallToolRequestParams
    ) -> CallToolResult:
        began_s = anyio.current_time()
        try:
            result = await self._called(asked.name, asked.arguments or {})
        except ToolError as exc:
            result = CallToolResult(content=[TextContent(text=str(exc))], is_error=True)
        failed, took_ms = bool(result.is_error), round((anyio.current_time() - began_s) * 1000, 1)
        name = clip(show_name(asked.name), 60)
        event(logger, "host tool", of=self._of, tool=name, failed=failed, duration_ms=took_ms)
        if asked.name in self._tools:
            await self._told(asked.name, failed, took_ms)
        return result

    async def _called(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        if (tool := self._tools.get(name)) is None:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"There is no tool {clip(show_name(name), 60)!r}: there are {known}.")
        _check(arguments, tool.shown.input_schema)
        if self._room.statistics().tasks_waiting >= _WAITING:
            raise ToolError(f"{_WAITING} calls are waiting already: wait for their answers.")
        async with self._room:
            await self._pace()
            try:
                with anyio.fail_after(tool.limit_s):
                    result = await tool.call(arguments)
            except TimeoutError:
                raise ToolError(f"{name} did not answer within {tool.limit_s:g} s.") from None
            except (MCPError, OSError, ValueError, anyio.ClosedResourceError) as exc:
                # Its words are the host's, and may say more than the sandbox should know.
                logger.warning("the host's tool %s failed: %s", name, exc)
                raise ToolError(f"{name} failed; the host's log says why.") from exc
        if (size := len(result.model_dump_json())) > MOST_REPLY:
            raise ToolError(f"The answer has {size:,} bytes; at most {MOST_REPLY:,} can pass.")
        return result

    async def _pace(self) -> None:
        if len(self._latest) == _PER_S:
            await anyio.sleep_until(self._latest[0] + 1)
        self._latest.append(anyio.current_time())


@asynccontextmanager
async def open_bridge(
    settings: BridgeConfig,
    wanted: Mapping[str, Collection[str]],
    functions: Sequence[Callable[..., Any]] = (),
    *,
    of: str,
    told: Told,
) -> AsyncGenerator[Bridge]:
    """Start what a run may use: `functions`, and of each server, or HOST, the tools that it names.

    Raises:
        OperatorError: a server does not start, or has no such tool.
    """
    # Clients are task groups, one in the other.
    with sole_error():
        async with AsyncExitStack() as stack:
            tools = await _tools_of(stack, _local(functions))
            own = [_imported(each) for each in settings.python] if HOST in wanted else []
            at_host = [*await _tools_of(stack, _local(own)), *_programs(settings.processes)]
            for name, asked in wanted.items():
                if name == HOST:
                    tools += _chosen(at_host, HOST, asked)
                elif name in settings.servers:
                    client = await _remote(stack, settings.servers[name])
                    tools += _chosen(await _tools_of(stack, client, name), name, asked)
                else:
                    known = ", ".join([HOST, *settings.servers])
                    raise OperatorError(f"no tools of {name} can be offered: bridge knows {known}")
            yield Bridge(tools, of, told)


def _local(functions: Sequence[Callable[..., Any]]) -> Client | None:
    tools = [FunctionTool.from_function(each, structured_output=False) for each in functions]
    return Client(MCPServer("host", tools=tools, log_level="WARNING")) if tools else None


async def _remote(stack: AsyncExitStack, settings: BridgeServerConfig) -> Client:
    if settings.url:
        # It reads the authorities of this machine.
        http = await to_thread.run_sync(create_mcp_http_client)
        await stack.enter_async_context(http)
        place: Any = streamable_http_client(settings.url, http_client=http)
    else:
        place = _started(settings.command, settings.env)
    return Client(place, read_timeout_seconds=_CALL_S)


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as exc:
        raise OperatorError(f"bridge.python: {name} cannot be imported: {exc}") from exc
    return found


async def _tools_of(
    stack: AsyncExitStack, client: Client | None, server: str = ""
) -> list[_HostTool]:
    """The tools of an MCP server, which runs as long as the stack."""
    if client is None:
        return []
    try:
        await stack.enter_async_context(client)
        found = (await client.list_tools()).tools
        for each in found:
            validator_for(each.input_schema).check_schema(each.input_schema)
    except (MCPError, OSError, SchemaError, ExceptionGroup) as exc:
        raise OperatorError(f"bridge.servers.{server} cannot be used: {exc}") from exc
    return [
        _HostTool(
            each.model_copy(update={"name": f"{server}__{each.name}" if server else each.name}),
            partial(client.call_tool, each.name),
        )
        for each in found
    ]


def _programs(settings: Mapping[str, BridgeProcessConfig]) -> list[_HostTool]:
    return [
        _HostTool(
            Tool(name=name, description=each.about, input_schema={"type": "object"}),
            partial(_said_by, each.command),
            each.timeout,
        )
        for name, each in settings.items()
    ]


def _chosen(tools: Sequence[_HostTool], server: str, asked: Collection[str]) -> list[_HostTool]:
    """Those that are asked for by the names that their server gives them."""
    known = {each.shown.name.removeprefix(f"{server}__"): each for each in tools}
    if missing := sorted({*asked} - known.keys()):
        raise OperatorError(
            f"{server} has no tool {', '.join(missing)}: it has {', '.join(known) or 'none'}"
        )
    return [known[each] for each in asked]


async def _said_by(command: Sequence[str], arguments: dict[str, Any]) -> CallToolResult:
    """Run a program that reads JSON and writes JSON. Raises OSError, ValueError."""
    said = b""
    async with _process(command, {}) as (process, stdin, stdout):
        with suppress(anyio.BrokenResourceError):
            await stdin.send(json.dumps(arguments).encode())
        await stdin.aclose()
        async for piece in stdout:
            said += piece
            if len(said) > MOST_REPLY:
                raise ValueError(f"it writes more than {MOST_REPLY:,} bytes")
        if code := await process.wait():
            raise ValueError(f"it ended with {code}")
    text = TextContent(type="text", text=json.dumps(json.loads(said), ensure_ascii=False))
    return CallToolResult(content=[text])


@asynccontextmanager
async def _process(
    command: Sequence[str], env: Mapping[str, str]
) -> AsyncGenerator[tuple[Process, ByteSendStream, ByteReceiveStream]]:
    """Run a program beside the block, with stderr in our log; its tree ends with the block."""
    process = await anyio.open_process(
        command, stderr=sys.stderr, env=get_default_environment() | {**env}, start_new_session=True
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin  # noqa: S101 - both are pipes
    assert stdout  # noqa: S101
    try:
        yield process, stdin, stdout
    finally:
        with anyio.CancelScope(shield=True):
            await stdin.aclose()
            with anyio.move_on_after(_END_S):
                await process.wait()
            # Also what the program has left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()


@asynccontextmanager
async def _started(command: Sequence[str], env: Mapping[str, str]) -> AsyncGenerator[Any]:
    """The messages of an MCP server that speaks on stdin and stdout; no line is kept that is long.

    The transport of the SDK reads a line of any length.
    """
    async with _process(command, env) as (_, stdin, stdout):
        to_us, from_server = anyio.create_memory_object_stream[SessionMessage | Exception]()
        to_server, from_us = anyio.create_memory_object_stream[SessionMessage]()
        with to_us, from_server, to_server, from_us:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_read, BufferedByteReceiveStream(stdout), to_us)
                tasks.start_soon(_write, from_us, stdin)
                yield from_server, to_server
                tasks.cancel_scope.cancel()


async def _read(
    lines: BufferedByteReceiveStream, to_us: MemoryObjectSendStream[SessionMessage | Exception]
) -> None:
    with to_us:
        while (line := await next_line(lines, MOST_REPLY)) is not None:
            if isinstance(line, Overlong):
                problem = ErrorData(code=INTERNAL_ERROR, message=f"it has {line.size:,} bytes")
                asked = find_request_id(line.head)
                error = JSONRPCError(jsonrpc="2.0", id=asked, error=problem)
                await to_us.send(SessionMessage(error))
                continue
            try:
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError as exc:
                await to_us.send(exc)
            else:
                await to_us.send(SessionMessage(message))


async def _write(from_us: MemoryObjectReceiveStream[SessionMessage], lines: ByteSendStream) -> None:
    with from_us, suppress(anyio.BrokenResourceError):
        async for each in from_us:
            said = each.message.model_dump_json(by_alias=True, exclude_unset=True)
            await lines.send(said.encode() + b"\n")


def _check(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    try:
        # Without a registry it would fetch what a schema refers to.
        validator_for(schema)(schema, registry=Registry()).validate(arguments)
    except ValidationError as exc:
        raise ToolError(f"{exc.json_path}: {clip(exc.message, 300)}") from exc
