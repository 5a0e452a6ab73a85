"""Lifecycles of sessions, by HTTP: one entrance that gets or creates the computer of a chat.

A session is a chat with a record; its id is the same in every server. Whatever is done may be asked
for again. What only this API knows of a session is in the record under "control":

    project      the `projectId`
    new          whether its sandbox is new although it had files
    first        whether nothing was known of the chat before it was prepared
    terminated   whether it was, since it was prepared last
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, FailFast, Field
from starlette.exceptions import HTTPException
from starlette.types import Scope

from mcp_sandbox import __version__
from mcp_sandbox.agents.executors.direct import Direct
from mcp_sandbox.agents.run import Agent
from mcp_sandbox.control import work
from mcp_sandbox.control.work import Answer, Json, RequestModel, StreamedAnswer, Write, encode_line
from mcp_sandbox.errors import Busy, InvalidArgument, NotFound, SandboxError, Unsupported
from mcp_sandbox.models import ChatId, SessionStatus, Statistics
from mcp_sandbox.server.identity import CALLER
from mcp_sandbox.sessions.chat_records import BACKUP, CONTROL, AssistantSpec, read_object
from mcp_sandbox.sessions.manager import SessionManager, name_session
from mcp_sandbox.sessions.session import Session

if TYPE_CHECKING:
    from mcp_sandbox.storage.redis import SandboxBoard

logger = logging.getLogger(__name__)

# How many events a client may be behind before it is cut off.
_MOST_BEHIND = 256
_PUBLISHED = ("providerSandboxId", "provider", "containerUrl", "isNewProvision")


class Prepare(RequestModel):
    """Which chat, for which expert (an assistant of the configuration) and project."""

    chat_session_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    expert_identifier: str | None = Field(None, min_length=1, max_length=64)
    project_id: str | None = Field(None, max_length=256)


@dataclass(frozen=True)
class SandboxSession:
    """A session as a platform sees it. "warm": nothing is made for it, or not yet.

    `session_id` is another name of `id`. `files_as_of`: when the backup was made that its files
    were saved to last, or came from.
    """

    id: str
    session_id: str
    chat_session_id: str
    status: str
    provider: str
    provider_sandbox_id: str | None
    container_url: str | None
    is_new_provision: bool
    project_id: str | None
    error: str | None
    last_used_at: datetime
    files_as_of: datetime | None


@dataclass(frozen=True)
class Paused:
    """`keeps_processes` is False where the sandbox, or all that ran in it, has ended."""

    status: str
    keeps_processes: bool


@dataclass(frozen=True)
class Terminated:
    """What is true once a sandbox has ended.

    `saved`: its files are in the object store as they are; None where there is no store.
    """

    status: str
    saved: bool | None


@dataclass(frozen=True)
class Health:
    """`healthy` is None where no sandbox runs that could answer."""

    status: str
    healthy: bool | None


class Restore(RequestModel):
    """Which backup; by default the newest that is sound."""

    key: str | None = None


class Invoke(RequestModel):
    """What an assistant is asked, by default that of the session, and in whose sandbox.

    "local": in the sandbox of the chat `sandbox_session_id` on this server; "none": without one.
    """

    model_config = ConfigDict(alias_generator=None)

    messages: Annotated[list[dict[str, Any]], FailFast()]
    assistant: str = Field("", max_length=64)
    sandbox_mode: Literal["cloud", "local", "none"] = "cloud"
    sandbox_session_id: str = ""
    sandbox_provider: str | None = None
    provider_sandbox_id: str | None = None
    sandbox_url: str | None = None


@dataclass(frozen=True)
class Saved:
    """The backup in which a session's files are, or from which they came."""

    key: str
    saved_at: datetime


# Says what the sandbox of an expert's chat is made from; raises NotPermitted, InvalidArgument.
AccessCheck = Callable[[ChatId, Prepare], Awaitable[AssistantSpec | None]]
OpenAgent = Callable[..., AbstractAsyncContextManager[Agent]]


