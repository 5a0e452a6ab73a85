"""The tools of the host that a program inside may call: for each run an MCP server of its own.

They are functions of Python, programs, and tools of other MCP servers, which begin and end with
the run. What is offered is named one by one; our own tools are never among them. The caller is
hostile: what comes is bounded and checked against the tool's schema before anything sees it.
"""

import json
import logging
import os
import pkgutil
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream, ByteSendStream, ByteStream, ObjectStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from jsonschema import SchemaError, ValidationError
from jsonschema.validators import validator_for
from mcp import Client, MCPError, types
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.server.mcpserver.tools import Tool as FunctionTool
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import SessionMessage
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool
from referencing import Registry

from mcp_sandbox.agents.events import HostTool
from mcp_sandbox.agents.run import Tell
from mcp_sandbox.config import BridgeConfig, BridgeServerConfig
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.server.transports import Overlong, find_request_id, read_line, serve_lines
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

HOST = "host"
"""The name under which an assistant names functions and programs of the configuration."""
MOST_REQUEST, MOST_REPLY = 1 << 20, 4 << 20
_AT_ONCE, _WAITING, _PER_S, _CONNECTIONS = 4, 32, 20, 8
_CALL_S, _END_S = 60.0, 2.0
_FAILURES = (MCPError, OSError, ValueError, anyio.ClosedResourceError, UnexpectedToolError)


@dataclass(frozen=True)
class _HostTool:
    described: Tool
    call: Callable[[dict[str, Any]], Awaitable[CallToolResult]]
    limit_s: float = _CALL_S


class ToolBridge:
    """The tools of one run, which the log calls `of`; `tell` gets each call as an event."""

    def __init__(self, tools: Sequence[_HostTool], of: str, tell: Tell) -> None:
        self._tools = {each.described.name: each for each in tools}
        self.names = [*self._tools]
        self._of, self._tell = of, tell
        self._connections = anyio.Semaphore(_CONNECTIONS)
        self._room = anyio.CapacityLimiter(_AT_ONCE)
        self._latest = deque[float](maxlen=_PER_S)
        self._core = Server[Any]("host", on_list_tools=self._list, on_call_tool=self._answer)

    async def handle(self, stream: ByteStream) -> None:
        async with self._connections:
            await serve_lines(self._core, stream, stream, most_bytes=MOST_REQUEST)

    async def _list(self, _: ServerRequestContext[Any], __: object) -> ListToolsResult:
        return ListToolsResult(tools=[each.described for each in self._tools.values()])

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
            await self._tell([HostTool(asked.name, round(took_ms), failed)])
        return result

    async def _called(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        if (tool := self._tools.get(name)) is None:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"There is no tool {clip(show_name(name), 60)!r}: there are {known}.")
        schema = tool.described.input_schema
        try:
            # Without a registry it would fetch what a schema refers to.
            validator_for(schema)(schema, registry=Registry()).validate(arguments)
        except ValidationError as exc:
            raise ToolError(f"{exc.json_path}: {clip(exc.message, 300)}") from exc
        if self._room.statistics().tasks_waiting >= _WAITING:
            raise ToolError(f"{_WAITING} calls are waiting already: wait for their answers.")
        async with self._room:
            if len(self._latest) == _PER_S:
                await anyio.sleep_until(self._latest[0] + 1)
            self._latest.append(anyio.current_time())
            try:
                with anyio.fail_after(tool.limit_s):
                    result = await tool.call(arguments)
            except TimeoutError:
                raise ToolError(f"{name} did not answer within {tool.limit_s:g} s.") from None
            except _FAILURES as exc:
                # Its words are the host's, and may say more than the sandbox should know.
                logger.warning("the host's tool %s failed: %r", name, exc.__cause__ or exc)
                raise ToolError(f"{name} failed; the host's log says why.") from exc
        if (size := len(result.model_dump_json())) > MOST_REPLY:
            raise ToolError(f"The answer has {size:,} bytes; at most {MOST_REPLY:,} can pass.")
        return result


@asynccontextmanager
async def open_bridge(
    settings: BridgeConfig,
    wanted: Mapping[str, Collection[str]],
    functions: Sequence[Callable[..., Any]] = (),
    *,
    of: str,
    tell: Tell,
) -> AsyncGenerator[ToolBridge]:
    """Start what a run may use: `functions`, and of each server, or HOST, the tools that it names.

    Raises OperatorError: a server does not start, or has no such tool.
    """
    # Clients are task groups, one in the other.
    with sole_error():
        async with AsyncExitStack() as stack:
            tools = [*map(_function, functions)]
            for name, asked in wanted.items():
                if name == HOST:
                    offered = await to_thread.run_sync(_own, settings)
                elif name in settings.servers:
                    offered = await _served(stack, name, settings.servers[name])
                else:
                    known = ", ".join([HOST, *settings.servers])
                    raise OperatorError(f"no tools of {name} can be offered: bridge knows {known}")
                if missing := sorted({*asked} - offered.keys()):
                    known = ", ".join(offered) or "none"
                    raise OperatorError(f"{name} has no tool {', '.join(missing)}: it has {known}")
                tools += [offered[each] for each in asked]
            yield ToolBridge(tools, of, tell)


