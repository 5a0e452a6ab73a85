"""Several servers on one data root: one sandbox for a chat, which ends with the last of them."""

import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime import channel
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.settings import SPEC
from tests.backends.live import chats_running, state_of

CHAT = ChatId("tester", "shared")
ROOT = Path(__file__).parents[2]


async def none_runs(config: Config) -> None:
    with anyio.fail_after(40):
        while await chats_running(config):
            await anyio.sleep(0.02)


@asynccontextmanager
async def daemon(config: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(config, for_many=True) as manager:
        yield manager


async def test_two_servers_share_a_sandbox_that_ends_with_the_last_of_them(config: Config) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(open_manager(config))
        mine = await first.session(CHAT)
        await mine.exec("sleep 86391 & echo $! > pid")
        async with open_manager(config) as second:
            theirs = await second.session(CHAT)
            assert (await theirs.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
            assert len(await chats_running(config)) == 1
        assert (await mine.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        assert await mine.take_notices() == []
    await none_runs(config)


async def test_the_first_to_open_may_be_the_first_to_leave(config: Config) -> None:
    async with open_manager(config) as second:
        theirs = await second.session(CHAT)
        async with open_manager(config) as first:
            await (await first.session(CHAT)).exec("sleep 86390 & echo $! > pid")
            await theirs.exec("true")
        assert (await theirs.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
    await none_runs(config)


async def test_one_that_resets_takes_the_sandbox_from_the_others(config: Config) -> None:
    async with open_manager(config) as first, open_manager(config) as second:
        mine, theirs = await first.session(CHAT), await second.session(CHAT)
        await mine.exec("echo old > file")
        await theirs.exec("true")
        await mine.reset(keep_files=False)
        with suppress(SandboxGone):  # Their server may not have noticed it yet.
            await theirs.exec("true")
        assert (await theirs.exec("ls; echo new > file")).stdout == ""
        assert (await mine.exec("cat file")).stdout == "new\n"
        assert len(await chats_running(config)) == 1


async def test_a_call_of_another_server_keeps_it(config: Config) -> None:
    started, ended = anyio.Event(), []

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async with open_manager(config) as second:
        theirs = await second.session(CHAT)

        async def work() -> None:
            command = "echo started; while [ ! -e stop ]; do sleep 0.05; done; echo ended"
            ended.append((await theirs.exec(command, on_output=note)).stdout)

        with anyio.fail_after(40):
            async with anyio.create_task_group() as tasks:
                async with open_manager(config) as first:
                    mine = await first.session(CHAT)
                    await mine.exec("true")
                    tasks.start_soon(work)
                    await started.wait()
                await theirs.write_file("stop", b"")
    assert ended == ["started\nended\n"]


@asynccontextmanager
async def server(name: str, config: Config, tasks: int) -> AsyncGenerator[Process]:
    command = [sys.executable, "-m", "tests.contract.sharing", name]
    given = [config.model_dump_json(), str(tasks)]
    async with await anyio.open_process([*command, *given], stderr=None, cwd=ROOT) as process:
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                assert process.stdin
                await process.stdin.aclose()
                with anyio.move_on_after(30):
                    await process.wait()


@pytest.mark.slow
async def test_two_processes_with_eight_tasks_each_open_one_sandbox(
    config: Config, backend_name: str
) -> None:
    with anyio.fail_after(55):
        async with (
            server(backend_name, config, 8) as one,
            server(backend_name, config, 8) as two,
        ):
            said = []
            for process in (one, two):
                assert process.stdin
                await process.stdin.send(b"go\n")
            for process in (one, two):
                assert process.stdout
                line = await TextReceiveStream(process.stdout).receive()
                said.append(json.loads(line))
            assert [answers for _, answers in said] == [["ok\n"] * 8] * 2
            assert said[0][0] == said[1][0]
            (info,) = await chats_running(config)
            assert info.id == said[0][0]
    await none_runs(config)


async def test_a_killed_server_takes_nothing_from_the_other(
    config: Config, backend_name: str
) -> None:
    with anyio.fail_after(55):
        async with open_manager(config) as manager:
            mine = await manager.session(ChatId("tester", "raced"))
            async with server(backend_name, config, 2) as other:
                assert other.stdin
                assert other.stdout
                await other.stdin.send(b"go\n")
                await TextReceiveStream(other.stdout).receive()
                await mine.exec("sleep 86389 & echo $! > pid")
                other.kill()
                await other.wait()
            assert (await mine.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
            assert len(await chats_running(config)) == 1


async def test_the_daemon_leaves_background_work_to_the_next_one(config: Config) -> None:
    quiet = ChatId("tester", "quiet")
    async with daemon(config) as first:
        await (await first.session(CHAT)).exec("sleep 86388 & echo $! > pid")
        await (await first.session(quiet)).exec("true")
    (left,) = await chats_running(config)
    assert left.labels["chat"] == CHAT.chat
    async with daemon(config) as second:
        with anyio.fail_after(40):
            while not [row for row in await second.list() if row.background == 1]:
                await anyio.sleep(0.02)
        assert second.statistics().open == 1
        session = await second.session(CHAT)
        assert (await session.exec("kill -0 $(cat pid) && kill $(cat pid)")).success
        assert [info.id for info in await chats_running(config)] == [left.id]
        assert await session.take_notices() == []
        with anyio.fail_after(10):
            while [row for row in await second.list() if row.background]:
                await anyio.sleep(0.02)
    await none_runs(config)


async def test_a_handed_over_sandbox_goes_on_in_the_next_server(config: Config) -> None:
    async with daemon(config) as first:
        await (await first.session(CHAT)).exec("true")
        await first.drain(1, hand_over=True)
    (left,) = await chats_running(config)
    async with daemon(config) as second:
        assert (await (await second.session(CHAT)).exec("true")).success
        assert [info.id for info in await chats_running(config)] == [left.id]


async def test_what_nobody_owns_is_removed_when_a_daemon_starts(config: Config) -> None:
    async with daemon(config) as first:
        await (await first.session(CHAT)).exec("sleep 86387 &")
    assert len(await chats_running(config)) == 1
    await anyio.to_thread.run_sync(shutil.rmtree, config.data_dir / "sandbox" / "workspace")
    async with daemon(config):
        await none_runs(config)


async def test_a_chat_that_cannot_be_taken_over_leaves_the_others_to_the_daemon(
    config: Config,
) -> None:
    async with daemon(config) as first:
        for name in ("a", "b"):
            await (await first.session(ChatId("tester", name))).exec("sleep 86375 &")
    bad = (await chats_running(config))[0].labels["chat"]
    home = config.data_dir / "sandbox" / "home" / "tester" / f"chat-{bad}"
    await anyio.to_thread.run_sync(home.rename, home.with_name("away"))
    await anyio.to_thread.run_sync(home.touch)
    async with daemon(config) as second:
        with anyio.fail_after(40):
            while not second.statistics().open:
                await anyio.sleep(0.02)
        await anyio.to_thread.run_sync(home.unlink)
        await anyio.to_thread.run_sync(home.with_name("away").rename, home)
        for name in ("a", "b"):
            await second.stop(ChatId("tester", name))


async def test_one_that_shows_what_is_not_the_chats_any_more_is_replaced(config: Config) -> None:
    async with daemon(config) as first:
        await (await first.session(CHAT)).exec("echo old > file; sleep 86386 &")
    folder = config.data_dir / "sandbox" / "workspace" / CHAT.user / f"chat-{CHAT.chat}"
    await anyio.to_thread.run_sync(folder.rename, folder.with_name("elsewhere"))
    async with open_manager(config) as second:
        assert (await (await second.session(CHAT)).exec("ls")).stdout == ""
        assert len(await chats_running(config)) == 1


async def test_other_limits_mean_a_new_sandbox_with_the_same_files(config: Config) -> None:
    async with daemon(config) as first:
        # The bash that was forked for it has become the program when the call ends.
        await (await first.session(CHAT)).exec("echo kept > file; sleep 86385 & sleep 0.2")
    (before,) = await chats_running(config)
    limits = config.limits.model_copy(update={"open_files": 1024})
    async with daemon(config.model_copy(update={"limits": limits})) as second:
        session = await second.session(CHAT)
        result = await session.exec("cat file; ps -eo args | grep -c '[s]leep 86385'")
        assert result.stdout == "kept\n0\n"
        (after,) = await chats_running(config)
        assert before.labels[SPEC] != after.labels[SPEC]
        # The name of one in a cluster is that of its chat.
        assert (before.id != after.id) == (config.backend != "kubernetes")
        # Where sandboxes hold the files, of which backup these are is told first.
        *older, told = await session.take_notices()
        assert all("from a backup" in each for each in older)
        assert "settings" in told
        assert "sleep 86385" in told


async def test_other_limits_do_not_end_what_another_server_uses(config: Config) -> None:
    limits = config.limits.model_copy(update={"open_files": 1024})
    async with open_manager(config) as first:
        mine = await first.session(CHAT)
        await mine.exec("sleep 86384 & echo $! > pid")
        async with open_manager(config.model_copy(update={"limits": limits})) as second:
            theirs = await second.session(CHAT)
            assert (await theirs.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        assert (await mine.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"


async def test_what_is_lost_of_the_notes_is_found_by_the_labels(config: Config) -> None:
    async with daemon(config) as first:
        await (await first.session(CHAT)).exec("sleep 86383 & echo $! > pid")
    (left,) = await chats_running(config)
    note = config.data_dir / "sandbox" / "records" / CHAT.user / f"chat-{CHAT.chat}.json"
    other = json.loads(note.read_text()) | {"sandbox_id": "mcs-0123456789abcdef"}
    await anyio.to_thread.run_sync(note.write_text, json.dumps(other))
    async with open_manager(config) as second:
        session = await second.session(CHAT)
        assert (await session.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        assert [info.id for info in await chats_running(config)] == [left.id]


async def test_a_sandbox_is_used_also_where_it_cannot_be_noted(config: Config) -> None:
    folder = config.data_dir / "sandbox" / "records" / CHAT.user
    (config.data_dir / "sandbox").mkdir(parents=True, mode=0o700)
    folder.parent.symlink_to("/proc")
    async with open_manager(config) as first, open_manager(config) as second:
        for manager in (first, second):
            assert (await (await manager.session(CHAT)).exec("echo ok")).stdout == "ok\n"
        assert len(await chats_running(config)) == 1
    await none_runs(config)


@pytest.mark.slow
async def test_one_of_other_settings_that_hangs_is_replaced(
    config: Config, backend_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "SILENT_S", 0.5)
    monkeypatch.setattr(channel, "ASKED_S", 1.0)
    monkeypatch.setattr(channel, "HANDSHAKE_S", 1.0)
    async with daemon(config) as first:
        await (await first.session(CHAT)).exec("echo kept > file; sleep 86377 & sleep 0.2")
    limits = config.limits.model_copy(update={"open_files": 1024})
    async with daemon(config.model_copy(update={"limits": limits})) as second:
        with anyio.fail_after(40):
            while not second.statistics().open:
                await anyio.sleep(0.02)
        held = second._hold(CHAT)._held
        assert held is not None
        if backend_name in ("docker", "docker-runsc"):
            await held.sandbox.pause()
        else:
            process = state_of(config.data_dir, held.sandbox.id)["process"]["pid"]
            os.kill(process, signal.SIGSTOP)
        with anyio.fail_after(40):
            session = await second.session(CHAT)
            assert (await session.exec("cat file")).stdout == "kept\n"
        (told,) = await session.take_notices()
        assert "sleep 86377" in told


async def test_two_that_end_at_once_leave_nothing(config: Config) -> None:
    async with open_manager(config) as first, open_manager(config) as second:
        for manager in (first, second):
            await (await manager.session(CHAT)).exec("sleep 86382 &")
        async with anyio.create_task_group() as tasks:
            for manager in (first, second):
                tasks.start_soon(partial(manager._hold(CHAT).release_if_idle, background_too=True))
        await none_runs(config)
        with anyio.fail_after(30):
            assert (await (await first.session(CHAT)).exec("echo again")).stdout == "again\n"


async def test_a_server_that_ends_in_the_middle_of_its_call_leaves_the_others_alone(
    config: Config,
) -> None:
    started = anyio.Event()

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async with open_manager(config) as second:
        theirs = await second.session(CHAT)
        await theirs.exec("sleep 86376 & echo $! > pid")
        with anyio.fail_after(40):
            async with anyio.create_task_group() as tasks:
                async with open_manager(config) as first:
                    mine = await first.session(CHAT)
                    tasks.start_soon(partial(mine.exec, "echo started; sleep 600", on_output=note))
                    await started.wait()
                    tasks.cancel_scope.cancel()
        assert (await theirs.exec("kill -0 $(cat pid) && echo alive")).stdout == "alive\n"
        assert (await theirs.exec("ps -eo args | grep -c '[s]leep 600'")).stdout == "0\n"
