"""The runner as a server: who proves the token is served, everything else ends one connection."""

import os
import secrets
import signal
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import ByteStream

from mcp_sandbox.backends import local_socket
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.runner.wire import protocol
from mcp_sandbox.runner.wire.terminal_frames import MAX_BYTES, frames
from mcp_sandbox.runner.workers import pool
from mcp_sandbox.runtime.call import PendingCall
from mcp_sandbox.runtime.channel import Channel

RUNNER = Path(protocol.__file__).parents[1] / "__main__.py"
# The oldest interpreter here that a sandbox may have.
PYTHON = "/usr/bin/python3"


@dataclass
class Runner:
    process: subprocess.Popen[bytes]
    folder: Path
    token: bytes

    async def stream(self) -> ByteStream:
        with anyio.fail_after(10):
            # It makes its socket itself, and nothing tells when.
            while True:
                try:
                    return await local_socket.connect(self.folder, deadline_s=10)
                except SandboxGone:
                    assert self.process.poll() is None
                    await anyio.sleep(0.001)

    @asynccontextmanager
    async def channel(self) -> AsyncGenerator[Channel]:
        async with anyio.create_task_group() as tasks:
            channel = Channel(await self.stream(), self.token)
            await channel.open(tasks)
            yield channel
            await channel.aclose()


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncGenerator[Runner]:
    async with started(tmp_path, idle_s="900") as running:
        yield running


@asynccontextmanager
async def started(folder: Path, *, idle_s: str) -> AsyncGenerator[Runner]:
    token = secrets.token_bytes(32)
    for name in ("workspace", "home"):
        (folder / name).mkdir()
    settings = {
        "MCP_SANDBOX_TOKEN": token.hex(),
        "MCP_SANDBOX_SOCKET": str(folder / "runner.sock"),
        "MCP_SANDBOX_WORKSPACE": str(folder / "workspace"),
        "MCP_SANDBOX_HOME": str(folder / "home"),
        "MCP_SANDBOX_IDLE_S": idle_s,
    }
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **settings}
    with subprocess.Popen([PYTHON, "-I", "-S", str(RUNNER)], env=env, cwd="/") as process:
        try:
            yield Runner(process, folder, token)
        finally:
            process.terminate()


async def test_nothing_comes_after_the_end_of_a_body() -> None:
    async def sink(_stream: str, _data: bytes) -> None:
        return

    call = PendingCall(sink)
    call.take({"t": "data", "s": "body"}, b"x")
    call.take({"t": "data", "s": "end"}, b"\0")
    for stream in ("body", "end"):
        with pytest.raises(protocol.ProtocolError, match="after its end"):
            call.take({"t": "data", "s": stream}, b"x")


async def works(runner: Runner) -> bool:
    async with runner.channel() as channel:
        await channel.call("ping", {})
        return True


async def greeted(runner: Runner) -> tuple[ByteStream, protocol.Decoder, protocol.Seal]:
    """A connection that has proved the token and can then misbehave."""
    stream, decoder = await runner.stream(), protocol.Decoder()
    (hello, _), *_ = decoder.feed(await stream.receive())
    theirs, mine = bytes.fromhex(hello["nonce"]), os.urandom(protocol.NONCE_BYTES)
    proof = protocol.prove(runner.token, "host", theirs, mine)
    await stream.send(protocol.encode({"t": "hello", "nonce": mine.hex(), "proof": proof}))
    list(decoder.feed(await stream.receive()))
    decoder.seal = protocol.Seal(runner.token, "to-host", theirs + mine)
    return stream, decoder, protocol.Seal(runner.token, "to-runner", theirs + mine)


async def said_until_hang_up(stream: ByteStream, decoder: protocol.Decoder) -> list[str]:
    said: list[str] = []
    with anyio.fail_after(10):
        try:
            while True:
                said += [header["t"] for header, _ in decoder.feed(await stream.receive())]
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return said


