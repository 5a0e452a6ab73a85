"""Gets one skill from a source: all its files, and where exactly they came from.

People write to say which source it is:

    ./folder  /folder  ~/folder         a folder; a plain name is one too, where it exists
    ./file.zip  ./file.skill            an archive
    owner/repo[/path][@ref]             a repository on GitHub
    https://host/repo.git[@ref][#path]  a git repository, also with `git+` in front
    ssh://git@host/repo.git[@ref][#path]    and git@host:owner/repo.git[@ref][#path]
    file:///folder/repo.git[@ref][#path]
    https://github.com/owner/repo/tree/ref/path     as the browser shows it

A ref is a commit, a tag or a branch. pip's `#subdirectory=path` says the same as `#path`.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from mcp_sandbox.errors import InvalidArgument, SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.contents import JUNK_FOLDERS
from mcp_sandbox.skills.supply.git import GitSource, fetched
from mcp_sandbox.skills.supply.tree import (
    SUFFIXES,
    Tree,
    check_path,
    documents,
    is_junk,
    read_archive,
    read_folder,
    show,
)
from mcp_sandbox.skills.uris import DOCUMENT, is_document

_MAX_FOLDERS = 20_000
_MAX_DEPTH = 6
_MAX_NAMED = 30
_HELP = (
    "give a folder (./skill), an archive (skill.zip), owner/repo, or "
    "https://host/repo.git@ref#path/of/the/skill"
)
_SCHEMES = ("https", "ssh", "file")
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
_SCP = re.compile(rf"([A-Za-z0-9_][\w.-]*)@({_HOST}):(?!/)(\S+)")
_SHORT = re.compile(r"([A-Za-z0-9][\w.-]*)/([\w.-]+)((?:/[^@#\s]+)?)(?:@(\S+))?")
_TREE = re.compile(r"/([A-Za-z0-9][\w.-]*)/([\w.-]+)/tree/([^/]+)(?:/(.+?))?/?")
_NETWORK_PLACE = re.compile(rf"(?:[A-Za-z0-9_][\w.-]*@)?{_HOST}(?::[0-9]{{1,5}})?")
_URL_PATH = re.compile(r"/[\w.,~+%/@=-]+")
# As git wants them, and never one that it could take for an option or for two refs.
_REF = re.compile(r"[A-Za-z0-9_][\w./+-]{0,199}")
_LONGEST = 2048

Source = Path | GitSource
"""A path is a folder or an archive of this machine."""


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
    if is_archive(source):
        tree = read_archive(source)
        place = _only_skill(tree, source, str, do="pack one of them alone")
        start = f"{place}/" if place else ""
        inside = {path.removeprefix(start): tree[path] for path in tree if path.startswith(start)}
        return Incoming(spelled(inside), place.rsplit("/", 1)[-1] or source.stem, str(source))
    place = _only_skill(_documents_below(source), source, lambda place: str(source / place))
    folder = source / place if place else source
    return Incoming(spelled(read_folder(folder)), folder.resolve().name, str(folder))


def skills_below(top: Path) -> list[Path]:
    """Return the folders of the skills in a folder, without those that lie in others.

    Raises:
        SourceUnavailable: it is no folder, or has no skill.
        UnusableSkill: it has more folders than are searched.
    """
    return [top / place for place in _outermost(_documents_below(top), top)]


def spelled(tree: Tree) -> Tree:
    """Call the document SKILL.md; raises SourceUnavailable for none, UnusableSkill for two."""
    document = next(iter(documents(path for path in tree if "/" not in path)), None)
    if document is None:
        raise SourceUnavailable(f"there is no {DOCUMENT}, so there is no skill")
    named = {DOCUMENT if path == document else path: file for path, file in tree.items()}
    if len(named) < len(tree):
        raise UnusableSkill(f"it has both {DOCUMENT} and {show(document)}: keep one of them")
    return named


def _from_git(source: GitSource) -> Incoming:
    def at(place: str) -> GitSource:
        return replace(source, path="/".join(part for part in (source.path, place) if part))

    with fetched(source) as repository:
        found = at(_only_skill(repository.paths(source.path), source, lambda place: str(at(place))))
        name = (found.path or found.url).rsplit("/", 1)[-1].removesuffix(".git")
        return Incoming(spelled(repository.tree(found.path)), name, str(found), repository.commit)


def _only_skill(
    paths: Iterable[str], source: Source, named: Callable[[str], str], do: str = "name one of them"
) -> str:
    """Return the folder of the only skill; the error for several ends in `do` and their names."""
    places = _outermost(paths, source)
    if len(places) > 1:
        names = (named(place) for place in places[:_MAX_NAMED])
        shown = "".join(f"\n  {name if name.isprintable() else show(name)}" for name in names)
        more = f"\n  and {len(places) - _MAX_NAMED} more" if len(places) > _MAX_NAMED else ""
        raise SourceUnavailable(f"{source} has {len(places)} skills: {do}{shown}{more}")
    return places[0]


def _outermost(paths: Iterable[str], where: Source) -> list[str]:
    """Return the folders of documents that lie in no other document's folder."""
    found = {path.rpartition("/")[0] for path in documents(p for p in paths if not is_junk(p))}
    if not found:
        raise SourceUnavailable(f"{where} has no {DOCUMENT}, so there is no skill in it")
    if "" in found:
        return [""]
    return sorted(
        place for place in found if found.isdisjoint(map(str, PurePosixPath(place).parents))
    )


