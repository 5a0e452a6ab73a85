"""Programs inside reach a handler of the host through a door, on every backend."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from anyio.abc import ByteStream, TaskStatus

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.config import Config
from mcp_sandbox.errors import Busy, InvalidArgument, SandboxError
from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.doors import DoorChannel, Doors, Handler, open_doors
from mcp_sandbox.runtime.runtime import Runtime
from tests.backends.live import connected, made, spec_for
from tests.conftest import configured
from tests.contract.test_previews import free_port

# Clients of several kinds, by their first argument; each prints what it sees.
CLIENT = """
import errno, hashlib, select, socket, sys, threading, time

def connect():
    if "/" in place:
        client = socket.socket(socket.AF_UNIX)
        client.connect(place)
        return client
    return socket.create_connection(("127.0.0.1", int(place)))

def connect_at_last():
    while True:
        try:
            return connect()
        except ConnectionRefusedError:
            time.sleep(0.01)

def until_end(client):
    came = b""
    while data := client.recv(1 << 16):
        came += data
    return came

def say():
    with connect() as client:
        client.sendall(b"hello")
        client.shutdown(socket.SHUT_WR)
        print(until_end(client).decode())

def talk():
    for _ in range(50):
        say()

def swap():
    # Both directions at once, the own one ended while the other goes on.
    mine, theirs = hashlib.sha256(), hashlib.sha256()
    def send(client):
        for number in range(3200):
            piece = bytes([number % 251]) * 65521
            client.sendall(piece)
            mine.update(piece)
        client.shutdown(socket.SHUT_WR)
    with connect() as client:
        sender = threading.Thread(target=send, args=(client,))
        sender.start()
        while data := client.recv(1 << 16):
            theirs.update(data)
        sender.join()
    print(mine.hexdigest() == theirs.hexdigest())

def crowd():
    clients = [connect() for _ in range(300)]
    for number, client in enumerate(clients):
        client.sendall(b"%d" % number)
        client.shutdown(socket.SHUT_WR)
    print([until_end(client) for client in clients] == [b"you said %d" % n for n in range(300)])

def later():
    with connect() as client:
        first = until_end(client)
        client.sendall(b"I heard " + first)

def silent():
    clients = [connect_at_last(), *(socket.socket() for _ in range(399))]
    for client in clients[1:]:
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", int(place)))
    print("there", flush=True)
    while clients:
        for client in select.select(clients, [], [])[0]:
            clients.remove(client)
            client.close()
    print("gone")

def pour():
    with connect_at_last() as client:
        print("there", flush=True)
        client.setblocking(False)
        sent = 0
        while select.select([], [client], [], 1)[1]:
            sent += client.send(bytes(1 << 16))
        print(sent, flush=True)
        client.setblocking(True)
        client.recv(1)

def upload():
    with connect() as client:
        try:
            for _ in range(200):
                client.sendall(bytes(1 << 16))
        except ConnectionError:
            pass
        client.settimeout(10)
        print(until_end(client).decode())

def hold():
    with connect_at_last() as client:
        print("there", flush=True)
        print(repr(client.recv(1)))

def deaf():
    with connect_at_last():
        time.sleep(3600)

def refused():
    begun = time.monotonic()
    try:
        connect().close()
        print("let in")
    except OSError as exc:
        print(errno.errorcode[exc.errno], time.monotonic() - begun < 1)

def take():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", int(place)))
        listener.listen()
        print("there", flush=True)
        time.sleep(3600)

