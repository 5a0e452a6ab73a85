"""Nothing inside takes more of the machine than its limits, and the server stays small."""

import os
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config, LimitsConfig, WorkspaceConfig
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.conftest import configured
from tests.e2e.attacks import (
    BUBBLEWRAP,
    DOCKER,
    GVISOR,
    WHOLE,
    attempt,
    gap,
    on_bubblewrap,
    on_docker_if_whole,
    on_the_host_kernel,
    probe,
)
from tests.e2e.conftest import CHAT
from tests.e2e.endurance.places import Place
from tests.streams import printing

# It looks at what the whole disk has lost.
alone = pytest.mark.alone

MIB = 1024 * 1024
LIMIT = 32 * MIB
# A call may overshoot by what the disk takes between two looks at the workspace.
SLACK = 256 * MIB


@pytest.fixture
def small(backend_name: str, data_root: Path) -> Config:
    """Tight limits. In gVisor its own kernel counts too: what it needs is left to it."""
    limits = LimitsConfig(memory=256 * MIB, pids=64, open_files=128, file_size=64 * MIB)
    if backend_name == "docker-runsc":
        limits = LimitsConfig(memory=512 * MIB, file_size=64 * MIB)
    return configured(backend_name, data_root).model_copy(
        update={
            "workspace": WorkspaceConfig(size_limit=LIMIT, max_files=2000),
            "limits": limits,
        }
    )


@pytest.fixture
async def tight(small: Config) -> AsyncGenerator[Session]:
    async with open_manager(small) as manager:
        yield await manager.session(CHAT)


def allocated(root: Path) -> int:
    """What a data root takes on the disk, open files without a name left out."""
    total = 0
    for folder, _, names in os.walk(root):
        total += sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in names)
    return total


def taken(root: Path, free_before: int) -> int:
    """What the disk has lost since, open files without a name included."""
    status = os.statvfs(root)
    return max(allocated(root), free_before - status.f_bavail * status.f_frsize)


def free(root: Path) -> int:
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


@on_the_host_kernel
async def test_a_memory_bomb_takes_the_limit_and_no_more(tight: Session) -> None:
    bomb = "kept = []\nwhile True: kept.append(bytearray(16 << 20))"
    for _ in range(2):
        result = await tight.run_code(bomb, timeout_s=30)
        assert not result.success
        assert result.out_of_memory or "MemoryError" in result.stderr or result.signal
    shared = await tight.exec("head -c 100M /dev/zero > /dev/shm/x; stat -c %s /dev/shm/x")
    assert int(shared.stdout) <= 64 * MIB
    assert (await tight.exec("rm -f /dev/shm/x; echo fine")).stdout == "fine\n"


_DESCRIPTORS = """
import json, os, resource
opened = []
try:
    while len(opened) < 100_000: opened.append(os.open("/dev/null", 0))
except OSError as exc:
    pass
pipes = 0
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 20, 1 << 20)); raised = True
except (OSError, ValueError):
    raised = False
print(json.dumps([len(opened), raised]))
"""


@on_the_host_kernel
async def test_open_files_are_limited(tight: Session) -> None:
    opened, raised = await probe(tight, _DESCRIPTORS)
    assert opened < 128
    assert not raised


@pytest.mark.parametrize("backend_name", [DOCKER, GVISOR, BUBBLEWRAP], indirect=True)
async def test_message_queues_are_limited(session: Session) -> None:
    code = "import json, resource; print(json.dumps(resource.getrlimit(resource.RLIMIT_MSGQUEUE)))"
    assert await probe(session, code) == [819_200, 819_200]


_TERMINALS = """
import os, sys, time
held = []
while len(held) < int(sys.argv[1]):
    held += os.openpty()[:1]
print(len(held), flush=True)
time.sleep(float(sys.argv[2]))
"""


async def few_terminals(session: Session) -> None:
    """Return when so few are open; a command that looks may be ended as the newest."""
    with anyio.fail_after(20):
        while True:
            looked = await session.exec("ls /dev/pts | wc -l")
            if looked.success and int(looked.stdout) <= 64:
                return


@pytest.mark.parametrize("backend_name", [DOCKER, GVISOR, BUBBLEWRAP], indirect=True)
async def test_terminals_are_limited(session: Session) -> None:
    await session.write_file("many.py", _TERMINALS.encode())
    some = await session.exec("python3 many.py 40 3", timeout_s=20)
    assert (some.exit_code, some.stdout) == (0, "40\n")
    many = await session.exec("python3 many.py 90 60", timeout_s=30)
    assert not many.timed_out
    assert "more than 64 terminals" in many.stderr
    await few_terminals(session)


