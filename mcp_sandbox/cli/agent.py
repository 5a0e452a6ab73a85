"""`agent`: a whole coding agent at work in the computer of a chat."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import anyio
import typer

from mcp_sandbox.cli.options import (
    LEADS,
    AsJson,
    Group,
    flag,
    given,
    load,
    printable,
    span,
    started,
    tell,
)
from mcp_sandbox.daemon.control_client import JsonObject, ask_daemon
from mcp_sandbox.errors import NoDaemon

group = Group("Let a coding agent work in a chat's computer.", *LEADS)
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
        float | None, given("--timeout", "TIME", "The run is ended after this.", parser=span)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Let an agent do what the prompt says. Exit code 0 done, 1 failed, 124 its time was over."""
    text, code = sys.stdin.read() if prompt == "-" else prompt, 1

    def show(event: JsonObject) -> None:
        nonlocal code
        if event["type"] == "Completion":
            late = event["reason"].startswith("timeout:")
            code = _TIME_OVER if late else int(event["is_error"])
        print(json.dumps(event), flush=True) if as_json else _show(event)

    how = {"assistant": assistant, "connector": connector, "chat": chat, "resume": resume}
    _talk(show, text, {**how, "timeout_s": timeout_s})
    raise typer.Exit(code)


@group.command(name="list")
def list_(as_json: AsJson = False) -> None:
    """List the assistants."""
    from mcp_sandbox.agents.assistants import list_assistants

    found = list_assistants(load().config.agents.folders, "local")
    tell(found, "\n".join(found) or "no assistants: set agents.folders", as_json=as_json)


@group.command()
def check(
    assistant: Annotated[str, typer.Argument(metavar="ASSISTANT", help="How it behaves.")] = "",
    connector: Connector = "",
    as_json: AsJson = False,
) -> None:
    """Try whether an agent has all that it needs: program, model service, tools of the host."""
    found = anyio.run(_check, assistant, connector)
    lines = (f"{name:<10} {printable(each)}" for name, each in found.items())
    tell(found, "\n".join(lines), as_json=as_json)


async def _check(assistant: str, connector: str) -> Mapping[str, str]:
    from mcp_sandbox.app.agents import open_agent
    from mcp_sandbox.app.chats import on_trial, temporary_data

    async with temporary_data() as folder:
        config = on_trial(load().config, folder)
        async with open_agent(assistant, connector=connector, config=config) as agent:
            return await agent.check()


def _talk(show: Callable[[JsonObject], None], prompt: str, how: JsonObject) -> None:
    """Have the daemon do it, and show what it tells."""
    data = prompt.encode(errors="replace")
    with started() as path:
        try:
            ask_daemon(path, "agent", on_event=show, data=data, **how, size=len(data))
        except NoDaemon as exc:
            raise NoDaemon(
                "the daemon ended, and the run with it; `--resume` goes on with its conversation"
            ) from exc
        except KeyboardInterrupt:
            raise typer.Exit(1) from None


def _show(event: Mapping[str, Any]) -> None:
    """Print the agent's words to stdout, all else to stderr."""
    match event:
        case {"type": "Text", "text": text}:
            print(printable(text, "\n\t"), end="", flush=True)
        case {"type": "Completion"}:
            print(flush=True)
            if event["is_error"]:
                print(f"error: {printable(event['reason'])}", file=sys.stderr)
        case {"type": "ToolCall", "name": name, "arguments": arguments}:
            short = json.dumps(arguments, ensure_ascii=False)[:_SHOWN]
            print(f"\n[{printable(name)} {printable(short)}]", file=sys.stderr)
        case {"type": "Notice" | "Progress", "text": text} if text:
            print(f"[{printable(text)}]", file=sys.stderr)
