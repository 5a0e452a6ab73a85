"""Reads a folder of a git repository into a tree, without ever checking it out.

Objects are fetched and then read as they are: no work tree, so no hooks, filters, attributes,
links, submodules or large-file storage of the repository take part. Only the protocols of the
address may be spoken, nobody is asked for anything, and time and disk are bounded.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.config import git_variables
from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.contents import MAX_FILES
from mcp_sandbox.skills.files import MAX_BYTES
from mcp_sandbox.skills.supply.source import GitSource
from mcp_sandbox.skills.supply.tree import (
    Collector,
    Tree,
    is_junk,
    show,
    too_large,
)

TIME_LIMIT_S = 120.0
_MAX_REPOSITORY_MIB = 1024
_ANSWER_MIB = 20
_FILE_MODES = {"100644": False, "100755": True, "100664": False}
_SETTINGS = (
    "core.hooksPath=/dev/null",
    "core.fsmonitor=false",
    "core.symlinks=false",
    "core.askPass=true",
    "credential.interactive=false",
    "fetch.recurseSubmodules=false",
    "fetch.writeCommitGraph=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "protocol.ext.allow=never",
    "transfer.bundleURI=false",
    "protocol.version=2",
    "http.followRedirects=initial",
    "submodule.recurse=false",
)


@dataclass(frozen=True)
class Listed:
    """A file in a commit, before it is read."""

    mode: str
    object_id: str
    size: int
    path: str


class Repository:
    """The fetched commit of a source: what is in it, and the files of one of its folders."""

    def __init__(self, git: "_Git", commit: str) -> None:
        self._git = git
        self.commit = commit

    def paths(self, folder: str) -> Sequence[str]:
        """Return the paths of all files below a folder, in relation to the top."""
        return [listed.path for listed in self._listed(folder)]

    def tree(self, folder: str) -> Tree:
        """Return the files of a folder.

        Raises:
            UnusableSkill: it holds links, submodules, or more than a skill may.
        """
        start = f"{folder}/" if folder else ""
        collected, wanted = Collector(), list[tuple[str, Listed]]()
        for listed in self._listed(folder):
            path = listed.path.removeprefix(start)
            if is_junk(path):
                continue
            if listed.mode not in _FILE_MODES:
                raise UnusableSkill(
                    f"{show(path)} is a link or a submodule of the repository: a skill has plain "
                    "files only"
                )
            collected.expect(path)
            wanted.append((path, listed))
        if len(wanted) > MAX_FILES or sum(listed.size for _, listed in wanted) > MAX_BYTES:
            raise too_large()
        for (path, listed), data in zip(wanted, self._blobs(wanted), strict=True):
            collected.add(path, data, executable=_FILE_MODES[listed.mode])
        return collected.tree()

    def _blobs(self, wanted: Sequence[tuple[str, Listed]]) -> Iterator[bytes]:
        """Yield the bytes of files, all asked for at once."""
        ids = "".join(f"{listed.object_id}\n" for _, listed in wanted)
        answer = self._git.run("cat-file", "--batch", given=ids.encode())
        at = 0
        for _, listed in wanted:
            # "{id} blob {size}", the bytes, and a line's end.
            at = answer.index(b"\n", at) + 1
            yield answer[at : at + listed.size]
            at += listed.size + 1

    def _listed(self, folder: str) -> Iterator[Listed]:
        what = f"{self.commit}:{folder}" if folder else self.commit
        kind = self._git.run("cat-file", "-t", what, missing=folder)
        if kind.strip() not in (b"tree", b"commit"):
            raise SourceUnavailable(f"{show(folder)} is a file of the repository: name its folder")
        prefix = f"{folder}/" if folder else ""
        answer = self._git.run("ls-tree", "-r", "-z", "-l", "--full-tree", what)
        for entry in answer.split(b"\0")[:-1]:
            facts, _, name = entry.partition(b"\t")
            mode, _, object_id, size = facts.split()
            bytes_ = int(size) if size.isdigit() else 0
            path = prefix + name.decode("utf-8", "surrogateescape")
            yield Listed(mode.decode(), object_id.decode(), bytes_, path)


@dataclass(frozen=True)
class _Git:
    """Runs git on a repository of ours until a moment on the monotonic clock."""

    folder: Path
    source: GitSource
    until: float

    def run(
        self,
        *arguments: str,
        given: bytes = b"",
        missing: str | None = None,
        mib: int = _ANSWER_MIB,
    ) -> bytes:
        """Return what git printed, with `given` on its stdin.

        `missing` names what is not there if it fails, `mib` bounds each file that git writes.
        """
        settings = (part for setting in _SETTINGS for part in ("-c", setting))
        # A tree may refer to itself in layers and be endless when listed: the kernel ends it.
        limited = ["/bin/sh", "-c", f'ulimit -f {mib * 2048}; exec "$@"', "sh"]
        with ExitStack() as stack:
            stdin, stdout, stderr = (
                stack.enter_context(tempfile.TemporaryFile(dir=self.folder)) for _ in range(3)
            )
            stdin.write(given)
            stdin.seek(0)
            with subprocess.Popen(  # noqa: S603  fixed program, arguments checked by `source`
                [*limited, "git", *settings, *arguments],
                cwd=self.folder,
                env=self._environment(),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            ) as process:
                self._wait(process)
            stdout.seek(0)
            stderr.seek(0)
            if process.returncode == -signal.SIGXFSZ:
                raise UnusableSkill(f"{self.source} is larger than any repository of skills")
            if process.returncode != 0:
                raise self._failure(missing, stderr.read(1 << 16).decode("utf-8", "replace"))
            return stdout.read()

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(max(0.0, self.until - time.monotonic()))
        except BaseException as exc:
            # Helpers that speak to the network are in its group.
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(exc, subprocess.TimeoutExpired):
                raise
            raise SourceUnavailable(
                f"git did not get {self.source} in time: look at the network, "
                "or clone it yourself and give the folder"
            ) from exc

    def _failure(self, missing: str | None, errors: str) -> SourceUnavailable:
        if missing is not None:
            return SourceUnavailable(
                f"{self.source.url} has no folder {show(missing)}: look at its spelling"
            )
        lines = [line for line in errors.splitlines() if line.strip()]
        said = show(" ".join(lines[-4:]), 400) if lines else "git said nothing"
        return SourceUnavailable(
            f"git cannot get {self.source}: {said}. Look at the address and the ref (a commit is "
            "given with all its digits), and whether you may read it"
        )

    def _environment(self) -> dict[str, str]:
        spoken = "file" if self.source.url.startswith("file:") else "https:ssh"
        return {
            **git_variables(),
            "GIT_ALLOW_PROTOCOL": spoken,
            "GIT_ASKPASS": "true",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_DIR": str(self.folder),
            "GIT_LFS_SKIP_SMUDGE": "1",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_PROTOCOL_FROM_USER": "0",
            "GIT_SSH_COMMAND": "ssh -oBatchMode=yes",
            "GIT_TERMINAL_PROMPT": "0",
            "LC_ALL": "C.UTF-8",
        }


class Fetched:
    """Holds a repository while it is read; a context manager."""

    def __init__(self, source: GitSource, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._source = source
        self._time_limit_s = time_limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="mcp-sandbox-git-")

    def __enter__(self) -> Repository:
        """Fetch the commit.

        Raises:
            SourceUnavailable: git is not installed, or cannot get it.
        """
        try:
            return self._fetch()
        except FileNotFoundError as exc:
            self._folder.cleanup()
            raise SourceUnavailable(
                "git is not installed: install it, or give a folder or an archive"
            ) from exc
        except BaseException:
            self._folder.cleanup()
            raise

    def __exit__(self, *_exc: object) -> None:
        self._folder.cleanup()

    def _fetch(self) -> Repository:
        folder = Path(self._folder.name)
        git = _Git(folder, self._source, time.monotonic() + self._time_limit_s)
        git.run("init", "--quiet", "--bare", "--template=", str(folder))
        git.run(
            "fetch",
            "--quiet",
            "--depth=1",
            "--no-tags",
            "--no-recurse-submodules",
            "--no-auto-maintenance",
            "--end-of-options",
            self._source.url,
            self._source.ref or "HEAD",
            mib=_MAX_REPOSITORY_MIB,
        )
        commit = git.run("rev-parse", "--verify", "--quiet", "FETCH_HEAD^{commit}").decode().strip()
        return Repository(git, commit)
