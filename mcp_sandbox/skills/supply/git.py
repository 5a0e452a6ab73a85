"""Reads a folder of a git repository into a tree, without ever checking it out.

Objects are fetched and then read as they are: no work tree, so no hooks, filters, attributes,
links, submodules or large-file storage of the repository take part. Git may speak
only https and ssh (or file, for such an address) and not prompt; time and disk are bounded.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mcp_sandbox.config import git_variables
from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.contents import MAX_BYTES, MAX_FILES
from mcp_sandbox.skills.supply.tree import Collector, Tree, is_junk, show, too_large

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
def fetched(source: GitSource, *, time_limit_s: float = 120.0) -> Generator["Repository"]:
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
                said = stderr.read(1 << 16).decode("utf-8", "replace")
                raise self._failure(process.returncode, missing, said)
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
        said = show(" ".join(lines[-4:]), 400) if lines else "git said nothing"
        why = (
            f"git cannot get {self._source}: {said}. Look at the address and the ref (a commit is "
            "given with all its digits), and whether you may read it"
        )
        if code == _NO_PROGRAM:
            why = "git is not installed: install it, or give a folder or an archive"
        elif missing is not None:
            why = f"{self._source.url} has no folder {show(missing)}: look at its spelling"
        return SourceUnavailable(why)
