"""A sandbox that its engine can pause, while the servers cannot agree who has its chat."""

from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from redis.asyncio import Redis

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import FleetConfig
from mcp_sandbox.errors import SandboxGone, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.settings import list_chat_sandboxes
from tests.conftest import configured
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.redis, pytest.mark.docker]
CHAT = ChatId("ada", "frozen")


async def states(manager: SessionManager) -> dict[ChatId, str]:
    found = await list_chat_sandboxes(manager._context.backend)
    return {chat: info.state for chat, info in found}


async def test_it_is_paused_and_goes_on_with_its_processes(tmp_path: Path) -> None:
    redis = await to_thread.run_sync(RedisServer)
    given = {"redis": redis.url, "name": "a", "url": "http://a", "lease": 4.0}
    config = configured("docker", tmp_path).model_copy(
        update={"fleet": FleetConfig.model_validate(given)}
    )
    try:
        async with Redis.from_url(redis.url) as asked:
            await asked.set("born", 1)
        with anyio.fail_after(50):
            async with open_manager(config, for_many=True) as manager:
                session = await manager.session(CHAT)
                first = await session.exec(
                    "cat /proc/sys/kernel/random/uuid > /tmp/id; cat /tmp/id"
                )
                await session.exec("sleep 333", wait_s=0)
                (row,) = [row for row in await manager.list() if row.chat == CHAT]
                assert row.state == "running"
                redis.strike()
                with pytest.raises(SandboxGone, match="cannot agree who has this chat"):
                    await session.exec("sleep 60")
                with pytest.raises(StorageUnavailable, match="cannot agree who has this chat"):
                    await session.exec("true")
                while await states(manager) != {CHAT: "paused"}:
                    await anyio.sleep(0.05)
                await to_thread.run_sync(redis.start)
                while True:
                    try:
                        same = await session.exec("cat /tmp/id; pgrep -fc 'sleep 333'")
                        break
                    except StorageUnavailable:
                        await anyio.sleep(0.2)
                assert same.stdout == f"{first.stdout}1\n"
                await manager.stop(CHAT)
    finally:
        redis.close()
