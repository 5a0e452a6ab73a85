"""What an operator sees of chats and does to them."""

import anyio
import pytest

from mcp_sandbox.errors import Draining, SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager

ANN, BOB = ChatId("ann", "one"), ChatId("bob", "two")


async def test_every_known_chat_is_listed_with_what_it_has(manager: SessionManager) -> None:
    ann, bob = await manager.session(ANN), await manager.session(BOB)
    await bob.exec("sleep 86393 &")
    await ann.exec("true")
    assert await manager.stop(ANN)
    rows = {row.chat: row for row in await manager.list()}
    assert (rows[ANN].state, rows[ANN].sandbox_id) == ("warm", None)
    assert (rows[BOB].state, rows[BOB].busy) == ("running", 0)
    assert rows[BOB].sandbox_id is not None
    assert rows[BOB].created_at <= rows[BOB].last_used_at
    with anyio.fail_after(10):
        while {row.background for row in await manager.list("bob")} != {1}:
            await anyio.sleep(0.02)
    assert [row.chat for row in await manager.list("ann")] == [ANN]
    assert len({row.id for row in rows.values()}) == 2


async def test_a_stopped_chat_keeps_its_files(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    assert not await manager.stop(ANN)
    await session.exec("echo kept > file; sleep 86392 &")
    assert await manager.stop(ANN)
    assert not await manager.stop(ANN)
    assert (await session.exec("cat file; ps -eo args | grep -c '[s]leep 86392'")).stdout == (
        "kept\n0\n"
    )


async def test_a_removed_chat_is_not_listed_and_begins_empty(manager: SessionManager) -> None:
    session = await manager.session(ANN)
    await session.exec("echo gone > file; echo gone > ~/file")
    await manager.remove(ANN)
    assert ANN not in [row.chat for row in await manager.list() if row.sandbox_id]
    assert (await session.exec("cat file ~/file 2>/dev/null; ls -A")).stdout == ""


async def test_a_call_under_way_learns_that_its_sandbox_was_stopped(
    manager: SessionManager,
) -> None:
    session = await manager.session(ANN)
    started = anyio.Event()

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async def work() -> None:
        with pytest.raises(SandboxGone, match="next call"):
            await session.exec("echo started; sleep 600", on_output=note)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await started.wait()
            assert manager.statistics().busy == 1
            assert await manager.stop(ANN)
    assert manager.statistics().open == 0


async def test_draining_lets_running_calls_finish_and_refuses_new_ones(
    manager: SessionManager,
) -> None:
    session = await manager.session(ANN)
    started, ended = anyio.Event(), []

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async def work() -> None:
        command = "echo started; while [ ! -e stop ]; do sleep 0.05; done; echo ended"
        ended.append((await session.exec(command, on_output=note)).stdout)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await started.wait()
            await manager.drain(0.1)
            assert ended == []
            with pytest.raises(Draining):
                await session.exec("true")
            (row,) = await manager.list()
            workspace = manager._context.workspaces._path("workspace", row.chat)
            await anyio.Path(workspace / "stop").touch()
            await manager.drain(30)
            assert ended == ["started\nended\n"]
