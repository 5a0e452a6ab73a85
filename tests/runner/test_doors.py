"""The connection for doors, as the runner sees it: what it costs, and who may open one."""

import os
import resource
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.errors import CallerError, SandboxError
from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runtime.call import PendingCall
from mcp_sandbox.runtime.doors import Doors, Handler, open_doors
from tests.contract.test_previews import free_port
from tests.runner.test_protocol import Runner, runner, said_until_hang_up, works

__all__ = ["runner"]


@asynccontextmanager
async def listening(runner: Runner, handler: Handler, at: int | str = 0) -> AsyncGenerator[Doors]:
    async with open_doors(runner.stream, runner.token) as doors, doors.listen(handler, at):
        yield doors


async def never(_stream: ByteStream) -> None:
    raise AssertionError


async def shaken(
    runner: Runner, hello: dict[str, str], role: str
) -> tuple[ByteStream, protocol.Decoder, bytes]:
    """A connection with a proof for this role; whether it is believed is to be seen."""
    stream, decoder = await runner.stream(), protocol.Decoder()
    (theirs, _), *_ = decoder.feed(await stream.receive())
    nonce, mine = bytes.fromhex(theirs["nonce"]), os.urandom(protocol.NONCE_BYTES)
    proof = protocol.prove(runner.token, role, nonce, mine)
    said = {"t": "hello", "nonce": mine.hex(), "proof": proof, **hello}
    await stream.send(protocol.encode(said))
    return stream, decoder, nonce + mine


@pytest.mark.parametrize(("hello", "role"), [({"for": "doors"}, "host"), ({}, "doors")])
async def test_a_proof_for_one_use_is_none_for_the_other(
    runner: Runner, hello: dict[str, str], role: str
) -> None:
    stream, decoder, _ = await shaken(runner, hello, role)
    async with stream:
        assert await said_until_hang_up(stream, decoder) == ["broken"]
    assert await works(runner)


async def test_only_frames_for_doors_go_unsealed(runner: Runner) -> None:
    listen = {"t": "call", "id": 1, "op": "listen", "args": {"at": free_port(), "shared": False}}
    stream, decoder, _ = await shaken(runner, {"for": "doors"}, "doors")
    async with stream:
        await stream.send(protocol.encode(listen))
        said: list[str] = []
        with anyio.fail_after(10):
            while "open" not in said:
                said += [header["t"] for header, _ in decoder.feed(await stream.receive())]
    assert said == ["welcome", "open"]
    stream, decoder, nonces = await shaken(runner, {}, "host")
    async with stream:
        await stream.send(protocol.encode({**listen, "op": "ping"}) + bytes(protocol.SEAL_BYTES))
        frames = decoder.feed(await stream.receive())
        welcome, _ = next(frames)
        assert welcome["t"] == "welcome"
        decoder.seal = protocol.Seal(runner.token, "to-host", nonces)
        # What is sealed may have come together with it.
        said = [header["t"] for header, _ in frames]
        assert [*said, *await said_until_hang_up(stream, decoder)][-1] == "broken"
    assert await works(runner)


@pytest.mark.parametrize("at", [-1, 70000, "/no/such/folder", "", "x" * 200, "/a\0b"])
async def test_an_impossible_place_is_refused_with_a_reason(runner: Runner, at: int | str) -> None:
    with pytest.raises(CallerError, match=r"no door can be opened|path from the root"):
        async with listening(runner, never, at):
            pass
    assert await works(runner)


