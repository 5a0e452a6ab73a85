"""What a person sees before a skill is installed or updated, and decides by."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcp_sandbox.cli.skills import tables
from mcp_sandbox.cli.skills.lacking import lacking_for
from mcp_sandbox.cli.words import show_bytes
from mcp_sandbox.config import Config
from mcp_sandbox.errors import UnusableSkill
from mcp_sandbox.skills.contents import set_digest
from mcp_sandbox.skills.examine import Examined, examine_files
from mcp_sandbox.skills.findings import scan
from mcp_sandbox.skills.parse import parse
from mcp_sandbox.skills.supply.changes import changes, is_script
from mcp_sandbox.skills.supply.fetch import Incoming
from mcp_sandbox.skills.supply.lock import file_digests
from mcp_sandbox.skills.supply.tree import Tree
from mcp_sandbox.skills.uris import DOCUMENT


def offer(shown: Console, incoming: Incoming, settings: Config | None) -> str:
    """Print what a skill is and what is wrong with it; return its name.

    With `settings` a sandbox is asked what it lacks.

    Raises:
        UnusableSkill: it cannot be used; what is wrong was printed.
    """
    found = _examined(incoming)
    if found.front is not None:
        shown.print(_facts(found, incoming))
    lacks = lacking_for({"": found.files}, settings).get("", ()) if settings and found.front else ()
    if found.diagnostics or lacks:
        rows = ((found.name, each) for each in (*found.diagnostics, *lacks))
        shown.print(tables.diagnostics_table(rows))
    if found.front is None:
        raise UnusableSkill(
            "nothing was installed: the skill cannot be used as it is. `mcp-sandbox skills fix` "
            "repairs the front matter of a folder where that can be done"
        )
    return found.front.name


def print_changes(shown: Console, name: str, old: Tree, incoming: Incoming) -> None:
    """Print what an update would change, scripts first.

    Raises:
        UnusableSkill: the new version cannot be used, or is another skill.
    """
    found = _examined(incoming)
    if found.front is None or found.front.name != name:
        what = "cannot be used" if found.front is None else f"is called {found.front.name}"
        raise UnusableSkill(
            f"{name} stays as it is: what its source has now {what}. Look at {incoming.source}, or "
            f"`mcp-sandbox skills remove {name}`"
        )
    for line in _new_uses(old, incoming.tree):
        shown.print(Text(line, style="bold red"))
    differing = changes(old, incoming.tree)
    shown.print(Text(f"{name}: {tables.counted(len(differing), 'file')} changed", style="bold"))
    for change in differing:
        style = "bold red" if change.is_script else "bold"
        shown.print(tables.safe(f"{change.kind}: {change.path}"), style=style)
        tables.print_diff(shown, change.lines)
    before = examine_files(_files(old), name)
    fresh = [each for each in found.diagnostics if each not in before.diagnostics]
    if fresh:
        shown.print(tables.diagnostics_table((name, each) for each in fresh))


def _new_uses(old: Tree, new: Tree) -> Iterator[str]:
    before = tables.uses(scan(_files(old))[0])
    for what, names in tables.uses(scan(_files(new))[0]).items():
        if fresh := [name for name in names if name not in before[what]]:
            yield tables.safe(f"new: {what} {', '.join(fresh)}").plain


def _examined(incoming: Incoming) -> Examined:
    """The skill as it will lie in a folder of its own name."""
    files = _files(incoming.tree)
    front = parse(files[DOCUMENT], incoming.folder_name).front
    return examine_files(files, front.name if front else incoming.folder_name)


def _facts(found: Examined, incoming: Incoming) -> Table:
    tree = incoming.tree
    size = show_bytes(sum(len(file.data) for file in tree.values()))
    scripts = [path for path, file in tree.items() if is_script(path, file)]
    facts = {
        "skill": found.name,
        "description": found.front.description if found.front else "",
        "source": incoming.source,
        "commit": incoming.commit,
        "digest": set_digest(file_digests(tree)),
        "files": f"{len(tree)}, {size}",
        "scripts": scripts,
        "allowed tools": found.front.allowed_tools if found.front else "",
    }
    return tables.facts_table({**facts, **tables.uses(scan(found.files)[0])})


def _files(tree: Tree) -> dict[str, bytes]:
    return {path: file.data for path, file in tree.items()}
