"""One chat's hold on its sandbox: makes it at the first call, replaces it when it has died."""

import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.errors import Draining, OperatorError, SandboxGone
from mcp_sandbox.models import BackendName, ChatId, Mount, SandboxFacts
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.connect import connect
from mcp_sandbox.sessions.drain import Drain
from mcp_sandbox.sessions.growth import GrowthGuard
from mcp_sandbox.sessions.ledger import Ledger
from mcp_sandbox.sessions.listing import Use
from mcp_sandbox.sessions.residence import Residence
from mcp_sandbox.sessions.settings import SessionSettings
from mcp_sandbox.sessions.slots import Slots
from mcp_sandbox.sessions.warm import WarmPool
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.telemetry.spans import span
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.projects import Projects, Shown

logger = logging.getLogger(__name__)

# Ending a sandbox takes the engine up to some seconds; a stuck engine must not hold us longer.
_DESTROY_S = 20.0


@dataclass(frozen=True)
class Rooms:
    """What every hold of one manager shares."""

    backend: Backend
    workspaces: Workspaces
    projects: Projects
    residence: Residence
    settings: SessionSettings
    slots: Slots
    ledger: Ledger
    tasks: TaskGroup
    drain: Drain
    pool: WarmPool | None = None


@dataclass(frozen=True)
class Held:
    """A sandbox that is open, with the connection to its runner."""

    sandbox: Sandbox
    runtime: Runtime
    guard: GrowthGuard
    shown: Shown
    started_s: float

    @property
    def facts(self) -> SandboxFacts:
        return self.sandbox.facts


