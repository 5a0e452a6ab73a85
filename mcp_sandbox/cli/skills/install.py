"""`skills add`, `update`, `remove` and `lock`: the skills of a user, and where they come from."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.options import AsJson, ConfigFile, Data, console, load
from mcp_sandbox.cli.skills import tables
from mcp_sandbox.cli.skills.options import NoSandbox, User, Yes, agreed, checked_user
from mcp_sandbox.cli.words import printable
from mcp_sandbox.errors import (
    AlreadyExists,
    InvalidArgument,
    SandboxError,
    UnknownSkill,
    UnusableSkill,
)

if TYPE_CHECKING:
    from mcp_sandbox.skills.supply.fetch import Incoming
    from mcp_sandbox.skills.supply.installed import Installed, State

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
    no_sandbox: NoSandbox = False,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Install a skill, after showing what is in it and what sandboxes lack for it."""
    from mcp_sandbox.cli.skills.offer import offer
    from mcp_sandbox.skills.supply.installed import version_of

    installed = _installed(data, config, user)
    incoming = _fetched(source)
    asked = None if no_sandbox else load(config, data).config
    name = offer(console(), incoming, asked)
    new = version_of(incoming.tree, incoming.source, incoming.commit)
    old = next((state for state in installed.states() if state.name == name), None)
    if old is not None:
        if old.entry is None or old.drift or old.entry.digest != new.digest:
            raise AlreadyExists(
                f"another skill {name} is installed: `mcp-sandbox skills update {name}` renews it, "
                f"`mcp-sandbox skills remove {name}` makes room"
            )
        print(f"{name} is installed already, just as it is there")
        return
    agreed(yes, f"Install {name}?", "installed")
    installed.put(name, incoming.tree, new, instead_of=None)
    print(f"installed {name}; chats see it from their next call on")


def remove(
    name: Name, user: User = "local", yes: Yes = False, data: Data = None, config: ConfigFile = None
) -> None:
    """Take an installed skill away; chats that use it keep what they have."""
    installed = _installed(data, config, user)
    states = {state.name: state for state in installed.states()}
    if name not in states:
        raise UnknownSkill(f"{user} has no skill {name[:100]!r} installed: {_names(states)}")
    changed = " It was changed here since it was installed." if _is_own(states[name]) else ""
    agreed(yes, f"Remove {name}?{changed}", "removed")
    installed.remove(name)
    print(f"removed {name}")


def update(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One skill; all without it.", show_default=False),
    ] = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Bring the version before the last update back.")
    ] = False,
    user: User = "local",
    yes: Yes = False,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Get skills from their sources again; shows what differs and asks first."""
    installed = _installed(data, config, user)
    if undo:
        if name is None:
            raise typer.BadParameter("--undo needs the NAME of one skill")
        back = installed.undo(name)
        print(f"{name} is again as it was installed at {back.installed_at}")
        return
    failed = False
    for each in [name] if name else _with_a_source(installed):
        try:
            _update(installed, each, yes=yes)
        except (SandboxError, typer.Exit) as exc:
            if name:
                raise
            failed = True
            if isinstance(exc, SandboxError):
                print(printable(f"{each}: {exc}"), file=sys.stderr)
    raise typer.Exit(1 if failed else 0)


def lock(
    check: Annotated[
        bool, typer.Option("--check", help="Only compare; it fails if something differs.")
    ] = False,
    user: User = "local",
    as_json: AsJson = False,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Compare installed skills with the lock file, or write them into it as they are now."""
    installed = _installed(data, config, user)
    if not check:
        changed = installed.relock()
        names = printable(", ".join(changed))
        print(f"locked anew: {names}" if changed else "the lock file is up to date")
        return
    states = installed.states()
    if as_json:
        print(json.dumps([_as_row(state) for state in states]))
    elif states:
        console().print(_table(states))
    else:
        print("no skills are installed")
    raise typer.Exit(1 if any(_is_own(state) for state in states) else 0)


def _update(installed: "Installed", name: str, *, yes: bool) -> None:
    from mcp_sandbox.cli.skills.offer import print_changes
    from mcp_sandbox.skills.supply.installed import version_of
    from mcp_sandbox.skills.supply.lock import drift, file_digests

    entry = installed.entries().get(name)
    old = installed.tree(name)
    if entry is None or not entry.source:
        raise UnusableSkill(f"{name} was put there by hand: there is no source to update it from")
    incoming = _fetched(entry.source)
    if incoming.tree == old:
        print(f"{name} is up to date")
        return
    print_changes(console(), name, old, incoming)
    if drift(entry, file_digests(old)):
        print(f"{name} was changed here since it was installed: an update replaces that, too")
    agreed(yes, f"Update {name}?", "updated")
    new = version_of(incoming.tree, incoming.source, incoming.commit)
    installed.put(name, incoming.tree, new, instead_of=old)
    print(f"updated {name}; `mcp-sandbox skills update {name} --undo` brings the old one back")


def _installed(data: Path | None, config: Path | None, user: str) -> "Installed":
    from mcp_sandbox.skills.supply.installed import Installed

    return Installed(load(config, data).config.data_dir, checked_user(user))


def _fetched(source: str) -> "Incoming":
    from mcp_sandbox.skills.supply.fetch import fetch
    from mcp_sandbox.skills.supply.source import parse_source

    try:
        parsed = parse_source(source, Path.cwd())
    except InvalidArgument as exc:
        raise typer.BadParameter(str(exc)) from exc
    return fetch(parsed)


def _with_a_source(installed: "Installed") -> list[str]:
    return [name for name, entry in installed.entries().items() if entry.source]


def _is_own(state: "State") -> bool:
    return bool(state.entry is None or state.drift or state.problem)


def _names(names: Iterable[str]) -> str:
    return f"there are {', '.join(names)}" if names else "there is none"


def _as_row(state: "State") -> dict[str, object]:
    drift = state.drift
    return {
        "skill": state.name,
        "source": state.entry.source if state.entry else None,
        "commit": state.entry.commit if state.entry else None,
        "digest": state.entry.digest if state.entry else None,
        "changed": drift.changed,
        "added": drift.added,
        "missing": drift.missing,
        "problem": state.problem or ("its folder is gone" if drift.missing_skill else ""),
    }


def _table(states: Iterable["State"]) -> Table:
    table = Table("skill", "state", "source", box=None)
    for state in states:
        source = state.entry.source if state.entry else ""
        commit = f" ({state.entry.commit[:12]})" if state.entry and state.entry.commit else ""
        style = "yellow" if _is_own(state) else "green"
        said = Text(tables.safe(_said(state)).plain, style=style)
        table.add_row(tables.safe(state.name), said, tables.safe(source + commit))
    return table


def _said(state: "State") -> str:
    if state.problem:
        return state.problem
    if state.entry is None:
        return "not in the lock file: `mcp-sandbox skills lock` takes it in"
    if state.drift.missing_skill:
        return "its folder is gone"
    drift = state.drift
    parts = (("changed", drift.changed), ("added", drift.added), ("missing", drift.missing))
    return "; ".join(f"{what}: {', '.join(paths)}" for what, paths in parts if paths) or "as locked"
