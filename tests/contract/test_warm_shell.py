"""Requests find a bash that waits for them; only the time they take tells it."""

import anyio
import pytest

from mcp_sandbox.sessions.session import Session

# Every bash but the one that asks. Its parent may be a worker; that is not one.
_OTHERS = 'for pid in $(ps -eo pid=,comm= | sed -n "s/ bash$//p"); do [ $pid = $$ ] || {}; done'


@pytest.fixture
async def session(emptied: Session) -> Session:
    """A chat that has run a command."""
    return emptied


async def test_a_command_begins_when_it_is_given(session: Session) -> None:
    await anyio.sleep(1.1)
    assert (await session.exec("echo $SECONDS $# $0 ${#__code}")).stdout == "0 0 bash 0\n"


async def test_nothing_of_one_command_is_left_for_the_next(session: Session) -> None:
    await session.exec("X=1; export Y=2; cd /; umask 0; alias ls=false; set -f; exec 7</dev/null")
    result = await session.exec("echo [$X$Y]; umask; ls >/dev/null && echo $-; ls -m /proc/$$/fd")
    assert "[]\n0022\n" in result.stdout
    assert "7" not in result.stdout.splitlines()[-1]
    assert "f" not in result.stdout.splitlines()[2]


async def test_a_command_gets_its_own_directory_variables_and_input(session: Session) -> None:
    await session.exec("mkdir -p a; echo one > a/name")
    assert (await session.exec("cat name", cwd="a")).stdout == "one\n"
    await session.exec("rm -r a; mkdir a; echo two > a/name")
    assert (await session.exec("cat name", cwd="a")).stdout == "two\n"
    assert (await session.exec("echo $GIVEN", env={"GIVEN": "x"})).stdout == "x\n"
    assert (await session.exec("echo [$GIVEN]")).stdout == "[]\n"
    assert (await session.exec("cat", stdin="in")).stdout == "in"


@pytest.mark.parametrize("stroke", ["kill -KILL $pid", "kill -TERM $pid", "kill -STOP $pid"])
async def test_who_ends_or_stops_the_one_that_waits_harms_no_command(
    session: Session, backend_name: str, stroke: str
) -> None:
    if backend_name == "docker-runsc" and "STOP" in stroke:
        pytest.skip("gVisor hangs up a whole session when one process of it is stopped")
    await session.exec(_OTHERS.replace("{}", stroke))
    with anyio.fail_after(20):
        for number in range(3):
            result = await session.exec(f"echo {number}; exit {number}")
            assert (result.stdout, result.exit_code) == (f"{number}\n", number)


async def test_killing_everything_again_and_again_is_told_as_it_was(
    session: Session, backend_name: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor does not shield pid 1: the sandbox dies")
    with anyio.fail_after(50):
        for number in range(40):
            env = {"NUMBER": str(number)} if number % 2 else None
            result = await session.exec("kill -9 -1; echo done", env=env)
            assert (result.exit_code, result.stdout) == (0, "done\n")


async def test_a_timeout_kills_what_a_later_command_has_started(session: Session) -> None:
    with anyio.fail_after(30):
        result = await session.exec("echo before; setsid sleep 86398 & sleep 600", timeout_s=1)
    assert (result.timed_out, result.stdout) == (True, "before\n")
    assert (await session.exec("ps -eo args | grep -c '[s]leep 86398'")).stdout == "0\n"


async def test_python_finds_its_own_directory_variables_and_limits(session: Session) -> None:
    code = "import os, sys; print(os.getcwd(), sys.argv, os.getsid(0) == os.getpid(), sys.modules)"
    first = await session.run_code(code)
    assert (await session.run_code("import json, os; os.chdir('/'); os.x = 1")).success
    second = await session.run_code(code)
    assert first.stdout.split("run-")[0] == second.stdout.split("run-")[0]
    assert "'json'" not in second.stdout


@pytest.mark.parametrize("stroke", ["KILL", "STOP"])
async def test_who_ends_or_stops_the_python_that_waits_harms_no_code(
    session: Session, backend_name: str, stroke: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor shields no pid 1, and hangs up a session when one in it is stopped")
    assert (await session.run_code("print(1)")).stdout == "1\n"
    with anyio.fail_after(30):
        for number in range(5):
            await session.exec(f"pkill -{stroke} -n mcp-sandbox; sleep 0.0{number}")
            assert (await session.run_code(f"print({number})")).stdout == f"{number}\n"


async def test_new_files_of_every_command_are_named(session: Session) -> None:
    for number in range(3):
        await anyio.sleep(0.05)
        result = await session.exec(f"echo x > {number}.txt")
        assert result.changed_files == (f"{number}.txt",)


_OPEN = "for fd in {0..99}; do [ -e /proc/$$/fd/$fd ] && echo -n $fd; done"
# Itself, and what it would hand on to a program that it starts.
_OPEN_IN_PYTHON = f"""
import os, subprocess
print(*(fd for fd in range(100) if os.path.lexists(f"/proc/self/fd/{{fd}}")), sep="", flush=True)
subprocess.run(["bash", "-c", {_OPEN!r}], close_fds=False)
"""
_HANDED_ON_BY_NODE = f"""
const options = {{ stdio: "inherit" }}
require("child_process").spawnSync("bash", ["-c", {_OPEN!r}], options)
"""


async def test_code_in_every_language_has_three_descriptors_and_no_other(session: Session) -> None:
    for _ in range(3):
        assert (await session.run_code(_OPEN_IN_PYTHON)).stdout == "012\n012"
        assert (await session.run_code(_HANDED_ON_BY_NODE, "javascript")).stdout == "012"
        assert (await session.run_code(_OPEN, "bash")).stdout == "012"


async def test_a_command_has_three_descriptors_and_no_other(session: Session) -> None:
    for _ in range(3):
        assert (await session.exec(_OPEN)).stdout == "012"
        assert (await session.exec(["bash", "-c", _OPEN])).stdout == "012"
        assert (await session.exec(_OPEN, stdin="given")).stdout == "012"


_REACH_A_BASH = """
import os, time
until = time.monotonic() + 0.3
while time.monotonic() < until:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if open(f"/proc/{pid}/comm").read() == "bash\\n":
                os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
                # One that was killed just before may still be seen to end.
                time.sleep(0.05)
                os.readlink(f"/proc/{pid}/exe")
                print("reached", pid)
        except OSError:
            pass
"""


@pytest.mark.slow
async def test_no_code_reaches_a_bash_that_waits(session: Session) -> None:
    for _ in range(3):
        await session.exec("true")
        by_code = await session.run_code(_REACH_A_BASH)
        as_program = await session.exec(["python3", "-c", _REACH_A_BASH])
        by_command = await session.exec("exec python3 -", stdin=_REACH_A_BASH)
        for result in (by_code, as_program, by_command):
            assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
