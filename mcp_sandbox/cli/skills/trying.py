"""`skills test`: runs what a skill declares in a throw-away sandbox."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import anyio
import typer
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.options import AsJson, BackendOption, ConfigFile, Data, console, load
from mcp_sandbox.cli.skills import tables
from mcp_sandbox.cli.skills.check import skill_folders
from mcp_sandbox.cli.skills.options import User, catalogue, find
from mcp_sandbox.cli.words import printable
from mcp_sandbox.config import Config

if TYPE_CHECKING:
    from mcp_sandbox.trial import Trial

_STYLES = {"passed": "green", "failed": "red", "skipped": "dim"}


def try_out(
    what: Annotated[
        str,
        typer.Argument(metavar="NAME|PATH", help="A skill's name, or its folder."),
    ],
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long one example may take.")
    ] = 60.0,
    user: User = "local",
    as_json: AsJson = False,
    backend: BackendOption = None,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Run a skill's tests, evals and scripts' syntax in a throw-away sandbox without network.

    Tests lie in tests/ and pass with exit code 0; entries of evals/evals.json need a `command`.
    """
    from mcp_sandbox import trial

    settings = load(config, data, backend).config
    folder = _folder(settings, user, what)
    trials = anyio.run(partial(trial.try_out, folder, settings, timeout_s=timeout))
    failed = sum(each.verdict == "failed" for each in trials)
    if as_json:
        print(json.dumps([_row(each) for each in trials]))
    elif trials:
        console().print(_table(trials))
        passed = sum(each.verdict == "passed" for each in trials)
        print(f"{passed} passed, {failed} failed, {len(trials) - passed - failed} skipped")
    else:
        print("nothing to run: put tests into tests/, such as tests/test_it.py or tests/it.sh")
    raise typer.Exit(1 if failed else 0)


def _folder(settings: Config, user: str, what: str) -> Path:
    path = Path(what)
    if path.exists():
        folders = skill_folders([path])
        if len(folders) > 1:
            names = printable(", ".join(folder.name for folder in folders[:10]))
            raise typer.BadParameter(f"{what} has several skills: name one of {names}")
        return folders[0]
    return find(catalogue(settings, user), what).folder


def _row(trial: "Trial") -> dict[str, object]:
    return {
        "name": trial.example.name,
        "kind": trial.example.kind,
        "verdict": trial.verdict,
        "why": trial.why,
        "duration_ms": trial.duration_ms,
    }


def _table(trials: "Sequence[Trial]") -> Table:
    table = Table("", "kind", "example", "ms", "why", box=None)
    for trial in trials:
        verdict = Text(trial.verdict, style=_STYLES[trial.verdict])
        why = Text("\n").join(tables.safe(line) for line in trial.why.splitlines())
        name = tables.safe(trial.example.name)
        table.add_row(verdict, trial.example.kind, name, str(trial.duration_ms or ""), why)
    return table
