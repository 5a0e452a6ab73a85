"""Runs of an agent: how they begin, what is heard of them, and that nothing is left of them.

A program of the tests stands in for Claude: it does what its prompt says, in Python.
"""

import hashlib
import json
import re
import resource
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread

from mcp_sandbox.agents.assistants import read_assistant
from mcp_sandbox.agents.events import (
    Completion,
    Event,
    Notice,
    Progress,
    Started,
    Text,
    Unknown,
    Usage,
)
from mcp_sandbox.agents.executors.base import ModelAccess
from mcp_sandbox.agents.executors.claude import Claude
from mcp_sandbox.agents.hooks import Context, HookMemory, Hooks, Messages
from mcp_sandbox.agents.run import Agent, Tell
from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import LimitsConfig
from mcp_sandbox.errors import Busy, CommandFailed, Draining, InvalidArgument, Unsupported
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import ChatRecords, UseTimes, system_clock
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.conftest import configured
from tests.e2e.attacks import on_the_host_kernel
from tests.e2e.endurance.places import Place

pytestmark = on_the_host_kernel
PROGRAM = """#!/usr/bin/env python3
import json, os, subprocess, sys, time

def say(**line):
    print(json.dumps(line), flush=True)

def talk(text):
    delta = {"type": "text_delta", "text": text}
    say(type="stream_event", parent_tool_use_id=None, event={"delta": delta})

def end(result="done", **more):
    usage = {"input_tokens": 1, "output_tokens": 2}
    line = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 1}
    say(**{**line, "result": result, "usage": usage, **more})

given = json.loads(sys.stdin.readline())["message"]["content"]
exec(given[-1]["text"])
"""
PLAIN = read_assistant([], "", "local")
ENDLESS = (
    "subprocess.Popen(['setsid', 'sleep', '4321']); talk('so far'); say(type='x'); time.sleep(99)"
)


