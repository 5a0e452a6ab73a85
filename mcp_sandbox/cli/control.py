"""What is asked of the daemon: itself, and the chats, for which it need not run."""

import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer

from mcp_sandbox.cli.options import (
    LEADS,
    AsJson,
    Group,
    Yes,
    agreed,
    by_person,
    console,
    flag,
    given,
    load,
    narrowed,
    printable,
    show_bytes,
    socket_path,
    table,
    tell,
    told,
    utc,
)
from mcp_sandbox.config import Config
from mcp_sandbox.config.environment import setting_variables, state_folder
from mcp_sandbox.daemon.control_client import JsonObject, ask_daemon, shut_down
from mcp_sandbox.errors import NoDaemon, OperatorError
from mcp_sandbox.workspace.retention import in_words

Chat = Annotated[str, typer.Argument(metavar="CHAT", help="Its id, user/id, or how one begins.")]
Chats = Annotated[list[str] | None, typer.Argument(metavar="CHAT", help="As `ls` shows them.")]
Everything = Annotated[bool, flag("All chats of this server.", "--all")]
Force = Annotated[bool, flag("Also a sandbox that alone holds files nobody can save.", "--force")]
_LOOKS = frozenset({"list", "find", "show", "check"})


def status(as_json: AsJson = False) -> None:
    """Show the daemon, and how much it has to do."""
    found = ask_daemon(socket_path(), "status", variables=setting_variables())
    tell(found, table(rows=_figures(found)), as_json=as_json)
    if found["calls"] and not as_json:
        calls = (
            (row["tool"], str(row["calls"]), str(row["failed"]), f"{row['mean_ms']:.1f} ms")
            for row in found["calls"]
        )
        console().print(table("tool", "calls", "failed", "mean", rows=calls))


