"""`mcp-sandbox demo`: the whole way from an MCP client into a sandbox and back, as a transcript.

It starts the real server twice for one chat, as an MCP client does, and leaves nothing running.
"""

import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import anyio
import yaml
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, ImageContent, TextContent
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mcp_sandbox.app import choose_backend, temporary_data
from mcp_sandbox.backends.base import Backend
from mcp_sandbox.config import Config, server_variables
from mcp_sandbox.errors import OperatorError

CHAT = "demo"
_LINES_SHOWN = 40
_PRIMES = """\
def primes(limit):
    sieve = bytearray([1]) * limit
    for n in range(2, int(limit ** 0.5) + 1):
        if sieve[n]:
            sieve[n * n::n] = bytes(len(range(n * n, limit, n)))
    return [n for n in range(2, limit) if sieve[n]]

print(sum(primes(1_000_000)))
"""
_APP = """\
def greet(name):
    return f"Hello, {name}!"

print(greet("world"))
"""
_FENCE = """\
import os, socket
print("user id", os.getuid())
try:
    socket.create_connection(("192.0.2.1", 80), timeout=2)
except OSError as exc:
    print("network:", exc)
"""


@dataclass(frozen=True)
class Step:
    """One tool call of the transcript, and why it is made."""

    title: str
    tool: str
    arguments: Mapping[str, object]


_WORK = (
    Step("Run Python", "run_code", {"code": _PRIMES}),
    Step("Run bash", "run_code", {"language": "bash", "code": "uname -sm; nproc; pwd"}),
    Step("Write a file", "write_file", {"path": "app/main.py", "content": _APP}),
    Step("Run a command", "exec", {"command": "python3 app/main.py"}),
    Step(
        "Edit the file", "edit_file", {"path": "app/main.py", "old": '"world"', "new": '"sandbox"'}
    ),
    Step("Run it again", "exec", {"command": "python3 app/main.py | tee app/output.txt"}),
    Step("List files", "list_files", {"depth": 2}),
    Step("Search files", "grep", {"pattern": "def |Hello", "path": "app"}),
    Step("Try to get out", "run_code", {"code": _FENCE}),
)
_JAVASCRIPT = Step(
    "Run JavaScript",
    "run_code",
    {"language": "javascript", "code": "console.log([3, 1, 2].sort().join(' < '))"},
)
_LATER = (
    Step("Read what the first server wrote", "read_file", {"path": "app/output.txt"}),
    Step("And run it", "exec", {"command": "python3 app/main.py; ls -l app"}),
)


async def show_in_temporary_data(
    config: Config, console: Console, config_file: Path | None = None
) -> None:
    """Show a chat's computer at work, and keep none of its files."""
    async with temporary_data() as folder:
        await show(config.model_copy(update={"data_dir": folder}), console, config_file)


async def show(config: Config, console: Console, config_file: Path | None = None) -> None:
    """Show a chat's computer at work.

    Raises:
        OperatorError: no backend works here, or a step failed.
    """
    async with choose_backend(config) as choice:
        backend = choice.backend
        console.print(Text(f"Backend: {backend.name}", style="bold"))
        console.print(f"  {choice.reason}")
        console.print(f"  Files: {config.data_dir}\n")
        server = _server(config, backend.name, config_file)
        try:
            await _first_server(server, console)
            await _second_server(server, console)
        finally:
            with anyio.CancelScope(shield=True):
                await _tidy(backend)
    console.print(Text("Done: nothing was left running.", style="bold green"))


def _server(config: Config, backend: str, config_file: Path | None) -> StdioServerParameters:
    arguments = ["-m", "mcp_sandbox", "stdio", "--chat", CHAT]
    arguments += ["--data", str(config.data_dir), "--backend", backend]
    if config_file is not None:
        arguments += ["--config", str(config_file)]
    return StdioServerParameters(
        command=sys.executable, args=arguments, env=dict(server_variables())
    )


async def _first_server(server: StdioServerParameters, console: Console) -> None:
    async with _connected(server, console, "Start a server and connect a client") as client:
        tools = [tool.name for tool in (await client.list_tools()).tools]
        console.print(f"  {len(tools)} tools: {', '.join(tools)}\n")
        found = await _call(client, console, Step("A new chat's computer", "sandbox_info", {}))
        programs = (found.structured_content or {}).get("programs", {})
        steps = (_WORK[0], *((_JAVASCRIPT,) if "node" in programs else ()), *_WORK[1:])
        await _play(client, console, steps)


async def _second_server(server: StdioServerParameters, console: Console) -> None:
    title = "Start another server for the same chat: its files are there again"
    async with _connected(server, console, title) as client:
        await _play(client, console, _LATER)


@asynccontextmanager
async def _connected(
    server: StdioServerParameters, console: Console, title: str
) -> AsyncGenerator[Client]:
    started = time.perf_counter()
    async with Client(server) as client:
        _headline(console, title, started, style="bold cyan")
        yield client


async def _play(client: Client, console: Console, steps: Sequence[Step]) -> None:
    for step in steps:
        await _call(client, console, step)


async def _call(client: Client, console: Console, step: Step) -> CallToolResult:
    started = time.perf_counter()
    result = await client.call_tool(step.tool, dict(step.arguments))
    _headline(console, f"{step.title}: {step.tool}", started, style="bold")
    answer = _text(result)
    if result.is_error:
        raise OperatorError(f"the step {step.title!r} failed: {answer}")
    for name, value in step.arguments.items():
        text = str(value).rstrip("\n")
        shown = (
            f"  {name}: {text}" if "\n" not in text else indent(text, "  | ", lambda _line: True)
        )
        console.print(Text(_shortened(shown), style="dim"), soft_wrap=True)
    console.print(Panel(Text(_shortened(answer.expandtabs())), expand=False))
    return result


def _headline(console: Console, title: str, started: float, *, style: str) -> None:
    took_ms = (time.perf_counter() - started) * 1000
    console.print(Text.assemble((title, style), (f"  {took_ms:.0f} ms", "green")))


def _text(result: CallToolResult) -> str:
    if result.structured_content is not None:
        return yaml.safe_dump(result.structured_content, sort_keys=False, width=100)
    parts = list[str]()
    for content in result.content:
        if isinstance(content, TextContent):
            parts.append(content.text)
        elif isinstance(content, ImageContent):
            parts.append(f"[{content.mime_type}]")
    return "\n".join(parts)


def _shortened(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    more = [f"… {len(lines) - _LINES_SHOWN} more lines"] if len(lines) > _LINES_SHOWN else []
    return "\n".join([*lines[:_LINES_SHOWN], *more])


async def _tidy(backend: Backend) -> None:
    """Remove what a server that was cut off has left, and nobody else's."""
    for info in await backend.running():
        if info.labels.get("chat") == CHAT:
            await backend.destroy(info.id)
