"""Where discarded trees wait, and how they are deleted.

An item of the trash is a directory `{UTC time}-{random}` with trees of a chat, named after their
kinds (`workspace`, `home` …), and a file `chat` that says whose they were. A person gets something
back by moving it out.

Deleting may stop at any point; the item keeps its name and the next time goes on.
"""

import errno
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime

from mcp_sandbox.durable import closing_fd
from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.beneath import create_file, make_directory, open_directory, open_file
from mcp_sandbox.workspace.walk import Checkpoint, walk

_STAMP = "%Y%m%dT%H%M%SZ"
_ITEM = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{16}")


def item_name(now: float) -> str:
    """Return a new item name that contains the time (seconds since the epoch)."""
    return f"{datetime.fromtimestamp(now, UTC).strftime(_STAMP)}-{secrets.token_hex(8)}"


def discarded_at(name: str) -> float | None:
    """Return when an item was discarded (epoch); None if the name is not that of an item."""
    match = _ITEM.fullmatch(name)
    with suppress(ValueError):
        return match and datetime.strptime(match[1], _STAMP).replace(tzinfo=UTC).timestamp()
    return None


def throw_away(trash: int, trees: Mapping[str, tuple[int, bytes]], chat: ChatId, now: float) -> str:
    """Move trees, given as kind -> (parent, name), into a new item; returns its name."""
    name = item_name(now)
    item, _ = make_directory(trash, name.encode())
    with closing_fd(item):
        create_file(item, b"chat", f"{chat}\n".encode(), owner=(os.geteuid(), os.getegid()))
        for kind, (parent, tree) in trees.items():
            with suppress(FileNotFoundError):
                os.rename(tree, kind, src_dir_fd=parent, dst_dir_fd=item)
    return name


def destroy(trash: int, parent: int, name: bytes, now: float) -> None:
    """Delete a directory, if it is there; what is left when we are killed is in the trash."""
    item = item_name(now).encode()
    try:
        os.rename(name, item, src_dir_fd=parent, dst_dir_fd=trash)
    except FileNotFoundError:
        return
    _delete_item(trash, item, lambda: None)


def items(trash: int) -> dict[str, float]:
    """Return when each item was discarded (seconds since the epoch), by its name."""
    with os.scandir(trash) as entries:
        found = {entry.name: discarded_at(entry.name) for entry in entries}
    return {name: when for name, when in sorted(found.items()) if when is not None}


def owner(trash: int, name: str) -> ChatId | None:
    """Return the chat that an item belonged to; None if unknown."""
    with suppress(OSError, InvalidArgument):
        with os.fdopen(open_file(trash, f"{name}/chat".encode()), "rb") as stream:
            user, _, chat = stream.read(512).decode(errors="replace").rstrip().partition("/")
        return ChatId(user, chat)
    return None


def empty(
    trash: int, *, is_due: Callable[[str], bool], checkpoint: Checkpoint
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Delete the items that are due; return the deleted names and the failed ones."""
    due = [name for name in items(trash) if is_due(name)]
    gone = tuple(name for name in due if _delete_item(trash, name.encode(), checkpoint))
    return gone, tuple(name for name in due if name not in gone)


def drop_earlier(trash: int, chat: ChatId, keep: str, checkpoint: Checkpoint) -> None:
    """Delete what the chat discarded before `keep`: or resets would fill the disk for a day."""
    for name in items(trash):
        if name != keep and owner(trash, name) == chat:
            _delete_item(trash, name.encode(), checkpoint)


def _delete_item(trash: int, name: bytes, checkpoint: Checkpoint) -> bool:
    """Delete an item; False when something in it would not go."""
    progress = True

    def visit(directory: int, entry: os.DirEntry[str]) -> bool:
        nonlocal progress
        if entry.is_dir(follow_symlinks=False):
            return True
        progress |= _gone(os.unlink, os.fsencode(entry.name), directory)
        return False

    def leave(parent: int, name: bytes) -> None:
        nonlocal progress
        progress |= _gone(os.rmdir, name, parent)

    while progress:
        progress = False
        try:
            item = open_directory(trash, name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        with closing_fd(item):
            walk(item, visit, checkpoint, leave)
        if _gone(os.rmdir, name, trash):
            return True
    return False


def _gone(remove: Callable[..., None], name: bytes, parent: int) -> bool:
    """Remove a name; True when it is no longer there."""
    try:
        remove(name, dir_fd=parent)
    except OSError as exc:
        # A busy name is a mount point, a non-empty one was filled behind our back.
        return exc.errno == errno.ENOENT
    return True
