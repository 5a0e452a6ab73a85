"""Gets one skill from a source: all its files, and where exactly they came from."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.junk import JUNK_FOLDERS
from mcp_sandbox.skills.supply.archive import read_archive
from mcp_sandbox.skills.supply.folder import read_folder
from mcp_sandbox.skills.supply.git import Fetched
from mcp_sandbox.skills.supply.source import ArchiveSource, FolderSource, GitSource, Source
from mcp_sandbox.skills.supply.tree import Tree, below, documents, is_junk, show
from mcp_sandbox.skills.uris import DOCUMENT

_MAX_FOLDERS = 20_000
_MAX_DEPTH = 6
_MAX_NAMED = 30


@dataclass(frozen=True)
class Incoming:
    """A skill as its source has it now. Its document is called SKILL.md, however it was spelled.

    `source` is what gets it again; `commit` is empty unless it came from git.
    """

    tree: Tree
    folder_name: str
    source: str
    commit: str = ""


def fetch(source: Source) -> Incoming:
    """Get the skill of a source; blocks, for as long as the network takes.

    Raises:
        SourceUnavailable: it cannot be read, or has no skill or several.
        UnusableSkill: its files cannot be accepted.
    """
    if isinstance(source, GitSource):
        return _from_git(source)
    if isinstance(source, ArchiveSource):
        return _from_archive(source)
    return _from_folder(source)


def skills_below(top: Path) -> list[Path]:
    """Return the folders of the skills in a folder, without those that lie in others.

    Raises:
        SourceUnavailable: it is no folder, or has no skill.
        UnusableSkill: it has more folders than are searched.
    """
    places = _outermost(_documents_below(top))
    if not places:
        raise _none(str(top))
    return [top / place if place else top for place in places]


def spelled(tree: Tree) -> Tree:
    """Return the files with the document called as all clients find it.

    Raises:
        SourceUnavailable: there is none.
        UnusableSkill: there are two.
    """
    document = next(iter(documents(path for path in tree if "/" not in path)), None)
    if document is None:
        raise SourceUnavailable(f"there is no {DOCUMENT}, so there is no skill")
    named = {DOCUMENT if path == document else path: file for path, file in tree.items()}
    if len(named) < len(tree):
        raise UnusableSkill(f"it has both {DOCUMENT} and {show(document)}: keep one of them")
    return named


def _from_git(source: GitSource) -> Incoming:
    with Fetched(source) as repository:
        start = f"{source.path}/" if source.path else ""
        paths = (path.removeprefix(start) for path in repository.paths(source.path))
        place = _only_skill(paths, source, lambda place: str(source.at(start + place)))
        path = "/".join(part for part in (source.path, place) if part)
        tree = repository.tree(path)
        name = path.rsplit("/", 1)[-1] or source.url.rsplit("/", 1)[-1].removesuffix(".git")
        return Incoming(spelled(tree), name, str(source.at(path)), repository.commit)


def _from_archive(source: ArchiveSource) -> Incoming:
    tree = read_archive(source.path)
    place = _only_skill(tree, source, str, do="pack one of them alone")
    name = place.rsplit("/", 1)[-1] or source.path.stem
    return Incoming(spelled(below(tree, place)), name, str(source))


def _from_folder(source: FolderSource) -> Incoming:
    paths = _documents_below(source.path)
    place = _only_skill(paths, source, lambda place: str(source.path / place))
    folder = source.path / place if place else source.path
    return Incoming(spelled(read_folder(folder)), folder.resolve().name, str(folder))


def _only_skill(
    paths: Iterable[str],
    source: Source,
    named: Callable[[str], str],
    do: str = "name one of them",
) -> str:
    """The folder of the one skill that there is; of several, `do` says what to do with `named`."""
    places = _outermost(paths)
    if not places:
        raise _none(str(source))
    if len(places) > 1:
        names = (named(place) for place in places[:_MAX_NAMED])
        shown = "".join(f"\n  {name if name.isprintable() else show(name)}" for name in names)
        more = f"\n  and {len(places) - _MAX_NAMED} more" if len(places) > _MAX_NAMED else ""
        raise SourceUnavailable(f"{source} has {len(places)} skills: {do}{shown}{more}")
    return places[0]


def _outermost(paths: Iterable[str]) -> list[str]:
    """The folders of documents that lie in no other document's folder."""
    found = {path.rpartition("/")[0] for path in documents(p for p in paths if not is_junk(p))}
    if "" in found:
        return [""]
    return sorted(place for place in found if found.isdisjoint(_above(place)))


def _above(place: str) -> Iterator[str]:
    while (place := place.rpartition("/")[0]) != "":
        yield place


def _documents_below(top: Path) -> Iterator[str]:
    """The paths of files that could be a skill's document, without going through links."""
    if not top.is_dir():
        raise SourceUnavailable(f"{top} is no folder: look at its spelling")
    for number, (folder, folders, files) in enumerate(os.walk(top)):
        place = Path(folder).relative_to(top)
        deepest = len(place.parts) >= _MAX_DEPTH
        folders[:] = [] if deepest else sorted(set(folders) - JUNK_FOLDERS)
        # A folder of that name is one that somebody took for a skill.
        yield from ((place / name).as_posix() for name in documents([*files, *folders]))
        if number >= _MAX_FOLDERS:
            raise UnusableSkill(f"{top} has over {_MAX_FOLDERS:,} folders: name a skill's folder")


def _none(where: str) -> SourceUnavailable:
    return SourceUnavailable(f"{where} has no {DOCUMENT}, so there is no skill in it")