# gVisor has terminals of its own, and does not tell which tree a left process is of.
@pytest.mark.parametrize("backend_name", [DOCKER, BUBBLEWRAP], indirect=True)
async def test_terminals_of_what_runs_on_are_limited(session: Session) -> None:
    await session.write_file("many.py", _TERMINALS.encode())
    # As the newest, this may be ended before what it leaves running.
    await session.exec("setsid python3 many.py 90 60 > out & until grep 90 out; do sleep 0.1; done")
    await few_terminals(session)
    gone = "while pgrep -f '^python3 many.py'; do sleep 0.1; done"
    assert (await session.exec(gone, timeout_s=20)).success


@on_the_host_kernel
async def test_processes_are_limited(tight: Session) -> None:
    bomb = (
        "import json, os, signal\nn = 0\n"
        "while n < 5000:\n"
        "    try:\n"
        "        if os.fork() == 0: signal.pause()\n"
        "        n += 1\n"
        "    except OSError:\n"
        "        break\n"
        "print(json.dumps(n))"
    )
    assert await probe(tight, bomb) < 64
    assert (await tight.run_code("print(1)")).stdout == "1\n"


@alone
async def test_a_file_bomb_is_stopped_and_deleting_makes_room(
    tight: Session, small: Config
) -> None:
    before = free(small.data_dir.parent)
    bomb = "n=0; while :; do n=$((n+1)); head -c 8M /dev/zero > big$n; sleep 0.1; done"
    with anyio.fail_after(40):
        ended = await tight.exec(f"echo begun; {bomb}", timeout_s=30)
    assert "the workspace is full" in (ended.killed_because or "")
    assert ended.stdout == "begun\n"
    # Those in a pod are looked at every five seconds alone.
    slack = SLACK * (4 if small.backend == "kubernetes" else 1)
    assert taken(small.data_dir, before) < LIMIT + slack
    assert "WorkspaceFull" in await attempt(tight.write_file("more", b"x"))
    assert "WorkspaceFull" in await attempt(tight.edit_file("big1", "a", "b"))
    assert "FileContent" in await attempt(tight.read_file("big1"))
    assert "big1" in (await tight.exec("ls")).stdout
    for path in (await tight.glob("big*")).paths:
        await tight.delete_file(path)
    assert "WriteResult" in await attempt(tight.write_file("more", b"x"))
    assert (await tight.exec("echo again > more; cat more")).stdout == "again\n"


@on_the_host_kernel
async def test_a_bomb_of_empty_files_is_stopped(tight: Session, small: Config) -> None:
    bomb = "import os, time\nfor n in range(60_000):\n    os.mkdir(f'd{n}')\n    time.sleep(0.0001)"
    with anyio.fail_after(40):
        ended = await tight.run_code(f"{bomb}\nwhile True: time.sleep(1)", timeout_s=30)
    assert "files and directories" in (ended.killed_because or "")


@on_the_host_kernel
async def test_the_home_counts_as_the_workspace_does(tight: Session) -> None:
    with anyio.fail_after(40):
        ended = await tight.exec(
            "n=0; while :; do n=$((n+1)); head -c 8M /dev/zero > ~/big$n; sleep 0.1; done"
        )
    assert "the workspace is full" in (ended.killed_because or "")


async def test_temporary_places_are_bounded(session: Session) -> None:
    filled = await session.exec(
        "for d in /tmp /var/tmp /dev/shm /run/mcp-sandbox /run /var/run /dev /dev/mqueue; do\n"
        "  head -c 300M /dev/zero > $d/fill 2>/dev/null; wc -c < $d/fill 2>/dev/null\n"
        "  rm -f $d/fill; done",
        timeout_s=60,
    )
    sizes = [int(line) for line in filled.stdout.split()]
    assert sizes
    assert max(sizes) <= 256 * MIB


# Each line is a way to fill the disk of the host that looks at the workspace's files miss.
_UNSEEN = {
    "deleted": (
        "import os, time\n"
        "kept = []\n"
        "for n in range(8):\n"
        "    kept.append(open('x', 'wb', 0)); os.unlink('x')\n"
        "    kept[-1].write(bytes(24 << 20)); time.sleep(0.25)\n"
    ),
    "nameless": (
        "import os, time\n"
        "for n in range(8):\n"
        "    fd = os.open('.', os.O_TMPFILE | os.O_RDWR)\n"
        "    os.write(fd, bytes(24 << 20)); time.sleep(0.25)\n"
    ),
}