def asked(code: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [*before, {"role": "user", "content": code}]


@pytest.fixture(scope="module")
def data(backend_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(backend_name)


@pytest.fixture(scope="module")
async def manager(backend_name: str, data: Path) -> AsyncGenerator[SessionManager]:
    limits = {"limits": LimitsConfig(memory=400 << 20)}
    async with open_manager(configured(backend_name, data).model_copy(update=limits)) as opened:
        yield opened


@pytest.fixture
async def session(manager: SessionManager) -> Session:
    session = await manager.session(ChatId("tester", "agents"))
    await session.exec("find /workspace /home/sandbox -mindepth 1 -delete")
    await prepared(session)
    return session


async def prepared(session: Session) -> None:
    """Put the program where it is found as Claude."""
    await session.write_file("/home/sandbox/.local/bin/claude", PROGRAM)
    await session.exec("chmod +x ~/.local/bin/claude", check=True)


WAYS = iter(range(1000))


@asynccontextmanager
async def no_way(_tell: Tell) -> AsyncGenerator[ModelAccess]:
    """The program of the tests asks no model."""
    usage = partial(Usage, 5, 2, 7)
    yield ModelAccess("http://127.0.0.1:9", f"token-{next(WAYS)}", "test-model", usage=usage)


@asynccontextmanager
async def working(
    session: Session,
    arguments: dict[str, Any] | None = None,
    *,
    timeout_s: float = 30,
    **more: Any,
) -> AsyncGenerator[Agent]:
    make = partial(Claude.read, arguments or {}, "the arguments")
    agent = Agent(session.chat, session, PLAIN, make, no_way, timeout_s, **more)
    async with agent.opened():
        yield agent


async def all_of(events: AsyncIterator[Event]) -> tuple[list[Event], Completion]:
    *before, last = [event async for event in events]
    assert isinstance(last, Completion)
    assert not any(isinstance(event, Completion) for event in before)
    return before, last


async def assert_nothing_is_left(session: Session) -> None:
    left = await session.exec("pgrep -f 'sleep 4321|bin/claude'; ls -d /tmp/mcp-sandbox-run-*")
    assert left.stdout == ""


async def test_what_happens_is_told_in_its_order_and_the_result_comes_last(
    session: Session,
) -> None:
    async with working(session) as agent:
        code = "say(type='system', subtype='init', session_id='s', model='m'); talk('a'); end()"
        events, completion = await all_of(agent.stream(asked(code)))
        assert events == [Started("s", "m"), Text("a", partial=True)]
        assert (completion.content, completion.is_error, completion.usage.total) == (
            "done",
            False,
            7,
        )
        again = await agent.execute(asked("end('again')"))
        assert 0 < again.duration_ms < 20_000
        assert replace(again, duration_ms=0) == Completion("again", usage=completion.usage, turns=1)
    await assert_nothing_is_left(session)


@pytest.mark.parametrize(
    ("said", "cost"),
    [("0.25", 0.25), ("-5", None), ("float('inf')", None), ("float('nan')", None), ("None", None)],
)
async def test_who_writes_the_program_does_not_write_the_bill(
    session: Session, said: str, cost: float | None
) -> None:
    """Tokens and time are the host's own count."""
    lies = "usage={'input_tokens': -5, 'output_tokens': 10**30}, num_turns=-3, duration_ms=-9"
    async with working(session) as agent:
        last = await agent.execute(asked(f"end(total_cost_usd={said}, {lies})"))
    assert (last.content, last.usage, last.cost_usd) == ("done", Usage(5, 2, 7), cost)
    assert last.turns == 0
    assert last.duration_ms > 0


async def test_a_request_goes_in_by_file_and_stdin_and_by_no_argument(session: Session) -> None:
    code = (
        "folder = os.path.dirname(sys.argv[sys.argv.index('--system-prompt-file') + 1]);"
        "system = open(folder + '/system.md').read();"
        "mode = oct(os.stat(folder).st_mode & 0o777);"
        "end(json.dumps([sys.argv[1:], system, mode, given, dict(os.environ)]))"
    )
    before = (
        {"role": "system", "content": "Be brief. " * 40_000},
        {"role": "user", "content": "hello " * 200_000},
        {"role": "assistant", "content": "hi"},
    )
    arguments = {"max_turns": 20.0, "allowed_tools": ["Bash(git *)", "Read"]}
    async with working(session, arguments) as agent:
        completion = await agent.execute(asked(code, *before))
    argv, system, mode, given, environment = json.loads(completion.content)
    assert system == before[0]["content"]
    assert mode == "0o700"
    starts = ("## ", "[user]: h", "[assistan")
    turns = [block["text"] for block in given[:-1]]
    assert all(turn.startswith(start) for turn, start in zip(turns, starts, strict=True))
    assert sum(map(len, argv)) < 700
    assert argv[argv.index("--max-turns") + 1] == "20"
    assert argv[argv.index("--model") + 1] == "test-model"
    allowed = argv.index("--allowed-tools")
    assert argv[allowed + 1 : allowed + 3] == ["Bash(git *)", "Read"]
    assert argv[-2:] == ["WebSearch", "WebFetch"]
    assert argv[argv.index("--permission-mode") + 1] == "bypassPermissions"
    assert "--mcp-config" not in argv
    assert environment["ANTHROPIC_API_KEY"].startswith("token-")
    await assert_nothing_is_left(session)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "talk('so'); talk(' far'); sys.exit('no such model')",
            "exit: .*code 1 .*; it said: no such model",
        ),
        ("talk('so far')", "exit: .*exit code 0 and without a result"),
        ("talk('so far'); os.kill(os.getpid(), 9)", "killed: by SIGKILL"),
        ("talk('so far'); end(is_error=True, terminal_reason='api_error')", "api_error: done"),
    ],
)
async def test_a_run_that_fails_says_why_and_what_there_was(
    session: Session, code: str, reason: str
) -> None:
    async with working(session) as agent:
        _, completion = await all_of(agent.stream(asked(code)))
    assert completion.is_error
    assert completion.content == ("done" if "end(" in code else "so far")
    assert re.match(reason, completion.reason, re.DOTALL)


