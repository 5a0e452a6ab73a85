"""What a platform reads of a session's sandbox, in a real Redis."""

import signal
import time
from collections.abc import AsyncGenerator

import anyio
import pytest
from redis.asyncio import Redis

from mcp_sandbox.errors import ConfigError, StorageUnavailable
from mcp_sandbox.storage.redis import SandboxBoard
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.redis]

MADE = {"providerSandboxId": "x1", "provider": "docker", "containerUrl": None}


@pytest.fixture
async def bridge(server: RedisServer) -> AsyncGenerator[SandboxBoard]:
    opened = SandboxBoard(server.url)
    yield opened
    await opened.aclose()


async def test_what_is_there_is_read_at_once_and_for_a_day(
    server: RedisServer, bridge: SandboxBoard
) -> None:
    await bridge.put("one", MADE)
    assert await bridge.wait("one") == MADE
    async with Redis.from_url(server.url) as asked:
        assert 86_390 < await asked.ttl("sandbox:one") <= 86_400
    await bridge.remove("one")
    assert await bridge.wait("one", within_s=0.1) is None


async def test_who_waits_hears_of_it_before_the_next_look(
    server: RedisServer, bridge: SandboxBoard
) -> None:
    async with anyio.create_task_group() as tasks:
        began = time.monotonic()
        tasks.start_soon(_put_later, server, "two")
        assert await bridge.wait("two", within_s=40) == MADE
    assert time.monotonic() - began < 3


async def _put_later(server: RedisServer, name: str) -> None:
    other = SandboxBoard(server.url)
    await anyio.sleep(0.3)
    await other.put(name, MADE)
    await other.aclose()


async def test_what_never_comes_is_waited_for_no_longer_than_said(bridge: SandboxBoard) -> None:
    began = time.monotonic()
    assert await bridge.wait("none", within_s=0.5) is None
    assert 0.4 < time.monotonic() - began < 3


async def test_a_redis_that_hangs_or_is_gone_is_told_in_time(
    server: RedisServer, bridge: SandboxBoard
) -> None:
    await bridge.put("one", MADE)
    server.strike(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(StorageUnavailable):
        await bridge.put("one", MADE)
    assert time.monotonic() - began < 5
    server.strike(signal.SIGCONT)
    server.strike()
    with pytest.raises(StorageUnavailable):
        await bridge.wait("one")
    server.start()
    assert await bridge.wait("one", within_s=0.1) is None
    await bridge.put("one", MADE)


def test_what_is_no_redis_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.redis"):
        SandboxBoard("http://somewhere")
