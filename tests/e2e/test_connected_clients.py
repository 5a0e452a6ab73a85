"""Clients that find the server by the file that `init` wrote, by relay and over HTTP."""

import json
import os
import random
import threading
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.claude import Claude, consent
from tests.e2e.connected import Home, by_http, by_relay
from tests.e2e.messages_api import Script

BY_RELAY = [
    pytest.param((by_relay, "bubblewrap"), marks=BUBBLEWRAP.marks, id="relay-bubblewrap"),
    pytest.param((by_relay, "docker"), marks=DOCKER.marks, id="relay-docker"),
]
BY_HTTP = [pytest.param((by_http, "bubblewrap"), marks=BUBBLEWRAP.marks, id="http-bubblewrap")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
for_claude = pytest.mark.claude


@pytest.fixture(params=[*BY_RELAY, *BY_HTTP])
async def home(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Home]:
    reach, backend = request.param
    async with reach(tmp_path, backend) as found:
        yield found


by_relay_only = pytest.mark.parametrize("home", BY_RELAY, indirect=True)
by_http_only = pytest.mark.parametrize("home", BY_HTTP, indirect=True)


@pytest.mark.inspector
@pytest.mark.parametrize("era", [pytest.param("legacy", marks=pytest.mark.whole), "modern"])
async def test_the_inspector_finds_the_server_by_the_command_that_init_prints(
    era: str, home: Home, npm_cache: Path
) -> None:
    told = (await home.init("inspector", home.place.home)).split("`")[1]
    programs = npm.installed("inspector", npm_cache)
    package = npm.PACKAGES["inspector"]
    assert told.startswith(f"npx {package} ")
    installed = f"{programs / 'node'} {programs / 'mcp-inspector'} "
    shell = told.replace(f"npx {package} ", installed) + ' "$@"'
    options = ["--format", "json", "-q", "--protocol-era", era, "--method", "tools/call"]
    options += ["--tool-name", "run_code", "--tool-args-json", json.dumps({"code": "print(6 * 7)"})]
    with anyio.fail_after(50):
        done = await anyio.run_process(
            ["sh", "-c", shell, "sh", *options], env=home.variables, check=False
        )
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    assert json.loads(done.stdout)["result"]["content"][0]["text"] == "42\n"
    assert [chat["chat"] for chat in await home.chats()] == ["inspector"]


async def claude_in(home: Home, npm_cache: Path, project: str = "project") -> Claude:
    folder = home.place.home / project
    if not folder.exists():
        folder.mkdir()
        await home.init("claude", folder)
        consent(folder)
    programs = npm.installed("claude", npm_cache)
    return Claude(programs, folder, home.place.home, home.variables)


def script(*commands: str) -> Script:
    """A conversation in which these commands are run."""
    return Script([("mcp__sandbox__exec", {"command": each}) for each in commands], "Done.")


def said(script: Script) -> list[str]:
    """The first line of what each command printed."""
    return [script.heard[number].split("\n")[0] for number in sorted(script.heard)]


def conversation() -> tuple[str, str]:
    """Options that begin a conversation, with an id that can be resumed."""
    return "--session-id", str(uuid.uuid4())


SHOW = "cat note || echo none"


@for_claude
@by_relay_only
async def test_a_conversation_has_its_own_files_and_finds_them_when_resumed(
    home: Home, npm_cache: Path
) -> None:
    claude = await claude_in(home, npm_cache)
    option, first = conversation()
    begun = script("echo first > note", SHOW)
    await claude.follow(begun, option, first)
    other, resumed = script(SHOW, "echo other > note"), script(SHOW)
    await claude.follow(other)
    await claude.follow(resumed, "--resume", first)
    assert [said(begun)[1], said(other)[0], said(resumed)[0]] == ["first", "none", "first"]
    chats = await home.chats()
    assert len(chats) == 2
    assert first in [chat["chat"] for chat in chats]


@for_claude
@by_http_only
async def test_over_http_a_project_of_a_user_has_its_own_files(home: Home, npm_cache: Path) -> None:
    claude = await claude_in(home, npm_cache)
    begun, again, elsewhere, others = script("echo first > note"), *(script(SHOW) for _ in "123")
    await claude.follow(begun)
    ben = await claude_in(await home.of_user("ben"), npm_cache)
    neighbour = await claude_in(home, npm_cache, "another")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(claude.follow, again)
        tasks.start_soon(neighbour.follow, elsewhere)
        tasks.start_soon(ben.follow, others)
    assert [said(each)[0] for each in (again, elsewhere, others)] == ["first", "none", "none"]
    assert sorted(chat["user"] for chat in await home.chats()) == ["ann", "ann", "ben"]


@for_claude
async def test_two_at_once_do_not_see_each_other(home: Home, npm_cache: Path) -> None:
    names = ["one", "two"]
    # Over HTTP a project is a chat, so there it takes two projects.
    folders = names if home.served else ["project", "project"]
    step = threading.Barrier(2, timeout=40)
    scripts = [
        Script(script(f"echo {name} > note", "ls", SHOW).calls, "Done.", at_each_step=step.wait)
        for name in names
    ]
    claudes = [await claude_in(home, npm_cache, folder) for folder in folders]
    async with anyio.create_task_group() as tasks:
        for claude, each in zip(claudes, scripts, strict=True):
            tasks.start_soon(claude.follow, each)
    assert [said(each)[1:] for each in scripts] == [["note", "one"], ["note", "two"]]
    assert len(await home.chats()) == 2


@for_claude
async def test_killed_in_the_middle_of_a_call_it_leaves_nothing_running(
    home: Home, npm_cache: Path
) -> None:
    claude = await claude_in(home, npm_cache)
    option, first = conversation()
    long = f"sleep 3000.{random.randrange(10**9)}"
    async with claude.following(script(f"echo kept > note; {long}"), option, first) as process:
        with anyio.fail_after(40):
            while not running(long):
                await anyio.sleep(0.02)
            assert [chat["busy"] for chat in await home.chats()] == [1]
        process.kill()
        with anyio.fail_after(15):
            while running(long):
                await anyio.sleep(0.02)
            while (await home.chats())[0]["busy"]:
                await anyio.sleep(0.02)
    following, resumed = script("echo fine"), script(SHOW)
    await claude.follow(following)
    await claude.follow(resumed, "--resume", first)
    assert said(following) == ["fine"]
    assert said(resumed) == ["kept"]


def running(command: str) -> bool:
    """Whether a process on this machine, be it in a sandbox, runs exactly this command."""
    wanted = command.replace(" ", "\0").encode() + b"\0"
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if Path("/proc", pid, "cmdline").read_bytes() == wanted:
                return True
        except OSError:
            continue  # It has ended meanwhile.
    return False