place = sys.argv[2]
globals()[sys.argv[1]]()
"""
REFUSED = "ECONNREFUSED True\n"


@pytest.fixture(scope="module")
async def sandbox(
    backend_name: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Sandbox]:
    async with own_sandbox(configured(backend_name, tmp_path_factory.mktemp("data"))) as running:
        yield running


@asynccontextmanager
async def own_sandbox(config: Config, idle_s: int = 60) -> AsyncGenerator[Sandbox]:
    assert config.backend != "auto"
    spec = replace(spec_for(config.data_dir / "places"), idle_s=idle_s)
    async with open_backend(config.backend, config) as backend, made(backend, spec) as running:
        async with connected(running) as runtime:
            await runtime.files.write("client.py", CLIENT.encode(), append=False)
        yield running


@pytest.fixture
async def runtime(sandbox: Sandbox) -> AsyncGenerator[Runtime]:
    async with connected(sandbox) as opened:
        yield opened


@pytest.fixture
def port() -> int:
    return free_port()


@asynccontextmanager
async def opened(sandbox: Sandbox, within_s: float = 50) -> AsyncGenerator[Doors]:
    with anyio.fail_after(within_s):
        async with open_doors(sandbox.open_channel, sandbox.token) as doors:
            yield doors


@asynccontextmanager
async def answered(
    sandbox: Sandbox,
    handler: Handler,
    at: int | str,
    *,
    shared: bool = False,
    within_s: float = 50,
) -> AsyncGenerator[Doors]:
    async with opened(sandbox, within_s) as doors, doors.listen(handler, at, shared=shared):
        yield doors


async def client(runtime: Runtime, what: str, at: int | str, timeout_s: float = 40) -> str:
    """What a client inside prints."""
    result = await runtime.exec(["python3", "client.py", what, str(at)], timeout_s=timeout_s)
    assert not result.timed_out
    return result.stdout + result.stderr


class Running:
    """A client that goes on while a test does."""

    def __init__(self, runtime: Runtime) -> None:
        self.printed = ""
        self._runtime = runtime
        self._changed = anyio.Event()

    async def run(self, what: str, at: int) -> None:
        command = ["python3", "client.py", what, str(at)]
        await self._runtime.exec(command, timeout_s=40, on_output=self._note)

    async def _note(self, _stream: str, data: bytes) -> None:
        self.printed += data.decode()
        self._changed.set()

    async def line(self, number: int = 0) -> str:
        with anyio.fail_after(30):
            while self.printed.count("\n") <= number:
                self._changed = anyio.Event()
                await self._changed.wait()
        return self.printed.splitlines()[number]


@asynccontextmanager
async def running(runtime: Runtime, what: str, at: int) -> AsyncGenerator[Running]:
    """A client that connects as soon as it can; it is killed with the block."""
    started = Running(runtime)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(started.run, what, at)
        yield started
        tasks.cancel_scope.cancel()


async def received(stream: ByteStream) -> bytes:
    return b"".join([data async for data in stream])


async def forever(_stream: ByteStream) -> None:
    await anyio.sleep_forever()


async def greet(stream: ByteStream) -> None:
    async with stream:
        await stream.send(b"you said " + await received(stream))


async def test_who_connects_is_answered_by_the_handler(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    async with answered(sandbox, greet, port):
        assert await client(runtime, "talk", port) == "you said hello\n" * 50


async def test_a_door_may_be_a_unix_socket(sandbox: Sandbox, runtime: Runtime) -> None:
    path = "/tmp/a-door.sock"
    for _ in range(2):
        async with answered(sandbox, greet, path):
            assert await client(runtime, "say", path) == "you said hello\n"
    assert await client(runtime, "refused", path) == "ENOENT True\n"


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_of_200_mb_both_ways_no_byte_is_lost(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    async def echo(stream: ByteStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send(data)

    async with answered(sandbox, echo, port, within_s=150):
        assert await client(runtime, "swap", port, timeout_s=150) == "True\n"


async def test_three_hundred_clients_at_once_are_all_answered(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    async with answered(sandbox, greet, port):
        assert await client(runtime, "crowd", port) == "True\n"


async def test_the_handler_may_end_its_direction_first(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    heard: list[bytes] = []
    was_heard = anyio.Event()

    async def tell(stream: ByteStream) -> None:
        async with stream:
            await stream.send(b"you")
            await stream.send_eof()
            heard.append(await received(stream))
        was_heard.set()

    async with answered(sandbox, tell, port):
        await client(runtime, "later", port)
        await was_heard.wait()
    assert heard == [b"I heard you"]


async def test_an_answer_arrives_though_the_client_is_still_sending(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    async def refuse(stream: ByteStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"no")

    async with answered(sandbox, refuse, port):
        assert await client(runtime, "upload", port) == "no\n"


class Crowd:
    """A handler that answers nothing, and counts who waits."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._changed = anyio.Event()

    async def __call__(self, _stream: ByteStream) -> None:
        self._count(1)
        try:
            await anyio.sleep_forever()
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.now += change
        self.most = max(self.most, self.now)
        self._changed.set()

    async def until(self, count: int) -> None:
        while self.now != count:
            self._changed = anyio.Event()
            await self._changed.wait()


