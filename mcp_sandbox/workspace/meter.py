"""Walks trees on the host by descriptor, measures them, and keeps the usage of a chat fresh.

No link is followed, no mount entered, and few directories are open however deep a tree is.
"""

import errno
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

import anyio
from anyio import from_thread, to_thread

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import SandboxError, StorageUnavailable, WorkspaceFull
from mcp_sandbox.models import WorkspaceUsage
from mcp_sandbox.workspace.beneath import grant_owner, open_directory

Checkpoint = Callable[[], None]
"""Called once per directory; raises to stop the walk."""
Visit = Callable[[int, os.DirEntry[str]], bool]
"""Takes an open directory and an entry of it; says whether to walk through that as a directory."""
Leave = Callable[[int, bytes], None]
"""Takes the parent and the name of a directory that the walk has been through."""

# Directories this near to the root stay open; deeper ones are left and found again through "..".
_KEPT_OPEN = 32
_MAX_OPENED_UP = 64
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV})
# A set of more inode numbers would cost the server too much memory; hard links beyond this many
# are counted each time, never too little.
_REMEMBERED_LINKS = 200_000
_LEAST_INTERVAL_S = 0.25
_INTERVAL_PER_DURATION = 20
# A tree that takes no longer than this is measured anew before a write that follows a command.
_CHEAP_S = 0.05
# A call that starts in a full workspace, to delete files say, may still write this much.
_SLACK_BYTES = 1024**2
_SLACK_FILES = 100
_MIN_FREE_FILES = 10_000


@dataclass(frozen=True)
class TreeUsage:
    """`files` counts everything but the roots; not `complete` means that there is more."""

    allocated_bytes: int
    files: int
    complete: bool = True


@dataclass(frozen=True)
class FreeSpace:
    """What the file system has left; `files` is None where it sets no limit.

    `allowed_bytes` is what the chat may hold in all for its user to stay within the quota.
    """

    free_bytes: int
    files: int | None
    allowed_bytes: int | None = None


def free_space(root: int) -> FreeSpace:
    """Return what unprivileged processes may still use on an open directory's file system."""
    status = os.statvfs(root)
    return FreeSpace(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)


def measure(
    roots: Iterable[int],
    *,
    checkpoint: Checkpoint = lambda: None,
    max_entries: int = 5_000_000,
) -> TreeUsage:
    """Return what the trees occupy in allocated blocks; each hard-linked file counts once.

    Whatever `checkpoint` raises passes through, except TimeoutError: that ends the walk with
    what was counted so far.
    """
    allocated = files = 0
    linked: set[tuple[int, int]] = set()

    def count(_directory: int, entry: os.DirEntry[str]) -> bool:
        nonlocal allocated, files
        status = entry.stat(follow_symlinks=False)
        if files >= max_entries:
            raise TimeoutError
        files += 1
        folder, identity = stat.S_ISDIR(status.st_mode), (status.st_dev, status.st_ino)
        if folder or status.st_nlink < 2 or identity not in linked:
            allocated += status.st_blocks * 512
            if not folder and status.st_nlink > 1 and len(linked) < _REMEMBERED_LINKS:
                linked.add(identity)
        return folder

    complete = True
    try:
        for root in roots:
            allocated += os.fstat(root).st_blocks * 512
            complete &= walk(root, count, checkpoint)
    except TimeoutError:
        complete = False
    return TreeUsage(allocated, files, complete)


def walk(root: int, visit: Visit, checkpoint: Checkpoint, leave: Leave | None = None) -> bool:
    """Visit everything below an open directory; False when a part of it could not be seen.

    Whatever the callbacks raise ends the walk, except a FileNotFoundError of `visit`. A directory
    that its owner closed is opened up: for good if there is a `leave`, which may want to remove
    it, else until the walk leaves it.
    """
    with closing(_Descent(visit, leave)) as descent:
        descent.enter(os.dup(root), b"", None)
        while descent.levels:
            checkpoint()
            descent.step()
        return descent.complete


@dataclass
class _Level:
    """A directory on the way down. `closed_mode` is the mode to give back when we opened it up."""

    directory: int | None
    name: bytes
    identity: tuple[int, int]
    pending: list[str]
    closed_mode: int | None


