"""How skills and what is wrong with them look on a terminal and as JSON."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcp_sandbox.skills.models import Diagnostic, Findings, Level

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
_DIFF = {"+": "green", "-": "red", "@": "cyan"}


def safe(text: str) -> Text:
    """Return a text of a skill as it can be shown: nothing in it moves the cursor."""
    return Text("".join(c if c.isprintable() else "\ufffd" for c in text.replace("\n", " ")))


def where(each: Diagnostic) -> str:
    """Return the file and line that a diagnostic is about."""
    return each.file if each.line is None else f"{each.file}:{each.line}"


def diagnostics_table(rows: Iterable[tuple[str, Diagnostic]]) -> Table:
    """Return a table of diagnostics, each with the name of its skill and what to do."""
    table = Table("skill", "level", "code", "where", "what, and what to do", box=None)
    for name, each in rows:
        fix = Text("\n→ ", style="bold").append_text(safe(each.fix))
        text = safe(each.reason).append_text(fix)
        level = Text(each.level, style=STYLES[each.level])
        table.add_row(safe(name), level, each.code, safe(where(each)), text)
    return table


def facts_table(facts: Mapping[str, object]) -> Table:
    """Return a table of what is known; what is empty is left out."""
    table = Table(box=None, show_header=False)
    for name, value in facts.items():
        if value:
            text = ", ".join(value) if isinstance(value, list | tuple) else str(value)
            table.add_row(Text(name.replace("_", " "), style="bold"), safe(text))
    return table


def uses(findings: Findings) -> dict[str, tuple[str, ...]]:
    """Return what scripts seem to use, as far as reading them tells, in words."""
    return {_USES[what]: names for what, names in asdict(findings).items()}


def as_row(name: str, folder: Path, each: Diagnostic) -> dict[str, object]:
    """Return a diagnostic in types that JSON has."""
    return {"skill": name, "folder": str(folder), **asdict(each)}


def print_diff(shown: Console, lines: Iterable[str]) -> None:
    """Print lines of a diff in their colours."""
    for line in lines:
        shown.print(Text(line, style=_DIFF.get(line[:1], "")), soft_wrap=True)


def counted(number: int, what: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