async def test_a_run_ends_with_its_time_limit_and_tells_what_there_was(session: Session) -> None:
    began = anyio.current_time()
    async with working(session, timeout_s=1) as agent:
        completion = await agent.execute(asked(ENDLESS))
    assert 1 <= anyio.current_time() - began < 5
    assert completion.content == "so far"
    assert completion.reason.startswith("timeout: ")
    await assert_nothing_is_left(session)


async def test_the_tree_is_dead_before_a_cancelled_caller_goes_on(session: Session) -> None:
    async with working(session) as agent:
        with anyio.CancelScope() as scope:
            async for event in agent.stream(asked(ENDLESS)):
                if isinstance(event, Unknown):
                    scope.cancel()
        await assert_nothing_is_left(session)
        assert (await agent.execute(asked("end()"))).content == "done"


async def test_who_stops_listening_ends_the_run(session: Session) -> None:
    async with working(session) as agent:
        async with aclosing(agent.stream(asked(ENDLESS))) as events:
            assert await anext(events) == Text("so far", partial=True)
        await assert_nothing_is_left(session)


async def test_a_closed_agent_has_ended_its_runs_and_begins_none(session: Session) -> None:
    async with working(session) as agent:
        events = agent.stream(asked(ENDLESS))
        assert await anext(events) == Text("so far", partial=True)
        await agent.close()
        await assert_nothing_is_left(session)
        with pytest.raises(Draining, match="open it again"):
            await agent.execute(asked("end()"))
        with pytest.raises(Draining, match="closed during the run"):
            [event async for event in events]


async def test_an_error_of_the_callers_own_reaches_it_as_it_is(session: Session) -> None:
    async def fail() -> None:
        async with working(session) as agent:
            async for _ in agent.stream(asked(ENDLESS)):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail()
    await assert_nothing_is_left(session)


async def test_two_runs_at_once_have_folders_and_tokens_of_their_own(session: Session) -> None:
    code = (
        "time.sleep(0.2); folder = os.path.dirname(sys.argv[sys.argv.index('--system-prompt-file')"
        " + 1]); end(json.dumps([folder, os.environ['ANTHROPIC_API_KEY'], given[-1]['text'][-2:]]))"
    )
    said: dict[str, list[str]] = {}

    async def run(agent: Agent, mark: str) -> None:
        system = {"role": "system", "content": mark}
        completion = await agent.execute(asked(f"{code} # {mark}", system))
        said[mark] = json.loads(completion.content)

    async with working(session) as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(run, agent, "a")
        tasks.start_soon(run, agent, "b")
    assert [said[mark][2] for mark in "ab"] == [" a", " b"]
    assert said["a"][0] != said["b"][0]
    assert said["a"][1] != said["b"][1]
    await assert_nothing_is_left(session)


async def test_a_conversation_goes_on_by_its_record_or_begins_anew_and_says_so(
    session: Session,
) -> None:
    code = (
        "home = os.path.expanduser('~/.claude/projects/-workspace');"
        "os.makedirs(home, exist_ok=True);"
        "name = [a for a in ('--resume', '--session-id') if a in sys.argv][0];"
        "id = sys.argv[sys.argv.index(name) + 1]; open(home + '/' + id + '.jsonl', 'w');"
        "end(json.dumps([name, id, len(given)]))"
    )
    before = ({"role": "user", "content": "earlier"}, {"role": "assistant", "content": "yes"})
    async with working(session) as agent:
        news, first = await all_of(agent.stream(asked(code, *before), resume=True))
        silence, second = await all_of(agent.stream(asked(code, *before), resume=True))
    (notice,) = news
    assert isinstance(notice, Notice)
    assert "begins anew" in notice.text
    assert silence == []
    begun, went_on = json.loads(first.content), json.loads(second.content)
    assert (begun[0], begun[2]) == ("--session-id", 4)
    assert (went_on[0], went_on[2]) == ("--resume", 1)
    assert begun[1] == went_on[1]