class _Descent:
    """A depth-first walk that keeps a bounded number of directories open."""

    def __init__(self, visit: Visit, leave: Leave | None) -> None:
        self._visit = visit
        self._on_leaving = leave
        self.levels: list[_Level] = []
        self.complete = True
        self._opened_up = 0

    def step(self) -> None:
        """Enter the next directory here, or go back when there is none."""
        level = self.levels[-1]
        if not level.pending:
            return self._leave()
        assert level.directory is not None  # noqa: S101 - the deepest level is always open
        name = os.fsencode(level.pending.pop())
        try:
            child, closed_mode = self._open(level.directory, name)
        except OSError as exc:
            if exc.errno not in _VANISHED:
                self.complete = False
            return None
        self.enter(child, name, closed_mode)
        if len(self.levels) > _KEPT_OPEN + 1 and level.closed_mode is None:
            os.close(level.directory)
            level.directory = None
        return None

    def close(self) -> None:
        while self.levels:
            self._drop(self.levels.pop())

    def enter(self, directory: int, name: bytes, closed_mode: int | None) -> None:
        """Go down into an open directory, from here on the walk's, and visit its entries."""
        status = os.fstat(directory)
        level = _Level(directory, name, (status.st_dev, status.st_ino), [], closed_mode)
        self.levels.append(level)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        if self._visit(directory, entry):
                            level.pending.append(entry.name)
        except PermissionError:
            self.complete = False

    def _open(self, parent: int, name: bytes) -> tuple[int, int | None]:
        """Open a directory; one that its owner closed to himself is opened up while we are in it.

        Without that, user code that runs with our uid could hide its files from the size limit.
        """
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        rights = 0o700 if self._on_leaving else 0o500
        usable = status.st_mode & rights == rights
        if usable or status.st_uid != os.geteuid() or self._opened_up >= _MAX_OPENED_UP:
            return open_directory(parent, name), None
        closed_mode = grant_owner(parent, name)
        directory = open_directory(parent, name)
        if self._on_leaving:
            return directory, None
        self._opened_up += 1
        return directory, closed_mode

    def _leave(self) -> None:
        """Go back to the parent; if the directory was moved away, to the nearest open one."""
        left = self.levels.pop()
        if self.levels and self.levels[-1].directory is None and left.directory is not None:
            self.levels[-1].directory = _open_same_parent(left.directory, self.levels[-1].identity)
        self._drop(left)
        if self._on_leaving and self.levels and self.levels[-1].directory is not None:
            self._on_leaving(self.levels[-1].directory, left.name)
        while self.levels and self.levels[-1].directory is None:
            self.complete = False
            self.levels.pop()

    def _drop(self, level: _Level) -> None:
        if level.directory is None:
            return
        if level.closed_mode is not None:
            self._opened_up -= 1
            os.fchmod(level.directory, level.closed_mode)
        os.close(level.directory)


