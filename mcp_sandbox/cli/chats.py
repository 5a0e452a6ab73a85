"""`ls`, `stop`, `rm`, `gc`: the chats that the daemon knows."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from mcp_sandbox.cli.options import AsJson, Socket, console, socket_path
from mcp_sandbox.cli.words import show_bytes, since
from mcp_sandbox.daemon.client import ask

Chat = Annotated[
    str,
    typer.Argument(metavar="CHAT", help="A chat: its id, user/id, or how one of them begins."),
]


def ls(as_json: AsJson = False, socket: Socket = None) -> None:
    """List all chats, the latest used first."""
    chats = ask(socket_path(socket), "list")["chats"]
    chats.sort(key=lambda row: str(row["last_used"]), reverse=True)
    if as_json:
        print(json.dumps(chats))
    elif chats:
        console().print(_table(chats))
    else:
        print("no chats yet")


def _table(chats: list[dict[str, Any]]) -> Table:
    table = Table("chat", "state", "backend", "last used", "calls", "background", box=None)
    now = datetime.now(UTC)
    for row in chats:
        table.add_row(
            f"{row['user']}/{row['chat']}",
            row["state"],
            row["backend"],
            since(datetime.fromisoformat(row["last_used"]), now),
            str(row["busy"] or ""),
            str(row["background"] or ""),
        )
    return table


def stop(chat: Chat, socket: Socket = None) -> None:
    """End the sandbox of a chat with all that runs in it; its files stay."""
    done = ask(socket_path(socket), "stop", chat=chat)
    what = "its sandbox has ended" if done["stopped"] else "it had no sandbox"
    print(f"{done['chat']}: {what}; its files stay")


def rm(
    chat: Chat,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    socket: Socket = None,
) -> None:
    """Remove a chat: end its sandbox, and move its files to the trash for a day."""
    path = socket_path(socket)
    found = ask(path, "find", chat=chat)
    name = f"{found['user']}/{found['chat']}"
    if not yes:
        typer.confirm(f"Remove the chat {name} with all its files?", abort=True)
    ask(path, "remove", chat=name)
    print(f"{name}: removed; its files are in the trash for 24 hours")


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would go, and why.")
    ] = False,
    as_json: AsJson = False,
    socket: Socket = None,
) -> None:
    """Clean up now what the schedule would: chats unused for long, and the old trash."""
    report = ask(socket_path(socket), "collect", dry_run=dry_run)
    items = report["items"]
    if as_json:
        print(json.dumps(report))
        return
    if items:
        table = Table("what", "name", "size", "why", box=None)
        for item in items:
            table.add_row(item["kind"], item["what"], show_bytes(item["size_bytes"]), item["why"])
        console().print(table)
    total = show_bytes(sum(item["size_bytes"] for item in items))
    print(f"{len(items)} {'would go' if dry_run else 'gone'}, {total}")
