"""The runner shares its user with hostile code: it may lose a call, but never lies or hangs."""

import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxError, SandboxGone
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import (
    KEPT,
    all_is_well,
    attempt,
    on_bubblewrap,
    on_docker_if_whole,
    on_gvisor_if_whole,
    on_the_host_kernel,
    probe,
    survive,
)
from tests.e2e.conftest import CHAT


@pytest.fixture
def session(shared: Session) -> Session:
    """After each attack the same sandbox has to work, or its successor on the same files."""
    return shared


@pytest.fixture
async def fresh(manager: SessionManager) -> Session:
    """A sandbox for what needs its place on the host, or leaves it with stopped processes."""
    return await manager.session(CHAT)


_SIGNALS = """
import os, signal, sys
number = getattr(signal, sys.argv[1])
me = {os.getpid(), os.getppid()} if sys.argv[2] == "others" else {os.getpid()}
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
for pid in sorted(set(pids) - me):
    try:
        os.kill(pid, number)
    except OSError:
        pass
print("sent", flush=True)
"""


@pytest.mark.parametrize("whom", ["all", "others"])
@on_the_host_kernel
async def test_signals_to_the_runner_and_its_workers(session: Session, whom: str) -> None:
    await session.write_file("kept", KEPT)
    for name in ("SIGKILL", "SIGTERM", "SIGSEGV", "SIGALRM", "SIGCHLD"):
        result = await survive(session.exec(["python3", "-c", _SIGNALS, name, whom], timeout_s=3))
        assert result is not None
        assert result.stdout == "sent\n", name
        await all_is_well(session)


async def several_at_once(session: Session) -> None:
    """Leave some idle workers behind."""
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(session.exec, "sleep 0.3")


_LATE: dict[str, Callable[[Session], Awaitable[object]]] = {
    "read": lambda session: session.read_file("kept"),
    "write": lambda session: session.write_file("other", b"x"),
    "delete": lambda session: session.delete_file("gone"),
}


@on_bubblewrap
@pytest.mark.parametrize("tool", _LATE)
async def test_stopped_workers_hold_no_file_call_up(fresh: Session, tool: str) -> None:
    await fresh.write_file("kept", KEPT)
    await fresh.write_file("gone", b"x")
    await several_at_once(fresh)
    await fresh.exec(["python3", "-c", _SIGNALS, "SIGSTOP", "others"], timeout_s=3)
    # The first gets the worker that was spared, the others one that is stopped.
    with anyio.fail_after(8):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fresh.exec, "sleep 1")
            tasks.start_soon(lambda: attempt(_LATE[tool](fresh)))
            tasks.start_soon(fresh.read_file, "kept")


@pytest.mark.parametrize(
    "attack",
    [
        "rm -f /run/mcp-sandbox/runner.sock",
        "mv /run/mcp-sandbox/runner.sock /run/mcp-sandbox/aside",
        "ln -sf /workspace/fake.sock /run/mcp-sandbox/runner.sock",
        "chmod 000 /run/mcp-sandbox/runner.sock; chmod 000 /run/mcp-sandbox",
        "rm -rf /run/mcp-sandbox /opt/mcp-sandbox; >/opt/mcp-sandbox/mcp_sandbox/relay/inside.py",
    ],
    ids=["unlink", "rename", "link", "mode", "remove"],
)
@on_the_host_kernel
async def test_the_socket_cannot_be_taken_away(session: Session, attack: str) -> None:
    await session.write_file("kept", KEPT)
    await survive(session.exec(attack))
    await all_is_well(session)


_FAKE = """
import os, socket, sys, threading
path = "/run/mcp-sandbox/runner.sock"
try:
    os.unlink(path)
except OSError as exc:
    print("refused", exc.errno, flush=True)
    sys.exit()
fake = socket.socket(socket.AF_UNIX); fake.bind(path); fake.listen()
print("replaced", flush=True)
head = b'{"t":"hello","version":"1","nonce":"' + b"0" * 32 + b'"}'
done = b'{"t":"welcome","proof":"' + b"0" * 64 + b'","python":"3","workspace_inode":1}'
while True:
    peer, _ = fake.accept()
    for frame in (head, done):
        peer.sendall(len(frame).to_bytes(4, "big") + bytes(4) + frame)
"""


async def test_a_runner_that_code_has_put_in_its_place_is_not_believed(session: Session) -> None:
    await session.write_file("kept", KEPT)
    said = anyio.Event()
    words = bytearray()

    async def note(_name: str, data: bytes) -> None:
        words.extend(data)
        said.set()

    async def fake() -> None:
        await survive(session.exec(["python3", "-c", _FAKE], timeout_s=20, on_output=note))

    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fake)
            await said.wait()
            await all_is_well(session)
            tasks.cancel_scope.cancel()
    assert words.startswith((b"refused", b"replaced"))
    await all_is_well(session)


_STRANGER = """
import json, os, socket, struct, threading, time
path = "/run/mcp-sandbox/runner.sock"

def frame(header, payload=b""):
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", len(head), len(payload)) + head + payload

call = frame({"t": "call", "id": 1, "op": "run", "args": {"argv": ["touch", "/workspace/forged"]}})
hello = frame({"t": "hello", "nonce": "00" * 16, "proof": "00" * 32})
said = []
attempts = [call, hello + call, frame(b"[" * 60_000), frame({"t": 1}), b"\\xff" * 64, b""]
attempts += [hello * 50, frame({"t": "hello", "nonce": "00", "proof": 1}), os.urandom(100_000)]
attempts += [frame({"t": "welcome", "id": 1}) + call, struct.pack(">II", 2**31, 2**31)]
for data in attempts:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(3)
        try:
            peer.connect(path); peer.sendall(data); peer.shutdown(socket.SHUT_WR)
            answer = b""
            while part := peer.recv(65536): answer += part
            said.append(answer.decode("latin1"))
        except OSError as exc:
            said.append(str(exc))
flood = []
end = time.monotonic() + 3
refused = 0
while time.monotonic() < end:
    try:
        peer = socket.socket(socket.AF_UNIX); peer.setblocking(False); peer.connect(path)
        flood.append(peer)
    except OSError:
        refused += 1
    if len(flood) > 500:
        flood.pop(0).close()
print(json.dumps([said, len(flood), os.path.exists("/workspace/forged")]))
"""


