"""`skills add`, `update`, `remove` and `lock`: the skills of a user, and where they come from."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.options import (
    AsJson,
    Yes,
    agreed,
    chat_id,
    console,
    flag,
    load,
    printable,
    table,
    tell,
)
from mcp_sandbox.cli.skills import check as tables
from mcp_sandbox.cli.skills.check import User
from mcp_sandbox.errors import AlreadyExists, InvalidArgument, SandboxError, UnusableSkill

if TYPE_CHECKING:
    from mcp_sandbox.skills.supply.fetch import FetchedSkill
    from mcp_sandbox.skills.supply.installed import InstalledSkills, InstalledState

_NOTHING = "nothing was {}; --yes does it without asking"
Name = Annotated[str, typer.Argument(metavar="NAME", help="An installed skill.")]


def add(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder, a .zip or .skill archive, owner/repo/path@ref on GitHub, or "
            "https://host/repo.git@ref#path; path and @ref may be left out.",
        ),
    ],
    user: User = "local",
    yes: Yes = False,
) -> None:
    """Install a skill, after showing what is in it."""
    from mcp_sandbox.cli.skills.offer import offer

    installed = _installed(user)
    new = _fetched(source)
    name = offer(console(), new)
    old = next((state for state in installed.states() if state.name == name), None)
    if old is not None:
        if old.differs or old.tree != new.tree:
            raise AlreadyExists(
                f"another skill {name} is installed: `mcp-sandbox skills update {name}` renews it, "
                f"`mcp-sandbox skills remove {name}` makes room"
            )
        print(f"{name} is installed already, just as it is there")
        return
    agreed(yes, f"Install {name}?", _NOTHING.format("installed"))
    installed.put(name, new.tree, new.source, new.commit, instead_of=None)
    print(f"installed {name}; chats see it from their next call on")


def remove(name: Name, user: User = "local", yes: Yes = False) -> None:
    """Take an installed skill away; chats that use it keep what they have."""
    installed = _installed(user)
    changed = installed.state(name).differs
    note = " It was changed here since it was installed." if changed else ""
    agreed(yes, f"Remove {name}?{note}", _NOTHING.format("removed"))
    installed.remove(name)
    print(f"removed {name}")


def update(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One skill; all without it.", show_default=False),
    ] = None,
    undo: Annotated[bool, flag("Bring the version before the last update back.", "--undo")] = False,
    user: User = "local",
    yes: Yes = False,
) -> None:
    """Get skills from their sources again; shows what differs and asks first."""
    installed = _installed(user)
    if undo:
        if name is None:
            raise typer.BadParameter("--undo needs the NAME of one skill")
        print(f"{name} is again as it was installed at {installed.undo(name).installed_at}")
        return
    if name is not None:
        _update(installed, name, yes=yes)
        return
    failed = False
    for each, entry in installed.entries().items():
        try:
            if entry.source:
                _update(installed, each, yes=yes)
        except typer.Exit:
            failed = True
        except SandboxError as exc:
            failed = True
            print(printable(f"{each}: {exc}"), file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def lock(
    check: Annotated[bool, flag("Only compare; it fails if something differs.", "--check")] = False,
    user: User = "local",
    as_json: AsJson = False,
) -> None:
    """Compare installed skills with the lock file, or write them into it as they are now."""
    installed = _installed(user)
    if not check:
        changed = installed.relock()
        names = printable(", ".join(changed))
        print(f"locked anew: {names}" if changed else "the lock file is up to date")
        return
    states = installed.states()
    none = "no skills are installed"
    tell([_row(state) for state in states], _table(states), as_json=as_json, none=none)
    raise typer.Exit(1 if any(state.differs for state in states) else 0)


def _update(installed: "InstalledSkills", name: str, *, yes: bool) -> None:
    from mcp_sandbox.cli.skills.offer import print_changes

    old = installed.state(name)
    if old.entry is None or not old.entry.source:
        raise UnusableSkill(f"{name} was put there by hand: there is no source to update it from")
    if old.tree is None:
        raise UnusableSkill(f"{name} cannot be updated: {old.problem}")
    new = _fetched(old.entry.source)
    if new.tree == old.tree:
        print(f"{name} is up to date")
        return
    print_changes(console(), name, old.tree, new)
    if old.differs:
        print(f"{name} was changed here since it was installed: an update replaces that, too")
    agreed(yes, f"Update {name}?", _NOTHING.format("updated"))
    installed.put(name, new.tree, new.source, new.commit, instead_of=old.tree)
    print(f"updated {name}; `mcp-sandbox skills update {name} --undo` brings the old one back")


def _installed(user: str) -> "InstalledSkills":
    from mcp_sandbox.skills.supply.installed import InstalledSkills

    return InstalledSkills(load().config.data_dir, chat_id(user).user)


def _fetched(source: str) -> "FetchedSkill":
    from mcp_sandbox.skills.supply.fetch import fetch, parse_source

    try:
        parsed = parse_source(source, Path.cwd())
    except InvalidArgument as exc:
        raise typer.BadParameter(str(exc)) from exc
    return fetch(parsed)


def _row(state: "InstalledState") -> dict[str, object]:
    entry = state.entry
    names = ("source", "commit", "digest")
    return {
        "skill": state.name,
        **{name: getattr(entry, name) if entry else None for name in names},
        **{name: getattr(state, name) for name in ("changed", "added", "missing", "problem")},
    }


def _table(states: Iterable["InstalledState"]) -> Table:
    rows = []
    for state in states:
        entry = state.entry
        commit = f" ({entry.commit[:12]})" if entry and entry.commit else ""
        state_text = Text(
            tables.safe(_said(state)).plain, style="yellow" if state.differs else "green"
        )
        source = entry.source + commit if entry else ""
        rows.append((tables.safe(state.name), state_text, tables.safe(source)))
    return table("skill", "state", "source", rows=rows)


def _said(state: "InstalledState") -> str:
    if state.problem:
        return state.problem
    if state.entry is None:
        return "not in the lock file: `mcp-sandbox skills lock` takes it in"
    parts = (("changed", state.changed), ("added", state.added), ("missing", state.missing))
    return "; ".join(f"{what}: {', '.join(paths)}" for what, paths in parts if paths) or "as locked"
