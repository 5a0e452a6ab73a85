"""`skills list`, `show`, `validate`, `doctor`, `fix`: what there is, and what is wrong.

The options that all commands for skills share, and how skills look on a terminal.
"""

import difflib
import json
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import anyio
import typer
from rich.table import Table
from rich.text import Text

from mcp_sandbox import __version__
from mcp_sandbox.cli.options import (
    AsJson,
    chat_id,
    console,
    flag,
    load,
    print_diff,
    printable,
    show_bytes,
    table,
    tell,
)
from mcp_sandbox.config import Config
from mcp_sandbox.durable import write_file
from mcp_sandbox.errors import Busy, TooLarge, UnusableSkill
from mcp_sandbox.skills import skill as models
from mcp_sandbox.skills.catalogue import Catalogue, cut_short
from mcp_sandbox.skills.contents import digest_of, kind_of, open_folder, read_whole
from mcp_sandbox.skills.skill import (
    DOCUMENT,
    Diagnostic,
    Findings,
    Json,
    Level,
    document_among,
    is_document,
)

User = Annotated[str, typer.Option("--user", metavar="USER", help="Whose skills.")]
Skill = Annotated[str, typer.Argument(metavar="NAME", help="A skill: its name, or ROOT/NAME.")]
Paths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH", help="A skill's folder, its SKILL.md, or a folder of skills."),
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
_LISTING = "`mcp-sandbox skills list`"
_DESCRIPTION_SHOWN = 200
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
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
    from mcp_sandbox.skills.library import SkillLibrary
    from mcp_sandbox.skills.needs.findings import scan
    from mcp_sandbox.skills.supply.installed import InstalledSkills
    from mcp_sandbox.skills.validate import examine

    settings = load().config
    skill = catalogue(settings, user).find(name, _LISTING)
    contents = anyio.run(SkillLibrary(settings.skills, settings.data_dir).contents, skill)
    installed = InstalledSkills(settings.data_dir, chat_id(user).user)
    entry = installed.entries().get(skill.folder.name) if skill.root == "user" else None
    examined = examine(skill.folder)
    findings, _ = scan(examined.files)
    facts = {
        **_facts(skill),
        "license": skill.front.license,
        "compatibility": skill.front.compatibility,
        "allowed_tools": list(skill.front.allowed_tools),
        "digest": contents.digest,
        **{name: getattr(entry, name, "") for name in ("source", "commit", "installed_at")},
    }
    if as_json:
        facts["files"] = [asdict(file) for file in contents.files]
        facts["findings"] = asdict(findings)
        facts["diagnostics"] = [asdict(each) for each in examined.diagnostics]
        print(json.dumps(facts))
        return
    terminal = console()
    terminal.print(facts_table({**facts, **uses(findings)}))
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
    format_: Annotated[
        Literal["table", "json", "sarif"],
        typer.Option("--format", help="table, json, or sarif for code hosts."),
    ] = "table",
) -> None:
    """Say what is wrong with skills; it fails if one cannot be used, or is not strictly valid."""
    from mcp_sandbox.skills.validate import examine

    examined = [examine(folder, strictly=strict) for folder in skill_folders(paths)]
    rows = [(each.name, each.folder, one) for each in examined for one in each.diagnostics]
    faulty = sum(each.faulty for each in examined)
    if format_ == "sarif":
        print(json.dumps(sarif(((row[1], row[2]) for row in rows), __version__, Path.cwd())))
    else:
        _print(rows, as_json=format_ == "json")
    if format_ == "table":
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


def fix(
    paths: Paths,
    dry_run: Annotated[bool, flag("Only show what would change.", "--dry-run")] = False,
    everything: Annotated[
        bool,
        flag("Also move fields into metadata that only some clients know and act on.", "--all"),
    ] = False,
) -> None:
    """Repair the front matter of skills and nothing else; it fails if something is left to do."""
    left = 0
    for folder in skill_folders(paths):
        try:
            left += _fix(folder.absolute(), dry_run=dry_run, everything=everything)
        except (UnusableSkill, TooLarge, Busy) as exc:
            print(safe(f"{folder.name}: {exc}").plain, file=sys.stderr)
            left += 1
    raise typer.Exit(1 if left else 0)


