"""Where discarded trees wait, and how they are deleted.

An item of the trash is a directory `{UTC time}-{random}` with trees of a chat, named after their
kinds (`workspace`, `home` …), and a file `chat` that says whose they were. A person gets something
back by moving it out.

Deleting works at any depth, on any name, with two open directories: each directory found on the
way is first moved up to the item, then emptied there. That may stop at any point; the item keeps
its name and the next time goes on.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.beneath import (
    create_file,
    grant_owner,
    make_directory,
    open_directory,
    open_file,
)

_STAMP = "%Y%m%dT%H%M%SZ"
_ITEM = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{16}")


@dataclass(frozen=True)
class TrashReport:
    """What emptying did. `stuck` items could not be deleted whole, though they were old enough."""

    deleted: tuple[str, ...]
    kept: tuple[str, ...]
    stuck: tuple[str, ...]


def item_name(now: float) -> str:
    """A new name that carries the time (seconds since the epoch)."""
    return f"{datetime.fromtimestamp(now, UTC).strftime(_STAMP)}-{secrets.token_hex(8)}"


def discarded_at(name: str) -> float | None:
    """When an item was discarded; None when the name is not that of an item."""
    match = _ITEM.fullmatch(name)
    if match is None:
        return None
    try:
        return datetime.strptime(match[1], _STAMP).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def throw_away(trash: int, trees: Mapping[str, tuple[int, bytes]], chat: ChatId, now: float) -> str:
    """Move trees, given as kind -> (parent, name), into a new item; returns its name."""
    name = item_name(now)
    item, _ = make_directory(trash, name.encode())
    try:
        create_file(item, b"chat", f"{chat}\n".encode(), owner=(os.geteuid(), os.getegid()))
        for kind, (parent, tree) in trees.items():
            _move(parent, tree, item, kind.encode())
    finally:
        os.close(item)
    return name


def destroy(trash: int, parent: int, name: bytes, now: float) -> None:
    """Delete a directory that nobody wants back; what is left when we are killed is in the trash.

    Absent is fine.
    """
    item = item_name(now).encode()
    try:
        os.rename(name, item, src_dir_fd=parent, dst_dir_fd=trash)
    except FileNotFoundError:
        return
    _delete_item(trash, item, lambda: None)


def items(trash: int) -> dict[str, float]:
    """When each item was discarded, by its name."""
    with os.scandir(trash) as entries:
        found = {entry.name: discarded_at(entry.name) for entry in entries}
    return {name: when for name, when in sorted(found.items()) if when is not None}


def owner(trash: int, name: str) -> ChatId | None:
    """Whose an item was; None when it does not say."""
    try:
        file = open_file(trash, f"{name}/chat".encode())
    except OSError:
        return None
    with os.fdopen(file, "rb") as stream:
        user, _, chat = stream.read(512).decode(errors="replace").rstrip().partition("/")
    try:
        return ChatId(user, chat)
    except InvalidArgument:
        return None


def empty(
    trash: int, *, is_due: Callable[[str], bool], checkpoint: Callable[[], None]
) -> TrashReport:
    """Delete the items that are due. Whatever `checkpoint` raises passes through."""
    with os.scandir(trash) as entries:
        names = sorted(entry.name for entry in entries)
    due = [name for name in names if discarded_at(name) is not None and is_due(name)]
    stuck = [name for name in due if not _delete_item(trash, name.encode(), checkpoint)]
    return TrashReport(
        deleted=tuple(name for name in due if name not in stuck),
        kept=tuple(name for name in names if name not in due),
        stuck=tuple(stuck),
    )


def drop_earlier(trash: int, chat: ChatId, keep: str, checkpoint: Callable[[], None]) -> None:
    """Delete what the chat discarded before `keep`: or resets would fill the disk for a day."""
    for name in items(trash):
        if name != keep and owner(trash, name) == chat:
            _delete_item(trash, name.encode(), checkpoint)


def _move(parent: int, tree: bytes, item: int, kind: bytes) -> None:
    try:
        os.rename(tree, kind, src_dir_fd=parent, dst_dir_fd=item)
    except FileNotFoundError:
        return


def _delete_item(trash: int, name: bytes, checkpoint: Callable[[], None]) -> bool:
    try:
        item = open_directory(trash, name)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        emptied = empty_directory(item, checkpoint)
    finally:
        os.close(item)
    return emptied and _gone(os.rmdir, name, trash)


def empty_directory(pit: int, checkpoint: Callable[[], None] = lambda: None) -> bool:
    """Delete everything in a directory of ours; False when something would not go."""
    while True:
        checkpoint()
        pass_ = _Pass(pit, checkpoint)
        pass_.run()
        if not pass_.left:
            return True
        if not pass_.progress:
            return False


class _Pass:
    """One time through the pit; directories met in its directories land in the pit."""

    def __init__(self, pit: int, checkpoint: Callable[[], None]) -> None:
        self._pit = pit
        self._checkpoint = checkpoint
        self.left = False
        self.progress = False

    def run(self) -> None:
        with os.scandir(self._pit) as entries:
            for entry in entries:
                name = os.fsencode(entry.name)
                if not entry.is_dir(follow_symlinks=False):
                    self._note(_gone(os.unlink, name, self._pit))
                    continue
                self._checkpoint()
                self._note(self._dissolve(name))

    def _dissolve(self, name: bytes) -> bool:
        """Empty one directory of the pit into the pit, and remove it."""
        try:
            _open_up(self._pit, name)
            directory = open_directory(self._pit, name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    self._take_out(directory, entry)
        finally:
            os.close(directory)
        return _gone(os.rmdir, name, self._pit)

    def _take_out(self, directory: int, entry: os.DirEntry[str]) -> None:
        name = os.fsencode(entry.name)
        if not entry.is_dir(follow_symlinks=False):
            self.progress |= _gone(os.unlink, name, directory)
            return
        try:
            # Moving a directory writes its ".." entry, which needs the right to write in it.
            _open_up(directory, name)
            new_name = secrets.token_hex(16).encode()
            os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=self._pit)
        except OSError:
            return
        # It may have landed behind this pass.
        self.left = self.progress = True

    def _note(self, gone: bool) -> None:
        self.progress |= gone
        self.left |= not gone


def _open_up(parent: int, name: bytes) -> None:
    """Make sure that we may list and change a directory; root always may."""
    status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    closed = status.st_mode & stat.S_IRWXU != stat.S_IRWXU
    if closed and os.geteuid() != 0:
        grant_owner(parent, name)


def _gone(remove: Callable[..., None], name: bytes, parent: int) -> bool:
    """Remove a name; True when it is no longer there."""
    try:
        remove(name, dir_fd=parent)
    except OSError as exc:
        # A busy name is a mount point, a non-empty one was filled behind our back.
        return exc.errno == errno.ENOENT
    return True
