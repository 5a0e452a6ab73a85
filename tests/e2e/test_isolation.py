"""No tool and no code reaches the host, its secrets, its services or another chat."""

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import Config
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import (
    BUBBLEWRAP,
    DOCKER,
    GVISOR_SHOWS_ENVIRONMENT,
    attempt,
    on_bubblewrap,
    on_docker,
    on_the_host_kernel,
    probe,
)

OTHER = ChatId("victim", "private")


async def test_no_link_leads_out_of_the_sandbox(session: Session, treasure: Path) -> None:
    secret = (treasure / "secret").read_text()
    await session.exec(
        f"ln -s {treasure} absolute; ln -s ../../../../../..{treasure} upward\n"
        f"ln -s /proc/self/root{treasure} own_root; ln -s /proc/1/root{treasure} first_root\n"
        f"ln -s /proc/self/cwd/../../..{treasure} own_cwd; ln -s /proc/self/fd opened\n"
        f"ln {treasure}/secret hard; ln -s {treasure}/secret file"
    )
    shown: list[str] = []
    for link in ("absolute", "upward", "own_root", "first_root", "own_cwd", f"..{treasure}"):
        path = f"{link}/secret"
        shown += [
            await attempt(session.read_file(path)),
            await attempt(session.list_files(link)),
            await attempt(session.glob("*", link)),
            await attempt(session.grep("[0-9a-f]{32}", link)),
            await attempt(session.write_file(path, b"tampered", append=True)),
            await attempt(session.write_file(path, b"tampered")),
            await attempt(session.edit_file(path, secret[:8], "tampered")),
            await attempt(session.move_file(path, f"stolen-{link[:3]}")),
            await attempt(session.delete_file(path)),
            await attempt(session.delete_file(f"{link}/", recursive=True)),
            await attempt(session.exec(f"cat {path}; echo tampered >> {path}")),
        ]
    shown.append(await attempt(session.read_file("hard")))
    shown.append(await attempt(session.read_file("file")))
    # The edit names eight digits itself; the rest could come only from the file.
    assert not [text for text in shown if secret[8:] in text]
    assert sorted(path.name for path in treasure.iterdir()) == ["secret"]
    assert (treasure / "secret").read_text() == secret


_SWAP = """
import contextlib, os, sys, time
end = time.monotonic() + 3
steps = [
    lambda: os.makedirs("real", exist_ok=True),
    lambda: open("real/secret", "w").write("harmless"),
    lambda: os.rename("real", "door"),
    lambda: os.rename("door", "real"),
    lambda: os.symlink(sys.argv[1], "door"),
    lambda: os.unlink("door"),
    lambda: os.symlink("/proc/1/root" + sys.argv[1], "door"),
    lambda: os.unlink("door"),
]
while time.monotonic() < end:
    for step in steps:
        with contextlib.suppress(OSError):
            step()
"""


@on_the_host_kernel
async def test_a_link_swapped_in_during_a_call_leads_nowhere(
    session: Session, treasure: Path
) -> None:
    secret = (treasure / "secret").read_text()
    await session.write_file("swap.py", _SWAP.encode())
    ended = anyio.Event()
    shown: list[str] = []

    async def swap() -> None:
        result = await session.exec(["python3", "swap.py", str(treasure)], timeout_s=20)
        assert result.exit_code == 0, result
        ended.set()

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(swap)
            while not ended.is_set():
                shown += [
                    await attempt(session.read_file("door/secret")),
                    await attempt(session.write_file("door/secret", b"tampered", append=True)),
                    await attempt(session.list_files("door", depth=2)),
                    await attempt(session.grep("[0-9a-f]{32}", "door")),
                    await attempt(session.move_file("door/secret", "stolen", overwrite=True)),
                    await attempt(session.write_file("door/secret", b"tampered")),
                    await attempt(session.delete_file("door", recursive=True)),
                ]
    assert len(shown) > 40
    assert not [text for text in shown if secret in text]
    assert (treasure / "secret").read_text() == secret
    assert sorted(path.name for path in treasure.iterdir()) == ["secret"]


