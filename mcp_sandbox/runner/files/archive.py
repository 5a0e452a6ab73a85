"""Packs the places of a chat into one tar stream (PAX), and unpacks it where they are empty.

An archive has a folder for each root: `workspace/`, `home/`, `project/`. A folder comes right
before all that is in it. Owners and special bits are left out.

`unpack` fills a folder inside each root, under a name that no listing shows. Renaming that of the
workspace makes the archive count; then everything moves into place. If that is cut off, the next
start of the runner or the next `unpack` finishes it; if it is cut off earlier, all is discarded.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from mcp_sandbox.runner.files.call import BIGGEST, CHUNK, closing_fd, put, send
from mcp_sandbox.runner.files.moving import remove, remove_tree
from mcp_sandbox.runner.files.paths import TEMPORARY, home, show, workspace
from mcp_sandbox.runner.files.walk import Budget, Descent, open_directory, walk
from mcp_sandbox.runner.kernel.native import signal
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from mcp_sandbox.runner.files.call import OperationCall

_STAGED, _WHOLE = TEMPORARY + "unpacking", TEMPORARY + "unpacked"
_BLOCK = 512
_MOST_PADDING = 20 * _BLOCK  # Other programs fill an archive up to a multiple of this.
_MOST_NAME = 64 * 1024
_MOST_HEADER = 2 * _MOST_NAME + 1024
_MOST_LEVELS = 32  # Of folders in a root that counts as empty.
_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def _places() -> dict[str, str]:
    # The workspace comes last: when it is done, all is.
    return {"project": "/project", "home": home(), "workspace": workspace()}


def pack(call: OperationCall) -> dict[str, Any]:
    """Send an archive of `roots`, without what is mounted there and `leave_out` of the home.

    A file has the size it had when it was opened; one that has shrunk is filled up with zeros and
    counted. What cannot be read, or is no file, folder or link, is left out and counted.
    """
    places, packing = _places(), _Packing(call.stdout)
    packing.skipped = _mount_points()
    packing.skipped |= {f"{places['home']}/{path}" for path in call.texts("leave_out")}
    for root in call.texts("roots"):
        packing.tree(places[_known(root)], root)
    packing.add(bytes(2 * _BLOCK))
    packing.flush()
    counted = {"filled": packing.filled, "left_out": packing.left_out}
    return {"entries": packing.entries, "bytes": packing.size, **counted}


def _known(root: str) -> str:
    if root not in _places():
        raise OpError("invalid", f"{show(root)!r} is no root: use {', '.join(_places())}")
    return root


def _mount_points() -> set[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        # The kernel writes spaces and backslashes in octal.
        paths = [line.split(b" ")[4].decode("unicode_escape") for line in file]
    return {os.fsdecode(path.encode("latin-1")) for path in paths}


class _Level(NamedTuple):
    """A folder that is being sent: its name there, its path, and the names still to be sent."""

    name: str
    path: str
    restore: Callable[[int], None]
    names: list[str]


class _Packing:
    """An archive that is being sent, without the paths in `skipped`."""

    def __init__(self, stdout: int) -> None:
        self._stdout = stdout
        self._buffer = bytearray()
        self.skipped: set[str] = set()
        self.entries = self.size = self.filled = self.left_out = 0

    def add(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= CHUNK:
            self.flush()

    def flush(self) -> None:
        self.size += put(self._stdout, self._buffer)
        self._buffer = bytearray()

    def tree(self, path: str, name: str) -> None:
        """Send a folder as `name`, with all that is in it."""
        with closing(Descent(open_directory(path))) as descent:
            self._head(name, os.fstat(descent.fd))
            levels = [_Level(name, path, _keep, os.listdir(descent.fd))]
            try:
                while levels:
                    if levels[-1].names:
                        levels += self._entry(descent, levels[-1])
                    elif len(levels) > 1:
                        descent.up(levels.pop().restore)
                    else:
                        return
            finally:
                with suppress(OSError):
                    for level in levels[:0:-1]:
                        descent.up(level.restore)

    def _entry(self, descent: Descent, level: _Level) -> list[_Level]:
        """Send the next entry of a folder; return the level of a folder that was entered."""
        name, above = level.names.pop(), descent.fd
        full, path = f"{level.name}/{name}", f"{level.path}/{name}"
        if name.startswith(TEMPORARY) or path in self.skipped:
            return []
        try:
            found = os.stat(name, dir_fd=above, follow_symlinks=False)
            kind = stat.S_IFMT(found.st_mode)
            if len(os.fsencode(full)) > _MOST_NAME or kind not in _KINDS:
                self.left_out += 1
            elif kind == stat.S_IFLNK:
                self._head(full, found, os.readlink(name, dir_fd=above))
            elif kind == stat.S_IFDIR:
                restore = _let_in(name, above, found.st_mode, 0o500)
                descent.down(name)
                self._head(full, found)
                return [_Level(full, path, restore, os.listdir(descent.fd))]
            else:
                restore = _let_in(name, above, found.st_mode, 0o400)
                with closing_fd(os.open(name, _READ, dir_fd=above)) as fd:
                    restore(fd)
                    self._file(full, fd)
        except PermissionError:
            self.left_out += 1
        except OSError as exc:
            # It vanished or became something else, just now.
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
        return []

    def _file(self, name: str, fd: int) -> None:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return
        self._head(name, found, size=found.st_size)
        self.flush()
        sent = send(fd, self._stdout, 0, found.st_size)
        self.size += sent
        self.filled += sent < found.st_size
        missing = found.st_size - sent + -found.st_size % _BLOCK
        while missing:
            self.add(bytes(min(missing, CHUNK)))
            missing -= min(missing, CHUNK)

    def _head(self, name: str, found: os.stat_result, target: str = "", size: int = 0) -> None:
        info = tarfile.TarInfo(name)
        info.type = _KINDS[stat.S_IFMT(found.st_mode)]
        info.mode, info.mtime = found.st_mode & 0o777, int(found.st_mtime)
        info.size, info.linkname = size, target
        self.entries += 1
        self.add(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))


def _let_in(name: str, above: int, mode: int, needed: int) -> Callable[[int], None]:
    """Let the owner read what its mode forbids; return what restores the mode of the open file."""
    if mode & needed == needed:
        return _keep
    os.chmod(name, mode & 0o777 | needed, dir_fd=above)
    return lambda fd: os.fchmod(fd, mode & 0o7777)


def _keep(_: int) -> None:
    """Leave an open file as it is."""


class _Body:
    """An archive that comes in; OpError where it has more than `limit` bytes."""

    def __init__(self, pieces: Iterable[bytes], limit: int) -> None:
        self._pieces, self._limit = iter(pieces), limit
        self._rest = memoryview(b"")
        self.size = 0

    def some(self, size: int) -> memoryview:
        """Return up to `size` bytes, none at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._pieces, b""))
            self.size += len(self._rest)
            self.expect(0)
        part, self._rest = self._rest[:size], self._rest[size:]
        return part

    def expect(self, size: int) -> None:
        """Raise OpError if `size` bytes more would be too many."""
        if size < 0 or self.size - len(self._rest) + size > self._limit:
            raise OpError("too_large", f"the archive has more than {self._limit} bytes")

    def exactly(self, size: int) -> Iterator[memoryview]:
        while size:
            part = self.some(size)
            if not part:
                raise _malformed("it ends too early")
            size -= len(part)
            yield part

    def block(self, size: int = _BLOCK) -> bytes:
        """Return `size` bytes, after which what fills up their last block is left out."""
        return b"".join([*self.exactly(size), *self.exactly(-size % _BLOCK)])[:size]


