"""A sandbox that has died is reported as what it was, and replaced on the same files."""

import os
import signal

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.config.values import MIB
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime import channel
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.backends.live import state_of

CHAT = ChatId("tester", "health")


async def destroy(config: Config) -> None:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        (info,) = await backend.running()
        await backend.destroy(info.id)


async def background(session: Session, count: int) -> None:
    """Wait until the runner has told that so many run."""
    held = session._hold._held
    assert held is not None
    with anyio.fail_after(20):
        while held.runtime.background.total != count:
            await anyio.sleep(0.02)


async def noticed(session: Session) -> None:
    """Wait until the end of the sandbox is felt here; a call before that would be a call in it."""
    held = session._hold._held
    if held is not None:
        with anyio.fail_after(20):
            await held.runtime.wait_broken()


async def test_what_died_between_calls_is_told_once_with_its_background(
    session: Session, config: Config
) -> None:
    await session.exec("echo kept > file; sleep 86381 & sleep 0.2")
    await background(session, 1)
    await destroy(config)
    await noticed(session)
    assert (await session.exec("cat file")).stdout == "kept\n"
    (told,) = await session.take_notices()
    assert "killed from outside" in told
    assert "sleep 86381" in told
    await session.exec("true")
    assert await session.take_notices() == []


async def test_what_died_under_a_call_is_named_with_its_background(
    session: Session, config: Config
) -> None:
    started = anyio.Event()

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async def work() -> None:
        with pytest.raises(SandboxGone, match=r"killed from outside.*next call.*sleep 86380"):
            await session.exec("echo started; sleep 600", on_output=note)

    await session.exec("sleep 86380 & sleep 0.2")
    await background(session, 1)
    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await started.wait()
            await destroy(config)
    assert (await session.exec("echo new")).stdout == "new\n"
    assert await session.take_notices() == []


@pytest.mark.slow
async def test_background_work_that_had_ended_is_not_mourned(
    session: Session, config: Config
) -> None:
    await session.exec("sleep 2 &")
    await background(session, 1)
    await background(session, 0)
    await destroy(config)
    await noticed(session)
    await session.exec("true")
    (told,) = await session.take_notices()
    assert "background" not in told


async def test_a_call_under_which_memory_runs_out_says_so(config: Config) -> None:
    limits = config.limits.model_copy(update={"memory": 96 * MIB})
    async with open_manager(config.model_copy(update={"limits": limits})) as manager:
        session = await manager.session(CHAT)
        with anyio.fail_after(55):
            with pytest.raises(SandboxGone, match=r"ran out of memory \(96m\)"):
                await use_up_memory(session)
            assert (await session.exec("echo fine")).stdout == "fine\n"


async def use_up_memory(session: Session) -> None:
    for number in range(50):
        await session.exec(f"dd if=/dev/zero of=/tmp/{number} bs=4k")
        await session.write_file("file", bytes(8 << 20))


@pytest.mark.slow
async def test_one_that_hangs_is_given_up_and_replaced(
    manager: SessionManager, config: Config, backend_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "SILENT_S", 0.5)
    monkeypatch.setattr(channel, "ASKED_S", 1.0)
    monkeypatch.setattr(channel, "HANDSHAKE_S", 1.0)
    session = await manager.session(CHAT)
    await session.exec("echo kept > file")
    held = session._hold._held
    assert held is not None
    if backend_name in ("docker", "docker-runsc"):
        await held.sandbox.pause()
    else:
        process = state_of(config.data_dir, held.sandbox.id)["process"]["pid"]
        os.kill(process, signal.SIGSTOP)
    with anyio.fail_after(40):
        with pytest.raises(SandboxGone, match="did not answer"):
            await session.exec("true", timeout_s=600)
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_cut_connection_does_not_end_what_another_server_uses(config: Config) -> None:
    async with open_manager(config) as first, open_manager(config) as second:
        mine, theirs = await first.session(CHAT), await second.session(CHAT)
        await mine.exec("sleep 86379 & echo $! > pid")
        await theirs.exec("true")
        held = mine._hold._held
        assert held is not None
        await held.runtime.aclose()
        assert (await mine.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        assert await mine.take_notices() == []
        assert (await theirs.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
