"""Chats that two servers share, and what befalls their Redis."""

import json
import logging
import signal
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.config import Config
from mcp_sandbox.doctor.machine import examine_fleet
from tests.agents.service import KEY
from tests.agents.test_run import PROGRAM
from tests.control.test_agents import SANDBOX
from tests.daemon.running import command, control, in_chat
from tests.fleet.machines import LEASE_S, Fleet, Machine, fleet, on_engines
from tests.web.clients import connected

logger = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.redis,
    pytest.mark.s3,
    pytest.mark.bubblewrap,
    pytest.mark.xdist_group("fleet"),
]
DISAGREE = "the servers cannot agree who has this chat"
TICK = "while :; do date +%s%N >> tick; sleep 0.02; done"


ON_ENGINES = pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.whole])


@pytest.fixture(scope="module", params=["bubblewrap", ON_ENGINES])
async def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncGenerator[Fleet]:
    """Two servers on this machine, or on two engines in networks of their own."""
    folder = tmp_path_factory.mktemp("fleet")
    settings = add_assistant(folder)
    if request.param == "docker":
        opened = on_engines(folder, request.getfixturevalue("network"), settings)
    else:
        opened = fleet(folder, settings=settings)
    async with opened as found:
        yield found


def add_assistant(folder: Path) -> dict[str, str]:
    """Write an assistant whose program runs what it is asked; return the settings of it."""
    files = {"programs/bin/claude": PROGRAM, "assistants/worker/assistant.yaml": SANDBOX}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    unused = {"near": {"url": "http://127.0.0.1:9", "key": f"file:{folder}/key"}}
    return {
        "MCP_SANDBOX_CONNECTORS": json.dumps(unused),
        "MCP_SANDBOX_AGENTS__FOLDERS": json.dumps([str(folder / "assistants")]),
        "MCP_SANDBOX_AGENTS__PROGRAMS": str(folder / "programs"),
    }


async def eventually(is_so: Callable[[], Awaitable[object]]) -> None:
    with anyio.fail_after(25):
        while not await is_so():
            await anyio.sleep(0.05)


async def works(machine: Machine, session_id: str) -> bool:
    try:
        return await machine.run(session_id, "echo yes") == "yes\n"
    except RuntimeError:
        return False


async def test_a_call_is_answered_by_the_server_that_has_its_chat(two: Fleet) -> None:
    session = await two.a.prepare("shared")
    assert await two.a.run(session["id"], "echo at a > note; cat note") == "at a\n"
    assert await two.b.run(session["id"], "cat note") == "at a\n"
    assert (await two.b.prepare("shared"))["id"] == session["id"]
    (listed,) = [
        each
        for each in (await two.b.ask("GET", "sandbox")).json()["data"]
        if each["id"] == session["id"]
    ]
    assert (listed["status"], await two.has("shared")) == ("running", "a")
    async with two.b.agent("shared") as agent:
        result = await agent.call_tool("exec", {"command": "cat note"})
        assert "at a" in str(result.content)
    # One hop: what was passed on already is answered where it has come to.
    marked = {"json": {"command": "true"}, "headers": {"mcp-sandbox-passed-on": "1"}}
    refused = await two.b.ask("POST", f"sandbox/{session['id']}/exec", **marked)
    assert (refused.status_code, refused.json()["title"]) == (503, "ChatElsewhere")
    headers = {"authorization": f"Bearer {two.b.secrets['mcp']}", "Mcp-Sandbox-Chat": "shared"}
    async with connected(f"{two.b.url}/mcp", "legacy", headers) as older:
        assert "at a" in str((await older.call_tool("exec", {"command": "cat note"})).content)
    assert not two.b.files("shared").exists()