def _figures(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "daemon", f"pid {found['pid']}, version {found['version']}"
    yield "started", _show_age(found["started"])
    for name in ("socket", "data", "backend"):
        yield name, str(found[name])
    yield "settings", found.get("notice", "as configured")
    yield "clients", f"{found['clients']} connected"
    yield "http", found["http"] or "-"
    chats = found["sandboxes"]
    if chats is None:
        yield "sandboxes", "none can be made now: see `mcp-sandbox logs`"
        return
    yield (
        "sandboxes",
        f"{chats['open']} open (at most {chats['max_open']}), {chats['busy']} busy, "
        f"{chats['background']} processes in the background, {chats['queued']} calls wait",
    )
    if chats["leases"] is not None:
        yield "leases", f"of {chats['leases']} chats that servers share"
    if pool := ", ".join(f"{name} {number}" for name, number in chats["pool"].items()):
        yield "warm pool", pool


def _show_age(moment: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    return f"{in_words(seconds)} ago" if seconds >= 60 else "just now"


def _show_short(moment: str) -> str:
    """Return how long ago it was, as `_show_age` does, in one word: 17m."""
    count, unit, *_ = _show_age(moment).split()
    return f"{count}{unit[0]}" if count != "just" else "now"


def logs(
    follow: Annotated[bool, flag("Go on with what comes, until Ctrl-C.", "--follow", "-f")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
) -> None:
    """Print the last lines of the daemon's log."""
    try:
        ask_daemon(
            socket_path(),
            "logs",
            on_event=lambda event: print(event["line"], flush=follow),
            follow=follow,
            lines=lines,
        )
    except NoDaemon as exc:
        path = state_folder() / "daemon.log"
        files = [file for file in (Path(f"{path}.1"), path) if file.exists()]
        if not files:
            raise
        print(f"{exc}; the last lines of those before, from {path}:", file=sys.stderr)
        text = "".join(file.read_text(errors="replace") for file in files)
        print(*deque(text.splitlines(), lines), sep="\n")
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def shutdown(
    timeout: Annotated[
        float, given("--timeout", "SECONDS", "Wait so long, else 60.", min=1)
    ] = 60.0,
    everything: Annotated[bool, flag("End background work, too.", "--all")] = False,
) -> None:
    """End the daemon: running calls may finish, files stay."""
    path = socket_path()
    try:
        has_chats = ask_daemon(path, "status")["sandboxes"]
    except NoDaemon:
        if not (everything and (running := _pick_chats(None, True, "sandbox"))):
            raise
        stop(running)
        return
    chats = list[JsonObject]()
    # Where no backend can be opened there is nothing to tell, and all the more to shut down.
    with suppress(OperatorError):
        chats = ask_daemon(path, "list")["chats"] if has_chats else []
    for row in [row for row in chats if row["background"]]:
        name = f"{row['user']}/{row['chat']}"
        if everything:
            ask_daemon(path, "stop", chat=name)
        how = "is paused" if row["state"] == "paused" else "runs on"
        end = "has ended" if everything else f"{how}: `mcp-sandbox stop {name}` ends it"
        print(f"{name}: {row['background']} in the background {end}")
    print(f"the daemon (pid {shut_down(path, timeout_s=timeout)}) has ended")


def _pick_chats(
    chats: list[str] | None, everything: bool, having: str, as_json: bool = False
) -> list[str]:
    """Return the chats that are named, each known, or all of this server that have something."""
    if bool(chats) == everything:
        raise typer.BadParameter("name chats, or give --all")
    if chats:
        return [answer("find", {"chat": chat})["chat"] for chat in chats]
    own, rows = ("", load().config.fleet.name), answer("list", {})["chats"]
    found = [f"{r['user']}/{r['chat']}" for r in rows if r[having] and r["server"] in own]
    if not (found or as_json):
        print(f"there is no {having} to end")
    return found


def _change(command: str, chats: list[str], as_json: bool, **more: object) -> Iterator[JsonObject]:
    """Do it to each chat, and yield the answers, or print them as JSON, also where one fails."""
    done = list[JsonObject]()
    try:
        for name in chats:
            done.append(answer(command, {"chat": name, **more}))
            yield from () if as_json else done[-1:]
    finally:
        if as_json:
            print(json.dumps(done))


def answer(command: str, arguments: JsonObject) -> JsonObject:
    """Return the daemon's answer; where none runs and none was named, this process's own."""
    try:
        return ask_daemon(socket_path(), command, **arguments)
    except NoDaemon:
        if "socket" in told.get():
            raise
    return anyio.run(_do_without_daemon, load().config, command, arguments)


async def _do_without_daemon(config: Config, command: str, arguments: JsonObject) -> JsonObject:
    from mcp_sandbox.app.chats import LazyManager, open_manager
    from mcp_sandbox.daemon.chats import ChatControl

    less: dict[str, object] = {"pool": config.pool.model_copy(update={"size": 0})}
    if arguments.get("do", command) in _LOOKS or arguments.get("dry_run"):
        less["audit"] = config.audit.model_copy(update={"enabled": False})
    config = config.model_copy(update=less)
    async with anyio.create_task_group() as tasks:
        late = LazyManager(tasks, partial(open_manager, config))
        done = await ChatControl(late.open).commands[command](arguments)
        tasks.cancel_scope.cancel()
    return done


def ls(
    sizes: Annotated[bool, flag("Measure all, also where there are thousands.", "--sizes")] = False,
    as_json: AsJson = False,
) -> None:
    """List all chats, the latest used first, with the sizes of these."""
    chats = answer("list", {"sizes": True if sizes else "latest"})["chats"]
    chats.sort(key=lambda row: str(row["last_used"]), reverse=True)
    rows = (
        (
            f"{row['user']}/{row['chat']}",
            ("files only" if row["state"] == "warm" else row["state"])
            + (f" at {row['server']}" if row["server"] else ""),
            "?" if row.get("size") is None else show_bytes(row["size"]),
            _show_short(row["last_used"]),
            str(row["busy"] or ""),
            str(row["background"] or ""),
            "no" if row["unsaved"] else _show_short(row["saved"]) if row["saved"] else "",
            row["backend"],
            row["assistant"],
            printable(row["folder"]),
        )
        for row in chats
    )
    names = ("chat", "state", "size", "used", "calls", "background", "saved", "backend")
    made = narrowed(table(*names, "assistant", "folder", rows=rows))
    tell(chats, made, as_json=as_json, none="no chats yet")


def stop(
    chats: Chats = None,
    everything: Everything = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """End the sandboxes of chats with all that runs in them; their files stay."""
    names = _pick_chats(chats, everything, "sandbox", as_json)
    for done in _change("stop", names, as_json, force=force):
        what = "its sandbox has ended" if done["stopped"] else "it had no sandbox"
        print(f"{done['chat']}: {what}; its files stay")


def pause(chat: Chat) -> None:
    """Stop all that runs in the sandbox of a chat, until its next call or `resume`."""
    done = answer("pause", {"chat": chat})
    what = "its sandbox is paused; the next call resumes it"
    if not done["keeps_processes"]:
        what = "what ran in its sandbox has ended; the next call begins on its files"
    print(f"{done['chat']}: {what if done['paused'] else 'it has no sandbox'}")


def resume(chat: Chat) -> None:
    """Let the paused sandbox of a chat go on."""
    done = answer("resume", {"chat": chat})
    print(f"{done['chat']}: {'its sandbox goes on' if done['resumed'] else 'it was not paused'}")


def rm(
    chats: Chats = None, everything: Everything = False, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Remove chats: end their sandboxes, and move their files to the trash for a day."""
    names = _pick_chats(chats, everything, "chat", as_json)
    question = f"Remove {', '.join(names)} with all files?"
    agreed(yes or not names, question, "nothing was removed; --yes removes without asking")
    for done in _change("remove", names, as_json):
        back = f"`mcp-sandbox trash restore {done['chat']}` brings it back"
        print(f"{done['chat']}: removed; for 24 hours {back}")


trash = Group("See and bring back the files of removed chats.", *LEADS)


@trash.command(name="list")
def list_trash(as_json: AsJson = False) -> None:
    """List what `rm`, `gc` and resets threw away in the last 24 hours, the latest last."""
    found = answer("trash", {"do": "list"})["trash"]
    rows = ((row["chat"], show_bytes(row["size"]), utc(row["at"])) for row in found)
    made = table("chat", "size", "since", rows=rows)
    tell(found, made, as_json=as_json, none="the trash is empty")


@trash.command(name="restore")
def take_back(
    chat: Chat,
    new: Annotated[str, typer.Argument(metavar="NEW", help="The chat that gets them.")] = "",
) -> None:
    """Bring back the last files of a chat; those that it has now go to the trash."""
    done = answer("trash", {"chat": chat, "new": new})
    print(f"{done['chat']}: the files are back; those that it had are in the trash")


backup = Group("Save the files of chats, and bring them back.", *LEADS)


@backup.command()
def save(chat: Chat, as_json: AsJson = False) -> None:
    """Save the files of a chat now."""
    _show_backups(answer("backup", {"do": "save", "chat": chat}), as_json)


@backup.command(name="list")
def list_(chat: Chat, as_json: AsJson = False) -> None:
    """List the backups of a chat, the newest first."""
    _show_backups(answer("backup", {"do": "list", "chat": chat}), as_json)


@backup.command()
def restore(
    chat: Chat,
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="As `list` shows it.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Put back a backup of a chat, or the newest; the files that it has go to the trash."""
    found = answer("backup", {"do": "find", "chat": chat, "key": key})
    name, saved = found["chat"], _show_age(found["backups"][0]["saved_at"])
    question = f"Replace the files of {name} by those of the backup made {saved}?"
    agreed(yes, question, "nothing was changed; --yes does not ask")
    given = {"do": "restore", "chat": name, "key": key}
    _show_backups(answer("backup", given), as_json)


def _show_backups(done: JsonObject, as_json: bool) -> None:
    rows = (
        (
            row["key"],
            row["server"],
            _show_age(row["saved_at"]),
            show_bytes(row["files_bytes"]),
            show_bytes(row["size"]),
            str(row["entries"]),
            "" if row["quiet"] else "while something ran",
        )
        for row in done["backups"]
    )
    columns = ("key", "server", "saved", "files", "stored", "entries", "made")
    output = table(*columns, rows=rows) if done["backups"] else f"{done['chat']}: no backup"
    tell(done["backups"], output, as_json=as_json)


project = Group("The folders that chats show at /project.", *LEADS)


@project.command()
def accept(chat: Chat, yes: Yes = False) -> None:
    """Let a chat see the folder that another user has put in place of its own."""
    by_person(yes)
    done = answer("project", {"chat": chat})
    for path, mark in done["accepted"].items():
        print(f"{done['chat']} sees {printable(mark['path'])} for {printable(path)} from now on")
    if not done["accepted"]:
        print(f"{done['chat']}: no folder waits for that")


def gc(
    dry_run: Annotated[bool, flag("Only show what would go, and why.", "--dry-run")] = False,
    as_json: AsJson = False,
) -> None:
    """Clean up now what the schedule would: chats unused for long, and the old trash."""
    report = answer("collect", {"dry_run": dry_run})
    items = report["items"]
    if as_json:
        print(json.dumps(report))
        return
    if items:
        rows = (
            (item["kind"], item["what"], show_bytes(item["size_bytes"]), item["why"])
            for item in items
        )
        console().print(table("what", "name", "size", "why", rows=rows))
    total = show_bytes(sum(item["size_bytes"] for item in items))
    done = f"{len(items)} {'would go' if dry_run else 'gone'}, {total}" if items else ""
    left = answer("list", {"sizes": True})["chats"]
    size = show_bytes(sum(row.get("size") or 0 for row in left))
    due = {item["what"] for item in items}
    idle = [row for row in left if not row["sandbox"] and f"{row['user']}/{row['chat']}" not in due]
    used = [datetime.fromisoformat(row["last_used"]) for row in idle]
    keep_s, now = load().config.workspace.retention, datetime.now(UTC)
    due_s = max(0.0, keep_s - (now - min(used, default=now)).total_seconds())
    soon = f"; the next would go in {in_words(due_s)}" if used and keep_s else ""
    print(f"{done or 'nothing to remove'}; {len(left)} chat{'s'[: len(left) != 1]}, {size}{soon}")
