"""`skills validate` and `skills doctor`: what is wrong with skills, and what to do about it."""

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mcp_sandbox import __version__
from mcp_sandbox.cli.options import AsJson, BackendOption, ConfigFile, Data, console, load
from mcp_sandbox.cli.skills import tables
from mcp_sandbox.cli.skills.lacking import lacking_for
from mcp_sandbox.cli.skills.options import NoSandbox, Paths, User, catalogue
from mcp_sandbox.config import Config
from mcp_sandbox.skills.models import Diagnostic
from mcp_sandbox.skills.uris import is_document

Row = tuple[str, Path, Diagnostic]


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    JSON = "json"
    SARIF = "sarif"


def validate(
    paths: Paths,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse what the reference tool refuses.")
    ] = False,
    format_: Annotated[
        Format, typer.Option("--format", help="table, json, or sarif for code hosts.")
    ] = Format.TABLE,
) -> None:
    """Say what is wrong with skills; it fails if one cannot be used, or is not strictly valid."""
    from mcp_sandbox.skills.examine import examine

    examined = [examine(folder, strictly=strict) for folder in skill_folders(paths)]
    rows = [(each.name, each.folder, one) for each in examined for one in each.diagnostics]
    faulty = sum(each.faulty for each in examined)
    if format_ is Format.JSON:
        print(json.dumps([tables.as_row(*row) for row in rows]))
    elif format_ is Format.SARIF:
        from mcp_sandbox.skills.sarif import sarif

        print(json.dumps(sarif(((row[1], row[2]) for row in rows), __version__, Path.cwd())))
    else:
        _print(rows)
        count = tables.counted(len(examined), "skill")
        bad = "not strictly valid" if strict else "cannot be used"
        print(f"{count}: {f'{faulty} {bad}' if faulty else 'fine' if not rows else 'usable'}")
    raise typer.Exit(1 if faulty else 0)


def doctor(
    user: User = "local",
    as_json: AsJson = False,
    no_sandbox: NoSandbox = False,
    backend: BackendOption = None,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Look at all skills that chats are offered, and at what could not be offered."""
    settings = load(config, data, backend).config
    rows = list(_all_rows(settings, user, ask=not no_sandbox))
    if as_json:
        print(json.dumps([tables.as_row(*row) for row in rows]))
    else:
        _print(rows)
        print(f"{tables.counted(len(rows), 'remark')} in all" if rows else "all skills are fine")
    raise typer.Exit(1 if any(each.level == "error" for _, _, each in rows) else 0)


def skill_folders(paths: list[Path]) -> list[Path]:
    """Return the folders of all skills at some paths."""
    from mcp_sandbox.skills.supply.fetch import skills_below

    found = list[Path]()
    for path in paths:
        is_file = is_document(path.name) and not path.is_dir()
        folder = path.absolute().parent if is_file else path.absolute()
        # A folder has the name by which it was asked for, unless that is none.
        found += skills_below(folder.resolve() if folder.name == ".." else folder)
    return list(dict.fromkeys(found))


def _all_rows(settings: Config, user: str, *, ask: bool) -> Iterator[Row]:
    from mcp_sandbox.skills.examine import examine

    found = catalogue(settings, user)
    for problem in found.problems:
        for each in problem.diagnostics:
            yield problem.folder.name, problem.folder, each
    examined = {skill.uri: examine(skill.folder) for skill in found.skills}
    lacks = (
        lacking_for({uri: each.files for uri, each in examined.items()}, settings) if ask else {}
    )
    for uri, one in examined.items():
        for each in (*one.diagnostics, *lacks.get(uri, ())):
            yield one.name, one.folder, each


def _print(rows: list[Row]) -> None:
    if rows:
        order = {"error": 0, "warning": 1, "note": 2}
        ordered = sorted(rows, key=lambda row: order[row[2].level])
        console().print(tables.diagnostics_table((name, each) for name, _, each in ordered))
        print()
