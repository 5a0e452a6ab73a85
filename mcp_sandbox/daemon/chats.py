"""Commands of a person about the chats of the data root."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict

from mcp_sandbox.daemon.control import Command, JsonObject, Tell
from mcp_sandbox.daemon.names import find_chat
from mcp_sandbox.models import ChatId, SessionStatus
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session


class Chats:
    """`list`, `find`, `stop`, `remove`, `collect`. `manager` opens the manager when need be."""

    def __init__(self, manager: Callable[[], Awaitable[SessionManager]]) -> None:
        self._manager = manager
        self.commands: Mapping[str, Command] = {
            "list": self._list,
            "find": self._find,
            "stop": self._stop,
            "remove": self._remove,
            "collect": self._collect,
        }

    async def session(self, arguments: JsonObject) -> Session:
        """The session of the chat that `arguments` mean.

        Raises:
            CallerError: they mean none, or several.
        """
        return await (await self._manager()).session(await self._found(arguments))

    async def _list(self, _arguments: JsonObject, _tell: Tell) -> JsonObject:
        manager = await self._manager()
        return {"chats": [_row(status) for status in await manager.list()]}

    async def _find(self, arguments: JsonObject, _tell: Tell) -> JsonObject:
        found = await self._found(arguments)
        return {"user": found.user, "chat": found.chat}

    async def _stop(self, arguments: JsonObject, _tell: Tell) -> JsonObject:
        chat = await self._found(arguments)
        return {"chat": str(chat), "stopped": await (await self._manager()).stop(chat)}

    async def _remove(self, arguments: JsonObject, _tell: Tell) -> JsonObject:
        chat = await self._found(arguments)
        await (await self._manager()).remove(chat)
        return {"chat": str(chat)}

    async def _collect(self, arguments: JsonObject, _tell: Tell) -> JsonObject:
        manager = await self._manager()
        return asdict(await manager.collect(dry_run=bool(arguments.get("dry_run"))))

    async def _found(self, arguments: JsonObject) -> ChatId:
        manager = await self._manager()
        chats = [status.chat for status in await manager.list()]
        return find_chat(str(arguments.get("chat", "")), chats)


def _row(status: SessionStatus) -> JsonObject:
    return {
        "user": status.chat.user,
        "chat": status.chat.chat,
        "state": status.state,
        "backend": status.backend,
        "sandbox": status.sandbox_id,
        "created": status.created_at.isoformat(),
        "last_used": status.last_used_at.isoformat(),
        "image": status.image,
        "busy": status.busy,
        "background": status.background,
    }
