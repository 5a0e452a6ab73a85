"""What was printed reaches the agent, however the call ends."""

import hashlib
import re
from pathlib import Path

import pytest

from mcp_sandbox.server.text import clean_output as shown
from tests.e2e.stumbles.conftest import META, Agent
from tests.server.scripted import text_of

SAYS = {
    "python": "print('so far'); {more}",
    "bash": "echo so far; {more}",
    "javascript": "console.log('so far'); {more}",
}
WAITS = {
    "python": "import time; time.sleep(60)",
    "bash": "sleep 60",
    "javascript": "setTimeout(() => 0, 60000)",
}
DIES = {
    "python": "import os; os.kill(os.getpid(), 9)",
    "bash": "kill -9 $$",
    "javascript": "process.kill(process.pid, 'SIGKILL')",
}
GROWS = {
    "python": "x = bytearray(10**10)",
    "bash": "tail /dev/zero",
    "javascript": "const all = []; for (;;) all.push(Buffer.alloc(1e7, 1))",
}


@pytest.mark.parametrize("language", SAYS)
async def test_output_so_far_is_kept_at_a_time_out(agent: Agent, language: str) -> None:
    code = SAYS[language].format(more=WAITS[language])
    told = await agent.told("run_code", language=language, code=code, timeout_s=1)
    assert told.startswith("so far\n"), told
    assert re.search(r"timed out after 1(\.\d)? s", told)


@pytest.mark.parametrize("language", SAYS)
async def test_output_so_far_is_kept_when_a_program_is_killed(agent: Agent, language: str) -> None:
    code = SAYS[language].format(more=DIES[language])
    told = await agent.told("run_code", language=language, code=code)
    assert told.startswith("so far\n"), told
    assert "killed by signal SIGKILL" in told


@pytest.mark.parametrize("settings", [{"limits": {"memory": "256m"}}])
@pytest.mark.parametrize("language", SAYS)
async def test_output_so_far_is_kept_when_memory_runs_out(agent: Agent, language: str) -> None:
    code = SAYS[language].format(more=GROWS[language])
    told = await agent.told("run_code", language=language, code=code)
    assert told.startswith("so far\n"), told
    assert "[killed: out of memory]\n[all that runs here" in told
    assert " had 256 MiB" in told
    assert "`free` shows the host's" in told
    assert "`free` shows the host's" in await agent.told("sandbox_info")


async def test_python_started_by_a_command_keeps_its_output_too(agent: Agent) -> None:
    code = SAYS["python"].format(more=WAITS["python"])
    told = await agent.told("exec", command=f'python3 -c "{code}"', timeout_s=1)
    assert told.startswith("so far\n"), told


async def test_the_log_of_a_background_python_fills_as_it_prints(agent: Agent) -> None:
    started = "python3 -c \"print('up'); open('go').read()\" > log & "
    waits = "until [ -s log ]; do sleep 0.01; done; cat log; echo > go"
    told = await agent.told("exec", command=f"mkfifo go; {started}{waits}", timeout_s=10)
    assert told.startswith("up\n"), told


async def test_buffering_is_a_choice_of_the_call(agent: Agent) -> None:
    command = "python3 -c \"import os; print('kept back'); os.kill(os.getpid(), 9)\""
    told = await agent.told("exec", command=command, env={"PYTHONUNBUFFERED": ""})
    assert not told.startswith("kept back"), told


FILLS = "echo so far; while :; do head -c 4M /dev/zero >> big; sleep 0.05; done"


@pytest.mark.parametrize("settings", [{"workspace": {"size_limit": "32m"}}])
async def test_a_call_that_fills_the_workspace_keeps_its_output(
    agent: Agent, data_root: Path
) -> None:
    result = await agent.call("exec", command=FILLS, timeout_s=30)
    told = text_of(result)
    assert not result.is_error
    assert told.startswith("so far\n")
    assert "[killed: the workspace is full: " in told
    assert " MiB of 32 MiB are used (workspace and home together): delete files" in told
    assert result.meta[META]["killed_because"] in told
    # From now on nothing can be written, and the reason stands where it is ours.
    told = await agent.told(
        "run_code", code="print('so far')\nwith open('more', 'w') as f: f.write('x')"
    )
    assert told.startswith("so far\n")
    assert "]\n[the workspace is full: " in told
    assert "the workspace is full: " in await agent.refused("write_file", path="a", content="x")
    # A person makes room on the host.
    for file in (data_root / "sandbox" / "workspace").rglob("big"):
        file.unlink()
    assert await agent.told("write_file", path="a", content="x")