@pytest.mark.slow
async def test_posted_doors_wake_nobody(runner: Runner) -> None:
    def woken() -> str:
        status = Path(f"/proc/{runner.process.pid}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("voluntary"))

    # Its own beginning is over, so what is heard is heard of doors.
    async with listening(runner, never, free_port()):
        await anyio.sleep(1)
        before = woken()
        await anyio.sleep(2)
        assert woken() == before


async def test_of_few_descriptors_most_are_left_to_the_tools(runner: Runner) -> None:
    resource.prlimit(runner.process.pid, resource.RLIMIT_NOFILE, (128, 128))
    port, inside = free_port(), 0
    full = anyio.Event()

    async def wait(_stream: ByteStream) -> None:
        nonlocal inside
        inside += 1
        if inside == 32:
            full.set()
        await anyio.sleep_forever()

    clients = [socket.socket() for _ in range(200)]
    with anyio.fail_after(20):
        async with listening(runner, wait, port):
            for client in clients:
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", port))
            await full.wait()
            for _ in range(3):
                async with runner.channel() as channel:
                    await channel.call("run", {"argv": ["true"]})
            assert inside == 32
        for client in clients:
            await anyio.wait_readable(client)
            client.close()


async def test_bytes_one_by_one_pass_as_well(runner: Runner) -> None:
    port, came = free_port(), bytearray()
    may_read, done = anyio.Event(), anyio.Event()

    async def read(stream: ByteStream) -> None:
        async with stream:
            await may_read.wait()
            async for data in stream:
                came.extend(data)
            await stream.send(b"ok")
        done.set()

    with anyio.fail_after(30):
        async with listening(runner, read, port):
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                client.extra(anyio.abc.SocketAttribute.raw_socket).setsockopt(
                    socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
                )
                for number in range(5000):
                    await client.send(bytes([number % 256]))
                await client.send_eof()
                may_read.set()
                assert await client.receive() == b"ok"
            await done.wait()
    assert bytes(came) == bytes(number % 256 for number in range(5000))


@asynccontextmanager
async def forged(folder: Path, *answers: bytes) -> AsyncGenerator[Runner]:
    """Code inside that has got between: it lets both ends prove the token, and then goes on."""
    token = os.urandom(32)

    async def serve(stream: ByteStream) -> None:
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
            async with stream:
                mine = os.urandom(protocol.NONCE_BYTES)
                hello = {"t": "hello", "version": protocol.VERSION, "nonce": mine.hex()}
                await stream.send(protocol.encode(hello))
                (said, _), *_ = protocol.Decoder().feed(await stream.receive())
                proof = protocol.prove(token, "runner", bytes.fromhex(said["nonce"]), mine)
                await stream.send(protocol.encode({"t": "welcome", "proof": proof}))
                for answer in answers:
                    await stream.receive()
                    await stream.send(answer)
                await anyio.sleep_forever()

    listener = await anyio.create_unix_listener(folder / "runner.sock")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        process = subprocess.Popen(["true"])
        process.wait()
        yield Runner(process, folder, token)
        tasks.cancel_scope.cancel()


OPEN = protocol.encode({"t": "open", "id": 1, "most": 10**9, "port": 0})


@pytest.mark.parametrize(
    "answer",
    [
        protocol.encode({"t": "fail", "id": 1, "code": "not_found", "message": "x" * 9000}),
        protocol.encode({"t": "fail", "id": 1, "code": ["busy"], "message": ""}),
        protocol.encode({"t": "open", "id": 1, "most": None, "port": 0}),
        protocol.encode({"t": "open", "id": 1, "most": 1e308, "port": 0}).replace(
            b"1e+308", b"1e+999"
        ),
        b"\0" * 100,
    ],
)
async def test_what_code_inside_forges_is_an_error_of_the_sandbox(
    tmp_path: Path, answer: bytes
) -> None:
    with anyio.fail_after(10):
        async with forged(tmp_path, answer) as runner:
            with pytest.raises(SandboxError):
                async with listening(runner, never):
                    raise AssertionError


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(max_size=5), of, max_size=3),
    max_leaves=5,
)
KINDS = st.sampled_from(["open", "data", "credit", "done", "fail", "broken", ""])
FIELDS = ("most", "port", "s", "n", "result", "code", "message")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.fixed_dictionaries({"t": KINDS}, optional=dict.fromkeys(FIELDS, JSON)),
            st.binary(max_size=10),
        ),
        max_size=4,
    )
)
def test_no_frame_does_more_than_end_the_channel(
    frames: list[tuple[dict[str, Any], bytes]],
) -> None:
    call = PendingCall(keeps=True)
    # What a channel takes for nonsense.
    with suppress(protocol.ProtocolError, KeyError, TypeError, ValueError, OverflowError):
        for header, payload in frames:
            call.take(header, payload)
    assert sum(len(data) for _, data in call.pieces) <= 10 * len(frames)
    assert call.opened is None or all(isinstance(each, int) for each in call.opened)


async def test_forged_bytes_are_held_no_further_than_credit_was_given(tmp_path: Path) -> None:
    there = protocol.encode({"t": "open", "id": 2, "most": 0, "port": 0})
    piece = protocol.encode({"t": "data", "id": 2, "s": "body"}, bytes(protocol.CHUNK))
    gone = anyio.Event()

    async def wait(_stream: ByteStream) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            gone.set()

    with anyio.fail_after(10):
        async with forged(tmp_path, OPEN, there + piece * 4) as runner:
            async with listening(runner, wait) as doors:
                await doors.wait_ended()
                await gone.wait()


async def test_a_flood_of_forged_frames_leaves_others_their_turns(tmp_path: Path) -> None:
    flood = protocol.encode({"t": "x"}) * 200_000
    turns = 0
    with anyio.fail_after(30):
        async with forged(tmp_path, OPEN, flood + b"\xff" * 100) as runner:
            async with listening(runner, never) as doors:
                async with anyio.create_task_group() as tasks:

                    async def stop() -> None:
                        await doors.wait_ended()
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(stop)
                    while True:
                        await checkpoint()
                        turns += 1
    assert turns > 1000
