"""Which version of each skill a chat has, and how it gets one. Blocking.

A chat's sandbox sees a folder of ours, its *view*, with one folder for each skill that it has. To
pin a version is to put a clone of its snapshot there: made beside the view first, then exchanged
with what is there in one step. Nobody ever sees half of one, and who works in the old one can go
on: it is kept, for a while, where it was moved to.

    {tree}/view/{name}/       as the sandbox sees it
           new-{random}/      made for the view, or replaced in it
           pins/{inode}       of the folder with that number: which skill it is, and its digest
           last               the name of the one that was activated last
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mcp_sandbox.errors import TooLarge
from mcp_sandbox.skills.contents import gather
from mcp_sandbox.skills.files import read_whole
from mcp_sandbox.skills.models import Contents, Skill
from mcp_sandbox.skills.roots import opened
from mcp_sandbox.skills.snapshots import Snapshots
from mcp_sandbox.workspace import trash
from mcp_sandbox.workspace.beneath import exchange, grant_owner, open_directory, rename_new
from mcp_sandbox.workspace.view import View, make_agents_link, open_folder

MAX_PINNED_BYTES = 256 * 1024 * 1024
"""So much of skills a chat may have; it does not count for the size of its workspace."""
_NEW = "new-"
_REPLACED_KEPT = 3
_LONGEST_RECORD = 16 * 1024
_LONGEST_NAME = 200
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL})
_OURS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Pin:
    """A version of a skill that a chat has; `name` is that of its folder in the view.

    `size` is in bytes.
    """

    name: str
    uri: str
    digest: str
    size: int


class Pins:
    """The versions that one chat of a user has. `view` has been made."""

    def __init__(self, user: str, view: View, snapshots: Snapshots) -> None:
        self._user = user
        self._view = view
        self._snapshots = snapshots

    def all(self) -> Mapping[str, Pin]:
        """By the uris of the skills. Raises OSError."""
        with self._opened() as (_, folder), os.scandir(folder) as entries:
            found = (self._pin(entry.name, entry.inode()) for entry in entries)
            return {pin.uri: pin for pin in found if pin}

    def last(self) -> str | None:
        """The path in the sandbox of the skill that was activated last, if it is there."""
        try:
            name = (self._view.tree / "last").read_text()[:_LONGEST_RECORD]
            known = {pin.name for pin in self.all().values()}
        except (OSError, ValueError):
            return None
        return self.path(name) if name in known else None

    def path(self, name: str) -> str:
        """Where the sandbox has the skill with that name in the view."""
        return f"{self._view.shown}/{name}"

    def note_last(self, pin: Pin) -> None:
        """Remember which skill was activated last. Raises OSError."""
        _replace(self._view.tree / "last", pin.name)

    def folder(self, pin: Pin) -> Path:
        """Where its files are on the host: to be opened beneath the view's anchor only."""
        return self._view.folder / pin.name

    def contents(self, pin: Pin) -> Contents | None:
        """Its files; None if they are not as they were any more, so that it has to be pinned again.

        Only where nothing isolates can that be.
        """
        try:
            contents = gather(self.folder(pin), anchor=self._view.anchor).contents
        except (OSError, TooLarge):
            return None
        return contents if contents.digest == pin.digest else None

    def read(self, pin: Pin, path: str) -> bytes:
        """One of its files. Raises OSError."""
        with opened(self.folder(pin), self._view.anchor) as folder:
            return read_whole(folder, path).data

    def pin(self, skill: Skill, contents: Contents) -> Pin:
        """Put that version into the view, from its snapshot.

        Raises:
            FileNotFoundError: there is no such snapshot any more.
            TooLarge: the chat has too much of skills.
            OSError: it cannot be written.
        """
        digest = contents.digest
        with self._opened() as (tree, folder):
            fcntl.flock(tree, fcntl.LOCK_EX)
            pin = self._planned(skill, contents)
            new = self._view.tree / f"{_NEW}{secrets.token_hex(8)}"
            new.mkdir(mode=0o755)
            self._snapshots.clone(self._user, digest, new, link=not self._view.copied)
            records = self._view.tree / "pins"
            records.mkdir(mode=0o700, exist_ok=True)
            _replace(records / str(new.stat().st_ino), json.dumps(asdict(pin)))
            _swap(tree, new.name.encode(), folder, pin.name.encode())
            self._tidy(tree, folder)
        _ignore_by_git(self._view)
        make_agents_link(self._view)
        return pin

    def _planned(self, skill: Skill, contents: Contents) -> Pin:
        pins = dict(self.all())
        known = pins.pop(skill.uri, None)
        name = known.name if known else name_in_view(skill)
        pin = Pin(name, skill.uri, contents.digest, sum(file.size for file in contents.files))
        if sum(each.size for each in pins.values()) + pin.size > MAX_PINNED_BYTES:
            raise TooLarge(
                f"with {skill.name} this chat would have over {MAX_PINNED_BYTES // 1024**2} MiB of "
                "skills: go on with those that are active, or empty the workspace by sandbox_reset"
            )
        return pin

    @contextmanager
    def _opened(self) -> Generator[tuple[int, int]]:
        with ExitStack() as stack:
            tree = os.open(self._view.tree, _OURS)
            stack.callback(os.close, tree)
            folder = open_folder(self._view)
            stack.callback(os.close, folder)
            yield tree, folder

    def _pin(self, name: str, inode: int) -> Pin | None:
        pin = self._record(inode)
        # What was copied into the chat's own files may have been moved there, too.
        return pin if pin and pin.name == name else None

    def _record(self, inode: int) -> Pin | None:
        try:
            with (self._view.tree / "pins" / str(inode)).open(encoding="utf-8") as file:
                return Pin(**json.loads(file.read(_LONGEST_RECORD)))
        except (OSError, ValueError, TypeError):
            return None

    def _tidy(self, tree: int, folder: int) -> None:
        """Delete what was replaced, but the last few, and what tells of folders that are gone."""
        with os.scandir(tree) as entries:
            replaced = [entry for entry in entries if entry.name.startswith(_NEW)]
        replaced.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_ctime_ns)
        with os.scandir(folder) as entries:
            here = {entry.inode() for entry in entries}
        for entry in replaced[:-_REPLACED_KEPT]:
            known = self._record(entry.inode())
            if entry.is_dir(follow_symlinks=False):
                trash.destroy(tree, tree, os.fsencode(entry.name), time.time())
            else:
                os.unlink(entry.name, dir_fd=tree)
            if known:
                self._snapshots.release(self._user, known.digest)
        # What a process that was killed had begun to delete.
        trash.empty(tree, is_due=lambda _: True, checkpoint=lambda: None)
        here |= {entry.inode() for entry in replaced[-_REPLACED_KEPT:]}
        for record in (self._view.tree / "pins").iterdir():
            if record.name not in {str(inode) for inode in here}:
                record.unlink(missing_ok=True)


