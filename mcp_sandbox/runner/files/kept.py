"""Files that the runner keeps in two folders of its own, in a place that code inside owns.

No link is followed there: it may lead to files of the user on the host.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    Result = TypeVar("Result")

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


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