@gap("files that are open and have no name are on the disk and in no directory")
@on_bubblewrap
@pytest.mark.parametrize("way", ["nameless", pytest.param("deleted", marks=WHOLE)])
async def test_files_without_a_name_count(tight: Session, small: Config, way: str) -> None:
    with anyio.fail_after(40):
        # Eight times 24 MiB are asked for; the call is to be ended long before.
        ended = await tight.run_code(_UNSEEN[way], timeout_s=30)
    assert "the workspace is full" in (ended.killed_because or "")


@on_bubblewrap
async def test_what_goes_on_in_the_background_is_stopped_too(tight: Session, small: Config) -> None:
    await tight.exec(
        "(for n in $(seq 20); do head -c 24M /dev/zero > big$n; sleep 0.25; done; touch /tmp/done)"
        " >/dev/null 2>&1 &"
    )
    async with open_backend("bubblewrap", small) as backend:
        with anyio.fail_after(40):
            # Nothing but the whole sandbox is known to hold what runs in the background.
            while await backend.running():
                await anyio.sleep(0.1)
    assert allocated(small.data_dir) <= LIMIT + SLACK
    assert (await tight.exec("pgrep -c head")).stdout == "0\n"


@on_bubblewrap
async def test_many_short_calls_do_not_pass_the_limit(tight: Session, small: Config) -> None:
    for n in range(16):
        await attempt(tight.exec(f"head -c 24M /dev/zero > f{n}"))
    assert allocated(small.data_dir) <= LIMIT + SLACK


@on_bubblewrap
async def test_moving_into_a_full_workspace_is_refused(tight: Session, small: Config) -> None:
    await attempt(tight.exec("head -c 33M /dev/zero > full; head -c 20M /dev/zero > /tmp/more"))
    assert "WorkspaceFull" in await attempt(tight.move_file("/tmp/more", "moved"))


@on_bubblewrap
async def test_resets_do_not_pile_up_trash_without_limit(tight: Session, small: Config) -> None:
    for _ in range(12):
        await tight.exec("head -c 30M /dev/zero > kept")
        await attempt(tight.reset(keep_files=False))
    assert allocated(small.data_dir / "sandbox" / "trash") <= LIMIT + SLACK


@on_bubblewrap
async def test_a_full_workspace_can_be_read_and_emptied_but_not_written(
    tight: Session, small: Config
) -> None:
    await attempt(tight.exec("head -c 40M /dev/zero > full; echo kept > note"))
    for _ in range(5):
        written = await tight.exec("head -c 900k /dev/zero > more; wc -c < more")
        assert written.stdout == "0\n", written
        assert "the workspace is full" in written.limit or written.success
        code = "with open('py', 'wb') as f: f.write(bytes(900_000))"
        refused = await tight.run_code(code)
        assert "File too large" in refused.stderr
        assert "the workspace is full" in refused.limit
    assert (await tight.exec("cat note; rm full more py; echo gone")).stdout.endswith("gone\n")
    assert (await tight.exec("head -c 900k /dev/zero > more; wc -c < more")).stdout == "921600\n"


_FILL_LOG = """
import os, time
end = time.monotonic() + 1
while time.monotonic() < end:
    os.write(2, bytes(1 << 20))
"""


@on_bubblewrap
async def test_start_up_code_of_the_chat_cannot_fill_the_hosts_disk(
    tight: Session, small: Config
) -> None:
    folder = (await tight.exec("python3 -m site --user-site")).stdout.strip()
    await tight.write_file(f"{folder}/usercustomize.py", _FILL_LOG.encode())
    await tight.reset()
    assert (await tight.run_code("print(1)")).stdout == "1\n"
    assert allocated(small.data_dir / "sandbox" / "run") < 4 * MIB


