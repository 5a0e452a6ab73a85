"""The sandbox of one chat in this server: opened at the first call, replaced when it has died."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Literal
from weakref import WeakValueDictionary

import anyio

from mcp_sandbox import errors
from mcp_sandbox.errors import OperatorError, SandboxGone, StorageUnavailable, Unsaved
from mcp_sandbox.models import BackendName, ChatId, SandboxId
from mcp_sandbox.sessions.approvals import reset_kept
from mcp_sandbox.sessions.sandbox.context import ChatUse, DiskGuard, OpenSandbox, SessionContext
from mcp_sandbox.sessions.sandbox.lifecycle import AGED, SandboxLifecycle
from mcp_sandbox.sessions.sandbox.notices import describe_end, describe_lost, name_background
from mcp_sandbox.sessions.skill_pins import ChatPins
from mcp_sandbox.telemetry.calls import span
from mcp_sandbox.workspace.directory import TrashItem, drop_earlier


class NothingRuns(errors.SandboxError):
    """No sandbox has files of the chat that are nowhere else."""


Files = Literal["keep", "discard", "remove"] | TrashItem


class ChatSandbox:
    """At most one open sandbox, for one chat. Other servers may have the same one open."""

    def __init__(self, chat: ChatId, context: SessionContext) -> None:
        self.chat = chat
        self.user = chat.user
        self.backend: BackendName = context.backend.name
        self.meter = context.workspaces.open_disk_usage(chat)
        self.pins = ChatPins(chat, context.workspaces)
        self.calls = context.settings.calls
        self.lifetime_s = context.settings.sessions.lifetime
        self.tell_agent = partial(context.notices.add, chat)
        self.egress = context.egress
        self.saving = context.saving
        self.notebook_turns = WeakValueDictionary[str, anyio.Lock]()
        self._context = context
        self._lifecycle = SandboxLifecycle(chat, context)
        self._lock = anyio.Lock()
        self._held: OpenSandbox | None = None
        self._calls = 0
        # Of these, how many use the open sandbox, and how many keep it from ending of age.
        self._inside = self._keeping = self._saves = 0
        self._left = anyio.Event()
        # Has the next call check whether the sandbox is made as it should be now.
        self.is_outdated = False

    async def take_notices(self) -> list[str]:
        """Return what the agent should know; each text is returned once."""
        rows = self._held.runtime.processes.untold() if self._held else ()
        if rows and self._held:
            # Before the texts are returned, so that a failure here tells nothing twice.
            with suppress(SandboxGone):
                await self._held.runtime.processes.tell(rows)
        refused = self.egress.take_notices(self.chat) if self.egress else []
        return [*self._context.notices.take(self.chat), *refused, *map(describe_end, rows)]

    async def variables(self) -> Mapping[str, str]:
        """Return the environment variables of the chat's commands."""
        ways_out = self.egress.variables(self.chat) if self.egress else {}
        return {**ways_out, **await self.pins.variables()}

    @property
    def is_busy(self) -> bool:
        """True if a call is under way, or the sandbox is being made."""
        return self._calls + self._saves > 0 or self._lock.locked()

    def use(self) -> ChatUse:
        """Return what this server does with the chat now."""
        held = self._held
        return ChatUse(
            open=held is not None,
            starting=held is None and self._lock.locked(),
            paused=held is not None and held.paused,
            calls=self._calls,
            dead=held is not None and held.dead,
            age_s=self._context.age_s(held) if held else 0.0,
            background=held.runtime.background.total if held and not held.runtime.broken else 0,
            image=(held.sandbox.facts.image or "") if held else "",
            preview=next(reversed(held.previews.values()), "") if held else "",
            sandbox=held.info if held and not held.runtime.broken else None,
        )

    @asynccontextmanager
    async def open_for_save(self, *, as_it_is: bool = False) -> AsyncGenerator[OpenSandbox]:
        """Yield the open sandbox; this is no use of it, and the next call tells if it died.

        `as_it_is`: none is replaced, or made where it alone has files: raises NothingRuns.
        """
        self._saves += 1
        try:
            yield await self._open(as_it_is=as_it_is)
        finally:
            self._saves -= 1
            self._context.capacity.mark_idle(self)

    @asynccontextmanager
    async def open_sandbox(
        self, *, endless: bool = False, keeps: bool = False, changes: bool = True
    ) -> AsyncGenerator[OpenSandbox]:
        """Yield the open sandbox for one call; if it dies during the call, it is removed.

        An `endless` call, such as a person's shell, does not keep a sandbox beyond its highest age.
        One that `keeps` it does, for the other calls that depend on it. After one that `changes`
        files they are saved.
        """
        self._calls += 1
        self._context.capacity.mark_used(self)
        self._context.note_use(self.chat, changes=False)
        try:
            held = await self._open()
            self._context.note_use(self.chat, changes=changes)
            if held.notice:
                self.tell_agent(held.notice)
                held.notice = ""
                self._lifecycle.last.follow(held)
            if held.doors:
                await held.doors.ready()
            try:
                self._inside += not endless
                self._keeping += keeps
                try:
                    yield held
                finally:
                    self._inside -= not endless
                    self._keeping -= keeps
                    self._left.set()
            except SandboxGone as exc:
                raise await self._explain_loss(held, exc) from exc
        finally:
            self._calls -= 1
            self._context.note_use(self.chat, changes=changes)
            self._context.capacity.mark_idle(self)

    async def _explain_loss(self, held: OpenSandbox, exc: SandboxGone) -> errors.SandboxError:
        """Return what to tell a call whose connection broke; a sandbox that died is removed."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                if self._held is held and not held.loss:
                    async with self._context.records.hold(self.chat):
                        held.loss = await self._lifecycle.explain_loss(held, exc)
                    if not isinstance(held.loss, errors.Unreachable):
                        self._forget(held, goes_on=isinstance(held.loss, errors.CutOff))
        return held.loss or exc

    def _forget(self, held: OpenSandbox, *, goes_on: bool = False) -> None:
        """Give it up. If it `goes_on`, for other servers, it still reports its ended processes."""
        if self._held is held:
            self._held = None
            self._context.capacity.release(self)
            for row in () if goes_on else held.runtime.processes.untold():
                self.tell_agent(describe_end(row).rpartition(";")[0])
        held.guard.watching.cancel()
        held.close_doors()

    async def _open(self, *, as_it_is: bool = False) -> OpenSandbox:
        async with self._lock:
            if self._held is not None:
                self._context.check_lease(self.chat)
                await self._refresh(self._held, as_it_is=as_it_is)
            if self._held is None and as_it_is and self._context.files.lost_with_sandbox:
                with anyio.CancelScope(shield=True):
                    async with self._context.records.hold(self.chat):
                        for info in await self._lifecycle.running():
                            await self._adopt(info.id)
                if self._held is None:
                    raise NothingRuns(f"no sandbox of chat {self.chat} runs: there is no new file")
            if self._held is None:
                if self.egress:
                    # Its process starts beside the sandbox that needs it.
                    self._context.ways_out.begin()
                await self._context.capacity.take(self)
                try:
                    with span("session open"):
                        async with self._context.records.hold(self.chat):
                            # Finish even if cancelled: a half-made sandbox is in no record.
                            with anyio.CancelScope(shield=True):
                                await self._keep(await self._lifecycle.acquire())
                except BaseException:
                    if self._held is None:
                        self._context.capacity.release(self)
                    raise
                try:
                    self._context.check_lease(self.chat)
                except StorageUnavailable as exc:
                    # The making has taken longer than the lease.
                    await self.let_go(str(exc))
                    raise
            assert self._held  # noqa: S101
            return self._held

    async def let_go(self, why: str, *, lost: bool = False) -> None:
        """End the calls under way at once, as this server may not answer for the chat any more.

        The sandbox is paused if that is possible; if another server has the chat, it is `lost` and
        ends, also if it was paused before. Its files stay.
        """
        if (held := self._held) is None:
            if lost and not self._context.files.lost_with_sandbox:
                await self._lifecycle.end_running()
            return
        held.loss = SandboxGone(f"{why}. The sandbox was stopped")
        self._forget(held, goes_on=True)
        with anyio.CancelScope(shield=True):
            goes_on = await self._context.files.leave(held, lost=lost)
            await held.runtime.aclose()
            if not goes_on:
                await self._lifecycle.destroy(held)
            # Without a lease it cannot be noted.
            self._lifecycle.last.lost = {held.runtime.hello.life: why}
            if lost and self.saving:
                await self.saving.let_go(self.chat)

    async def _refresh(self, held: OpenSandbox, *, as_it_is: bool) -> None:
        """Resume a paused sandbox; remove one that is dead or, unless it stays `as_it_is`, old."""
        if held.paused:
            with anyio.CancelScope(shield=True):
                async with self._context.records.hold(self.chat):
                    await self._lifecycle.resume(held)
        if held.runtime.broken:
            # It died with no call under way: the next result tells.
            with anyio.CancelScope(shield=True):
                async with self._context.records.hold(self.chat):
                    self._forget(held, goes_on=await self._lifecycle.settle(held))
        elif as_it_is:
            return
        elif not self._keeping and self._context.age_s(held) >= self.lifetime_s:
            await self._expire(held)
        else:
            await self._renew(held)

    async def _expire(self, held: OpenSandbox) -> None:
        """End a sandbox that is too old, once the calls in it have ended; new calls wait."""
        while self._inside:
            self._left = anyio.Event()
            await self._left.wait()
        async with self._context.records.hold(self.chat):
            # If it cannot be saved or reached, the next call tries again.
            with suppress(Unsaved, errors.Unreachable):
                if not await self._retire(held, background_too=True):
                    # Only a person's shell is left in it.
                    self._forget(held)
                    await self._lifecycle.put_away(held)
                    await self._lifecycle.last.note_end(held.runtime, AGED)

    async def _renew(self, held: OpenSandbox) -> None:
        """Replace it if it was made with other settings, or shows another folder."""
        if self.is_outdated:
            held.is_current = self.is_outdated = False
        project = self._context.projects.folder(self.chat)
        # The client may work in another folder now; while anything runs, the old one stays.
        moved = project not in (None, held.project.folder)
        alone = self._calls == 1 and not held.runtime.background.total
        if held.is_current and not (moved and alone):
            return
        with anyio.CancelScope(shield=True):
            async with self._context.records.hold(self.chat):
                is_replaced = await self._lifecycle.renew(held)
            held.is_current = True
            if is_replaced:
                self._forget(held)

    async def _keep(self, held: OpenSandbox) -> None:
        held.guard = DiskGuard(self.meter, self._stop_growth)
        self._context.tasks.start_soon(held.guard.run)
        self._context.start_doors(self.chat, held)
        self._held = held
        self._lifecycle.last.follow(held)
        self._lifecycle.log_event("sandbox opened", held)
        try:
            await self.pins.show_in(held.sandbox)
        except OperatorError as exc:
            self.tell_agent(f"Skills are missing in this sandbox: {exc}")

    async def adopt(self, sandbox_id: SandboxId) -> bool:
        """Take over a running sandbox; return False if there is one already, or it is unusable."""
        with anyio.CancelScope(shield=True):
            async with self._lock, self._context.records.hold(self.chat):
                adopted = not self._held and await self._adopt(sandbox_id)
        return adopted

    async def _adopt(self, sandbox_id: SandboxId) -> bool:
        held = await self._lifecycle.adopt(sandbox_id)
        if held:
            held.is_current = False
            self._context.capacity.adopt(self)
            await self._keep(held)
        return held is not None

    async def pause(self) -> bool:
        """Pause the sandbox; see the manager."""
        with anyio.CancelScope(shield=True):
            async with self._lock, self._context.records.hold(self.chat):
                if (held := self._held) and held.dead:
                    self._forget(held, goes_on=await self._lifecycle.settle(held))
                left = () if self._held else await self._lifecycle.running()
                paused = any(info.state == "paused" for info in left)
                for info in () if paused else left:
                    await self._adopt(info.id)
                held, used = self._held, self._calls > 0
                if held and not (held.paused or await self._lifecycle.pause(held, is_used=used)):
                    self._forget(held)
                paused = paused or held is not None
        return paused

    async def resume(self) -> bool:
        """Resume the sandbox, also one that no server has open; return False if none is paused."""
        with anyio.CancelScope(shield=True):
            async with self._lock:
                held = self._held
                was_paused = held is not None and held.paused
                if was_paused or not held:
                    async with self._context.records.hold(self.chat):
                        if held:
                            await self._lifecycle.resume(held)
                        for info in () if held else await self._lifecycle.running():
                            if info.state == "paused":
                                was_paused = True
                                with suppress(SandboxGone):
                                    await self._context.backend.attach(info.id)
        return was_paused

    async def release_if_idle(self, *, background_too: bool = False, at_once: bool = False) -> bool:
        """End the sandbox unless it is in use; one that other servers use is left to them.

        Processes in the background count as use, unless `background_too`. `at_once`: so does the
        chat's lock in another server, which is not waited for. Return False if it is still open.
        """
        if self.is_busy:
            return False
        with anyio.CancelScope(shield=True):
            async with self._lock, self._context.records.hold(self.chat, at_once=at_once) as ours:
                gone, held = ours, self._held
                if ours and held:
                    gone = False
                    with suppress(Unsaved, errors.Unreachable):
                        if held.dead:
                            goes_on = await self._lifecycle.settle(held)
                            self._forget(held, goes_on=goes_on)
                            gone = not (goes_on and await self._adopt(held.sandbox.id))
                        else:
                            gone = await self._retire(held, background_too=background_too)
        return gone

    async def _retire(self, held: OpenSandbox, *, background_too: bool) -> bool:
        """End it unless it is in use; the caller has the chat's lock. Raises Unsaved."""
        refusal = await self._lifecycle.retire(held, background_too=background_too)
        gone = refusal in ("", "users")
        if gone:
            self._forget(held, goes_on=refusal == "users")
        return gone

    async def disconnect(self) -> None:
        """Leave the sandbox as it is, to another server or to its own end.

        Where this server has calls in it, these end it, unless other servers use it.
        """
        with anyio.CancelScope(shield=True):
            async with self._lock:
                held = self._held
                if held:
                    # The calls get SandboxGone for their lost connection, and remove it.
                    await held.runtime.aclose()
                    if not self._calls:
                        self._forget(held)

    async def end(self, files: Files = "keep", *, force: bool = False) -> bool:
        """End the chat's sandbox, in any server, and keep, remove or replace its files.

        "discard" begins with an empty workspace, "remove" leaves nothing of the chat; what lies in
        the trash becomes its files. All move what it has to the trash. Return False if nothing ran.

        Raises Unsaved: it alone holds files that cannot be saved now; not if it is done by `force`.
        """
        if files == "discard":
            await self._context.files.empty(self)
        with anyio.CancelScope(shield=True):
            async with self._lock, self._context.records.hold(self.chat):
                if not (force or files == "remove"):
                    await self._save_before_end()
                held = self._held
                if held is not None:
                    self._forget(held)
                    await self._lifecycle.destroy(held)
                is_ended = await self._lifecycle.end_running() or held is not None
                if is_ended:
                    await self._context.records.note_last_seen(self.chat, {})
                await _change_files(self._context, self.chat, files)
        self.meter.note_change()
        if files != "keep":
            self.pins.forget()
            if self.egress:
                self.egress.forget(self.chat)
        return is_ended

    async def _save_before_end(self) -> None:
        """Save the files of the chat's sandbox, of one that no server has open, too."""
        held, lost = self._held, self._context.files.lost_with_sandbox
        if lost and (held is None or held.dead):
            if held:
                self._forget(held)
            for info in await self._lifecycle.running():
                # At most one has the newest files and stays: others are saved as older, and end.
                await self._adopt(info.id)
        if self._held and not self._held.dead:
            if lost:
                await self._held.make_room()
            await self._lifecycle.keep(self._held)

    async def _stop_growth(self) -> None:
        """Stop what writes too much in the background, unless a call of another server writes.

        If that is not found, and grew on with all else stopped, the sandbox ends.
        """
        async with self._lock:
            held = self._held
            if held is None or held.runtime.broken:
                return
            try:
                status = await held.runtime.status(stop_background=True)
            except SandboxGone:
                return
            if status.calls:
                # The server of that call ends it.
                return
            ended = describe_lost(name_background(status.background))
            if ended and status.stopped:
                self.tell_agent(
                    "What ran in the background filled the workspace, and was stopped since the "
                    f"last call. Make room: delete what is not needed.{ended}"
                )
                return
            with anyio.CancelScope(shield=True):
                async with self._context.records.hold(self.chat):
                    if not self._context.backend.keeps_paused_files:
                        await self._lifecycle.keep(held)
                    self._forget(held)
                    # Where it is paused, nothing has to be saved while that is still written.
                    await self._lifecycle.put_away(held)
                    cause = "what ran in it filled the workspace, and could not be found"
                    await self._lifecycle.last.note_end(held.runtime, cause)


async def _change_files(context: SessionContext, chat: ChatId, how: Files) -> None:
    if isinstance(how, TrashItem):
        await context.workspaces.take_back(how, chat)
    elif how == "discard":
        if record := await context.records.get(chat):
            await context.records.put(replace(record, further=reset_kept(record.further)))
        thrown = await context.workspaces.discard(chat)
        context.tasks.start_soon(drop_earlier, context.workspaces, chat, thrown)
    elif how == "remove":
        await context.workspaces.remove(chat)
        await context.records.remove(chat)
        context.use_times.forget(chat)
