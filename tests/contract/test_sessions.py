"""Chats hold sandboxes: one each, replaced when they die, files always kept."""

from dataclasses import replace

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.config import Config, SessionsConfig
from mcp_sandbox.errors import CapacityReached, NotFound, SandboxGone
from mcp_sandbox.models import ChatId, SandboxId, SandboxSpec
from mcp_sandbox.sessions.chat_records import ChatRecords
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.sessions.settings import SessionSettings
from tests.backends.live import chats_running
from tests.contract.conftest import CHAT


async def running(config: Config) -> list[str]:
    """The chats that have a sandbox, as the backend tells it."""
    return sorted(info.labels["chat"] for info in await chats_running(config))


async def test_eight_callers_of_one_chat_share_one_sandbox(
    manager: SessionManager, config: Config
) -> None:
    hosts: list[str] = []

    async def ask() -> None:
        session = await manager.session(ChatId("u", "shared"))
        hosts.append((await session.exec("echo $$ >> pids; echo ok")).stdout)

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(ask)
    assert hosts == ["ok\n"] * 8
    assert await running(config) == ["shared"]


class SlowBackend:
    """A real backend whose creation waits until it is let through; counts creations."""

    holds_files = keeps_paused_files = takes_images = False

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = inner.name
        self.probe, self.attach = inner.probe, inner.attach
        self.running = inner.running
        self.origin = inner.origin
        self.created = 0
        self.gate = anyio.Event()
        self.destroying: anyio.Event | None = None
        self.may_destroy = anyio.Event()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.created += 1
        await self.gate.wait()
        return await self._inner.create(spec)

    async def destroy(self, sandbox_id: SandboxId) -> None:
        """Wait until it is let through, once somebody watches `destroying`."""
        if self.destroying:
            self.destroying.set()
            await self.may_destroy.wait()
        await self._inner.destroy(sandbox_id)


async def test_eight_callers_share_one_sandbox_of_a_slow_backend_too(config: Config) -> None:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as inner, open_manager(config) as opened:
        slow = SlowBackend(inner)
        rooms = replace(opened._context, backend=slow, pool=None)
        async with SessionManager(rooms, opened._skills, opened._judge) as manager:
            answers: list[str] = []

            async def ask(number: int) -> None:
                session = await manager.session(ChatId("u", "slow"))
                answers.append((await session.exec(f"echo {number}")).stdout)

            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(ask, number)
                await anyio.wait_all_tasks_blocked()
                slow.gate.set()
            assert sorted(answers) == [f"{number}\n" for number in range(8)]
            assert slow.created == 1


async def test_a_user_who_makes_room_on_a_slow_engine_holds_up_no_other(config: Config) -> None:
    bounds = SessionsConfig(max_open=16, max_per_user=1)
    config = config.model_copy(update={"sessions": bounds})
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as inner, open_manager(config) as opened:
        slow = SlowBackend(inner)
        slow.gate.set()
        rooms = replace(opened._context, backend=slow, pool=None)
        async with SessionManager(rooms, opened._skills, opened._judge) as manager:
            await (await manager.session(ChatId("many", "first"))).exec("true")
            slow.destroying = anyio.Event()
            second = await manager.session(ChatId("many", "second"))
            other = await manager.session(ChatId("other", "chat"))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(second.exec, "true")
                await slow.destroying.wait()
                with anyio.fail_after(20):
                    assert (await other.exec("echo at once")).stdout == "at once\n"
                slow.may_destroy.set()
            assert await running(config) == ["chat", "second"]


async def test_the_chat_used_longest_ago_makes_room(config: Config) -> None:
    settings = config.sessions.model_copy(update={"max_open": 2})
    async with open_manager(config.model_copy(update={"sessions": settings})) as manager:
        for name in ("a", "b"):
            await (await manager.session(ChatId("u", name))).exec("true")
        await (await manager.session(ChatId("u", "a"))).exec("true")
        await (await manager.session(ChatId("u", "c"))).exec("true")
        assert await running(config) == ["a", "c"]
        polled = await manager.session(ChatId("u", "a"))
        for number in range(3):
            await polled.exec("true")
            await (await manager.session(ChatId("u", f"storm-{number}"))).exec("true")
        assert await running(config) == ["a", "storm-2"]
        assert (await (await manager.session(ChatId("u", "b"))).exec("echo back")).success


async def test_a_busy_sandbox_is_never_closed_to_make_room(config: Config) -> None:
    settings = config.sessions.model_copy(update={"max_open": 1, "queue_wait": 0.0})
    async with open_manager(config.model_copy(update={"sessions": settings})) as manager:
        busy = await manager.session(ChatId("u", "busy"))
        started = anyio.Event()

        async def note(_name: str, _data: bytes) -> None:
            started.set()

        async def work() -> None:
            wait = "echo started; until [ -e stop ]; do sleep 0.01; done; echo undisturbed"
            assert (await busy.exec(wait, on_output=note)).stdout.endswith("undisturbed\n")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await started.wait()
            other = await manager.session(ChatId("u", "other"))
            with pytest.raises(CapacityReached, match="max_open"):
                await other.exec("true")
            await busy.write_file("stop", b"")
        assert (await other.exec("echo now")).stdout == "now\n"


