"""Records events of a server: when they reach the disk, and what follows if they cannot."""

import logging
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread
from anyio.abc import TaskGroup

from mcp_sandbox.audit.chain import Fields
from mcp_sandbox.audit.writer import Writer
from mcp_sandbox.config import AuditConfig
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

_BATCH_S, _HOUR_S = 0.1, 3600.0
# Events that programs inside can repeat: one line in this time, and so many kinds for a chat.
_MINUTE_S, _MOST_NOTED = 60.0, 30

_Noted = tuple[str, ChatId, tuple[tuple[str, str], ...]]


class Audit:
    """Records the events of one server, in the block of `open_audit`.

    `mask` hides secrets in text that is to be recorded.
    """

    def __init__(self, folder: Path, settings: AuditConfig) -> None:
        self.enabled = settings.enabled
        self.mask: Callable[[str], str] = str
        self._folder, self._settings = folder, settings
        self._writer = Writer(folder, settings.max_file)
        # Lines that have to wait take threads of their own.
        self._limiter = CapacityLimiter(1)
        self._dirty, self._synced = anyio.Event(), anyio.Event()
        # Why the last fdatasync failed, until one succeeds.
        self._problem: OSError | None = None
        self._failing = False
        self._syncing = CancelScope(shield=True)
        self._times, self._kinds = Counter[_Noted](), Counter[tuple[str, ChatId]]()

    async def write(self, kind: str, **fields: object) -> int:
        """Append a line and return its number, or 0. Fields that are None are left out.

        Raises:
            StorageUnavailable: it cannot be recorded, so the event must not happen.
        """
        if not self.enabled:
            return 0
        try:
            number = self._writer.append(kind, fields, wait=False)
            if not number or self._settings.sync == "each":
                # A cancelled call is recorded, too.
                with CancelScope(shield=True):
                    number = number or await self._append(kind, fields)
                    if self._settings.sync == "each":
                        self._dirty.set()
                        await self._synced.wait()
        except OSError as exc:
            return self._failed(exc)
        self._dirty.set()
        if self._problem:
            return self._failed(self._problem)
        self._failing = False
        return number

    async def _append(self, kind: str, fields: Fields) -> int:
        append = partial(self._writer.append, kind, fields, wait=True)
        return await to_thread.run_sync(append, limiter=self._limiter)

    def _failed(self, exc: OSError) -> int:
        said = f"the audit in {self._folder} cannot be written: {exc.strerror}"
        if self._settings.on_error == "stop":
            raise StorageUnavailable(
                f"{said}. What cannot be recorded does not run: free space there or repair the "
                "folder; with audit.on_error: go_on it runs nevertheless"
            ) from exc
        if not self._failing:
            logger.warning("%s; what runs until that is repaired is not recorded", said)
        self._failing = True
        return 0

    def note(self, kind: str, chat: ChatId, **fields: str) -> None:
        """Record soon an event that programs inside can repeat: once a minute, with a count.

        If there are many kinds at a time, the last are one line, without fields.
        """
        if not self.enabled:
            return
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
            told = {"user": chat.user, "chat": chat.chat, **dict(fields)}
            with suppress(StorageUnavailable):
                await self.write(kind, **told, times=times if times > 1 else None)

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
            self._tell_head()

    def _tell_head(self) -> None:
        event(logger, "audit", head=str(self._writer.head))


@asynccontextmanager
async def open_audit(folder: Path, settings: AuditConfig) -> AsyncGenerator[Audit]:
    """Open the audit in a folder, which is made if need be.

    Raises:
        StorageUnavailable: it cannot be written, and only what is recorded may run.
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