def name_in_view(skill: Skill) -> str:
    """The name of a skill's folder in a view; no two skills of a catalogue have the same."""
    name = "".join(map(_plain, skill.name))
    name = f"%2E{name[1:]}" if name.startswith(".") else name
    mark = hashlib.sha256(skill.uri.encode(errors="surrogateescape")).hexdigest()[:8]
    if len(name.encode()) > _LONGEST_NAME:
        return f"{name.encode()[:_LONGEST_NAME].decode(errors='ignore')}%{mark}"
    # Where the bare name means another one, it alone would not tell them apart.
    return name if skill.shadowed_by is None else f"{name}@{mark}"


def drift(pinned: Contents, current: Contents) -> tuple[str, ...]:
    """The files in which two versions differ, by path."""
    before = {file.path: file.digest for file in pinned.files}
    now = {file.path: file.digest for file in current.files}
    return tuple(sorted(p for p in before.keys() | now.keys() if before.get(p) != now.get(p)))


def _plain(char: str) -> str:
    """A character that may be in a name and means nothing to a shell or a path, else its bytes."""
    if char.isalnum() or char in "-_.+":
        return char
    return "".join(f"%{byte:02X}" for byte in char.encode(errors="surrogateescape"))


def _swap(tree: int, new: bytes, folder: int, name: bytes) -> None:
    """Put a folder into the view; what is there goes to where the folder was."""
    try:
        rename_new(tree, new, folder, name)
    except FileExistsError:
        with suppress(OSError):
            # To move a directory writes its "..", which needs the right to write in it.
            grant_owner(folder, name)
        try:
            exchange(tree, new, folder, name)
        except OSError as exc:
            if exc.errno not in _NO_EXCHANGE:
                raise
            rename_new(folder, name, tree, f"{_NEW}{secrets.token_hex(8)}".encode())
            rename_new(tree, new, folder, name)
    placed = open_directory(folder, name)
    try:
        os.fchmod(placed, 0o555)
    finally:
        os.close(placed)


def _ignore_by_git(view: View) -> None:
    """Keep the skills out of the commits of a repository that lies around the view."""
    if not view.copied:
        with suppress(FileExistsError), (view.folder / ".gitignore").open("x") as file:
            file.write("*\n")
            os.fchmod(file.fileno(), 0o444)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{secrets.token_hex(8)}")
    new.write_text(text, encoding="utf-8")
    new.rename(path)
