"""Work that outlasts a call, a client and its patience, with the real Claude command line."""

import base64
import json
import random
import re
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process

from tests.contract import plotting
from tests.daemon.running import command
from tests.e2e.claude import Claude
from tests.e2e.connected import Home
from tests.e2e.messages_api import Arguments, Heard, Script
from tests.e2e.test_connected_clients import (
    by_relay_only,
    claude_in,
    conversation,
    home,
    running,
)

__all__ = ["home"]

pytestmark = [pytest.mark.claude, pytest.mark.slow, pytest.mark.timeout(400)]
EXEC, PROCESS, READ, CODE = (
    f"mcp__sandbox__{name}" for name in ("exec", "process", "read_file", "run_code")
)
GOES_ON = re.compile(r"\bgoes on as (p\d+-\w+) after \d+ s, at most until \d\d:\d\d UTC; ")


@pytest.fixture
async def claude(home: Home, npm_cache: Path) -> Claude:
    return await claude_in(home, npm_cache)


def sleeping(seconds: int) -> str:
    """A command that takes so long, and can be told from all others of this machine."""
    return f"sleep {seconds}.{random.randrange(10**9):09}"


def waits(wait_s: float) -> Callable[[Heard], dict[str, object]]:
    """Arguments that wait for what the first call left running."""
    return lambda heard: {"action": "wait", "id": name_of(heard[0]), "wait_s": wait_s}


def name_of(said: str) -> str:
    found = GOES_ON.search(said)
    assert found, said
    return found[1]


async def gone(command: str) -> None:
    with anyio.fail_after(30):
        while running(command):
            await anyio.sleep(0.02)


async def begun(command: str) -> None:
    with anyio.fail_after(40):
        while not running(command):
            await anyio.sleep(0.02)


@by_relay_only
async def test_a_long_build_is_followed_over_several_calls(claude: Claude) -> None:
    build = "for n in 1 2 3 4; do echo step $n; sleep 1.5; done; echo built"
    follow = Script(
        [
            (EXEC, {"command": build, "wait_s": 1}),
            (PROCESS, waits(2)),
            (PROCESS, waits(45)),
            (EXEC, {"command": "true"}),
        ],
        "It is built.",
    )
    await claude.follow(follow)
    first, second, last, after = (follow.heard[number] for number in range(4))
    name = name_of(first)
    assert first.startswith("step 1\n")
    assert "step 1" not in second
    assert name_of(second) == name
    assert re.search(rf"built\n+\[{name} has ended after \d+ s: exit code 0\]", last)
    printed = [line for each in (first, second, last) for line in re.findall(r"step \d", each)]
    assert printed == ["step 1", "step 2", "step 3", "step 4"]
    # Who has waited for the end is not told again.
    assert name not in after


def sides(told: str) -> list[tuple[int, int]]:
    """Width and height of the pictures that the model was shown, in their order."""
    found = []
    for message in json.loads(told)["messages"]:
        for block in message["content"]:
            inner = block["content"] if isinstance(block, dict) and "content" in block else ()
            for part in inner:
                if isinstance(part, dict) and part["type"] == "image":
                    data = base64.b64decode(part["source"]["data"])
                    assert data.startswith(b"\x89PNG")
                    found.append(struct.unpack(">II", data[16:24]))
    return found


@by_relay_only
async def test_three_figures_of_one_plot_are_shown_as_three_pictures_in_order(
    claude: Claude, home: Home, tmp_path_factory: pytest.TempPathFactory
) -> None:
    option, conversation_id = conversation()
    begin = Script([(CODE, {"code": plotting.VERSION})], "Begun.")
    await claude.follow(begin, option, conversation_id)
    version = begin.heard[0].split()[0]
    wheels = plotting.wheels(version, tmp_path_factory.getbasetemp() / "wheels")
    done = await command(home.place, "cp", str(wheels[0].parent), f"{conversation_id}:wheels")
    assert done.code == 0, done.err
    draw = "plt.figure(figsize=(width, 2)); plt.plot([1, width])"
    plot = f"import matplotlib.pyplot as plt\nfor width in 3, 1, 2:\n    {draw}\nprint('drawn')"
    script = Script([(EXEC, {"command": plotting.INSTALL}), (CODE, {"code": plot})], "There.")
    await claude.follow(script, "--resume", conversation_id)
    assert script.heard[1].startswith("drawn\n")
    seen = sides(script.told)
    assert len(seen) == 3
    assert [round(3 * width / seen[0][0]) for width, _ in seen] == [3, 1, 2]


