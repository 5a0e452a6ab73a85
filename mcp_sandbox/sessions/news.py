"""What became of sandboxes between calls, until the agents are told."""

from mcp_sandbox.models import ChatId

_MOST_OF_A_CHAT = 5
_MOST_CHATS = 1000


class News:
    """Short texts for the next result of a chat, the latest ones; each is told once."""

    def __init__(self) -> None:
        self._untold: dict[ChatId, list[str]] = {}

    def tell(self, chat: ChatId, text: str) -> None:
        """Keep a text until the chat's agent takes it."""
        untold = [*self._untold.pop(chat, []), text][-_MOST_OF_A_CHAT:]
        if len(self._untold) >= _MOST_CHATS:
            del self._untold[next(iter(self._untold))]
        self._untold[chat] = untold

    def take(self, chat: ChatId) -> list[str]:
        """What the chat's agent was not told yet."""
        return self._untold.pop(chat, [])
