"""The connection for doors, as the runner sees it: what it costs, and who may open one."""

import os
import resource
import socket
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.errors import CallerError
from mcp_sandbox.runner import protocol
from mcp_sandbox.runtime.doors import doors
from tests.contract.test_previews import free_port
from tests.runner.test_protocol import Runner, runner, said_until_hang_up, works

__all__ = ["runner"]


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
    listen = {"t": "call", "id": 1, "op": "listen", "args": {"at": free_port()}}
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
        (welcome, _), *_ = decoder.feed(await stream.receive())
        assert welcome["t"] == "welcome"
        decoder.seal = protocol.Seal(runner.token, "to-host", nonces)
        assert (await said_until_hang_up(stream, decoder))[-1] == "broken"
    assert await works(runner)


@pytest.mark.parametrize("at", [-1, 70000, "/no/such/folder", "", "x" * 200, "/a\0b"])
async def test_an_impossible_place_is_refused_with_a_reason(runner: Runner, at: int | str) -> None:
    async def never(_stream: ByteStream) -> None:
        raise AssertionError

    with pytest.raises(CallerError, match=r"no door can be opened|path from the root"):
        async with doors(runner.stream, runner.token, never, at=at):
            pass
    assert await works(runner)


@pytest.mark.slow
async def test_posted_doors_wake_nobody(runner: Runner) -> None:
    def woken() -> str:
        status = Path(f"/proc/{runner.process.pid}/status").read_text()
        return next(line for line in status.splitlines() if line.startswith("voluntary"))

    async def never(_stream: ByteStream) -> None:
        raise AssertionError

    # Its own beginning is over, so what is heard is heard of doors.
    async with doors(runner.stream, runner.token, never, at=free_port()):
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
        async with doors(runner.stream, runner.token, wait, at=port):
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
        async with doors(runner.stream, runner.token, read, at=port):
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
