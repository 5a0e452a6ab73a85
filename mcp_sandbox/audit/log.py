"""The audit on disk: appending beside other processes, recording for a server, reading back.

A server records through `Audit`: it says when a line reaches the disk, and what follows if
it cannot. The writer and the reader block.

`audit.jsonl` grows; when it is full it becomes `audit-N.jsonl`, N being the number of its first
line. `audit.lock` is held for each line. What follows the last intact line, as after a
power cut, is moved to `audit.torn-TIMESTAMP`.
"""

import errno
import fcntl
import json
import logging
import os
import re
import stat
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread
from anyio.abc import TaskGroup

from mcp_sandbox import durable
from mcp_sandbox.audit import chain
from mcp_sandbox.config import AuditConfig
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

CURRENT = "audit.jsonl"
# O_NONBLOCK: a pipe in the file's place must not block the open.
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_BATCH_S, _HOUR_S = 0.1, 3600.0
# Events that programs inside can repeat: one line in this time, and so many kinds for a chat.
_MINUTE_S, _MOST_NOTED = 60.0, 30

_Noted = tuple[str, ChatId, tuple[tuple[str, str], ...]]


def list_retired(folder: Path) -> list[Path]:
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


class AuditWriter:
    """Appends to the audit in a folder, created if missing; `head` is the last line it knows.

    Any method may raise OSError.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.head = chain.START
        self._folder, self._max_bytes = folder, max_bytes
        self._busy = threading.Lock()
        self._file = self._lock = -1
        self._end = 0

    def close(self) -> None:
        for descriptor in {self._file, self._lock} - {-1}:
            os.close(descriptor)
        self._file = self._lock = -1

    def append(self, kind: str, fields: chain.Fields, *, wait: bool) -> tuple[int, int]:
        """Write a line, return its number and size; without `wait` 0 if it would have to wait."""
        if not (wait or self._file >= 0) or not self._hold(wait=wait):
            return 0, 0
        try:
            if not self._is_current():
                if not wait:
                    return 0, 0
                self._find_end()
            return self.head.n + 1, self._put(kind, fields)
        finally:
            self._let_go()

    def remove_old(self, keep_s: float) -> None:
        """Remove the oldest files, up to the first that was written less long ago than that."""
        self._hold(wait=True)
        try:
            self._find_end()
            for path in list_retired(self._folder):
                if time.time() - path.stat().st_mtime < keep_s:
                    return
                last, _ = chain.find_last_sealed(path.read_bytes())
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

    def _put(self, kind: str, fields: chain.Fields) -> int:
        line, head = chain.make_line(self.head, kind, fields)
        if os.write(self._file, line) < len(line):
            os.ftruncate(self._file, self._end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._end, self.head = self._end + len(line), head
        return len(line)

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
            last, end = chain.find_last_sealed(os.pread(self._file, size - begin, begin))
            if last:
                self._end = begin + end
                break
        if not last and (full := list_retired(self._folder)):
            last, _ = chain.find_last_sealed(full[-1].read_bytes())
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
        fields = {"bytes": len(data), "digest": sha256(data).hexdigest(), "file": aside.name}
        self._put("torn", fields)

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


class Audit:
    """Records the events of one server, in the block of `open_audit`.

    `mask` hides secrets in text that is to be recorded.
    """

    def __init__(self, folder: Path, settings: AuditConfig) -> None:
        self.enabled = settings.enabled
        self.mask: Callable[[str], str] = str
        self._folder, self._settings = folder, settings
        self._writer = AuditWriter(folder, settings.max_file)
        # Lines that have to wait take threads of their own.
        self._limiter = CapacityLimiter(1)
        self._dirty, self._synced = anyio.Event(), anyio.Event()
        # Why the last fdatasync failed, until one succeeds.
        self._problem: OSError | None = None
        self._failing = False
        self._syncing = CancelScope(shield=True)
        # Until when each chat would be writing if it wrote no faster than it may.
        self._busy_until_s = dict[tuple[object, object], float]()
        self._times, self._kinds = Counter[_Noted](), Counter[tuple[str, ChatId]]()

    async def write(self, kind: str, **fields: object) -> int:
        """Append a line and return its number, or 0. Fields that are None are left out.

        Raises StorageUnavailable: it cannot be recorded, so the event must not happen.
        """
        if not self.enabled:
            return 0
        try:
            number, size = self._writer.append(kind, fields, wait=False)
            if not number or self._settings.sync == "each":
                # A cancelled call is recorded, too.
                with CancelScope(shield=True):
                    append = partial(self._writer.append, kind, fields, wait=True)
                    if not number:
                        number, size = await to_thread.run_sync(append, limiter=self._limiter)
                    if self._settings.sync == "each":
                        self._dirty.set()
                        await self._synced.wait()
        except OSError as exc:
            return self._failed(exc)
        self._dirty.set()
        if "chat" in fields:
            whose, now_s = (fields["user"], fields["chat"]), anyio.current_time()
            lasts_s = _MINUTE_S * size / self._settings.max_minute
            self._busy_until_s[whose] = max(self._busy_until_s.get(whose, 0), now_s) + lasts_s
        if self._problem:
            return self._failed(self._problem)
        self._failing = False
        return number

    async def wait_for_room(self, chat: ChatId) -> None:
        """Wait while the chat has recorded more than it may in a minute."""
        due_s = self._busy_until_s.get((chat.user, chat.chat), 0) - _MINUTE_S
        if due_s > anyio.current_time():
            await anyio.sleep_until(due_s)

    def _failed(self, exc: OSError) -> int:
        problem = f"the audit in {self._folder} cannot be written: {exc.strerror}"
        if self._settings.on_error == "stop":
            raise StorageUnavailable(
                f"{problem}. What cannot be recorded does not run: free space there or repair the "
                "folder; with audit.on_error: go_on it runs nevertheless"
            ) from exc
        if not self._failing:
            logger.warning("%s; what runs until that is repaired is not recorded", problem)
        self._failing = True
        return 0

    def note(self, kind: str, chat: ChatId, **fields: str) -> None:
        """Record and log soon what programs inside can repeat: once a minute, with a count.

        If there are many kinds at a time, the last are one line, without fields.
        """
        noted: _Noted = kind, chat, tuple(fields.items())
        if noted not in self._times and self._kinds[kind, chat] >= _MOST_NOTED:
            noted = kind, chat, ()
        if noted not in self._times:
            self._kinds[kind, chat] += 1
            self._tasks.start_soon(self._note, noted)
        self._times[noted] += 1

    async def _note(self, noted: _Noted) -> None:
        await self._write_noted(noted)
        await anyio.sleep(_MINUTE_S)
        await self._write_noted(noted)
        del self._times[noted]
        self._kinds[noted[:2]] -= 1

    async def _write_noted(self, noted: _Noted) -> None:
        times, self._times[noted] = self._times[noted], 0
        if times:
            kind, chat, fields = noted
            # Of a record in the log `name` is the logger's.
            said = {kind if key == "name" else key: value for key, value in fields}
            event(logger, kind, chat=str(chat), **said, times=times)
            record = {"user": chat.user, "chat": chat.chat, **dict(fields)}
            with suppress(StorageUnavailable):
                await self.write(kind, **record, times=times if times > 1 else None)

    async def begin(self, tasks: TaskGroup) -> None:
        """Write the first line, and look after the files until `end`."""
        self._tasks = tasks
        if self.enabled:
            self._tasks.start_soon(self._keep_synced)
            await self.write("server", what="started", pid=os.getpid())
            self._tasks.start_soon(self._look_after)

    async def end(self) -> None:
        """Write the last line, and bring all onto the disk."""
        if not self.enabled:
            return
        with CancelScope(shield=True):
            for noted in [*self._times]:
                await self._write_noted(noted)
            with suppress(StorageUnavailable):
                await self.write("server", what="ended", pid=os.getpid())
            self._syncing.cancel()
            await self._sync()
            self._tell_head()
            await to_thread.run_sync(self._writer.close, limiter=self._limiter)

    async def _keep_synced(self) -> None:
        with self._syncing:
            while True:
                await self._dirty.wait()
                if self._settings.sync == "batch":
                    await anyio.sleep(_BATCH_S)
                await self._sync()

    async def _sync(self) -> None:
        waiting, self._dirty, self._synced = self._synced, anyio.Event(), anyio.Event()
        try:
            await to_thread.run_sync(self._writer.sync)
            self._problem = None
        except OSError as exc:
            self._problem = exc
        finally:
            waiting.set()

    async def _look_after(self) -> None:
        while True:
            try:
                keep = partial(self._writer.remove_old, self._settings.keep)
                await to_thread.run_sync(keep, limiter=self._limiter)
            except OSError as exc:
                logger.warning("old files of the audit cannot be removed: %s", exc)
            await anyio.sleep(_HOUR_S)
            now_s = anyio.current_time()
            self._busy_until_s = {k: s for k, s in self._busy_until_s.items() if s > now_s}
            self._tell_head()

    def _tell_head(self) -> None:
        event(logger, "audit", head=str(self._writer.head))


@asynccontextmanager
async def open_audit(folder: Path, settings: AuditConfig) -> AsyncGenerator[Audit]:
    """Open the audit in a folder, which is made if need be.

    Raises StorageUnavailable: it cannot be written, and only what is recorded may run.
    """
    try:
        async with anyio.create_task_group() as tasks:
            audit = Audit(folder, settings)
            try:
                await audit.begin(tasks)
                yield audit
            finally:
                tasks.cancel_scope.cancel()
                await audit.end()
    except BaseExceptionGroup as group:
        # The tasks raise nothing, so the error is that of the caller's block.
        error = group.exceptions[0]
        raise error from error.__cause__


def verify(folder: Path, wanted: chain.ChainHead | None = None) -> chain.ChainVerifier:
    """Check every line of the audit in a folder, and that it has the given head.

    Raises StorageUnavailable: it cannot be read.
    """
    check = chain.ChainVerifier(wanted)
    with _reading_opened(folder) as files:
        for name, lines in files:
            check.see(name, lines)
        if files and CURRENT not in dict(files):
            check.problems.append(f"{CURRENT}, the last file, is missing")
    check.end()
    return check


def events(folder: Path, chat: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line and its event, of one chat (CHAT or USER/CHAT) or all.

    Damaged lines are left out. Raises as `verify` does.
    """
    with _reading_opened(folder) as files:
        for line in (line for _, lines in files for line in lines):
            with suppress(ValueError, TypeError, RecursionError):
                record = dict(json.loads(line))
                if chat in (None, record.get("chat"), f"{record.get('user')}/{record.get('chat')}"):
                    yield str(line, "utf-8").rstrip("\n"), record


@contextmanager
def _reading_opened(folder: Path) -> Generator[list[tuple[str, Iterator[bytes]]]]:
    """Open all files as they are at one moment, also while servers write."""
    try:
        with ExitStack() as stack:
            found = list[tuple[str, Iterator[bytes]]]()
            with ExitStack() as locked, suppress(FileNotFoundError):
                with suppress(FileNotFoundError):
                    lock = locked.enter_context((folder / "audit.lock").open("rb"))
                    fcntl.flock(lock, fcntl.LOCK_SH)
                for path in (*list_retired(folder), folder / CURRENT):
                    file = stack.enter_context(path.open("rb"))
                    found.append((path.name, _lines(file, path.stat().st_size)))
            yield found
    except OSError as exc:
        raise StorageUnavailable(
            f"the audit in {folder} cannot be read: {exc.strerror}. Read it as the user whose "
            "server writes it"
        ) from exc


def _lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (line := file.readline(size)):
        size -= len(line)
        yield line
