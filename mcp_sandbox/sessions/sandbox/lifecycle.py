"""Finds, makes, pauses and removes the sandbox of a chat.

The caller has the chat's lock: so two servers never make two, and none finds a half-made one. The
chat's record names its sandbox; if the record is lost, the labels of sandboxes do. A sandbox is the
chat's only if its runner sees the chat's own directory. The runner knows whether it is in use: by
the calls and the connections of all servers.
"""

import logging
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import anyio

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.errors import (
    BackendUnavailable,
    Busy,
    CutOff,
    OperatorError,
    SandboxError,
    SandboxGone,
    StorageUnavailable,
    Unreachable,
    Unsaved,
    Unsupported,
)
from mcp_sandbox.models import Background, ChatId, SandboxId, SandboxInfo, SandboxSpec
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Refusal, Runtime
from mcp_sandbox.sessions.chat_records import (
    CONTROL,
    ChatRecord,
    read_assistant_spec,
    read_object,
)
from mcp_sandbox.sessions.sandbox.context import OpenSandbox, SessionContext, describe_death
from mcp_sandbox.sessions.sandbox.notices import describe_lost, describe_successor, name_background
from mcp_sandbox.sessions.settings import (
    SPEC,
    STARTED,
    find_chat_label,
    list_chat_sandboxes,
    started_s,
)
from mcp_sandbox.telemetry.logs import event
from mcp_sandbox.workspace.directory import ChatDirectories
from mcp_sandbox.workspace.projects import PROJECT, ProjectView

logger = logging.getLogger(__name__)

# An engine takes some seconds to end a sandbox; a stuck one is not waited for any longer.
_DESTROY_S = 20.0
# A process that is being killed closes its connections first.
_DYING_S = 1.0
# Long: under heavy load the answer is slow, and a runner that does not answer is ended.
_ANSWER_S = 15.0
# On a new connection, of a runner that has been silent: with `SILENT_S` and `ASKED_S` under 20 s.
_ALIVE_S = 8.0
_PAUSED = "it was paused, which ends what runs in it"
# What runs in the background is noted at most so often.
_NOTE_S = 0.05
AGED = "it had reached its highest age (sessions.lifetime)"


Connected = tuple[Sandbox, Runtime]


@dataclass(frozen=True)
class DesiredSandbox:
    """How the chat's sandbox should be."""

    spec: SandboxSpec
    directories: ChatDirectories
    project: ProjectView

    def has_project_of(self, runtime: Runtime) -> bool:
        """Return whether its /project is the folder that was checked.

        The engine mounts it by its path, where anyone who may write beside it can have put another
        folder meanwhile.
        """
        checked, seen = self.project.identity, runtime.hello.project
        return checked is None or (seen is not None and seen.is_same(checked))


class LastSandbox:
    """The sandbox that a chat's agent saw last: who connects compares, and the next call tells.

    Beside the chat's record lies the id that its runner drew, what ran in its background, and why
    it ended if that was seen.
    """

    def __init__(self, chat: ChatId, context: SessionContext) -> None:
        self._chat, self._context = chat, context
        self._noting: Runtime | None = None
        # Why one ended, by its id, where that cannot be noted.
        self.lost: dict[str, str] = {}

    async def compare(self, runtime: Runtime) -> str:
        """Return what to tell if it is another; without both ids, if the end of one was seen."""
        last = await self._context.records.last_seen(self._chat)
        before, now = last.get("id", ""), runtime.hello.life
        last = {"cause": self.lost.pop(before, ""), **last}
        is_other = before != now if before and now else bool(last["cause"])
        return describe_successor(last["cause"], last.get("ran", ())) if is_other else ""

    def follow(self, held: OpenSandbox) -> None:
        """Note what runs in its background and each change, once a call has told of the last."""
        runtime = held.runtime
        runtime.watch_background(partial(self.follow, held))
        if self._noting is not runtime and runtime.hello.life and not held.notice:
            self._noting = runtime
            self._context.tasks.start_soon(self._note_background, runtime)

    async def _note_background(self, runtime: Runtime) -> None:
        noted, records = None, self._context.records
        while not runtime.broken and noted != runtime.background:
            await anyio.sleep(_NOTE_S)
            noted = runtime.background
            seen = {"id": runtime.hello.life, "ran": name_background(noted)}
            try:
                # Without the lease: it is not to be taken for that.
                async with records.here.hold(self._chat):
                    if not runtime.broken:
                        await records.note_last_seen(self._chat, seen)
            except SandboxError as exc:
                logger.warning("chat %s: its background is not noted: %s", self._chat, exc)
        self._noting = None if self._noting is runtime else self._noting

    async def note_end(self, runtime: Runtime, cause: str, ran: Background | None = None) -> None:
        """Note its end for the next call to tell, if it has a `cause`; what is untold yet stays."""
        life, names = runtime.hello.life, name_background(ran or runtime.background)
        seen = {"id": life, "ran": names, "cause": cause} if cause else {}
        last = await self._context.records.last_seen(self._chat)
        if last.get("id", life) == life and not last.get("cause"):
            await self._context.records.note_last_seen(self._chat, seen)


