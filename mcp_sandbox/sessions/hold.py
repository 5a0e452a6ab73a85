"""One chat's hold on its sandbox: opens it at the first call, replaces it when it has died."""

import logging
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Literal

import anyio

from mcp_sandbox.errors import Draining, SandboxGone
from mcp_sandbox.models import BackendName, ChatId, SandboxId, SessionState
from mcp_sandbox.sessions.growth import GrowthGuard
from mcp_sandbox.sessions.leaving import Fate, Leaving
from mcp_sandbox.sessions.listing import Use
from mcp_sandbox.sessions.obituary import ended_with
from mcp_sandbox.sessions.opening import Opening
from mcp_sandbox.sessions.pinning import Pinning
from mcp_sandbox.sessions.rooms import Held, Opened, Rooms
from mcp_sandbox.sessions.spec import SPEC, started_s
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.telemetry.spans import span

logger = logging.getLogger(__name__)


class Hold:
    """At most one open sandbox, for one chat. Other servers may have the same one open."""

    def __init__(self, chat: ChatId, rooms: Rooms) -> None:
        self.chat = chat
        self.user = chat.user
        self.backend: BackendName = rooms.backend.name
        self.meter = rooms.workspaces.meter(chat)
        self.pinning = Pinning(chat, rooms.workspaces, rooms.snapshots)
        self._rooms = rooms
        self._opening = Opening(chat, rooms)
        self._leaving = Leaving(chat, rooms)
        self._lock = anyio.Lock()
        self._held: Held | None = None
        self._calls = 0
        # Of these, how many are past the opening, and use the sandbox.
        self._inside = 0
        self._left = anyio.Event()

    @property
    def is_busy(self) -> bool:
        """A call is under way, or the sandbox is just being made."""
        return self._calls > 0 or self._lock.locked()

    def use(self) -> Use:
        """What this server does with the chat now."""
        held = self._held
        return Use(
            open=held is not None,
            starting=held is None and self._lock.locked(),
            can_pause=held is not None and held.can_pause and not held.paused,
            calls=self._calls,
            dead=held is not None and held.runtime.broken,
            age_s=self._age_s(held) if held else 0.0,
            background=held.runtime.background.total if held else 0,
            image=(held.facts.image or "") if held else "",
        )

    def _age_s(self, held: Held) -> float:
        return self._rooms.ledger.clock().steady_s - held.started_s

    def take_news(self) -> list[str]:
        """What the agent should know and was not told yet; it is told once."""
        return self._rooms.news.take(self.chat)

    @asynccontextmanager
    async def call(self, *, endless: bool = False) -> AsyncGenerator[Held]:
        """The open sandbox, for one call; one that dies under it is removed.

        An `endless` one, a person's shell, keeps no sandbox beyond its highest age.

        Raises:
            OperatorError: no sandbox can be made.
            SandboxGone: it died; the message says of what.
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
                    with nullcontext() if endless else self._within():
                        yield held
                except SandboxGone as exc:
                    raise await self._explained(held, exc) from exc
        finally:
            self._calls -= 1
            self._rooms.ledger.used(self.chat)
            self._rooms.drain.note()
            self._rooms.slots.rest(self)

    @contextmanager
    def _within(self) -> Generator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._left.set()

    async def _explained(self, held: Held, exc: SandboxGone) -> SandboxGone:
        """The sandbox died under a call, or is of no use any more: say why, and remove it."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self._held is held:
                    fate = await self._bury(held)
                    reason = str(exc)
                    if fate.cause:
                        reason = (
                            f"the sandbox ended: {fate.cause}; what was under way is lost, files "
                            "are kept. The next call gets a new sandbox on the same files."
                        )
                    lost = "" if fate.lives else ended_with(held.runtime.background)
                    held.epitaph = f"{reason}{lost}"
        return SandboxGone(held.epitaph or str(exc))

    async def _bury(self, held: Held) -> Fate:
        self._forget(held)
        async with self._rooms.locks.hold(self.chat):
            return await self._leaving.bury(held)

    def _forget(self, held: Held) -> None:
        """It is ours no longer."""
        if self._held is held:
            self._held = None
            self._rooms.slots.release(self)
            self._rooms.ledger.note(self.chat, "warm")
        held.guard.stop()

    async def _open(self) -> Held:
        async with self._lock:
            held = self._held
            if held is not None:
                await self._look_after(held)
            if self._held is None:
                await self._rooms.slots.take(self)
                await self._create()
            assert self._held  # noqa: S101
            return self._held

    async def _look_after(self, held: Held) -> None:
        """Nothing to do for a sandbox that lives, is awake, young and as it should be."""
        if held.paused and not held.runtime.broken:
            await self._resume(held)
        if held.runtime.broken:
            await self._find_dead(held)
        elif self._age_s(held) >= self._rooms.settings.lifetimes.lifetime_s:
            await self._expire(held)
        elif not self._fits(held):
            await self._renew(held)

    async def _expire(self, held: Held) -> None:
        """End one that is too old, once the calls in it have ended; new ones wait."""
        while self._inside:
            self._left = anyio.Event()
            await self._left.wait()
        background = held.runtime.background
        async with self._rooms.locks.hold(self.chat):
            if not await self._retire(held, background_too=True):
                # Nothing but a person's shell is left in it.
                self._forget(held)
                await self._leaving.destroy(held)
        if not background.total:
            return
        self._tell_agent(f"The sandbox was replaced because of its age.{ended_with(background)}")

    async def _resume(self, held: Held) -> None:
        try:
            with anyio.CancelScope(shield=True):
                async with self._rooms.locks.hold(self.chat):
                    await held.sandbox.resume()
            held.paused = False
            self._note(held, "running")
        except SandboxGone:
            await held.runtime.aclose()

    async def _find_dead(self, held: Held) -> None:
        """It died with no call under way: the next result tells."""
        with anyio.CancelScope(shield=True):
            fate = await self._bury(held)
        self._tell_ended(held, fate)

    def _tell_ended(self, held: Held, fate: Fate) -> None:
        if not fate.lives:
            self._tell_agent(
                f"The sandbox had ended since the last call: {fate.cause or 'it did not answer'}; "
                f"this is a new one on the same files.{ended_with(held.runtime.background)}"
            )

    def _fits(self, held: Held) -> bool:
        """Unless the client works in another folder now, and nothing runs beside the old one."""
        project = self._rooms.projects.folder(self.chat)
        moved = project not in (None, held.shown.folder)
        alone = self._calls == 1 and not held.runtime.background.total
        return held.suits and not (moved and alone)

    async def _renew(self, held: Held) -> None:
        """Replace it if it was made with other settings, or shows another folder."""
        with anyio.CancelScope(shield=True):
            async with self._rooms.locks.hold(self.chat):
                news = await self._opening.renew(held)
            held.suits = True
            if news is not None:
                self._forget(held)
                self._tell_agent(news)

    async def _create(self) -> None:
        """Find or make it. Half-made is worse than late: nobody would know of it."""
        try:
            with span("session open"):
                async with self._rooms.locks.hold(self.chat):
                    with anyio.CancelScope(shield=True):
                        self._keep(await self._opening.open())
        except BaseException:
            if self._held is None:
                self._rooms.slots.release(self)
            raise

    def _keep(self, opened: Opened, *, suits: bool = True) -> None:
        guard = GrowthGuard(self.meter, self._end_for_growth)
        self._rooms.tasks.start_soon(guard.run)
        sandbox, now_s = opened.sandbox, self._rooms.ledger.clock().steady_s
        began_s = started_s(sandbox.labels, now_s)
        self._held = Held(sandbox, opened.runtime, guard, opened.shown, began_s, suits)
        if opened.news:
            self._tell_agent(opened.news)
        image, spec = sandbox.facts.image, sandbox.labels.get(SPEC)
        self._rooms.ledger.note(self.chat, "running", sandbox_id=sandbox.id, image=image, spec=spec)
        chat, backend = str(self.chat), self.backend
        event(logger, "sandbox opened", chat=chat, backend=backend, sandbox=sandbox.id)

    def _tell_agent(self, news: str) -> None:
        self._rooms.news.tell(self.chat, news)

    async def adopt(self, sandbox_id: SandboxId) -> bool:
        """Take over a sandbox that runs; False if there is one already, or it is of no use."""
        with anyio.CancelScope(shield=True):
            async with self._lock, self._rooms.locks.hold(self.chat):
                opened = None if self._held else await self._opening.adopt(sandbox_id)
                if opened:
                    self._rooms.slots.adopt(self)
                    self._keep(opened, suits=False)
        return opened is not None

    async def pause(self) -> bool:
        """Stop what nobody uses until the next call; False if it is used, or nothing is saved."""
        paused = False
        with anyio.CancelScope(shield=True):
            async with self._lock:
                held = self._held
                if held and not (self._calls or held.paused or held.runtime.broken):
                    async with self._rooms.locks.hold(self.chat):
                        paused = await self._pause(held)
        return paused

    def _note(self, held: Held, state: SessionState) -> None:
        self._rooms.ledger.note(self.chat, state, sandbox_id=held.sandbox.id)

    async def _pause(self, held: Held) -> bool:
        try:
            status = await held.runtime.status()
            if status.connections > 1 or status.calls or status.background.total:
                return False
            held.paused = True
            held.paused = held.can_pause = await held.sandbox.pause()
            if held.paused:
                self._note(held, "paused")
        except SandboxGone:
            # The next call finds out what became of it.
            return False
        return held.paused

    async def yield_up(self, *, background_too: bool = False, at_once: bool = False) -> bool:
        """End the sandbox unless it is used; what other servers use is left to them.

        What runs in the background is a use, too, unless `background_too`; and so is, `at_once`,
        what another server does with the chat just now. False: it is still open.
        """
        if self.is_busy:
            return False
        locks = self._rooms.locks
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if at_once:
                    async with locks.hold_at_once(self.chat) as ours:
                        gone = ours and await self._part(background_too=background_too)
                else:
                    async with locks.hold(self.chat):
                        gone = await self._part(background_too=background_too)
        return gone

    async def _part(self, *, background_too: bool) -> bool:
        """Who calls has the chat's lock."""
        held = self._held
        if held and held.runtime.broken:
            self._forget(held)
            self._tell_ended(held, await self._leaving.bury(held))
        elif held:
            return await self._retire(held, background_too=background_too)
        return True

    async def _retire(self, held: Held, *, background_too: bool) -> bool:
        """Who calls has the chat's lock."""
        refusal = await self._leaving.retire(held, background_too=background_too)
        gone = refusal in ("", "users")
        if gone:
            self._forget(held)
        return gone

    async def disconnect(self) -> None:
        """Leave the sandbox as it is, to another server or to its own end.

        Under calls of ours it ends, unless other servers use it.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                held = self._held
                if held:
                    # The calls see that they are cut off, and bury it.
                    await held.runtime.aclose()
                    if not self._calls:
                        self._forget(held)

    async def end(self, files: Literal["keep", "discard", "remove"] = "keep") -> bool:
        """End what runs for the chat, in any server; what becomes of its files is done with it.

        "discard" begins with an empty workspace, "remove" leaves nothing of the chat; both go
        through the trash. False when nothing ran.

        Raises:
            OperatorError: the engine or the data root cannot be used.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock, self._rooms.locks.hold(self.chat):
                held = self._held
                if held is not None:
                    self._forget(held)
                    await self._leaving.destroy(held)
                others = await self._opening.labelled()
                for sandbox_id in others:
                    await self._rooms.backend.destroy(sandbox_id)
                if files == "discard":
                    await self._rooms.workspaces.discard(self.chat)
                elif files == "remove":
                    await self._rooms.workspaces.remove(self.chat)
                    await self._rooms.residence.forget(self.chat)
                    self._rooms.ledger.note(self.chat, "terminated")
        self.meter.note_change()
        if files != "keep":
            self.pinning.forget()
        return held is not None or bool(others)

    async def _end_for_growth(self) -> None:
        """What runs in the background writes too much, unless it is a call of another server."""
        async with self._lock:
            held = self._held
            if held is None or held.runtime.broken:
                return
            try:
                status = await held.runtime.status()
            except SandboxGone:
                return
            if status.calls:
                # Whose call it is ends it.
                return
            with anyio.CancelScope(shield=True):
                async with self._rooms.locks.hold(self.chat):
                    self._forget(held)
                    await self._leaving.destroy(held)
            self._tell_agent(
                "The sandbox was ended since the last call: what ran in its background filled the "
                f"workspace; this is a new one on the same files.{ended_with(status.background)}"
            )