@pytest.mark.parametrize("settings", [{"workspace": {"user_quota": "32m"}}])
async def test_a_call_that_fills_the_quota_of_its_user_keeps_its_output(agent: Agent) -> None:
    told = await agent.told("exec", command=FILLS, timeout_s=30)
    assert told.startswith("so far\n")
    assert "[killed: all chats of this user together are full: " in told


@pytest.mark.parametrize("settings", [{"limits": {"file_size": "4m"}}])
@pytest.mark.parametrize(
    ("tool", "given", "ended"),
    [
        ("exec", {"command": "echo so far; head -c 5M /dev/zero > f; exit $?"}, "exit code 153"),
        ("exec", {"command": "echo so far; exec head -c 5M /dev/zero > f"}, "signal SIGXFSZ"),
        (
            "run_code",
            {"code": "print('so far')\nopen('f', 'wb').write(bytes(5 << 20))"},
            "exit code 1",
        ),
        (
            "run_code",
            {
                "code": "console.log('so far');"
                "require('fs').writeFileSync('f', Buffer.alloc(5 << 20))",
                "language": "javascript",
            },
            "exit code 1",
        ),
    ],
)
async def test_the_limit_of_a_files_size_is_named(
    agent: Agent, tool: str, given: dict[str, str], ended: str
) -> None:
    told = await agent.told(tool, **given)
    assert told.startswith("so far\n"), told
    assert f"{ended}]\n[one file passed the limit on its size (4 MiB " in told


@pytest.mark.parametrize("settings", [{"limits": {"tmp": "4m"}}])
async def test_a_full_tmp_is_named(agent: Agent) -> None:
    command = "echo so far; head -c 5M /dev/zero > /tmp/f"
    result = await agent.call("exec", command=command)
    assert text_of(result).startswith("so far\n")
    assert "[/tmp (4 MiB" in text_of(result)
    assert "/workspace" in result.meta[META]["limit"]


_TOUCHES = (
    "import mmap, os\nfd = os.open('{}/f', os.O_RDWR | os.O_CREAT)\nos.ftruncate(fd, 8 << 20)\n"
    "mapped = mmap.mmap(fd, 8 << 20)\nprint('so far')\nfor at in range(0, 8 << 20, 4096):\n"
    "    mapped[at] = 1"
)


@pytest.mark.parametrize("settings", [{"limits": {"tmp": "4m", "shm": "4m"}}])
@pytest.mark.parametrize("place", ["/tmp", "/dev/shm"])
@pytest.mark.parametrize(
    ("tool", "given", "ended"),
    [
        ("run_code", {"code": _TOUCHES}, "killed by signal SIGBUS"),
        ("exec", {"command": 'python3 -c "' + _TOUCHES + '"; exit $?'}, "exit code 135"),
        (
            "run_code",
            {"code": f"import subprocess as s\ns.run(['python3', '-c', {_TOUCHES!r}], check=True)"},
            "exit code 1",
        ),
    ],
)
async def test_a_full_file_system_in_memory_is_named_where_a_program_breaks(
    agent: Agent, tool: str, given: dict[str, str], ended: str, place: str
) -> None:
    told = await agent.told(tool, **{name: text.format(place) for name, text in given.items()})
    assert told.startswith("so far\n"), told
    assert f"{ended}]\n[bus errors mostly come of a full file system in memory: /tmp (4 MiB" in told
    assert "/dev/shm (4 MiB" in told


async def test_changed_files_are_told_in_natural_order_and_counted(agent: Agent) -> None:
    await agent.told("write_file", path="kept", content="x")
    await agent.told("exec", command="touch old1 old2 old3")
    result = await agent.call(
        "exec", command="touch file{1..500}; echo 2 > kept; sed -i s/x/y/ old1; rm old2 old3"
    )
    names = [f"file{number}" for number in range(1, 21)]
    assert f"[files created or changed: {', '.join(names)} and 482 more]" in text_of(result)
    meta = result.meta[META]
    assert meta["changed_files"] == names
    assert meta["file_counts"] == {"created": 500, "changed": 2, "deleted": 2}


async def test_changes_by_file_tools_are_not_told_of_the_next_command(agent: Agent) -> None:
    await agent.told("exec", command="mkdir sub; touch a sub/b")
    await agent.told("delete_file", path="a")
    await agent.told("move_file", source="sub/b", destination="sub/c")
    await agent.told("write_file", path="sub/d", content="1")
    meta = await agent.meta("exec", command="echo 2 > sub/d; rm sub/c; touch new")
    assert (meta["changed_files"], meta["created_files"]) == (["new", "sub/d"], ["new"])
    assert meta["file_counts"] == {"created": 1, "changed": 1, "deleted": 1}
    meta = await agent.meta(
        "run_code", code="import os, shutil; os.unlink('new'); shutil.rmtree('sub')"
    )
    assert meta["file_counts"] == {"created": 0, "changed": 0, "deleted": 2}