async def test_silent_clients_hold_up_nobody(sandbox: Sandbox, runtime: Runtime, port: int) -> None:
    crowd = Crowd()
    async with running(runtime, "silent", port) as silent:
        async with answered(sandbox, crowd, port):
            assert await silent.line() == "there"
            await crowd.until(64)
            for number in range(20):
                assert (await runtime.exec(f"echo {number}")).stdout == f"{number}\n"
            assert crowd.most == 64
        assert crowd.now == 0
        # Those too that were not let in.
        assert await silent.line(1) == "gone"
    async with answered(sandbox, greet, port):
        assert await client(runtime, "say", port) == "you said hello\n"


async def test_a_body_that_nobody_reads_is_bounded(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    async with running(runtime, "pour", port) as pouring, answered(sandbox, forever, port):
        sent = int(await pouring.line(1))
        # What lies in our hands and in the kernels' is a part of it.
        assert 0 < sent < 20_000_000
        assert (await runtime.exec("echo alive")).stdout == "alive\n"


async def test_an_answer_that_nobody_reads_is_bounded(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    sent = 0
    stalled = anyio.Event()

    async def pour(stream: ByteStream) -> None:
        nonlocal sent
        while not stalled.is_set():
            with anyio.move_on_after(1) as limit:
                await stream.send(bytes(1 << 16))
                sent += 1 << 16
            if limit.cancelled_caught:
                stalled.set()
        await anyio.sleep_forever()

    async with running(runtime, "deaf", port), answered(sandbox, pour, port):
        await stalled.wait()
        assert 0 < sent < 20_000_000
        assert (await runtime.exec("echo alive")).stdout == "alive\n"


async def test_a_client_that_vanishes_leaves_nothing(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    crowd = Crowd()

    async def take(stream: ByteStream) -> None:
        async with stream, anyio.create_task_group() as tasks:
            tasks.start_soon(crowd, stream)
            await received(stream)
            tasks.cancel_scope.cancel()

    async with answered(sandbox, take, port):
        async with running(runtime, "pour", port) as pouring, running(runtime, "hold", port):
            await pouring.line()
            await crowd.until(2)
        # Both were killed.
        await crowd.until(0)
        entries = f"grep -c ' 0100007F:{port:04X} .* 0[18] ' /proc/net/tcp"
        while (await runtime.exec(entries)).stdout not in ("0\n", ""):
            await anyio.sleep(0.02)


async def test_the_block_ends_its_handlers_and_its_listener(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    crowd = Crowd()
    assert await client(runtime, "refused", port) == REFUSED
    async with running(runtime, "hold", port) as holding:
        async with answered(sandbox, crowd, port):
            await crowd.until(1)
        assert crowd.now == 0
        assert await holding.line(1) == "b''"
        assert await client(runtime, "refused", port) == REFUSED


async def test_a_handler_that_ends_hangs_up(sandbox: Sandbox, runtime: Runtime, port: int) -> None:
    async def fail(stream: ByteStream) -> None:
        raise anyio.BrokenResourceError

    async with running(runtime, "hold", port) as holding, answered(sandbox, fail, port):
        assert await holding.line(1) == "b''"


async def test_a_handler_that_fails_ends_its_connection_alone(
    sandbox: Sandbox, runtime: Runtime, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    failing = True

    async def fail_first(stream: ByteStream) -> None:
        nonlocal failing
        if failing:
            failing = False
            raise ValueError("no such thing")
        await greet(stream)

    async with running(runtime, "hold", port) as holding, answered(sandbox, fail_first, port):
        assert await holding.line(1) == "b''"
        assert await client(runtime, "say", port) == "you said hello\n"
    assert "no such thing" in caplog.text


async def test_each_place_has_its_own_handler_and_its_own_end(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    first, second = Crowd(), Crowd()
    async with (
        opened(sandbox) as doors,
        doors.listen(first) as free,
        running(runtime, "hold", int(free)) as stays,
        running(runtime, "hold", port) as ends,
    ):
        async with doors.listen(second, port), doors.listen(greet, "/tmp/third.sock") as path:
            await first.until(1)
            await second.until(1)
            assert await client(runtime, "say", path) == "you said hello\n"
        assert await ends.line(1) == "b''"
        assert (first.now, second.now) == (1, 0)
        assert stays.printed == "there\n"
        assert await client(runtime, "refused", port) == REFUSED
        assert await client(runtime, "refused", path) == "ENOENT True\n"


async def test_a_place_that_another_has_or_that_is_one_too_many_is_told(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    async with opened(sandbox) as doors, AsyncExitStack() as stack:
        await stack.enter_async_context(doors.listen(greet, port))
        for shared in (True, False):
            with pytest.raises(Busy, match=f"a door is open at {port} already"):
                async with doors.listen(forever, port, shared=shared):
                    pass
        for _ in range(protocol.MOST_PLACES - 1):
            await stack.enter_async_context(doors.listen(greet))
        with pytest.raises(Busy, match="16 places"):
            async with doors.listen(greet):
                pass
        assert await client(runtime, "say", port) == "you said hello\n"


async def test_a_place_that_a_program_inside_holds_is_told(
    sandbox: Sandbox, runtime: Runtime, port: int
) -> None:
    async with running(runtime, "take", port) as taking:
        await taking.line()
        with pytest.raises(Busy, match=f"{port}.*end that program"):
            async with answered(sandbox, greet, port):
                pass
    async with answered(sandbox, greet, port):
        assert await client(runtime, "say", port) == "you said hello\n"
        assert "in use" in await client(runtime, "take", port)


async def test_a_second_server_takes_over(sandbox: Sandbox, runtime: Runtime, port: int) -> None:
    first, second = Crowd(), Crowd()
    async with running(runtime, "hold", port) as holding, anyio.create_task_group() as tasks:
        leaves = anyio.Event()

        async def serve_first(*, task_status: TaskStatus[None]) -> None:
            async with answered(sandbox, first, port, shared=True):
                task_status.started()
                await leaves.wait()

        await tasks.start(serve_first)
        await first.until(1)
        async with answered(sandbox, second, port, shared=True):
            leaves.set()
            # What was in flight through the first has ended.
            assert await holding.line(1) == "b''"
            async with running(runtime, "hold", port):
                await second.until(1)
        assert await client(runtime, "refused", port) == REFUSED


async def test_a_server_that_leaves_gets_no_client_while_its_relay_goes_on(
    sandbox: Sandbox, runtime: Runtime, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await sandbox.open_channel() as stream, anyio.create_task_group() as tasks:

        async def relayed() -> ByteStream:
            return stream

        with monkeypatch.context() as patch:
            patch.setattr(stream, "aclose", anyio.lowlevel.checkpoint)
            leaving = DoorChannel(relayed, sandbox.token, tasks)
            doors = await leaving.open_channel()
            async with (
                doors.listen(forever, port, shared=True),
                answered(sandbox, greet, port, shared=True),
            ):
                leaving.close()
                await doors.wait_ended()
                assert await client(runtime, "say", port, timeout_s=5) == "you said hello\n"


async def test_it_is_told_when_the_sandbox_ends(config: Config, port: int) -> None:
    crowd = Crowd()
    with anyio.fail_after(50):
        async with own_sandbox(config) as sandbox, connected(sandbox) as runtime:
            async with answered(sandbox, crowd, port) as doors:
                await runtime.exec(f"python3 client.py hold {port} >&- 2>&- &")
                await crowd.until(1)
                # Doors are no user, what goes through them is no call.
                status = await runtime.status()
                assert (status.connections, status.calls) == (1, 0)
                assert await runtime.retire(background_too=True) == ""
                await doors.wait_ended()
                await crowd.until(0)


async def test_doors_keep_no_sandbox(config: Config, port: int) -> None:
    async with own_sandbox(config, idle_s=1) as sandbox:
        async with answered(sandbox, forever, port) as doors:
            await doors.wait_ended()


async def test_their_channel_takes_nothing_else_and_no_other_takes_them(sandbox: Sandbox) -> None:
    async with anyio.create_task_group() as tasks:
        for_doors = Channel(await sandbox.open_channel(), sandbox.token, "doors")
        await for_doors.open(tasks)
        for op in ("run", "status", "retire", "dial", "read", "ping", "terminal", "told"):
            with pytest.raises(InvalidArgument, match=f"for doors: it takes no {op}"):
                await for_doors.call(op, {"argv": ["true"]})
        await for_doors.aclose()
    async with anyio.create_task_group() as tasks:
        channel = Channel(await sandbox.open_channel(), sandbox.token)
        await channel.open(tasks)
        for op in ("listen", "door"):
            with pytest.raises(SandboxError):
                await channel.call(op, {"at": 17329, "shared": False})
        await channel.aclose()
