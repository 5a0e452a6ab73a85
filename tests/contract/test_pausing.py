"""A sandbox is paused when asked; a call to it costs nothing but its waking."""

from contextlib import suppress

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import Busy, Unsupported
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions import manager as managing
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.sessions.clocks import SetClock

CHAT = ChatId("tester", "contract")


@pytest.fixture
def pauses(backend_name: str) -> bool:
    """Skip what needs a backend that pauses."""
    if not backend_name.startswith("docker"):
        pytest.skip("this backend cannot pause")
    return True


async def state(manager: SessionManager) -> str:
    (row,) = await manager.list()
    return row.state


async def test_the_next_call_wakes_a_paused_sandbox(
    manager: SessionManager, session: Session, pauses: bool
) -> None:
    with anyio.fail_after(50):
        assert not await manager.pause(CHAT)
        await session.exec("echo before > /tmp/kept-$HOSTNAME; sleep 86378 &")
        for _ in range(2):
            assert await manager.pause(CHAT)
            assert await state(manager) == "paused"
        assert (await session.exec("cat /tmp/kept-$HOSTNAME; pgrep -c sleep")).stdout == (
            "before\n1\n"
        )
        assert await state(manager) == "running"


async def test_one_is_resumed_when_asked(
    manager: SessionManager, session: Session, pauses: bool
) -> None:
    with anyio.fail_after(50):
        await session.exec("true")
        assert not await manager.resume(CHAT)
        await manager.pause(CHAT)
        assert await manager.resume(CHAT)
        assert await state(manager) == "running"
        assert (await session.exec("echo fine")).stdout == "fine\n"


async def test_a_backend_that_cannot_pause_says_so(
    manager: SessionManager, session: Session, backend_name: str
) -> None:
    if backend_name not in ("bubblewrap", "unsafe-local"):
        pytest.skip("it can, or ends it on files that are kept")
    await session.exec("true")
    with pytest.raises(Unsupported, match="mcp-sandbox stop"):
        await manager.pause(CHAT)
    assert (await session.exec("echo fine")).stdout == "fine\n"


async def test_a_call_under_way_is_not_paused(manager: SessionManager, session: Session) -> None:
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
            with pytest.raises(Busy, match="in use"):
                await manager.pause(CHAT)
            await session.write_file("stop", b"")


async def test_what_another_server_uses_is_not_paused(
    manager: SessionManager, session: Session, config: Config
) -> None:
    await session.exec("true")
    async with open_manager(config) as second:
        theirs = await second.session(CHAT)
        await theirs.exec("true")
        with pytest.raises(Busy, match="no other server"):
            await manager.pause(CHAT)
        assert (await theirs.exec("echo fine")).stdout == "fine\n"


async def test_a_second_server_wakes_a_paused_sandbox(
    manager: SessionManager, session: Session, config: Config, pauses: bool
) -> None:
    with anyio.fail_after(50):
        await session.exec("echo mine > file")
        await manager.pause(CHAT)
        async with open_manager(config) as second:
            theirs = await second.session(CHAT)
            assert (await theirs.exec("cat file; echo theirs > file")).stdout == "mine\n"
            assert await state(manager) == "running"
            assert (await session.exec("cat file")).stdout == "theirs\n"


async def test_pausing_between_many_calls_never_hangs(
    manager: SessionManager, session: Session, pauses: bool
) -> None:
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
                        with suppress(Busy):
                            await manager.pause(CHAT)
                        await anyio.sleep(0.02)

            tasks.start_soon(pause)
            async with anyio.create_task_group() as callers:
                for task in range(3):
                    callers.start_soon(ask, task)
            asking.cancel()
        # What is paused outlives its server.
        await manager.resume(CHAT)
    assert sorted(answers) == sorted(f"{task}-{n}\n" for task in range(3) for n in range(10))


async def test_a_paused_sandbox_outlives_its_server_and_goes_on(
    config: Config, pauses: bool
) -> None:
    with anyio.fail_after(55):
        async with open_manager(config) as first:
            session = await first.session(CHAT)
            await session.exec("echo kept > file; echo $$ > /tmp/same")
            await first.pause(CHAT)
        async with open_manager(config, for_many=True) as second:
            assert await state(second) == "paused"
            assert await second.pause(CHAT)
            result = await (await second.session(CHAT)).exec(
                "cat file; [ -e /tmp/same ] && echo same"
            )
            assert result.stdout == "kept\nsame\n"
            assert await state(second) == "running"


async def test_what_another_server_has_left_is_paused_and_resumed_without_a_call(
    config: Config, pauses: bool
) -> None:
    with anyio.fail_after(55):
        async with open_manager(config, for_many=True) as first:
            await (await first.session(CHAT)).exec("sleep 86379 &")
        async with open_manager(config) as second:
            assert await second.pause(CHAT)
        async with open_manager(config) as third:
            assert await state(third) == "paused"
            assert await third.resume(CHAT)
            assert await state(third) == "running"
            assert await third.stop(CHAT)


async def test_a_paused_sandbox_can_be_stopped_and_reset(
    manager: SessionManager, session: Session, pauses: bool
) -> None:
    with anyio.fail_after(50):
        await session.exec("echo kept > file")
        await manager.pause(CHAT)
        assert await manager.stop(CHAT)
        assert (await session.exec("cat file")).stdout == "kept\n"
        await manager.pause(CHAT)
        await session.reset(keep_files=False)
        assert (await session.exec("ls")).stdout == ""


async def test_a_start_and_gc_end_what_was_paused_for_long(
    config: Config, pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.backend != "auto"
    monkeypatch.setattr(managing, "_SETTLED_S", 0.1)
    clock = SetClock()
    async with open_backend(config.backend, config) as backend:
        for at_start in (True, False):
            async with open_manager(config, clock=clock) as manager:
                await (await manager.session(CHAT)).exec("echo kept > file; sleep 86377 &")
                await manager.pause(CHAT)
            clock.pass_(3590)
            async with open_manager(config, clock=clock) as manager:
                assert (await manager.collect()).items == ()
            assert len(await backend.running()) == 1
            async with open_manager(config, clock=clock) as manager:
                clock.pass_(10)
                with anyio.fail_after(30):
                    if not at_start:
                        (item,) = (await manager.collect()).items
                        assert (item.kind, "paused" in item.why) == ("sandbox", True)
                    while await backend.running():
                        await anyio.sleep(0.05)
                assert (await (await manager.session(CHAT)).exec("cat file")).stdout == "kept\n"