class Control:
    """What the routes share: sessions and their states, and who is told of changes."""

    def __init__(
        self,
        manager: Callable[[], Awaitable[SessionManager]],
        tasks: TaskGroup,
        check_access: AccessCheck,
        open_agent: OpenAgent,
        bridge: "SandboxBoard | None" = None,
    ) -> None:
        """`tasks` make the sandboxes, beside the answers; `bridge` is told which are there."""
        self.manager, self.check_access, self.open_agent = manager, check_access, open_agent
        self._tasks, self._bridge = tasks, bridge
        self._chats: dict[tuple[str, str], ChatId] = {}
        self._turns: WeakValueDictionary[ChatId, anyio.Lock] = WeakValueDictionary()
        self._making: dict[ChatId, anyio.Event] = {}
        self._failures: dict[ChatId, str] = {}
        self._listeners: dict[MemoryObjectSendStream[bytes], str] = {}

    async def session(self, scope: Scope, session_id: str) -> Session:
        """Return the session of an id for work in it. Raises NotFound."""
        row = await self.find_live(scope[CALLER].user, session_id)
        return await (await self.manager()).session(row.chat, judged=True)

    async def find_live(self, user: str, session_id: str) -> SessionStatus:
        """Return a session as `find` does, unless it is terminated."""
        row = await self.find(user, session_id)
        if (await self.describe(row)).status == "terminated":
            raise NotFound(f"session {session_id} was terminated: have it prepared again")
        return row

    async def find(self, user: str, session_id: str) -> SessionStatus:
        """Return a user's session by its id. Raises NotFound."""
        chat = await self.find_chat(user, session_id)
        found = await (await self.manager()).status(chat) if chat else None
        if found is None:
            raise NotFound(f"there is no session {session_id[:40]!r}: prepare its chat first")
        return found

    async def find_chat(self, user: str, session_id: str) -> ChatId | None:
        """Return the chat of a user's session; None if there is no such."""
        if (user, session_id) not in self._chats:
            for row in await (await self.manager()).list(user):
                self.remember(row.chat)
        return self._chats.get((user, session_id))

    def remember(self, chat: ChatId) -> ChatId:
        """Know a chat by the id of its session from now on, though its record may be lost."""
        name = name_session(chat)
        # Earlier versions told 12 digits, which others can meet by trying names of chats of theirs.
        self._chats[chat.user, name] = self._chats[chat.user, name[:12]] = chat
        return chat

    def take_turn(self, chat: ChatId) -> anyio.Lock:
        """Return the lock of a chat: one request after the other makes or ends its sandbox."""
        return self._turns.setdefault(chat, anyio.Lock())

    async def read_note(self, chat: ChatId) -> Mapping[str, Any]:
        """Return what this API knows of a session."""
        return read_object(await (await self.manager()).use_times.records.look(chat), CONTROL)

    async def write_note(self, chat: ChatId, note: Mapping[str, Any]) -> None:
        times = (await self.manager()).use_times
        await times.records.keep(chat, CONTROL, lambda _: dict(note), times.clock().wall_s)

    async def make(self, chat: ChatId, spec: AssistantSpec | None, project: str | None) -> None:
        """Begin to make the sandbox of a chat, unless that is under way. Needs the turn."""
        self.remember(chat)
        if chat in self._making:
            return
        manager = await self.manager()
        before, record = await manager.status(chat), await manager.use_times.records.look(chat)
        manager.use_times.note_use(chat)
        note, has_lived = read_object(record, CONTROL), bool(record and record.backend)
        is_gone = before is None or before.sandbox_id is None
        is_first = before is None or note.get("first", False)
        wanted = {"project": project, "new": has_lived and is_gone, "first": is_first}
        if spec:
            await manager.session(chat, spec)
        # The record is locked while another call or server makes its sandbox or ends it.
        if note != wanted:
            await self.write_note(chat, wanted)
        if has_lived and is_gone:
            # What is said of the sandbox before must not be believed.
            await self._publish(name_session(chat), {})
        self._making[chat] = anyio.Event()
        self._failures.pop(chat, None)
        self._tasks.start_soon(self._open, chat, has_lived)

    async def _open(self, chat: ChatId, had_files: bool) -> None:
        try:
            manager = await self.manager()
            if manager.backend != "noop":
                await manager.open(chat)
                record = await manager.use_times.records.look(chat)
                if not had_files and "saved" in read_object(record, BACKUP):
                    # They came from a backup of another machine.
                    await self.write_note(chat, {**read_object(record, CONTROL), "new": True})
        except SandboxError as exc:
            # The next prepare tries again; the state says why there is none.
            logger.warning("chat %s: its sandbox cannot be made: %s", chat, exc)
            self._failures[chat] = str(exc)
        finally:
            self._making.pop(chat).set()
        try:
            await self.announce(chat)
        except SandboxError as exc:
            logger.warning("chat %s: what became of it cannot be told: %s", chat, exc)

    async def wait_made(self, row: SessionStatus) -> SessionStatus:
        """Return what a session is once its sandbox that is being made is there, or cannot be."""
        if making := self._making.get(row.chat):
            await making.wait()
        return await (await self.manager()).status(row.chat) or row

    async def announce(self, chat: ChatId) -> SandboxSession | None:
        """Tell all that listen what a session is now, and return it."""
        if (status := await (await self.manager()).status(chat)) is None:
            return None
        described = await self.describe(status)
        answer = Answer[SandboxSession](data=described).model_dump(mode="json")
        await self._publish(status.id, answer["data"])
        event = b"event: session\ndata: " + encode_line(**answer) + b"\n"
        for listener, user in list(self._listeners.items()):
            if user == chat.user:
                try:
                    listener.send_nowait(event)
                except (anyio.WouldBlock, anyio.BrokenResourceError):
                    # It reads too slowly: it comes again, and asks for the states.
                    listener.close()
                    del self._listeners[listener]
        return described

    async def _publish(self, session_id: str, session: Mapping[str, Any]) -> None:
        if not self._bridge:
            return
        try:
            if session.get("providerSandboxId"):
                await self._bridge.put(session_id, {name: session[name] for name in _PUBLISHED})
            else:
                await self._bridge.remove(session_id)
        except SandboxError as exc:
            logger.warning("session %s: what it is now cannot be published: %s", session_id, exc)

    async def listen(self, user: str, write: Write) -> None:
        """Give the events of a user's sessions to `write`, until it is cancelled."""
        send, receive = anyio.create_memory_object_stream[bytes](_MOST_BEHIND)
        self._listeners[send] = user
        try:
            with send, receive:
                await write(b": these are the changes from now on\n\n")
                async for event in receive:
                    await write(event)
        finally:
            self._listeners.pop(send, None)

    async def describe(self, row: SessionStatus) -> SandboxSession:
        """Return a session as a platform sees it."""
        note = await self.read_note(row.chat)
        state = "warm" if row.state == "starting" else row.state
        if note.get("terminated") and row.sandbox_id is None:
            state = "terminated"
        return SandboxSession(
            id=row.id,
            session_id=row.id,
            chat_session_id=row.chat.chat,
            status=state,
            provider=row.backend,
            provider_sandbox_id=row.sandbox_id,
            container_url=row.preview or None,
            is_new_provision=bool(note.get("new")),
            project_id=note.get("project"),
            error=self._failures.get(row.chat),
            last_used_at=row.last_used_at,
            files_as_of=row.saved_at,
        )

    async def describe_change(self, row: SessionStatus) -> SandboxSession:
        """Return what a session has become, and tell all that listen."""
        return await self.announce(row.chat) or await self.describe(row)