def _malformed(why: str) -> OpError:
    return OpError("invalid", f"the archive cannot be used: {why}; take another one")


def unpack(call: OperationCall) -> dict[str, Any]:
    """Bring the archive's content of `roots` into place, all of it or nothing.

    A root may hold folders and links, which stay unless the archive has their names; OpError if
    there are files. Roots that are not named are passed over.
    """
    finish_unpacking()
    _discard()
    roots = {_known(root) for root in call.texts("roots")}
    unpacking = _Unpacking(_Body(call.body(), call.number("max_bytes", BIGGEST)), roots)
    try:
        with closing(unpacking):
            unpacking.run(call.number("max_entries", BIGGEST))
        # Nobody waits any more for one that is stopped after this.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _mark()
    except BaseException as exc:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _discard()
        if isinstance(exc, (ValueError, OverflowError)):
            raise _malformed(str(exc)) from exc
        raise
    finish_unpacking()
    return {"entries": unpacking.entries, "bytes": unpacking.body.size}


class _Unpacking:
    """Writes entries beneath the folders that are open: never through a link, or a second time."""

    def __init__(self, body: _Body, roots: set[str]) -> None:
        self.body, self._roots = body, roots
        self.entries = 0
        self._entered: list[str] = []
        # The open folders by name, and what the archive says of each.
        self._names: list[str] = []
        self._facts: list[tarfile.TarInfo] = []
        self._descent: Descent | None = None

    def run(self, most: int) -> None:
        """Take the whole archive; OpError if it is not sound or has more than `most` entries."""
        while info := _read_entry(self.body):
            self.entries += 1
            if self.entries > most:
                raise OpError("too_large", f"the archive has more than {most} entries")
            *above, name = parts = info.name.split("/")
            if any(p in ("", ".", "..") or p.startswith(TEMPORARY) for p in parts):
                raise _malformed(f"{show(info.name)} is no usable name")
            if _known(parts[0]) in self._roots:
                self._leave(above)
                self._write(above, name, info)
            else:
                _pass_over(self.body.exactly(info.size))
            _pass_over(self.body.exactly(-info.size % _BLOCK))
        self._leave([])
        for root in self._entered:
            _require_empty(root)

    def _leave(self, above: list[str]) -> None:
        """Leave folders up to the one that holds the next entry."""
        while self._names != above[: len(self._names)]:
            self._names.pop()
            info = self._facts.pop()
            if self._names and self._descent:
                self._descent.up(lambda fd: _settle(fd, info))  # noqa: B023 - called at once
            else:
                self.close()
        if len(self._names) < len(above):
            raise _malformed(f"{show('/'.join(above))} does not come right before its content")

    def _write(self, above: list[str], name: str, info: tarfile.TarInfo) -> None:
        if not self._descent:
            _require_empty(name)
            self._entered.append(name)
            # The folder itself: only what is in it is brought into place.
            self._descent, name = Descent(open_directory(_places()[name])), _STAGED
        fd = self._descent.fd
        try:
            if info.isdir():
                os.mkdir(name, 0o700, dir_fd=fd)
                self._descent.down(name)
                self._names.append(info.name.rpartition("/")[2])
                self._facts.append(info)
            elif above and info.issym():
                os.symlink(info.linkname, name, dir_fd=fd)
                os.utime(name, (info.mtime, info.mtime), dir_fd=fd, follow_symlinks=False)
            elif above and info.type == tarfile.REGTYPE:
                with closing_fd(os.open(name, _NEW, 0o600, dir_fd=fd)) as file:
                    for piece in self.body.exactly(info.size):
                        put(file, piece)
                    _settle(file, info)
            else:
                raise _malformed(f"{show(info.name)} is no file, folder or symbolic link")
        except FileExistsError as exc:
            raise _malformed(f"{show(info.name)} is there twice") from exc

    def close(self) -> None:
        if self._descent:
            self._descent.close()
        self._descent = None


