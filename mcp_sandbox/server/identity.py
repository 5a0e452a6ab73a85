"""Who is calling: a request -> the chat it belongs to -> that chat's session."""

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mcp.server.mcpserver import Context

from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.session import Session

Request = Context[Any, Any]
ChatOf = Callable[[Request], ChatId]
SessionFor = Callable[[Request], Awaitable[Session]]


_connected = ContextVar[ChatId]("chat of the connection")


@contextmanager
def connected_as(chat: ChatId) -> Generator[None]:
    """Requests that are served in this block, and in tasks started in it, belong to `chat`."""
    before = _connected.set(chat)
    try:
        yield
    finally:
        _connected.reset(before)


def chat_of_connection(_request: Request) -> ChatId:
    """The chat that `connected_as` names: for a server that many connections share."""
    return _connected.get()


def one_chat(chat: ChatId) -> ChatOf:
    """Every request belongs to `chat`: for a server that one client started for itself."""
    return lambda _request: chat


def sessions_by(chat_of: ChatOf, session_of: Callable[[ChatId], Awaitable[Session]]) -> SessionFor:
    """Find a request's session through its chat."""

    async def session_for(request: Request) -> Session:
        return await session_of(chat_of(request))

    return session_for
