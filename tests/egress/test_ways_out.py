"""The server when the process of its ways out is hostile, stopped or killed at the worst moment."""

import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

import anyio
import anyio.to_thread
import pytest

from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.egress import ways_out
from mcp_sandbox.egress.link import Link
from mcp_sandbox.egress.process import proxy
from mcp_sandbox.egress.process.visitors import Visitors
from mcp_sandbox.egress.rules import EgressRules, write_rule
from mcp_sandbox.egress.secrets import Keys, Secrets
from mcp_sandbox.egress.settings import load_trusted, parse_rule
from mcp_sandbox.egress.ways_out import Door, Way, WaysOut, open_ways_out
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.previews import _Preview
from tests.egress.test_opened import Web
from tests.egress.world import HOST, a_world

CHAT = ChatId("local", "one")
# A process that has been broken: it says that it serves, and then what a stranger likes.
HOSTILE = """
import json, os, socket, struct, sys
line = socket.socket(fileno=int(sys.argv[1]))
def say(header, files=()):
    head = json.dumps(header).encode()
    socket.send_fds(line, [struct.pack(">II", len(head), 0) + head], files)
say({"t": "ready", "fds": 0})
%s
while line.recv(65536):
    pass
"""
QUESTION = {"t": "fill", "fds": 0, "n": 1, "ask": 1, "host": "example.org", "port": 443}
SAYINGS = {
    "no-headers": f"say({QUESTION | {'headers': [[1, 2]]}})",
    "headers-of-none": f"say({QUESTION | {'headers': None}})",
    "no-sockets": "say({'t': 'x', 'fds': 2, 'n': 1}, os.pipe())",
    "no-visitor": "say({'t': 'visitor', 'fds': 0, 'n': 1})",
    "surrogates": "say({'t': 'log', 'fds': 0, 'line': '\\ud800'})",
}


@asynccontextmanager
async def opened() -> AsyncGenerator[WaysOut]:
    async with open_ways_out(partial(load_trusted, None)) as found:
        yield found


async def another(found: WaysOut, link: Link) -> None:
    """Wait until a process serves that is not the one of this link."""
    now = link
    while now is link:
        await anyio.sleep(0.01)
        with suppress(BackendUnavailable):
            now = await found.up()


def process_of() -> int:
    """The process of the ways out that this one has started."""
    children = Path("/proc/self/task").glob("*/children")
    pids = [int(each) for file in children for each in file.read_text().split()]
    return next(p for p in pids if b"egress.process" in Path(f"/proc/{p}/cmdline").read_bytes())


@pytest.mark.parametrize("saying", SAYINGS)
async def test_whatever_it_says_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, saying: str
) -> None:
    async def leaf(host: str) -> bytes:
        return host.encode()

    rules = EgressRules((parse_rule("example.org"),))
    keys, told = Keys(rules, leaf, Secrets({}, b"seed")), anyio.Event()

    async def asked(said: dict[str, object]) -> dict[str, object]:
        told.set()
        return await keys.answer(CHAT, (), said)

    monkeypatch.setattr(ways_out, "_START", HOSTILE % SAYINGS[saying])
    async with opened() as found:
        before = len(list(Path("/proc/self/fd").iterdir()))
        async with found.open(Way("egress", {}, told=lambda said, *_: said["to"], asked=asked)):
            with anyio.fail_after(20):
                if "headers" in saying:
                    await told.wait()
                else:
                    # It may have ended before this looks.
                    with suppress(BackendUnavailable):
                        await found.up()
                monkeypatch.undo()
                serves = False
                while not serves:
                    with suppress(BackendUnavailable):
                        serves = not (await found.up()).ended
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_door_comes_back_whenever_the_process_goes(
    monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(ways_out, "_ASKED_S", 0.5)
    kept, tries = list[socket.socket](), 0

    async def channel() -> SocketStream:
        nonlocal tries
        tries += 1
        if tries == 1:
            os.kill(await anyio.to_thread.run_sync(process_of), how)
        if tries > 1:
            came.set()
        ours, theirs = socket.socketpair()
        kept.append(theirs)
        ours.setblocking(False)
        return SocketStream(ours)

    async def proved(_: object) -> None:
        """Take whatever answers for the runner."""

    monkeypatch.setattr("mcp_sandbox.runtime.channel.Channel.prove", proved)
    monkeypatch.setattr(ways_out, "_AGAIN_S", 0.1)
    came = anyio.Event()
    async with opened() as found:
        way = Way("egress", {"chat": ["local", "one"], "bound": []})
        door = Door(found, way, channel, b"t" * 32)
        async with found.open(way), anyio.create_task_group() as tasks:
            with anyio.fail_after(20):
                await found.up()
                tasks.start_soon(door.run)
                await came.wait()
            tasks.cancel_scope.cancel()
    for each in kept:
        each.close()


async def test_a_server_without_descriptors_tries_its_door_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ways_out, "_AGAIN_S", 0.1)
    tries = 0

    async def channel() -> SocketStream:
        nonlocal tries
        tries += 1
        raise OSError(24, "Too many open files")

    async with opened() as found:
        way = Way("egress", {"chat": ["local", "one"], "bound": []})
        door = Door(found, way, channel, b"t" * 32)
        async with found.open(way), anyio.create_task_group() as tasks:
            tasks.start_soon(door.run)
            with anyio.fail_after(20):
                while tries < 2:
                    await anyio.sleep(0.01)
            assert isinstance(door.error, BackendUnavailable)
            assert "Too many open files" in str(door.error)
            tasks.cancel_scope.cancel()


