"""Programs on a terminal, which they ask and draw on."""

import pytest

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session


@pytest.fixture
def manager(lasting: SessionManager) -> SessionManager:
    return lasting


@pytest.fixture
def session(emptied: Session) -> Session:
    return emptied


async def test_a_command_has_a_terminal_of_its_own(session: Session) -> None:
    look = "[ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; stty size; tput cols; echo $TERM; exit 3"
    result = await session.exec(look, tty=True)
    assert result.stdout == "all\r\n30 100\r\n100\r\nxterm-256color\r\n"
    assert result.exit_code == 3


async def test_a_program_with_its_arguments_has_one_too(session: Session) -> None:
    assert (await session.exec(["stty", "size"], tty=True)).stdout == "30 100\r\n"


async def test_what_is_for_unwatched_commands_is_not_set_on_a_terminal(session: Session) -> None:
    told = "echo $TERM,$NO_COLOR,$PAGER,$GIT_EDITOR"
    assert (await session.exec(told)).stdout == "dumb,1,cat,true\n"
    assert (await session.exec(told, tty=True)).stdout == "xterm-256color,,,\r\n"
    given = await session.exec(told, tty=True, env={"TERM": "vt100"})
    assert given.stdout == "vt100,,,\r\n"


async def test_a_terminal_takes_no_stdin(session: Session) -> None:
    with pytest.raises(InvalidArgument, match="stdin"):
        await session.exec("cat", tty=True, stdin="given")


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