@on_the_host_kernel
@pytest.mark.parametrize("level", ["workspace", "workspace/mallory", "home/mallory", "trash"])
async def test_the_host_follows_no_link_that_took_a_directorys_place(
    session: Session, config: Config, treasure: Path, level: str
) -> None:
    await session.write_file("mine", b"mine")
    (treasure / "chat-attack").mkdir()
    before = sorted(path.name for path in treasure.rglob("*"))
    state = treasure.stat()
    place = config.data_dir / "sandbox" / level
    aside = place.with_name(f"{place.name}-aside")
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place.rename(aside)
    place.symlink_to(treasure)

    async def reset_and_use() -> None:
        await session.reset(keep_files=False)
        await session.exec("touch leaked")

    with pytest.raises(StorageUnavailable):
        await reset_and_use()
    assert sorted(path.name for path in treasure.rglob("*")) == before
    assert (treasure.stat().st_mode, treasure.stat().st_uid) == (state.st_mode, state.st_uid)
    assert (treasure / "chat-attack").stat().st_uid == os.getuid()
    place.unlink()
    if aside.exists():
        aside.rename(place)


@on_the_host_kernel
async def test_a_workspace_that_became_a_link_is_refused(
    session: Session, config: Config, treasure: Path
) -> None:
    await session.write_file("mine", b"mine")
    await session.reset()
    place = config.data_dir / "sandbox/workspace/mallory/chat-attack"
    place.rename(place.with_name("aside"))
    place.symlink_to(treasure)
    for call in (session.exec("touch leaked"), session.info(), session.reset(keep_files=False)):
        with pytest.raises(StorageUnavailable):
            await call
    assert sorted(path.name for path in treasure.iterdir()) == ["secret"]


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


async def test_without_a_network_no_service_of_the_host_is_reached(session: Session) -> None:
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
    assert set(interfaces) <= {"lo", "tunl0", "sit0", "ip6tnl0", "gre0", "gretap0", "erspan0"}


@on_docker
async def test_open_networks_of_two_chats_do_not_meet(config: Config, data_root: Path) -> None:
    from mcp_sandbox.app import open_manager

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


_HUNT = """
import ctypes, json, os, re
token = {token!r}[::-1]
needles = [token.encode(), token.upper().encode(), bytes.fromhex(token)]
me, found, looked = os.getpid(), [], 0

def look(path, data):
    global looked
    looked += 1
    if any(needle in data for needle in needles):
        found.append(path)

def memory(pid):
    with open(f"/proc/{{pid}}/maps") as maps, open(f"/proc/{{pid}}/mem", "rb", 0) as mem:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " r" in line and end - start < 1 << 28:
                try:
                    mem.seek(start)
                    look(f"/proc/{{pid}}/mem", mem.read(end - start))
                except (OSError, OverflowError, ValueError):
                    pass

for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    for name in ("environ", "cmdline", "stat", "auxv"):
        try:
            look(f"/proc/{{pid}}/{{name}}", open(f"/proc/{{pid}}/{{name}}", "rb").read())
        except OSError:
            pass
    if pid != me:
        try:
            memory(pid)
        except OSError:
            pass
        try:
            for fd in os.listdir(f"/proc/{{pid}}/fd"):
                fd = os.open(f"/proc/{{pid}}/fd/{{fd}}", os.O_RDONLY | os.O_NONBLOCK)
                look(f"/proc/{{pid}}/fd/{{fd}}", os.read(fd, 1 << 20))
                os.close(fd)
        except OSError:
            pass
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys", "/usr", "/dev")):
        continue
    for name in names:
        try:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
            look(os.path.join(folder, name), os.read(fd, 1 << 20))
            os.close(fd)
        except OSError:
            pass
print(json.dumps([found, looked]))
"""


@pytest.mark.parametrize(
    "backend_name", [DOCKER, GVISOR_SHOWS_ENVIRONMENT, BUBBLEWRAP], indirect=True
)
async def test_the_token_and_the_servers_secrets_are_nowhere_inside(
    session: Session, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "feedface" * 8)
    await session.read_file("/etc/passwd")
    await session.exec("true")
    (record,) = (config.data_dir / "sandbox" / "run").glob("*/token")
    # Reversed, so that the searching program does not find itself.
    for needle in (record.read_text().strip()[::-1], ("feedface" * 8)[::-1]):
        found, looked = await probe(session, _HUNT.format(token=needle))
        assert found == []
        assert looked > 10
    for path in ("/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/proc/1/mem"):
        assert record.read_text().strip() not in await attempt(session.read_file(path))


@on_bubblewrap
async def test_ids_that_would_name_other_places_are_refused(manager: SessionManager) -> None:
    for user, chat in (
        ("..", "x"),
        ("a/b", "x"),
        ("a", "../b"),
        ("a", "x\0"),
        ("", "x"),
        ("a", "é"),
    ):
        with pytest.raises(ValueError, match="is not usable"):
            await manager.session(ChatId(user, chat))
