"""Copies a project folder without what its .gitignore files exclude; a program: see `projects`.

    {"source", "target", "owner": [uid, gid], "max_bytes", "max_files"}    on stdin, as JSON

The copy is limited in size, follows no link, leaves out `.git` and everything that is neither file,
folder nor link inside the project, and gets its name only when it is complete. One line on stdout
says what was copied; one on stderr says why the copy failed.
"""

import json
import os
import re
import shutil
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from mcp_sandbox.durable import closing_fd, publish_folder

_RULES = ".gitignore"
_LARGEST_RULES = 1 << 20
_DEEPEST = 100
_PARTIAL = ".partial"
_PIECE = 1 << 20
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CannotCopy(Exception):
    """The project was not copied. The message says why and is put into a sentence."""


@dataclass
class Copier:
    """Copies trees between open directories; the limits hold for all copies together."""

    owner: tuple[int, int]
    max_bytes: int
    max_files: int
    device: int
    used_bytes: int = 0
    files: int = 0
    left_out: int = 0
    rules: list[tuple[PurePosixPath, GitIgnoreSpec]] = field(default_factory=list)

    def tree(self, source: int, target: int, place: PurePosixPath) -> None:
        """Copy the content of a folder; `place` is its path inside the project."""
        if len(place.parts) > _DEEPEST:
            raise CannotCopy(f"its folders are nested more than {_DEEPEST} deep")
        rules = _read_rules(source)
        if rules is not None:
            self.rules.append((place, rules))
        for name in sorted(os.listdir(source)):
            self._entry(source, target, place / name)
        if rules is not None:
            self.rules.pop()

    def _entry(self, source: int, target: int, path: PurePosixPath) -> None:
        found = os.stat(path.name, dir_fd=source, follow_symlinks=False)
        folder = stat.S_ISDIR(found.st_mode)
        if path.name == ".git" or self._is_ignored(path, folder=folder):
            self.left_out += 1
            return
        self.files += 1
        if self.files > self.max_files:
            raise CannotCopy(f"it holds more than {self.max_files:,} files and folders")
        if folder and found.st_dev == self.device:
            self._folder(source, target, path)
        elif stat.S_ISREG(found.st_mode):
            self._file(source, target, path.name)
        elif stat.S_ISLNK(found.st_mode):
            self._link(source, target, path)
        else:
            self.left_out += 1

    def _is_ignored(self, path: PurePosixPath, *, folder: bool) -> bool:
        # The rules in the folder nearest to a file win.
        for place, rules in reversed(self.rules):
            included = rules.check_file(
                str(path.relative_to(place)) + ("/" if folder else "")
            ).include
            if included is not None:
                return included
        return False

    def _folder(self, source: int, target: int, path: PurePosixPath) -> None:
        flags = _READ | os.O_DIRECTORY
        with closing_fd(os.open(path.name, flags, dir_fd=source)) as inner:
            os.mkdir(path.name, 0o700, dir_fd=target)
            with closing_fd(os.open(path.name, flags, dir_fd=target)) as copy:
                self.tree(inner, copy, path)
                self.finish(copy, os.fstat(inner))

    def _file(self, source: int, target: int, name: str) -> None:
        with os.fdopen(os.open(name, _READ, dir_fd=source), "rb", buffering=0) as reader:
            found = os.fstat(reader.fileno())
            if not stat.S_ISREG(found.st_mode):
                self.left_out += 1
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=target), "wb") as writer:
                while piece := reader.read(_PIECE):
                    self.used_bytes += len(piece)
                    if self.used_bytes > self.max_bytes:
                        raise CannotCopy(f"it holds more than {self.max_bytes:,} bytes")
                    writer.write(piece)
                writer.flush()
                self.finish(writer.fileno(), found)

    def _link(self, source: int, target: int, path: PurePosixPath) -> None:
        text = os.readlink(path.name, dir_fd=source)
        if not _stays_inside(path, text):
            self.left_out += 1
            return
        os.symlink(text, path.name, dir_fd=target)
        if os.geteuid() == 0:
            os.chown(path.name, *self.owner, dir_fd=target, follow_symlinks=False)

    def finish(self, copy: int, found: os.stat_result) -> None:
        """Set owner, mode and times of a copy; its owner can always read and write it."""
        if os.geteuid() == 0:
            os.fchown(copy, *self.owner)
        own = 0o700 if stat.S_ISDIR(found.st_mode) else 0o600
        os.fchmod(copy, (found.st_mode & 0o777) | own)
        os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))


def _read_rules(folder: int) -> GitIgnoreSpec | None:
    try:
        file = os.open(_RULES, _READ, dir_fd=folder)
    except OSError:
        # There is none, or it is a link, which git does not follow either.
        return None
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        text = stream.read(_LARGEST_RULES + 1)
    if len(text) > _LARGEST_RULES:
        raise CannotCopy("one of its .gitignore files is larger than 1 MiB")
    rules = GitIgnoreSpec.from_lines(os.fsdecode(text).splitlines())
    return GitIgnoreSpec([_tried_once(each) for each in rules.patterns])


def _tried_once(rule: GitIgnoreSpecPattern) -> GitIgnoreSpecPattern:
    """Return the same rule in an expression that takes linear time."""
    if rule.regex is None:
        return rule
    text = _once(rule.regex.pattern, "[^/]*", "(?>[^/]*?", ")")
    text = _once(text, "(?:/.+)?/", "(?>(?:/.+?)??/", "(?=/))")
    return type(rule)(re.compile(text), rule.include)


def _once(text: str, wildcard: str, opened: str, closed: str) -> str:
    """Let each wildcard before another of its name, or path, match once, as little as it can."""
    first, *parts = text.split(wildcard)
    for at, part in enumerate(parts):
        more = at < len(parts) - 1 and ("/" in closed or "/" not in part.replace("[^/]", ""))
        first += opened + part + closed if more else wildcard + part
    return first


def _stays_inside(path: PurePosixPath, text: str) -> bool:
    depth = len(path.parts) - 1
    for part in PurePosixPath(text).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return False
    return not text.startswith("/")


def copy_project(
    source: str, target: Path, *, owner: tuple[int, int], max_bytes: int, max_files: int
) -> Copier:
    """Copy `source` to `target`, which appears once complete. Raises CannotCopy, OSError."""
    for left in target.parent.glob(f"{target.name}.*{_PARTIAL}"):
        # Left by a killed copier: the caller holds the chat's lock, so no other copies now.
        shutil.rmtree(left)
    partial = target.with_name(f"{target.name}.{os.getpid()}{_PARTIAL}")
    reading = os.open(source, _READ | os.O_DIRECTORY)
    copier = Copier(owner, max_bytes, max_files, os.fstat(reading).st_dev)
    partial.mkdir(mode=0o700)
    try:
        writing = os.open(partial, _READ | os.O_DIRECTORY)
        copier.tree(reading, writing, PurePosixPath())
        copier.finish(writing, os.fstat(reading))
        if not publish_folder(partial, target):
            raise CannotCopy(f"{target} exists already")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return copier


def main() -> None:
    """Copy as the JSON on stdin says."""
    order = json.load(sys.stdin)
    try:
        done = copy_project(order.pop("source"), Path(order.pop("target")), **order)
    except (CannotCopy, OSError) as exc:
        sys.exit(str(exc))
    sys.stdout.write(f"{done.files} entries, {done.used_bytes} bytes, {done.left_out} left out\n")


if __name__ == "__main__":
    main()
