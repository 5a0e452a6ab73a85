"""The user ids of sandboxes: where the server is root, each chat has one of its own.

The kernel counts much by user: so no chat uses up what another one needs, and no account of the
host sees into a sandbox. Which number is whose the owners of directories say, and nothing else.

    {data root}/sandbox/users         the range
                       /users.lock    a part of it that no directory has, as of this boot
"""

import errno
import os
import pwd
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from anyio import from_thread

from mcp_sandbox.backends.sandbox_records import boot_id
from mcp_sandbox.durable import closing_fd, locked, read_note, write_note
from mcp_sandbox.errors import CapacityReached, ConfigError
from mcp_sandbox.workspace import layout, meter
from mcp_sandbox.workspace.beneath import open_directory

Owner = tuple[int, int]
_COUNT = 1 << 16
_STARTS = range(2 * _COUNT, 0x7FFF0000, _COUNT)
# The ranges of all data roots of this machine.
_RANGES = Path("/var/lib/mcp-sandbox-uid-ranges")
_NOTE = 256
# Trees are moved from the first of these to the last, so none is missed meanwhile.
_PLACES = (b"pool", b"restoring", b"home", b"project", b"workspace", b"trash")


@dataclass(frozen=True)
class SandboxUsers:
    """Who the trees of chats belong to: each chat's to a user of `numbers`, or all to `one`."""

    numbers: range = range(0)
    one: Owner | None = None

    def find(self, uid: int) -> Owner | None:
        """Return the user with that number, if it can be a chat's."""
        own = self.one or (uid, uid)
        return own if uid in self.numbers or (uid == own[0] and self.one) else None

    @contextmanager
    def new(self, sandbox: int) -> Generator[Owner]:
        """Return a user of whom there is nothing; the block makes a directory of his.

        Several processes may do so at once. Raises CapacityReached.
        """
        if self.one:
            yield self.one
            return
        with locked("users.lock", dir_fd=sandbox) as held:
            uid = self._take(sandbox, held)
            yield uid, uid

    def _take(self, sandbox: int, note: int) -> int:
        # Written in place, which is quick; a power cut may lose it, and no more than that.
        kept = [str(self.numbers), boot_id()]
        noted = os.pread(note, _NOTE, 0).decode(errors="replace").split(";")
        uid, stop = map(int, noted[2:4] if noted[:2] == kept else (0, 0))
        if uid >= stop:
            used = _find_owners(sandbox).intersection(self.numbers)
            ends = [self.numbers.start - 1, *sorted(used), self.numbers.stop]
            _, uid, stop = max((b - a, a + 1, b) for a, b in pairwise(ends))
        if uid >= stop:
            raise CapacityReached(
                f"all user ids of sandboxes ({self.numbers[0]}-{self.numbers[-1]}) belong to "
                "files of chats, those in the trash included: remove chats with `mcp-sandbox rm`, "
                "empty the trash with `mcp-sandbox gc`, or set a larger sandbox.uid_range"
            )
        os.pwrite(note, f"{';'.join(kept)};{uid + 1};{stop};".encode().ljust(_NOTE), 0)
        return uid


def unite(data_root: Path, paths: list[bytes], users: SandboxUsers) -> int:
    """Give a chat's trees, the workspace's first, to a user of its own; return how many files.

    A tree tells from the start on whose all is to be: a later call can go on. What neither the
    owners of trees nor other users of chats have stays as it is.
    """
    with layout.sandbox_directory(data_root) as sandbox, ExitStack() as stack:
        there = [open_directory(sandbox, path) for path in paths if layout.exists(sandbox, path)]
        trees = [stack.enter_context(closing_fd(tree)) for tree in there]
        found = [os.fstat(tree).st_uid for tree in trees]
        own = next(filter(None, map(users.find, found)), None)
        if own is None:
            with users.new(sandbox) as own:
                os.fchown(trees[0], *own)
        given = 0

        def visit(directory: int, entry: os.DirEntry[str]) -> bool:
            nonlocal given
            uid = entry.stat(follow_symlinks=False).st_uid
            if uid != own[0] and (uid in found or users.find(uid)):
                os.chown(entry.name, *own, dir_fd=directory, follow_symlinks=False)
                given += 1
            return entry.is_dir(follow_symlinks=False)

        for tree in trees:
            if not meter.walk(tree, visit, from_thread.check_cancelled):
                raise OSError(errno.EIO, "not all files of a chat could be seen")
            os.fchown(tree, *own)
        return given


