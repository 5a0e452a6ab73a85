"""`agent`: a whole coding agent at work in the computer of a chat."""

import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import anyio
import typer

from mcp_sandbox.cli.options import (
    AsJson,
    BackendOption,
    ConfigFile,
    Data,
    flag,
    given,
    lifetime,
    load,
    printable,
    tell,
)

group = typer.Typer(no_args_is_help=True, help="Let a coding agent work in a chat's computer.")
Connector = Annotated[str, given("-c", "CONNECTOR[/MODEL]", "Its model service.")]
_TIME_OVER, _SHOWN = 124, 200


@group.command()
def run(
    prompt: Annotated[str, typer.Argument(help="What is to be done; - reads it from stdin.")],
    assistant: Annotated[str, given("-a", "ASSISTANT", "How it behaves.")] = "",
    connector: Connector = "",
    chat: Annotated[str, given("--chat", "CHAT", "Whose computer it works in.")] = "demo",
    resume: Annotated[bool, flag("Go on with the chat's conversation.", "--resume")] = False,
    timeout_s: Annotated[
        float | None, given("--timeout", "TIME", "The run is ended after this.", parser=lifetime)
    ] = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
    data: Data = None,
    backend: BackendOption = None,
) -> None:
    """Let an agent do what the prompt says. Exit code 0 done, 1 failed, 124 its time was over."""
    from mcp_sandbox.assisting import open_agent

    text, code = sys.stdin.read() if prompt == "-" else prompt, 1
    settings = load(config, data, backend).config

    async def work() -> None:
        nonlocal code
        opening = open_agent(
            assistant, chat, connector=connector, timeout_s=timeout_s, config=settings
        )
        async with opening as agent:
            async for event in agent.stream([{"role": "user", "content": text}], resume=resume):
                told = {"type": type(event).__name__, **asdict(event)}
                if told["type"] == "Completion":
                    late = told["reason"].startswith("timeout:")
                    code = _TIME_OVER if late else int(told["is_error"])
                print(json.dumps(told), flush=True) if as_json else _show(told)

    _until_signal(work)
    raise typer.Exit(code)


@group.command(name="list")
def list_(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """List the assistants."""
    from mcp_sandbox.agents.assistants import assistants

    found = assistants(load(config).config.agents.folders, "local")
    tell(found, "\n".join(found) or "no assistants: set agents.folders", as_json=as_json)


@group.command()
def check(
    assistant: Annotated[str, typer.Argument(metavar="[ASSISTANT]")] = "",
    connector: Connector = "",
    as_json: AsJson = False,
    config: ConfigFile = None,
    data: Data = None,
    backend: BackendOption = None,
) -> None:
    """Try whether an agent has all that it needs: program, model service, tools of the host."""
    from mcp_sandbox.assisting import open_agent

    settings, found = load(config, data, backend).config, dict[str, str]()

    async def work() -> None:
        async with open_agent(assistant, "check", connector=connector, config=settings) as agent:
            found.update(await agent.check())

    _until_signal(work)
    lines = (f"{name:<10} {printable(each)}" for name, each in found.items())
    tell(found, "\n".join(lines), as_json=as_json)


def _until_signal(work: Callable[[], Awaitable[None]]) -> None:
    from mcp_sandbox.app import on_signals

    async def bounded() -> None:
        async with anyio.create_task_group() as tasks, on_signals(tasks.cancel_scope.cancel):
            await work()
            tasks.cancel_scope.cancel()

    anyio.run(bounded)


def _show(told: Mapping[str, Any]) -> None:
    """The agent's words go to stdout, all else to stderr."""
    match told:
        case {"type": "Text", "text": text}:
            print(printable(text, "\n\t"), end="", flush=True)
        case {"type": "Completion"}:
            print(flush=True)
            if told["is_error"]:
                print(f"error: {printable(told['reason'])}", file=sys.stderr)
        case {"type": "ToolCall", "name": name, "arguments": arguments}:
            short = json.dumps(arguments, ensure_ascii=False)[:_SHOWN]
            print(f"\n[{printable(name)} {printable(short)}]", file=sys.stderr)
        case {"type": "Notice" | "Progress", "text": text} if text:
            print(f"[{printable(text)}]", file=sys.stderr)
