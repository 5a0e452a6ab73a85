"""Programs on a terminal, which they ask and draw on."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from mcp_sandbox.errors import Busy, InvalidArgument
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Process, Session


@pytest.fixture
def manager(lasting: SessionManager) -> SessionManager:
    return lasting


@pytest.fixture
def session(emptied: Session) -> Session:
    return emptied


# What gVisor's terminals do not do: end a line by ctrl-d, and say that nobody reads.
NOT_ON_GVISOR = {
    "test_keys_arrive_as_programs_expect_them",
    "test_what_is_typed_ends_by_its_key",
    "test_nothing_breaks_when_nobody_reads_what_is_typed",
    "test_who_gives_up_while_typing_leaves_the_program_alone",
}


@pytest.fixture(autouse=True)
def able(request: pytest.FixtureRequest, backend_name: str) -> None:
    if backend_name == "docker-runsc" and request.node.originalname in NOT_ON_GVISOR:
        pytest.skip("gVisor's terminals cannot do that")


@asynccontextmanager
async def on_terminal(session: Session, command: str, until: str) -> AsyncGenerator[Process]:
    """A command on a terminal that has printed this, as a pattern that it does not hold itself."""
    async with session.processes.start(command, tty=True) as process:
        assert (await process.wait(until=until)).until_met
        yield process


async def test_a_command_has_a_terminal_of_its_own(session: Session) -> None:
    look = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; stty size; tput cols; echo $TERM; exit 3"
    result = await session.exec(look, tty=True)
    assert result.stdout == "all\r\n30 100\r\n100\r\nxterm-256color\r\n"
    assert result.exit_code == 3


async def test_a_program_with_its_arguments_has_one_too(session: Session) -> None:
    assert (await session.exec(["stty", "size"], tty=True)).stdout == "30 100\r\n"


async def test_what_is_for_unwatched_commands_is_not_set_on_a_terminal(session: Session) -> None:
    told = "echo $TERM,$PAGER,$GIT_EDITOR,$PYTHON_BASIC_REPL"
    assert (await session.exec(told)).stdout == "dumb,cat,true,\n"
    assert (await session.exec(told, tty=True)).stdout == "xterm-256color,,,1\r\n"
    given = await session.exec(told, tty=True, env={"TERM": "vt100"})
    assert given.stdout == "vt100,,,1\r\n"


async def test_a_terminal_takes_no_stdin_and_no_shell(session: Session) -> None:
    with pytest.raises(InvalidArgument, match="no stdin and no shell"):
        await session.exec("cat", tty=True, stdin="given")
    with pytest.raises(InvalidArgument, match="no stdin and no shell"):
        await session.exec("cd /tmp", tty=True, shell="build")


async def test_a_program_that_floods_its_terminal_is_seen_to_its_end(session: Session) -> None:
    result = await session.exec("seq 300000; echo the end", tty=True)
    assert result.stdout.startswith("1\r\n2\r\n")
    assert result.stdout.endswith("\r\n300000\r\nthe end\r\n")
    assert result.stdout_bytes == len("".join(f"{n}\r\n" for n in range(1, 300_001))) + 9


async def test_a_command_on_a_terminal_that_runs_too_long_is_killed_with_its_tree(
    session: Session,
) -> None:
    result = await session.exec("echo begun; sleep 987 & sleep 987", tty=True, timeout_s=1)
    assert result.timed_out
    assert result.stdout == "begun\r\n"
    running = await session.exec("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert "sleep 987" not in running.stdout


async def test_what_closes_its_terminal_runs_on_to_its_end(session: Session) -> None:
    closing = "echo seen; exec <&- >&- 2>&-; sleep 0.2; echo done > file"
    result = await session.exec(closing, tty=True)
    assert (result.stdout, result.exit_code) == ("seen\r\n", 0)
    assert (await session.exec("cat file")).stdout == "done\n"


async def test_what_a_terminal_leaves_running_writes_to_nobody(session: Session) -> None:
    left = "(trap '' HUP; while echo more; do sleep 0.01; done) & sleep 0.05; echo left"
    result = await session.exec(left, tty=True)
    assert "left\r\n" in result.stdout
    assert (await session.exec("echo works", tty=True)).stdout == "works\r\n"


async def test_a_terminal_controls_its_session(session: Session) -> None:
    # gVisor has no /dev/tty; what it knows is whose terminal this is.
    look = "import os; print(os.tcgetpgrp(0) == os.getpgrp(), os.getsid(0) == os.getppid())"
    result = await session.exec(f"python3 -c '{look}'; true", tty=True)
    assert result.stdout == "True True\r\n"


async def test_a_dialogue_is_led_with_a_program_that_asks(session: Session) -> None:
    async with on_terminal(session, "python3 -q", ">>> ") as python:
        answer = await python.type("6 * 7", "enter")
        assert answer.running
        assert answer.of == "terminal"
        assert answer.stdout == "6 * 7\r\n42\r\n>>> "
        await python.type("for n in range(2): print('n is', n + 4)\n", "enter")
        both = await session.processes.wait(python.id, wait_s=0, whole=True)
        assert "42\r\n" in both.stdout
        assert "n is 4\r\nn is 5\r\n" in both.stdout
        # What a screen shows is no news: once it draws, each answer has all that is held.
        drawn = await python.type(r"print('\033[2Jnew', end='\033[3;1H')", "enter")
        assert drawn.of == "screen"
        assert drawn.stdout.startswith(both.stdout)
        assert (await python.type("exit(5)", "enter")).exit_code == 5


@pytest.mark.parametrize("tty", [False, True])
@pytest.mark.parametrize(
    ("printed", "until"),
    [
        (r"\033[32m➜\033[39m  \033[1mLocal\033[22m:   http://x", "➜  Local:   http://x"),
        (r"one\r\ntwo", "one\ntwo"),
        (r"\033]0;a title\a\033[2K\033[1Grea\033[K\033(Bdy", "ready"),
        (r"\033]8;;http://x\033\\link\033]8;;\033\\ is up", "link is up"),
        (r"r\bread_\by", "ready"),
    ],
)
async def test_a_text_is_found_as_it_is_shown(
    session: Session, printed: str, until: str, tty: bool
) -> None:
    begun = await session.exec(f"printf '{printed}'; exec sleep 86325", tty=tty, until=until)
    assert begun.until_met
    await session.processes.stop(begun.process or "", "KILL")


async def test_an_answer_to_input_has_what_comes_behind_the_echo(session: Session) -> None:
    asks = "read -r word; sleep 0.5; echo got $word; read -rs word; sleep 0.5; echo now ${word^^}"
    async with on_terminal(session, f"echo re''ady; {asks}; cat", "ready") as asking:
        first = await asking.type("a word", "enter", until="word")
        assert first.stdout.endswith("a word\r\ngot a word\r\n")
        assert (await asking.type("done", "enter", until="now DONE")).until_met
        kept = await session.processes.wait(
            asking.id, typed=("word", None), wait_s=0.1, until="none"
        )
        assert (kept.running, kept.until_met) == (True, False)


async def test_a_word_is_asked_for_without_an_echo(session: Session) -> None:
    asks = "read -rsp 'Pass''word: ' word; echo; echo got ${#word}"
    async with on_terminal(session, asks, "Password: ") as asking:
        ended = await asking.type("secret", "enter")
    assert ended.stdout == "\r\ngot 6\r\n"


async def test_keys_arrive_as_programs_expect_them(session: Session) -> None:
    await session.write_file(
        "keys.py",
        "import os, tty\ntty.setraw(0, 0)\nprint('ready', end='', flush=True)\n"
        "while (keys := os.read(0, 999)) != b'q': print(keys.hex(), end='', flush=True)\n",
    )
    plain = {"Enter": b"\r", "tab": b"\t", "esc": b"\x1b", "backspace": b"\x7f", "SPACE": b" "}
    arrows = {"up": b"\x1bOA", "arrow_down": b"\x1bOB", "Left": b"\x1bOD", "RightArrow": b"\x1bOC"}
    pages = {"page-up": b"\x1b[5~", "PageDown": b"\x1b[6~", "home": b"\x1bOH", "<End>": b"\x1bOF"}
    functions = {"F1": b"\x1bOP", "f5": b"\x1b[15~", "f10": b"\x1b[21~", "F12": b"\x1b[24~"}
    controls = {
        "ctrl-c": b"\x03",
        "Ctrl+D": b"\x04",
        "^Z": b"\x1a",
        "C-a": b"\x01",
        "ctrl \\": b"\x1c",
    }
    sent = {**plain, **arrows, **pages, **functions, **controls, "Del": b"\x1b[3~"}
    async with on_terminal(session, "python3 keys.py", "ready") as keys:
        async with anyio.create_task_group() as tasks:
            for key in sent:
                tasks.start_soon(keys.type, "", key)
        shown = await session.processes.wait(keys.id, wait_s=0, whole=True)
        read = bytes.fromhex(shown.stdout.removeprefix("ready"))
        pressed = re.findall(rb"(?s)\x1b(?:O.|\[\d+~)|.", read)
        assert sorted(pressed) == sorted(sent.values())
        shown = await keys.type("\u00e9\n", "enter")
        assert shown.stdout.endswith("c3a90d0d")
        assert (await keys.type("q")).exit_code == 0


async def test_a_program_is_interrupted_by_its_key(session: Session) -> None:
    async with on_terminal(session, "echo re''ady; exec sleep 86320", "ready") as sleeping:
        with pytest.raises(InvalidArgument, match=r"no key 'any': give one of enter, .*, ctrl-a, "):
            await sleeping.type(key="any")
        ended = await sleeping.type(key="^C")
    assert (ended.signal, ended.running) == ("SIGINT", False)


async def test_what_is_typed_ends_by_its_key(session: Session) -> None:
    async with on_terminal(session, "echo re''ady; cat > given", "ready") as reading:
        assert (await reading.type("one\ntwo\n")).running
        assert (await reading.type(key="ctrl-d")).exit_code == 0
    assert (await session.exec("cat given")).stdout == "one\ntwo\n"


async def test_a_flood_is_interrupted(session: Session) -> None:
    async with on_terminal(session, "exec yes 'a flo''od'", "a flood") as flood:
        ended = await flood.type(key="ctrl-c")
        assert ended.signal == "SIGINT"
        whole = await session.processes.wait(flood.id, whole=True)
        assert whole.stdout.count("a flood") > 5


@pytest.mark.slow
async def test_who_types_is_answered_though_the_screen_never_rests(session: Session) -> None:
    async with on_terminal(session, "while echo mo''re; do sleep 0.1; done", "more") as restless:
        began = anyio.current_time()
        assert (await restless.type("x")).running
        assert 4.5 < anyio.current_time() - began < 8


async def test_lines_arrive_as_given_where_they_are_edited(session: Session) -> None:
    async with on_terminal(session, "bash --norc -i", "$ ") as bash:
        await bash.type("cat > given <<'END'\n\tone\n\t\ttwo\nEND\n")
        assert (await bash.type("cat given\n\texit 7\n")).exit_code == 7
    assert (await session.exec("cat given")).stdout == "\tone\n\t\ttwo\n"


async def test_an_editor_writes_what_was_typed(session: Session) -> None:
    editor = (await session.exec("command -v vim vi nano | head -n 1")).stdout.strip()
    if "vi" not in editor:
        pytest.skip("there is no vi")
    async with on_terminal(session, f"{editor} -u NONE file", "file") as vi:
        await vi.type("ione two\nthree", "escape")
        await vi.type("kdd")
        assert (await vi.type(":wq", "enter")).exit_code == 0
    assert (await session.exec("cat file")).stdout == "three\n"


async def test_only_what_has_a_terminal_and_runs_can_be_typed_to(session: Session) -> None:
    async with session.processes.start("sleep 86321") as deaf:
        with pytest.raises(InvalidArgument, match=f"{deaf.id} has no terminal.*exec tty=true"):
            await deaf.type("x")
        (row,) = [row for row in await session.processes.list() if row.id == deaf.id]
        assert row.of == ""
    async with on_terminal(session, "echo re''ady; sleep 86322", "ready") as stopped:
        (row,) = [row for row in await session.processes.list() if row.id == stopped.id]
        assert row.of == "terminal"
        await stopped.stop("KILL")
        with pytest.raises(InvalidArgument, match=f"{stopped.id} has ended"):
            await stopped.type("x")


async def test_nothing_breaks_when_nobody_reads_what_is_typed(session: Session) -> None:
    closing = "echo re''ady; exec <&- >&- 2>&-; sleep 86323"
    raw = "stty raw -echo; echo re''ady; exec sleep 86324"
    async with (
        on_terminal(session, closing, "ready") as closed,
        on_terminal(session, raw, "ready") as busy,
    ):
        for _ in range(3):
            await closed.type("x" * 1000, "enter")
        await busy.type("x" * 120_000)
        with pytest.raises(Busy, match="does not read"):
            await busy.type("x")
        assert (await closed.wait(wait_s=0)).running
        assert (await busy.wait(wait_s=0)).running


async def test_who_gives_up_while_typing_leaves_the_program_alone(session: Session) -> None:
    async with on_terminal(session, "echo be''gun; cat; echo re''ad", "begun") as reading:
        with anyio.move_on_after(0.1):
            await reading.type("first\n")
        async with anyio.create_task_group() as tasks:
            for word in ("second\n", "third\n"):
                tasks.start_soon(reading.type, word)
        await reading.type(key="ctrl-d")
        ended = await session.processes.wait(reading.id, whole=True)
    lines = re.findall("first|second|third|read", ended.stdout)
    # As they were typed, and as they were read.
    assert sorted(lines) == sorted([*["first", "second", "third"] * 2, "read"])
