"""What does not answer for a while is not gone: nothing of it is ended, replaced or restored."""

import gc
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import OperatorError, SandboxError, SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.errors import text_for_model
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.e2e.faults.engine import Engine, absent, own_engine
from tests.sessions.clocks import SetClock
from tests.unreachable.places import EVERY, HERE, Place, place_of, save_due

CHAT = ChatId("tester", "far")
DAY_S = 24 * 3600.0
UNTRUE = re.compile(r"sandbox ended|had ended|new sandbox|A person must|are gone|files are as of")
pytestmark = [
    pytest.mark.timeout(120),
    # Docker's library leaves a socket that it cannot connect to the collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


@pytest.fixture
async def place(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Place]:
    async with place_of(name, tmp_path / "data", request, monkeypatch) as found:
        # Nothing is due by its age alone.
        sessions = found.config.sessions.model_copy(update={"lifetime": 1000 * DAY_S})
        found.config = found.config.model_copy(update={"sessions": sessions})
        yield found
    gc.collect()


@pytest.fixture(scope="module")
def engine() -> Generator[Engine]:
    if reason := absent():
        pytest.skip(reason)
    with own_engine() as started:
        yield started


async def ids(config: Config) -> list[str]:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        return sorted(info.id for info in await backend.running())


async def told(work: Callable[[], Awaitable[object]]) -> str:
    """What it says while its place may be out of sight, in time."""
    with anyio.fail_after(20):
        try:
            await work()
        except (OperatorError, SandboxGone) as exc:
            return text_for_model(exc)
    return ""


async def under_way(session: Session, strike: Callable[[], Awaitable[None]]) -> str:
    """What a call says during which it strikes."""
    said: list[str] = []
    began = anyio.Event()

    async def note(_name: str, _data: bytes) -> None:
        began.set()

    async def call() -> None:
        said.append(await told(lambda: session.exec("echo began; sleep 6", on_output=note)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
        await began.wait()
        await strike()
    return said[0]


async def succeed(work: Callable[[], Awaitable[object]]) -> object:
    """What it returns as soon as its place is there again."""
    with anyio.fail_after(20):
        while True:
            with suppress(OperatorError, SandboxGone):
                return await work()
            await anyio.sleep(0.05)


async def look(session: Session) -> list[str]:
    look = "cat file; grep -q 86371 /proc/$(cat pid)/cmdline && echo goes on"
    found = await succeed(lambda: session.exec(look))
    return found.stdout.splitlines()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(("name", "fault"), EVERY)
async def test_what_is_out_of_sight_is_left_as_it_is(place: Place, fault: str) -> None:
    clock, said = SetClock(), dict[str, str]()
    async with open_manager(place.config, clock=clock) as manager:
        session = await manager.session(CHAT)
        background = "nohup sleep 86371 >/dev/null 2>&1 & echo $! > pid"
        await session.exec(f"echo first > file; {background}")
        await manager.backups.save(CHAT)
        await session.exec("echo second > file")
        before, backups = await ids(place.config), await manager.backups.list(CHAT)

        async def call_of_a_new_server() -> None:
            async with open_manager(place.config, clock=clock) as other:
                await (await other.session(CHAT)).exec("true")

        events: dict[str, Callable[[], Awaitable[object]]] = {
            "call": lambda: session.exec("true"),
            # Before the pause, after which the last server that has it open would end it.
            "new server": call_of_a_new_server,
            "save": lambda: manager.backups.save(CHAT),
            "save that is due": lambda: save_due(manager, CHAT),
            "pause": lambda: manager.pause(CHAT),
            "look": manager._reaper.look,
            "retention": manager.collect,
            "call again": lambda: session.exec("true"),
        }
        try:
            said["under way"] = await under_way(session, lambda: place.strike(fault))
            for what, work in events.items():
                if what == "retention":
                    clock.pass_(8 * DAY_S)
                said[what] = await told(work)
        finally:
            await place.strike(None)
        assert not {what: text for what, text in said.items() if UNTRUE.search(text)}
        was_paused = not said["pause"]
        assert await look(session) == ["second", *(() if was_paused else ("goes on",))]
        assert await succeed(lambda: ids(place.config)) == before
        notices = await session.take_notices()
        assert not [text for text in notices if UNTRUE.search(text)]
        for work in events.values():
            await succeed(work)
        assert (await look(session))[0] == "second"
        assert await ids(place.config) == before
        assert len(await manager.backups.list(CHAT)) >= len(backups)
        # The newest backup has what was written last.
        await manager.backups.save(CHAT)
        await manager.backups.restore(CHAT)
        assert (await look(session))[0] == "second"


@pytest.mark.parametrize(("name", "fault"), [HERE])
async def test_an_engine_that_starts_again_ends_what_ran_and_that_is_said(
    place: Place, fault: str
) -> None:
    async with open_manager(place.config) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo first > file; nohup sleep 86371 >/dev/null 2>&1 & echo $! > pid")
        await place.strike(fault)
        works = (lambda: manager.pause(CHAT), lambda: session.exec("echo second > file"))
        said = [await told(work) for work in works]
        await place.strike(None)
        assert not [text for text in said if UNTRUE.search(text)]
        assert await look(session) == ["second"]
        assert any("sleep 86371" in text for text in await session.take_notices())


async def _write(session: Session, until: anyio.Event) -> tuple[int, int]:
    """Write numbers until told to end; return the last that was acknowledged, and the last."""
    acknowledged = number = 0
    while not until.is_set():
        number += 1
        with suppress(OperatorError, SandboxGone):
            await session.exec(f"echo {number} > new && mv new note")
            acknowledged = number
    return acknowledged, number


async def _disturb(manager: SessionManager, until: anyio.Event) -> None:
    """Save, pause, look and list at random until told to end."""
    works: list[Callable[[], Awaitable[object]]] = [
        lambda: manager.backups.save(CHAT),
        lambda: save_due(manager, CHAT),
        manager._reaper.look,
        manager.collect,
        lambda: manager.pause(CHAT),
    ]
    while not until.is_set():
        with suppress(SandboxError):
            await random.choice(works)()
        await anyio.sleep(random.uniform(0, 0.3))


@pytest.mark.whole
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "fault"), [*EVERY, HERE])
async def test_strikes_at_any_moment_lose_no_byte_and_make_no_second_sandbox(
    place: Place, fault: str
) -> None:
    async with open_manager(place.config) as manager:
        session = await manager.session(CHAT)
        for number in range(11):
            random.seed(f"{fault} {number}")
            ended, found = anyio.Event(), list[tuple[int, int]]()

            async def write(until: anyio.Event, found: list[tuple[int, int]]) -> None:
                found.append(await _write(session, until))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, ended, found)
                tasks.start_soon(_disturb, manager, ended)
                await anyio.sleep(random.uniform(0, 1.5))
                await place.strike(fault)
                await anyio.sleep(random.uniform(0, 3.0))
                await place.strike(None)
                await anyio.sleep(random.uniform(0, 1.0))
                ended.set()
            ((acknowledged, last),) = found
            seen = await succeed(lambda: session.exec("cat note 2>/dev/null || echo 0"))
            assert acknowledged <= int(seen.stdout) <= last  # type: ignore[attr-defined]
            assert len(await succeed(lambda: ids(place.config))) == 1  # type: ignore[arg-type]