async def test_who_hangs_up_before_the_greeting_takes_no_place(runner: Runner) -> None:
    assert await works(runner)
    runner.process.send_signal(signal.SIGSTOP)
    for _ in range(40):
        await (await runner.stream()).aclose()
    runner.process.send_signal(signal.SIGCONT)
    assert await works(runner)


async def test_a_call_is_answered(runner: Runner) -> None:
    assert await works(runner)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 64,
        b"\0" * 64,
        protocol.encode({"t": "call", "id": 1, "op": "ping", "args": {}}),
        protocol.encode({"t": "hello"}),
        protocol.encode({"t": "hello", "nonce": "00" * 16, "proof": "0" * 64}),
        protocol.encode({"t": "hello", "nonce": 5, "proof": None}),
        protocol.PREFIX.pack(5, 0) + b"[" * 5,
        # What the C scanner alone cannot say what is wrong with.
        protocol.PREFIX.pack(1, 0) + b"{",
        protocol.PREFIX.pack(1, 0) + b'"',
        protocol.PREFIX.pack(5, 0) + b'{"t":',
    ],
)
async def test_who_does_not_prove_the_token_is_hung_up_on(runner: Runner, garbage: bytes) -> None:
    stream = await runner.stream()
    async with stream:
        await stream.send(garbage)
        said = await said_until_hang_up(stream, protocol.Decoder())
    assert "welcome" not in said
    assert await works(runner)


@pytest.mark.parametrize(
    "header",
    [
        {"t": "call"},
        {"t": "call", "id": "one", "op": "ping", "args": {}},
        {"t": "call", "id": 1, "op": "run", "args": []},
        {"t": "call", "id": 1, "op": "run", "args": {"timeout_s": "soon", "argv": ["true"]}},
    ],
)
async def test_nonsense_of_a_known_peer_ends_that_connection_only(
    runner: Runner, header: dict[str, object]
) -> None:
    stream, decoder, seal = await greeted(runner)
    async with stream:
        await stream.send(protocol.encode(header, b"", seal))
        said = await said_until_hang_up(stream, decoder)
    assert said[-1:] == ["broken"]
    assert await works(runner)


async def test_a_header_nested_without_end_is_refused(runner: Runner) -> None:
    stream, decoder, seal = await greeted(runner)
    head = b'{"t":' + b"[" * 60_000
    prefix = protocol.PREFIX.pack(len(head), 0)
    async with stream:
        await stream.send(prefix + head + seal.next(prefix, head, b""))
        assert await said_until_hang_up(stream, decoder) == ["broken"]
    assert await works(runner)


@pytest.mark.parametrize("sizes", [(protocol.MAX_HEADER + 1, 0), (2, protocol.MAX_PAYLOAD + 1)])
async def test_an_oversized_frame_is_refused_before_it_is_read(
    runner: Runner, sizes: tuple[int, int]
) -> None:
    stream, decoder, _ = await greeted(runner)
    async with stream:
        await stream.send(protocol.PREFIX.pack(*sizes))
        assert await said_until_hang_up(stream, decoder) == ["broken"]


async def test_a_changed_or_repeated_frame_is_noticed(runner: Runner) -> None:
    for repeated, cut in ((1, 1), (2, 0)):
        stream, decoder, seal = await greeted(runner)
        frame = protocol.encode({"t": "call", "id": 1, "op": "ping", "args": {}}, b"", seal)
        async with stream:
            await stream.send((frame * repeated)[: -cut or None] + bytes([frame[-1] ^ 1]) * cut)
            assert (await said_until_hang_up(stream, decoder))[-1] == "broken"
    assert await works(runner)


async def test_more_data_than_there_is_credit_for_is_refused(runner: Runner) -> None:
    stream, decoder, seal = await greeted(runner)
    args = {"command": ["sleep", "60"], "tty": False}
    chunk = b"".join(frames(bytes(15 * MAX_BYTES)))
    async with stream:
        call = {"t": "call", "id": 1, "op": "terminal", "args": args, "more": True}
        await stream.send(protocol.encode(call, chunk, seal))
        with anyio.fail_after(10):
            try:
                for _ in range(8):
                    frame = protocol.encode({"t": "data", "id": 1, "more": True}, chunk, seal)
                    await stream.send(frame)
            except anyio.BrokenResourceError:
                pass
        assert "broken" in await said_until_hang_up(stream, decoder)
    assert await works(runner)


