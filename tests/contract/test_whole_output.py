"""Output that is taken whole: no byte is lost, however slow its taker, and none of it is kept."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.config.values import MIB
from mcp_sandbox.errors import InvalidArgument, SandboxGone
from mcp_sandbox.sessions.session import Session
from tests.backends.live import connected, made, spec_for
from tests.contract.conftest import CHAT

# 100 MB without a newline, 2,000,000 lines, and three lines of 6 MB.
LONG = "seq 1 12400000 | tr '\\n' ,"
MANY = "seq 1 2000000"
FEW = "for each in a b c; do head -c 6000000 /dev/zero | tr '\\0' $each; echo; done"
ENDLESS = "while :; do seq 1 100000; done"
_HIDDEN = "sleep 86398"
_COUNT = "ps -eo args | grep -c '[s]leep 86398'"


class Taken:
    """What a taker got; it may do more with each piece."""

    def __init__(self, then: Callable[[], Awaitable[object]] | None = None) -> None:
        self.size = 0
        self.begun = anyio.Event()
        self._then = then
        self._digest = hashlib.sha256()

    async def take(self, data: bytes) -> None:
        self.size += len(data)
        self._digest.update(data)
        self.begun.set()
        if self._then:
            await self._then()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


async def digest(session: Session, command: str) -> str:
    """Of all that a command prints, counted in the sandbox."""
    return (await session.exec(f"({command}) | sha256sum", timeout_s=100)).stdout.split()[0]


async def peak(session: Session) -> int:
    """The most KiB that the runner has held."""
    return int((await session.exec("grep VmHWM /proc/1/status")).stdout.split()[1])


def our_peak() -> int:
    """The most KiB that this process has held since it forgot the peak before."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


@pytest.fixture
def shared(emptied: Session) -> Session:
    return emptied


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize(("command", "pause_s"), [(LONG, 0), (MANY, 0), (FEW, 0.02)])
async def test_all_of_it_arrives_and_memory_stays_flat(
    session: Session, backend_name: str, command: str, pause_s: float
) -> None:
    await session.exec("echo", take=Taken().take)
    wanted, taken = await digest(session, command), Taken(lambda: anyio.sleep(pause_s))
    walled = backend_name in ("docker", "bubblewrap")
    theirs = await peak(session) if walled else 0
    Path("/proc/self/clear_refs").write_text("5")
    ours = our_peak()
    result = await session.exec(f"{command}; echo err >&2", take=taken.take, timeout_s=100)
    assert our_peak() - ours < 20 * 1024
    assert (result.stdout, result.stderr, result.exit_code) == ("", "err\n", 0)
    assert taken.digest == wanted, taken.size
    assert (await session.list_files()).entries == ()
    if walled:
        assert await peak(session) - theirs < 20 * 1024


async def test_the_program_waits_while_its_output_is_being_taken(shared: Session) -> None:
    async def look() -> None:
        beside.append((await shared.exec("cat done; echo looked")).stdout)

    beside, taken = list[str](), Taken(look)
    await shared.exec("head -c 3000000 /dev/zero; echo > done", take=taken.take)
    assert taken.size == 3_000_000
    assert beside[0] == "looked\n"


async def test_small_and_no_output_and_what_is_given_are_whole(shared: Session) -> None:
    taken, given = Taken(), bytes(range(256)) * 12_000
    assert (await shared.exec(["true"], take=taken.take)).success
    assert taken.size == 0
    await shared.exec(["cat"], stdin=given, take=taken.take)
    assert taken.digest == hashlib.sha256(given).hexdigest()


async def test_of_what_goes_to_stderr_both_ends_and_a_file_are_kept(shared: Session) -> None:
    taken = Taken()
    result = await shared.exec("seq 1 50000 >&2; seq 1 50000", take=taken.take)
    assert result.stderr.endswith("\n50000\n")
    assert result.output_file
    page = await shared.exec(["wc", "-l", result.output_file])
    assert page.stdout.startswith("50000 ")


async def test_a_time_limit_ends_it_and_what_it_had_printed_arrives(shared: Session) -> None:
    taken = Taken()
    command = f"{_HIDDEN} & seq 1 20000; sleep 600"
    with anyio.fail_after(30):
        result = await shared.exec(command, take=taken.take, timeout_s=0.5)
    assert result.timed_out
    assert taken.digest == await digest(shared, "seq 1 20000")
    assert (await shared.exec(_COUNT)).stdout == "0\n"


