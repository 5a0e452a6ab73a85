"""Agents of the daemon: asked for on the command line, and dead as soon as nobody wants them.

A program of the tests stands in for Claude: it does what its prompt says, in Python.
"""

import json
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import yaml
from anyio import to_thread

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import load_config
from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.models import ChatId
from tests import forked
from tests.agents.test_run import PROGRAM
from tests.daemon.running import (
    Done,
    Place,
    command,
    control,
    dialled,
    place,
    running,
)

pytestmark = [pytest.mark.bubblewrap, pytest.mark.slow]
SKILL = "---\nname: adding\ndescription: How to add.\n---\nCarry the one."


@pytest.fixture(scope="module")
async def where(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Place]:
    """A place with a program, a model service that nobody asks, and an assistant."""
    tmp_path = tmp_path_factory.mktemp("agents")
    files = {
        "programs/bin/claude": PROGRAM,
        "key": "sk-of-no-service",
        "assistants/adder/assistant.yaml": "{sandbox: {max_memory: 1g, arguments: {model: slow}}}",
        "assistants/adder/skills/adding/SKILL.md": SKILL,
        "mcp-sandbox.yaml": yaml.safe_dump(
            {
                "data_dir": "data",
                "backend": "bubblewrap",
                "agents": {"programs": "programs", "folders": ["assistants"]},
                "connectors": {
                    "near": {"url": "http://127.0.0.1:9", "key": f"file:{tmp_path}/key"}
                },
            }
        ),
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o600 if name == "key" else 0o755)
    found = place(tmp_path, more={"MCP_SANDBOX_CONFIG": str(tmp_path / "mcp-sandbox.yaml")})
    yield found
    # The daemon that a command has started.
    await command(found, "shutdown --all")


async def run(where: Place, prompt: str, *more: str) -> Done:
    return await command(where, "agent run", "--chat", "sums", prompt, *more)


@asynccontextmanager
async def talking(where: Place, number: int, *more: str) -> AsyncGenerator[forked.Program]:
    """A run that has begun to talk, and would not end; it leaves `sleep NUMBER` behind."""
    left = f"subprocess.Popen(['sleep', '{number}'], start_new_session=True)"
    code = f"{left}; talk('so far'); time.sleep(99)"
    given = where.arguments("agent run", "--chat", "sums", code, *more)
    async with forked.start(given, env=where.environment(), cwd="/") as program:
        said = b""
        while b"so far" not in said:
            said += await program.stdout.receive()
        assert alive(number)
        yield program
        if program.returncode is None:
            program.send_signal(signal.SIGINT)
            await program.wait()


def alive(number: int) -> bool:
    """Whether anything of that run is."""
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if each.read_bytes() == f"sleep\0{number}\0".encode():
                return True
        except (FileNotFoundError, ProcessLookupError):
            continue
    return False


async def dead_within(number: int, limit_s: float) -> None:
    with anyio.fail_after(limit_s):
        while alive(number):
            await anyio.sleep(0.01)


async def test_a_run_goes_through_the_daemon_which_it_starts(where: Place) -> None:
    done = await run(where, "talk('a'); end('done')")
    assert (done.code, done.out) == (0, "a\n"), done.err
    pid = (await control(where, "status"))["result"]["pid"]
    odd = "say(type='Completion', is_error=True)"
    done = await run(where, f"talk('x'); {odd}; end('y' * (17 << 20))", "--json")
    told = [json.loads(line) for line in done.out.splitlines()]
    assert [each["type"] for each in told] == ["Text", "Unknown", "Completion"]
    assert len(told[-1]["content"]) == 17 << 20
    assert (await run(where, "time.sleep(99)", "--timeout", "300ms")).code == 124
    done = await run(where, "x", "-a", "nobody")
    assert (done.code, done.out) == (1, "")
    assert "there is no assistant 'nobody'; there are adder" in done.err
    prompt = f"end(str(len({'z' * 300_000!r})))"
    done = await command(where, "agent run", "-", "--chat", "sums", "--json", stdin=prompt.encode())
    assert json.loads(done.out.splitlines()[-1])["content"] == "300000"
    assert (await control(where, "status"))["result"]["pid"] == pid


async def test_what_an_assistant_says_of_its_computer_goes_with_the_chat(where: Place) -> None:
    args = "end(' '.join(sys.argv))"
    done = await run(where, args, "-a", "adder", "--json")
    assert done.code == 0, done.err
    assert "--model slow" in done.out
    done = await run(where, args, "-a", "adder", "-c", "near/quick", "--json")
    assert "--model quick" in done.out
    rows = json.loads((await command(where, "ls", "--json")).out)
    (row,) = [each for each in rows if each["assistant"] == "adder"]
    assert row["chat"] == "sums"
    assert "adder" in (await command(where, "ls")).out
    config = (await to_thread.run_sync(load_config, where.home / "mcp-sandbox.yaml")).config
    # Another server, beside the first.
    async with open_manager(config) as manager:
        sums = await manager.session(ChatId("local", "sums"))
        report = await sums.info()
        assert report.limits["memory"].startswith("1024 MiB")
        (running,) = [each for each in await manager.list() if each.chat == sums.chat]
        assert running.sandbox_id == row["sandbox"]
        other = await manager.session(ChatId("local", "other"))
        with pytest.raises(UnknownSkill):
            await other.skills.activate("adding")
        assert "adding" not in (await other.exec("ls /opt/skills")).stdout
        assert (await other.info()).limits["memory"].startswith("2048 MiB")
        assert (await sums.exec("ls /opt/skills")).stdout == "adding\n"
    # And one after it, which makes the sandbox anew.
    assert (await command(where, "shutdown")).code == 0
    async with open_manager(config) as manager:
        sums = await manager.session(ChatId("local", "sums"))
        assert (await sums.info()).limits["memory"].startswith("1024 MiB")
        of = {each.chat.chat: each.assistant for each in await manager.list("local")}
        assert (of["sums"], of["other"]) == ("adder", "")


