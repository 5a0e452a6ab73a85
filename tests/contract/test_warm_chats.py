"""New chats that get a warm sandbox, and what a kill in the middle of that leaves."""

import os
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config, PoolConfig
from mcp_sandbox.models import ChatId, SandboxInfo
from mcp_sandbox.sessions.manager import SessionManager
from tests.contract.killed_adoption import STEPS
from tests.daemon.running import ended
from tests.e2e.attacks import BUBBLEWRAP, DOCKER

# Only a new label is the backend's own doing.
MOMENTS = [
    *(pytest.param(*DOCKER.values, "relabelled", marks=DOCKER.marks),),
    *(pytest.param(*BUBBLEWRAP.values, step, marks=BUBBLEWRAP.marks) for step in STEPS),
]
ANN, BOB = ChatId("ann", "c1"), ChatId("bob", "c2")


@pytest.fixture
def pooled(config: Config) -> Config:
    """The configuration of each backend, with two sandboxes that wait."""
    return config.model_copy(update={"pool": PoolConfig(size=2)})


@asynccontextmanager
async def filled(config: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(config) as manager:
        await until_filled(manager)
        yield manager


async def until_filled(manager: SessionManager) -> None:
    with anyio.fail_after(40):
        while (found := manager.statistics().pool)["idle"] < found["max"]:
            await anyio.sleep(0.02)


async def running(config: Config) -> Sequence[SandboxInfo]:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        return await backend.running()


def owners(infos: Sequence[SandboxInfo]) -> dict[str, str]:
    return {
        info.id: f"{info.labels['user']}/{info.labels['chat']}"
        for info in infos
        if "chat" in info.labels
    }


async def test_each_new_chat_gets_a_warm_sandbox_of_its_own(pooled: Config) -> None:
    async with filled(pooled) as manager:
        warm = {info.id for info in await running(pooled)}
        for chat in (ANN, BOB):
            session = await manager.session(chat)
            empty = "shopt -s dotglob nullglob; echo found: *"
            found = await session.exec(f"{empty}; echo {chat} > mine; echo {chat} > ~/mine")
            assert found.stdout == "found:\n"
        taken = owners(await running(pooled))
        assert sorted(taken.values()) == ["ann/c1", "bob/c2"]
        assert set(taken) == warm
        assert manager.statistics().pool["hits"] == 2
        await until_filled(manager)
        assert len(await running(pooled)) == 4
    assert await running(pooled) == []
    async with open_manager(pooled) as manager:
        for chat in (ANN, BOB):
            seen = await (await manager.session(chat)).exec("cat mine ~/mine")
            assert seen.stdout == f"{chat}\n" * 2


async def test_a_chat_with_files_never_gets_a_warm_sandbox(pooled: Config) -> None:
    async with filled(pooled) as manager:
        session = await manager.session(ANN)
        await session.write_file("note", b"kept")
        await until_filled(manager)
        await session.reset()
        assert (await session.read_file("note")).data == b"kept"
        assert manager.statistics().pool["hits"] == 1
        assert manager.statistics().pool["misses"] == 0


async def test_a_chat_that_was_emptied_begins_in_an_empty_workspace(pooled: Config) -> None:
    async with filled(pooled) as manager:
        session = await manager.session(ANN)
        await session.exec("echo gone > gone; echo kept > ~/kept")
        await session.reset(keep_files=False)
        assert (await session.exec("ls; cat ~/kept")).stdout == "kept\n"


async def test_a_chat_before_the_pool_is_filled_is_a_miss(pooled: Config) -> None:
    async with open_manager(pooled) as manager:
        assert (await (await manager.session(ANN)).exec("echo yes")).stdout == "yes\n"
        found = manager.statistics().pool
        assert (found["hits"], found["misses"]) == (0, 1)


async def test_the_workspace_of_an_adopted_sandbox_is_measured_and_limited(pooled: Config) -> None:
    limited = pooled.workspace.model_copy(update={"size_limit": 2 * 1024 * 1024})
    async with filled(pooled.model_copy(update={"workspace": limited})) as manager:
        session = await manager.session(ANN)
        await session.exec("head -c 1M /dev/urandom > a")
        assert (await session.info()).usage.used_bytes >= 1024 * 1024


async def test_servers_keep_their_warm_sandboxes_apart(pooled: Config) -> None:
    async with filled(pooled) as first:
        mine = {info.id for info in await running(pooled)}
        async with filled(pooled) as second:
            assert len(await running(pooled)) == 4
            await (await second.session(BOB)).exec("true")
            await until_filled(second)
        assert {info.id for info in await running(pooled)} == mine
        await (await first.session(ANN)).exec("true")
        assert first.statistics().pool["hits"] == 1


async def test_a_new_chat_of_two_servers_with_warm_sandboxes_gets_one(pooled: Config) -> None:
    async with filled(pooled) as first, filled(pooled) as second:

        async def note(manager: SessionManager, number: int) -> None:
            session = await manager.session(ANN)
            assert (await session.exec(f"echo {number} >> log; echo ok")).stdout == "ok\n"

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(note, (first, second)[number % 2], number)
        assert list(owners(await running(pooled)).values()) == ["ann/c1"]
        seen = await (await first.session(ANN)).exec("sort log | tr -d '\\n'")
        assert seen.stdout == "01234567"


@pytest.mark.slow
@pytest.mark.parametrize(("backend_name", "step"), MOMENTS, indirect=["backend_name"])
async def test_a_kill_in_the_middle_of_an_adoption_loses_no_file_and_leaves_nothing(
    step: str, pooled: Config, backend_name: str
) -> None:
    arguments = [pooled.model_dump_json(), step]
    killed = await ended(arguments, env=os.environ, module="tests.contract.killed_adoption")
    assert killed.code == -signal.SIGKILL, killed.err
    assert killed.out.split() == (["done", "1"] if step == "answered" else [])
    async with open_manager(pooled) as manager:
        session = await manager.session(ANN)
        seen = await session.exec("cat note ~/note")
        assert seen.stdout == ("kept\nkept\n" if step == "answered" else "")
        await session.exec("echo later > later; echo later > ~/later")
        await until_filled(manager)
    async with open_manager(pooled) as manager:
        assert (
            await (await manager.session(ANN)).exec("cat later ~/later")
        ).stdout == "later\n" * 2
    with anyio.fail_after(30):
        while await running(pooled):
            await anyio.sleep(0.1)
    assert not list((pooled.data_dir / "sandbox" / "pool").iterdir())
