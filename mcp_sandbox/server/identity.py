"""Who is calling: a request -> the chat it belongs to -> that chat's session."""

from collections.abc import Awaitable, Callable
from typing import Any

from mcp.server.mcpserver import Context

from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.session import Session

Request = Context[Any, Any]
ChatOf = Callable[[Request], ChatId]
SessionFor = Callable[[Request], Awaitable[Session]]


def one_chat(chat: ChatId) -> ChatOf:
    """Every request belongs to `chat`: for a server that one client started for itself."""
    return lambda _request: chat


def sessions_by(chat_of: ChatOf, session_of: Callable[[ChatId], Awaitable[Session]]) -> SessionFor:
    """Find a request's session through its chat."""

    async def session_for(request: Request) -> Session:
        return await session_of(chat_of(request))

    return session_for