async def _find_control(request: Request) -> Control:
    control: Control = request.app.state.control
    return control


ControlState = Annotated[Control, Depends(_find_control)]


async def _find_user(request: Request) -> str:
    user: str = request.scope[CALLER].user
    return user


User = Annotated[str, Depends(_find_user)]


async def _find_session(control: ControlState, user: User, id: str) -> SessionStatus:  # noqa: A002 - in the path
    return await control.find(user, id)


async def _find_live_session(control: ControlState, user: User, id: str) -> SessionStatus:  # noqa: A002 - in the path
    return await control.find_live(user, id)


KnownSession = Annotated[SessionStatus, Depends(_find_session)]
LiveSession = Annotated[SessionStatus, Depends(_find_live_session)]
lifecycle = APIRouter(prefix="/api", tags=["lifecycle"], default_response_class=Json)


@lifecycle.post("/marketplace/expert/prepare-invoke")
@lifecycle.post("/sandbox/prepare")
async def prepare(
    control: ControlState, user: User, body: Prepare
) -> Answer[dict[str, SandboxSession]]:
    """Get or create the sandbox of a chat; the answer tells what is true now.

    The sandbox is made beside: `providerSandboxId` is null until it is there.
    """
    chat = ChatId(user, body.chat_session_id)
    spec = await control.check_access(chat, body)
    async with control.take_turn(chat):
        await control.make(chat, spec, body.project_id)
    row = await control.find(user, name_session(chat))
    return Answer(data={"sandboxSession": await control.describe(row)})


