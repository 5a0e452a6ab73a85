"""Commands that connect an agent: `init claude`, `cursor`, `vscode`, `inspector`."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.text import Text

from mcp_sandbox.cli.options import console
from mcp_sandbox.clients import change, claude, cursor, inspector, vscode
from mcp_sandbox.clients.change import Change
from mcp_sandbox.clients.entry import NAME, Target

group = typer.Typer(
    help="Connect an agent: write the file in which it looks for servers.", no_args_is_help=True
)

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Undo = Annotated[bool, typer.Option("--undo", help="Take back what this command wrote.")]
Print = Annotated[bool, typer.Option("--print", help="Only print what belongs into the file.")]
Http = Annotated[
    str | None,
    typer.Option("--http", metavar="URL", help="Use a server at this address.", show_default=False),
]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Make no first call.")]

_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


@group.command(name="claude")
def init_claude(
    *,
    for_user: Annotated[
        bool,
        typer.Option("--user/--project", help="For all your projects, or for this folder."),
    ] = False,
    http: Http = None,
    yes: Yes = False,
    undo: Undo = False,
    only_print: Print = False,
    no_check: NoCheck = False,
) -> None:
    """Connect Claude Code: each conversation gets a computer of its own."""
    if for_user and http:
        raise typer.BadParameter("--http names one chat, so it belongs to a project, not to --user")
    target = claude.for_user() if for_user else claude.in_project(Path.cwd(), http)
    _connect(target, yes=yes, undo=undo, only_print=only_print, check=not no_check)


def _add(name: str, about: str, place: Callable[[str | None], Target]) -> None:
    """Add the command of a client; `place` is where it looks, given the address of a server."""

    @group.command(name=name, help=about)
    def command(
        *,
        http: Http = None,
        yes: Yes = False,
        undo: Undo = False,
        only_print: Print = False,
        no_check: NoCheck = False,
    ) -> None:
        _connect(place(http), yes=yes, undo=undo, only_print=only_print, check=not no_check)


_add(
    "cursor",
    "Connect Cursor: this folder gets a computer.",
    lambda http: cursor.in_project(Path.cwd(), http),
)
_add(
    "vscode",
    "Connect Visual Studio Code: this folder gets a computer.",
    lambda http: vscode.in_project(Path.cwd(), http),
)
_add(
    "inspector",
    "Connect MCP Inspector: it gets a computer to look at.",
    inspector.for_user,
)


def _connect(target: Target, *, yes: bool, undo: bool, only_print: bool, check: bool) -> None:
    if only_print:
        print(json.dumps({target.section: {NAME: target.entry}}, indent=2))
        return
    wanted = change.undoing(target) if undo else change.connecting(target)
    _show(wanted)
    if not (yes or wanted.is_none or _agreed()):
        print("nothing was changed; --yes writes without asking", file=sys.stderr)
        raise typer.Exit(1)
    wanted.apply()
    if not undo:
        if check:
            _check(target)
        print(f"Next: {target.next_step}")


def _agreed() -> bool:
    try:
        return typer.confirm("Write this?", err=True)
    except typer.Abort:
        print(file=sys.stderr)  # The question is still on its line.
        return False


def _show(wanted: Change) -> None:
    if wanted.is_none:
        print(f"{wanted.path} is as it should be")
        return
    shown = console()
    for line in wanted.diff():
        shown.print(Text(line, style=_COLOURS.get(line[:1], "")), soft_wrap=True)


def _check(target: Target) -> None:
    from mcp_sandbox.clients.check import first_call

    print(anyio.run(partial(first_call, target.entry, Path.cwd())))