async def test_large_files_and_live_output_pass_both_ways(two: Fleet) -> None:
    session = await two.a.prepare("streams")
    place = f"sandbox/{session['id']}"
    size = 12 << 20

    async def pieces() -> AsyncGenerator[bytes]:
        for _ in range(size >> 20):
            yield b"x" * (1 << 20)

    put = await two.b.ask("PUT", f"{place}/files", params={"path": "large"}, content=pieces())
    assert put.status_code == 200, put.text
    got = await two.b.ask("GET", f"{place}/files", params={"path": "large"})
    assert got.content == b"x" * size
    command = {"command": "echo begun; while [ ! -e go ]; do sleep 0.02; done; echo over"}
    url = f"{two.b.url}/api/{place}/exec"
    async with two.b.http.stream("POST", url, json=command) as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["output"]["text"] == "begun\n"
        await two.a.run(session["id"], "touch go")
        assert json.loads([line async for line in lines][-1])["data"]["stdout"] == "begun\nover\n"


async def test_an_agent_works_where_its_chat_is_and_is_heard_live_elsewhere(two: Fleet) -> None:
    session = await two.a.prepare("agent")
    await two.a.run(session["id"], "echo from a > note")
    code = (
        "talk(open('note').read())\nwhile not os.path.exists('go'): time.sleep(0.02)\nend('over')"
    )
    body = {
        "messages": [{"role": "user", "content": code}],
        "assistant": "worker",
        "sandbox_session_id": session["id"],
    }
    async with two.b.http.stream("POST", f"{two.b.url}/api/agent/invoke", json=body) as answer:
        lines = answer.aiter_lines()
        event = (told := json.loads(await anext(lines))).get("event")
        assert event, told
        assert (event["type"], event["text"]) == ("Text", "from a\n")
        await two.a.run(session["id"], "touch go")
        last = json.loads([line async for line in lines][-1])["event"]
        assert (last["type"], last["content"]) == ("Completion", "over")
    assert await two.has("agent") == "a"
    assert not two.b.files("agent").exists()


async def test_who_hangs_up_ends_a_command_on_the_other_server(two: Fleet) -> None:
    session = await two.a.prepare("hung")
    command = {"command": "touch begun; exec sleep 77"}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(two.b.ask, "POST", f"sandbox/{session['id']}/exec", json=command))
        running = "ls begun 2>/dev/null && pgrep -fc '^sleep 77'"
        await eventually(partial(_says, two.a, session["id"], running, "begun\n1\n"))
        tasks.cancel_scope.cancel()
    await eventually(partial(_says, two.a, session["id"], running, "begun\n0\n"))


async def _says(machine: Machine, session_id: str, command: str, text: str) -> bool:
    return await machine.run(session_id, command) == text


async def test_a_token_counts_on_both_servers(two: Fleet) -> None:
    session = await two.a.prepare("private")
    tokens = two.a.place.data / "sandbox" / "tokens.json"
    known = tokens.read_text()
    tokens.write_text('{"tokens": []}')
    try:
        assert (await two.b.ask("GET", f"sandbox/{session['id']}/status")).status_code == 401
        run = {"messages": [{}], "sandbox_session_id": session["id"]}
        assert (await two.b.ask("POST", "agent/invoke", json=run)).status_code == 401
    finally:
        tokens.write_text(known)
    assert (await two.b.ask("GET", f"sandbox/{session['id']}/status")).status_code == 200


async def test_a_chat_that_is_endedis_free_for_all(two: Fleet) -> None:
    session = await two.a.prepare("ended")
    await two.a.run(session["id"], "echo kept > note")
    assert (await two.b.ask("POST", f"sandbox/{session['id']}/terminate")).status_code == 200
    assert await two.has("ended") is None
    again = await two.b.prepare("ended")
    assert again["isNewProvision"]
    assert await two.b.run(session["id"], "cat note") == "kept\n"
    assert await two.has("ended") == "b"


async def test_chats_of_the_unix_socket_are_their_machines_own(two: Fleet) -> None:
    for machine in (two.a, two.b):
        async with in_chat(machine.place, "own") as client:
            assert machine.name in await client.exec(f"echo {machine.name} >> who; cat who")
    assert await two.asked("KEYS", "*local*") == []
    await two.a.prepare("other")
    await eventually(partial(works, two.a, (await two.a.prepare("other"))["id"]))
    # One that names a user of the fleet is told where that user's chat is.
    async with in_chat(two.b.place, "other", user="ada") as client:
        assert f"on the server a ({two.a.url})" in await client.exec("echo no")
    removed = await control(two.b.place, "remove", chat="ada/other")
    assert f"on the server a ({two.a.url})" in str(removed)


