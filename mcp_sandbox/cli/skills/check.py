"""`skills list`, `show`, `validate`, `doctor`: what there is, and what is wrong.

The options that all commands for skills share, and how skills look on a terminal.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.options import (
    AsJson,
    chat_id,
    console,
    flag,
    load,
    printable,
    show_bytes,
    table,
    tell,
)
from mcp_sandbox.config import Config
from mcp_sandbox.skills import skill as models
from mcp_sandbox.skills.catalogue import Catalogue, cut_short
from mcp_sandbox.skills.skill import Diagnostic, FrontMatter, Level, is_document

User = Annotated[str, typer.Option("--user", metavar="USER", help="Whose skills.")]
Skill = Annotated[str, typer.Argument(metavar="NAME", help="A skill: its name, or ROOT/NAME.")]
Paths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH", help="A skill's folder, its SKILL.md, or a folder of skills."),
]
STYLES: dict[Level, str] = {"error": "red", "warning": "yellow", "note": "dim"}
_LISTING = "`mcp-sandbox skills list`"
_DESCRIPTION_SHOWN = 200
Row = tuple[str, Path, Diagnostic]


def catalogue(config: Config, user: str) -> Catalogue:
    """Return what is offered to all chats of a user; what one has in its own files is not."""
    from mcp_sandbox.skills.library import SkillLibrary

    return anyio.run(SkillLibrary(config.skills, config.data_dir).catalogue, chat_id(user).user)


def safe(text: str) -> Text:
    """Return a text of a skill as it can be shown: nothing in it moves the cursor."""
    return Text(printable(text.replace("\n", " "), ""))


def diagnostics_table(rows: Iterable[tuple[str, Diagnostic]]) -> Table:
    """Return a table of diagnostics, each with the name of its skill and what to do."""
    cells = (
        (
            safe(name),
            Text(each.level, style=STYLES[each.level]),
            each.code,
            safe(each.file if each.line is None else f"{each.file}:{each.line}"),
            safe(each.reason).append(f"\n→ {safe(each.fix).plain}", style="bold"),
        )
        for name, each in rows
    )
    return table("skill", "level", "code", "where", "what, and what to do", rows=cells)


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


def declared(front: FrontMatter, files: Mapping[str, bytes]) -> dict[str, object]:
    """Return what the author of a skill says that it needs."""
    from mcp_sandbox.skills.declared import read_declared

    return {
        "compatibility": front.compatibility,
        "metadata": json.dumps(dict(front.metadata)) if front.metadata else "",
        "allowed_tools": list(front.allowed_tools),
        "needs": [f"{each.name} ({each.where})" for each in read_declared(front, files)],
    }


def counted(number: int, what: str) -> str:
    """Return "1 file" or "2 files"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def list_skills(
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="Words to look for.", show_default=False)
    ] = None,
    user: User = "local",
    as_json: AsJson = False,
) -> None:
    """List the skills that chats are offered, those first that a QUERY means."""
    from mcp_sandbox.skills.search import Index

    found = catalogue(load().config, user)
    skills = found.skills
    if query is not None:
        skills = tuple(match.skill for match in Index().search_among(skills, query))
    nothing = "no skill is about that" if query else "no skills yet: `mcp-sandbox skills add`"
    tell([_facts(skill) for skill in skills], _table(skills), as_json=as_json, none=nothing)
    if found.unusable:
        count = counted(len(found.unusable), "folder")
        print(f"{count} cannot be used: `mcp-sandbox skills doctor` says why", file=sys.stderr)