def resident(pid: int | str = "self") -> int:
    """The memory of a process now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) * 1024


class Growth:
    """How much memory this process, which is the server here, took at most in a block."""

    def __init__(self) -> None:
        self.most = 0

    async def watch(self, *, before: int) -> None:
        while True:
            self.most = max(self.most, resident() - before)
            await anyio.sleep(0.05)


@on_docker_if_whole
@pytest.mark.parametrize(
    ("command", "least"),
    [
        ("head -c 256M /dev/zero | tr '\\0' 'x\\n'", 256 * MIB),
        ("head -c 128M /dev/zero | tr '\\0' x", 128 * MIB),
        ("yes 'no end to be seen'", 50 * MIB),
        ("yes >&2", 50 * MIB),
    ],
    ids=["much", "one-line", "endless", "endless-errors"],
)
async def test_output_of_any_length_costs_the_server_nothing(
    session: Session, command: str, least: int
) -> None:
    await session.exec("true")
    growth, live = Growth(), 0

    async def note(_name: str, data: bytes) -> None:
        nonlocal live
        live += len(data)

    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            before = resident()
            tasks.start_soon(lambda: growth.watch(before=before))
            timeout_s = 40 if "head" in command else 1
            result = await session.exec(command, timeout_s=timeout_s, on_output=note)
            tasks.cancel_scope.cancel()
    assert result.stdout_bytes + result.stderr_bytes >= least, result.stdout_bytes
    assert len(result.stdout) + len(result.stderr) < 300_000
    assert result.truncated
    assert growth.most < 32 * MIB
    kept = await session.exec("du -sm ~/.mcp-sandbox | cut -f1")
    assert int(kept.stdout) < 100


@on_docker_if_whole
async def test_huge_files_are_read_and_searched_in_little_memory(session: Session) -> None:
    made = await session.exec(
        "head -c 128M /dev/zero | tr '\\0' x > line; yes 0123456789abcde | head -c 256M > lines"
    )
    assert made.success, made
    growth = Growth()
    with anyio.fail_after(55):
        async with anyio.create_task_group() as tasks:
            before = resident()
            tasks.start_soon(lambda: growth.watch(before=before))
            one = await session.read_file("line")
            last = await session.read_file("lines", offset=1_000_000, limit=5)
            await attempt(session.grep("cde$", "lines", limit=50))
            await attempt(session.grep("nowhere", "line"))
            await attempt(session.edit_file("line", "a", "b"))
            tasks.cancel_scope.cancel()
    assert len(one.data) < 100_000
    assert last.lines == 5
    assert growth.most < 32 * MIB
    assert (await session.exec("rm line lines; echo fine")).stdout == "fine\n"


@on_the_host_kernel
async def test_what_one_chat_hoards_no_other_lacks(manager: SessionManager) -> None:
    """The kernel counts some things by user, and sandboxes share a user number."""
    hoarder = await manager.session(ChatId("u", "hoarder"))
    other = await manager.session(ChatId("u", "other"))
    await other.exec("true")
    hoard = (
        "import ctypes, fcntl, os, time\nlibc = ctypes.CDLL(None)\nkept = []\n"
        "for _ in range(600): libc.inotify_init()\n"
        "try:\n"
        "    for _ in range(1000):\n"
        "        r, w = os.pipe(); kept += [r, w]; fcntl.fcntl(w, 1031, 1 << 20)\n"
        "except OSError:\n    pass\n"
        "print('hoarded', flush=True)\ntime.sleep(60)\n"
    )
    with anyio.fail_after(40):
        async with printing(hoarder, ["python3", "-c", hoard]):
            data = os.urandom(4 * MIB)
            await other.write_file("big", data)
            result = await other.exec("wc -c; sha256sum < big", stdin=data)
            assert str(len(data)) in result.stdout
            assert (await other.run_code("print(1)")).stdout == "1\n"


@pytest.mark.parametrize("backend_name", [GVISOR], indirect=True)
async def test_a_memory_bomb_in_gvisor_leaves_the_files(tight: Session) -> None:
    await tight.write_file("kept", b"kept")
    try:
        result = await tight.run_code(
            "kept = []\nwhile True: kept.append(bytearray(16 << 20))", timeout_s=20
        )
        assert not result.success
    except SandboxGone:
        pass
    assert (await tight.exec("cat kept")).stdout == "kept"


@alone
def test_these_figures_are_of_the_disk_that_is_looked_at() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = free(Path(folder))
        (Path(folder) / "data").write_bytes(os.urandom(8 * MIB))
        assert taken(Path(folder), before) >= 8 * MIB


@pytest.mark.slow
@pytest.mark.timeout(120)
@on_docker_if_whole
@pytest.mark.parametrize("what", ["much output", "many processes"])
async def test_processes_cost_the_runner_nothing(
    session: Session, config: Config, what: str
) -> None:
    assert config.backend != "auto"
    for _ in range(40):
        await session.exec("true")
        await session.processes.wait((await session.exec("true", wait_s=0)).process or "")
    runner = Place(config.data_dir, config.backend, set()).runner(CHAT.chat)
    before = resident(runner)
    if what == "much output":
        begun = await session.exec("head -c 256M /dev/zero | tr '\\0' 'x\\n'", wait_s=0)
        with anyio.fail_after(60):
            ended = await session.processes.wait(begun.process or "")
        assert ended.stdout_bytes == 256 * MIB
    else:
        for _ in range(500):
            await session.exec(["true"], wait_s=0)
    assert resident(runner) - before < 4 * MIB
    zombies = await session.exec("ps -eo stat= | grep -c ^Z")
    assert zombies.stdout == "0\n"
    await session.take_notices()
