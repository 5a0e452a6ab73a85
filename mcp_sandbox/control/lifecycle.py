"""Lifecycles of sessions, by HTTP: one entrance that gets or creates the computer of a chat.

A session is a chat with a record; its id is the same in every server. What only this API knows of
it is in that record under "control": whether it was terminated, its project, and whether its
sandbox is new although it had files. Whatever it does may be asked for again.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any, cast

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.types import Scope

from mcp_sandbox import __version__
from mcp_sandbox.control.work import Answer, Given, Json, Put, Streamed, problem, work
from mcp_sandbox.errors import Busy, NotFound, SandboxError, Unsupported
from mcp_sandbox.models import ChatId, SessionStatus
from mcp_sandbox.server.identity import CALLER
from mcp_sandbox.sessions.chat_records import AssistantSpec
from mcp_sandbox.sessions.manager import SessionManager, name_session
from mcp_sandbox.sessions.session import Session

logger = logging.getLogger(__name__)

_NAME = "control"
# How many events a client may be behind before it is cut off.
_BEHIND = 256


class Prepare(Given):
    """Which chat, for which expert (an assistant of the configuration) and project."""

    chat_session_id: str
    expert_identifier: str | None = None
    project_id: str | None = None


@dataclass(frozen=True)
class SandboxSession:
    """A session as a platform sees it. "warm": nothing is made for it, or not yet."""

    id: str
    chat_session_id: str
    status: str
    provider: str
    provider_sandbox_id: str | None
    container_url: str | None
    is_new_provision: bool
    project_id: str | None
    error: str | None
    last_used_at: datetime


@dataclass(frozen=True)
class Paused:
    """`keeps_processes` is False where the provider cannot pause: the sandbox has ended then."""

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


# Says what the sandbox of an expert's chat is made from; raises NotPermitted, InvalidArgument.
AccessCheck = Callable[[ChatId, Prepare], Awaitable[AssistantSpec | None]]
Publish = Callable[[str, Mapping[str, Any]], Awaitable[None]]


class Control:
    """What the API does, over the manager of all chats."""

    def __init__(
        self,
        manager: Callable[[], Awaitable[SessionManager]],
        tasks: TaskGroup,
        check_access: AccessCheck,
        publish: Publish | None = None,
    ) -> None:
        """`publish` gets the id and state of each sandbox that was made."""
        self.manager = manager
        self._tasks = tasks
        self._check_access = check_access
        self._publish = publish
        self._chats: dict[str, ChatId] = {}
        self._writing = anyio.Lock()
        self._making: dict[ChatId, anyio.Event] = {}
        self._failed: dict[ChatId, str] = {}
        self._listeners: dict[MemoryObjectSendStream[bytes], str] = {}

    async def session(self, scope: Scope, session_id: str) -> Session:
        """Return the session of an id for work in it. Raises NotFound."""
        status = await self.find(scope, session_id)
        kept = await self._kept(status.chat)
        if kept.get("terminated"):
            raise NotFound(f"session {session_id} was terminated: have it prepared again")
        return await (await self.manager()).session(status.chat, judged=True)

    async def find(self, scope: Scope, session_id: str) -> SessionStatus:
        """Return the session of that id among the caller's. Raises NotFound."""
        user, manager = scope[CALLER].user, await self.manager()
        if session_id not in self._chats:
            self._chats |= {row.id: row.chat for row in await manager.list(user)}
        chat = self._chats.get(session_id)
        found = await manager.status(chat) if chat and chat.user == user else None
        if found is None:
            raise NotFound(f"there is no session {session_id[:40]!r}: prepare its chat first")
        return found

    async def prepare(self, user: str, given: Prepare) -> SandboxSession:
        """Get or create the session of a chat; its sandbox is made beside."""
        chat = ChatId(user, given.chat_session_id)
        spec = await self._check_access(chat, given)
        manager = await self.manager()
        async with self._writing:
            before = await manager.status(chat)
            await manager.session(chat, spec)
            if chat not in self._making:
                is_new = before is not None and before.sandbox_id is None
                await self._keep(chat, {"project": given.project_id, "new": is_new})
                self._make(chat)
        self._chats[name_session(chat)] = chat
        status = await manager.status(chat)
        assert status  # noqa: S101 - it was just written
        return await self.describe(status)

    def _make(self, chat: ChatId) -> None:
        if chat not in self._making:
            self._making[chat] = anyio.Event()
            self._failed.pop(chat, None)
            self._tasks.start_soon(self._open, chat)

    async def _open(self, chat: ChatId) -> None:
        try:
            manager = await self.manager()
            if manager.backend != "noop":
                await manager.open(chat)
        except SandboxError as exc:
            # The next prepare tries again; the state says why there is none.
            logger.warning("chat %s: its sandbox cannot be made: %s", chat, exc)
            self._failed[chat] = str(exc)
        finally:
            self._making.pop(chat).set()
        await self.announce(chat, made=chat not in self._failed)

    async def announce(self, chat: ChatId, *, made: bool = False) -> None:
        """Tell all that listen what a session is now."""
        manager = await self.manager()
        if (status := await manager.status(chat)) is None:
            return
        described = await self.describe(status)
        if made and self._publish:
            names = ("providerSandboxId", "provider", "containerUrl", "isNewProvision")
            whole = Answer[SandboxSession](data=described).model_dump(mode="json")["data"]
            try:
                await self._publish(status.id, {name: whole[name] for name in names})
            except SandboxError as exc:
                logger.warning("chat %s: it cannot be told that it is ready: %s", chat, exc)
        text = Json(Answer[SandboxSession](data=described).model_dump(mode="json")).body
        event = b"event: session\ndata: " + bytes(text) + b"\n\n"
        for listener, user in list(self._listeners.items()):
            if user == chat.user:
                try:
                    listener.send_nowait(event)
                except (anyio.WouldBlock, anyio.BrokenResourceError):
                    # It reads too slowly: it comes again, and asks for the states.
                    listener.close()

    async def listen(self, user: str, put: Put) -> None:
        """Give the events of a user's sessions to `put`, until it is cancelled."""
        send, receive = anyio.create_memory_object_stream[bytes](_BEHIND)
        self._listeners[send] = user
        try:
            with send, receive:
                await put(b": these are the changes from now on\n\n")
                async for event in receive:
                    await put(event)
        finally:
            del self._listeners[send]

    async def describe(self, row: SessionStatus) -> SandboxSession:
        """Return a session as it is told."""
        kept = await self._kept(row.chat)
        state = "warm" if row.state == "starting" else row.state
        if kept.get("terminated") and row.sandbox_id is None:
            state = "terminated"
        return SandboxSession(
            id=row.id,
            chat_session_id=row.chat.chat,
            status=state,
            provider=row.backend,
            provider_sandbox_id=row.sandbox_id,
            container_url=row.preview or None,
            is_new_provision=bool(kept.get("new")),
            project_id=kept.get("project"),
            error=self._failed.get(row.chat),
            last_used_at=row.last_used_at,
        )

    async def pause(self, row: SessionStatus) -> Paused:
        """Pause the sandbox of a session; where that cannot be done, end it. Raises Busy."""
        manager, keeps = await self.manager(), True
        row = await self._settled(row)
        if row.busy:
            raise Busy(f"{row.busy} calls are under way in session {row.id}: pause it after them")
        try:
            await manager.pause(row.chat)
        except Unsupported:
            keeps = not await manager.stop(row.chat)
        return Paused((await self._changed(row)).status, keeps)

    async def resume(self, row: SessionStatus) -> SandboxSession:
        """Let a paused sandbox go on; make one where there is none."""
        manager = await self.manager()
        if not await manager.resume(row.chat) and row.sandbox_id is None:
            kept = await self._kept(row.chat)
            await self._keep(row.chat, {"project": kept.get("project"), "new": True})
            self._make(row.chat)
        return await self._changed(row)

    async def terminate(self, row: SessionStatus) -> Terminated:
        """End the sandbox of a session; its files stay until they are old."""
        await self._settled(row)
        manager, kept = await self.manager(), await self._kept(row.chat)
        await self._keep(row.chat, {**kept, "terminated": True})
        await manager.stop(row.chat)
        described, found = await self._changed(row), await manager.status(row.chat)
        saved = not found.unsaved if found and manager.saving else None
        return Terminated(described.status, saved)

    async def health(self, row: SessionStatus) -> Health:
        """Ask the runner of a running sandbox."""
        described, manager = await self.describe(row), await self.manager()
        runs = row.state == "running"
        return Health(described.status, await manager.answers(row.chat) if runs else None)

    async def _settled(self, row: SessionStatus) -> SessionStatus:
        """Return what a session is once its sandbox that is being made is there, or cannot be."""
        if making := self._making.get(row.chat):
            await making.wait()
        return await (await self.manager()).status(row.chat) or row

    async def _changed(self, row: SessionStatus) -> SandboxSession:
        await self.announce(row.chat)
        found = await (await self.manager()).status(row.chat)
        return await self.describe(found or row)

    async def _kept(self, chat: ChatId) -> dict[str, Any]:
        records = (await self.manager()).use_times.records
        kept = await records.kept(chat, _NAME)
        return dict(kept) if isinstance(kept, dict) else {}

    async def _keep(self, chat: ChatId, kept: Mapping[str, Any]) -> None:
        times = (await self.manager()).use_times
        await times.records.keep(chat, _NAME, lambda _: dict(kept), times.clock().wall_s)