async def test_calls_beyond_the_limit_are_told_that_it_is_busy(runner: Runner) -> None:
    stream, decoder, seal = await greeted(runner)
    async with stream:

        async def ends(*kinds: str) -> list[dict[str, Any]]:
            """The first frames of these kinds."""
            while True:
                came = [header for header, _ in decoder.feed(await stream.receive())]
                if found := [header for header in came if header["t"] in kinds]:
                    return found

        async def call(number: int, op: str, **args: object) -> None:
            frame = {"t": "call", "id": number, "op": op, "args": args, "release": op == "run"}
            await stream.send(protocol.encode(frame, b"", seal))

        with anyio.fail_after(30):
            await call(0, "run", argv=["sleep", "60"])
            (begun,) = await ends("done")
            for number in range(1, protocol.MAX_CALLS + 2):
                await call(number, "wait", process=begun["result"]["process"])
            (failed,) = await ends("fail", "done")
    assert (failed["id"], failed["code"]) == (protocol.MAX_CALLS + 1, "busy")
    assert await works(runner)


async def test_a_connection_that_closes_takes_its_calls_with_it(runner: Runner) -> None:
    stream, _, seal = await greeted(runner)
    mark = f"86{os.getpid()}"
    run = {"argv": ["sh", "-c", f"setsid sleep {mark} & echo > started; wait"]}
    await stream.send(protocol.encode({"t": "call", "id": 1, "op": "run", "args": run}, b"", seal))
    with anyio.fail_after(20):
        while not (runner.folder / "workspace/started").exists():
            await anyio.sleep(0.01)
        await stream.aclose()
        while mark.encode() in b"".join(command_lines()):
            await anyio.sleep(0.01)


def command_lines() -> list[bytes]:
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                lines.append((folder / "cmdline").read_bytes())
            except OSError:
                continue
    return lines


@pytest.mark.slow
async def test_many_strangers_do_not_lock_out_who_knows_the_token(tmp_path: Path) -> None:
    async with started(tmp_path, idle_s="900") as runner:
        strangers = [await runner.stream() for _ in range(40)]
        for stranger in strangers[20:]:
            await stranger.aclose()
        with anyio.fail_after(20):
            while True:
                try:
                    assert await works(runner)
                    break
                except (SandboxGone, ExceptionGroup):
                    await anyio.sleep(0.1)
        for stranger in strangers[:20]:
            await stranger.aclose()


async def test_a_runner_in_the_middle_is_noticed(runner: Runner, tmp_path: Path) -> None:
    """User code puts its own socket in place of the runner's and passes everything on."""
    assert await works(runner)
    real = tmp_path / "moved.sock"
    (tmp_path / "runner.sock").rename(real)
    listener = await anyio.create_unix_listener(tmp_path / "runner.sock")

    async def pass_on(victim: ByteStream) -> None:
        async with victim, await anyio.connect_unix(real) as server:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(pump, server, victim, lambda data: data.replace(b"true", b"evil"))
                await pump(victim, server, lambda data: data.replace(b"harmless", b"changed!"))
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, pass_on)
        async with runner.channel() as channel:
            with pytest.raises(SandboxGone):
                await channel.call("run", {"argv": ["echo", "harmless"]})
        tasks.cancel_scope.cancel()
    await listener.aclose()


async def pump(source: ByteStream, target: ByteStream, change: object) -> None:
    assert callable(change)
    try:
        while True:
            await target.send(change(await source.receive()))
    except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        await target.aclose()


async def test_a_runner_without_the_token_is_refused(runner: Runner) -> None:
    async with anyio.create_task_group() as tasks:
        channel = Channel(await runner.stream(), bytes(32))
        with pytest.raises(SandboxGone, match="not the one that was started"):
            await channel.open(tasks)


