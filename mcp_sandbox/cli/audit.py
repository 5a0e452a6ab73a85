"""`audit`: what ran, and whether that record is as it was written. Asks no daemon."""

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mcp_sandbox.cli.options import AsJson, Group, given, load, printable, table, tell
from mcp_sandbox.models import ChatId

group = Group("See what ran, and prove that it was not changed.", "data", "config")
_SHOWN = 20
# Of a value its beginning and its end: of a script that gets arguments these say the most.
_HEAD, _TAIL = 80, 60
_HIDDEN = ("n", "time", "kind", "user", "chat", "digest", "prev", "hash")


@group.command()
def show(
    chat: Annotated[
        str | None, typer.Argument(help="Only this one, or how its name begins.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, help="How many of the last lines.")
    ] = 50,
    as_json: AsJson = False,
) -> None:
    """Show what was recorded, long values cut; with --json all of it, as it was written."""
    from mcp_sandbox.audit import log

    found = log.events(_folder(), chat and _find(chat))
    if as_json:
        for line, _ in found:
            print(line)
    else:
        rows = [_row(event) for _, event in deque(found, maxlen=lines)]
        output = table("line", "time", "chat", "event", "", rows=rows)
        tell(rows, output, as_json=False, none="nothing was recorded yet")


def _find(text: str) -> str:
    """Return the chat that is meant, among those of which something was recorded."""
    from mcp_sandbox.audit import log
    from mcp_sandbox.daemon.chats import find_chat

    named = {
        (each.get("user"), each["chat"]) for _, each in log.events(_folder()) if "chat" in each
    }
    known = [ChatId(str(user), str(chat)) for user, chat in named]
    return str(find_chat(text, known, "audit show"))


def _row(event: Mapping[str, Any]) -> tuple[str, ...]:
    shown = ((name, _shorten(str(each))) for name, each in event.items() if name not in _HIDDEN)
    rest = " ".join(f"{name}={value}" for name, value in shown)
    chat = f"{event.get('user')}/{event['chat']}" if "chat" in event else ""
    cells = event.get("n"), str(event.get("time"))[:19], chat, event.get("kind"), rest
    return tuple(printable(str(each), "") for each in cells)


def _shorten(text: str) -> str:
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]} … {text[-_TAIL:]}"


@group.command()
def verify(
    kept: Annotated[
        str | None, given("--head", "N:HASH", "A head that you have kept: it must be there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether lines were changed, removed, added or moved; exit code 1 if so."""
    from mcp_sandbox.audit import log
    from mcp_sandbox.audit.chain import ChainHead

    try:
        wanted = ChainHead.of(kept) if kept else None
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    check = log.verify(_folder(), wanted)
    remarks = [*check.problems[:_SHOWN], *check.notes[:_SHOWN]]
    if len(check.problems) > _SHOWN:
        remarks.append(f"and {len(check.problems) - _SHOWN} more")
    state = "are not as they were written" if check.problems else "are intact"
    summary = f"lines {check.first} to {check.head.n} {state}; head {check.head}"
    remarks.append(summary if check.first else "nothing was recorded yet")
    if check.first and not wanted:
        remarks.append("whether the end is missing only a head tells that you have kept: --head")
    found = {"intact": not check.problems, "first": check.first, "head": str(check.head)}
    found |= {"problems": check.problems, "notes": check.notes}
    tell(found, "\n".join(map(printable, remarks)), as_json=as_json)
    raise typer.Exit(1 if check.problems else 0)


@group.command()
def head(as_json: AsJson = False) -> None:
    """Print number and hash of the last line: kept elsewhere, they prove all lines before."""
    from mcp_sandbox.audit import log

    found = log.verify(_folder()).head
    tell({"n": found.n, "hash": found.hash}, str(found), as_json=as_json)


def _folder() -> Path:
    return load().config.data_dir / "sandbox" / "audit"
