"""Who opens a chat compares its sandbox with the last one: what is gone is told once."""

import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.contract.test_health import noticed
from tests.sessions.clocks import SetClock

CHAT = ChatId("tester", "last")
RUNS = "sleep 86371 & sleep 0.2"
ENDED = "The sandbox had ended since the last call"
NEW = r"; this is a new one, so count on nothing that was in /tmp\."
NAMED = r"Ended in the background: sleep 86371 \(pid \d+\)\."


def seen_file(config: Config) -> Path:
    return config.data_dir / "sandbox" / "records" / CHAT.user / f"chat-{CHAT.chat}.seen"


def seen(config: Config) -> Any:
    file = seen_file(config)
    return json.loads(file.read_text()) if file.exists() else {}


async def noted(config: Config, text: str) -> None:
    """Wait until what is noted of the last sandbox has this."""
    with anyio.fail_after(20):
        while text not in json.dumps(seen(config)):
            await anyio.sleep(0.02)


async def destroy(config: Config, session: Session) -> None:
    """End the chat's sandbox behind the back of every server; return once that of `session` sees.

    Other sandboxes may wait in a pool.
    """
    assert config.backend != "auto"
    seen_by = session._hold._context.backend
    async with open_backend(config.backend, config) as backend:
        (info,) = [info for info in await backend.running() if info.labels.get("chat") == CHAT.chat]
        await backend.destroy(info.id)
    with anyio.fail_after(20):
        while info.id in [other.id for other in await seen_by.running()]:
            await anyio.sleep(0.02)


async def told(session: Session) -> list[str]:
    """What the next call tells of a sandbox that has ended."""
    assert (await session.exec("echo on")).stdout == "on\n"
    return [text for text in await session.take_notices() if "had ended" in text]


@asynccontextmanager
async def after(
    config: Config, begin: Callable[[Session], Awaitable[object]]
) -> AsyncGenerator[Session]:
    """The chat at a server after another, which was lost as if it had been killed."""
    async with open_manager(config, for_many=True) as lost:
        session = await lost.session(CHAT)
        await begin(session)
        await noted(config, "id")
        async with open_manager(config) as manager:
            yield await manager.session(CHAT)
        await lost.stop(CHAT, force=True)


async def run(session: Session) -> None:
    await session.exec(RUNS)


async def test_what_ended_while_no_server_looked_is_told_once_by_the_next(config: Config) -> None:
    async with after(config, run) as session:
        await noted(config, "sleep 86371")
        await destroy(config, session)
        (text,) = await told(session)
        assert re.fullmatch(rf"{ENDED}(: [^;]+)?{NEW} {NAMED}", text), text
        assert await told(session) == []
        await noted(config, '"ran": []')


async def test_where_nothing_ran_only_tmp_is_told_of(config: Config) -> None:
    async with after(config, lambda session: session.exec("touch /tmp/a")) as session:
        await destroy(config, session)
        (text,) = await told(session)
        assert re.fullmatch(rf"{ENDED}(: [^;]+)?{NEW}", text), text


async def test_nothing_is_told_of_the_same_sandbox(config: Config) -> None:
    async with after(config, run) as session:
        assert await told(session) == []
        assert await told(session) == []


async def test_what_is_told_to_nobody_waits_for_a_call(config: Config) -> None:
    async with after(config, run) as session:
        await noted(config, "sleep 86371")
        await destroy(config, session)
        # It opens one as a save does, and tells no agent.
        async with session._hold.open_for_save():
            pass
        async with open_manager(config) as third:
            assert len(await told(await third.session(CHAT))) == 1


async def test_what_ended_by_itself_before_is_not_named(config: Config) -> None:
    async with after(config, run) as session:
        await noted(config, "sleep 86371")
        await session.exec("pkill -f '^sleep 8637[1]'")
        await noted(config, '"ran": []')
        await destroy(config, session)
        await noticed(session)
        (text,) = await told(session)
        assert "background" not in text


