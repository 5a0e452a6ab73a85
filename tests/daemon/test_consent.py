"""Questions reach a user by every way in, and people answer them on the command line."""

import json
import sys
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from mcp.types import ElicitResult

from tests.daemon.http import serving
from tests.daemon.running import Place, command, in_chat, place, running
from tests.server.scripted import text_of
from tests.web.clients import connected

OPEN = {"MCP_SANDBOX_NETWORK": "open", "MCP_SANDBOX_POLICY__PROFILE": "auto"}
PUSH = "git push https://git.example.org/acme/widgets main 2> /dev/null; printf ran"
FOR_CHAT = ElicitResult(action="accept", content={"allow": "this chat"})


async def pushed(client: Client) -> str:
    return text_of(await client.call_tool("exec", {"command": PUSH}))


def started(where: Place, start: list[str], era: Any, ask: Any) -> Client:
    server = StdioServerParameters(command=start[0], args=start[1:], env=where.environment())
    return Client(server, mode=era, elicitation_callback=ask)


def relayed(where: Place, chat: str, era: Any, ask: Any) -> Client:
    """A client that comes to the daemon by the relay."""
    return started(where, where.command("connect", "--chat", chat), era, ask)


async def test_by_stdio_a_user_is_asked(tmp_path: Path) -> None:
    async def ask(*_: object) -> ElicitResult:
        return FOR_CHAT

    async def push(era: str) -> None:
        where = place(tmp_path / era, "bubblewrap", OPEN)
        own = ("--data", str(where.data), "--backend", where.backend)
        start = [sys.executable, "-m", "mcp_sandbox", "stdio", *own]
        async with started(where, start, era, ask) as client:
            assert await pushed(client) == "ran"

    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push, "auto")
            tasks.start_soon(push, "legacy")


async def test_an_answer_outlives_the_daemon_and_people_see_and_give_it(tmp_path: Path) -> None:
    where = place(tmp_path, "bubblewrap", OPEN)
    answers, asked = [FOR_CHAT], list[str]()

    async def ask(_context: object, params: Any) -> ElicitResult:
        asked.append(params.message)
        return answers.pop(0)

    async with running(where):
        for era in ("auto", "legacy"):
            async with relayed(where, "a", era, ask) as client:
                assert await pushed(client) == "ran"
        assert len(asked) == 1
    async with serving(where) as served:
        async with in_chat(where, "a") as raw:
            assert await raw.exec(PUSH) == "ran"
        async with in_chat(where, "c") as raw:
            assert "there is no answer yet" in await raw.exec(PUSH)
            (waits,) = await listed(where, "c")
            shown = await command(where, "approvals show", waits["id"])
            assert f"command: {PUSH}" in shown.out
            done = await command(where, "approvals allow", waits["id"])
            assert (done.code, "type it on a terminal, or give --yes" in done.err) == (1, True)
            done = await command(where, "approvals allow", waits["id"], "--yes")
            assert (done.code, "local/c: allowed once until" in done.out) == (0, True)
            assert await raw.exec(PUSH) == "ran"
            assert await listed(where, "c") == []
            assert "there is no answer yet" in await raw.exec(PUSH)
            (waits,) = await listed(where, "c")
            assert (await command(where, "approvals deny", waits["id"], "-y")).code == 0
            assert "the user has said no" in await raw.exec(PUSH)
            (refused,) = await listed(where, "c")
            assert refused["state"] == "no"
            late = await command(where, "approvals allow", waits["id"], "--chat", "--yes")
            assert (late.code, "nothing waits under" in late.err) == (1, True)
        _, secret = await served.token("ann")
        for era in ("auto", "legacy"):
            answers[:] = [FOR_CHAT]
            headers = {"Authorization": f"Bearer {secret}", "Mcp-Sandbox-Chat": era}
            async with connected(served.url, era, headers, elicitation_callback=ask) as client:
                assert [await pushed(client), await pushed(client)] == ["ran", "ran"]
        assert len(asked) == 3


async def listed(where: Place, chat: str) -> list[dict[str, Any]]:
    found = json.loads((await command(where, "approvals list", "--json")).out)
    return [each for each in found if each["chat"] == f"local/{chat}"]
