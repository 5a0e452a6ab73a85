"""A node that does not report, and an agent on it that hangs: what is there may go on."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.backends.kubernetes import backend as pods
from mcp_sandbox.errors import SandboxGone, Unreachable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.conftest import in_cluster
from tests.kubernetes.cluster import Cluster
from tests.unreachable.places import save_due

CHAT = ChatId("tester", "away")
BACKGROUND = "nohup sleep 86372 >/dev/null 2>&1 & echo $! > pid"


@asynccontextmanager
async def written(
    data_root: Path, fake: Cluster, storage: str
) -> AsyncGenerator[tuple[SessionManager, Session]]:
    """A chat with a file that is saved, and one that is not."""
    try:
        async with open_manager(in_cluster(data_root, storage=storage)) as manager:
            session = await manager.session(CHAT)
            await session.exec(f"echo one > saved; {BACKGROUND}")
            await manager.backups.save(CHAT)
            await session.exec("echo two > later")
            yield manager, session
    finally:
        fake.do(fake.node.come_back)


def lose(fake: Cluster, away_s: float) -> None:
    fake.do(fake.node.lose, away_s)
    fake.cut()


async def seen(session: Session) -> list[str]:
    return (await session.exec("cat saved later; kill -0 $(cat pid) && echo on")).stdout.split()


@pytest.mark.parametrize("storage", ["backups", "volume"])
async def test_no_call_at_all_and_a_node_away_for_less_than_a_minute_costs_nothing(
    kind: str, fake: Cluster, data_root: Path, storage: str
) -> None:
    async with written(data_root, fake, storage) as (manager, session):
        before = fake.names("pods"), await manager.backups.list(CHAT)
        await anyio.to_thread.run_sync(lose, fake, 50.0)
        await save_due(manager, CHAT)
        await manager._reaper.look()
        assert (fake.names("pods"), await manager.backups.list(CHAT)) == before
        fake.do(fake.node.come_back)
        await save_due(manager, CHAT)
        assert await seen(session) == ["one", "two", "on"]
        assert await session.take_notices() == []
        assert fake.names("pods") == before[0]


async def test_where_files_are_in_the_pod_alone_a_node_may_be_away_for_ten_minutes(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with written(data_root, fake, "backups") as (_, session):
        await anyio.to_thread.run_sync(lose, fake, 600.0)
        (pod,) = fake.store.objects["pods"].values()
        assert "deletionTimestamp" not in pod["metadata"]
        with pytest.raises(Unreachable):
            await session.exec("true")
        fake.do(fake.node.come_back)
        assert await seen(session) == ["one", "two", "on"]


async def test_a_pod_that_ends_on_a_node_that_is_away_is_waited_for_until_it_is_gone(
    kind: str, fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "_GONE_S", 1.0)
    async with written(data_root, fake, "volume") as (_, session):
        (before,) = [each["metadata"]["uid"] for each in fake.store.objects["pods"].values()]
        await anyio.to_thread.run_sync(lose, fake, 600.0)
        for _ in range(2):
            with pytest.raises(Unreachable, match="its node may be away"):
                await session.exec("true")
            (pod,) = fake.store.objects["pods"].values()
            assert pod["metadata"]["uid"] == before
        fake.do(fake.node.come_back)
        await fake.until(lambda: before not in str(fake.store.objects["pods"]))
        assert (await session.exec("cat saved later")).stdout.split() == ["one", "two"]


async def test_a_person_who_deletes_a_pod_on_such_a_node_does_not_end_what_may_go_on(
    kind: str, fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pods, "_GONE_S", 1.0)
    async with written(data_root, fake, "backups") as (manager, session):
        await anyio.to_thread.run_sync(lose, fake, 50.0)
        (name,) = fake.names("pods")
        fake.delete("pods", name)
        backups = await manager.backups.list(CHAT)
        with pytest.raises(Unreachable, match="its node may be away"):
            await session.exec("true")
        await save_due(manager, CHAT)
        assert await manager.backups.list(CHAT) == backups
        assert fake.names("pods") == [name]


async def test_code_that_shuts_the_server_out_does_not_lose_its_files_by_that(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with written(data_root, fake, "backups") as (manager, session):
        names = fake.names("pods")
        socket = "/run/mcp-sandbox/runner.sock"
        await session.exec(f"mv {socket} {socket}.x")
        await anyio.to_thread.run_sync(fake.cut)
        for _ in range(2):
            with pytest.raises((SandboxGone, Unreachable)):
                await session.exec("true")
        await save_due(manager, CHAT)
        assert fake.names("pods") == names


async def test_an_agent_of_a_node_that_hangs_is_told_in_time_and_then_at_once(
    fake: Cluster, data_root: Path
) -> None:
    async with written(data_root, fake, "volume") as (_, session):
        began = anyio.Event()

        async def note(_name: str, _data: bytes) -> None:
            began.set()

        async def call() -> None:
            with pytest.raises(Unreachable):
                await session.exec("echo began; sleep 60", on_output=note)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await began.wait()
            fake.node.hangs = True
            struck_s = anyio.current_time()
        assert anyio.current_time() - struck_s < 20
        asked_s = anyio.current_time()
        with pytest.raises(Unreachable):
            await session.exec("true")
        assert anyio.current_time() - asked_s < 1
        fake.do(fake.node.come_back)
        with anyio.fail_after(20):
            while True:
                try:
                    assert await seen(session) == ["one", "two", "on"]
                    break
                except Unreachable:
                    await anyio.sleep(0.2)
