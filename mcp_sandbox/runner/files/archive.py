"""Packs the places of a chat into one tar stream (PAX), and unpacks it where they are empty.

An archive has a folder for each root: `workspace`, `home`, `project`. A folder comes right before
all that is in it. Owners and special bits are left out.

`unpack` fills a folder inside each root, under a name that no listing shows. Renaming that of the
workspace makes the archive count; then everything moves into place. If that is cut off, the next
start of the runner or the next `unpack` finishes it; if it is cut off earlier, all is discarded.

Where nothing of the host is mounted, a mark in the home says whose files these are.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import closing
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import kept
from mcp_sandbox.runner.files.call import BIGGEST, CHUNK, closing_fd, put, send
from mcp_sandbox.runner.files.moving import remove, remove_tree
from mcp_sandbox.runner.files.paths import KEPT, TEMPORARY, home, show, workspace
from mcp_sandbox.runner.files.walk import Budget, Descent, open_directory, walk
from mcp_sandbox.runner.kernel.native import signal
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from tarfile import TarInfo

    from mcp_sandbox.runner.files.call import OperationCall

_STAGED, _WHOLE = TEMPORARY + "unpacking", TEMPORARY + "unpacked"
_MARK = TEMPORARY + "chat"
_BLOCK = 512
_MOST_NAME = 64 * 1024
_MOST_LEVELS = 32  # Of folders in a root that counts as empty.
_FILE, _LINK, _FOLDER, _EXTENDED = b"0", b"2", b"5", b"x"
_KINDS = {stat.S_IFREG: _FILE, stat.S_IFLNK: _LINK, stat.S_IFDIR: _FOLDER}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CHANGED = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _places() -> dict[str, str]:
    # The workspace comes last: when it is in place, all is.
    return {"project": "/project", "home": home(), "workspace": workspace()}


def _known(root: str) -> str:
    if root not in _places():
        raise OpError("invalid", f"{show(root)!r} is no root: use {', '.join(_places())}")
    return root


def pack(call: OperationCall) -> dict[str, Any]:
    """Send an archive of `roots`, without what is mounted there, and `leave_out` and kept output.

    A file has the size it had when it was opened; one that has shrunk is filled up with zeros and
    counted. What cannot be read, or is no file, folder or link, is left out and counted.
    """
    skipped = _mount_points() | {f"{home()}/{path}" for path in (*call.texts("leave_out"), KEPT)}
    packing = _Packing(call.stdout, skipped)
    for root in call.texts("roots"):
        packing.tree(_places()[_known(root)], root)
    packing.put(bytes(2 * _BLOCK))
    counted = {"filled": packing.filled, "left_out": packing.left_out}
    return {"entries": packing.entries, "bytes": packing.size, **counted}


def _mount_points() -> set[str]:
    with open("/proc/self/mountinfo", "rb") as file:
        # The kernel writes spaces and backslashes in octal.
        paths = [line.split(b" ")[4].decode("unicode_escape") for line in file]
    return {os.fsdecode(path.encode("latin-1")) for path in paths}


class _Packing:
    """An archive that is being sent."""

    def __init__(self, stdout: int, skipped: set[str]) -> None:
        self._stdout, self._skipped = stdout, skipped
        self.entries = self.size = self.filled = self.left_out = 0

    def put(self, data: bytes) -> None:
        self.size += put(self._stdout, data)

    def tree(self, path: str, name: str) -> None:
        """Send a folder as `name`, with all that is in it."""
        with closing(Descent(open_directory(path))) as descent:
            self._head(name, os.fstat(descent.fd))
            levels = [(path, name, os.listdir(descent.fd))]
            while levels:
                path, name, names = levels[-1]
                if names:
                    entry = names.pop()
                    below = f"{path}/{entry}", f"{name}/{entry}"
                    skipped = entry.startswith(TEMPORARY) or below[0] in self._skipped
                    if not skipped and self._send(descent, entry, below[1]):
                        levels.append((*below, os.listdir(descent.fd)))
                elif levels.pop() and levels:
                    descent.up()

    def _send(self, descent: Descent, entry: str, name: str) -> bool:
        """Send an entry of a folder as `name`; return whether it is a folder, entered now."""
        try:
            found = os.stat(entry, dir_fd=descent.fd, follow_symlinks=False)
            kind = _KINDS.get(stat.S_IFMT(found.st_mode))
            if kind is None or len(os.fsencode(name)) > _MOST_NAME:
                self.left_out += 1
            elif kind == _LINK:
                self._head(name, found, os.readlink(entry, dir_fd=descent.fd))
            elif kind == _FOLDER:
                descent.down(entry)
                self._head(name, found)
                return True
            else:
                with closing_fd(os.open(entry, _READ, dir_fd=descent.fd)) as file:
                    self._file(name, file)
        except PermissionError:
            self.left_out += 1
        except OSError as exc:
            if exc.errno not in _CHANGED:
                raise
        return False

    def _file(self, name: str, file: int) -> None:
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode):
            self._head(name, found, size=found.st_size)
            sent = send(file, self._stdout, 0, found.st_size)
            self.size += sent
            self.filled += sent < found.st_size
            missing = found.st_size - sent + -found.st_size % _BLOCK
            for start in range(0, missing, CHUNK):
                self.put(bytes(min(missing - start, CHUNK)))

    def _head(self, name: str, found: os.stat_result, target: str = "", size: int = 0) -> None:
        from tarfile import PAX_FORMAT, TarInfo  # noqa: PLC0415 - rarely needed, and takes 10 ms

        info = TarInfo(name)
        info.type, info.linkname, info.size = _KINDS[stat.S_IFMT(found.st_mode)], target, size
        info.mode, info.mtime = found.st_mode & 0o777, int(found.st_mtime)
        self.entries += 1
        self.put(info.tobuf(PAX_FORMAT, "utf-8", "surrogateescape"))


def unpack(call: OperationCall) -> dict[str, Any]:
    """Bring the archive's content of `roots` into place, all of it or nothing.

    A root may hold folders and links, which stay unless the archive has their names; OpError if
    it holds files. Roots that are not named are passed over.
    """
    from tarfile import TarError  # noqa: PLC0415 - as above

    finish_unpacking()
    _discard()
    body, room = _Body(call.body()), call.number("max_bytes", BIGGEST)
    unpacking = _Unpacking(body, {_known(root) for root in call.texts("roots")}, room)
    try:
        with closing(unpacking):
            unpacking.run(call.number("max_entries", BIGGEST))
        # A cancelled call must not stop half-way in what follows.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        staged = f"{workspace()}/{_STAGED}"
        os.makedirs(staged, exist_ok=True)
        os.rename(staged, f"{workspace()}/{_WHOLE}")
    except BaseException as exc:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _discard()
        if isinstance(exc, (TarError, ValueError, OverflowError)):
            raise _unusable(str(exc)) from exc
        raise
    finish_unpacking()
    kept.take_over()
    return {"entries": unpacking.entries, "bytes": body.size}


def _unusable(why: str) -> OpError:
    return OpError("invalid", f"the archive cannot be used ({why}): take another one")


class _Body:
    """An archive that comes in."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self.size = 0

    def exactly(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes."""
        self.size += size
        while size:
            if self.ended():
                raise _unusable("it ends too early")
            part, self._rest = self._rest[:size], self._rest[size:]
            size -= len(part)
            yield part

    def read(self, size: int) -> bytes:
        return b"".join(self.exactly(size))

    def ended(self) -> bool:
        """Wait for more; return whether there is none."""
        self._rest = self._rest or memoryview(next(self._pieces, b""))
        return not self._rest


def _next_entry(body: _Body) -> TarInfo | None:
    """Return the next entry; None at the end, after which nothing may follow."""
    from tarfile import TarInfo  # noqa: PLC0415 - as above

    block = body.read(_BLOCK)
    if not any(block):
        if any(body.read(_BLOCK)) or not body.ended():
            raise _unusable("something follows its end")
        return None
    info = TarInfo.frombuf(block, "utf-8", "surrogateescape")
    if info.type == _EXTENDED:
        if not 0 < info.size <= 3 * _MOST_NAME:
            raise _unusable("a header is too long")
        records = _records(body.read(info.size + -info.size % _BLOCK)[: info.size])
        info = TarInfo.frombuf(body.read(_BLOCK), "utf-8", "surrogateescape")
        info.name = os.fsdecode(records.get(b"path", os.fsencode(info.name))).rstrip("/")
        info.linkname = os.fsdecode(records.get(b"linkpath", os.fsencode(info.linkname)))
        info.size = int(records.get(b"size", info.size))
        info.mtime = float(records.get(b"mtime", info.mtime))
    if info.type not in _KINDS.values() or info.size < 0 or (info.size and info.type != _FILE):
        raise _unusable(f"{show(info.name)} is no file, folder or symbolic link")
    return info


def _records(data: bytes) -> dict[bytes, bytes]:
    """Return what an extended header says: records of "LENGTH KEY=VALUE" and a newline."""
    found, at = {}, 0
    while at < len(data):
        length = data[at : at + 10].partition(b" ")[0]
        record = data[at : at + int(length)]
        key, equals, value = record[len(length) + 1 : -1].partition(b"=")
        if not equals or len(record) != int(length) or record[-1:] != b"\n":
            raise _unusable("a header is broken")
        found[key] = value
        at += len(record)
    return found


class _Unpacking:
    """Writes entries into the folders that are open: never through a link, or a second time.

    The files may take `room` bytes of the disk.
    """

    def __init__(self, body: _Body, roots: set[str], room: int) -> None:
        self._body, self._roots, self._room = body, roots, room
        self._filled: list[str] = []
        # The entries of the open folders.
        self._open: list[TarInfo] = []
        self._descent: Descent | None = None
        self.entries = 0

    def run(self, most: int) -> None:
        """Take the whole archive; OpError if it is not sound or has more than `most` entries."""
        while info := _next_entry(self._body):
            self.entries += 1
            if self.entries > most:
                raise OpError("too_large", f"the archive has more than {most} entries")
            *above, name = info.name.split("/")
            if any(
                part in ("", ".", "..") or part.startswith(TEMPORARY) for part in (*above, name)
            ):
                raise _unusable(f"{show(info.name)} is no usable name")
            content = self._body.exactly(info.size)
            if _known((*above, name)[0]) in self._roots:
                self._leave("/".join(above))
                self._write(name, info, content)
            for _ in content:
                pass
            self._body.read(-info.size % _BLOCK)
        self._leave("")
        for root in self._filled:
            _require_empty(root)

    def _leave(self, above: str) -> None:
        """Leave folders up to the one that holds the next entry."""
        while self._descent and self._open and self._open[-1].name != above:
            _settle(self._descent.fd, self._open.pop())
            if self._open:
                self._descent.up()
            else:
                self.close()
        if above and not self._open:
            raise _unusable(f"{show(above)} does not come right before its content")

    def _write(self, name: str, info: TarInfo, content: Iterable[memoryview]) -> None:
        if self._descent is None:
            _require_empty(name)
            self._filled.append(name)
            self._descent, name = Descent(open_directory(_places()[name])), _STAGED
        fd = self._descent.fd
        try:
            if info.type == _FOLDER:
                os.mkdir(name, 0o700, dir_fd=fd)
                self._descent.down(name)
                self._open.append(info)
            elif name == _STAGED:
                raise _unusable(f"{show(info.name)} is no folder")
            elif info.type == _LINK:
                os.symlink(info.linkname, name, dir_fd=fd)
                os.utime(name, (info.mtime, info.mtime), dir_fd=fd, follow_symlinks=False)
            else:
                with closing_fd(os.open(name, _NEW, 0o600, dir_fd=fd)) as file:
                    for piece in content:
                        self._put(file, piece)
                    os.ftruncate(file, info.size)
                    _settle(file, info)
        except FileExistsError as exc:
            raise _unusable(f"{show(info.name)} is there twice") from exc

    def _put(self, file: int, piece: memoryview) -> None:
        if not bytes(piece).strip(b"\0"):
            # A file with holes takes no more room than it did.
            os.lseek(file, len(piece), os.SEEK_CUR)
            return
        self._room -= put(file, piece)
        if self._room < 0:
            raise OpError("too_large", "the files of the archive need more room than is allowed")

    def close(self) -> None:
        if self._descent:
            self._descent.close()
        self._descent = None


def _settle(fd: int, info: TarInfo) -> None:
    os.fchmod(fd, info.mode & 0o777)
    os.utime(fd, (info.mtime, info.mtime))


def _require_empty(root: str) -> None:
    place, budget = _places()[root], Budget()
    skipped = {*_mount_points(), f"{place}/{_STAGED}", f"{home()}/{_MARK}"}
    found = walk(open_directory(place), BIGGEST, budget, lambda at: f"{place}/{at}" not in skipped)
    for path, entry, _ in found:
        plain = entry.is_symlink() or entry.is_dir(follow_symlinks=False)
        if not plain or path.count("/") > _MOST_LEVELS or budget.cut:
            raise OpError("exists", f"{show(place)} is not empty: {show(path)} is there")


def mark(call: OperationCall) -> dict[str, Any]:
    """Set the mark of the files here, if one is given; return it, and whether there are no files.

    It is no file of the chat: no archive and no listing has it.
    """
    path, given, found = f"{home()}/{_MARK}", call.text("mark", ""), b""
    if given:
        with closing_fd(os.open(path + "-", _NEW & ~os.O_EXCL | os.O_TRUNC, 0o600)) as file:
            put(file, given.encode())
        os.replace(path + "-", path)
    if os.path.lexists(path):
        with closing_fd(os.open(path, _READ)) as file:
            found = os.read(file, _BLOCK)
    try:
        _require_empty("home")
        _require_empty("workspace")
    except OpError:
        return {"mark": os.fsdecode(found), "empty": False}
    return {"mark": os.fsdecode(found), "empty": True}


def measure(_call: OperationCall) -> dict[str, Any]:
    """Return what the places have in bytes and entries, and how many bytes are free there."""
    size = entries = 0
    budget, linked = Budget(), set[tuple[int, int]]()
    for place in filter(os.path.isdir, _places().values()):
        for _, entry, _ in walk(open_directory(place), BIGGEST, budget, lambda _: True):
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            entries += 1
            if found.st_nlink < 2 or entry.is_dir() or (found.st_dev, found.st_ino) not in linked:
                linked.add((found.st_dev, found.st_ino))
                size += found.st_blocks * 512
    free = os.statvfs(workspace())
    told = {"bytes": size, "entries": entries, "free": free.f_bavail * free.f_frsize}
    return {**told, "complete": not budget.cut}


def _discard() -> None:
    for place in _places().values():
        if _is_there(f"{place}/{_STAGED}"):
            remove_tree(f"{place}/{_STAGED}", force=True)


def finish_unpacking() -> None:
    """Move what a whole archive has brought into place, if there is such."""
    if os.path.lexists(f"{workspace()}/{_WHOLE}"):
        for root, place in _places().items():
            staged = f"{place}/{_WHOLE if root == 'workspace' else _STAGED}"
            if _is_there(staged):
                _merge(staged, place)


def _is_there(staged: str) -> bool:
    """Return whether this folder is there; remove anything else, such as a link that leads out."""
    if os.path.lexists(staged) and (os.path.islink(staged) or not os.path.isdir(staged)):
        os.unlink(staged)
    return os.path.lexists(staged)


def _merge(source: str, target: str) -> None:
    """Move everything in a folder into another one, and remove it."""
    for name in os.listdir(source):
        new, old = f"{source}/{name}", f"{target}/{name}"
        mode = os.lstat(new).st_mode
        if stat.S_ISDIR(mode):
            # Only while it may be written can it be moved.
            os.chmod(new, 0o700)
        if stat.S_ISDIR(mode) and os.path.isdir(old) and not os.path.islink(old):
            _merge(new, old)
        else:
            remove(old)
            os.rename(new, old)
        if stat.S_ISDIR(mode):
            os.chmod(old, stat.S_IMODE(mode))
    os.rmdir(source)