def _open_same_parent(directory: int, identity: tuple[int, int]) -> int | None:
    try:
        parent = os.open(b"..", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return None
    status = os.fstat(parent)
    if (status.st_dev, status.st_ino) == identity:
        return parent
    os.close(parent)
    return None


@dataclass(frozen=True)
class Measurement:
    """A measurement: when (monotonic) and how long it took."""

    usage: TreeUsage
    free: FreeSpace
    taken_at: float
    duration_s: float


def measuring_interval_s(duration_s: float, least_s: float = _LEAST_INTERVAL_S) -> float:
    """Return how long a reading is valid, so that measuring takes at most 5 % of the time."""
    return max(least_s, _INTERVAL_PER_DURATION * duration_s)


def refusal(
    usage: TreeUsage, free: FreeSpace, config: WorkspaceConfig, adding: int = 0
) -> SandboxError | None:
    """Return why `adding` more bytes may not be written; None if they may."""
    return next(_problems(usage, free, config, adding), None)


def _problems(
    usage: TreeUsage, free: FreeSpace, config: WorkspaceConfig, adding: int
) -> Iterator[SandboxError]:
    if free.free_bytes - adding < config.min_free:
        yield StorageUnavailable(
            f"the disk of the data directory has {mib(free.free_bytes)} left and "
            f"{mib(config.min_free)} of it are kept free: free some space on the host, or "
            "set a lower workspace.min_free"
        )
    if free.files is not None and free.files < _MIN_FREE_FILES:
        yield StorageUnavailable(
            f"the disk of the data directory has room for only {free.files} more files: "
            "delete files on the host"
        )
    if usage.allocated_bytes + adding > config.size_limit:
        yield WorkspaceFull(
            f"the workspace is full: {mib(usage.allocated_bytes)} of "
            f"{mib(config.size_limit)} are used (workspace and home together): "
            "delete files you no longer need, then try again"
        )
    allowed = free.allowed_bytes
    if allowed is not None and usage.allocated_bytes + adding > allowed:
        others = config.user_quota - allowed
        yield WorkspaceFull(
            f"all chats of this user together are full: {mib(usage.allocated_bytes + others)} of "
            f"{mib(config.user_quota)} are used, {mib(usage.allocated_bytes)} of it by this chat: "
            "delete files you no longer need, here or in another chat, then try again"
        )
    if usage.files > config.max_files:
        yield WorkspaceFull(
            f"the workspace holds {usage.files} files and directories, {config.max_files} are "
            "allowed: delete some, then try again"
        )


def find_overshoot(
    start: Measurement, now: Measurement, config: WorkspaceConfig
) -> SandboxError | None:
    """Return why calls that run since `start` must be ended; None while they may go on.

    In a workspace that was full already a call may run, and delete, as long as it adds nothing.
    Files without a name are in no tree, so a disk that fills up counts as growth too.
    """
    grew = (
        now.usage.allocated_bytes > start.usage.allocated_bytes + _SLACK_BYTES
        or now.usage.files > start.usage.files + _SLACK_FILES
        or now.free.free_bytes < start.free.free_bytes - _SLACK_BYTES
    )
    return refusal(now.usage, now.free, config) if grew else None


def mib(size: int) -> str:
    """Return a size in MiB for a message."""
    return f"{size / 1024**2:,.0f} MiB"


class DiskUsage:
    """The usage of one chat; one measurement at a time, all callers share it."""

    def __init__(
        self,
        measure: Callable[[Checkpoint], tuple[TreeUsage, FreeSpace]],
        config: WorkspaceConfig,
        *,
        limiter: anyio.CapacityLimiter,
        least_interval_s: float = _LEAST_INTERVAL_S,
        deadline_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._config = config
        self._limiter = limiter
        self._least_interval_s = least_interval_s
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = anyio.Lock()
        self._reading: Measurement | None = None
        self._changed = False
        self._grew = False
        self._admitted = 0

    async def usage(self) -> WorkspaceUsage:
        """Return what is used: now, or when the last call ended."""
        reading = await self.read()
        if self._changed:
            reading = await self.read(anew=True)
        usage, allowed = reading.usage, reading.free.allowed_bytes
        limit = self._config.size_limit
        return WorkspaceUsage(
            used_bytes=usage.allocated_bytes,
            limit_bytes=limit if allowed is None else max(0, min(limit, allowed)),
            files=usage.files,
            exact=usage.complete,
        )

    async def find_problem(self) -> SandboxError | None:
        """Return why nothing more may be written now; None if it may."""
        return await self._find_refusal()

    async def check_room(self, adding: int = 0, *, unseen: int = 0) -> None:
        """Raise WorkspaceFull or StorageUnavailable unless `adding` more bytes may be written.

        `unseen` bytes were let in before, and are in a file that has no name yet.
        """
        if (problem := await self._find_refusal(adding, unseen)) is not None:
            raise problem
        self._admitted += adding

    async def wait_for_overshoot(
        self, pause: Callable[[float], Awaitable[None]] = anyio.sleep
    ) -> SandboxError:
        """Return once the chat has passed a limit since now, with the reason to end its calls.

        `pause` waits between two readings, at least for the seconds it is given.
        """
        # If nothing was written since the last reading, one of just now is as good as new.
        anew = self._changed or self._admitted > 0
        start = reading = await self.read(fresh=True, anew=anew)
        while True:
            await pause(measuring_interval_s(reading.duration_s, self._least_interval_s))
            reading = await self.read(fresh=True)
            if (problem := find_overshoot(start, reading, self._config)) is not None:
                return problem

    def note_change(self, *, grew: bool = True) -> None:
        """Say that files may have gone: the next answer about usage is measured anew.

        If files may also have grown, and measuring is cheap, so is the next permission.
        """
        self._changed = True
        self._grew |= grew

    async def read(self, *, fresh: bool = False, anew: bool = False) -> Measurement:
        """Return the last reading while it is valid, else, or if `anew`, a new one.

        With `fresh` it is valid for the shortest interval only, whatever a new one costs.
        """
        async with self._lock:
            now, last = self._clock(), self._reading
            if last is not None and not anew:
                good_for = measuring_interval_s(
                    0.0 if fresh else last.duration_s, self._least_interval_s
                )
                if 0 <= now - last.taken_at < good_for:
                    return last
            return await self._take()

    async def _find_refusal(self, adding: int = 0, unseen: int = 0) -> SandboxError | None:
        """Return why no more may be written, by a measurement that is not older than this call."""
        began = self._clock()
        if self._grew and self._reading and self._reading.duration_s < _CHEAP_S:
            await self.read(anew=True)
        # What was let in since the last reading may not be on the disk yet.
        further = max(self._admitted, unseen) + adding
        while True:
            reading = await self.read()
            problem = refusal(reading.usage, reading.free, self._config, further)
            if problem is None or reading.taken_at >= began:
                return problem
            await self.read(anew=True)

    async def _look(self, checkpoint: Checkpoint) -> tuple[TreeUsage, FreeSpace]:
        return await to_thread.run_sync(self._measure, checkpoint, limiter=self._limiter)

    async def _take(self) -> Measurement:
        """Measure anew; if that fails, keep the notes of changes and admitted bytes."""
        changed, grew, admitted = self._changed, self._grew, self._admitted
        self._changed, self._grew, self._admitted = False, False, 0
        started = self._clock()
        give_up_at = time.monotonic() + self._deadline_s

        def checkpoint() -> None:
            from_thread.check_cancelled()
            if time.monotonic() > give_up_at:
                raise TimeoutError

        try:
            usage, free = await self._look(checkpoint)
        except BaseException:
            self._changed |= changed
            self._grew |= grew
            self._admitted += admitted
            raise
        ended = self._clock()
        self._reading = Measurement(usage, free, taken_at=ended, duration_s=ended - started)
        return self._reading