async def test_an_operator_sees_what_is_shared(two: Fleet) -> None:
    await two.a.prepare("shown")
    found = await command(two.a.place, "status")
    assert "chats that servers share" in found.out
    await two.a.run((await two.a.prepare("shown"))["id"], "true")
    for machine, state in ((two.a, "running "), (two.b, "running at a ")):
        listed = (await command(machine.place, "ls")).out
        (row,) = [line for line in listed.splitlines() if "ada/shown" in line]
        assert state in row.replace("│", " ")
    config = Config.model_validate(
        {
            "data_dir": two.a.place.data,
            "fleet": {"redis": two.redis.url, "name": "a", "url": two.a.url, "lease": LEASE_S},
        }
    )
    (check,) = await examine_fleet(config)
    assert (check.status, check.remedy) == ("warn", "set storage: see docs/storage.md")
    assert f"a at {two.a.url}, b at {two.b.url}" in check.found
    other = config.model_copy(update={"data_dir": two.b.place.data})
    (check,) = await examine_fleet(other)
    assert (check.status, "is named a too" in check.remedy) == ("fail", True)
    assert await examine_fleet(Config()) == []


async def test_passing_on_costs_little(two: Fleet, request: pytest.FixtureRequest) -> None:
    session = await two.a.prepare("quick")
    took: dict[str, list[float]] = {"a": [], "b": []}
    await two.a.run(session["id"], "true")
    for machine in (two.a, two.b) * 60:
        began = time.perf_counter()
        await machine.ask("GET", f"sandbox/{session['id']}/status")
        took[machine.name].append(1000 * (time.perf_counter() - began))
    here, passed = (statistics.median(took[name]) for name in "ab")
    logger.info("a status %.1f ms, passed on %.1f ms", here, passed)
    # In the usual run other tests use the machine meanwhile.
    is_whole = request.config.getoption("--whole")
    assert min(took["b"]) - min(took["a"]) < (3 if is_whole else 50)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_redis_what_is_open_goes_on_until_its_lease_and_then_says_why(
    two: Fleet, number: int
) -> None:
    chat = f"away-{number}"
    session = await two.a.prepare(chat)
    await two.a.run(session["id"], "echo kept > note")
    async with anyio.create_task_group() as tasks:
        told: list[str] = []
        tasks.start_soon(until_refused, two.a, session["id"], told)
        await eventually(partial(_ticks, two.a, chat))
        # So that the most of a lease is left for the next call.
        await eventually(partial(_was_just_renewed, two, chat))
        two.redis.strike(number)
        # What was open is used, and new chats are refused.
        assert await two.a.run(session["id"], "cat note") == "kept\n"
        async with in_chat(two.b.place, "own") as client:
            assert "here" in await client.exec("echo here")
        refused = await two.b.ask("POST", "sandbox/prepare", json={"chatSessionId": "never"})
        assert refused.status_code == 503
        assert DISAGREE in refused.json()["detail"]
    assert DISAGREE in told[0]
    assert "SandboxGone" in told[0]
    with pytest.raises(RuntimeError, match=f"503 .*{DISAGREE}"):
        await two.a.run(session["id"], "true")
    two.redis.strike(signal.SIGCONT)
    if number == signal.SIGKILL:
        await to_thread.run_sync(two.redis.start)
    for machine in (two.a, two.b):
        await eventually(partial(works, machine, session["id"]))
    assert await two.b.run(session["id"], "cat note") == "kept\n"


async def until_refused(machine: Machine, session_id: str, told: list[str]) -> None:
    try:
        await machine.run(session_id, TICK)
    except RuntimeError as exc:
        told.append(str(exc))


async def _was_just_renewed(two: Fleet, chat: str) -> bool:
    return int(await two.asked("PTTL", f"lease:ada/{chat}")) > 1000 * (LEASE_S - 0.1)


