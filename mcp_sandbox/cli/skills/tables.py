"""Options that the commands for skills share, and how skills look on a terminal."""

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.options import chat_id, flag, printable, table
from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.contents import digest_of, kind_of
from mcp_sandbox.skills.skill import Diagnostic, Findings, Level

User = Annotated[str, typer.Option("--user", metavar="USER", help="Whose skills.")]
Skill = Annotated[str, typer.Argument(metavar="NAME", help="A skill: its name, or ROOT/NAME.")]
NoSandbox = Annotated[bool, flag("Do not ask a sandbox what it lacks.", "--no-sandbox")]
Paths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH…", help="A skill's folder, its SKILL.md, or a folder of skills."),
]
STYLES: dict[Level, str] = {"error": "red", "warning": "yellow", "note": "dim"}
_USES = {
    "hosts": "reaches",
    "variables": "reads variables",
    "commands": "runs",
    "packages": "needs packages",
    "writes": "writes to",
    "unread": "too large to read",
    "inline": "declare packages (PEP 723)",
}
_LINES_SHOWN = 400


def catalogue(config: Config, user: str) -> Catalogue:
    """Return what is offered to all chats of a user; what one has in its own files is not."""
    from mcp_sandbox.skills.library import Library

    return anyio.run(Library(config.skills, config.data_dir).catalogue, chat_id(user).user)


def safe(text: str) -> Text:
    """Return a text of a skill as it can be shown: nothing in it moves the cursor."""
    return Text(printable(text.replace("\n", " "), ""))


def diagnostics_table(rows: Iterable[tuple[str, Diagnostic]]) -> Table:
    """Return a table of diagnostics, each with the name of its skill and what to do."""
    shown = (
        (
            safe(name),
            Text(each.level, style=STYLES[each.level]),
            each.code,
            safe(each.file if each.line is None else f"{each.file}:{each.line}"),
            safe(each.reason).append(f"\n→ {safe(each.fix).plain}", style="bold"),
        )
        for name, each in rows
    )
    return table("skill", "level", "code", "where", "what, and what to do", rows=shown)


def facts_table(facts: Mapping[str, object]) -> Table:
    """Return a table of what is known; what is empty is left out."""
    texts = {
        name: ", ".join(value) if isinstance(value, list | tuple) else str(value)
        for name, value in facts.items()
        if value
    }
    return table(
        rows=((Text(n.replace("_", " "), style="bold"), safe(text)) for n, text in texts.items())
    )


def uses(findings: Findings) -> dict[str, tuple[str, ...]]:
    """Return what scripts seem to use, as far as reading them tells, in words."""
    return {_USES[what]: names for what, names in asdict(findings).items()}


def diff(path: str, old: bytes, new: bytes, *, whole: bool = False) -> Iterator[str]:
    """Return what changes in a file; unless `whole`, little where it is very long."""
    # Comparing lines takes the square of their number.
    long = len(old) + len(new) > 256 << 10
    if not whole and (long or "binary" in (kind_of(old), kind_of(new))):
        yield from (f"{mark} {digest_of(data)}" for mark, data in (("-", old), ("+", new)) if data)
        return
    before, after = (data.decode("utf-8", "replace").splitlines() for data in (old, new))
    lines = [*difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="")]
    most = len(lines) if whole else _LINES_SHOWN
    yield from lines[:most]
    if len(lines) > most:
        yield f"… {len(lines) - most} more lines"


def counted(number: int, what: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def lacking_for(
    skills: Mapping[str, Mapping[str, bytes]], config: Config
) -> Mapping[str, Sequence[Diagnostic]]:
    """Return what a sandbox lacks of what scripts need; where there is none, say why not."""
    from mcp_sandbox.app.skill_tests import lacking

    try:
        return anyio.run(lacking, skills, config)
    except SandboxError as exc:
        print(f"what a sandbox lacks was not looked at: {exc}", file=sys.stderr)
        return {}