class SandboxLifecycle:
    """What can be done with the sandbox of one chat.

    Any may raise OperatorError, and SandboxGone for a sandbox that has not the chat's files.
    """

    def __init__(self, chat: ChatId, context: SessionContext) -> None:
        self._chat = chat
        self._context = context
        self._files = context.files
        self.last = LastSandbox(chat, context)

    async def acquire(self) -> OpenSandbox:
        """Find the chat's sandbox, or make one; the caller sets its guard."""
        context = self._context
        record = await context.records.get(self._chat)
        # A record without a backend may hold grants from before the first sandbox.
        lived = record is not None and record.backend is not None
        is_plain = record is None or record.further.keys() <= {CONTROL}
        is_new = not lived and not await context.workspaces.exist(self._chat)
        self._settle(record, is_new=is_new)
        await self._files.prepare(self._chat, record)
        has_files = context.saving and await context.workspaces.exist(self._chat)
        shown = await context.projects.show(self._chat, read_object(record, PROJECT))
        may_adopt = is_new and is_plain and not (has_files or shown.mounts)
        opened = await context.pool.adopt(self._chat) if context.pool and may_adopt else None
        if opened is None:
            wanted = await self._wanted(shown, record)
            # One of a chat that has no files need not be looked for, unless it alone has them.
            if not is_new or self._files.lost_with_sandbox:
                opened = await self._find(wanted, record)
            if opened is None and wanted.directories.astray:
                moved = await context.workspaces.unite(self._chat)
                context.notices.add(
                    self._chat, f"Given to a user of this chat alone: {moved:,} files."
                )
                shown = await context.projects.show(self._chat, read_object(record, PROJECT))
                wanted = await self._wanted(shown, record)
            with context.pool.foreground() if context.pool else nullcontext():
                opened = opened or await self._make(wanted)
        return await self._remember(opened, shown, record)

    def _settle(self, record: ChatRecord | None, *, is_new: bool) -> None:
        """Refuse a backend that the chat must not move to, and tell the agent of a lost record."""
        here = self._context.backend.name
        lived = record.backend if record else None
        # A chat without files can have a record too, of a question about its first call; and one
        # with files, whose first sandbox was being made when its server was killed.
        is_begun = record is not None and read_object(record, CONTROL).get("first") is True
        is_lost = lived is None and not (is_new or is_begun)
        if record and is_lost and here == "unsafe-local":
            raise BackendUnavailable(
                f"the record of chat {self._chat} was lost, and whether it was isolated: open it "
                "once with `--backend docker` or `--backend bubblewrap`, then move it here"
            )
        if lived not in (None, here) and not self._context.settings.may_move:
            raise BackendUnavailable(
                f"chat {self._chat} lives on {lived}, and this server took {here}: it opens again "
                f"with `backend: {lived}` (MCP_SANDBOX_BACKEND={lived}; `mcp-sandbox doctor` tells "
                f"whether that works), or moves with `backend: {here}`; its files stay the same, "
                "its isolation would change"
            )
        if is_lost:
            self._context.notices.add(
                self._chat,
                f"The record of this computer was lost: it is on {here} now, on the same files. "
                "What ran in its background elsewhere, if anything, goes on there for a while.",
            )

    async def _remember(
        self, opened: Connected, shown: ProjectView, record: ChatRecord | None
    ) -> OpenSandbox:
        """Note in the chat's record which sandbox it has; if that fails, the labels still tell."""
        context, now, (sandbox, runtime) = self._context, self._context.use_times.clock(), opened
        before = record or ChatRecord(self._chat, None, created_s=now.wall_s, used_s=now.wall_s)
        further = self._files.describe(self._chat, record)
        if shown.question:
            context.notices.add(self._chat, f"There is no /project: {shown.question}.")
        bound = replace(
            before,
            backend=context.backend.name,
            sandbox_id=sandbox.id,
            image=sandbox.facts.image,
            spec=sandbox.labels.get(SPEC, ""),
            further={**further, PROJECT: shown.noted} if shown.noted else further,
        )
        notice = ""
        try:
            notice = await self.last.compare(runtime) if record else ""
            if bound != record:
                await context.records.put(replace(bound, used_s=max(bound.used_s, now.wall_s)))
        except StorageUnavailable as exc:
            logger.warning("chat %s: its sandbox could not be noted: %s", self._chat, exc)
        return OpenSandbox(sandbox, runtime, shown, started_s(sandbox.labels, now.steady_s), notice)

    async def adopt(self, sandbox_id: SandboxId) -> OpenSandbox | None:
        """Connect to a running sandbox; return None if it was unusable, and was removed."""
        context, record = self._context, await self._context.records.get(self._chat)
        if not await self._files.prepare(self._chat, record, runs=True):
            await context.backend.destroy(sandbox_id)
            return None
        directories = await context.workspaces.open(self._chat)
        # Before the connection, which a failure here would leave open.
        shown = await context.projects.show(self._chat, read_object(record, PROJECT))
        reached = await self._reach(sandbox_id, directories)
        if reached is None:
            return None
        return await self._remember(reached, shown, record)

    async def running(self) -> Sequence[SandboxInfo]:
        """Return the sandboxes that carry the chat's labels."""
        listed = await list_chat_sandboxes(self._context.backend)
        found = [info for chat, info in listed if chat == self._chat]
        if self._context.leases and self._files.lost_with_sandbox and not found:
            # What another server made is in no list of this one.
            record = await self._context.records.get(self._chat)
            noted = record.sandbox_id if record else None
            found = [SandboxInfo(noted, {}, "running")] if noted else []
        return found

    async def end_running(self) -> bool:
        """End them; return False if there was none."""
        found = await self.running()
        for info in found:
            await self._context.backend.destroy(info.id)
        return bool(found)

    async def _find(self, wanted: DesiredSandbox, record: ChatRecord | None) -> Connected | None:
        """Return a running sandbox made as it should be, or None; one made otherwise ends."""
        for is_noted in (True, False):
            noted = [record.sandbox_id] if record and record.sandbox_id else []
            for sandbox_id in noted if is_noted else [info.id for info in await self.running()]:
                reached = await self._reach(sandbox_id, wanted.directories, is_noted=is_noted)
                if reached and not await self._replace(*reached, wanted):
                    return reached
        return None

    async def _reach(
        self, sandbox_id: SandboxId, directories: ChatDirectories, *, is_noted: bool = False
    ) -> Connected | None:
        """Connect to it; remove one that is dead, stuck or without the chat's files.

        Remove too one that the chat's record names and that has lost its labels.
        """
        context = self._context
        try:
            sandbox = await context.backend.attach(sandbox_id)
            labelled = find_chat_label(sandbox.labels)
            if labelled == self._chat:
                runtime = await self._connect(sandbox, directories)
                if runtime:
                    return sandbox, runtime
        except SandboxGone as exc:
            logger.info("chat %s: removing sandbox %s: %s", self._chat, sandbox_id, exc)
        else:
            if labelled != self._chat and (labelled or not is_noted):
                return None
        await context.backend.destroy(sandbox_id)
        return None

    async def _connect(self, sandbox: Sandbox, directories: ChatDirectories) -> Runtime | None:
        """Connect to a sandbox, once more if it goes on and only the connection was cut."""
        try:
            return await self._files.connect(self._chat, sandbox, directories)
        except SandboxGone:
            if await self._find_end(sandbox) is not None:
                raise
        return await self._files.connect(self._chat, sandbox, directories)

    async def renew(self, held: OpenSandbox) -> bool:
        """End an open sandbox made otherwise than wanted now; return False if it stays."""
        record = await self._context.records.get(self._chat)
        shown = await self._context.projects.show(self._chat, read_object(record, PROJECT))
        wanted = await self._wanted(shown, record)
        held.project = wanted.project
        return await self._replace(held.sandbox, held.runtime, wanted)

    async def _wanted(self, shown: ProjectView, record: ChatRecord | None) -> DesiredSandbox:
        assistant = read_assistant_spec(record)
        origin = await self._context.backend.origin(assistant.image)
        directories = await self._context.workspaces.open(self._chat)
        labels = {"user": self._chat.user, "chat": self._chat.chat}
        if not self._context.backend.keeps_paused_files:
            # Else it may go on at another machine, by another clock, and anew after each pause.
            labels[STARTED] = f"{self._context.use_times.clock().steady_s:.0f}"
        spec = self._context.settings.spec(directories, labels, origin, shown.mounts, assistant)
        return DesiredSandbox(spec, directories, shown)

    async def _replace(self, sandbox: Sandbox, runtime: Runtime, wanted: DesiredSandbox) -> bool:
        is_same = sandbox.labels.get(SPEC) == wanted.spec.labels[SPEC]
        if is_same and wanted.has_project_of(runtime):
            return False
        background = runtime.background
        try:
            await self._files.save_before_end(self._chat, runtime)
        except Unsaved as exc:
            logger.warning("sandbox %s stays as it was made: %s", sandbox.id, exc)
            return False
        try:
            background = (await runtime.status()).background
            refusal = await runtime.retire(background_too=True)
        except SandboxGone:
            refusal = ""
        # One that shows another folder under the same settings was tricked, and never stays.
        if refusal and not is_same:
            # All servers share one sandbox, even where their settings differ.
            logger.warning(
                "chat %s: sandbox %s was made with other settings, and stays while it is used",
                self._chat,
                sandbox.id,
            )
            return False
        await runtime.aclose()
        await self._context.backend.destroy(sandbox.id)
        await self.last.note_end(runtime, "its settings or its image changed", background)
        return True

    async def _make(self, wanted: DesiredSandbox) -> Connected:
        context = self._context
        sandbox = await context.backend.create(wanted.spec)
        try:
            runtime = await self._files.connect_new(self._chat, sandbox, wanted.directories)
        except SandboxGone as exc:
            try:
                ending = await sandbox.ending(within_s=_DYING_S)
            finally:
                await context.backend.destroy(sandbox.id)
            why = describe_death(ending, wanted.spec.limits) if ending else str(exc)
            raise SandboxGone(f"the sandbox ended as soon as it was started: {why}") from exc
        except BaseException:
            await context.backend.destroy(sandbox.id)
            raise
        if wanted.has_project_of(runtime):
            return sandbox, runtime
        await runtime.aclose()
        await context.backend.destroy(sandbox.id)
        raise SandboxGone(
            "the user's folder was replaced while the sandbox was made, which was then removed "
            "before anything ran in it: call again"
        )

    async def keep(self, held: OpenSandbox) -> None:
        """Save, before it ends, what a sandbox alone holds. Raises Unsaved; then it is paused."""
        was_paused = held.paused
        if self._files.is_saved(self._chat):
            return
        try:
            if was_paused:
                await self.resume(held)
            if not (was_paused and held.runtime.broken):
                await self._files.save_before_end(self._chat, held.runtime)
        except Unsaved as exc:
            with suppress(SandboxError):
                await self.pause(held, is_used=False)
            if not was_paused:
                self._context.notices.add(self._chat, f"{str(exc)[0].upper()}{str(exc)[1:]}.")
            raise

    async def pause(self, held: OpenSandbox, *, is_used: bool) -> bool:
        """Pause it; False: it was saved and ended. Raises Busy if it is used, and Unsupported."""
        status = await held.runtime.status()
        if is_used or status.calls or status.connections > 1:
            raise Busy(
                f"the sandbox of chat {self._chat} is in use: pause it when its call has ended and "
                "no other server has it open (`mcp-sandbox status`), or end it with "
                "`mcp-sandbox stop`"
            )
        held.close_doors()
        try:
            held.paused = await held.sandbox.pause()
            if not held.paused and self._files.lost_with_sandbox:
                await self._files.save_before_end(self._chat, held.runtime)
                await self._context.backend.destroy(held.sandbox.id)
                await held.runtime.aclose()
                await self.last.note_end(held.runtime, _PAUSED, status.background)
                return False
        finally:
            if not (held.paused or held.runtime.broken):
                self._context.start_doors(self._chat, held)
        if not held.paused:
            backend = self._context.backend.name
            raise Unsupported(
                f"a sandbox of {backend} cannot be paused: end it with `mcp-sandbox stop`"
            )
        if self._files.lost_with_sandbox:
            # It is somewhere else, from where no connection outlives a pause for sure.
            await held.runtime.aclose()
            await self.last.note_end(held.runtime, _PAUSED)
        return True

    async def resume(self, held: OpenSandbox) -> None:
        """Resume it; if it has ended meanwhile, or has older files, it is `dead` afterwards."""
        context = self._context
        try:
            held.sandbox = await context.backend.attach(held.sandbox.id)
            if held.runtime.broken:
                directories = await context.workspaces.open(self._chat)
                if runtime := await self._files.connect(self._chat, held.sandbox, directories):
                    held.runtime = runtime
                    held.notice = await self.last.compare(runtime)
                    self.last.follow(held)
            context.start_doors(self._chat, held)
        except SandboxGone:
            await held.runtime.aclose()
        held.paused = False

    async def retire(self, held: OpenSandbox, *, background_too: bool) -> Refusal:
        """End it and disconnect, unless it is in use; if other servers use it, only disconnect.

        Return why it goes on, "" if it does not: except for "users" it is still connected then.
        """
        refusal: Refusal = ""
        is_old = self._context.age_s(held) >= self._context.settings.sessions.lifetime
        ran, cause = held.runtime.background, AGED if is_old else "no call used it"
        if not self._context.backend.keeps_paused_files:
            await self.keep(held)
        try:
            with anyio.fail_after(_ANSWER_S):
                if held.paused:
                    await self.resume(held)
                refusal = await held.runtime.retire(background_too=background_too, leaving=True)
        except (SandboxGone, TimeoutError) as exc:
            if await self._find_end(held.sandbox) is None:
                raise Unreachable("the connection to the sandbox was cut off: try again") from exc
            cause = "it did not answer"
            logger.info("sandbox %s does not answer, and is removed", held.sandbox.id)
        if refusal == "users":
            await held.runtime.aclose()
            self.log_event("sandbox left to others", held)
        elif not refusal:
            await self.put_away(held)
            await self.last.note_end(held.runtime, cause if ran.total else "", ran)
        return refusal

    async def put_away(self, held: OpenSandbox) -> None:
        """End a sandbox whose files are safe; or pause it, where it keeps these so."""
        if not self._context.backend.keeps_paused_files:
            await self.destroy(held)
            return
        await held.runtime.aclose()
        try:
            await held.sandbox.pause()
        except SandboxGone:
            # What keeps its files was deleted.
            await self.destroy(held)
        else:
            self.log_event("sandbox paused", held)

    async def discard_dead(self, held: OpenSandbox) -> str | None:
        """Remove a sandbox whose connection was lost, as `_find_end` returns what is with it."""
        died_of = await self._find_end(held.sandbox, silent=held.runtime.silent)
        await held.runtime.aclose()
        if died_of is None:
            return None
        if self._files.lost_with_sandbox:
            if not died_of and self._context.backend.keeps_paused_files:
                # Such as after a fork bomb: nothing inside would ever answer again.
                with suppress(SandboxError):
                    await held.sandbox.pause()
            # The next call attaches to it, which starts its runner again on its files, if it ended.
            return died_of
        await self.destroy(held)
        return died_of

    async def settle(self, held: OpenSandbox) -> bool:
        """Discard it if it is dead, and have the agent told why; return whether it goes on."""
        if (cause := await self.discard_dead(held)) is not None:
            await self.last.note_end(held.runtime, cause or "it did not answer")
        return cause is None

    async def explain_loss(self, held: OpenSandbox, exc: SandboxGone) -> SandboxError:
        """Discard it if it is dead; return what to tell a call that lost its connection."""
        try:
            cause = await self.discard_dead(held)
        except Unreachable as away:
            return Unreachable(f"this call may have been done: look first. {away}")
        if cause is None:
            return CutOff(
                "the connection to the sandbox was cut off, and what this call had begun may have "
                "ended; the sandbox goes on, and the next call connects to it again"
            )
        # This call tells it.
        await self._context.records.note_last_seen(self._chat, {})
        what = f"the sandbox ended: {cause}" if cause else str(exc).partition(";")[0]
        kept = "and the next call says whether files are"
        if await self._context.keeps_files(held):
            kept = "files are kept. The next call gets a new sandbox on them"
        ran = name_background(held.runtime.background)
        return SandboxGone(f"{what}; what was under way is lost, {kept}.{describe_lost(ran)}")

    async def _find_end(self, sandbox: Sandbox, *, silent: bool = False) -> str | None:
        """Return why a sandbox died, "" if it only does not answer; None: it goes on."""
        if ending := await sandbox.ending(within_s=0.0 if silent else _DYING_S):
            assistant = read_assistant_spec(await self._context.records.look(self._chat))
            limits = replace(self._context.settings.limits, **assistant.limits)
            return describe_death(ending, limits)
        try:
            channel = Channel(await sandbox.open_channel(), sandbox.token)
            with anyio.fail_after(_ALIVE_S):
                await channel.prove()
            await channel.aclose()
        except TimeoutError:
            return ""
        except SandboxGone:
            # This connection may have been cut, too.
            return "" if silent else await self._find_end(sandbox, silent=True)
        return None

    async def destroy(self, held: OpenSandbox) -> None:
        """End it, even if it is in use; log what cannot be removed."""
        with anyio.move_on_after(_DESTROY_S, shield=True) as limit:
            await held.runtime.aclose()
            if self._context.leases:
                await self._context.leases.end(self._chat)
            try:
                await self._context.backend.destroy(held.sandbox.id)
                self._files.note_gone(self._chat)
            except OperatorError as exc:
                # The caller asked for something else, and the runner ends by itself, too.
                logger.warning("sandbox %s could not be removed: %s", held.sandbox.id, exc)
        if limit.cancelled_caught:
            logger.error("sandbox %s could not be removed in time", held.sandbox.id)
        else:
            self.log_event("sandbox removed", held)

    def log_event(self, what: str, held: OpenSandbox) -> None:
        backend = self._context.backend.name
        event(logger, what, chat=str(self._chat), backend=backend, sandbox=held.sandbox.id)
