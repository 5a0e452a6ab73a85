"""What `doctor` answers: checks with a status each, as a table or as JSON."""

from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warn", "fail"]
_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `remedy` is what to do about a warning or a failure."""

    area: str
    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, and the backends in which a sandbox really ran."""

    checks: tuple[Check, ...]
    usable: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """The report in types that JSON has."""
        return {"usable": list(self.usable), "checks": [asdict(check) for check in self.checks]}


def render(report: Report, console: Console) -> None:
    """Print the report as a table with the remedy under each line that needs one."""
    table = Table("", "area", "check", "found", box=None)
    for check in report.checks:
        found = Text(check.found)
        if check.remedy:
            found.append(f"\n→ {check.remedy}", style="bold")
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(status, check.area, check.name, found)
    console.print(table)
    console.print()
    if report.usable:
        console.print(f"Sandboxes work here: {', '.join(report.usable)}.", style="bold green")
    else:
        console.print("No sandbox works here; follow the remedies above.", style="bold red")
