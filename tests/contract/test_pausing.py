"""A paused sandbox costs a call nothing but its waking, and none is paused that is used."""

import anyio
import pytest

from mcp_sandbox.app import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session

CHAT = ChatId("tester", "contract")


@pytest.fixture
def pauses(backend_name: str) -> bool:
    """Whether a pause saves anything on this backend."""
    return backend_name.startswith("docker")


async def state(manager: SessionManager) -> str:
    (row,) = await manager.list()
    return row.state


async def test_the_next_call_wakes_a_paused_sandbox(
    manager: SessionManager, session: Session, pauses: bool
) -> None:
    with anyio.fail_after(50):
        await session.exec("echo before > /tmp/kept-$HOSTNAME")
        assert await session._hold.pause() == pauses
        assert await state(manager) == ("paused" if pauses else "running")
        assert not await session._hold.pause()
        assert (await session.exec("cat /tmp/kept-$HOSTNAME")).stdout == "before\n"
        assert await state(manager) == "running"


async def test_background_work_is_not_paused(session: Session) -> None:
    await session.exec("sleep 86378 &")
    assert not await session._hold.pause()
    assert (await session.exec("echo fine")).stdout == "fine\n"


async def test_a_call_under_way_is_not_paused(session: Session) -> None:
    started = anyio.Event()

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async def work() -> None:
        command = "echo started; while [ ! -e stop ]; do sleep 0.05; done"
        assert (await session.exec(command, on_output=note)).success

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await started.wait()
            assert not await session._hold.pause()
            await session.write_file("stop", b"")


async def test_what_another_server_uses_is_not_paused(session: Session, config: Config) -> None:
    await session.exec("true")
    async with open_manager(config) as second:
        theirs = await second.session(CHAT)
        await theirs.exec("true")
        assert not await session._hold.pause()
        assert (await theirs.exec("echo fine")).stdout == "fine\n"


async def test_a_second_server_wakes_a_paused_sandbox(
    manager: SessionManager, session: Session, config: Config
) -> None:
    with anyio.fail_after(50):
        await session.exec("echo mine > file")
        await session._hold.pause()
        async with open_manager(config) as second:
            theirs = await second.session(CHAT)
            assert (await theirs.exec("cat file; echo theirs > file")).stdout == "mine\n"
            assert await state(manager) == "running"
            assert (await session.exec("cat file")).stdout == "theirs\n"


async def test_pausing_between_many_calls_never_hangs(session: Session) -> None:
    answers: list[str] = []

    async def ask(task: int) -> None:
        for number in range(10):
            answers.append((await session.exec(f"echo {task}-{number}")).stdout)
            await anyio.sleep(0.01 * task)

    with anyio.fail_after(55):
        async with anyio.create_task_group() as tasks:
            asking = anyio.CancelScope()

            async def pause() -> None:
                with asking:
                    while True:
                        await session._hold.pause()
                        await anyio.sleep(0.02)

            tasks.start_soon(pause)
            async with anyio.create_task_group() as callers:
                for task in range(3):
                    callers.start_soon(ask, task)
            asking.cancel()
    assert sorted(answers) == sorted(f"{task}-{n}\n" for task in range(3) for n in range(10))


async def test_a_paused_sandbox_ends_with_its_server(config: Config) -> None:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        with anyio.fail_after(50):
            async with open_manager(config) as manager:
                session = await manager.session(CHAT)
                await session.exec("true")
                await session._hold.pause()
            while await backend.running():
                await anyio.sleep(0.05)


async def test_a_paused_sandbox_can_be_stopped_and_reset(
    manager: SessionManager, session: Session
) -> None:
    with anyio.fail_after(50):
        await session.exec("echo kept > file")
        await session._hold.pause()
        assert await manager.stop(CHAT)
        assert (await session.exec("cat file")).stdout == "kept\n"
        await session._hold.pause()
        await session.reset(keep_files=False)
        assert (await session.exec("ls")).stdout == ""


async def test_one_that_was_handed_over_while_paused_goes_on(config: Config) -> None:
    with anyio.fail_after(55):
        async with open_manager(config, for_many=True) as first:
            session = await first.session(CHAT)
            await session.exec("echo kept > file")
            await session._hold.pause()
            await first.drain(1, hand_over=True)
        async with open_manager(config, for_many=True) as second:
            assert (await (await second.session(CHAT)).exec("cat file")).stdout == "kept\n"
            (row,) = await second.list()
            assert row.state == "running"