def show(name: Skill, user: User = "local", as_json: AsJson = False) -> None:
    """Show one skill: what it says of itself, its files, where it came from, what is wrong."""
    from mcp_sandbox.skills.declared import read_declared
    from mcp_sandbox.skills.library import SkillLibrary
    from mcp_sandbox.skills.supply.installed import InstalledSkills
    from mcp_sandbox.skills.validate import examine

    settings = load().config
    skill = catalogue(settings, user).find(name, _LISTING)
    contents = anyio.run(SkillLibrary(settings.skills, settings.data_dir).contents, skill)
    installed = InstalledSkills(settings.data_dir, chat_id(user).user)
    entry = installed.entries().get(skill.folder.name) if skill.root == "user" else None
    examined = examine(skill.folder)
    facts = {
        **_facts(skill),
        "license": skill.front.license,
        **declared(skill.front, examined.files),
        "digest": contents.digest,
        **{name: getattr(entry, name, "") for name in ("source", "commit", "installed_at")},
    }
    if as_json:
        facts["files"] = [asdict(file) for file in contents.files]
        facts["metadata"] = dict(skill.front.metadata)
        facts["needs"] = [asdict(each) for each in read_declared(skill.front, examined.files)]
        facts["diagnostics"] = [asdict(each) for each in examined.diagnostics]
        print(json.dumps(facts))
        return
    terminal = console()
    terminal.print(facts_table(facts))
    files = ((safe(each.path), show_bytes(each.size), each.mime) for each in contents.files)
    terminal.print(table("file", "size", "type", rows=files))
    if examined.diagnostics:
        terminal.print()
        terminal.print(diagnostics_table((skill.name, each) for each in examined.diagnostics))


def _facts(skill: models.Skill) -> dict[str, object]:
    return {
        "name": skill.name,
        "description": skill.front.description,
        "uri": skill.uri,
        "root": skill.root,
        "folder": str(skill.folder),
        "shadowed_by": skill.shadowed_by,
    }


def _table(skills: tuple[models.Skill, ...]) -> Table:
    rows = []
    for skill in skills:
        name, about = safe(skill.name), cut_short(skill.front.description, _DESCRIPTION_SHOWN)
        if skill.shadowed_by is not None:
            name = Text.assemble((f"{skill.root}/", "dim"), name, (" (shadowed)", "dim"))
        rows.append((name, skill.root, safe(about)))
    return table("skill", "root", "description", rows=rows)


def validate(
    paths: Paths,
    strict: Annotated[
        bool, flag("Refuse what the reference tool does (extra `strict`).", "--strict")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is wrong with skills; it fails if one cannot be used, or is not strictly valid."""
    from mcp_sandbox.skills.validate import examine

    examined = [examine(folder, strictly=strict) for folder in skill_folders(paths)]
    rows = [(each.name, each.folder, one) for each in examined for one in each.diagnostics]
    faulty = sum(each.faulty for each in examined)
    _print(rows, as_json=as_json)
    if not as_json:
        count = counted(len(examined), "skill")
        bad = "not strictly valid" if strict else "cannot be used"
        print(f"{count}: {f'{faulty} {bad}' if faulty else 'fine' if not rows else 'usable'}")
    raise typer.Exit(1 if faulty else 0)


def doctor(user: User = "local", as_json: AsJson = False) -> None:
    """Look at all skills that chats are offered, and at what could not be offered."""
    rows = list(_all_rows(load().config, user))
    _print(rows, as_json=as_json)
    if not as_json:
        print(f"{counted(len(rows), 'remark')} in all" if rows else "all skills are fine")
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


def _all_rows(settings: Config, user: str) -> Iterator[Row]:
    from mcp_sandbox.skills.validate import examine

    found = catalogue(settings, user)
    for problem in found.problems:
        for each in problem.diagnostics:
            yield problem.folder.name, problem.folder, each
    for one in (examine(skill.folder) for skill in found.skills):
        for each in one.diagnostics:
            yield one.name, one.folder, each


def _print(rows: list[Row], *, as_json: bool) -> None:
    if as_json:
        found = [{"skill": name, "folder": str(at), **asdict(each)} for name, at, each in rows]
        print(json.dumps(found))
    elif rows:
        order = {"error": 0, "warning": 1, "note": 2}
        ordered = sorted(rows, key=lambda row: order[row[2].level])
        console().print(diagnostics_table((name, each) for name, _, each in ordered))
        print()
