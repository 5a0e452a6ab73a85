"""Clients hear that skills changed: each of its own, once for a burst, as long as it is there."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.streams.memory import MemoryObjectSendStream
from mcp import Client
from mcp.client.subscriptions import (
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ToolsListChanged,
)
from mcp.types import (
    EmptyResult,
    PromptsCapability,
    ResourcesCapability,
    SubscribeRequest,
    SubscribeRequestParams,
    ToolsCapability,
)

from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.skills.scan import Whose
from tests.server.skills.shelves import client_of, offering, write_skill
from tests.web.clients import Web

MINE = "skill://user/mine/SKILL.md"
LISTS = {"prompts_list_changed": True, "resources_list_changed": True, "tools_list_changed": True}


async def heard(subscription: Any, number: int) -> set[Any]:
    """The next so many events."""
    found: set[Any] = set()
    async for event in subscription:
        found.add(event)
        if len(found) == number:
            return found
    raise AssertionError


async def test_newer_clients_hear_of_their_own_skills_alone(data_root: Path) -> None:
    alice, bob = (data_root / "skills" / user for user in ("alice", "bob"))
    write_skill(alice, "mine")
    write_skill(bob, "other")
    async with (
        offering(data_root) as web,
        client_of(web, user="alice") as client,
        client_of(web, user="bob") as other,
        client.listen(**LISTS, resource_subscriptions=[MINE]) as hers,
        other.listen(**LISTS, resource_subscriptions=[MINE]) as his,
    ):
        write_skill(alice, "mine", {"SKILL.md": "---\nname: mine\ndescription: New.\n---\n"})
        changed = {PromptsListChanged(), ResourcesListChanged()}
        assert await heard(hers, 3) == {*changed, ResourceUpdated(MINE)}
        write_skill(bob, "third")
        # What he hears first is his own: nothing of hers came before.
        assert await heard(his, 2) == changed
        with anyio.move_on_after(0.1):
            raise AssertionError(await heard(his, 1))


@pytest.mark.slow
async def test_a_file_of_a_skill_can_be_followed_too(data_root: Path) -> None:
    folder = write_skill(data_root / "skills" / "alice", "mine", {"a.md": "x", "b.md": "x"})
    uri = "skill://user/mine/a.md"
    async with (
        offering(data_root) as web,
        client_of(web) as client,
        client.listen(resource_subscriptions=[uri, "skill://user/mine/none.md"]) as changes,
    ):
        (folder / "b.md").write_text("changed")
        (folder / "a.md").write_text("changed")
        assert await heard(changes, 1) == {ResourceUpdated(uri)}
        (folder / "a.md").unlink()
        assert await heard(changes, 1) == {ResourceUpdated(uri)}


async def test_the_tools_change_with_the_first_skill_and_the_last(data_root: Path) -> None:
    folder = data_root / "skills" / "alice"
    async with (
        offering(data_root) as web,
        client_of(web) as client,
        client.listen(tools_list_changed=True) as changes,
    ):
        write_skill(folder, "one")
        assert await heard(changes, 1) == {ToolsListChanged()}
        (folder / "one" / "SKILL.md").unlink()
        assert await heard(changes, 1) == {ToolsListChanged()}


@pytest.mark.slow
async def test_nobody_looks_for_a_client_that_has_gone(data_root: Path) -> None:
    write_skill(data_root / "skills" / "alice", "mine")
    looks = 0

    class Counted(SkillLibrary):
        async def catalogue(self, whose: Whose, *, max_age_s: float = 0.0) -> Catalogue:
            nonlocal looks
            looks += 1
            return await super().catalogue(whose, max_age_s=max_age_s)

    async def grows() -> bool:
        before = looks
        await anyio.sleep(0.3)
        return looks > before

    async with offering(data_root, kind=Counted) as web:
        async with client_of(web) as client, client.listen(resources_list_changed=True):
            assert await grows()
        while await grows():
            pass
        async with client_of(web, "legacy"):
            assert await grows()
        while await grows():
            pass


@asynccontextmanager
async def older(web: Web, told: MemoryObjectSendStream[str]) -> AsyncGenerator[Client]:
    """An older client that passes on what it is told."""

    async def note(message: Any) -> None:
        uri = getattr(message.params, "uri", "")
        await told.send(f"{message.method} {uri}".strip())

    headers = await web.headers("alice", **{"Mcp-Sandbox-Chat": "work"})
    async with web.client("legacy", headers, message_handler=note) as client:
        yield client


async def test_older_clients_are_told_and_of_what_they_subscribed(data_root: Path) -> None:
    folder = data_root / "skills" / "alice"
    write_skill(folder, "mine")
    write_skill(folder, "other")
    tell, told = anyio.create_memory_object_stream[str](10)
    async with tell, told, offering(data_root) as web, older(web, tell) as client:
        capabilities = client.server_capabilities
        assert capabilities.tools == ToolsCapability(list_changed=True)
        assert capabilities.prompts == PromptsCapability(list_changed=True)
        assert capabilities.resources == ResourcesCapability(subscribe=True, list_changed=True)
        request = SubscribeRequest(params=SubscribeRequestParams(uri=MINE))
        await client.session.send_request(request, EmptyResult)
        for name in ("mine", "other"):
            write_skill(folder, name, {"SKILL.md": f"---\nname: {name}\ndescription: x\n---\n"})
        assert {await told.receive() for _ in range(3)} == {
            "notifications/prompts/list_changed",
            "notifications/resources/list_changed",
            f"notifications/resources/updated {MINE}",
        }
