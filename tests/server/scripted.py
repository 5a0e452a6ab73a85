"""A session that answers with a given value or error, for tests of what the server room adds."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from mcp_sandbox.config import CallsConfig, SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import ChatOf, SessionFor, make_caller_finder
from mcp_sandbox.server.server import SandboxServer, build_server
from mcp_sandbox.server.skills.visible import VisibleSkills
from mcp_sandbox.sessions.skills import Skills
from mcp_sandbox.skills.library import SkillLibrary

CHAT = ChatId("tester", "scripted")
Answer = Callable[..., Awaitable[Any]]


class ScriptedSession:
    """Notes every call as (method, args, kwargs), without who may `leave` it; all answers alike."""

    is_open, has_listener = True, False

    def __init__(self, answer: Answer) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.news: list[str] = []
        self._answer = answer
        self.chat, self.backend = CHAT, "unsafe-local"

    @property
    def processes(self) -> "ScriptedSession":
        return self

    async def take_notices(self) -> list[str]:
        taken, self.news = self.news, []
        return taken

    def tell_news(self, text: str) -> None:
        self.news.append(text)

    @property
    def previews(self) -> Any:
        return self

    def __getattr__(self, method: str) -> Answer:
        async def call(*args: Any, **kwargs: Any) -> Any:
            noted = {name: value for name, value in kwargs.items() if name != "leave"}
            self.calls.append((method, args, noted))
            return await self._answer(*args, **kwargs)

        return call


def answering(value: Any) -> ScriptedSession:
    async def answer(*_: Any, **__: Any) -> Any:
        return value

    return ScriptedSession(answer)


def failing(error: BaseException) -> ScriptedSession:
    async def answer(*_: Any, **__: Any) -> Any:
        raise error

    return ScriptedSession(answer)


def one_chat(chat: ChatId) -> ChatOf:
    """Every request belongs to `chat`."""
    return lambda _request: chat


def shipped_skills(data_root: Path) -> VisibleSkills:
    """What a chat of its own sees of skills."""
    settings = SkillsConfig()
    skills = Skills(SkillLibrary(settings, data_root))
    return VisibleSkills(skills, make_caller_finder(one_chat(CHAT)), settings)


def server_of(
    session: ScriptedSession, skills: VisibleSkills | None = None, calls: CallsConfig | None = None
) -> SandboxServer:
    async def session_for(_request: Any) -> Any:
        return session

    find: SessionFor = session_for
    return build_server(find, skills=skills, calls=calls)


def text_of(result: Any) -> str:
    return "\n".join(block.text for block in result.content if block.type == "text")
