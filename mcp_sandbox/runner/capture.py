"""What a command prints: both ends of each stream, and the file that keeps the whole."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner import figures

HALF = 32 * 1024
# Results are cut at about 30 kB of text: from here on the whole is worth keeping.
KEEP_OVER = 20_000
KEPT_TOTAL = 256 * 1024 * 1024
KEPT_SECONDS = 7 * 24 * 3600
# Of commands that run: these files are never deleted.
_in_use: set[str] = set()


class Stream:
    """Head and tail of one stream."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = HALF - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data[-HALF:]
            if len(self.tail) > 2 * HALF:
                del self.tail[:-HALF]

    def since(self, start: int = 0) -> tuple[bytes, bytes]:
        """What is held of what came after the first `start` bytes: of the head, of the tail."""
        tail = bytes(self.tail[-HALF:])
        return bytes(self.head[start:]), tail[max(0, start - self.total + len(tail)) :]

    def parts(self) -> list[bytes]:
        """What is held: one part, or two where something is left out between them."""
        head, tail = self.since()
        return [head + tail] if len(head) + len(tail) == self.total else [head, tail]

    def shrink(self) -> None:
        """It has ended: the last of it is enough for who asks later."""
        if self.tail:
            self.head.clear()
            del self.tail[:-HALF]


class Capture:
    """Both streams of one command, and the file that keeps them in order of arrival."""

    def __init__(self, workspace: str, name: str, limit: int) -> None:
        self.streams = {"stdout": Stream(), "stderr": Stream()}
        self._base = figures.base_of(workspace, name)
        self._path = self._base + ".txt"
        # Where the whole is, once that is more than is told of it.
        self.file: str | None = None
        self._left = limit
        self._fd = -1

    def add(self, name: str, data: bytes) -> None:
        if sum(stream.total for stream in self.streams.values()) + len(data) > KEEP_OVER:
            self.keep()
        if self._fd >= 0:
            self._keep(data)
        self.streams[name].add(data)

    def close(self) -> None:
        """It has ended: the file is whole, and may be deleted some day."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _in_use.discard(self._path)

    def figures(self) -> list[str]:
        """The paths of the pictures that the command has saved; see `runner.figures`."""
        found = figures.saved(self._base)
        try:
            if found:
                prepare(os.path.dirname(self._path))
        except OSError:
            # What is there is shown all the same.
            pass
        return found

    def keep(self) -> None:
        """Begin the file with what was printed so far: little, so it is whole in the heads."""
        if self.file or not self._left:
            return
        try:
            prepare(os.path.dirname(self._path))
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o644)
        except OSError:
            # A full or unwritable workspace: the head and tail must do; the result names no file.
            self._left = 0
            return
        self.file = self._path
        _in_use.add(self._path)
        for stream in self.streams.values():
            self._keep(stream.head)

    def _keep(self, data: bytes | bytearray) -> None:
        piece = data[: self._left]
        try:
            written = os.write(self._fd, piece) if piece else 0
        except OSError:
            self._left = 0
            return
        self._left = self._left - written if written == len(piece) else 0


def prepare(folder: str) -> None:
    """Make the folder, keep it out of version control, and delete what is old or too much."""
    os.makedirs(folder, exist_ok=True)
    ignore = os.path.join(os.path.dirname(folder), ".gitignore")
    if not os.path.lexists(ignore):
        with open(ignore, "xb") as file:
            file.write(b"*\n")
    kept = 0
    oldest = time.time() - KEPT_SECONDS
    files = []
    with os.scandir(folder) as entries:
        # At most 1,000 files: user code may have put anything there.
        for entry, _ in zip(entries, range(1000)):
            if entry.is_file(follow_symlinks=False) and entry.path not in _in_use:
                status = entry.stat(follow_symlinks=False)
                files.append((status.st_mtime, status.st_size, entry.path))
    for modified, size, path in sorted(files, reverse=True):
        kept += size
        if kept > KEPT_TOTAL or modified < oldest:
            os.unlink(path)
