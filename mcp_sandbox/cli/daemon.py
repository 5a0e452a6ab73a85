"""`status`, `logs`, `shutdown`: the daemon itself."""

import json
import sys
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from mcp_sandbox.cli.options import AsJson, Socket, console, socket_path
from mcp_sandbox.cli.words import since
from mcp_sandbox.config.environment import setting_variables, state_folder
from mcp_sandbox.daemon.client import ask, shut_down
from mcp_sandbox.errors import NoDaemon


def status(as_json: AsJson = False, socket: Socket = None) -> None:
    """Show the daemon, and how much it has to do."""
    found = ask(socket_path(socket), "status", variables=setting_variables())
    if as_json:
        print(json.dumps(found))
        return
    table = Table(box=None, show_header=False)
    started = datetime.fromisoformat(found["started"])
    table.add_row("daemon", f"pid {found['pid']}, version {found['version']}")
    table.add_row("started", since(started, datetime.now(UTC)))
    for name in ("socket", "data", "backend"):
        table.add_row(name, str(found[name]))
    table.add_row("settings", found.get("notice", "as configured"))
    table.add_row("clients", f"{found['clients']} connected")
    table.add_row("http", found["http"] or "-")
    for name, text in _figures(found):
        table.add_row(name, text)
    console().print(table)
    if found["calls"]:
        console().print(_calls(found["calls"]))


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    chats = found["sandboxes"]
    if chats is None:
        return [("sandboxes", "none can be made now: see `mcp-sandbox logs`")]
    rows = [
        (
            "sandboxes",
            f"{chats['open']} open (at most {chats['max_open']}), {chats['busy']} busy, "
            f"{chats['background']} processes in the background, {chats['queued']} calls wait",
        )
    ]
    pool = ", ".join(f"{name} {number}" for name, number in chats["pool"].items())
    return [*rows, ("warm pool", pool)] if pool else rows


def _calls(calls: list[dict[str, Any]]) -> Table:
    table = Table("tool", "calls", "failed", "mean", box=None)
    for row in calls:
        table.add_row(
            row["tool"], str(row["calls"]), str(row["failed"]), f"{row['mean_ms']:.1f} ms"
        )
    return table


def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="How many of the last lines.")
    ] = 100,
    socket: Socket = None,
) -> None:
    """Print the last lines of the daemon's log."""
    try:
        ask(
            socket_path(socket),
            "logs",
            on_event=lambda event: print(event["line"], flush=follow),
            follow=follow,
            lines=lines,
        )
    except NoDaemon as exc:
        path = state_folder() / "daemon.log"
        if not path.exists():
            raise
        print(f"{exc}; the last lines of those before, from {path}:", file=sys.stderr)
        print(*deque(path.read_text(errors="replace").splitlines(), lines), sep="\n")
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def shutdown(
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait for its end.")
    ] = 60.0,
    everything: Annotated[bool, typer.Option("--all", help="End background work, too.")] = False,
    socket: Socket = None,
) -> None:
    """End the daemon: running calls may finish, files stay."""
    path = socket_path(socket)
    chats = ask(path, "list")["chats"] if ask(path, "status")["sandboxes"] else []
    for row in [row for row in chats if row["background"]]:
        name = f"{row['user']}/{row['chat']}"
        if everything:
            ask(path, "stop", chat=name)
        end = "has ended" if everything else f"runs on: `mcp-sandbox stop {name}` ends it"
        print(f"{name}: {row['background']} in the background {end}")
    print(f"the daemon (pid {shut_down(path, timeout_s=timeout)}) has ended")