class Hold:
    """At most one open sandbox, for one chat."""

    def __init__(self, chat: ChatId, rooms: Rooms) -> None:
        self.chat = chat
        self.meter = rooms.workspaces.meter(chat)
        self._rooms = rooms
        self._lock = anyio.Lock()
        self._held: Held | None = None
        self._calls = 0
        # Of these, how many are past the opening, and use the sandbox.
        self._inside = 0
        self._left = anyio.Event()
        self._used_at: datetime | None = None

    @property
    def backend(self) -> BackendName:
        return self._rooms.backend.name

    def use(self) -> Use:
        """What this server does with the chat now."""
        held = self._held
        return Use(
            starting=held is None and self._lock.locked(),
            open=held is not None,
            calls=self._calls,
            dead=held is not None and held.runtime.broken,
            age_s=self._rooms.ledger.clock().steady_s - held.started_s if held else 0.0,
            background=held.runtime.background.total if held else 0,
            image=(held.facts.image or "") if held else "",
            used_at=self._used_at,
        )

    @property
    def user(self) -> str:
        return self.chat.user

    @property
    def is_busy(self) -> bool:
        """A call is under way, or the sandbox is just being made."""
        return self._calls > 0 or self._lock.locked()

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[Held]:
        """The open sandbox, for one call; one that dies under it is removed.

        Raises:
            OperatorError: no sandbox can be made.
        """
        if self._rooms.drain.begun:
            raise Draining("this sandbox server is about to end: call again in a moment")
        self._calls += 1
        self._rooms.slots.touch(self)
        self._rooms.ledger.used(self.chat)
        try:
            with span("session", chat=str(self.chat), backend=self.backend):
                held = await self._open()
                try:
                    with self._within():
                        yield held
                except SandboxGone:
                    await self._let_go(held)
                    raise
        finally:
            self._calls -= 1
            self._rooms.ledger.used(self.chat)
            self._rooms.drain.note()
            self._used_at = datetime.now(UTC)
            self._rooms.slots.rest(self)

    @contextmanager
    def _within(self) -> Generator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._left.set()

    async def _open(self) -> Held:
        async with self._lock:
            await self._replace_expired()
            if self._held and (self._held.runtime.broken or self._is_elsewhere(self._held)):
                await self._destroy(self._held)
            if self._held is None:
                await self._rooms.slots.take(self)
                self._held = await self._create()
            return self._held

    async def _replace_expired(self) -> None:
        """End a sandbox that is too old, once the calls in it have ended; new ones wait."""
        lifetime_s = self._rooms.settings.lifetimes.lifetime_s
        while self._held and self.use().age_s >= lifetime_s:
            if not self._inside:
                await self._retire(self._held, background_too=True)
                return
            self._left = anyio.Event()
            await self._left.wait()

    def _is_elsewhere(self, held: Held) -> bool:
        """The client works in another folder now, and nothing runs beside the old one."""
        project = self._rooms.projects.folder(self.chat)
        moved = project not in (None, held.shown.folder)
        return moved and self._calls == 1 and not held.runtime.background.total

    async def _create(self) -> Held:
        """A new sandbox. Half-made is worse than late: nobody would know of it."""
        try:
            with span("session open"), anyio.CancelScope(shield=True):
                made = await self._make()
        except BaseException:
            self._rooms.slots.release(self)
            raise
        return made

    async def _make(self) -> Held:
        rooms = self._rooms
        await rooms.residence.settle(self.chat, rooms.backend.name)
        shown = await rooms.projects.show(self.chat)
        adopted = await rooms.pool.adopt(self.chat) if rooms.pool and not shown.mounts else None
        with rooms.pool.foreground() if rooms.pool else nullcontext():
            sandbox, runtime = adopted or await self._start(shown.mounts)
        guard = GrowthGuard(self.meter, self.close)
        rooms.tasks.start_soon(guard.run)
        self._tell("sandbox opened", sandbox)
        rooms.ledger.note(self.chat, "running", sandbox_id=sandbox.id, image=sandbox.facts.image)
        return Held(sandbox, runtime, guard, shown, rooms.ledger.clock().steady_s)

    async def _start(self, shown: tuple[Mount, ...]) -> tuple[Sandbox, Runtime]:
        rooms, labels = self._rooms, {"user": self.chat.user, "chat": self.chat.chat}
        directories = await rooms.workspaces.open(self.chat)
        sandbox = await rooms.backend.create(rooms.settings.spec(directories, labels, shown))
        try:
            keep_bytes = rooms.settings.keep_bytes
            return sandbox, await connect(sandbox, directories, rooms.tasks, keep_bytes)
        except BaseException:
            await rooms.backend.destroy(sandbox.id)
            raise

    async def _let_go(self, held: Held) -> None:
        """Remove this sandbox, unless another one has taken its place already."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self._held is held:
                    await self._destroy(held)

    async def discard(self) -> None:
        """Remove the sandbox and throw the workspace into the trash, with no call in between."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self._held:
                    await self._destroy(self._held)
                await self._rooms.workspaces.discard(self.chat)
        self.meter.note_change()

    async def remove(self) -> None:
        """End the sandbox and throw all files of the chat into the trash."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self._held:
                    await self._destroy(self._held)
                await self._rooms.workspaces.remove(self.chat)
                self._rooms.ledger.note(self.chat, "terminated")

    async def yield_up(self, *, background_too: bool = False) -> bool:
        """End the sandbox unless it is used; what other servers use is left to them.

        What runs in the background is a use, too, unless `background_too`. False: it is still
        open. Files stay.
        """
        if self.is_busy:
            return False
        with anyio.CancelScope(shield=True):
            async with self._lock:
                held, ended = self._held, True
                if held:
                    ended = await self._retire(held, background_too=background_too)
        return ended

    async def _retire(self, held: Held, *, background_too: bool) -> bool:
        try:
            used = await held.runtime.retire(background_too=background_too)
            if used and (await held.runtime.status()).connections > 1:
                await self._hang_up(held)
                return True
        except SandboxGone:
            used = ""
        if not used:
            await self._destroy(held)
        return not used

    async def close(self) -> bool:
        """Remove the sandbox, whoever uses it; files stay. False when there was none."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                held = self._held
                if held:
                    await self._destroy(held)
        return held is not None

    async def _hang_up(self, held: Held) -> None:
        self._held = None
        self._rooms.slots.release(self)
        self._rooms.ledger.note(self.chat, "warm")
        held.guard.stop()
        with anyio.move_on_after(_DESTROY_S, shield=True):
            await held.runtime.aclose()

    async def _destroy(self, held: Held) -> None:
        self._held = None
        self._rooms.slots.release(self)
        self._rooms.ledger.note(self.chat, "warm")
        held.guard.stop()
        with anyio.move_on_after(_DESTROY_S, shield=True) as limit:
            await held.runtime.aclose()
            try:
                await self._rooms.backend.destroy(held.sandbox.id)
            except OperatorError:
                # Not the trouble of who asked for something else: the runner ends itself, too.
                logger.exception("sandbox %s could not be removed", held.sandbox.id)
        if limit.cancelled_caught:
            logger.error("sandbox %s could not be removed in time", held.sandbox.id)
        else:
            self._tell("sandbox removed", held.sandbox)

    def _tell(self, what: str, sandbox: Sandbox) -> None:
        event(logger, what, chat=str(self.chat), backend=self.backend, sandbox=sandbox.id)