async def test_a_program_waits_for_a_reader_that_is_slow_and_nothing_is_lost(where: Place) -> None:
    code = "for n in range(300): talk(str(n) * 30_000); open('said', 'w').write(str(n))\nend()"
    await run(where, "end()")
    said = where.data / "sandbox" / "workspace" / "local" / "chat-sums" / "said"
    async with dialled(where) as client:
        given = {"chat": "sums", "size": len(code)}
        await client.greet(role="control", command="agent", arguments=given)
        await client.stream.send(code.encode())
        before = ""
        while not before or before != (now := said.read_text()):
            before = said.read_text() if said.exists() else ""
            await anyio.sleep(0.3)
        assert int(now) < 250
        texts = [(await client.receive())["event"].get("text", "") for _ in range(300)]
        assert texts == [str(n) * 30_000 for n in range(300)]
        assert (await client.receive())["event"]["type"] == "Completion"
        assert await client.receive() == {"result": {}}


async def test_who_interrupts_a_run_has_ended_it(where: Place) -> None:
    async with talking(where, 4321001) as program:
        program.send_signal(signal.SIGINT)
        with anyio.fail_after(10):
            assert await program.wait() == 1
        assert not alive(4321001)
    async with talking(where, 4321002) as program:
        program.kill()
        await dead_within(4321002, 5)
    assert (await run(where, "end()")).code == 0


async def test_a_run_dies_with_the_daemon_and_is_gone_on_with(where: Place) -> None:
    async with talking(where, 4321003, "--resume") as program:
        os.kill((await control(where, "status"))["result"]["pid"], signal.SIGKILL)
        await dead_within(4321003, 1)
        assert await program.wait() == 3
    done = await run(where, "end('on')", "--resume", "--json")
    assert (done.code, json.loads(done.out.splitlines()[-1])["content"]) == (0, "on"), done.err


RECORDED = (
    "name = [each for each in ('--resume', '--session-id') if each in sys.argv][0];"
    "id = sys.argv[sys.argv.index(name) + 1]; at = os.path.expanduser('~/.claude/projects/-p');"
    "os.makedirs(at, exist_ok=True); open(f'{at}/{id}.jsonl', 'a'); end(f'{name} {id}')"
)


async def test_what_is_resumed_is_the_last_run_of_the_chat_by_the_same_assistant(
    where: Place,
) -> None:
    async def record(*more: str) -> tuple[str, str]:
        done = await command(where, "agent run --json --chat told", RECORDED, *more)
        name, _, record = json.loads(done.out.splitlines()[-1])["content"].partition(" ")
        return name, record

    (_, first), (began, second) = await record(), await record()
    assert began == "--session-id"
    assert first != second
    await record("-a", "adder")
    assert await record("--resume") == ("--resume", second)
    begun = await record("--resume", "-a", "adder")
    assert begun[0] == "--resume"
    assert begun[1] not in (first, second)


async def test_neither_a_check_nor_a_run_that_cannot_begin_leaves_a_daemon_or_a_chat(
    where: Place,
) -> None:
    await command(where, "shutdown")
    begun = await command(where, "agent run", "x", "-a", "no-such")
    assert (begun.code, "no-such" in begun.err) == (1, True)
    assert (await command(where, "status")).code == 3
    done = await command(where, "agent check", "adder", asks=False)
    assert (done.code, done.out) == (1, "")
    # It was asked for its version, which it does not know.
    assert "['claude', '--version']" in done.err
    assert (await command(where, "status")).code == 3
    chats = json.loads((await command(where, "ls", "--json", asks=False)).out)
    assert not {"check", "demo"} & {each["chat"] for each in chats}


async def test_a_conversation_is_of_one_run_at_a_time(where: Place) -> None:
    async with talking(where, 4321004, "--resume"):
        done = await run(where, "end()", "--resume")
        assert (done.code, done.out) == (1, "")
        assert "in use by another run" in done.err
        assert (await run(where, "end()")).code == 0
    assert (await run(where, "end()", "--resume")).code == 0


async def test_a_daemon_that_ends_says_so_to_who_waits_for_a_run(where: Place) -> None:
    await command(where, "shutdown")
    async with running(where) as daemon, talking(where, 4321005) as program:
        daemon.process.terminate()
        await daemon.noted("the daemon ends: signal")
        # Now, and not after the time that is left to what runs.
        daemon.process.terminate()
        said = b""
        async for data in program.stderr:
            said += data
        assert b"error: the daemon ended, and the run with it" in said
        assert await program.wait() == 3
        assert not alive(4321005)
