"""Keeps the usage of one chat fresh enough to hold its limits, without measuring all the time."""

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import anyio
from anyio import from_thread, to_thread

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import SandboxError, StorageUnavailable, WorkspaceFull
from mcp_sandbox.models import WorkspaceUsage
from mcp_sandbox.workspace.walk import Checkpoint, FreeSpace, Usage

_LEAST_INTERVAL_S = 0.25
_INTERVAL_PER_DURATION = 20
# A tree that takes no longer than this is measured anew before a write that follows a command.
_CHEAP_S = 0.05
# A call that starts in a full workspace, to delete files say, may still write this much.
_SLACK_BYTES = 1024**2
_SLACK_FILES = 100
_MIN_FREE_FILES = 10_000


@dataclass(frozen=True)
class Reading:
    """A measurement: when (monotonic) and how long it took."""

    usage: Usage
    free: FreeSpace
    taken_at: float
    duration_s: float


def interval_s(duration_s: float, least_s: float = _LEAST_INTERVAL_S) -> float:
    """Return how long a reading is valid, so that measuring takes at most 5 % of the time."""
    return max(least_s, _INTERVAL_PER_DURATION * duration_s)


def refusal(
    usage: Usage, free: FreeSpace, config: WorkspaceConfig, adding: int = 0
) -> SandboxError | None:
    """Return why `adding` more bytes may not be written; None if they may."""
    return next(_problems(usage, free, config, adding), None)


def _problems(
    usage: Usage, free: FreeSpace, config: WorkspaceConfig, adding: int
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


def overshoot(start: Reading, now: Reading, config: WorkspaceConfig) -> SandboxError | None:
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


class Meter:
    """The usage of one chat; one measurement at a time, all callers share it."""

    def __init__(
        self,
        measure: Callable[[Checkpoint], tuple[Usage, FreeSpace]],
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
        self._reading: Reading | None = None
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

    async def problem(self) -> SandboxError | None:
        """Return why nothing more may be written now; None if it may."""
        await self._catch_up()
        return await self._refusal(0)

    async def check_room(self, adding: int = 0) -> None:
        """Raise WorkspaceFull or StorageUnavailable unless `adding` more bytes may be written."""
        await self._catch_up()
        # What was let in since the last reading may not be on the disk yet.
        if (problem := await self._refusal(self._admitted + adding)) is not None:
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
            await pause(interval_s(reading.duration_s, self._least_interval_s))
            reading = await self.read(fresh=True)
            if (problem := overshoot(start, reading, self._config)) is not None:
                return problem

    def note_change(self, *, grew: bool = True) -> None:
        """Say that files may have gone: the next refusal is checked against a new measurement.

        If files may also have grown, and measuring is cheap, so is the next permission.
        """
        self._changed = True
        self._grew |= grew

    async def read(self, *, fresh: bool = False, anew: bool = False) -> Reading:
        """Return the last reading while it is valid, else, or if `anew`, a new one.

        With `fresh` it is valid for the shortest interval only, whatever a new one costs.
        """
        async with self._lock:
            now, last = self._clock(), self._reading
            if last is not None and not anew:
                good_for = interval_s(0.0 if fresh else last.duration_s, self._least_interval_s)
                if 0 <= now - last.taken_at < good_for:
                    return last
            return await self._take()

    async def _catch_up(self) -> None:
        if self._grew and self._reading and self._reading.duration_s < _CHEAP_S:
            await self.read(anew=True)

    async def _refusal(self, adding: int) -> SandboxError | None:
        reading = await self.read()
        problem = refusal(reading.usage, reading.free, self._config, adding)
        if problem is None or not self._changed:
            return problem
        reading = await self.read(anew=True)
        return refusal(reading.usage, reading.free, self._config, adding)

    async def _take(self) -> Reading:
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
            usage, free = await to_thread.run_sync(self._measure, checkpoint, limiter=self._limiter)
        except BaseException:
            self._changed |= changed
            self._grew |= grew
            self._admitted += admitted
            raise
        ended = self._clock()
        self._reading = Reading(usage, free, taken_at=ended, duration_s=ended - started)
        return self._reading