@pytest.mark.parametrize("end", ["idle", "stopped", "reset", "server"])
async def test_an_end_that_was_wanted_is_not_told(config: Config, end: str) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        await session.exec("touch /tmp/a" if end == "idle" else RUNS)
        await noted(config, "id" if end == "idle" else "sleep 86371")
        if end == "idle":
            assert await session._hold.release_if_idle()
        elif end == "stopped":
            await manager.stop(CHAT)
        elif end == "reset":
            await session.reset()
        if end != "server":
            assert await told(session) == []
            return
    async with open_manager(config) as second:
        texts = await told(await second.session(CHAT))
        # It said that what ran in it ends with it; what did is named all the same.
        assert [ENDED in text and "sleep 86371" in text for text in texts] == [True]


async def test_one_that_is_too_old_is_told_by_whoever_ends_it(
    config: Config, backend_name: str
) -> None:
    for by_call in (True, False):
        clock = SetClock()
        async with open_manager(config, clock=clock) as manager:
            session = await manager.session(CHAT)
            await session.exec(RUNS)
            await session.take_notices()
            await noted(config, "sleep 86371")
            clock.pass_(config.sessions.lifetime)
            if not by_call:
                await manager._reaper.look()
            (text,) = await told(session)
            assert "its highest age" in text
            assert "sleep 86371" in text
            await manager.stop(CHAT)


async def test_a_pause_that_ends_what_runs_is_told_by_the_next_server(
    config: Config, backend_name: str
) -> None:
    if backend_name in ("bubblewrap", "unsafe-local"):
        pytest.skip("this backend cannot pause")
    keeps = backend_name in ("docker", "docker-runsc", "e2b")
    with anyio.fail_after(100):
        async with open_manager(config) as first:
            await (await first.session(CHAT)).exec(RUNS)
            await noted(config, "sleep 86371")
            assert await first.pause(CHAT)
            assert first.statistics().background == (1 if backend_name != "e2b" and keeps else 0)
        async with open_manager(config) as second:
            texts = await told(await second.session(CHAT))
            assert len(texts) == (not keeps)
            assert all("it was paused, which ends what runs in it" in text for text in texts)
            assert all("sleep 86371" in text for text in texts)


@pytest.mark.parametrize("missing", ["id", "file", "damaged"])
async def test_without_the_id_of_the_last_nothing_is_told(config: Config, missing: str) -> None:
    async with after(config, run) as session:
        await noted(config, "sleep 86371")
        if missing == "file":
            seen_file(config).unlink()
        elif missing == "id":
            seen_file(config).write_text('{"ran": ["sleep 1"]}')
        else:
            seen_file(config).write_text('{"ran')
        await destroy(config, session)
        assert await told(session) == []


async def test_an_end_under_a_call_is_told_by_that_call_alone(config: Config) -> None:
    async with open_manager(config, for_many=True) as manager:
        session = await manager.session(CHAT)
        await session.exec(RUNS)
        await noted(config, "sleep 86371")
        started = anyio.Event()

        async def work() -> None:
            async def note(_name: str, _data: bytes) -> None:
                started.set()

            with pytest.raises(SandboxGone, match="sleep 86371"):
                await session.exec("echo started; sleep 600", on_output=note)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                await started.wait()
                await destroy(config, session)
        async with open_manager(config) as second:
            assert await told(await second.session(CHAT)) == []
        assert await told(session) == []


async def test_calls_that_leave_nothing_running_have_nothing_noted(
    manager: SessionManager, config: Config
) -> None:
    session = await manager.session(CHAT)
    await session.exec(RUNS)
    await noted(config, "sleep 86371")
    held = session._hold._held
    assert held
    before, written = held.runtime.background, seen_file(config).stat().st_mtime_ns
    for _ in range(20):
        await session.exec("true")
    # Each frame of the runner would be another object, and have it noted.
    assert held.runtime.background is before
    assert seen_file(config).stat().st_mtime_ns == written


async def test_the_note_goes_with_the_chat(manager: SessionManager, config: Config) -> None:
    await (await manager.session(CHAT)).exec(RUNS)
    await noted(config, "sleep 86371")
    await manager.remove(CHAT)
    assert not seen_file(config).exists()
