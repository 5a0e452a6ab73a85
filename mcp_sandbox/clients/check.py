"""A first real call through what was written: proof that the client's first one will work too."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from httpx2 import AsyncClient, HTTPError
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CallToolResult, TextContent

from mcp_sandbox.clients.entry import CHAT_HEADER, TOKEN_VARIABLE, Entry
from mcp_sandbox.config import client_variable, server_variables
from mcp_sandbox.errors import OperatorError

CHAT = "first-call"
"""The chat of this call, so that it touches no other one's files."""
_PATIENCE_S = 120.0
_CALL = {"code": "import platform; print(6 * 7, platform.platform())"}


async def first_call(entry: Entry, folder: Path) -> str:
    """Use the entry as a client in `folder` would, run code in a sandbox, say how it went.

    Raises:
        OperatorError: there is no right answer; the message holds what came instead.
    """
    started = time.monotonic()
    reach = _over_http if "url" in entry else _over_stdio
    try:
        with anyio.fail_after(_PATIENCE_S):
            async with reach(entry, folder) as client:
                answer = _text(await client.call_tool("run_code", _CALL))
    except (MCPError, OSError, ExceptionGroup, anyio.BrokenResourceError, HTTPError) as exc:
        raise OperatorError(_advice(_cause(exc))) from exc
    if not answer.startswith("42 "):
        raise OperatorError(_advice(answer))
    took_s = time.monotonic() - started
    return f"print(6 * 7) in a sandbox answered {answer.split()[0]} after {took_s:.1f} s"


@asynccontextmanager
async def _over_stdio(entry: Entry, folder: Path) -> AsyncGenerator[Client]:
    arguments = entry["args"]
    assert isinstance(arguments, list)  # noqa: S101
    given = [argument.replace("${workspaceFolder}", str(folder)) for argument in arguments]
    if "--chat" not in given:
        given += ["--chat", CHAT]
    server = StdioServerParameters(
        command=str(entry["command"]),
        args=given,
        env={**get_default_environment(), **server_variables()},
        cwd=folder,
    )
    async with Client(server) as client:
        yield client


@asynccontextmanager
async def _over_http(entry: Entry, _folder: Path) -> AsyncGenerator[Client]:
    token = client_variable(TOKEN_VARIABLE)
    if not token:
        raise OperatorError(
            f"the file is written, but {TOKEN_VARIABLE} is not set, so no first call was made: set "
            "it to a token of `mcp-sandbox token add`, or give --no-check"
        )
    headers = {"Authorization": f"Bearer {token}", CHAT_HEADER: CHAT}
    async with (
        AsyncClient(headers=headers, timeout=_PATIENCE_S) as http,
        Client(streamable_http_client(str(entry["url"]), http_client=http)) as client,
    ):
        yield client


def _text(result: CallToolResult) -> str:
    return "\n".join(part.text for part in result.content if isinstance(part, TextContent))


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def _advice(what: str) -> str:
    return (
        f"the file is written, but a first call through it failed: {what}\n"
        "Run `mcp-sandbox doctor`, do what it says, and try again; `--undo` takes the file back"
    )
