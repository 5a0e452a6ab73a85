"""What a person sees before a skill is installed or updated, and decides by."""

from pathlib import PurePosixPath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.options import print_diff, show_bytes
from mcp_sandbox.cli.skills import check
from mcp_sandbox.errors import UnusableSkill
from mcp_sandbox.skills.contents import set_digest
from mcp_sandbox.skills.needs.findings import scan
from mcp_sandbox.skills.parse import parse
from mcp_sandbox.skills.skill import DOCUMENT
from mcp_sandbox.skills.supply.fetch import FetchedSkill
from mcp_sandbox.skills.supply.installed import file_digests
from mcp_sandbox.skills.supply.tree import SourceFile, Tree
from mcp_sandbox.skills.validate import ExaminedSkill, examine_files

_SCRIPT_ENDINGS = frozenset(
    {".bash", ".bat", ".cjs", ".cmd", ".go", ".js", ".lua", ".mjs", ".php", ".pl", ".ps1", ".py"}
    | {".r", ".rb", ".sh", ".ts", ".zsh"}
)


def offer(terminal: Console, incoming: FetchedSkill) -> str:
    """Print what a skill is and what is wrong with it; return its name.

    Raises UnusableSkill: it cannot be used; what is wrong was printed.
    """
    found = _examined(incoming)
    if found.front is not None:
        terminal.print(_facts(found, incoming))
    if found.diagnostics:
        rows = ((found.name, each) for each in found.diagnostics)
        terminal.print(check.diagnostics_table(rows))
    if found.front is None:
        raise UnusableSkill(
            "nothing was installed: the skill cannot be used as it is. `mcp-sandbox skills fix` "
            "repairs the front matter of a folder where that can be done"
        )
    return found.front.name


def print_changes(terminal: Console, name: str, old: Tree, incoming: FetchedSkill) -> None:
    """Print what an update would change, scripts first.

    Raises UnusableSkill: the new version cannot be used, or is another skill.
    """
    found = _examined(incoming)
    if found.front is None or found.front.name != name:
        what = "cannot be used" if found.front is None else f"is called {found.front.name}"
        raise UnusableSkill(
            f"{name} stays as it is: what its source has now {what}. Look at {incoming.source}, or "
            f"`mcp-sandbox skills remove {name}`"
        )
    used = check.uses(scan(_files(old))[0])
    for what, names in check.uses(scan(found.files)[0]).items():
        if fresh := [name for name in names if name not in used[what]]:
            line = check.safe(f"new: {what} {', '.join(fresh)}")
            terminal.print(Text(line.plain, style="bold red"))
    _print_files(terminal, name, old, incoming.tree)
    before = examine_files(_files(old), name)
    if more := [each for each in found.diagnostics if each not in before.diagnostics]:
        terminal.print(check.diagnostics_table((name, each) for each in more))


def _print_files(terminal: Console, name: str, old: Tree, new: Tree) -> None:
    differing = [path for path in {*old, *new} if old.get(path) != new.get(path)]
    scripts = {path for tree in (old, new) for path in differing if _is_script(path, tree)}
    terminal.print(Text(f"{name}: {check.counted(len(differing), 'file')} changed", style="bold"))
    for path in sorted(differing, key=lambda path: (path not in scripts, path != DOCUMENT, path)):
        before, after = old.get(path), new.get(path)
        style = "bold red" if path in scripts else "bold"
        terminal.print(check.safe(f"{_change(before, after)}: {path}"), style=style)
        data = [file.data if file else b"" for file in (before, after)]
        if data[0] != data[1]:
            print_diff(check.diff(path, *data))


def _change(old: SourceFile | None, new: SourceFile | None) -> str:
    if old is None or new is None:
        return "added" if old is None else "removed"
    if old.data != new.data:
        return "changed"
    return "now a program" if new.executable else "no program any more"


def _is_script(path: str, tree: Tree) -> bool:
    file, ending = tree.get(path), PurePosixPath(path).suffix.lower()
    return file is not None and (
        file.executable or ending in _SCRIPT_ENDINGS or file.data.startswith(b"#!")
    )


def _examined(incoming: FetchedSkill) -> ExaminedSkill:
    """Return the skill as it will lie in a folder of its own name."""
    files = _files(incoming.tree)
    front = parse(files[DOCUMENT], incoming.folder_name).front
    return examine_files(files, front.name if front else incoming.folder_name)


def _facts(found: ExaminedSkill, incoming: FetchedSkill) -> Table:
    tree = incoming.tree
    size = show_bytes(sum(len(file.data) for file in tree.values()))
    facts = {
        "skill": found.name,
        "description": found.front.description if found.front else "",
        "source": incoming.source,
        "commit": incoming.commit,
        "digest": set_digest(file_digests(tree)),
        "files": f"{len(tree)}, {size}",
        "scripts": [path for path in tree if _is_script(path, tree)],
        "allowed tools": found.front.allowed_tools if found.front else "",
    }
    return check.facts_table({**facts, **check.uses(scan(found.files)[0])})


def _files(tree: Tree) -> dict[str, bytes]:
    return {path: file.data for path, file in tree.items()}