def _fix(folder: Path, *, dry_run: bool, everything: bool) -> int:
    from mcp_sandbox.skills.parse import REFUSED, parse
    from mcp_sandbox.skills.repair import repair

    terminal = console()
    document, data = _read(folder)
    done = repair(data, folder.name, everything=everything)
    if done.problem is not None:
        terminal.print(diagnostics_table([(folder.name, done.problem)]))
        return 1
    changes = list(done.changes)
    if document != DOCUMENT:
        changes.append(f"renamed {document} to {DOCUMENT}")
    print_diff(diff(f"{folder.name}/{document}", data, done.data, whole=True))
    if changes and not dry_run:
        _write(folder, document, done.data)
    would = "would have " if dry_run and changes else ""
    summary = f"{folder.name}: {would}{'; '.join(changes) or 'nothing to repair'}"
    terminal.print(safe(summary), soft_wrap=True)
    if done.kept:
        names = ", ".join(done.kept)
        print(f"  kept {names}, which some clients act on: --all moves it into metadata")
    found = parse(done.data, folder.name).diagnostics
    remaining = [each for each in found if each.level == "error" or each.code in REFUSED]
    if remaining:
        terminal.print(diagnostics_table((folder.name, each) for each in remaining))
    return len(remaining) + (len(changes) if dry_run else 0)


def _read(folder: Path) -> tuple[str, bytes]:
    document = document_among(place.name for place in folder.iterdir())
    try:
        with open_folder(folder, None) as directory:
            return document, read_whole(directory, document).data
    except OSError as exc:
        raise UnusableSkill(f"{folder / document} is no plain file: put one there") from exc


def _write(folder: Path, document: str, data: bytes) -> None:
    write_file(folder / DOCUMENT, data, mode=stat.S_IMODE((folder / document).stat().st_mode))
    if document != DOCUMENT and not (folder / DOCUMENT).samefile(folder / document):
        (folder / document).unlink()


def sarif(found: Iterable[tuple[Path, Diagnostic]], version: str, here: Path) -> dict[str, Json]:
    """Return a log of one run; each diagnostic comes with its skill's folder.

    Paths are given in relation to `here` where they lie in it, which is the repository's top as a
    rule.
    """
    pairs = list(found)
    ids = list(dict.fromkeys(each.code for _, each in pairs))
    # The first of each code is its example.
    examples = {each.code: each for _, each in reversed(pairs)}
    rules: list[Json] = [
        {
            "id": code,
            "name": "".join(word.capitalize() for word in code.split("-")),
            "shortDescription": {"text": code.replace("-", " ").capitalize() + "."},
            "help": {"text": examples[code].fix},
            "defaultConfiguration": {"level": examples[code].level},
        }
        for code in ids
    ]
    driver: Json = {
        "name": "mcp-sandbox skills",
        "semanticVersion": version,
        "informationUri": "https://agentskills.io/specification",
        "rules": rules,
    }
    results: Json = [_result(folder, each, ids.index(each.code), here) for folder, each in pairs]
    run: Json = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(folder: Path, each: Diagnostic, rule: int, here: Path) -> dict[str, Json]:
    path = folder / each.file
    uri = quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
    physical: dict[str, Json] = {"artifactLocation": {"uri": uri}}
    if each.line is not None:
        physical["region"] = {"startLine": each.line}
    return {
        "ruleId": each.code,
        "ruleIndex": rule,
        "level": each.level,
        "message": {"text": f"{each.reason} {each.fix}"},
        "locations": [{"physicalLocation": physical}],
    }
