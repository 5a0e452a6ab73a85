"""While a block lasts programs of a chat's computer reach a handler of the host, on any network."""

from collections.abc import AsyncGenerator

import anyio
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import Busy, SandboxGone
from mcp_sandbox.models import ChatId, Network
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.sessions.clocks import SetClock

CHAT = ChatId("local", "doors")
SAY = """
import socket
place = {!r}
with socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET) as client:
    client.connect(place if isinstance(place, str) else ("127.0.0.1", place))
    client.sendall(b"hello")
    client.shutdown(socket.SHUT_WR)
    print(client.makefile().read())
"""
DAY_S = 24 * 3600.0


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
async def manager(config: Config, clock: SetClock) -> AsyncGenerator[SessionManager]:
    async with open_manager(config, clock=clock) as opened:
        yield opened


async def greet(stream: ByteStream) -> None:
    async with stream:
        await stream.send(b"you said " + b"".join([data async for data in stream]))


async def say(session: Session, place: int | str) -> str:
    result = await session.run_code(SAY.format(place), timeout_s=20)
    return result.stdout + result.stderr


@pytest.mark.parametrize("network", ["none", "open", "allowlist"])
async def test_programs_reach_the_handlers_on_any_network(config: Config, network: Network) -> None:
    if config.backend in ("unsafe-local", "e2b") and network == "allowlist":
        pytest.skip("it has no wall to put a door into, or is refused this network")
    with anyio.fail_after(50):
        async with open_manager(config.model_copy(update={"network": network})) as manager:
            session = await manager.session(CHAT)
            async with session.door(greet) as port:
                async with session.door(greet, at="/tmp/door.sock") as path:
                    for place in (port, path):
                        assert await say(session, place) == "you said hello\n"
                # What ends is told on another channel than the next call.
                while "FileNotFoundError" not in await say(session, path):
                    pass
                assert await say(session, port) == "you said hello\n"
            while "ConnectionRefusedError" not in await say(session, port):
                pass


async def test_a_door_keeps_its_sandbox_however_old_it_is(
    manager: SessionManager, clock: SetClock
) -> None:
    with anyio.fail_after(50):
        session = await manager.session(CHAT)
        async with session.door(greet) as port:
            clock.pass_(2 * DAY_S)
            await manager._reaper.look()
            assert await say(session, port) == "you said hello\n"
            assert await session.take_notices() == []
            with pytest.raises(Busy, match="in use"):
                await manager.pause(CHAT)
            await session.run_code("kept = 1", notebook="old")
        assert "ConnectionRefusedError" in await say(session, port)
        # A new pod has the name of the old one.
        assert "NameError" in (await session.run_code("kept", notebook="old")).stderr


async def test_the_end_of_the_sandbox_ends_handlers_and_the_call_beside_them(
    manager: SessionManager, config: Config
) -> None:
    entered, left = anyio.Event(), anyio.Event()

    async def wait(_stream: ByteStream) -> None:
        entered.set()
        try:
            await anyio.sleep_forever()
        finally:
            left.set()

    async def strike() -> None:
        assert config.backend != "auto"
        await entered.wait()
        async with open_backend(config.backend, config) as backend:
            (info,) = await backend.running()
            await backend.destroy(info.id)

    session = await manager.session(CHAT)
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(strike)
            with pytest.raises(SandboxGone, match="next call"):
                async with session.door(wait) as port:
                    await say(session, port)
        await left.wait()
        async with session.door(greet) as port:
            assert await say(session, port) == "you said hello\n"
