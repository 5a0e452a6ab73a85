"""Commands that outlive their calls: waited for, watched, listed, stopped, and told of once."""

import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from unittest import mock

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, LimitsConfig
from mcp_sandbox.errors import Busy, CommandFailed, InvalidArgument, NotFound
from mcp_sandbox.models import ExecResult, ProcessRow
from mcp_sandbox.server.results import format_exec, format_processes
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.contract.conftest import CHAT
from tests.server.scripted import text_of

UNTIL_TOLD = "while [ ! -e go ]; do sleep 0.02; done; "


async def seen(ask: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""
    with anyio.fail_after(20):
        while not await ask():
            await anyio.sleep(0.02)


async def row(session: Session, process: str | None) -> ProcessRow:
    (found,) = [each for each in await session.processes.list() if each.id == process]
    return found


async def has_ended(session: Session, process: str | None) -> None:
    async def ended() -> bool:
        return not (await row(session, process)).running

    await seen(ended)


async def test_a_call_answers_when_its_time_is_over_and_the_command_goes_on(
    emptied: Session,
) -> None:
    begun = await emptied.exec(f"echo first; {UNTIL_TOLD} echo second; exit 3", wait_s=0.3)
    assert begun.running
    assert begun.process
    assert begun.stdout == "first\n"
    assert begun.exit_code is None
    await emptied.write_file("go", "")
    ended = await emptied.processes.wait(begun.process)
    assert (ended.stdout, ended.exit_code, ended.running) == ("second\n", 3, False)


async def test_code_goes_on_too_with_its_limit(emptied: Session) -> None:
    endless = "import time\nwhile True: time.sleep(0.1)"
    begun = await emptied.run_code(endless, wait_s=0.2, timeout_s=1)
    assert begun.process
    assert begun.left_s in (0, 1)
    ended = await emptied.processes.wait(begun.process)
    assert ended.timed_out


async def test_what_nobody_waits_for_begins_at_once_and_has_no_limit(emptied: Session) -> None:
    begun = await emptied.exec("sleep 86300", wait_s=0)
    assert begun.process
    assert begun.left_s is None
    assert (await row(emptied, begun.process)).running
    await emptied.processes.stop(begun.process)


async def test_what_cannot_start_is_refused_though_nobody_waits(emptied: Session) -> None:
    with pytest.raises(NotFound, match="cwd"):
        await emptied.exec("true", cwd="nowhere", wait_s=0)


async def test_a_call_answers_as_soon_as_a_text_is_printed(emptied: Session) -> None:
    command = f"printf 'rea'; sleep 0.1; echo 'dy now'; {UNTIL_TOLD} echo ready"
    begun = await emptied.exec(command, until="ready")
    assert begun.until_met
    assert begun.stdout.startswith("ready")
    old = await emptied.processes.wait(begun.process or "", until="ready", wait_s=0.2)
    assert (old.until_met, old.running) == (False, True)
    await emptied.write_file("go", "")
    again = await emptied.processes.wait(begun.process or "", until="ready")
    assert again.until_met
    ended = await emptied.processes.wait(begun.process or "", until="never")
    assert not ended.until_met
    assert ended.exit_code == 0


async def test_each_answer_has_what_was_printed_since_the_last_one(emptied: Session) -> None:
    command = "echo one; while read line; do [ -e $line ] && break; done < <(yes go); echo two"
    begun = await emptied.exec(f"{command}; seq 3", until="one")
    await emptied.write_file("go", "")
    ended = await emptied.processes.wait(begun.process or "")
    assert ended.stdout == "two\n1\n2\n3\n"
    whole = await emptied.processes.wait(begun.process or "", whole=True)
    assert whole.stdout == "one\ntwo\n1\n2\n3\n"
    kept = await emptied.exec(["cat", begun.output_file or ""])
    assert kept.stdout == whole.stdout


async def test_much_output_is_bounded_and_kept_in_its_file(emptied: Session) -> None:
    begun = await emptied.exec(f"seq 100000; {UNTIL_TOLD} seq 100001 200000", until="\n100000\n")
    await emptied.write_file("go", "")
    ended = await emptied.processes.wait(begun.process or "")
    assert ended.truncated
    assert ended.stdout.endswith("199999\n200000\n")
    assert ended.stdout_from == begun.stdout_bytes
    kept = await emptied.exec(["wc", "-l", ended.output_file or ""])
    assert kept.stdout.startswith("200000 ")


async def test_what_no_buffer_holds_is_named_with_its_place_in_the_file(emptied: Session) -> None:
    command = f"echo beside >&2; seq 10000; {UNTIL_TOLD} seq 10001 60000; echo all"
    begun = await emptied.exec(command, until="\n10000\n")
    await emptied.write_file("go", "")
    ended = await emptied.processes.wait(begun.process or "")
    shown = text_of(format_exec(ended))
    (look,) = re.findall(r"^\n\[… [\d,]+ bytes left out here; to see them: exec (.*) …\]\n", shown)
    missing = (await emptied.exec(look)).stdout
    assert missing.startswith("10001\n10002\n")
    assert "\n60000\nall\n" in shown
    assert "10001" not in shown


async def test_an_end_that_nobody_waited_for_is_told_once(emptied: Session) -> None:
    begun = await emptied.exec(f"{UNTIL_TOLD} exit 4", wait_s=0)
    assert await emptied.take_notices() == []
    await emptied.write_file("go", "")
    await has_ended(emptied, begun.process)
    (told,) = await emptied.take_notices()
    assert re.match(rf"{begun.process} \(while .*\) ended with exit code 4 after \d+ s; ", told)
    assert await emptied.take_notices() == []


async def test_an_end_that_somebody_waited_for_is_no_news(emptied: Session) -> None:
    begun = await emptied.exec("sleep 0.1", wait_s=0)
    await emptied.processes.wait(begun.process or "")
    assert await emptied.take_notices() == []


async def test_a_process_is_stopped_with_all_that_it_started(emptied: Session) -> None:
    tree = "(setsid sleep 86301 & setsid sleep 86302 &); trap '' TERM; echo ready"
    begun = await emptied.exec(f"{tree}; while :; do sleep 0.05; done", until="ready")
    ended = await emptied.processes.stop(begun.process or "", grace_s=0.2)
    assert (ended.stopped, ended.signal) == (True, "SIGKILL")
    left = await emptied.exec("pgrep -fc '^sleep 8630[12]'", timeout_s=10)
    assert left.stdout == "0\n"


@pytest.mark.parametrize("name", ["SIGQUIT", "3", "quit"])
async def test_a_signal_is_known_by_its_usual_names(emptied: Session, name: str) -> None:
    traps = "trap 'echo got it; exit 7' QUIT; echo ready; while :; do sleep 0.05; done"
    begun = await emptied.exec(traps, until="ready")
    with pytest.raises(InvalidArgument, match="no signal 'SIGNOT': give one of HUP, 1, INT, "):
        await emptied.processes.stop(begun.process or "", "SIGNOT")
    ended = await emptied.processes.stop(begun.process or "", name)
    assert (ended.stdout, ended.exit_code) == ("got it\n", 7)


async def test_a_polite_program_ends_by_itself_when_it_is_stopped(emptied: Session) -> None:
    polite = "trap 'echo bye; exit 5' INT; echo ready; while :; do sleep 0.02; done"
    begun = await emptied.exec(polite, until="ready")
    ended = await emptied.processes.stop(begun.process or "", "INT")
    assert (ended.stopped, ended.exit_code, ended.stdout) == (True, 5, "bye\n")


async def test_a_wait_that_is_cancelled_ends_alone(emptied: Session) -> None:
    begun = await emptied.exec(UNTIL_TOLD, wait_s=0)
    with anyio.move_on_after(0.2):
        await emptied.processes.wait(begun.process or "")
    assert (await row(emptied, begun.process)).running
    await emptied.write_file("go", "")
    assert (await emptied.processes.wait(begun.process or "")).exit_code == 0


async def test_an_unknown_id_is_answered_with_those_there_are(emptied: Session) -> None:
    begun = await emptied.exec("sleep 86303", wait_s=0)
    with pytest.raises(NotFound, match=rf"no process 'p1'; there are: .*{begun.process}"):
        await emptied.processes.wait("p1")
    with pytest.raises(NotFound, match="an earlier sandbox of this chat, and ended with it"):
        await emptied.processes.wait("p1-000")
    await emptied.processes.stop(begun.process or "")


async def test_input_is_read_whole_after_the_call_was_answered(emptied: Session) -> None:
    begun = await emptied.exec(f"{UNTIL_TOLD} wc -c", stdin=b"x" * (8 << 20), wait_s=0)
    await emptied.write_file("go", "")
    assert (await emptied.processes.wait(begun.process or "")).stdout == f"{8 << 20}\n"


async def test_so_many_may_run_and_the_next_is_refused_with_their_list(emptied: Session) -> None:
    begun = [await emptied.exec(["sleep", "86306"], wait_s=0) for _ in range(64)]
    with pytest.raises(Busy, match=rf"64 processes run .*{begun[0].process}"):
        await emptied.exec("true")
    await emptied.processes.stop(begun[0].process or "")
    await emptied.exec("pkill -f '^sleep 86306'")

    async def all_have_ended() -> bool:
        return not any(each.running for each in await emptied.processes.list())

    await seen(all_have_ended)
    assert len(await emptied.processes.list()) == 32
    await emptied.take_notices()


async def test_a_process_of_a_block_ends_with_it(emptied: Session) -> None:
    async with emptied.processes.start("echo ready; sleep 86304") as process:
        assert (await process.wait(until="ready")).running
    assert not (await row(emptied, process.id)).running


async def test_a_command_that_has_to_succeed_raises_when_it_does_not(emptied: Session) -> None:
    with pytest.raises(CommandFailed, match="exit code 3: no such thing") as caught:
        await emptied.exec("echo no such thing >&2; exit 3", check=True)
    assert caught.value.result.exit_code == 3


async def test_ids_hold_in_two_servers_and_each_is_told(
    manager: SessionManager, config: Config
) -> None:
    mine = await manager.session(CHAT)
    await mine.exec("true")
    async with open_manager(config) as other:
        theirs = await other.session(CHAT)
        await theirs.exec("true")
        begun = await mine.exec("sleep 0.2; echo done", wait_s=0)
        ended = await theirs.processes.wait(begun.process or "")
        assert ended.stdout == "done\n"
        begun = await mine.exec("sleep 0.1", wait_s=0)
        await has_ended(mine, begun.process)
        assert len(await mine.take_notices()) == 1
        assert len(await theirs.take_notices()) == 1


async def test_a_new_server_tells_what_no_other_has_told(
    manager: SessionManager, config: Config
) -> None:
    mine = await manager.session(CHAT)
    told = await mine.exec("sleep 0.1", wait_s=0)
    await has_ended(mine, told.process)
    await mine.take_notices()
    untold = await mine.exec("sleep 0.1", wait_s=0)
    await has_ended(mine, untold.process)
    async with open_manager(config) as other:
        theirs = await other.session(CHAT)
        await theirs.exec("true")
        (news,) = await theirs.take_notices()
    assert news.startswith(f"{untold.process} ")


async def test_commands_work_beside_those_that_go_on(emptied: Session) -> None:
    begun = [await emptied.exec("sleep 86305", wait_s=0) for _ in range(3)]
    for _ in range(3):
        assert (await emptied.exec("echo $((6*7))")).stdout == "42\n"
    for each in begun:
        await emptied.processes.stop(each.process or "", "KILL")


FILLS = f"{UNTIL_TOLD} while :; do for i in {{1..10}}; do : > $$-$((n++)); done; sleep 0.02; done"
FILLS_BY_PYTHON = """
import itertools, os, time
def fill(folder):
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    os.unlink(f"{folder}/go")
    for number in itertools.count():
        open(f"{folder}/{number}", "w").close()
        time.sleep(0.002)
"""


@asynccontextmanager
async def for_few_files(config: Config) -> AsyncGenerator[Session]:
    small = config.workspace.model_copy(update={"max_files": 500})
    # Files that a sandbox holds itself are looked at more often than else.
    with mock.patch("mcp_sandbox.sessions.sandbox.sandbox_files._MEASURE_S", 0.5):
        async with open_manager(config.model_copy(update={"workspace": small})) as manager:
            yield await manager.session(CHAT)


async def told_of_filling(session: Session) -> str:
    """What the agent is told when all that waits to fill the workspace does so."""
    told: list[str] = []

    async def is_told() -> bool:
        told.extend(await session.take_notices())
        return bool(told)

    await session.write_file("go", "")
    await seen(is_told)
    (said,) = told
    assert "filled the workspace" in said
    return said


async def test_what_fills_the_workspace_is_stopped_and_the_sandbox_stays(config: Config) -> None:
    async with for_few_files(config) as session:
        await session.run_code("x = 41", notebook="kept")
        begun = await session.exec(FILLS, wait_s=0)
        left = f"setsid nohup bash -c 'echo $$ > pid; {FILLS}' >/dev/null 2>&1 &"
        await session.exec(f"{left} until [ -s pid ]; do sleep 0.02; done")
        said = await told_of_filling(session)
        assert f"{begun.process} (while [ ! -e go" in said
        assert "bash -c echo $$ > pid; while [ ! -e go" in said
        assert (await session.exec("kill -0 $(cat pid)")).exit_code == 1
        assert not (await row(session, begun.process)).running
        assert (await session.run_code("x + 1", notebook="kept")).stdout == "42\n"


async def test_a_call_under_way_keeps_what_runs_in_the_background(
    lasting: SessionManager, emptied: Session
) -> None:
    held = lasting._hold(CHAT)._held
    assert held
    begun = await emptied.exec("sleep 86310", wait_s=0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(emptied.exec, f"touch here; {UNTIL_TOLD}")

        async def is_under_way() -> bool:
            return bool((await emptied.glob("here")).paths)

        await seen(is_under_way)
        status = await held.runtime.status(stop_background=True)
        assert (status.calls, status.stopped) == (1, False)
        assert (await row(emptied, begun.process)).running
        await emptied.write_file("go", "")
    assert (await held.runtime.status(stop_background=True)).stopped
    await has_ended(emptied, begun.process)
    assert not await emptied.take_notices()


async def test_a_notebook_ends_if_nothing_else_can_fill_the_workspace(config: Config) -> None:
    async with for_few_files(config) as session:
        thread = "import threading\nthreading.Thread(target=fill, args=['.']).start()"
        await session.run_code(FILLS_BY_PYTHON + thread, notebook="fills")
        assert "Ended in the background: fills (notebook)." in await told_of_filling(session)

        async def is_gone() -> bool:
            return "fills" not in [each.id for each in await session.processes.list()]

        await seen(is_gone)
        assert (await session.run_code("1", notebook="fills")).notebook == "new"


async def test_a_sandbox_ends_if_what_fills_the_workspace_is_not_found(config: Config) -> None:
    async with for_few_files(config) as session:
        place, folder = (await session.exec("pwd; python3 -m site --user-site")).stdout.split()
        forks = f"if os.fork() == 0:\n    fill({place!r})"
        await session.write_file(f"{folder}/usercustomize.py", FILLS_BY_PYTHON + forks)
        await session.reset()
        await session.run_code("1")
        await session.take_notices()
        await session.write_file("go", "")

        async def has_ended() -> bool:
            return session._hold._held is None

        await seen(has_ended)
        await session.exec("true")
        (told,) = await session.take_notices()
        assert "what ran in it filled the workspace, and could not be found" in told
        count = (await session.exec("ls | wc -l")).stdout
        assert (await session.exec("sleep 0.1; ls | wc -l")).stdout == count


@pytest.mark.parametrize("victim", ["everything", "worker"])
async def test_what_user_code_kills_under_a_process_is_never_a_false_success(
    emptied: Session, backend_name: str, victim: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor does not shield pid 1: the sandbox dies")
    begun = await emptied.exec(f"{UNTIL_TOLD} echo lived; exit 6", wait_s=0)
    await emptied.exec("kill -9 -1" if victim == "everything" else "pkill -9 -x mcp-sandbox")
    await emptied.write_file("go", "")
    ended = await emptied.processes.wait(begun.process or "")
    if victim == "everything":
        assert ended.signal == "SIGKILL"
    else:
        assert (ended.exit_code, ended.stdout) == (6, "lived\n")


async def test_who_does_not_wait_for_what_has_ended_is_answered_too(emptied: Session) -> None:
    begun = await emptied.exec("sleep 0.05", wait_s=0)
    await has_ended(emptied, begun.process)
    for _ in range(2):
        assert (await emptied.processes.wait(begun.process or "", wait_s=0)).exit_code == 0
    assert (await emptied.exec("echo works")).stdout == "works\n"


async def test_a_shell_is_busy_until_what_goes_on_in_it_has_ended(emptied: Session) -> None:
    begun = await emptied.exec(f"{UNTIL_TOLD} FOUND=yes", shell="busy", wait_s=0)
    assert (await row(emptied, begun.process)).of == "shell busy"
    with pytest.raises(Busy, match=rf"'busy' is busy with {begun.process} "):
        await emptied.exec("true", shell="busy")
    assert (await emptied.exec("echo free", shell="free")).stdout == "free\n"
    await emptied.write_file("go", "")
    await emptied.processes.wait(begun.process or "")
    assert (await emptied.exec("echo $FOUND", shell="busy")).stdout == "yes\n"


async def test_what_a_stopped_process_leaves_is_killed_after_its_grace(
    emptied: Session, backend_name: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor tells of no process whose it was")
    begun = await emptied.exec("setsid sleep 86308 & echo ready; wait", until="ready")
    ended = await emptied.processes.stop(begun.process or "", grace_s=0.2)
    assert (ended.stopped, ended.signal) == (True, "SIGTERM")

    async def nothing_is_left() -> bool:
        return (await emptied.exec("pgrep -fc '^sleep 8630[8]'")).stdout == "0\n"

    await seen(nothing_is_left)


async def test_nothing_is_lost_of_what_ends_as_its_text_is_found(emptied: Session) -> None:
    for _ in range(10):
        begun = await emptied.exec("echo a; echo b >&2; echo c >&2; echo ready", until="ready")
        errors = begun.stderr
        if begun.process:
            errors += (await emptied.processes.wait(begun.process)).stderr
        assert errors == "b\nc\n"


async def test_an_end_is_told_whole_when_its_sandbox_has_ended_since(
    manager: SessionManager,
) -> None:
    session = await manager.session(CHAT)
    begun = await session.exec("sleep 0.1; exit 3", wait_s=0)
    await has_ended(session, begun.process)
    await manager.stop(CHAT)
    (told,) = await session.take_notices()
    assert told.startswith(f"{begun.process} (sleep 0.1; exit 3) ended with exit code 3 after ")


async def test_an_end_is_told_once_by_who_leaves_the_sandbox_to_others(
    manager: SessionManager, config: Config
) -> None:
    mine = await manager.session(CHAT)
    async with open_manager(config) as other:
        theirs = await other.session(CHAT)
        await theirs.exec("true")
        begun = await mine.exec("sleep 0.1", wait_s=0)
        await has_ended(mine, begun.process)
        await manager._hold(CHAT).release_if_idle()
        told = await mine.take_notices()
        await mine.exec("true")
        assert len([*told, *await mine.take_notices()]) == 1
        assert len(await theirs.take_notices()) <= 1


@pytest.mark.parametrize("what", ["command", "code"])
async def test_what_user_code_has_stopped_of_ours_goes_on(
    emptied: Session, backend_name: str, what: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor does not shield pid 1: the sandbox stops")
    await emptied.run_code("print(1)")
    begun = await emptied.exec(f"{UNTIL_TOLD} exit 6", wait_s=0)
    with anyio.fail_after(9):
        await emptied.exec("pkill -STOP -x mcp-sandbox")
        if what == "code":
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(emptied.run_code, "import time; time.sleep(0.1)")
        await emptied.write_file("go", "")
        assert (await emptied.processes.wait(begun.process or "")).exit_code == 6


async def test_where_few_files_may_be_open_fewer_processes_run(
    config: Config, backend_name: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("the limit is one of gVisor's kernel, too")
    few = config.model_copy(update={"limits": LimitsConfig(open_files=128)})
    async with open_manager(few) as manager:
        session = await manager.session(CHAT)
        for _ in range(16):
            await session.exec(["sleep", "86309"], wait_s=0)
        with pytest.raises(Busy, match="16 processes run"):
            await session.exec("true")
        assert len(await session.processes.list()) == 16


async def test_a_fork_bomb_that_goes_on_makes_room_for_the_next_call(
    config: Config, backend_name: str
) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor has no limit of processes")
    few = config.model_copy(update={"limits": LimitsConfig(pids=64)})
    async with open_manager(few) as manager:
        session = await manager.session(CHAT)
        begun = await session.exec("bomb() { bomb | bomb & }; bomb; sleep 86310", wait_s=0)
        ended = await session.processes.wait(begun.process or "", until="fork: retry", wait_s=20)
        assert ended.running
        assert (await session.exec("echo fine")).stdout == "fine\n"
        assert (await row(session, begun.process)).signal == "SIGKILL"


def said(ended: ExecResult) -> str:
    return text_of(format_exec(ended, known=True))


@pytest.fixture
def session(emptied: Session, backend_name: str) -> Session:
    """The shared chat, where the kernel tells of a process whose it was."""
    if backend_name == "docker-runsc":
        pytest.skip("gVisor does not")
    return emptied


async def left_running(session: Session) -> list[ProcessRow]:
    return [each for each in await session.processes.list() if each.of == "left running"]


DAEMON = "os.fork() and sys.exit(); os.setsid(); os.fork() and sys.exit(); os.execlp(*2 * ['sleep']"
DAEMON = f"python3 -c \"import os, sys; {DAEMON}, '86320')\""


@pytest.mark.parametrize("command", ["sleep 86320 &", "setsid sleep 86320 &", DAEMON])
async def test_what_a_call_has_left_running_is_listed_and_stopped(
    session: Session, command: str
) -> None:
    await session.exec(f"touch new; echo told; {command}")
    (left,) = await left_running(session)
    line = f"{left.id}  running  0 s  {left.memory_bytes >> 20} MiB  (left running)  touch new; "
    assert line in text_of(format_processes([left]))
    assert left.memory_bytes > 0
    with pytest.raises(InvalidArgument, match=f"{left.id} gave its output to its call; "):
        await session.processes.wait(left.id)
    ended = await session.processes.stop(left.id)
    assert re.fullmatch(rf"\(no output\)\n\[{left.id} has ended after \d s: stopped\]", said(ended))
    assert (await session.exec("pgrep -fc '^sleep 8632[0]'")).stdout == "0\n"
    assert await left_running(session) == []
    with pytest.raises(NotFound, match=f"no process '{left.id}'"):
        await session.processes.stop(left.id)


async def test_a_call_has_one_row_for_all_that_it_has_left(session: Session) -> None:
    deaf = "trap '' TERM; touch deaf; while :; do sleep 0.05; done"
    many = "for n in {1..100}; do sleep 86321 & done"
    await session.exec(f'{many}; setsid bash -c "{deaf}" & until [ -e deaf ]; do sleep 0.02; done')
    (left,) = await left_running(session)
    assert (await session.processes.stop(left.id, grace_s=0.2)).stopped
    assert (await session.exec("pgrep -fc '^sleep 8632[1]|touch dea[f]'")).stdout == "0\n"


async def test_what_a_call_has_left_running_may_end_politely_or_by_itself(session: Session) -> None:
    polite = "trap 'touch bye; exit' INT; touch ready; while :; do sleep 0.02; done"
    await session.exec(f"({polite}) & until [ -e ready ]; do sleep 0.02; done")
    (left,) = await left_running(session)
    assert (await session.processes.stop(left.id, "INT", grace_s=20)).stopped
    assert (await session.glob("bye")).paths
    await session.exec(f"({UNTIL_TOLD}) &")
    (left,) = await left_running(session)
    await session.write_file("go", "")

    async def is_gone() -> bool:
        return not await left_running(session)

    await seen(is_gone)
    assert left.id not in [each.id for each in await session.processes.list()]
    assert await session.take_notices() == []


async def test_what_has_a_row_of_its_own_is_not_listed_as_left(session: Session) -> None:
    begun = await session.exec("setsid sleep 86322 & echo ready; sleep 86322", until="ready")
    child = "import subprocess; child = subprocess.Popen(['sleep', '86322'])"
    await session.run_code(child, notebook="n")
    await session.exec("cd /tmp", shell="s")
    assert await left_running(session) == []
    assert (await row(session, "n")).running
    await session.processes.stop("n")
    await session.processes.stop(begun.process or "", "KILL")


async def test_a_process_that_has_ended_is_listed_while_something_of_it_runs(
    session: Session,
) -> None:
    begun = await session.exec(f"setsid sleep 86323 & {UNTIL_TOLD} exit 3", wait_s=0)
    await session.write_file("go", "")
    assert (await session.processes.wait(begun.process or "")).exit_code == 3
    assert [each.id for each in await left_running(session)] == [begun.process]
    stopped = await session.processes.stop(begun.process or "")
    assert (stopped.stopped, stopped.exit_code) == (True, 3)
    assert not (await row(session, begun.process)).running
    assert (await session.exec("pgrep -fc '^sleep 8632[3]'")).stdout == "0\n"