def open_users(data_root: Path, wanted: str) -> SandboxUsers:
    """Return the users of a data root: of the range that is `wanted`, else picked once. Blocks.

    Those that another data root has, of which this is a copy, say, are picked anew: chats move.
    Raises ConfigError: none is free, or another data root has some of what is wanted.
    """
    with layout.sandbox_directory(data_root), locked(data_root / "sandbox" / "users.lock"):
        found = find_range(data_root, wanted)
        if (problem := _claim(data_root, found)) and wanted:
            raise ConfigError(problem)
        return SandboxUsers((not problem and found) or _pick(data_root))


def find_range(data_root: Path, wanted: str = "") -> range | None:
    """Return the range that is `wanted`, else that of the data root, if it has one. Blocks."""
    first, _, last = wanted.partition("-")
    noted = _read(data_root / "sandbox" / "users").get("range")
    return range(int(first), int(last) + 1) if last else noted and range(*noted)


def _read(note: Path) -> dict[str, Any]:
    with suppress(ValueError):
        return read_note(note) or {}
    return {}


@contextmanager
def _others(data_root: Path) -> Generator[dict[str, list[int]]]:
    """Yield the ranges of other data roots; what the block adds is noted. Raises OSError."""
    with locked(_RANGES.with_suffix(".lock")):
        there = {root: pair for root, pair in _read(_RANGES).items() if isinstance(pair, list)}
        roots = {root: pair for root, pair in there.items() if Path(root).is_dir()}
        # One data root may have several names.
        noted = {root: pair for root, pair in roots.items() if not data_root.samefile(root)}
        yield noted
        write_note(_RANGES, noted)


def _claim(data_root: Path, found: range | None) -> str:
    """Note that a range is this data root's; return why it cannot be, or ""."""
    # Who cannot write there names ranges that are apart.
    with suppress(OSError), _others(data_root) as others:
        for root, (start, stop) in others.items():
            if found and found.start < stop and start < found.stop:
                return (
                    f"sandbox.uid_range: {root} has the user ids {start}-{stop - 1}, which are "
                    "some of these: name another range, apart from that"
                )
        if found:
            others[str(data_root)] = [found.start, found.stop]
    return ""


def _pick(data_root: Path) -> range:
    """Return a range that no account, container or other data root of this machine has."""
    taken = [range(each.pw_uid, each.pw_uid + 1) for each in pwd.getpwall()]
    taken += _find_ranges(r":(\d+):(\d+)$", Path("/etc/subuid"))
    # A container around this process may have few.
    there = _find_ranges(r"^ *(\d+) +\d+ +(\d+)$", Path("/proc/self/uid_map"))
    why = "none are free"
    try:
        with _others(data_root) as others:
            taken += [range(*pair) for pair in others.values()]
            for found in (range(start, start + _COUNT) for start in _STARTS):
                is_free = all(found.start >= a.stop or a.start >= found.stop for a in taken)
                if is_free and any(found[0] in each and found[-1] in each for each in there):
                    others[str(data_root)] = [found.start, found.stop]
                    note = {"range": (found.start, found.stop)}
                    write_note(data_root / "sandbox" / "users", note)
                    return found
    except OSError as exc:
        why = str(exc)
    raise ConfigError(
        f"no 65,536 user ids can be picked for the sandboxes of a server that is root ({why}): set "
        "sandbox.uid_range, or run it as another user"
    )


def _find_ranges(pattern: str, file: Path) -> list[range]:
    rows = re.findall(pattern, file.read_text() if file.exists() else "", re.MULTILINE)
    return [range(int(start), int(start) + int(count)) for start, count in rows]


def _find_owners(sandbox: int) -> set[int]:
    """Return who the directories of chats belong to, wherever there are some."""
    found: set[int] = set()

    for place in _PLACES:
        # The skills of what waits or was thrown away are the server's to the bottom.
        own = "skills" if place in (b"pool", b"trash") else ""

        def visit(_: int, entry: os.DirEntry[str], own: str = own) -> bool:
            uid = entry.stat(follow_symlinks=False).st_uid
            found.add(uid)
            # The directories of chats lie in the server's.
            is_ours = uid == os.geteuid() and entry.name != own
            return is_ours and entry.is_dir(follow_symlinks=False)

        with suppress(FileNotFoundError), closing_fd(open_directory(sandbox, place)) as folder:
            if not meter.walk(folder, visit, lambda: None):
                raise OSError(errno.EIO, "whose the files of chats are could not be seen")
    return found