async def _uses_redis(machine: Machine) -> bool:
    return (await machine.ask("GET", "sandbox")).status_code == 200


async def _ticks(machine: Machine, chat: str) -> bool:
    return (machine.files(chat) / "tick").exists()


async def test_a_redis_that_comes_back_empty_moves_no_chat(two: Fleet) -> None:
    session = await two.a.prepare("empty")
    async with anyio.create_task_group() as tasks:
        told: list[str] = []
        tasks.start_soon(until_refused, two.a, session["id"], told)
        await eventually(partial(_ticks, two.a, "empty"))
        two.redis.strike()
        await to_thread.run_sync(two.redis.start)
        await eventually(partial(two.asked, "GET", "chat:ada/empty"))
        await eventually(partial(_uses_redis, two.b))
        # Whoever had nothing waits; that the chat was at `a` is known again before.
        assert (await two.b.prepare("empty"))["id"] == session["id"]
        # A server has its lease again a moment before its record.
        await two.asked("DEL", "chat:ada/empty")
        assert await two.b.run(session["id"], "echo waited") == "waited\n"
        assert await two.has("empty") == "a"
        assert told == []
        await two.a.ask("POST", f"sandbox/{session['id']}/terminate")
    assert not two.b.files("empty").exists()


async def test_a_chat_that_another_server_took_is_stopped_and_its_files_stay(two: Fleet) -> None:
    session = await two.a.prepare("lost")
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_refused, two.a, session["id"], told)
        await eventually(partial(_ticks, two.a, "lost"))
        lease = json.loads(await two.asked("GET", "lease:ada/lost"))
        other = {"owner": "c", "run": "c", "url": "http://127.0.0.1:9", "epoch": lease["epoch"] + 1}
        text = json.dumps({**lease, **other})
        await two.asked("SET", "lease:ada/lost", text, "PX", "2500")
    assert "SandboxGone" in told[0]
    assert "another server has this chat now" in told[0]
    marked = {"mcp-sandbox-passed-on": "1"}
    with pytest.raises(RuntimeError, match=r"503 .*on the server c \(http://127.0.0.1:9\)"):
        await two.a.answer(session["id"], "true", headers=marked)
    seen = ticks(two.a, "lost")
    # Nobody answers at that address: a call waits until the lease is over.
    assert await two.b.run(session["id"], "ls") == ""
    assert ticks(two.a, "lost") == seen
    assert await two.has("lost") == "b"


def ticks(machine: Machine, chat: str) -> list[int]:
    return [int(each) for each in (machine.files(chat) / "tick").read_text().split()]


@pytest.mark.parametrize("fault", ["cut off", "stopped"])
async def test_a_server_that_nobody_hears_of_runs_nothing_when_another_does(
    two: Fleet, fault: str
) -> None:
    chat = fault.replace(" ", "-")
    session = await two.a.prepare(chat)
    await two.a.run(session["id"], "echo kept > note")
    await two.a.saved(session["id"])
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_refused, two.a, session["id"], told)
        await eventually(partial(_ticks, two.a, chat))
        if fault == "cut off":
            two.line.cut()
        else:
            two.a.strike(signal.SIGSTOP)
        await eventually(partial(is_free, two, chat))
        if fault == "stopped":
            two.a.strike(signal.SIGCONT)
        tasks.start_soon(until_refused, two.b, session["id"], told)
        await eventually(partial(_ticks, two.b, chat))
        two.line.whole.set()
        await eventually(partial(_passed_on, two, session["id"]))
        await two.b.ask("POST", f"sandbox/{session['id']}/terminate")
    assert len(told) == 2
    if fault == "cut off":
        assert max(ticks(two.a, chat)) < min(ticks(two.b, chat))
    assert (two.b.files(chat) / "note").read_text() == "kept\n"


async def is_free(two: Fleet, chat: str) -> bool:
    return await two.has(chat) is None


async def _passed_on(two: Fleet, session_id: str) -> bool:
    return await works(two.a, session_id)