async def test_the_channel_of_a_door_is_closed_with_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A runner serves few channels, and counts one that is open for a used one."""
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)

    async def channel() -> SocketStream:
        return SocketStream(ours)

    async def proved(_: object) -> None:
        """Take whatever answers for the runner."""

    monkeypatch.setattr("mcp_sandbox.runtime.channel.Channel.prove", proved)
    async with (
        opened() as found,
        SocketStream(theirs) as runner,
        anyio.create_task_group() as tasks,
    ):
        way = Way("egress", {"chat": ["local", "one"], "bound": []})
        door = Door(found, way, channel, b"t" * 32)
        with anyio.fail_after(20):
            async with found.open(way):
                tasks.start_soon(door.run)
                assert b"listen" in await runner.receive()
                door.close()
            async for _ in runner:
                pass


async def test_a_sandbox_that_opens_no_door_ends_no_connections_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one does that is stopped, or has no memory, since its token was proved."""
    kept = list[socket.socket]()

    async def channel() -> SocketStream:
        ours, theirs = socket.socketpair()
        kept.append(theirs)
        ours.setblocking(False)
        return SocketStream(ours)

    async def proved(_: object) -> None:
        """Take whatever answers for the runner."""

    monkeypatch.setattr("mcp_sandbox.runtime.channel.Channel.prove", proved)
    async with opened() as found, anyio.create_task_group() as tasks:
        link = await found.up()
        monkeypatch.setattr(ways_out, "_READY_S", 0.5)
        way = Way("egress", {"chat": ["local", "one"], "bound": []})
        async with found.open(way):
            door = Door(found, way, channel, b"t" * 32)
            tasks.start_soon(door.run)
            with anyio.fail_after(20):
                while not door.error:
                    await anyio.sleep(0.01)
            assert not link.ended
            door.close()
    for each in kept:
        each.close()


async def test_a_process_that_does_nothing_any_more_is_started_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine may take longer than a second to start it.
    monkeypatch.setattr(ways_out, "_ASKED_S", 2.0)
    async with opened() as found:
        with anyio.fail_after(40):
            link = await found.up()
            os.kill(await anyio.to_thread.run_sync(process_of), signal.SIGSTOP)
            while not link.ended:
                await anyio.sleep(0.01)
            async with found.open(Way("egress", {"chat": ["local", "one"], "bound": []})):
                await another(found, link)


async def test_rules_of_thousands_of_hosts_reach_the_process() -> None:
    denied = [parse_rule(f"host-{number}.example.org") for number in range(5000)]
    rules, bound = EgressRules(deny=tuple(denied)), [*map(write_rule, denied)]
    with anyio.fail_after(20):
        async with open_ways_out(partial(load_trusted, None), rules) as found:
            link = await found.up()
            async with found.open(Way("egress", {"chat": ["local", "one"], "bound": bound})):
                assert await link.ask("alive", n=1)
            assert not link.ended