async def _control(request: Request) -> Control:
    control: Control = request.app.state.control
    return control


async def _user(request: Request) -> str:
    user: str = request.scope[CALLER].user
    return user


async def _row(request: Request, id: str) -> SessionStatus:  # noqa: A002 - its name in the path
    control: Control = request.app.state.control
    return await control.find(request.scope, id)


Steered = Annotated[Control, Depends(_control)]
User = Annotated[str, Depends(_user)]
Row = Annotated[SessionStatus, Depends(_row)]
Session_ = Answer[dict[str, SandboxSession]]
lifecycle = APIRouter(prefix="/api", tags=["lifecycle"], default_response_class=Json)


@lifecycle.post("/marketplace/expert/prepare-invoke")
@lifecycle.post("/sandbox/prepare")
async def prepare(control: Steered, user: User, given: Prepare) -> Session_:
    """Get or create the sandbox of a chat; the answer tells what is true now.

    The sandbox is made beside: `providerSandboxId` is null until it is there.
    """
    return Answer(data={"sandboxSession": await control.prepare(user, given)})


@lifecycle.get("/sandbox/by-chat/{chat}")
async def by_chat(
    control: Steered, user: User, request: Request, chat: str
) -> Answer[SandboxSession]:
    """Return the session of a chat."""
    row = await control.find(request.scope, name_session(ChatId(user, chat)))
    return Answer(data=await control.describe(row))