@lifecycle.post("/agent/invoke", response_class=StreamedAnswer, status_code=200)
async def invoke(control: ControlState, user: User, body: Invoke) -> StreamedAnswer:
    """Have an assistant work in a session.

    Each line of the answer is `{"event": …}`, of which the last is a Completion, or `{"error": …}`.
    If the client hangs up, the run ends.
    """
    return await _run_agent(control, user, body, resume=False)


@lifecycle.post("/agent/resume", response_class=StreamedAnswer, status_code=200)
async def go_on(control: ControlState, user: User, body: Invoke) -> StreamedAnswer:
    """Have an assistant go on with its last conversation in a session; as `invoke`."""
    return await _run_agent(control, user, body, resume=True)


async def _run_agent(control: Control, user: str, body: Invoke, *, resume: bool) -> StreamedAnswer:
    chat = ChatId(user, body.sandbox_session_id or "local")
    assistant, project = body.assistant, None
    if body.sandbox_mode == "cloud":
        row = await control.find_live(user, body.sandbox_session_id)
        if body.sandbox_provider not in (None, row.backend):
            raise InvalidArgument(f"session {row.id} has the provider {row.backend}")
        chat, assistant = row.chat, assistant or row.assistant
        project = (await control.read_note(chat)).get("project")
    access = {"chatSessionId": chat.chat, "projectId": project}
    access |= {"expertIdentifier": assistant} if assistant else {}
    await control.check_access(chat, Prepare.model_validate(access))
    command = Direct.name if body.sandbox_mode == "none" else ""

    async def produce(write: Write) -> None:
        async with (
            control.open_agent(
                chat=chat.chat, user=chat.user, assistant=assistant, command=command
            ) as agent,
            aclosing(agent.stream(body.messages, resume=resume)) as events,
        ):
            async for event in events:
                await write(encode_line(event={**asdict(event), "type": type(event).__name__}))

    return StreamedAnswer(produce, work.LINES)


@lifecycle.get("/sandbox/by-chat/{chat}")
async def by_chat(control: ControlState, user: User, chat: str) -> Answer[SandboxSession]:
    """Return the session of a chat."""
    row = await control.find(user, name_session(ChatId(user, chat)))
    return Answer(data=await control.describe(row))


@lifecycle.get("/sandbox/{id}/status")
async def status(control: ControlState, row: KnownSession) -> Answer[SandboxSession]:
    """Return what a session is now."""
    return Answer(data=await control.describe(row))


@lifecycle.get("/sandbox/{id}/health")
async def health(control: ControlState, row: KnownSession) -> Answer[Health]:
    """Return whether a running sandbox answers."""
    described, manager = await control.describe(row), await control.manager()
    runs = row.state == "running"
    return Answer(data=Health(described.status, await manager.answers(row.chat) if runs else None))


