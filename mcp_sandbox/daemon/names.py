"""Finds the chat that a person means by a part of its name. Pure."""

from collections.abc import Collection, Sequence

from mcp_sandbox.errors import Ambiguous, InvalidArgument, NotFound
from mcp_sandbox.models import ChatId

_MOST_SHOWN = 10


def find_chat(text: str, chats: Collection[ChatId]) -> ChatId:
    """The chat called `text`, else the one whose id or user/id begins with it.

    Raises:
        NotFound: there is none.
        Ambiguous: there are several; the message names them.
        InvalidArgument: nothing was named.
    """
    if not text:
        raise InvalidArgument("name a chat: `mcp-sandbox ls` lists them")
    for found in (
        [chat for chat in chats if text in (chat.chat, str(chat))],
        [chat for chat in chats if chat.chat.startswith(text) or str(chat).startswith(text)],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            raise Ambiguous(f"{text!r} may be {_listed(found)}: write more of the name")
    raise NotFound(f"no chat is called {text!r}: `mcp-sandbox ls` lists them")


def _listed(chats: Sequence[ChatId]) -> str:
    names = sorted(map(str, chats))
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" or one of {more} others" if more > 0 else "")