async def test_a_forged_frame_of_the_other_side_ends_the_channel_with_a_reason(
    tmp_path: Path,
) -> None:
    """A server that knows the token but breaks the rules: the host trusts no byte."""
    token = secrets.token_bytes(32)
    answers = [
        protocol.PREFIX.pack(10, 2**31),
        b"\0" * 100,
        b"not frames at all, but long enough to be read as one or two of them",
    ]
    for number, answer in enumerate(answers):
        folder = tmp_path / str(number)
        folder.mkdir()
        listener = await anyio.create_unix_listener(folder / "runner.sock")

        async def serve(stream: ByteStream, answer: bytes = answer) -> None:
            async with stream:
                mine = os.urandom(protocol.NONCE_BYTES)
                hello = {"t": "hello", "version": protocol.VERSION, "nonce": mine.hex()}
                await stream.send(protocol.encode(hello))
                (said, _), *_ = protocol.Decoder().feed(await stream.receive())
                theirs = bytes.fromhex(said["nonce"])
                proof = protocol.prove(token, "runner", theirs, mine)
                about = {"python": "3", "workspace_inode": 1, "workspace_changed_ns": 1}
                about["ended"] = []
                about |= pool.describe_processes([])
                await stream.send(protocol.encode({"t": "welcome", "proof": proof, **about}))
                await stream.receive()
                await stream.send(answer)
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve)
            async with anyio.create_task_group() as readers:
                stream = await local_socket.connect(folder, deadline_s=5)
                channel = Channel(stream, token)
                await channel.open(readers)
                with pytest.raises(SandboxGone, match="protocol"), anyio.fail_after(5):
                    await channel.call("ping", {})
                assert channel.broken
            tasks.cancel_scope.cancel()
        await listener.aclose()


async def test_memory_and_environment_of_the_runner_are_closed_to_its_own_user(
    runner: Runner,
) -> None:
    assert await works(runner)
    environ = Path(f"/proc/{runner.process.pid}/environ").read_bytes()
    assert runner.token.hex().encode() not in environ
    status = Path(f"/proc/{runner.process.pid}").stat()
    assert status.st_uid == 0


async def test_an_unused_runner_ends_itself(tmp_path: Path) -> None:
    async with started(tmp_path, idle_s="0.5") as runner:
        assert await works(runner)
        with anyio.fail_after(20):
            assert await to_thread.run_sync(runner.process.wait) == 0


@pytest.mark.slow
async def test_a_background_process_keeps_the_runner_until_it_ends(tmp_path: Path) -> None:
    async with started(tmp_path, idle_s="0.3") as runner:
        async with runner.channel() as channel:
            code = b"mkfifo go; (read line < go) & true"
            await channel.call("run", {"language": "bash", "code_bytes": len(code)}, body=code)
        with anyio.move_on_after(1.5):
            await to_thread.run_sync(runner.process.wait, abandon_on_cancel=True)
        assert runner.process.poll() is None
        (runner.folder / "workspace/go").write_text("go\n")
        with anyio.fail_after(20):
            await to_thread.run_sync(runner.process.wait)


async def test_a_call_that_is_answered_by_nobody_gives_up(runner: Runner) -> None:
    async with runner.channel() as channel:
        os.kill(runner.process.pid, 19)
        try:
            with pytest.raises(SandboxGone, match="did not answer within"):
                await channel.call("ping", {}, timeout_s=0.5)
        finally:
            os.kill(runner.process.pid, 18)


def test_frames_are_what_they_say() -> None:
    seals = [protocol.Seal(b"k" * 32, "x", b"n") for _ in range(2)]
    decoder = protocol.Decoder()
    decoder.seal = seals[1]
    frames = [protocol.encode({"t": str(n)}, bytes([n]) * n, seals[0]) for n in range(5)]
    stream = b"".join(frames)
    found = [frame for byte in stream for frame in decoder.feed(bytes([byte]))]
    assert found == [({"t": str(n)}, bytes([n]) * n) for n in range(5)]
