"""`mcp-sandbox demo`: calls from an MCP client into a sandbox and back, as a transcript.

It starts the real server twice for one chat, as an MCP client does, and leaves nothing running.
"""

import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from textwrap import indent

import anyio
import yaml
from mcp import Client, StdioServerParameters
from mcp.types import CallToolResult, ImageContent, TextContent
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mcp_sandbox.app.chats import choose_backend, on_trial, open_manager, temporary_data
from mcp_sandbox.backends.base import Backend
from mcp_sandbox.config import Config, server_variables
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.models import ChatId

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


Step = tuple[str, str, Mapping[str, object]]
"""One call of the transcript: why it is made, the tool, its arguments."""

_WORK: Sequence[Step] = (
    ("Run Python", "run_code", {"code": _PRIMES}),
    ("Run bash", "run_code", {"language": "bash", "code": "uname -sm; nproc; pwd"}),
    ("Write a file", "write_file", {"path": "app/main.py", "content": _APP}),
    ("Run a command", "exec", {"command": "python3 app/main.py"}),
    ("Edit the file", "edit_file", {"path": "app/main.py", "old": '"world"', "new": '"sandbox"'}),
    ("Run it again", "exec", {"command": "python3 app/main.py | tee app/output.txt"}),
    ("List files", "list_files", {"depth": 2}),
    ("Search files", "grep", {"pattern": "def |Hello", "path": "app"}),
    ("Try to get out", "run_code", {"code": _FENCE}),
)
_SORT = "console.log([3, 1, 2].sort().join(' < '))"
_JAVASCRIPT: Step = ("Run JavaScript", "run_code", {"language": "javascript", "code": _SORT})
_LATER: Sequence[Step] = (
    ("Read what the first server wrote", "read_file", {"path": "app/output.txt"}),
    ("And run it", "exec", {"command": "python3 app/main.py; ls -l app"}),
)

_STORE = ("ENDPOINT", "BUCKET", "ACCESS_KEY", "SECRET_KEY")


async def show(config: Config, console: Console, config_file: Path | None, keep: bool) -> None:
    """Show a chat's computer at work; its files stay only with `keep`.

    Raises OperatorError: no backend works here, or a step failed.
    """
    async with AsyncExitStack() as stack:
        if not keep:
            folder = await stack.enter_async_context(temporary_data())
            config = on_trial(config, folder)
        backend, why = await stack.enter_async_context(choose_backend(config))
        console.print(Text(f"Backend: {backend.name}", style="bold"))
        console.print(f"  {why}")
        console.print(f"  Files: {config.data_dir}\n")
        arguments = ["-m", "mcp_sandbox", "stdio", "--chat", CHAT]
        arguments += ["--data", str(config.data_dir), "--backend", backend.name]
        arguments += [] if config_file is None else ["--config", str(config_file)]
        # Nothing of the demo goes to an object store, unless files must be in one.
        store = {f"MCP_SANDBOX_STORAGE__{name}": "" for name in _STORE} | {"S3_ENDPOINT": ""}
        if backend.holds_files:
            store = {"MCP_SANDBOX_STORAGE__PREFIX": config.storage.prefix}
        server = StdioServerParameters(
            command=sys.executable, args=arguments, env={**server_variables(), **store}
        )
        try:
            async with _connected(server, console, "Start a server and connect a client") as client:
                await _work(client, console)
            title = "Start another server for the same chat: its files are there again"
            async with _connected(server, console, title) as client:
                for step in _LATER:
                    await _call(client, console, step)
        finally:
            with anyio.CancelScope(shield=True):
                await _remove(backend, config, keep=keep)
    console.print(Text("Done: nothing was left running.", style="bold green"))


async def _remove(backend: Backend, config: Config, *, keep: bool) -> None:
    """Remove what an interrupted server has left, and nothing of other chats."""
    for info in await backend.running():
        if info.labels.get("chat") != CHAT:
            continue
        if not backend.holds_files:
            await backend.destroy(info.id)
        elif not keep:
            async with open_manager(config) as manager:
                await manager.remove(ChatId(info.labels["user"], CHAT))


async def _work(client: Client, console: Console) -> None:
    tools = [tool.name for tool in (await client.list_tools()).tools]
    console.print(f"  {len(tools)} tools: {', '.join(tools)}\n")
    found = await _call(client, console, ("A new chat's computer", "sandbox_info", {}))
    programs = (found.structured_content or {}).get("programs", {})
    for step in (_WORK[0], *((_JAVASCRIPT,) if "node" in programs else ()), *_WORK[1:]):
        await _call(client, console, step)


@asynccontextmanager
async def _connected(
    server: StdioServerParameters, console: Console, title: str
) -> AsyncGenerator[Client]:
    started = time.perf_counter()
    async with Client(server) as client:
        _headline(console, title, started, style="bold cyan")
        yield client


async def _call(client: Client, console: Console, step: Step) -> CallToolResult:
    started, (title, tool, arguments) = time.perf_counter(), step
    result = await client.call_tool(tool, dict(arguments))
    _headline(console, f"{title}: {tool}", started, style="bold")
    answer = _text(result)
    if result.is_error:
        raise OperatorError(f"the step {title!r} failed: {answer}")
    for name, value in arguments.items():
        text = str(value).rstrip("\n")
        printed = (
            f"  {name}: {text}" if "\n" not in text else indent(text, "  | ", lambda _line: True)
        )
        console.print(Text(_shortened(printed), style="dim"), soft_wrap=True)
    console.print(Panel(Text(_shortened(answer.expandtabs())), expand=False))
    return result


def _headline(console: Console, title: str, started: float, *, style: str) -> None:
    took_ms = (time.perf_counter() - started) * 1000
    console.print(Text.assemble((title, style), (f"  {took_ms:.0f} ms", "green")))


def _text(result: CallToolResult) -> str:
    if result.structured_content is not None:
        return yaml.safe_dump(result.structured_content, sort_keys=False, width=100)
    parts = (
        content.text if isinstance(content, TextContent) else f"[{content.mime_type}]"
        for content in result.content
        if isinstance(content, TextContent | ImageContent)
    )
    return "\n".join(parts)


def _shortened(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    more = [f"… {len(lines) - _LINES_SHOWN} more lines"] if len(lines) > _LINES_SHOWN else []
    return "\n".join([*lines[:_LINES_SHOWN], *more])