async def test_a_way_that_cannot_be_opened_is_none_of_the_next_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        way = Way("preview", {"name": "a.localhost"}, listening=listening)
        async with opened() as found:
            with anyio.fail_after(20):
                link = await found.up()
                soft, hard = getrlimit(RLIMIT_NOFILE)
                # No descriptor is left for the process's copy of it.
                setrlimit(RLIMIT_NOFILE, (3, hard))
                try:
                    with pytest.raises(OSError, match="Too many open files"):
                        async with found.open(way):
                            pass
                finally:
                    setrlimit(RLIMIT_NOFILE, (soft, hard))
                listening.close()
                link.close()
                async with found.open(Way("egress", {"chat": ["local", "one"], "bound": []})):
                    await another(found, link)


async def test_it_cannot_fill_the_log_of_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = "[say({'t': 'log', 'fds': 0, 'line': 'x' * 1000}) for _ in range(5000)]"
    told = anyio.Event()
    end = f"{lines}; say({{'t': 'connection', 'fds': 0, 'n': 1}})"
    monkeypatch.setattr(ways_out, "_START", HOSTILE % end)
    async with opened() as found, found.open(Way("egress", {}, lambda *_: told.set())):
        with anyio.fail_after(20):
            await told.wait()
    said = [each for each in caplog.messages if "xxx" in each]
    assert 50 < len(said) < 150
    assert max(map(len, said)) <= 500


async def test_visitors_that_take_no_answer_take_no_descriptors_from_all_else() -> None:
    pairs = [socket.socketpair() for _ in range(600)]
    for ours, _ in pairs:
        ours.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                ours.send(b"x" * 65536)
    async with opened() as found, anyio.create_task_group() as tasks:
        preview = _Preview(CHAT, 8000, "a.localhost", None, found)  # type: ignore[arg-type]
        with ExitStack() as stack:
            while stack.enter_context(found.visitors.take(CHAT)):
                pass
            for ours, _ in pairs:
                tasks.start_soon(preview._answer, ours, b"")
            await anyio.wait_all_tasks_blocked()
            # An eighth of what all may have.
            assert 0 < sum(ours.fileno() >= 0 for ours, _ in pairs) <= 128
            with anyio.fail_after(10):
                while any(ours.fileno() >= 0 for ours, _ in pairs):
                    await anyio.sleep(0.05)
    for _, theirs in pairs:
        theirs.close()


async def test_small_pieces_of_an_answer_do_not_wait_for_each_other() -> None:
    came = anyio.Event()
    let_in = list[socket.socket]()

    async def take(client: SocketStream, _: bytes) -> None:
        let_in.append(client.hand_over())
        came.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Visitors({b"name": take}).serve, listening, tasks.start_soon)
            with anyio.fail_after(10):
                async with await anyio.connect_tcp(*listening.getsockname()) as client:
                    await client.send(b"GET / HTTP/1.1\r\nHost: name\r\n\r\n")
                    await came.wait()
            tasks.cancel_scope.cancel()
    with let_in[0] as handed:
        assert handed.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_it_writes_nothing_into_the_log_or_terminal_of_the_server() -> None:
    async with opened() as found:
        with anyio.fail_after(20):
            await found.up()
        pid = await anyio.to_thread.run_sync(process_of)
        assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {"/dev/null"}


async def test_what_is_told_to_an_ended_link_is_closed() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, lambda *_: None, lambda _: anyio.lowlevel.checkpoint())  # type: ignore[arg-type, return-value]
    theirs.close()
    await link.run()
    given, kept = socket.socketpair()
    link.tell("stream", given)
    assert given.fileno() == -1
    kept.close()


async def test_a_grant_that_is_taken_back_ends_with_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_GRANTS_S", 0.0)
    async with a_world(tmp_path / "world") as world:
        port = await world.listen(Web(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"))
        await world.allow(port)
        world.grants = [*world.proxy.rules.allow]
        world.proxy.rules = replace(world.proxy.rules, allow=())
        asked = f"GET http://{HOST}:{port}/ HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n".encode()
        async with await world.connect() as stream:
            await stream.send(asked)
            assert b" 200 " in await stream.receive()
            world.grants = []
            await stream.send(asked)
            assert b" 403 " in await stream.receive()
