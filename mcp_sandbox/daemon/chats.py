"""Commands of a person about the chats of the data root."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from mcp_sandbox.daemon.control import JsonObject
from mcp_sandbox.daemon.names import find_chat
from mcp_sandbox.models import ChatId, SessionStatus
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session


class Chats:
    """`list`, `find`, `stop`, `remove`, `collect`. `manager` opens the manager when need be."""

    def __init__(self, manager: Callable[[], Awaitable[SessionManager]]) -> None:
        self._manager = manager
        self.commands: Mapping[str, Callable[[JsonObject], Awaitable[JsonObject]]] = {
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

    async def _list(self, arguments: JsonObject) -> JsonObject:
        manager = await self._manager()
        rows = [_row(status) for status in await manager.list()]
        for row in rows if arguments.get("sizes") else ():
            row["size"] = await manager.size(ChatId(row["user"], row["chat"]))
        return {"chats": rows}

    async def _find(self, arguments: JsonObject) -> JsonObject:
        return {"chat": str(await self._found(arguments))}

    async def _stop(self, arguments: JsonObject) -> JsonObject:
        chat = await self._found(arguments)
        return {"chat": str(chat), "stopped": await (await self._manager()).stop(chat)}

    async def _remove(self, arguments: JsonObject) -> JsonObject:
        chat = await self._found(arguments)
        await (await self._manager()).remove(chat)
        return {"chat": str(chat)}

    async def _collect(self, arguments: JsonObject) -> JsonObject:
        manager = await self._manager()
        return asdict(await manager.collect(dry_run=bool(arguments.get("dry_run"))))

    async def _found(self, arguments: JsonObject) -> ChatId:
        manager = await self._manager()
        chats = [status.chat for status in await manager.list()]
        return find_chat(str(arguments.get("chat", "")), chats)


def _row(status: SessionStatus) -> dict[str, Any]:
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
