"""`ls`, `stop`, `rm`, `gc`: the chats of the data root, by the daemon or without one."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from rich.table import Table

from mcp_sandbox.cli.options import AsJson, Socket, console, load, socket_path
from mcp_sandbox.cli.words import show_bytes, since
from mcp_sandbox.config import Config
from mcp_sandbox.daemon.client import JsonObject, ask
from mcp_sandbox.errors import NoDaemon
from mcp_sandbox.workspace.retention import in_words

Chat = Annotated[
    str,
    typer.Argument(metavar="CHAT", help="A chat: its id, user/id, or how one of them begins."),
]


def answer(socket: Path | None, command: str, arguments: JsonObject) -> JsonObject:
    """Return the daemon's answer; where none runs and none was named, this process's own."""
    try:
        return ask(socket_path(socket), command, **arguments)
    except NoDaemon:
        if socket is not None:
            raise
    return anyio.run(_alone, load(None).config, command, arguments)


async def _alone(config: Config, command: str, arguments: JsonObject) -> JsonObject:
    """Do in this process what the daemon would do; no sandbox is made."""
    from mcp_sandbox.app import LateManager
    from mcp_sandbox.daemon.chats import Chats

    config = config.model_copy(update={"pool": config.pool.model_copy(update={"size": 0})})
    async with anyio.create_task_group() as tasks:
        done = await Chats(LateManager(config, tasks).open).commands[command](arguments)
        tasks.cancel_scope.cancel()
    return done


def ls(as_json: AsJson = False, socket: Socket = None) -> None:
    """List all chats, the latest used first."""
    chats = answer(socket, "list", {"sizes": True})["chats"]
    chats.sort(key=lambda row: str(row["last_used"]), reverse=True)
    if as_json:
        print(json.dumps(chats))
    elif chats:
        console().print(_table(chats))
    else:
        print("no chats yet")


def _table(chats: list[dict[str, Any]]) -> Table:
    table = Table("chat", "state", "size", "backend", "last used", "calls", "background", box=None)
    now = datetime.now(UTC)
    for row in chats:
        table.add_row(
            f"{row['user']}/{row['chat']}",
            "files only" if row["state"] == "warm" else row["state"],
            "?" if row.get("size") is None else show_bytes(row["size"]),
            row["backend"],
            since(datetime.fromisoformat(row["last_used"]), now),
            str(row["busy"] or ""),
            str(row["background"] or ""),
        )
    return table


def stop(chat: Chat, socket: Socket = None) -> None:
    """End the sandbox of a chat with all that runs in it; its files stay."""
    done = answer(socket, "stop", {"chat": chat})
    what = "its sandbox has ended" if done["stopped"] else "it had no sandbox"
    print(f"{done['chat']}: {what}; its files stay")


def rm(
    chat: Chat,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    socket: Socket = None,
) -> None:
    """Remove a chat: end its sandbox, and move its files to the trash for a day."""
    name = answer(socket, "find", {"chat": chat})["chat"]
    if not yes:
        typer.confirm(f"Remove the chat {name} with all its files?", abort=True)
    answer(socket, "remove", {"chat": name})
    print(f"{name}: removed; its files are in the trash for 24 hours")


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would go, and why.")
    ] = False,
    as_json: AsJson = False,
    socket: Socket = None,
) -> None:
    """Clean up now what the schedule would: chats unused for long, and the old trash."""
    report = answer(socket, "collect", {"dry_run": dry_run})
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
    done = f"{len(items)} {'would go' if dry_run else 'gone'}, {total}" if items else ""
    left = answer(socket, "list", {"sizes": True})["chats"]
    size = show_bytes(sum(row.get("size") or 0 for row in left))
    due = {item["what"] for item in items}
    idle = [row for row in left if not row["sandbox"] and f"{row['user']}/{row['chat']}" not in due]
    used = [datetime.fromisoformat(row["last_used"]) for row in idle]
    keep_s, now = load(None).config.workspace.retention, datetime.now(UTC)
    due_s = max(0.0, keep_s - (now - min(used, default=now)).total_seconds())
    soon = f"; the next would go in {in_words(due_s)}" if used and keep_s else ""
    print(f"{done or 'nothing to remove'}; {len(left)} chat{'s'[: len(left) != 1]}, {size}{soon}")
