"""What every backend promises, below sessions."""

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Pooled
from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import ChatId, SandboxId
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.manager import SessionManager


async def test_a_running_sandbox_can_be_found_and_attached_by_another_process(
    manager: SessionManager, config: Config
) -> None:
    session = await manager.session(ChatId("u", "attached"))
    await session.exec("echo first > file")
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as other:
        (info,) = await other.running()
        assert (info.labels["user"], info.labels["chat"]) == ("u", "attached")
        sandbox = await other.attach(info.id)
        async with anyio.create_task_group() as tasks:
            channel = Channel(await sandbox.open_channel(), sandbox.token)
            await channel.open(tasks)
            runtime = Runtime(channel, keep_bytes=1 << 20)
            assert (await runtime.exec("cat file")).stdout == "first\n"
            await runtime.aclose()
    assert (await session.exec("cat file")).stdout == "first\n"


async def test_a_wrong_token_is_refused(manager: SessionManager, config: Config) -> None:
    await (await manager.session(ChatId("u", "token"))).exec("true")
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as other, anyio.create_task_group() as tasks:
        (info,) = await other.running()
        sandbox = await other.attach(info.id)
        stranger = Channel(await sandbox.open_channel(), bytes(32))
        with pytest.raises(SandboxGone, match="token"):
            await stranger.open(tasks)


async def test_destroying_twice_and_what_never_was_is_no_error(
    manager: SessionManager, config: Config
) -> None:
    await (await manager.session(ChatId("u", "gone"))).exec("true")
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as backend:
        (info,) = await backend.running()
        await backend.destroy(info.id)
        await backend.destroy(info.id)
        await backend.destroy(SandboxId("mcs-0123456789abcdef"))
        assert await backend.running() == []
        with pytest.raises(SandboxGone):
            await backend.attach(info.id)


async def test_labels_can_be_changed_and_another_process_sees_it(
    manager: SessionManager, config: Config
) -> None:
    await (await manager.session(ChatId("u", "before"))).exec("true")
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as first:
        if not isinstance(first, Pooled):
            pytest.skip("what holds files has no pool, which alone changes labels")
        (info,) = await first.running()
        await first.relabel(info.id, {"user": "v", "chat": "after"})
    async with open_backend(config.backend, config) as second:
        assert [dict(each.labels) for each in await second.running()] == [
            {"user": "v", "chat": "after"}
        ]
        assert isinstance(second, Pooled)
        with pytest.raises(SandboxGone):
            await second.relabel(SandboxId("mcs-0123456789abcdef"), {})