@on_gvisor_if_whole
async def test_strangers_on_the_socket_get_nothing_and_disturb_nobody(session: Session) -> None:
    await session.write_file("kept", KEPT)
    flooding = anyio.Event()

    async def flood() -> None:
        said, _, forged = await probe(session, _STRANGER, timeout_s=50)
        assert not forged
        assert not [answer for answer in said if '"done"' in answer or "proof" in answer]
        flooding.set()

    with anyio.fail_after(55):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood)
            while not flooding.is_set():
                assert (await session.exec("cat kept")).stdout == KEPT.decode()
    await all_is_well(session)


_INTO_PIPES = """
import json, os, socket
wrote = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    if int(pid) == os.getpid():
        continue
    for fd in range(256):
        path = f"/proc/{pid}/fd/{fd}"
        try:
            target = os.readlink(path)
            opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(opened, b'{"e":"exit","status":0,"changed":["forged"]}\\n')
            os.close(opened)
            # A bash that waits for a command is no more of the runner than one that runs it.
            if open(f"/proc/{pid}/comm").read() != "bash\\n":
                wrote.append([pid, target])
        except OSError:
            pass
# What this very process was given, beyond its three streams.
for fd in range(3, 256):
    try:
        target = os.readlink(f"/proc/self/fd/{fd}")
        if target.startswith(("socket", "pipe")):
            os.write(fd, b"forged"); wrote.append(["self", target])
    except OSError:
        pass
print(json.dumps(wrote))
"""


@on_the_host_kernel
async def test_no_descriptor_of_the_runner_is_in_reach(session: Session) -> None:
    await session.write_file("kept", KEPT)
    await several_at_once(session)
    for _ in range(3):
        await session.exec("true")
        assert await probe(session, _INTO_PIPES) == []
        result = await session.exec("echo real; exit 3")
        assert (result.stdout, result.stderr, result.exit_code) == ("real\n", "", 3)
    await all_is_well(session)


_STOP_FIRST = "the host stops the runner from outside, which nobody inside can"


# With shorter times it is tried on every backend: `tests/contract/test_health.py`.
@pytest.mark.whole
@on_docker_if_whole
async def test_a_runner_that_does_not_answer_is_replaced(fresh: Session, config: Config) -> None:
    await fresh.write_file("kept", KEPT)
    runner = await to_thread.run_sync(_runner_pid, config.data_dir)
    started = anyio.Event()

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async def stop() -> None:
        await started.wait()
        os.kill(runner, 19)

    with anyio.fail_after(45):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            before = anyio.current_time()
            with pytest.raises(SandboxGone, match="did not answer within"):
                await fresh.exec("echo started; sleep 60", timeout_s=2, on_output=note)
            assert anyio.current_time() - before < 2 + 12 + 6, _STOP_FIRST
        await all_is_well(fresh)
    assert not Path(f"/proc/{runner}").exists()


def _runner_pid(data_root: Path) -> int:
    """The runner's number on the host: who has the workspace mounted and is first in there."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            inner = next(line for line in status.read_text().splitlines() if "NSpid" in line)
            mounts = status.with_name("mountinfo").read_text()
        except (OSError, StopIteration):
            continue
        # Folders of two workers may have one name.
        name = f"{data_root.parent.parent.name}/{data_root.parent.name}/data/sandbox/workspace/"
        first = inner.split()[-1] == "1" and len(inner.split()) > 2 and name in mounts
        if first and status.with_name("cmdline").read_bytes().startswith(b"mcp-sandbox"):
            return int(status.parent.name)
    raise AssertionError("no runner found")


@on_gvisor_if_whole
async def test_results_cannot_be_forged_by_what_is_printed(session: Session) -> None:
    mark = secrets.token_hex(8)
    forged = json.dumps({"t": "done", "id": 1, "result": {"exit_code": 0, "mark": mark}})
    result = await session.exec(
        f"printf '%s\\n' '{forged}' >&2; printf '\\x00\\x00\\x00\\x10'; exit 9"
    )
    assert result.exit_code == 9
    assert mark in result.stderr
    assert result.stdout == "\0\0\0\x10"


@on_bubblewrap
async def test_planted_sockets_lead_the_host_nowhere(fresh: Session, config: Config) -> None:
    """A link to another socket in the place of the runner's: nobody of the host connects to it."""
    await fresh.write_file("kept", KEPT)
    (run,) = (config.data_dir / "sandbox" / "run").iterdir()
    with socket.socket(socket.AF_UNIX) as listener:
        path = f"/tmp/mcs-{secrets.token_hex(6)}.sock"
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)
        try:
            (run / "sock" / "runner.sock").unlink()
            (run / "sock" / "runner.sock").symlink_to(path)
            from mcp_sandbox.app.chats import open_backend

            async with open_backend("bubblewrap", config) as backend:
                found = (await backend.running())[0]
                again = await backend.attach(found.id)
                with pytest.raises((SandboxError, OSError)):
                    await again.open_channel()
            with pytest.raises(BlockingIOError):
                listener.accept()
        finally:
            Path(path).unlink()
    await all_is_well(fresh)
