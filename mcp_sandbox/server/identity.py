"""Who is calling: a request -> the chat it belongs to -> that chat's session; by what client."""

from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from mcp.server import ServerRequestContext
from mcp.server.mcpserver import Context
from mcp.types import CallToolResult
from pydantic_core import from_json

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId, TokenGrant
from mcp_sandbox.sessions.session import Session

Request = Context[Any, Any]
ChatOf = Callable[[Request], ChatId]
SessionFor = Callable[[Request], Awaitable[Session]]

CHAT_HEADER = "mcp-sandbox-chat"
CALLER = "mcp_sandbox.caller"
ANONYMOUS = TokenGrant("local", "")
_NO_CHAT = (
    "This sandbox server does not know which conversation is calling, so nothing was run. Ask the "
    "user to add a line to this server's entry in .mcp.json, and to connect again: "
    '"headers": {"Mcp-Sandbox-Chat": "my-project"} beside the "Authorization" that is there. Any '
    "name will do; the same name finds the same files."
)
# What single clients do that others do not, by the names that they give, with the source.
# Claude Code cuts off instructions after so many characters, as its requests to the model show.
CUT_AFTER = {"claude-code": 4096}


def suit_client(result: CallToolResult, name: str) -> CallToolResult:
    """Return the result with its texts so that the client of this name shows them to its model."""
    for each in () if result.structured_content else result.content:
        if each.type == "text":
            each.text = _SUITED.get(name, str)(each.text)
    return result


def _mark_json(text: str) -> str:
    with suppress(ValueError):
        from_json(text)
        return f"[stdout]\n{text}"
    return text


_SUITED: Mapping[str, Callable[[str], str]] = {
    # Gemini CLI takes a first text that is JSON for structured content, and then refuses all but
    # objects: packages/core/src/tools/mcp-compliance-transport.ts, since 0.44.
    "gemini-cli-mcp-client": _mark_json,
    # Copilot joins texts with nothing between them, and writes JSON anew: seen in its requests.
    "copilot-cli": lambda text: _mark_json(text).removesuffix("\n") + "\n",
}


@dataclass(frozen=True)
class Caller:
    """Who a request comes from; `chat` is None when an HTTP request names none."""

    user: str
    chat: ChatId | None


CallerOf = Callable[[Request], Caller]


def is_over_http(request: Request) -> bool:
    """Return whether its client may be on another machine."""
    return hasattr(request.request_context.request, "scope")


def make_caller_finder(chat_of: ChatOf) -> CallerOf:
    """Return the caller that an HTTP request names; for other transports see `chat_of`."""

    def caller_of(request: Request) -> Caller:
        if not is_over_http(request):
            chat = chat_of(request)
            return Caller(chat.user, chat)
        http: Any = request.request_context.request
        return cast("Caller", http.scope[CALLER])

    return caller_of


_connected = ContextVar[ChatId]("chat of the connection")


@contextmanager
def bind_connection(chat: ChatId) -> Generator[None]:
    """Serve requests in this block, and in tasks started in it, as requests of `chat`."""
    before = _connected.set(chat)
    try:
        yield
    finally:
        _connected.reset(before)


def chat_of_connection(_request: Request) -> ChatId:
    """Return the chat that `bind_connection` names."""
    return _connected.get()


def chat_bound(context: ServerRequestContext[Any, Any]) -> str | None:
    """Return the chat of a request, to which the answers of its user are bound."""
    http: Any = context.request
    if not hasattr(http, "scope"):
        chat = _connected.get(None)
        return str(chat) if chat else None
    caller: Caller = http.scope[CALLER]
    return f"{caller.user} {caller.chat}"


def make_session_finder(
    chat_of: ChatOf, session_of: Callable[[ChatId], Awaitable[Session]]
) -> SessionFor:
    """Find a request's session through its chat; see `make_caller_finder`."""
    caller_of = make_caller_finder(chat_of)

    async def session_for(request: Request) -> Session:
        chat = caller_of(request).chat
        if chat is None:
            raise InvalidArgument(_NO_CHAT)
        return await session_of(chat)

    return session_for
