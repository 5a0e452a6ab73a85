"""Chats of a fleet whose sandboxes hold their files themselves, and are the only copy of some."""

import json
import signal
from collections.abc import AsyncGenerator
from functools import partial

import anyio
import pytest

from tests.daemon.running import control
from tests.fleet.machines import Fleet, Machine, fleet
from tests.fleet.test_deaths import said
from tests.fleet.test_fleet import DISAGREE, eventually, until_refused, works

pytestmark = [pytest.mark.anyio, pytest.mark.redis, pytest.mark.s3, pytest.mark.bubblewrap]


@pytest.fixture(scope="module")
async def two(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncGenerator[Fleet]:
    folder, module = tmp_path_factory.mktemp("held"), "tests.fleet.holding_server"
    # What a dead server has left runs until it is back.
    more = {"MCP_SANDBOX_SESSIONS__ORPHANED": "60s"}
    async with fleet(folder, backend="unsafe-local", module=module, settings=more) as found:
        yield found


def held(machine: Machine, chat: str) -> list[str]:
    """What the sandboxes of a chat on a machine hold, running or paused."""
    notes = (machine.place.data / "held").glob("*/workspace/note")
    return [text for note in notes if (text := note.read_text()).startswith(chat)]


async def test_a_dead_servers_chat_goes_on_with_what_was_saved(two: Fleet) -> None:
    session = await two.a.prepare("dead")
    await two.a.run(session["id"], "echo dead > note")
    await two.a.saved(session["id"])
    await two.a.run(session["id"], "echo late >> note")
    await two.a.kill()
    text = await said(two.b, "dead", "cat note")
    assert text.startswith("dead\n")
    assert "late" not in text
    assert "Your files are as of" in text
    # When it is back, what only its sandbox has stays until it can be saved as older.
    await two.a.start()
    assert await two.a.run(session["id"], "cat note; echo b > b") == "dead\n"
    assert await two.has("dead") == "b"
    assert held(two.a, "dead") == ["dead\nlate\n"]
    await two.b.ask("POST", f"sandbox/{session['id']}/terminate")
    before = await backups(two.a, "dead")
    assert await two.a.run(session["id"], "cat note b") == "dead\nb\n"
    assert held(two.a, "dead") == ["dead\n"]
    assert await backups(two.a, "dead") == before + 1


async def backups(machine: Machine, chat: str) -> int:
    found = await control(machine.place, "backup", do="list", chat=f"ada/{chat}")
    return len(found["result"]["backups"])


async def test_a_chat_that_another_server_took_is_stopped_and_its_files_are_kept(
    two: Fleet,
) -> None:
    session = await two.a.prepare("lost")
    await two.a.run(session["id"], "echo lost > note")
    await two.a.saved(session["id"])
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_refused, two.a, session["id"], told)
        while not list((two.a.place.data / "held").glob("*/workspace/tick")):
            await anyio.sleep(0.02)
        lease = json.loads(await two.asked("GET", "lease:ada/lost"))
        other = {"owner": "b", "run": "b", "url": two.b.url, "epoch": lease["epoch"] + 1}
        await two.asked("SET", "lease:ada/lost", json.dumps({**lease, **other}), "PX", "4000")
    assert "another server has this chat now" in told[0]
    assert (await said(two.b, "lost", "cat note")).startswith("lost\n")
    await two.b.run(session["id"], "echo at b >> note")
    await two.b.ask("POST", f"sandbox/{session['id']}/terminate")
    assert await two.a.run(session["id"], "cat note") == "lost\nat b\n"


async def test_without_redis_it_is_paused_and_goes_on_with_files_that_nothing_else_has(
    two: Fleet,
) -> None:
    session = await two.a.prepare("away")
    await two.a.run(session["id"], "echo away > note")
    two.redis.strike(signal.SIGSTOP)
    try:
        await eventually(partial(is_refused, two.a, session["id"]))
    finally:
        two.redis.strike(signal.SIGCONT)
    for machine in (two.a, two.b):
        await eventually(partial(works, machine, session["id"]))
    assert await two.b.run(session["id"], "cat note") == "away\n"
    assert await two.has("away") == "a"


async def is_refused(machine: Machine, session_id: str) -> bool:
    try:
        await machine.run(session_id, "true")
    except RuntimeError as exc:
        return DISAGREE in str(exc)
    return False
