"""A chat reaches no other chat, and no service of the host."""

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.conftest import IN_A_REAL_CLUSTER
from tests.e2e.attacks import attempt, on_docker, probe

OTHER = ChatId("victim", "private")

_LEAVE_TRACES = """
import ctypes, os, socket, subprocess, sys
mark = sys.argv[1]
for folder in ("/workspace", "/home/sandbox", "/tmp", "/dev/shm"):
    open(f"{folder}/{mark}", "w").write(mark)
abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0" + mark); abstract.listen()
tcp = socket.create_server(("0.0.0.0", 47113))
libc = ctypes.CDLL(None, use_errno=True)
print("shm", libc.shmget(0x4D435358, 4096, 0o1666), "queue", libc.msgget(0x4D435358, 0o1666))
print("listening", flush=True)
import signal; signal.pause()
"""

_LOOK_FOR_TRACES = """
import ctypes, json, os, socket, subprocess
mark = {mark!r}
found = []
for folder, _, names in os.walk("/", followlinks=False):
    if folder.startswith(("/proc", "/sys", "/usr")):
        continue
    found += [os.path.join(folder, name) for name in names if mark in name]
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ"):
        try:
            text = open(f"/proc/{{pid}}/{{name}}", "rb").read()
        except OSError:
            continue
        if mark.encode() in text and int(pid) != os.getpid():
            found.append(f"/proc/{{pid}}/{{name}}")
if mark in open("/proc/net/unix").read():
    found.append("abstract socket listed")
for family, address in ((socket.AF_UNIX, "\\0" + mark), (socket.AF_INET, ("127.0.0.1", 47113))):
    try:
        socket.socket(family).connect(address)
        found.append(f"reached {{address}}")
    except OSError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
for name, call in (("shm", libc.shmget), ("queue", libc.msgget)):
    if (call(0x4D435358, 0, 0) if name == "queue" else call(0x4D435358, 4096, 0)) >= 0:
        found.append(name)
print(json.dumps(found))
"""


async def test_chats_share_nothing(manager: SessionManager, session: Session) -> None:
    mark = f"mark{secrets.token_hex(8)}"
    victim = await manager.session(OTHER)
    listening = anyio.Event()
    said = bytearray()

    async def note(_name: str, data: bytes) -> None:
        said.extend(data)
        if b"listening" in said:
            listening.set()

    async def live() -> None:
        await victim.exec(
            ["python3", "-c", _LEAVE_TRACES, mark], env={"MARK": mark}, on_output=note
        )

    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live)
            await listening.wait()
            # In its own chat all of it is there to be found, so looking is of use.
            own = await probe(victim, _LOOK_FOR_TRACES.format(mark=mark))
            found = await probe(session, _LOOK_FOR_TRACES.format(mark=mark))
            tasks.cancel_scope.cancel()
    assert len(own) >= 8, (own, said)
    assert found == []
    assert mark not in await attempt(session.grep(mark, "/tmp"))


@contextlib.contextmanager
def host_services() -> Iterator[list[socket.socket]]:
    """Real listeners on every address that the host has, tried out from the host."""
    with contextlib.ExitStack() as stack:
        opened = []
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")):
            listener = stack.enter_context(socket.socket(family))
            listener.bind((address, 0))
            listener.listen()
            opened.append(listener)
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0mcs-{secrets.token_hex(8)}")
        abstract.listen()
        opened.append(abstract)
        for listener in opened:
            with socket.socket(listener.family) as client:
                client.connect(listener.getsockname())
            listener.accept()[0].close()
            listener.setblocking(False)
        yield opened


def host_addresses() -> list[str]:
    """The IPv4 addresses of this machine, the bridges of the engine among them."""
    text = Path("/proc/net/fib_trie").read_text().split("\n")
    local = {text[n - 1].split()[-1] for n, line in enumerate(text) if "/32 host LOCAL" in line}
    return sorted(local)


_CONNECT = """
import json, socket
reached = []
for family, address in {targets!r}:
    with socket.socket(family) as client:
        client.settimeout(2)
        try:
            client.connect(tuple(address) if isinstance(address, list) else address)
            reached.append(str(address))
        except OSError:
            pass
print(json.dumps(reached))
"""


async def test_without_a_network_no_service_of_the_host_is_reached(
    session: Session, backend_name: str
) -> None:
    with host_services() as (four, six, abstract):
        port, addresses = four.getsockname()[1], host_addresses()
        assert "127.0.0.1" in addresses
        targets: list[tuple[int, object]] = [
            (int(socket.AF_INET), [address, port]) for address in addresses
        ]
        targets.append((int(socket.AF_INET6), ["::1", six.getsockname()[1]]))
        targets.append((int(socket.AF_UNIX), "\0" + abstract.getsockname()[1:].decode()))
        assert await probe(session, _CONNECT.format(targets=targets)) == []
        for listener in (four, six, abstract):
            with pytest.raises(BlockingIOError):
                listener.accept()
    interfaces = (await session.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split()
    # A real pod has one, and a policy that lets nothing pass.
    own = {"eth0"} if backend_name == "kubernetes" and IN_A_REAL_CLUSTER else set[str]()
    tunnels = {"tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0"}
    assert set(interfaces) <= {"lo", *tunnels, *own}


@on_docker
async def test_open_networks_of_two_chats_do_not_meet(config: Config, data_root: Path) -> None:
    async with open_manager(config.model_copy(update={"network": "open"})) as manager:
        one, other = await manager.session(ChatId("u", "one")), await manager.session(OTHER)
        listening = anyio.Event()
        said = bytearray()

        async def note(_name: str, data: bytes) -> None:
            said.extend(data)
            listening.set()

        serve = (
            "import socket\ns = socket.create_server(('0.0.0.0', 47114))\n"
            "print(open('/proc/net/fib_trie').read(), flush=True)\n"
            "while True: s.accept()[0].close()"
        )
        with anyio.fail_after(40):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    lambda: one.exec(["python3", "-c", serve], timeout_s=30, on_output=note)
                )
                await listening.wait()
                address = next(
                    line.split()[-1]
                    for line, kind in zip(
                        said.decode().split("\n"), said.decode().split("\n")[1:], strict=False
                    )
                    if "host LOCAL" in kind and "127." not in line
                )
                targets = [(int(socket.AF_INET), [address, 47114])]
                assert await probe(one, _CONNECT.format(targets=targets)) != []
                assert await probe(other, _CONNECT.format(targets=targets)) == []
                tasks.cancel_scope.cancel()