async def test_a_limit_ends_one_that_is_paused_and_its_last_bytes_arrive(shared: Session) -> None:
    """Its taker holds the first piece until the tree is dead."""

    async def dead() -> None:
        while (await shared.exec(_COUNT)).stdout != "0\n":
            await anyio.sleep(0.05)

    taken = Taken(dead)
    with anyio.fail_after(40):
        result = await shared.exec(f"{_HIDDEN} & {ENDLESS}", take=taken.take, timeout_s=1)
    assert result.timed_out
    assert taken.size > 300_000


async def test_a_cancelled_call_leaves_nothing_running(shared: Session) -> None:
    taken = Taken(anyio.sleep_forever)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                await shared.exec(f"{_HIDDEN} & {ENDLESS}", take=taken.take)

            tasks.start_soon(run)
            await taken.begun.wait()
            tasks.cancel_scope.cancel()
        assert (await shared.exec(_COUNT)).stdout == "0\n"


async def test_an_error_of_the_taker_ends_the_command_and_is_raised(shared: Session) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with anyio.fail_after(30), pytest.raises(ZeroDivisionError):
        await shared.exec(f"{_HIDDEN} & {ENDLESS}", take=Taken(fail).take)
    assert (await shared.exec(_COUNT)).stdout == "0\n"


async def test_a_child_that_holds_the_output_holds_up_nobody(shared: Session) -> None:
    taken, begin = Taken(), "yes & sleep 600 & until [ -s begun ]; do echo > begun; done; echo end"
    with anyio.fail_after(30):
        result = await shared.exec(begin, take=taken.take)
        assert result.success
        assert taken.size > 0
        # It goes on: it is neither blocked by its pipe, nor killed.
        assert (await shared.exec("pgrep -xc yes")).stdout == "1\n"
    await shared.exec("pkill -x yes; pkill sleep")


async def test_what_came_before_the_sandbox_died_arrives(config: Config, tmp_path: Path) -> None:
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        async with made(backend, spec_for(tmp_path)) as sandbox, connected(sandbox) as runtime:

            async def kill() -> None:
                if taken.size > 5_000_000:
                    await backend.destroy(sandbox.id)

            taken = Taken(kill)
            with anyio.fail_after(40), pytest.raises(SandboxGone):
                await runtime.exec("yes 0123456", take=taken.take)
    first = b"0123456\n" * (taken.size // 8 + 1)
    assert taken.digest == hashlib.sha256(first[: taken.size]).hexdigest()


@pytest.fixture
async def small(config: Config) -> AsyncGenerator[Session]:
    """A chat with little room on the disk."""
    limited = config.workspace.model_copy(update={"size_limit": 8 * MIB, "min_free": 0})
    async with open_manager(config.model_copy(update={"workspace": limited})) as manager:
        yield await manager.session(CHAT)


async def test_who_fills_the_workspace_is_ended_and_no_byte_is_missing(small: Session) -> None:
    taken = Taken(lambda: anyio.sleep(0.005))
    with anyio.fail_after(40):
        result = await small.exec(
            "seq 1 300000; head -c 40000000 /dev/zero > file; sleep 600", take=taken.take
        )
    assert "workspace is full" in (result.killed_because or "")
    assert taken.digest == await digest(small, "seq 1 300000")


async def test_eight_at_once_get_their_own_and_an_exec_beside_them_answers(
    shared: Session,
) -> None:
    go = anyio.Event()
    all_taken = [Taken(go.wait) for _ in range(8)]
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:

            async def run(number: int, taken: Taken) -> None:
                await shared.exec(f"seq {number} 300000", take=taken.take)

            for number, taken in enumerate(all_taken):
                tasks.start_soon(run, number, taken)
            for taken in all_taken:
                await taken.begun.wait()
            assert (await shared.exec("echo beside")).stdout == "beside\n"
            go.set()
    for number, taken in enumerate(all_taken):
        assert taken.digest == await digest(shared, f"seq {number} 300000")


async def test_what_is_answered_before_its_end_cannot_be_taken(shared: Session) -> None:
    for other in ({"wait_s": 1}, {"until": "x"}, {"tty": True}, {"leave": anyio.CancelScope()}):
        with pytest.raises(InvalidArgument, match="take"):
            await shared.exec("true", take=Taken().take, **other)