@by_relay_only
async def test_a_dialogue_with_a_program_on_a_terminal(claude: Claude) -> None:
    ask = "name = input('Your name? '); age = input('Age? '); print(f'{name} is {age}.')"
    started = {"command": f'python3 -c "{ask}"', "tty": True, "until": "name?"}

    def types(text: str) -> Callable[[Heard], dict[str, object]]:
        given = {"action": "input", "text": text, "key": "enter"}
        return lambda heard: {**given, "id": name_of(heard[0])}

    script = Script(
        [(EXEC, started), (PROCESS, types("Ada")), (PROCESS, types("36"))], "We talked."
    )
    await claude.follow(script)
    first, second, last = (script.heard[number] for number in range(3))
    assert first.startswith("Your name?")
    assert second.startswith("Your name? Ada\nAge?")
    assert "Ada is 36." in last
    assert "exit code 0" in last


@by_relay_only
async def test_killed_between_two_calls_and_resumed_it_is_told_of_the_end(claude: Claude) -> None:
    option, conversation_id = conversation()
    work = sleeping(6)
    thinking, killed = threading.Event(), threading.Event()

    def think() -> None:
        if first.heard:
            thinking.set()
            killed.wait(40)

    calls: list[tuple[str, Arguments]] = [
        (EXEC, {"command": f"{work}; exit 3", "wait_s": 0.2}),
        (PROCESS, waits(45)),
    ]
    first = Script(calls, "Never said.", at_each_step=think)
    async with claude.following(first, option, conversation_id) as process:
        with anyio.fail_after(40):
            while not thinking.is_set():
                await anyio.sleep(0.02)
        process.kill()
        await process.wait()
        killed.set()
        assert running(work)
    await gone(work)
    resumed = Script([(EXEC, {"command": "true"}), (EXEC, {"command": "true"})], "Good.")
    await claude.follow(resumed, "--resume", conversation_id)
    name = name_of(first.heard[0])
    assert re.search(
        rf"\[{name} \({work}; exit 3\) ended with exit code 3 after ", resumed.heard[0]
    )
    assert name not in resumed.heard[1]


@by_relay_only
async def test_work_that_outlasts_its_patience_is_finished_and_told(
    home: Home, npm_cache: Path
) -> None:
    claude = await claude_in(home, npm_cache)
    impatient = Claude(
        claude.programs, claude.project, claude.home, {**claude.more, "MCP_TOOL_TIMEOUT": "3000"}
    )
    work = sleeping(7)
    look = (EXEC, {"command": "for n in $(seq 20); do [ -e done ] && break; sleep 0.1; done"})
    start = (EXEC, {"command": f"{work}; echo finished > done"})
    then = (READ, {"path": "done"}), (EXEC, {"command": "true"})
    script = Script([start, look, look, look, *then], "It is done.")
    await impatient.follow(script)
    assert "timed out after 3s" in script.heard[0]
    assert script.heard[4].startswith("     1\tfinished")
    said = "\n".join(script.heard.values())
    assert len(re.findall(rf"\[p\d+-\w+ \({work}; .*\) ended with exit code 0", said)) == 1


async def escape(process: Process) -> None:
    """What an application around the program sends when its user presses Escape."""
    request = {"type": "control_request", "request_id": "1", "request": {"subtype": "interrupt"}}
    assert process.stdin
    await process.stdin.send(json.dumps(request).encode() + b"\n")


async def say(process: Process, words: str) -> None:
    message = {"type": "user", "message": {"role": "user", "content": words}}
    assert process.stdin
    await process.stdin.send(json.dumps(message).encode() + b"\n")


@by_relay_only
async def test_an_interruption_leaves_nothing_running_and_the_conversation_goes_on(
    claude: Claude,
) -> None:
    work = sleeping(3000)
    calls = [(EXEC, {"command": f"{work} & {work}"}), (PROCESS, {"action": "list"})]
    script = Script(calls, "Stopped.")
    async with claude.following(script, spoken_to=True) as process:
        await say(process, "go")
        await begun(work)
        await escape(process)
        await gone(work)
        await say(process, "what runs?")
        with anyio.fail_after(40):
            while 1 not in script.heard:
                await anyio.sleep(0.02)
    assert "running" not in script.heard[1]


async def test_ended_by_a_signal_in_the_middle_it_leaves_nothing_running(
    home: Home, claude: Claude
) -> None:
    work = sleeping(3000)
    async with claude.following(
        Script([(EXEC, {"command": f"{work} & {work}"})], "No.")
    ) as process:
        await begun(work)
        process.send_signal(signal.SIGINT)
        await gone(work)
        with anyio.fail_after(15):
            while (await home.chats())[0]["busy"]:
                await anyio.sleep(0.02)