async def test_what_cannot_be_known_of_files_is_not_made_up(agent: Agent) -> None:
    meta = await agent.meta("exec", command="touch a; kill -9 $PPID; sleep 9", timeout_s=1)
    assert (meta["changed_files"], meta["created_files"]) == (None, None)
    assert meta["file_counts"] is None


async def test_the_hint_for_a_long_line_shows_what_was_left_out(agent: Agent) -> None:
    code = "print(''.join(f'{n:07},' for n in range(25_000)))"
    printed = "".join(f"{n:07}," for n in range(25_000))
    told = await agent.told("run_code", code=code)
    gap, head, tail, hint = parts_of(told)
    found = re.search(r"(tail -c \+\d+) (\S+) \| head -c 27000", hint)
    assert found, hint
    assert gap == len(printed) + 1 - len(head) - len(tail) > 27_000
    shown = await agent.told("exec", command=found[0])
    assert shown == printed[len(head) :][:27_000]
    everything = await agent.told("exec", command=f"{found[1]} {found[2]} | head -c {gap} | md5sum")
    left_out = printed[len(head) :][:gap].encode()
    assert everything.startswith(hashlib.md5(left_out).hexdigest())


@pytest.mark.parametrize(
    "code", ["'\\x1b[1m' + 'é' * 20_000", "'\\r\\n' * 9 + 'a\\x00\\u2028' * 9_000"]
)
async def test_the_hint_counts_bytes_as_they_were_printed(agent: Agent, code: str) -> None:
    told = await agent.told("run_code", code=f"print({code}, end='')")
    *_, hint = parts_of(told)
    found = re.search(r"tail -c \+(\d+) \S+ \| head -c \d+", hint)
    assert found, hint
    printed: bytes = eval(code).encode()
    head = told.partition("\n[… ")[0]
    before = shown(printed[: int(found[1]) - 1].decode(errors="ignore"))
    assert before == head


async def test_the_hint_for_lines_reads_on_where_the_head_ends(agent: Agent) -> None:
    told = await agent.told("exec", command="seq -f 'line %g' 9000")
    _, head, _, hint = parts_of(told)
    path, offset = re.findall(r"read_file path=(\S+) offset=(\d+)", hint)[0]
    rows = await agent.told("read_file", path=path, offset=int(offset), limit=1)
    assert rows.split("\n")[0].split("\t")[1] == f"line {len(head.splitlines()) + 1}"


async def test_trouble_in_the_part_left_out_is_counted(agent: Agent) -> None:
    code = (
        "import sys\nfor n in range(9000):\n"
        "    print('ERROR: bad' if n in (0, 4000, 5000) else f'line {n}')\n"
        "print('x' * 9, 'Exception', file=sys.stderr)"
    )
    told = await agent.told("run_code", code=code)
    assert "[2 lines left out with error|fail|exception|traceback: exec grep " in told
    command = told.rpartition(": exec ")[2].partition("]")[0]
    shown = (await agent.told("exec", command=command)).splitlines()
    # The two streams meet where they happen to.
    assert [row.partition(":")[2] for row in shown if "ERROR" in row] == ["ERROR: bad"] * 3
    assert "left out with" not in await agent.told("exec", command="seq 9000; echo error")


async def test_grep_shows_a_long_line_around_its_match(agent: Agent) -> None:
    line = "var é=1;" * 60_000 + "needle();" + "x();" * 100_000
    await agent.told("write_file", path="app.min.js", content=f"{line}\nneedle\n")
    told = await agent.told("grep", pattern="needle")
    first, second, note = told.splitlines()
    assert first.startswith("app.min.js:1:[column 480001] [...] ")
    assert "var é=1;needle();x();" in first
    assert first.endswith(" [...]")
    assert len(first) < 600
    assert second == "app.min.js:2:needle"
    assert note == "[2 matches in 1 file]"


def parts_of(told: str) -> tuple[int, str, str, str]:
    """How many bytes were left out, what is shown before and after them, and the hint."""
    head, _, rest = told.partition("\n[… ")
    hint, _, tail = rest.partition(" …]\n")
    gap = int(hint.partition(" bytes left out here; ")[0].replace(",", ""))
    return gap, head, tail.partition("\n[")[0], hint