def _documents_below(top: Path) -> Iterator[str]:
    """Yield the paths of files that could be a skill's document, without following links."""
    if not top.is_dir():
        raise SourceUnavailable(f"{top} is no folder: look at its spelling")
    for number, (folder, folders, files) in enumerate(os.walk(top)):
        place = Path(folder).relative_to(top)
        deepest = len(place.parts) >= _MAX_DEPTH
        folders[:] = [] if deepest else sorted(set(folders) - JUNK_FOLDERS)
        # A folder with such a name was meant to be a skill.
        yield from ((place / name).as_posix() for name in documents([*files, *folders]))
        if number >= _MAX_FOLDERS:
            raise UnusableSkill(f"{top} has over {_MAX_FOLDERS:,} folders: name a skill's folder")


def parse_source(text: str, here: Path) -> Source:
    """Return what a text means; relative paths start `here`.

    Raises InvalidArgument: it is nothing of what can be a source.
    """
    if not text or len(text) > _LONGEST or not text.isprintable() or text.startswith("-"):
        raise InvalidArgument(f"{show(text)} is no source of a skill: {_HELP}")
    if "://" in text or text.startswith("git+"):
        return _url(text.removeprefix("git+"))
    if scp := _SCP.fullmatch(text):
        return _url("ssh://{}@{}/{}".format(*scp.groups()))
    if local := _local(text, here):
        return local
    match = _SHORT.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"{show(text)} is not there, and no other source: {_HELP}")
    owner, repository, path, ref = match.groups()
    return _github(owner, repository, ref or "", path.strip("/"))


def is_archive(path: Path) -> bool:
    """Return whether a path is that of an archive, judging by its name."""
    return path.name.lower().endswith(SUFFIXES) and not path.is_dir()


def _local(text: str, here: Path) -> Path | None:
    try:
        path = here / Path(text).expanduser()
        known = path.exists() or text.startswith((".", "/", "~")) or text.endswith(SUFFIXES)
    except (OSError, RuntimeError, ValueError) as exc:
        raise InvalidArgument(f"{show(text)} is no usable path ({exc}): {_HELP}") from exc
    if not known:
        return None
    path = path.absolute()
    return path.parent if is_document(path.name) else path


def _github(owner: str, repository: str, ref: str, path: str) -> GitSource:
    url = f"https://github.com/{owner}/{repository.removesuffix('.git')}.git"
    return _checked(GitSource(url, ref, path))


def _url(text: str) -> GitSource:
    address, _, fragment = text.partition("#")
    try:
        parts = urlsplit(address)
    except ValueError as exc:
        raise InvalidArgument(f"{show(text)} is no address ({exc}): {_HELP}") from exc
    if parts.scheme not in _SCHEMES:
        raise InvalidArgument(
            f"{show(text)} cannot be a source: of git's addresses {', '.join(_SCHEMES)} are "
            "allowed; what comes over others could be changed on the way"
        )
    if parts.query or (parts.scheme == "https" and "@" in parts.netloc):
        raise InvalidArgument(
            "a secret in an address would be written into the lock file: leave it out, and let "
            "git's credential helper give it"
        )
    path = fragment.removeprefix("subdirectory=").strip("/")
    if parts.netloc == "github.com" and (tree := _TREE.fullmatch(parts.path)):
        return _github(tree[1], tree[2], tree[3], tree[4] or path)
    place, ref = _split_ref(parts.path)
    host = parts.netloc
    host_fits = not host if parts.scheme == "file" else _NETWORK_PLACE.fullmatch(host)
    if not _URL_PATH.fullmatch(place) or not host_fits:
        raise InvalidArgument(f"{show(text)} names no repository: {_HELP}")
    return _checked(GitSource(f"{parts.scheme}://{host}{place}", ref, path))


def _split_ref(path: str) -> tuple[str, str]:
    """Part "/repo.git@feature/x": a ref may have slashes, so the first mark after .git counts."""
    head, mark, ref = path.partition(".git@")
    if mark:
        return f"{head}.git", ref
    head, _, ref = path.rpartition("@")
    return (head, ref) if head else (path, "")


def _checked(source: GitSource) -> GitSource:
    ref = source.ref
    if ref and (not _REF.fullmatch(ref) or ".." in ref or ref.endswith((".lock", "/", "."))):
        raise InvalidArgument(f"{show(ref)} is no commit, tag or branch: look at its spelling")
    if source.path:
        check_path(source.path)
    return source