async def test_a_chat_that_another_server_is_busy_with_holds_up_nobody(config: Config) -> None:
    settings = config.sessions.model_copy(update={"max_open": 2, "queue_wait": 0.0})
    async with open_manager(config.model_copy(update={"sessions": settings})) as manager:
        for name in ("a", "b"):
            await (await manager.session(ChatId("u", name))).exec("true")
        async with ChatRecords(config.data_dir).hold(ChatId("u", "a")):
            with anyio.fail_after(60):
                await (await manager.session(ChatId("u", "c"))).exec("true")
            assert await running(config) == ["a", "c"]


async def test_a_call_waits_in_the_queue_until_another_one_ends(config: Config) -> None:
    settings = config.sessions.model_copy(update={"max_per_user": 1})
    async with open_manager(config.model_copy(update={"sessions": settings})) as manager:
        busy = await manager.session(ChatId("u", "busy"))
        other = await manager.session(ChatId("u", "other"))
        started = anyio.Event()

        async def note(_name: str, _data: bytes) -> None:
            started.set()

        async def work() -> None:
            wait = "echo started; until [ -e stop ]; do sleep 0.01; done"
            assert (await busy.exec(wait, on_output=note)).success

        async def call() -> None:
            assert (await other.exec("echo served")).stdout == "served\n"

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work)
                await started.wait()
                tasks.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                await busy.write_file("stop", b"")
        assert await running(config) == ["other"]


@pytest.mark.slow
async def test_ten_chats_with_ten_commands_each_lose_no_output(manager: SessionManager) -> None:
    answers: dict[tuple[int, int], str] = {}

    async def ask(chat: int, number: int) -> None:
        session = await manager.session(ChatId("u", f"chat-{chat}"))
        result = await session.exec(f"echo {chat} {number} | tee -a log")
        answers[chat, number] = result.stdout

    with anyio.fail_after(55):
        async with anyio.create_task_group() as tasks:
            for chat in range(10):
                for number in range(10):
                    tasks.start_soon(ask, chat, number)
    assert answers == {(c, n): f"{c} {n}\n" for c in range(10) for n in range(10)}
    log = await (await manager.session(ChatId("u", "chat-7"))).exec("sort -n -k2 log")
    assert log.stdout == "".join(f"7 {number}\n" for number in range(10))


async def test_a_dead_runner_is_reported_and_the_next_call_has_the_files(
    manager: SessionManager, session: Session, config: Config
) -> None:
    await session.write_file("kept.txt", b"kept")
    if manager.saving:
        await manager.saving.save(CHAT)
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        (info,) = await backend.running()
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
                await backend.destroy(info.id)
        assert (await session.exec("cat kept.txt")).stdout == "kept"


async def test_a_second_server_finds_the_files(session: Session, config: Config) -> None:
    await session.write_file("note.txt", b"from the first")
    async with open_manager(config) as second:
        other = await second.session(session.chat)
        assert (await other.read_file("note.txt")).data == b"from the first"
        await other.write_file("note.txt", b"from the second")
    assert (await session.read_file("note.txt")).data == b"from the second"


async def test_files_and_home_outlive_the_sandbox(session: Session) -> None:
    await session.exec("echo work > kept; echo home > ~/kept")
    await session.reset(keep_files=True)
    assert (await session.exec("cat kept ~/kept")).stdout == "work\nhome\n"


async def test_a_reset_without_files_begins_empty_and_they_come_back(
    session: Session, manager: SessionManager
) -> None:
    await session.exec("echo work > gone")
    await session.reset(keep_files=False)
    assert (await session.list_files(hidden=False)).total == 0
    found = {each.chat: each for each in await manager.trashed()}
    await manager.take_back(session.chat, found[session.chat])
    assert (await session.exec("cat gone; echo on >> gone")).stdout == "work\n"


async def test_a_reset_ends_what_runs_in_the_background(session: Session) -> None:
    await session.exec("sleep 86397 &")
    await session.reset()
    assert (await session.exec("ps -eo args | grep -c '[s]leep 86397'")).stdout == "0\n"


async def test_chats_do_not_see_each_other(manager: SessionManager) -> None:
    mine = await manager.session(ChatId("u", "mine"))
    theirs = await manager.session(ChatId("u", "theirs"))
    await mine.write_file("/workspace/secret.txt", b"secret")
    await mine.exec("echo secret > /tmp/secret; sleep 86398 &")
    with pytest.raises(NotFound):
        await theirs.read_file("/workspace/secret.txt")
    seen = await theirs.exec("cat /tmp/secret; ps -eo args | grep '[s]leep 86398'; ls /workspace")
    assert seen.stdout == ""


async def test_a_sandbox_that_nobody_uses_ends_itself(config: Config) -> None:
    short = config.sessions.model_copy(update={"orphaned": 1.0})
    short_lived = config.model_copy(update={"sessions": short})
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        async with open_manager(short_lived) as manager:
            session = await manager.session(ChatId("u", "idle"))
            await session.exec("true")
            (info,) = await backend.running()
            held = session._hold._held
            assert held is not None
            await held.runtime.aclose()
            with anyio.fail_after(30):
                while any(each.state == "running" for each in await backend.running()):
                    await anyio.sleep(0.05)
            if not backend.holds_files:
                with pytest.raises(SandboxGone):
                    await backend.attach(info.id)


async def test_the_settings_default_runs_on_a_laptop() -> None:
    assert SessionSettings().sessions.max_open >= 1