async def test_one_run_of_all_servers_goes_on_with_a_conversation(
    session: Session, data: Path
) -> None:
    # As each process has them.
    mine, others = (
        HookMemory(UseTimes(ChatRecords(data), system_clock), session.chat) for _ in range(2)
    )
    async with working(session, memory=mine) as agent, working(session, memory=others) as other:
        async with aclosing(agent.stream(asked(ENDLESS), resume=True)) as on:
            assert isinstance(await anext(on), Notice)
            for each in (agent, other):
                with pytest.raises(Busy, match="in use"):
                    await each.execute(asked("end()"), resume=True)
                assert (await each.execute(asked("end()"))).content == "done"
        assert (await other.execute(asked("end()"), resume=True)).content == "done"


async def test_a_run_that_is_cut_off_is_accounted_for_and_who_fails_at_it_harms_none(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    accounted: list[Completion] = []

    async def on_end(completion: Completion) -> None:
        await anyio.lowlevel.checkpoint()
        accounted.append(completion)
        raise RuntimeError("the disk is full")

    async with working(session, on_end=on_end) as agent:
        async with aclosing(agent.stream(asked(ENDLESS))) as events:
            assert await anext(events) == Text("so far", partial=True)
        (cut,) = accounted
        assert (cut.content, cut.is_error, cut.usage) == ("so far", True, Usage(5, 2, 7))
        assert cut.reason.startswith("cancelled: ")
        last = await agent.execute(asked("end()"))
        assert accounted[1:] == [last]
    assert caplog.text.count("on_end failed") == 2


async def test_the_sandbox_is_made_and_told_of_before_a_hook_has_it(session: Session) -> None:
    async def create(ctx: Context, messages: Messages, _: object) -> Messages:
        assert ctx.sandbox
        await ctx.progress((await ctx.sandbox.exec(["echo", "seen"])).strip())
        return messages

    await session.reset()
    async with working(session, hooks=Hooks(create)) as agent:
        events, _ = await all_of(agent.stream(asked("end()")))
    told = [each.text for each in events if isinstance(each, Progress)]
    assert told == ["Creating the sandbox", "Sandbox ready", "", "seen"]


async def test_what_cannot_be_asked_starts_nothing(session: Session) -> None:
    async with working(session) as agent:
        with pytest.raises(InvalidArgument, match="last message"):
            await agent.execute([])
        await session.write_file(".claude", "in the way")
        with pytest.raises(Unsupported, match="failed to prepare environment: mkdir"):
            await agent.execute(asked("open('/workspace/ran', 'w')"))
        await session.delete_file("/home/sandbox/.local/bin/claude")
        with pytest.raises(Unsupported, match="environment: there is no program claude"):
            await agent.execute(asked("end()"))
    assert (await session.list_files()).total == 1
    await assert_nothing_is_left(session)


async def test_skills_are_linked_where_nothing_of_the_users_stands(session: Session) -> None:
    async with working(session) as agent:
        await agent.execute(asked("end()"))
        assert (await agent.exec(["readlink", ".claude/skills"])) == "/opt/skills\n"
        await session.exec("rm .claude/skills; mkdir .claude/skills; echo x > .claude/skills/mine")
        await agent.execute(asked("end()"))
        assert [each.name for each in await agent.list_dir(".claude/skills")] == ["mine"]


@pytest.mark.parametrize("killed", [False, True])
async def test_a_sandbox_that_dies_under_a_run_is_told_and_the_next_has_its_files(
    session: Session, data: Path, backend_name: str, killed: bool
) -> None:
    place = Place(data, backend_name, set())
    async with working(session) as agent:
        completion = Completion("")
        async for event in agent.stream(asked(f"open('kept', 'w').write('1'); {ENDLESS}")):
            if isinstance(event, Unknown) and killed:
                assert await to_thread.run_sync(place.kill_runner, "agents")
            elif isinstance(event, Unknown):
                await session.reset()
            elif isinstance(event, Completion):
                completion = event
        assert completion.is_error
        assert completion.reason.startswith("sandbox: ")
        assert (await agent.execute(asked("end(open('kept').read())"))).content == "1"


async def test_a_run_that_takes_all_memory_says_so_and_the_next_has_its_own(
    session: Session,
) -> None:
    async with working(session) as agent:
        _, completion = await all_of(agent.stream(asked("talk('so far'); bytearray(1 << 30)")))
        assert (completion.is_error, completion.content) == (True, "so far")
        assert re.search("memory: no memory was left|MemoryError", completion.reason)
        assert (await agent.execute(asked("end()"))).content == "done"


async def test_its_files_and_programs_are_those_of_the_workspace(session: Session) -> None:
    async with working(session) as agent:
        await agent.write_file("data/all.bin", bytes(range(256)) * 40_000)
        assert await agent.read_file("data/all.bin") == bytes(range(256)) * 40_000
        (found,) = await agent.list_dir("data")
        assert (found.name, found.size, found.is_dir) == ("all.bin", 256 * 40_000, False)
        assert [each.is_dir for each in await agent.list_dir()] == [True]
        assert await agent.exec(["seq", "100000"]) == "".join(f"{n}\n" for n in range(1, 100_001))
        with pytest.raises(CommandFailed, match=r"exit code 3: out.*") as failed:
            await agent.exec(["sh", "-c", "echo out >&2; exit 3"])
        assert failed.value.result.exit_code == 3
        with pytest.raises(CommandFailed, match="No such file"):
            await agent.read_file("missing")


async def test_a_line_without_an_end_is_left_out_in_little_memory(session: Session) -> None:
    code = (
        "piece = b'x' * 1_000_000; out = sys.stdout.buffer\nfor _ in range(100): out.write(piece)"
    )
    async with working(session) as agent:
        await agent.execute(asked("end()"))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        events, completion = await all_of(agent.stream(asked(f"{code}\nprint(); end()")))
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert [type(event) for event in events] == [Notice]
    assert completion.content == "done"
    assert grown_kib < 100 << 10


@pytest.mark.timeout(400)
async def test_many_small_lines_come_in_their_order_and_little_memory(
    session: Session, request: pytest.FixtureRequest
) -> None:
    lines = 2_000_000 if request.config.getoption("--whole") else 20_000
    line = '{"type": "stream_event", "event": {"delta": {"text": "%d"}}}'
    code, count = f"for n in range({lines}): print({line!r} % n)\nend()", 0
    async with working(session, timeout_s=300) as agent:
        await agent.execute(asked("end()"))
        before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async for event in agent.stream(asked(code)):
            if isinstance(event, Text):
                assert event.text == str(count)
                count += 1
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    assert isinstance(event, Completion)
    assert (count, event.content) == (lines, "done")
    assert grown_kib < 20 << 10


async def test_long_lines_come_whole_to_a_listener_that_is_slow(session: Session) -> None:
    code = (
        "import hashlib, random\nmine = hashlib.sha256()\n"
        "for n in range(8):\n"
        "    text = random.randbytes(3_000_000).hex(); mine.update(text.encode())\n"
        "    say(type='assistant', message={'content': [{'type': 'text', 'text': text}]})\n"
        "end(mine.hexdigest())"
    )
    heard, size = hashlib.sha256(), 0
    async with working(session) as agent:
        async for event in agent.stream(asked(code)):
            if isinstance(event, Text):
                await anyio.sleep(0.05)
                heard.update(event.text.encode())
                size += len(event.text)
    assert isinstance(event, Completion)
    assert (size, event.content) == (48_000_000, heard.hexdigest())
