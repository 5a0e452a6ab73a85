"""`skills fix`: repairs front matter, so that strict readers take a skill too."""

import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from mcp_sandbox.cli.options import console
from mcp_sandbox.cli.skills import tables
from mcp_sandbox.cli.skills.check import skill_folders
from mcp_sandbox.cli.skills.options import Paths
from mcp_sandbox.errors import Busy, TooLarge, UnusableSkill
from mcp_sandbox.skills.files import read_whole
from mcp_sandbox.skills.roots import opened
from mcp_sandbox.skills.uris import DOCUMENT, document_among
from mcp_sandbox.workspace.whole_file import replace


def fix(
    paths: Paths,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would change.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Also move fields into metadata that only some clients know and act on."
        ),
    ] = False,
) -> None:
    """Repair the front matter of skills and nothing else; it fails if something is left to do."""
    left = 0
    for folder in skill_folders(paths):
        try:
            left += _fix(folder.absolute(), dry_run=dry_run, everything=everything)
        except (UnusableSkill, TooLarge, Busy) as exc:
            print(tables.safe(f"{folder.name}: {exc}").plain, file=sys.stderr)
            left += 1
    raise typer.Exit(1 if left else 0)


def _fix(folder: Path, *, dry_run: bool, everything: bool) -> int:
    """Repair one skill; returns how many things are left to do."""
    from mcp_sandbox.skills.repair import repair
    from mcp_sandbox.skills.strict import verdict
    from mcp_sandbox.skills.supply.changes import unified

    shown = console()
    document, data = _read(folder)
    done = repair(data, folder.name, everything=everything)
    if done.problem is not None:
        shown.print(tables.diagnostics_table([(folder.name, done.problem)]))
        return 1
    changes = list(done.changes)
    if document != DOCUMENT:
        changes.append(f"renamed {document} to {DOCUMENT}")
    tables.print_diff(shown, unified(f"{folder.name}/{document}", data, done.data))
    if changes and not dry_run:
        _write(folder, document, done.data)
    would = "would have " if dry_run and changes else ""
    said = f"{folder.name}: {would}{'; '.join(changes) or 'nothing to repair'}"
    shown.print(tables.safe(said), soft_wrap=True)
    if done.kept:
        kept = ", ".join(done.kept)
        print(f"  kept {kept}, which some clients act on: --all moves it into metadata")
    remaining = verdict(done.data, folder.name)
    if remaining:
        shown.print(tables.diagnostics_table((folder.name, each) for each in remaining))
    return len(remaining) + (len(changes) if dry_run else 0)


def _read(folder: Path) -> tuple[str, bytes]:
    document = document_among(place.name for place in folder.iterdir())
    try:
        with opened(folder, None) as directory:
            return document, read_whole(directory, document).data
    except OSError as exc:
        raise UnusableSkill(f"{folder / document} is no plain file: put one there") from exc


def _write(folder: Path, document: str, data: bytes) -> None:
    """Put the new document in place of the old, with its rights, in one step."""
    mode = stat.S_IMODE((folder / document).stat().st_mode)
    replace(folder / DOCUMENT, data, mode=mode)
    if document != DOCUMENT and not (folder / DOCUMENT).samefile(folder / document):
        (folder / document).unlink()
