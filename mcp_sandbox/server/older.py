"""Clients of the older protocol, which has sessions: how many there are, and what a leaver leaves.

Newer clients cancel a call by closing its stream. Older ones are meant to say so, or to come back
for the answer; nothing keeps answers here, so a call whose client has left is cancelled as well.
"""

import json
from dataclasses import dataclass
from http import HTTPStatus

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sandbox.server.body import replayed
from mcp_sandbox.server.limits import Sessions
from mcp_sandbox.server.lines import find_request_id
from mcp_sandbox.server.refusal import too_many

SESSION_HEADER = "mcp-session-id"
SESSION_IDLE_S = 1800.0
_CANCEL_S = 1.0


class OlderSessions:
    """An application for requests of the older protocol, around the one that answers them."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit
        self._sessions = Sessions(limit, SESSION_IDLE_S)

    async def serve(
        self, user: str, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Have a request answered.

        Raises:
            Refused: it opens a session, and the user has as many as may be.
        """
        session_id = Headers(scope=scope).get(SESSION_HEADER)
        held = self._sessions.begin(user, session_id, anyio.current_time())
        if held is None:
            raise too_many(f"{self._limit} sessions of this user are open: end one", 60)
        seen = _Seen(send)
        try:
            await self._app(scope, receive, seen.send)
        finally:
            if session_id is not None and _ends_session(scope["method"], seen.status):
                self._sessions.forget(user, session_id)
            self._sessions.end(held, anyio.current_time(), seen.session_id)
            if session_id is not None and not seen.answered:
                await self._cancel(scope, find_request_id(body))

    async def _cancel(self, scope: Scope, request_id: str | int | None) -> None:
        if request_id is None:
            return
        cancelled = {"method": "notifications/cancelled", "params": {"requestId": request_id}}
        message = json.dumps({"jsonrpc": "2.0", **cancelled}).encode()
        with anyio.move_on_after(_CANCEL_S, shield=True):
            await self._app(scope, replayed(message, _nothing_more), _nowhere)


@dataclass
class _Seen:
    """What the application answers."""

    _send: Send
    status: int = 0
    session_id: str | None = None
    answered: bool = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status < HTTPStatus.BAD_REQUEST:
                self.session_id = Headers(raw=[*message["headers"]]).get(SESSION_HEADER)
        else:
            self.answered = not message.get("more_body", False)
        await self._send(message)


def _ends_session(method: str, status: int) -> bool:
    return status == HTTPStatus.NOT_FOUND or (method == "DELETE" and status == HTTPStatus.OK)


async def _nothing_more() -> Message:
    return {"type": "http.disconnect"}


async def _nowhere(_message: Message) -> None:
    """Nobody waits for what is said."""
