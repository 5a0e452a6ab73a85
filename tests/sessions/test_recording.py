"""What the audit has of calls: before they run, and before their answers are sent."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.audit.log import events, verify
from mcp_sandbox.config import AuditConfig, Config
from mcp_sandbox.errors import NotFound, NotPermitted, StorageUnavailable
from mcp_sandbox.models import ChatId
from tests.conftest import configured

pytestmark = pytest.mark.bubblewrap
CHAT = ChatId("tester", "recorded")


def folder_of(config: Config) -> Path:
    return config.data_dir / "sandbox" / "audit"


async def calls(config: Config) -> list[dict[str, Any]]:
    """The lines of the chat's calls."""
    found = await to_thread.run_sync(lambda: [*events(folder_of(config), str(CHAT))])
    return [told for _, told in found]


async def test_a_call_is_recorded_before_it_runs_and_before_it_is_answered(
    data_root: Path,
) -> None:
    config = configured("unsafe-local", data_root)
    command = "echo some > a.txt; echo up http://me:pw@host/; exit 3"
    while_it_ran = list[dict[str, Any]]()

    async def look(_stream: str, _data: bytes) -> None:
        while_it_ran.extend(await calls(config))

    with anyio.fail_after(40):
        async with open_manager(config) as manager:
            session = await manager.session(CHAT)
            result = await session.exec(command, env={"A_KEY": "of mine"}, on_output=look)
            begun, ended = await calls(config)
            with pytest.raises(NotFound):
                await session.read_file("missing")
            await session.write_file("large", b"x" * 100_000)
            with anyio.move_on_after(0.5):
                await session.exec("sleep 100")
            judged = await manager.session(CHAT, judged=True)
            with pytest.raises(NotPermitted):
                await judged.exec("rm -rf /")
    assert while_it_ran == [begun]
    assert {name: begun[name] for name in ("kind", "tool", "backend")} == {
        "kind": "begun",
        "tool": "exec",
        "backend": "unsafe-local",
    }
    written = json.dumps({"command": command, "env": {"A_KEY": "of mine"}})
    shown = json.dumps({"command": command.replace("me:pw", "***"), "env": ["A_KEY"]})
    assert begun["arguments"] == shown
    assert begun["digest"] == sha256(written.encode()).hexdigest()
    assert {name: ended[name] for name in ("kind", "of", "outcome", "exit", "changed")} == {
        "kind": "ended",
        "of": begun["n"],
        "outcome": "ok",
        "exit": 3,
        "changed": ["a.txt"],
    }
    assert ended["sandbox"]
    assert ended["bytes"] == len(result.stdout)
    _, _, _, missing, large, _, _, cancelled, refused = await calls(config)
    assert missing["outcome"] == "NotFound"
    assert len(large["arguments"]) == 2048
    assert cancelled["outcome"] == "cancelled"
    assert (refused["kind"], refused["level"], refused["decision"]) == (
        *("refused", "critical"),
        "deny",
    )
    assert "refused" in refused["why"]
    assert (await to_thread.run_sync(verify, folder_of(config))).problems == []


async def test_where_nothing_can_be_recorded_nothing_runs_unless_it_may(data_root: Path) -> None:
    config = configured("unsafe-local", data_root)
    folder_of(config).parent.mkdir(parents=True)
    folder_of(config).write_text("a file in its place")
    with anyio.fail_after(40):
        with pytest.raises(StorageUnavailable, match="audit"):
            async with open_manager(config):
                pytest.fail("it was opened")
        may = config.model_copy(update={"audit": AuditConfig(on_error="go_on")})
        async with open_manager(may) as manager:
            assert (await (await manager.session(CHAT)).exec("true")).success


async def test_a_chat_that_records_too_much_waits_and_another_does_not(data_root: Path) -> None:
    """Of its calls none has run that is not recorded; one of its neighbour never waits."""
    config = configured("unsafe-local", data_root)
    audit = AuditConfig(max_minute=64 << 10)
    ran, large = list[int](), f"true {'x' * 2000}"
    with anyio.fail_after(40):
        async with (
            open_manager(config.model_copy(update={"audit": audit})) as manager,
            anyio.create_task_group() as tasks,
        ):
            neighbour = await manager.session(ChatId("tester", "neighbour"))
            flooder = await manager.session(CHAT)

            async def flood() -> None:
                while True:
                    await flooder.exec(large)
                    ran.append(0)

            for _ in range(4):
                tasks.start_soon(flood)
            spent = manager._context.audit
            while spent._busy_until_s.get((CHAT.user, CHAT.chat), 0) < anyio.current_time() + 60:
                await anyio.lowlevel.checkpoint()
            for number in range(20):
                await neighbour.write_file("mine", f"{number}".encode())
            before, recorded = len(ran), await calls(config)
            tasks.cancel_scope.cancel()
    assert before == len(ran)
    size = sum(len(json.dumps(each)) for each in recorded)
    assert 64 << 10 <= size < 96 << 10
    begun = [each for each in recorded if each["kind"] == "begun"]
    assert before <= len(begun) <= before + 4