def _settle(fd: int, info: tarfile.TarInfo) -> None:
    os.fchmod(fd, info.mode & 0o777)
    os.utime(fd, (info.mtime, info.mtime))


def _pass_over(pieces: Iterable[object]) -> None:
    for _ in pieces:
        pass


def _read_entry(body: _Body) -> tarfile.TarInfo | None:
    """Return the next entry; None at the end, after which nothing follows."""
    block = body.block()
    if not block.strip(b"\0"):
        rest = b""
        while len(rest) <= _MOST_PADDING and (part := body.some(_MOST_PADDING)):
            rest += part
        if rest.strip(b"\0") or not _BLOCK <= len(rest) <= _MOST_PADDING:
            raise _malformed("something follows its end")
        return None
    info = _parse(block)
    if info.type == tarfile.XHDTYPE:
        if info.size > _MOST_HEADER:
            raise _malformed("a header is too long")
        records = _records(body.block(info.size))
        info = _parse(body.block())
        if path := records.get(b"path"):
            info.name = os.fsdecode(path).rstrip("/")
        info.linkname = os.fsdecode(records.get(b"linkpath", os.fsencode(info.linkname)))
        info.size = int(records.get(b"size", info.size))
        info.mtime = float(records.get(b"mtime", info.mtime))
    if info.size < 0 or (info.size and info.type != tarfile.REGTYPE):
        raise _malformed(f"{show(info.name)} has a size that cannot be")
    body.expect(info.size)
    return info


