"""What people write to say where a skill comes from.

    ./folder  /folder  ~/folder         a folder; a plain name is one too, where it exists
    ./file.zip  ./file.skill            an archive
    owner/repo[/path][@ref]             a repository on GitHub
    https://host/repo.git[@ref][#path]  a git repository, also with `git+` in front
    ssh://git@host/repo.git[@ref][#path]    and git@host:owner/repo.git[@ref][#path]
    file:///folder/repo.git[@ref][#path]
    https://github.com/owner/repo/tree/ref/path     as the browser shows it

A ref is a commit, a tag or a branch. pip's `#subdirectory=path` says the same as `#path`.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.skills.supply.archive import SUFFIXES
from mcp_sandbox.skills.supply.tree import check_path, show
from mcp_sandbox.skills.uris import is_document

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


@dataclass(frozen=True)
class FolderSource:
    """A folder of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class ArchiveSource:
    """An archive of this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class GitSource:
    """A folder of a repository; `ref` "" is its default branch, `path` "" its top."""

    url: str
    ref: str = ""
    path: str = ""

    def __str__(self) -> str:
        return (
            self.url + (f"@{self.ref}" if self.ref else "") + (f"#{self.path}" if self.path else "")
        )

    def at(self, path: str) -> "GitSource":
        """Return the source of another folder of it."""
        return GitSource(self.url, self.ref, path)


Source = FolderSource | ArchiveSource | GitSource


def parse_source(text: str, here: Path) -> Source:
    """Return what a text means; relative paths start `here`.

    Raises:
        InvalidArgument: it is nothing of what can be a source.
    """
    if not text or len(text) > _LONGEST or not text.isprintable() or text.startswith("-"):
        raise InvalidArgument(f"{show(text)} is no source of a skill: {_HELP}")
    if text.startswith("git+"):
        return _url(text.removeprefix("git+"))
    if "://" in text:
        return _url(text)
    if scp := _SCP.fullmatch(text):
        user, host, rest = scp.groups()
        return _url(f"ssh://{user}@{host}/{rest}")
    return _local(text, here) or _short(text)


def _local(text: str, here: Path) -> Source | None:
    try:
        path = here / Path(text).expanduser()
        known = path.exists() or text.startswith((".", "/", "~")) or text.endswith(SUFFIXES)
    except (OSError, RuntimeError, ValueError) as exc:
        raise InvalidArgument(f"{show(text)} is no usable path ({exc}): {_HELP}") from exc
    if not known:
        return None
    path = path.absolute()
    if text.lower().endswith(SUFFIXES) and not path.is_dir():
        return ArchiveSource(path)
    return FolderSource(path.parent if is_document(path.name) else path)


def _short(text: str) -> GitSource:
    match = _SHORT.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"{show(text)} is not there, and no other source: {_HELP}")
    owner, repository, path, ref = match.groups()
    return _github(owner, repository, ref or "", path.strip("/"))


def _github(owner: str, repository: str, ref: str, path: str) -> GitSource:
    url = f"https://github.com/{owner}/{repository.removesuffix('.git')}.git"
    return GitSource(url, _checked_ref(ref), _checked_path(path))


def _url(text: str) -> GitSource:
    address, _, fragment = text.partition("#")
    try:
        parts = urlsplit(address)
    except ValueError as exc:
        raise InvalidArgument(f"{show(text)} is no address ({exc}): {_HELP}") from exc
    if parts.scheme not in _SCHEMES:
        raise InvalidArgument(
            f"{show(text)} cannot be a source: of git's addresses {', '.join(_SCHEMES)} are "
            "allowed; anybody on the way could change what comes over others"
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
    if not _URL_PATH.fullmatch(place) or not _place_fits(parts.scheme, parts.netloc):
        raise InvalidArgument(f"{show(text)} names no repository: {_HELP}")
    url = f"{parts.scheme}://{parts.netloc}{place}"
    return GitSource(url, _checked_ref(ref), _checked_path(path))


def _place_fits(scheme: str, place: str) -> bool:
    return not place if scheme == "file" else bool(_NETWORK_PLACE.fullmatch(place))


def _split_ref(path: str) -> tuple[str, str]:
    """Part "/repo.git@feature/x": a ref may have slashes, so the first mark after .git counts."""
    head, mark, ref = path.partition(".git@")
    if mark:
        return f"{head}.git", ref
    head, _, ref = path.rpartition("@")
    return (head, ref) if head else (path, "")


def _checked_ref(ref: str) -> str:
    bad = ref and (not _REF.fullmatch(ref) or ".." in ref or ref.endswith((".lock", "/", ".")))
    if bad:
        raise InvalidArgument(f"{show(ref)} is no commit, tag or branch: look at its spelling")
    return ref


def _checked_path(path: str) -> str:
    if path:
        check_path(path)
    return path
