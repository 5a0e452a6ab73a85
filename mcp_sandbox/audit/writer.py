"""Appends lines to the files of an audit, beside other processes that do. Blocking.

`audit.jsonl` is the file that grows; a full one is renamed to `audit-N.jsonl`, N being the number
of its first line. `audit.lock` is held for each line. What stands after the last line that is as it
was written, as after a power cut, is moved to a file `audit.torn-TIMESTAMP`.
"""

import errno
import fcntl
import logging
import os
import re
import threading
import time
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from mcp_sandbox import durable
from mcp_sandbox.audit.chain import START, Fields, Head, last_sealed, line_after

logger = logging.getLogger(__name__)

CURRENT = "audit.jsonl"
# A regular file never blocks by this; what else lies there must not hold up an open().
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_SPANS = (1 << 16, 1 << 20)  # How far back the last line is looked for first.
_RETIRED = re.compile(r"audit-\d{12,}\.jsonl")


def retired(folder: Path) -> list[Path]:
    """Return the files that are full, in their order. Raises OSError."""
    names = [name for name in os.listdir(folder) if _RETIRED.fullmatch(name)]  # noqa: PTH208
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


class Writer:
    """Appends to the audit in a folder, made if need be. Any method may raise OSError.

    `head` is that of the last line that this process knows.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.head = START
        self._folder, self._max_bytes = folder, max_bytes
        self._busy = threading.Lock()
        self._file = self._lock = -1
        self._end = 0

    def close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    def append(self, kind: str, fields: Fields, *, wait: bool) -> int:
        """Write one line and return its number; without `wait` 0 if it takes more than a moment."""
        if not self._busy.acquire(blocking=wait):
            return 0
        try:
            if not (wait or self._file >= 0) or not self._take_lock(wait=wait):
                return 0
            try:
                if wait and not self._is_current():
                    self._find_end()
                if not self._is_current():
                    return 0
                self._put(kind, fields)
                return self.head.n
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._busy.release()

    def remove_old(self, keep_s: float) -> None:
        """Remove the first files, as far as their last lines are older than that."""
        with self._busy:
            self._take_lock(wait=True)
            try:
                self._find_end()
                for path in retired(self._folder):
                    if time.time() - path.stat().st_mtime < keep_s:
                        break
                    last, _ = last_sealed(path.read_bytes())
                    if last:
                        self._put("removed", {"until": last.n, "head": last.hash})
                        os.fdatasync(self._file)
                    path.unlink()
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def sync(self) -> None:
        """Bring all lines onto the disk."""
        with self._busy:
            # A copy: the file may be full and closed meanwhile. It is synced before that.
            file = os.dup(self._file) if self._file >= 0 else -1
        if file >= 0:
            with durable.closing_fd(file):
                os.fdatasync(file)

    def _take_lock(self, *, wait: bool) -> bool:
        if self._lock < 0:
            durable.make_folder(self._folder)
            self._lock = os.open(self._folder / "audit.lock", os.O_RDWR | os.O_CREAT | _OPEN, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def _is_current(self) -> bool:
        """Whether the file ends where this process has left it, and has room."""
        if self._file < 0 or self._end >= self._max_bytes:
            return False
        status = os.fstat(self._file)
        return status.st_size == self._end and status.st_nlink > 0

    def _put(self, kind: str, fields: Fields) -> None:
        line, head = line_after(self.head, kind, fields)
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end, self.head = self._end + written, head

    def _find_end(self) -> None:
        """Open the file that grows, and find the last line; others may have written, or begun it.

        A head that is known goes before an earlier one: so lines that were taken away are missed.
        """
        path = self._folder / CURRENT
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _OPEN, 0o600)
        size = os.fstat(self._file).st_size
        last, self._end = self._last(size)
        if not last and (full := retired(self._folder)):
            last, _ = last_sealed(full[-1].read_bytes())
        if last and last.n > self.head.n:
            self.head = last
        if self._end < size:
            self._set_aside(size)
        if self._end >= self._max_bytes:
            self._retire(path)

    def _last(self, size: int) -> tuple[Head | None, int]:
        for span in (*_SPANS, size):
            begin = max(0, size - span)
            last, end = last_sealed(os.pread(self._file, size - begin, begin))
            if last or not begin:
                break
        return last, begin + end if last else 0

    def _set_aside(self, size: int) -> None:
        data = os.pread(self._file, size - self._end, self._end)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        aside = self._folder / f"audit.torn-{stamp}"
        durable.write_file(aside, data)
        os.ftruncate(self._file, self._end)
        logger.warning(
            "the audit's last %d bytes are damaged: they are in %s now", len(data), aside
        )
        digest = sha256(data).hexdigest()
        self._put("torn", {"bytes": len(data), "digest": digest, "file": aside.name})

    def _retire(self, path: Path) -> None:
        """Give the full file its own name, and begin the next."""
        found = re.match(rb'\{"n":(\d{1,18}),', os.pread(self._file, 64, 0))
        full = path.with_name(f"audit-{int(found[1]) if found else self.head.n:012}.jsonl")
        if full.exists():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(full))
        # Another process that has it open sees by this line that it has to look again.
        self._put("full", {"file": full.name})
        os.fdatasync(self._file)
        path.rename(full)
        os.close(self._file)
        self._file, self._end = -1, 0
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | _OPEN, 0o600)
        durable.sync(self._folder)