def _parse(block: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as exc:
        raise _malformed(f"a header is broken ({exc})") from exc
    return info


def _records(data: bytes) -> dict[bytes, bytes]:
    """Return what an extended header says: records of `LENGTH KEY=VALUE` and a newline."""
    found, at = {}, 0
    while at < len(data):
        length, _, _ = data[at : at + 10].partition(b" ")
        record = data[at : at + int(length)]
        key, equals, value = record[len(length) + 1 : -1].partition(b"=")
        if not equals or len(record) != int(length) or record[-1:] != b"\n":
            raise _malformed("a header is broken")
        found[key] = value
        at += len(record)
    return found


def _require_empty(root: str) -> None:
    place, budget = _places()[root], Budget()
    for path, entry, _ in walk(
        open_directory(place), BIGGEST, budget, lambda name: name != _STAGED
    ):
        plain = entry.is_symlink() or entry.is_dir(follow_symlinks=False)
        if not plain or path.count("/") > _MOST_LEVELS or budget.cut:
            raise OpError("exists", f"{show(place)} is not empty: {show(path)} is there")


def _discard() -> None:
    for place in _places().values():
        if os.path.lexists(f"{place}/{_STAGED}"):
            remove_tree(f"{place}/{_STAGED}", force=True)


def _mark() -> None:
    place = workspace()
    with suppress(FileExistsError):
        os.mkdir(f"{place}/{_STAGED}")
    os.rename(f"{place}/{_STAGED}", f"{place}/{_WHOLE}")


def finish_unpacking() -> None:
    """Move what a whole archive brought into place, if there is such."""
    places = _places()
    if os.path.lexists(f"{places['workspace']}/{_WHOLE}"):
        for root, place in places.items():
            staged = f"{place}/{_WHOLE if root == 'workspace' else _STAGED}"
            if os.path.isdir(staged):
                _merge(staged, place)


def _merge(source: str, target: str) -> None:
    """Move everything in a folder into another one, and remove it."""
    for name in os.listdir(source):
        new, old = f"{source}/{name}", f"{target}/{name}"
        mode = stat.S_IMODE(os.lstat(new).st_mode)
        folder = not os.path.islink(new) and os.path.isdir(new)
        if folder:
            # It may be moved only while it may be written.
            os.chmod(new, mode | 0o700)
        if folder and not os.path.islink(old) and os.path.isdir(old):
            _merge(new, old)
        else:
            remove(old)
            os.rename(new, old)
        if folder:
            os.chmod(old, mode)
    os.rmdir(source)
