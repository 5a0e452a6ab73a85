"""Gets one skill from a source: all its files, and where exactly they came from.

Objects of git are fetched and then read as they are: no work tree, so no hooks, filters,
attributes, links, submodules or large-file storage of the repository take part. Git may speak
only https and ssh (or file, for such an address) and not prompt; time and disk are bounded.

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
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

from mcp_sandbox.config import git_variables
from mcp_sandbox.errors import InvalidArgument, SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.contents import JUNK_FOLDERS, MAX_BYTES, MAX_FILES
from mcp_sandbox.skills.skill import DOCUMENT, is_document
from mcp_sandbox.skills.supply.tree import (
    SUFFIXES,
    Collector,
    Tree,
    check_path,
    documents,
    is_junk,
    read_archive,
    read_folder,
    show,
    too_large,
)

# The shell's exit code where there is no such program.
_NO_PROGRAM = 127
_FILE_MODES = {"100644": False, "100755": True, "100664": False}
_SETTINGS = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.symlinks=false", "core.askPass=true",
    "credential.interactive=false", "fetch.recurseSubmodules=false",
    "fetch.writeCommitGraph=false", "gc.auto=0", "maintenance.auto=false",
    "protocol.ext.allow=never", "transfer.bundleURI=false", "protocol.version=2",
    "http.followRedirects=initial", "submodule.recurse=false",
)  # fmt: skip
_VARIABLES = {
    "GIT_ASKPASS": "true", "GIT_ATTR_NOSYSTEM": "1", "GIT_LFS_SKIP_SMUDGE": "1",
    "GIT_NO_REPLACE_OBJECTS": "1", "GIT_PROTOCOL_FROM_USER": "0",
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8",
}  # fmt: skip
_FETCH = (
    "fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules",
    "--no-auto-maintenance", "--end-of-options",
)  # fmt: skip


@dataclass(frozen=True)
class GitSource:
    """A folder of a repository; `ref` "" is its default branch, `path` "" its top."""

    url: str
    ref: str = ""
    path: str = ""

    def __str__(self) -> str:
        ref, path = f"@{self.ref}" if self.ref else "", f"#{self.path}" if self.path else ""
        return self.url + ref + path


class _Listed(NamedTuple):
    mode: str
    object_id: str
    size: int
    path: str


@contextmanager
def open_repository(source: GitSource, *, time_limit_s: float = 120.0) -> Generator["Repository"]:
    """Fetch the commit of a source and keep it while it is read.

    Raises SourceUnavailable: git is not installed, or cannot get it.
    """
    with tempfile.TemporaryDirectory(prefix="mcp-sandbox-git-") as folder:
        yield Repository(Path(folder), source, time.monotonic() + time_limit_s)


class Repository:
    """The fetched commit of a source: what is in it, and the files of one of its folders."""

    def __init__(self, folder: Path, source: GitSource, until: float) -> None:
        """Get the commit and nothing before it; `until` on the monotonic clock git may run."""
        self._folder = folder
        self._source = source
        self._until = until
        self._git("init", "--quiet", "--bare", "--template=", str(self._folder))
        self._git(*_FETCH, source.url, source.ref or "HEAD", mib=1024)
        commit = self._git("rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}")
        self.commit = commit.decode().strip()

    def paths(self, folder: str) -> Sequence[str]:
        """Return the paths of all files below a folder, relative to it."""
        return [listed.path for listed in self._listed(folder)]

    def tree(self, folder: str) -> Tree:
        """Return the files of a folder.

        Raises UnusableSkill: it holds links, submodules, or more than a skill may.
        """
        collected, wanted = Collector(), list[_Listed]()
        for listed in self._listed(folder):
            if is_junk(listed.path):
                continue
            if listed.mode not in _FILE_MODES:
                raise UnusableSkill(
                    f"{show(listed.path)} is a link or a submodule of the repository: a skill has "
                    "plain files only"
                )
            wanted.append(listed)
        if len(wanted) > MAX_FILES or sum(listed.size for listed in wanted) > MAX_BYTES:
            raise too_large()
        ids = "".join(f"{listed.object_id}\n" for listed in wanted)
        answer = self._git("cat-file", "--batch", given=ids.encode())
        at = 0
        for listed in wanted:
            # "{id} blob {size}", the bytes, and a line's end.
            at = answer.index(b"\n", at) + 1
            data = answer[at : at + listed.size]
            collected.add(listed.path, data, executable=_FILE_MODES[listed.mode])
            at += listed.size + 1
        return collected.tree()

    def _listed(self, folder: str) -> Iterator[_Listed]:
        what = f"{self.commit}:{folder}" if folder else self.commit
        if self._git("cat-file", "-t", what, missing=folder).strip() not in (b"tree", b"commit"):
            raise SourceUnavailable(f"{show(folder)} is a file of the repository: name its folder")
        for entry in self._git("ls-tree", "-r", "-z", "-l", "--full-tree", what).split(b"\0")[:-1]:
            facts, _, name = entry.partition(b"\t")
            mode, _, object_id, size = facts.decode().split()
            path = name.decode("utf-8", "surrogateescape")
            yield _Listed(mode, object_id, int(size) if size.isdigit() else 0, path)

    def _git(
        self,
        *arguments: str,
        given: bytes = b"",
        missing: str | None = None,
        mib: int = 20,
    ) -> bytes:
        """Return what git printed, with `given` on its stdin.

        `missing` names what is not there if it fails, `mib` bounds each file that git writes.
        """
        spoken = "file" if self._source.url.startswith("file:") else "https:ssh"
        environment = {**git_variables(), **_VARIABLES, "GIT_ALLOW_PROTOCOL": spoken}
        settings = (part for setting in _SETTINGS for part in ("-c", setting))
        # Nested trees may repeat each other until a listing has no end: the kernel ends it.
        limited = ["/bin/sh", "-c", f'ulimit -f {mib * 2048}; exec "$@"', "sh"]
        with ExitStack() as stack:
            stdin, stdout, stderr = (
                stack.enter_context(tempfile.TemporaryFile(dir=self._folder)) for _ in range(3)
            )
            stdin.write(given)
            stdin.seek(0)
            with subprocess.Popen(  # noqa: S603  fixed program, arguments checked by `source`
                [*limited, "git", *settings, *arguments],
                cwd=self._folder,
                env={**environment, "GIT_DIR": str(self._folder)},
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            ) as process:
                self._wait(process)
            stdout.seek(0)
            stderr.seek(0)
            if process.returncode != 0:
                errors = stderr.read(1 << 16).decode("utf-8", "replace")
                raise self._failure(process.returncode, missing, errors)
            return stdout.read()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(max(0.0, self._until - time.monotonic()))
        except BaseException as exc:
            # Helpers that speak to the network are in its group.
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
            raise SourceUnavailable(
                f"git did not get {self._source} in time: look at the network, "
                "or clone it yourself and give the folder"
            ) from exc

    def _failure(self, code: int, missing: str | None, errors: str) -> Exception:
        if code == -signal.SIGXFSZ:
            return UnusableSkill(f"{self._source} is larger than any repository of skills")
        lines = [line for line in errors.splitlines() if line.strip()]
        message = show(" ".join(lines[-4:]), 400) if lines else "git said nothing"
        why = (
            f"git cannot get {self._source}: {message}. Look at the address and the ref (a commit "
            "is given with all its digits), and whether you may read it"
        )
        if code == _NO_PROGRAM:
            why = "git is not installed: install it, or give a folder or an archive"
        elif missing is not None:
            why = f"{self._source.url} has no folder {show(missing)}: look at its spelling"
        return SourceUnavailable(why)


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
class FetchedSkill:
    """A skill as its source has it now. Its document is called SKILL.md, however it was spelled.

    `source` is what gets it again; `commit` is empty unless it came from git.
    """

    tree: Tree
    folder_name: str
    source: str
    commit: str = ""


def fetch(source: Source) -> FetchedSkill:
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
        return FetchedSkill(
            fix_document_name(inside), place.rsplit("/", 1)[-1] or source.stem, str(source)
        )
    place = _only_skill(_documents_below(source), source, lambda place: str(source / place))
    folder = source / place if place else source
    return FetchedSkill(fix_document_name(read_folder(folder)), folder.resolve().name, str(folder))


def skills_below(top: Path) -> list[Path]:
    """Return the folders of the skills in a folder, without those that lie in others.

    Raises:
        SourceUnavailable: it is no folder, or has no skill.
        UnusableSkill: it has more folders than are searched.
    """
    return [top / place for place in _outermost(_documents_below(top), top)]


def fix_document_name(tree: Tree) -> Tree:
    """Call the document SKILL.md; raises SourceUnavailable for none, UnusableSkill for two."""
    document = next(iter(documents(path for path in tree if "/" not in path)), None)
    if document is None:
        raise SourceUnavailable(f"there is no {DOCUMENT}, so there is no skill")
    named = {DOCUMENT if path == document else path: file for path, file in tree.items()}
    if len(named) < len(tree):
        raise UnusableSkill(f"it has both {DOCUMENT} and {show(document)}: keep one of them")
    return named


def _from_git(source: GitSource) -> FetchedSkill:
    def at(place: str) -> GitSource:
        return replace(source, path="/".join(part for part in (source.path, place) if part))

    with open_repository(source) as repository:
        found = at(_only_skill(repository.paths(source.path), source, lambda place: str(at(place))))
        name = (found.path or found.url).rsplit("/", 1)[-1].removesuffix(".git")
        return FetchedSkill(
            fix_document_name(repository.tree(found.path)), name, str(found), repository.commit
        )


def _only_skill(
    paths: Iterable[str], source: Source, named: Callable[[str], str], do: str = "name one of them"
) -> str:
    """Return the folder of the only skill; the error for several ends in `do` and their names."""
    places = _outermost(paths, source)
    if len(places) > 1:
        names = (named(place) for place in places[:_MAX_NAMED])
        listed = "".join(f"\n  {name if name.isprintable() else show(name)}" for name in names)
        more = f"\n  and {len(places) - _MAX_NAMED} more" if len(places) > _MAX_NAMED else ""
        raise SourceUnavailable(f"{source} has {len(places)} skills: {do}{listed}{more}")
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
        raise SourceUnavailable(f"{top} is no folder: name a skill's, or look at its spelling")
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
    if parts.path.lower().endswith((*SUFFIXES, ".gz", ".tgz")):
        raise InvalidArgument(f"{show(text)} is an archive: download it, then give the file")
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