@lifecycle.post("/sandbox/{id}/pause")
async def pause(control: ControlState, row: LiveSession) -> Answer[Paused]:
    """Stop all that runs in a sandbox until it is resumed, or used."""
    manager, row = await control.manager(), await control.wait_made(row)
    is_idle = not row.busy
    try:
        if is_idle:
            await manager.pause(row.chat)
    except Unsupported:
        is_idle = await manager.stop(row.chat, if_idle=True)
    if not is_idle:
        raise Busy(f"a call is under way in session {row.id}: pause it when that has ended")
    paused = await control.describe_change(row)
    keeps = manager.keeps_paused_processes and paused.provider_sandbox_id is not None
    return Answer(data=Paused(paused.status, keeps))


@lifecycle.post("/sandbox/{id}/resume")
async def resume(control: ControlState, row: LiveSession) -> Answer[SandboxSession]:
    """Let a paused sandbox go on; make one where there is none."""
    async with control.take_turn(row.chat):
        is_there = await (await control.manager()).resume(row.chat) or row.sandbox_id is not None
        if not is_there:
            note = await control.read_note(row.chat)
            await control.make(row.chat, None, note.get("project"))
    return Answer(data=await control.describe_change(row))


@lifecycle.post("/sandbox/{id}/terminate")
async def terminate(
    control: ControlState,
    row: KnownSession,
    force: Annotated[bool, Query(description="also one whose files cannot be saved")] = False,
) -> Answer[Terminated]:
    """End a sandbox; files stay until retention removes them.

    One that alone holds files which cannot be saved is paused, and the answer is 503.
    """
    manager = await control.manager()
    async with control.take_turn(row.chat):
        await control.wait_made(row)
        note = await control.read_note(row.chat)
        # Before its end, after which another server may have the chat. It counts from then on.
        if not note.get("terminated"):
            await control.write_note(row.chat, {**note, "terminated": True})
        await manager.stop(row.chat, force=force)
    ended, found = await control.describe_change(row), await manager.status(row.chat)
    saved = not found.unsaved if found and manager.saving else None
    return Answer(data=Terminated(ended.status, saved))


@lifecycle.post("/sandbox/{id}/sync")
async def sync(control: ControlState, row: LiveSession) -> Answer[Saved | None]:
    """Save the files of a session now; null if it has none on this server."""
    saved = await (await control.manager()).backups.save(row.chat)
    return Answer(data=Saved(saved.key, saved.saved_at) if saved else None)


@lifecycle.post("/sandbox/{id}/restore")
async def restore(control: ControlState, row: LiveSession, body: Restore) -> Answer[Saved]:
    """Open a new sandbox on the files of a backup; those that are there go to the trash."""
    if row.busy:
        raise Busy(f"{row.busy} calls are under way in session {row.id}: restore it after them")
    found = await (await control.manager()).backups.restore(row.chat, body.key)
    return Answer(data=Saved(found.key, found.saved_at))


@lifecycle.get("/sandbox")
async def sessions(
    control: ControlState,
    user: User,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> Answer[list[SandboxSession]]:
    """List the user's sessions, the last used first."""
    rows = await (await control.manager()).list(user)
    page = rows[offset : offset + limit]
    return Answer(data=[await control.describe(row) for row in page])


@lifecycle.get("/stats")
async def stats(control: ControlState) -> Answer[Statistics]:
    """Return what this server holds now."""
    return Answer(data=(await control.manager()).statistics())


@lifecycle.get("/events", response_class=StreamedAnswer, status_code=200)
async def events(control: ControlState, user: User) -> StreamedAnswer:
    """Stream each change of the user's sessions, as server-sent events."""
    return StreamedAnswer(partial(control.listen, user), work.EVENTS)


def make_app(control: Control) -> FastAPI:
    """Return the API over `control`; the guard in front of it says whose each request is."""
    app = FastAPI(
        title="mcp-sandbox",
        version=__version__,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        default_response_class=Json,
        redirect_slashes=False,
    )
    app.include_router(lifecycle)
    app.include_router(work.work)
    app.state.control = control
    for kind in (SandboxError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, work.answer_problem)
    return app
