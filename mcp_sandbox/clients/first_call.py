"""Makes a first real call through a client's entry, to prove that the client's will work."""

import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
from httpx2 import AsyncClient, HTTPError
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.types import TextContent

from mcp_sandbox.clients.files import CHAT_HEADER, TOKEN_VARIABLE, Entry
from mcp_sandbox.config import server_variables
from mcp_sandbox.config.environment import variable
from mcp_sandbox.errors import OperatorError

CHAT = "first-call"
"""The chat of this call, so that it touches no other chat's files."""
_PATIENCE_S = 120.0
_CALL = {"code": "import platform; print(6 * 7, platform.platform())"}


async def first_call(entry: Entry, folder: Path) -> str:
    """Start the entry as a client in `folder` would, run code in a sandbox, say how it went.

    Raises OperatorError: the answer is not the expected one; the message has what came.
    """
    started = time.monotonic()
    try:
        with anyio.fail_after(_PATIENCE_S):
            async with AsyncExitStack() as opened, await _client(entry, folder, opened) as client:
                result = await client.call_tool("run_code", _CALL)
    except (MCPError, OSError, ExceptionGroup, anyio.BrokenResourceError, HTTPError) as exc:
        cause: BaseException = exc
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        raise OperatorError(_advice(str(cause) or type(cause).__name__)) from exc
    answer = "\n".join(part.text for part in result.content if isinstance(part, TextContent))
    if not answer.startswith("42 "):
        raise OperatorError(_advice(answer))
    took_s = time.monotonic() - started
    return f"print(6 * 7) in a sandbox answered {answer.split()[0]} after {took_s:.1f} s"


async def _client(entry: Entry, folder: Path, opened: AsyncExitStack) -> Client:
    if "url" in entry:
        token = variable(TOKEN_VARIABLE)
        if not token:
            raise OperatorError(
                f"the file is written, but {TOKEN_VARIABLE} is not set, so no first call was made: "
                "set it to a token of `mcp-sandbox token add`, or give --no-check"
            )
        headers = {"Authorization": f"Bearer {token}", CHAT_HEADER: CHAT}
        http = AsyncClient(headers=headers, timeout=_PATIENCE_S)
        await opened.enter_async_context(http)
        return Client(streamable_http_client(str(entry["url"]), http_client=http))
    arguments = entry["args"]
    assert isinstance(arguments, list)  # noqa: S101
    given = [argument.replace("${workspaceFolder}", str(folder)) for argument in arguments]
    if "--chat" not in given:
        given += ["--chat", CHAT]
    env = {**get_default_environment(), **server_variables()}
    program = str(entry["command"])
    return Client(StdioServerParameters(command=program, args=given, env=env, cwd=folder))


def _advice(what: str) -> str:
    return (
        f"the file is written, but a first call through it failed: {what}\n"
        "Run `mcp-sandbox doctor`, do what it says, and try again; `--undo` takes the file back"
    )
