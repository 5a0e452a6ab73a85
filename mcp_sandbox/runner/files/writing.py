"""Writes files: all or nothing, and nothing left behind when it fails."""

from __future__ import annotations

import os
import os.path
import stat
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.files.paths import TEMPORARY, relative, resolve, show
from mcp_sandbox.runner.files.walk import kind_of
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mcp_sandbox.runner.files.call import Call

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write(call: Call) -> dict[str, Any]:
    """Put the body into a file, replacing it at once or appending to it."""
    path = resolve(call.text("path"))
    append = call.flag("append")
    mode = call.optional_number("mode", high=0o777)
    parents = _make_parents(path)
    try:
        target, found = destination(path)
        if append:
            written = _append(target, found, call.body(), mode)
        else:
            keep = stat.S_IMODE(found.st_mode) & 0o777 if found and mode is None else mode
            written = replace(target, lambda fd: pipes.copy(call.body(), fd), keep)
    except BaseException:
        _remove_empty(parents)
        raise
    return {"path": relative(path), "written": written, "created": found is None}


def destination(path: str) -> tuple[str, os.stat_result | None]:
    """The file that writing to `path` changes (a link's target), and what is there.

    Raises:
        OpError: something that is not a regular file, or a read-only one.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return os.path.realpath(path), None
    if not stat.S_ISREG(found.st_mode):
        raise OpError(
            "wrong_kind",
            f"{show(path)} is a {kind_of(found.st_mode)}: only regular files can be written",
        )
    if not os.access(path, os.W_OK, effective_ids=True):
        why = "is read-only: make it writable with chmod first"
        if found.st_uid != os.geteuid():
            why = "belongs to another user: copy it into the workspace and change the copy"
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            why = "is on a read-only mount: copy it into the workspace and change the copy"
        raise OpError("permission", f"{show(path)} {why}")
    return os.path.realpath(path), found


def replace(
    target: str,
    fill: Callable[[int], int],
    mode: int | None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Let `fill` write a new file, then make it `target` in one step; returns what `fill` did.

    `check` runs last and may raise to keep the old file.
    """
    parent = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        draft = _Draft(parent)
        try:
            draft.open()
            written = fill(draft.fd)
            if mode is not None:
                os.fchmod(draft.fd, mode)
            os.fsync(draft.fd)
            check()
            draft.publish(os.path.basename(target))
        finally:
            draft.discard()
        os.fsync(parent)
    finally:
        os.close(parent)
    return written


class _Draft:
    """A file in the directory `parent` that has no name, or a temporary one, until published."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._name = ""
        self.fd = -1

    def open(self) -> None:
        self.fd = self._nameless()
        if self.fd < 0:
            self._name = _temporary()
            self.fd = os.open(self._name, _NEW, 0o666, dir_fd=self._parent)

    def _nameless(self) -> int:
        """A file that vanishes with us whatever happens, or -1 where that cannot be had."""
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=self._parent)
        except OSError:
            return -1
        # It gets its name through /proc, which a process that cannot be dumped may not use.
        if os.access(f"/proc/self/fd/{fd}", os.F_OK):
            return fd
        os.close(fd)
        return -1

    def publish(self, name: str) -> None:
        if not self._name and not self._link(name):
            self._name = _temporary()
            self._link(self._name)
        if self._name:
            os.rename(self._name, name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
            self._name = ""

    def _link(self, name: str) -> bool:
        try:
            os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._parent, follow_symlinks=True)
        except FileExistsError:
            return False
        return True

    def discard(self) -> None:
        """Forget it, unless it is published; right after any step, for a stop can come there."""
        if self.fd >= 0:
            os.close(self.fd)
        try:
            if self._name:
                os.unlink(self._name, dir_fd=self._parent)
        except FileNotFoundError:
            # Stopped before it had the name, or after it gave it up.
            return


def _temporary() -> str:
    return TEMPORARY + os.urandom(8).hex()


def _append(
    target: str, found: os.stat_result | None, body: Iterable[bytes], mode: int | None
) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(target, flags | (os.O_CREAT | os.O_EXCL if found is None else 0), 0o666)
    try:
        before = os.fstat(fd).st_size
        try:
            written = pipes.copy(body, fd)
            if mode is not None:
                os.fchmod(fd, mode)
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, before)
            if found is None:
                os.unlink(target)
            raise
    finally:
        os.close(fd)
    return written


def _make_parents(path: str) -> list[str]:
    """Create the directories above `path`; returns those that were new, the highest first."""
    missing = []
    parent = os.path.dirname(path)
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for directory in reversed(missing):
        os.makedirs(directory, exist_ok=True)
    return missing[::-1]


def _remove_empty(directories: list[str]) -> None:
    try:
        for directory in reversed(directories):
            os.rmdir(directory)
    except OSError:
        # Somebody else uses it by now; the first failure is the one worth telling.
        return
