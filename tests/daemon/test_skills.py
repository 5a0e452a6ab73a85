"""Skills through the relay and a daemon: the SDK's client in both eras, and what it is told."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.subscriptions import PromptsListChanged, ResourcesListChanged
from mcp.types import TextResourceContents

from tests.daemon.running import ROOT, Place, place, running
from tests.server.skills.shelves import SkillsClient, write_skill

LISTS_CHANGED = {
    "notifications/prompts/list_changed",
    "notifications/resources/list_changed",
}
MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


@asynccontextmanager
async def relayed(where: Place, user: str, mode: Any, **more: Any) -> AsyncGenerator[Client]:
    """The SDK's client, which starts a relay to the daemon."""
    name, *arguments = where.command("connect", "--user", user, "--chat", "work")
    server = StdioServerParameters(command=name, args=arguments, env=where.environment(), cwd=ROOT)
    async with Client(server, mode=mode, **more) as client:
        yield client


@MODES
async def test_users_of_a_daemon_have_skills_of_their_own(tmp_path: Path, mode: str) -> None:
    where = place(tmp_path)
    write_skill(where.data / "skills" / "alice", "hers", {"notes.md": "x"})
    uri = "skill://user/hers/notes.md"
    async with (
        running(where),
        relayed(where, "alice", mode) as alice,
        relayed(where, "bob", mode) as bob,
    ):
        (found,) = (await alice.read_resource(uri)).contents
        assert isinstance(found, TextResourceContents)
        assert found.text == "x"
        mine, his = [
            {entry["uri"] for entry in await SkillsClient(client).all()} for client in (alice, bob)
        ]
        assert mine - his == {"skill://user/hers/SKILL.md"}
        prompts = {prompt.name for prompt in (await alice.list_prompts()).prompts}
        assert prompts >= {"hers", "skill-authoring"}
        assert "hers: About hers." in (alice.instructions or "")
        assert "hers" not in (bob.instructions or "")


async def test_a_newer_client_hears_of_a_new_skill_and_the_daemon_still_ends_at_once(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)
    async with running(where) as daemon, relayed(where, "alice", "auto") as client:
        async with client.listen(prompts_list_changed=True, resources_list_changed=True) as told:
            write_skill(where.data / "skills" / "alice", "hers")
            events = {await anext(told), await anext(told)}
            assert events == {PromptsListChanged(), ResourcesListChanged()}
            began = anyio.current_time()
            daemon.process.terminate()
            assert await daemon.end() == 0
            assert anyio.current_time() - began < 5


async def test_an_older_client_hears_of_a_new_skill(tmp_path: Path) -> None:
    where = place(tmp_path)
    tell, told = anyio.create_memory_object_stream[str](100)
    heard = set[str]()

    async def note(message: Any) -> None:
        await tell.send(message.method)

    async with (
        tell,
        told,
        running(where),
        relayed(where, "alice", "legacy", message_handler=note) as client,
    ):
        await client.list_prompts()
        # An edit of the very first moment may come before anybody looks.
        for number in range(5):
            write_skill(where.data / "skills" / "alice", f"hers-{number}")
            with anyio.move_on_after(5):
                while heard != LISTS_CHANGED:
                    heard.add(await told.receive())
                break
    assert heard == LISTS_CHANGED