def _function(function: Callable[..., Any]) -> _HostTool:
    tool = FunctionTool.from_function(function, structured_output=False)
    described = Tool(name=tool.name, description=tool.description, input_schema=tool.parameters)
    return _HostTool(described, partial(tool.run, context=Context(), convert_result=True))


def _own(settings: BridgeConfig) -> dict[str, _HostTool]:
    """Return the functions and programs of the configuration. Blocks."""
    tools = list[_HostTool]()
    for name in settings.python:
        try:
            tools.append(_function(pkgutil.resolve_name(name)))
        except (ImportError, AttributeError, ValueError) as exc:
            raise OperatorError(f"bridge.python: {name} cannot be imported: {exc}") from exc
    for name, each in settings.processes.items():
        described = Tool(name=name, description=each.about, input_schema={"type": "object"})
        tools.append(_HostTool(described, partial(_run_json_program, each.command), each.timeout))
    return {each.described.name: each for each in tools}


async def _served(
    stack: AsyncExitStack, server: str, settings: BridgeServerConfig
) -> dict[str, _HostTool]:
    """Return the tools of an MCP server, which runs as long as the stack."""
    try:
        with sole_error():
            if settings.url:
                # It reads the authorities of this machine.
                http = await to_thread.run_sync(create_mcp_http_client)
                await stack.enter_async_context(http)
                place: Any = streamable_http_client(settings.url, http_client=http)
            else:
                running = _process(settings.command, settings.env, _END_S)
                _, stdin, stdout = await stack.enter_async_context(running)
                place = nullcontext([_MessageStream(stdin, stdout)] * 2)
            client = await stack.enter_async_context(Client(place, read_timeout_seconds=_CALL_S))
            found = (await client.list_tools()).tools
            for each in found:
                validator_for(each.input_schema).check_schema(each.input_schema)
    except (MCPError, OSError, SchemaError, ExceptionGroup) as exc:
        see = "see whether that is an MCP server"
        raise OperatorError(f"bridge.servers.{server} cannot be used: {exc}; {see}") from exc
    return {
        each.name: _HostTool(
            each.model_copy(update={"name": f"{server}__{each.name}"}),
            partial(client.call_tool, each.name),
        )
        for each in found
    }


async def _run_json_program(command: Sequence[str], arguments: dict[str, Any]) -> CallToolResult:
    output = b""
    async with _process(command, {}) as (process, stdin, stdout):
        with suppress(anyio.BrokenResourceError):
            await stdin.send(json.dumps(arguments).encode())
        await stdin.aclose()
        async for piece in stdout:
            output += piece
            if len(output) > MOST_REPLY:
                raise ValueError(f"it writes more than {MOST_REPLY:,} bytes")
        if code := await process.wait():
            raise ValueError(f"it ended with {code}")
    text = json.dumps(json.loads(output), ensure_ascii=False)
    return CallToolResult(content=[TextContent(text=text)])


@asynccontextmanager
async def _process(
    command: Sequence[str], env: Mapping[str, str], grace_s: float = 0
) -> AsyncGenerator[tuple[Process, ByteSendStream, ByteReceiveStream]]:
    """Run a program beside the block, with stderr in our log; its tree ends with the block."""
    process = await anyio.open_process(
        command, stderr=sys.stderr, env=get_default_environment() | {**env}, start_new_session=True
    )
    try:
        assert process.stdin  # noqa: S101 - both are pipes
        assert process.stdout  # noqa: S101
        yield process, process.stdin, process.stdout
        await process.stdin.aclose()
        with anyio.move_on_after(grace_s):
            await process.wait()
    finally:
        # Also what the program has left behind.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()


class _MessageStream(ObjectStream[Any]):
    """What an MCP server hears and says; a line that is too long is an error of its call.

    The SDK's `stdio_client` keeps a line of any length, and leaves running what a server has left.
    """

    def __init__(self, stdin: ByteSendStream, stdout: ByteReceiveStream) -> None:
        self._stdin, self._lines = stdin, BufferedByteReceiveStream(stdout)

    async def send(self, item: SessionMessage) -> None:
        line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
        await self._stdin.send(line.encode() + b"\n")

    async def receive(self) -> SessionMessage | Exception:
        line = await read_line(self._lines, MOST_REPLY)
        if line is None:
            raise anyio.EndOfStream
        if isinstance(line, Overlong):
            code, what = types.INTERNAL_ERROR, f"it says {line.size:,} bytes in one line"
            error = types.ErrorData(code=code, message=what)
            asked = find_request_id(line.head)
            return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=asked, error=error))
        try:
            return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError as exc:
            return exc

    async def send_eof(self) -> None:
        await self._stdin.aclose()

    aclose = send_eof
