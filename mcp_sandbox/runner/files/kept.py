"""Files that the runner keeps in two folders of its own, in a place that code inside owns.

No link is followed there: it may lead to files of the user on the host.
"""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner.files.paths import KEPT, home, workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Result = TypeVar("Result")

TOTAL = 256 * 1024 * 1024
SECONDS = 7 * 24 * 3600
_SUFFIXES = ("txt", "png", "jpg", "html")
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Names of files of running commands, which are never deleted.
in_use: set[str] = set()


def base_of(name: str) -> str:
    """Return how the paths of all files begin that are kept of the call with this name."""
    return os.path.join(home(), KEPT, name)


def within(path: str, act: Callable[[str, int], Result], own: int = 2) -> Result:
    """Call `act` with the name of a file and its open folder. May raise OSError.

    The last `own` folders are the runner's, and made if they are missing.
    """
    above, name = os.path.split(path)
    folder = within(above, _open, own - 1) if own else os.open(above, os.O_PATH | os.O_CLOEXEC)
    try:
        return act(name, folder)
    finally:
        os.close(folder)


def _open(name: str, above: int) -> int:
    try:  # noqa: SIM105 - contextlib would delay the first call
        os.mkdir(name, dir_fd=above)
    except FileExistsError:
        pass  # Usually. If it is a link, that is refused now.
    return os.open(name, _FOLDER, dir_fd=above)


def create(path: str) -> int:
    """Open a file that is not there yet, to write it. May raise OSError."""
    return within(path, lambda name, folder: os.open(name, _NEW, 0o644, dir_fd=folder))


def remove(path: str, own: int = 2) -> bool:
    """Remove a file; return whether that could be done."""
    try:
        within(path, lambda name, folder: os.unlink(name, dir_fd=folder), own)
    except OSError:
        return False
    return True


def clear(_name: str, folder: int) -> list[str]:
    """Delete old files of the runner, or those over the total; return the names of the others."""
    total = 0
    oldest = time.time() - SECONDS
    files = []
    with os.scandir(folder) as entries:
        # At most 1,000 files: user code may have put anything there.
        for entry, _ in zip(entries, range(1000)):
            name = entry.name
            if entry.is_file(follow_symlinks=False) and _is_ours(name) and name not in in_use:
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime, status.st_size, name))
    left = []
    for modified, size, name in sorted(files, reverse=True):
        total += size
        if total > TOTAL or modified < oldest:
            os.unlink(name, dir_fd=folder)
        else:
            left.append(name)
    return left


def _is_ours(name: str) -> bool:
    """Return whether the runner names files so: HEX-SIX.txt, HEX-SIX-NUMBER.png and the like."""
    stem, _, suffix = name.rpartition(".")
    parts = stem.split("-")
    known = suffix in _SUFFIXES and len(parts) in (2, 3) and len(parts[1]) == 6
    return known and all(part and not part.strip("0123456789abcdef") for part in parts)


def take_over() -> None:
    """Move to the home what an earlier version has kept in the workspace."""
    old = os.path.join(workspace(), KEPT)
    if not os.path.lexists(os.path.dirname(old)):
        return
    try:
        within(old + "/", lambda _, folder: _move_all(folder))
        within(old, lambda name, folder: os.rmdir(name, dir_fd=folder), 1)
        remove(os.path.join(os.path.dirname(old), ".gitignore"), 1)
        os.rmdir(os.path.dirname(old))
    except OSError:
        # Something of the chat is in its way, or in there, or the disk is full: it stays.
        return


def _move_all(folder: int) -> None:
    # Not all that is there: it may be more than a start may take, or the disk.
    for name in clear("", folder):
        remove(base_of(name))  # What an earlier start was killed in.
        with open(os.open(name, _OLD, dir_fd=folder), "rb") as file:
            found = os.fstat(file.fileno())
            with open(create(base_of(name)), "wb") as copy:
                # To another mount nothing can be renamed.
                while os.sendfile(copy.fileno(), file.fileno(), None, TOTAL):
                    pass
                os.utime(copy.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        os.unlink(name, dir_fd=folder)
