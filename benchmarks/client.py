"""A tool call as an MCP client sees it, through the real server on stdio."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from mcp import Client, StdioServerParameters

from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import CHAT, Failed, open_place
from mcp_sandbox.config import Config, server_variables

NOOP = StdioServerParameters(command=sys.executable, args=["-m", "benchmarks.noop_server"])


@asynccontextmanager
async def connect(config: Config) -> AsyncGenerator[Client]:
    """Start `mcp-sandbox stdio` and connect the SDK's client to it."""
    arguments = ["-m", "mcp_sandbox", "stdio", "--user", CHAT.user, "--chat", CHAT.chat]
    arguments += ["--data", str(config.data_dir), "--backend", config.backend]
    server = StdioServerParameters(
        command=sys.executable, args=arguments, env=dict(server_variables())
    )
    async with Client(server) as client:
        yield client


async def call(client: Client, tool: str, **arguments: object) -> None:
    """Call a tool, and refuse a result that is an error."""
    result = await client.call_tool(tool, arguments)
    if result.is_error:
        raise Failed(f"{tool} answered: {result.content}")


async def _exec_against_noop(pairs: int) -> Measured:
    async with (
        open_place("docker") as place,
        connect(place.config) as client,
        Client(NOOP) as other,
    ):
        ours = partial(call, client, "exec", command="true")
        theirs = partial(call, other, "noop", command="true")
        return await times_slower(clocked(ours), clocked(theirs), pairs)


ROWS = (
    Row(
        "mcp",
        "MCP client: tool exec, command true, docker",
        "MCP client: a tool that does nothing",
        Goal(2),
        _exec_against_noop,
        pairs=200,
    ),
)
