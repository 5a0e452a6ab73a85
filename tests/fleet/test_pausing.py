"""What becomes of a sandbox while the servers cannot agree who has its chat."""

import signal
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from redis.asyncio import Redis

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, FleetConfig
from mcp_sandbox.errors import ChatElsewhere, SandboxGone, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.settings import list_chat_sandboxes
from tests.conftest import configured
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.redis]
CHAT = ChatId("ada", "frozen")


async def states(manager: SessionManager) -> dict[ChatId, str]:
    found = await list_chat_sandboxes(manager._context.backend)
    return {chat: info.state for chat, info in found}


@pytest.mark.docker
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


@pytest.mark.bubblewrap
@pytest.mark.parametrize("by", ["the same", "another"])
async def test_where_it_cannot_be_paused_its_end_is_told_with_what_ran(
    tmp_path: Path, by: str
) -> None:
    redis = await to_thread.run_sync(RedisServer)

    def server(name: str) -> Config:
        given = {"redis": redis.url, "name": name, "url": f"http://{name}", "lease": 4.0}
        fleet = FleetConfig.model_validate(given)
        return configured("unsafe-local", tmp_path / name).model_copy(update={"fleet": fleet})

    try:
        async with Redis.from_url(redis.url) as asked:
            await asked.set("born", 1)
        with anyio.fail_after(55):
            async with (
                open_manager(server("a"), for_many=True) as manager,
                open_manager(server("b"), for_many=True) as other,
            ):
                session = await manager.session(CHAT)
                await session.exec("sleep 334 & sleep 0.2")
                async with Redis.from_url(redis.url) as asked:
                    while b"sleep 334" not in (await asked.get(f"chat:{CHAT}") or b""):
                        await anyio.sleep(0.05)
                # The same server has a copy of what a Redis that was killed has lost.
                redis.strike(signal.SIGKILL if by == "the same" else signal.SIGSTOP)
                while await states(manager):
                    await anyio.sleep(0.05)
                if by == "the same":
                    await to_thread.run_sync(redis.start)
                else:
                    redis.strike(signal.SIGCONT)
                then = session if by == "the same" else await other.session(CHAT)
                while True:
                    try:
                        await then.exec("true")
                        break
                    except (StorageUnavailable, ChatElsewhere):
                        await anyio.sleep(0.2)
                (told,) = await then.take_notices()
                assert "The sandbox had ended since the last call" in told
                assert "sleep 334" in told
                assert ("cannot agree who has this chat" in told) == (by == "the same")
                await then.exec("true")
                assert await then.take_notices() == []
    finally:
        redis.close()
