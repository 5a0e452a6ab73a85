"""What becomes of the chats of a server that dies, ends or starts again."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from mcp.types import TextContent
from pydantic import ValidationError
from redis import Redis

from mcp_sandbox.app.chats import open_fleet, open_manager
from mcp_sandbox.config import Config, FleetConfig
from mcp_sandbox.errors import ChatElsewhere, ConfigError
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import system_clock
from mcp_sandbox.workspace.retention import Moment
from tests.conftest import configured
from tests.daemon.running import control
from tests.fleet.machines import LEASE_S, Machine, fleet
from tests.rclone import S3Server
from tests.redis_server import RedisServer

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.anyio, pytest.mark.redis, pytest.mark.s3, pytest.mark.bubblewrap]


async def said(machine: Machine, chat: str, command: str) -> str:
    """The whole of what an agent reads."""
    async with machine.agent(chat) as agent:
        result = await agent.call_tool("exec", {"command": command})
        return "\n".join(each.text for each in result.content if isinstance(each, TextContent))


async def test_a_dead_servers_chats_go_on_at_another(tmp_path: Path) -> None:
    async with fleet(tmp_path) as two:
        saved, unsaved, own = [await two.a.prepare(name) for name in ("saved", "unsaved", "own")]
        await two.a.run(saved["id"], "echo kept > note")
        await two.a.saved(saved["id"])
        await two.a.run(saved["id"], "echo late > lost")
        await two.a.run(unsaved["id"], "echo lost > note")
        await two.a.run(own["id"], "echo mine > note")
        await two.a.kill()
        began = time.monotonic()
        # No chat begins without the files that it had, only because their store is away.
        two.store.strike()
        with pytest.raises(RuntimeError, match=r"503 .*object store"):
            await two.b.run(saved["id"], "ls")
        two.store.start()
        while "store does not answer" in (text := await said(two.b, "saved", "cat note; ls lost")):
            await anyio.sleep(0.1)
        took_s = time.monotonic() - began
        logger.info("taken over %.1f s after the death, lease %g s", took_s, LEASE_S)
        assert took_s < LEASE_S + 3
        assert "kept" in text
        assert "No such file" in text
        assert "Your files are as of" in text
        text = await said(two.b, "unsaved", "ls note")
        assert "No such file" in text
        assert "written or installed there, if anything, is lost" in text
        # The server comes back: what it has of others' chats is older, its own goes on.
        await two.a.start()
        assert "kept" in await said(two.a, "saved", "cat note")
        assert await two.has("saved") == "b"
        assert "mine" in await said(two.a, "own", "cat note")
        assert await two.has("own") == "a"


async def test_a_new_chat_goes_where_there_is_room(tmp_path: Path) -> None:
    async with fleet(tmp_path, settings={"MCP_SANDBOX_SESSIONS__MAX_OPEN": "1"}) as two:
        first = await two.a.prepare("first")
        assert await two.a.run(first["id"], "echo first") == "first\n"
        second = await two.a.prepare("second")
        assert await two.a.run(second["id"], "echo second") == "second\n"
        assert [await two.has(name) for name in ("first", "second")] == ["a", "b"]


async def test_what_no_server_can_share_chats_by_is_told_at_the_start(tmp_path: Path) -> None:
    redis = await to_thread.run_sync(RedisServer, "--requirepass", "right")
    given = {"redis": redis.url, "name": "a", "url": "http://a"}
    fleet = FleetConfig.model_validate(given)
    config = configured("unsafe-local", tmp_path).model_copy(update={"fleet": fleet})
    try:
        with pytest.raises(ConfigError, match="needs the right password"):
            async with open_manager(config, for_many=True):
                pass
    finally:
        redis.close()
    with pytest.raises(ValidationError, match=r"fleet\.redis, name and url"):
        FleetConfig.model_validate({"name": "a", "redis": redis.url})


async def test_a_server_that_is_ended_hands_its_chats_over_at_once(tmp_path: Path) -> None:
    async with fleet(tmp_path, lease_s=30) as two:
        session = await two.a.prepare("moved")
        await two.a.run(session["id"], "echo kept > note")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(two.a.stop)
            with anyio.fail_after(20):
                assert await two.b.run(session["id"], "cat note") == "kept\n"
        assert await two.has("moved") == "b"
        # As it was the last that used the chat, nothing is lost.
        assert "is lost" not in await said(two.b, "moved", "true")


async def test_a_server_that_is_replaced_keeps_its_chats_and_fails_no_call(tmp_path: Path) -> None:
    async with fleet(tmp_path) as two, anyio.create_task_group() as tasks:
        session = await two.a.prepare("stays")
        answers: list[str] = []

        async def run(command: str) -> None:
            answers.append(await two.b.run(session["id"], command))

        tasks.start_soon(run, "touch begun; until [ -e go ]; do sleep 0.02; done; echo finished")
        while not (two.a.files("stays") / "begun").exists():
            await anyio.sleep(0.02)
        before = (await two.a.prepare("stays"))["providerSandboxId"]
        assert await control(two.a.place, "hand-over") == {"result": {}}
        await two.a.start()
        began = time.monotonic()
        while time.monotonic() - began < 1.5 * LEASE_S:
            for machine in (two.a, two.b):
                assert await machine.run(session["id"], "echo on") == "on\n"
            assert await two.has("stays") == "a"
        await two.a.run(session["id"], "touch go")
        while not answers:
            await anyio.sleep(0.02)
        assert answers == ["finished\n"]
        assert (await two.a.prepare("stays"))["providerSandboxId"] == before


Configure = Callable[[str], Config]


@pytest.fixture
def configuration(tmp_path: Path) -> Iterator[Configure]:
    """Makes the configuration of a server of a fleet by its name."""
    redis, store = RedisServer(), S3Server(tmp_path / "s3" / "buckets")
    with Redis.from_url(redis.url) as asked:
        asked.set("born", 1)

    def configure(name: str) -> Config:
        given = {"redis": redis.url, "name": name, "url": f"http://{name}", "lease": LEASE_S}
        config = configured("unsafe-local", tmp_path / name)
        more = {"storage": store.settings(), "fleet": FleetConfig.model_validate(given)}
        return config.model_copy(update=more)

    yield configure
    redis.close()
    store.close()


async def test_a_clock_that_is_an_hour_ahead_takes_no_chat_early(configuration: Configure) -> None:
    chat = ChatId("ada", "timed")

    def ahead() -> Moment:
        now = system_clock()
        return Moment(now.wall_s + 3600, now.steady_s)

    async with (
        open_manager(configuration("a"), for_many=True) as a,
        open_manager(configuration("b"), for_many=True, clock=ahead) as b,
    ):
        mine, theirs = await a.session(chat), await b.session(chat)
        await mine.exec("echo kept > note")
        began = time.monotonic()
        while time.monotonic() - began < 1.2 * LEASE_S:
            assert (await mine.exec("cat note")).stdout == "kept\n"
            with pytest.raises(ChatElsewhere):
                await theirs.exec("cat note")
        # The files of the last one count, whatever its clock says.
        for number, (manager, session) in enumerate([(b, theirs), (a, mine), (b, theirs)]):
            await (a if manager is b else b).stop(chat)
            assert (await session.exec("cat note")).stdout == "kept\n" + "more\n" * number
            await session.exec("echo more >> note")


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_program_that_serves_nobody_has_only_chats_that_no_server_has(
    configuration: Configure, name: str
) -> None:
    chat, config = ChatId("ada", "used"), configuration(name)
    async with open_manager(configuration("a"), for_many=True) as a, open_manager(config) as b:
        mine, theirs = await a.session(chat), await b.session(chat)
        await mine.exec("echo kept > note")
        await a.backups.save(chat)
        for refused in (lambda: theirs.exec("true"), lambda: b.stop(chat), lambda: b.remove(chat)):
            with pytest.raises(ChatElsewhere):
                await refused()
        assert await a.backups.list(chat)
        await a.stop(chat)
        assert (await theirs.exec("cat note")).stdout == "kept\n"
        with pytest.raises(ChatElsewhere):
            await mine.exec("true")
        async with open_fleet(config) as store:
            # No server sends clients to where nothing listens.
            assert [each.name for each in await store.servers()] == ["a"]
