"""Whatever a command does, it ends when it must, with everything it started."""

from contextlib import suppress

import anyio
import pytest

from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.sessions.session import Session
from tests.streams import printing

# A number that is in no other command line, asked for in a way that does not find the asking.
_HIDDEN = "sleep 86399"
_COUNT = "ps -eo args | grep -c '[s]leep 86399'"
_STOPPED = f"{_HIDDEN} & kill -STOP $!"
_HIDING = f"""
({_HIDDEN} &)
setsid {_HIDDEN} &
(setsid bash -c '({_HIDDEN} &) ; {_HIDDEN}' &)
env -i setsid nohup /bin/sleep 86399 >/dev/null 2>&1 </dev/null &
"""


@pytest.fixture
def session(emptied: Session) -> Session:
    return emptied


async def hidden(session: Session) -> int:
    return int((await session.exec(_COUNT)).stdout)


async def test_a_timeout_kills_the_whole_tree_and_keeps_the_output(session: Session) -> None:
    with anyio.fail_after(30):
        result = await session.exec(f"echo before; {_HIDING}\nsleep 600", timeout_s=1)
    assert result.timed_out
    assert result.stdout == "before\n"
    assert result.signal == "SIGKILL"
    assert await hidden(session) == 0


async def test_a_python_timeout_kills_its_tree(session: Session) -> None:
    code = (
        "import subprocess, time\n"
        "subprocess.Popen(['setsid', 'sleep', '86399'])\n"
        "print('before', flush=True)\n"
        "while True: pass\n"
    )
    with anyio.fail_after(30):
        result = await session.run_code(code, timeout_s=1)
    assert (result.timed_out, result.stdout) == (True, "before\n")
    assert await hidden(session) == 0


async def test_a_timeout_kills_who_is_stopped(session: Session, backend_name: str) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor hangs up a whole session when one process of it is stopped")
    with anyio.fail_after(30):
        result = await session.exec(f"{_STOPPED}; sleep 600", timeout_s=1)
    assert result.timed_out
    assert await hidden(session) == 0


async def test_who_ignores_every_signal_is_killed_all_the_same(session: Session) -> None:
    with anyio.fail_after(30):
        result = await session.exec("trap '' TERM INT HUP QUIT; sleep 600 & wait", timeout_s=1)
    assert result.timed_out


async def test_a_cancelled_call_leaves_nothing_running(session: Session) -> None:
    with anyio.fail_after(30):
        async with printing(session, f"{_HIDING}\necho started; sleep 600"):
            pass
    assert await hidden(session) == 0


@pytest.mark.slow
async def test_one_call_can_be_cancelled_beside_others(session: Session) -> None:
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            ended: list[str] = []

            async def wait() -> None:
                ended.append((await session.exec("sleep 2; echo undisturbed")).stdout)

            tasks.start_soon(wait)
            with anyio.move_on_after(0.5):
                await session.exec(f"{_HIDING}\nsleep 600")
    assert ended == ["undisturbed\n"]
    assert await hidden(session) == 0


async def test_ended_children_are_reaped(session: Session) -> None:
    await session.exec("for i in $(seq 50); do (true &) ; done")
    result = await session.exec("ps -eo stat | grep -c '^Z' || true")
    assert int(result.stdout) <= 1


async def test_a_closed_standard_output_is_no_problem(session: Session) -> None:
    result = await session.exec("exec >&- 2>&-; sleep 0.1; echo into nothing; exit 5")
    assert (result.exit_code, result.stdout) == (5, "")


async def test_killing_all_pythons_spares_the_tools(session: Session) -> None:
    result = await session.exec("pkill python; pkill -f python3; pkill -9 python; echo done")
    assert result.stdout == "done\n"
    assert (await session.run_code("print('still here')")).stdout == "still here\n"


async def test_killing_everything_spares_the_tools(session: Session, backend_name: str) -> None:
    await session.write_file("kept.txt", b"kept")
    try:
        result = await session.exec("kill -9 -1; echo done", timeout_s=20)
    except SandboxGone:
        # gVisor does not shield pid 1: the sandbox dies, and is replaced.
        assert backend_name == "docker-runsc"
    else:
        assert result.stdout == "done\n"
    assert (await session.exec("cat kept.txt")).stdout == "kept"
    assert (await session.run_code("print(1)")).stdout == "1\n"


@pytest.mark.slow
async def test_a_fork_bomb_ends_and_the_next_call_works(session: Session) -> None:
    await bomb(session, "bomb() { bomb | bomb & }; bomb; sleep 600", timeout_s=2)
    with anyio.fail_after(30):
        result = await session.exec("echo fine")
    assert result.stdout == "fine\n"
    await session.reset()


async def bomb(session: Session, code: str, *, timeout_s: float) -> None:
    """Under gVisor a bomb may leave the runner no time: then the sandbox is given up."""
    with anyio.fail_after(30), suppress(SandboxGone):
        await session.exec(code, timeout_s=timeout_s)


async def test_a_fork_bomb_left_in_the_background_makes_room(
    session: Session, backend_name: str
) -> None:
    await bomb(session, "bomb() { bomb | bomb & }; bomb", timeout_s=5)
    with anyio.fail_after(30):
        if backend_name == "docker-runsc":
            await session.reset()
        result = await session.run_code("print('fine')")
    assert result.stdout == "fine\n"
    await session.reset()


async def test_a_full_tmp_stops_nobody(session: Session) -> None:
    filled = await session.exec(
        "head -c 2G /dev/zero > /tmp/full; df --output=avail /tmp | tail -1"
    )
    assert int(filled.stdout) < 100, filled
    assert (await session.run_code("def f(): 1/0\nf()")).stderr.count("ZeroDivisionError") == 1
    assert (await session.exec("echo fine; rm /tmp/full")).stdout == "fine\n"


@pytest.mark.slow
async def test_too_much_memory_is_told_as_such(session: Session, backend_name: str) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("the whole gVisor sandbox is one process to the kernel's memory limit")
    result = await session.run_code("x = bytearray(3 * 1024**3)\nprint(len(x))", timeout_s=60)
    assert not result.success
    assert result.out_of_memory or "MemoryError" in result.stderr
    assert (await session.exec("echo fine")).stdout == "fine\n"