@lifecycle.get("/sandbox/{id}/status")
async def status(control: Steered, row: Row) -> Answer[SandboxSession]:
    """Return what a session is now."""
    return Answer(data=await control.describe(row))


@lifecycle.get("/sandbox/{id}/health")
async def health(control: Steered, row: Row) -> Answer[Health]:
    """Return whether a running sandbox answers."""
    return Answer(data=await control.health(row))


@lifecycle.post("/sandbox/{id}/pause")
async def pause(control: Steered, row: Row) -> Answer[Paused]:
    """Stop all that runs in a sandbox until it is resumed, or used."""
    return Answer(data=await control.pause(row))


@lifecycle.post("/sandbox/{id}/resume")
async def resume(control: Steered, row: Row) -> Answer[SandboxSession]:
    """Let a paused sandbox go on; make one where there is none."""
    return Answer(data=await control.resume(row))


@lifecycle.post("/sandbox/{id}/terminate")
async def terminate(control: Steered, row: Row) -> Answer[Terminated]:
    """End a sandbox; files stay until retention removes them."""
    return Answer(data=await control.terminate(row))


@lifecycle.get("/sandbox")
async def sessions(
    control: Steered,
    user: User,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0)] = 0,
) -> Answer[list[SandboxSession]]:
    """List the user's sessions, the last used first."""
    rows = await (await control.manager()).list(user)
    page = rows[offset : offset + limit]
    return Answer(data=[await control.describe(row) for row in page])


@lifecycle.get("/stats")
async def stats(control: Steered) -> Answer[dict[str, Any]]:
    """Return what this server holds now."""
    return Answer(data=asdict((await control.manager()).statistics()))


@lifecycle.get("/events", response_class=Streamed)
async def events(control: Steered, user: User) -> Streamed:
    """Stream each change of the user's sessions, as server-sent events."""

    async def make(put: Put) -> None:
        with suppress(anyio.ClosedResourceError):
            await control.listen(user, put)

    return Streamed(make, "text/event-stream", alive=b": \n\n")


def make_app(control: Control) -> FastAPI:
    """Return the API over `control`; the guard in front of it says whose each request is."""
    app = FastAPI(
        title="mcp-sandbox",
        version=__version__,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        default_response_class=Json,
    )
    app.include_router(lifecycle)
    app.include_router(work)
    app.state.control = control

    async def session(request: Request, session_id: str) -> Session:
        return await control.session(request.scope, session_id)

    app.state.session = session

    @app.exception_handler(SandboxError)
    async def tell(_: Request, exc: SandboxError) -> Response:
        return _problem(problem(exc))

    @app.exception_handler(RequestValidationError)
    async def tell_field(_: Request, exc: RequestValidationError) -> Response:
        first = exc.errors()[0]
        field = ".".join(map(str, first["loc"][1:])) or "the body"
        told = f"{field}: {first['msg']}"
        return _problem({"title": "InvalidArgument", "status": 400, "detail": told, "field": field})

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def tell_http(_: Request, exc: Exception) -> Response:
        found = cast("HTTPException", exc)
        told = "there is no such address or method: /api/openapi.json lists them"
        return _problem({"title": "NotFound", "status": found.status_code, "detail": told})

    return app


def _problem(told: Mapping[str, object]) -> Response:
    return Json(told, int(str(told["status"])), media_type="application/problem+json")
