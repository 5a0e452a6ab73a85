"""Appends to the files of an audit, also while other processes do. Blocking.

`audit.jsonl` grows; when it is full it becomes `audit-N.jsonl`, N being the number of its first
line. `audit.lock` is held for each line. What follows the last intact line, as after a
power cut, is moved to `audit.torn-TIMESTAMP`.
"""

import errno
import fcntl
import logging
import os
import re
import stat
import threading
import time
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from mcp_sandbox import durable
from mcp_sandbox.audit.chain import START, Fields, last_sealed, line_after

logger = logging.getLogger(__name__)

CURRENT = "audit.jsonl"
# O_NONBLOCK: a pipe in the file's place must not block the open.
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def retired(folder: Path) -> list[Path]:
    """Return the files that are full, in their order. Raises OSError."""
    found = [each.name for each in os.scandir(folder) if each.is_file(follow_symlinks=False)]
    names = filter(re.compile(r"audit-\d{12,}\.jsonl").fullmatch, found)
    return [folder / name for name in sorted(names, key=lambda name: (len(name), name))]


def _opened(path: Path) -> int:
    """Open or create a file; anything else in its place is set aside. Raises OSError."""
    try:
        file = os.open(path, _OPEN, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EISDIR, errno.ELOOP):
            raise
    else:
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    durable.set_aside(path, "it is no file")
    return os.open(path, _OPEN, 0o600)


class Writer:
    """Appends to the audit in a folder, created if missing; `head` is the last line it knows.

    Any method may raise OSError.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.head = START
        self._folder, self._max_bytes = folder, max_bytes
        self._busy = threading.Lock()
        self._file = self._lock = -1
        self._end = 0

    def close(self) -> None:
        for descriptor in {self._file, self._lock} - {-1}:
            os.close(descriptor)
        self._file = self._lock = -1

    def append(self, kind: str, fields: Fields, *, wait: bool) -> int:
        """Write one line and return its number; without `wait` 0 if it would have to wait."""
        if not (wait or self._file >= 0) or not self._hold(wait=wait):
            return 0
        try:
            if not self._is_current():
                if not wait:
                    return 0
                self._find_end()
            self._put(kind, fields)
            return self.head.n
        finally:
            self._let_go()

    def remove_old(self, keep_s: float) -> None:
        """Remove the oldest files, up to the first that was written less long ago than that."""
        self._hold(wait=True)
        try:
            self._find_end()
            for path in retired(self._folder):
                if time.time() - path.stat().st_mtime < keep_s:
                    return
                last, _ = last_sealed(path.read_bytes())
                if last:
                    self._put("removed", {"until": last.n, "head": last.hash})
                    os.fdatasync(self._file)
                path.unlink()
        finally:
            self._let_go()

    def sync(self) -> None:
        """Bring all lines onto the disk with fdatasync."""
        with self._busy:
            # The file may become full and be closed meanwhile.
            file = os.dup(self._file) if self._file >= 0 else -1
        if file >= 0:
            with durable.closing_fd(file):
                os.fdatasync(file)

    def _hold(self, *, wait: bool) -> bool:
        """Lock out other threads and processes until `_let_go`; False if locked and not `wait`.

        No context manager: that would make a line a tenth slower.
        """
        if not self._busy.acquire(blocking=wait):
            return False
        try:
            if self._lock < 0:
                durable.make_folder(self._folder)
                self._lock = _opened(self._folder / "audit.lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self._busy.release()
            return False
        except BaseException:
            self._busy.release()
            raise
        return True

    def _let_go(self) -> None:
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._busy.release()

    def _is_current(self) -> bool:
        """Return whether the file ends where this process has left it, and has room."""
        if self._file < 0 or self._end >= self._max_bytes:
            return False
        status = os.fstat(self._file)
        return status.st_size == self._end and status.st_nlink > 0

    def _put(self, kind: str, fields: Fields) -> None:
        line, head = line_after(self.head, kind, fields)
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end, self.head = self._end + len(line), head

    def _find_end(self) -> None:
        """Open the file, and find its last line; others may have written, or begun another file.

        A known head takes precedence over an earlier one, so that removed lines are noticed.
        """
        path = self._folder / CURRENT
        self._open(path)
        size = os.fstat(self._file).st_size
        last, self._end = None, 0
        for span in (1 << 16, size):
            begin = max(0, size - span)
            last, end = last_sealed(os.pread(self._file, size - begin, begin))
            if last:
                self._end = begin + end
                break
        if not last and (full := retired(self._folder)):
            last, _ = last_sealed(full[-1].read_bytes())
        if last and last.n > self.head.n:
            self.head = last
        if self._end < size:
            self._set_aside(size)
        if self._end >= self._max_bytes:
            self._retire(path)

    def _open(self, path: Path) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._file, self._end = _opened(path), 0

    def _set_aside(self, size: int) -> None:
        data = os.pread(self._file, size - self._end, self._end)
        aside = self._folder / f"audit.torn-{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
        durable.write_file(aside, data)
        os.ftruncate(self._file, self._end)
        logger.warning(
            "the audit's last %d bytes were damaged and are moved to %s", len(data), aside
        )
        told = {"bytes": len(data), "digest": sha256(data).hexdigest(), "file": aside.name}
        self._put("torn", told)

    def _retire(self, path: Path) -> None:
        """Give the full file its own name, and begin the next."""
        found = re.match(rb'\{"n":(\d{1,18}),', os.pread(self._file, 64, 0))
        full = path.with_name(f"audit-{int(found[1]) if found else self.head.n:012}.jsonl")
        if full.exists():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST), str(full))
        # This line tells another process that has the file open to open the new one.
        self._put("full", {"file": full.name})
        os.fdatasync(self._file)
        path.rename(full)
        self._open(path)
        durable.sync(self._folder)
