"""`skills list` and `skills show`: which skills there are, and what one of them is."""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import anyio
import typer
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.options import AsJson, ConfigFile, Data, console, load
from mcp_sandbox.cli.skills import tables
from mcp_sandbox.cli.skills.options import Skill, User, catalogue, checked_user, find
from mcp_sandbox.cli.words import show_bytes
from mcp_sandbox.skills import models

_DESCRIPTION_SHOWN = 200


def list_skills(
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="Words to look for.", show_default=False)
    ] = None,
    user: User = "local",
    as_json: AsJson = False,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """List the skills that chats are offered, those first that a QUERY means."""
    found = catalogue(load(config, data).config, user)
    skills = found.skills if query is None else _matching(found.skills, query)
    if as_json:
        print(json.dumps([_row(skill) for skill in skills]))
    elif skills:
        console().print(_table(skills))
    else:
        print("no skill is about that" if query else "no skills yet: `mcp-sandbox skills add`")
    if found.unusable:
        count = tables.counted(len(found.unusable), "folder")
        hint = f"{count} cannot be used: `mcp-sandbox skills doctor` says why"
        print(hint, file=sys.stderr)


def show(
    name: Skill,
    user: User = "local",
    as_json: AsJson = False,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Show one skill: what it says of itself, its files, where it came from, what is wrong."""
    from mcp_sandbox.skills.examine import examine
    from mcp_sandbox.skills.findings import scan
    from mcp_sandbox.skills.library import Library
    from mcp_sandbox.skills.supply.installed import Installed

    settings = load(config, data).config
    skill = find(catalogue(settings, user), name)
    contents = anyio.run(Library(settings.skills, settings.data_dir).contents, skill)
    entry = None
    if skill.root == "user":
        entry = Installed(settings.data_dir, checked_user(user)).entries().get(skill.folder.name)
    examined = examine(skill.folder)
    findings, _ = scan(examined.files)
    facts = {
        **_row(skill),
        "license": skill.front.license,
        "compatibility": skill.front.compatibility,
        "allowed_tools": list(skill.front.allowed_tools),
        "digest": contents.digest,
        "source": entry.source if entry else "",
        "commit": entry.commit if entry else "",
        "installed_at": entry.installed_at if entry else "",
    }
    if as_json:
        files = [asdict(file) for file in contents.files]
        found = [asdict(each) for each in examined.diagnostics]
        told = {"files": files, "findings": asdict(findings), "diagnostics": found}
        print(json.dumps({**facts, **told}))
        return
    shown = console()
    shown.print(tables.facts_table({**facts, **tables.uses(findings)}))
    shown.print(_files(contents))
    if examined.diagnostics:
        shown.print()
        rows = ((skill.name, each) for each in examined.diagnostics)
        shown.print(tables.diagnostics_table(rows))


def _matching(skills: tuple[models.Skill, ...], query: str) -> tuple[models.Skill, ...]:
    from mcp_sandbox.skills.search import Index

    index = Index()
    index.update(skills, {skill.uri: () for skill in skills})
    return tuple(match.skill for match in index.search(query))


def _row(skill: models.Skill) -> dict[str, object]:
    return {
        "name": skill.name,
        "description": skill.front.description,
        "uri": skill.uri,
        "root": skill.root,
        "folder": str(skill.folder),
        "shadowed_by": skill.shadowed_by,
    }


def _table(skills: tuple[models.Skill, ...]) -> Table:
    table = Table("skill", "root", "description", box=None)
    for skill in skills:
        about = skill.front.description
        about = about if len(about) <= _DESCRIPTION_SHOWN else f"{about[:_DESCRIPTION_SHOWN]}…"
        name = tables.safe(skill.name)
        if skill.shadowed_by is not None:
            name = Text.assemble((f"{skill.root}/", "dim"), name, (" (shadowed)", "dim"))
        table.add_row(name, skill.root, tables.safe(about))
    return table


def _files(contents: models.Contents) -> Table:
    table = Table("file", "size", "type", box=None)
    for file in contents.files:
        table.add_row(tables.safe(file.path), show_bytes(file.size), file.mime)
    return table
