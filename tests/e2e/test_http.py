"""`mcp-sandbox serve --http`: real clients, real sandboxes, both eras."""

from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp import Client

from tests.daemon.http import Served, serving
from tests.daemon.running import Place, in_chat, place, starting
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.server.scripted import text_of
from tests.server.test_tools import TABLE
from tests.web.clients import LEGACY, MODERN

ERAS = pytest.mark.parametrize(("mode", "spoken"), [("auto", MODERN), ("legacy", LEGACY)])
MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
HIDDEN = "setsid sleep 1000 & (setsid sleep 1000 &); echo begun; sleep 1000"
LEFT = "grep -l '^sleep$' /proc/[0-9]*/comm 2>/dev/null | wc -l"

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(params=[DOCKER, BUBBLEWRAP])
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def home(tmp_path: Path, backend_name: str) -> Place:
    return place(tmp_path, backend_name)


on_bubblewrap = pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)


async def run(client: Client, command: str) -> str:
    return text_of(await client.call_tool("exec", {"command": command}))


class Begun:
    """A call that never ends; entered when its command runs, left by cancelling it."""

    def __init__(self) -> None:
        self.begun = anyio.Event()

    async def call(self, client: Client) -> None:
        async def heard(progress: float, total: float | None, message: str | None) -> None:
            if message and "begun" in message:
                self.begun.set()

        await client.call_tool("exec", {"command": HIDDEN}, progress_callback=heard)


async def nothing_sleeps(client: Client) -> None:
    while (left := await run(client, LEFT)).strip() != "0":
        assert left.strip().isdecimal(), left


@ERAS
async def test_clients_of_both_eras_work_in_a_sandbox(home: Place, mode: str, spoken: str) -> None:
    async with serving(home) as served:
        async with served.client("alice", mode=mode) as client:
            assert client.protocol_version == spoken
            tools = [tool.name for tool in (await client.list_tools()).tools]
            assert tools == [*TABLE, "skills_list", "skill_activate"]
            ran = await client.call_tool("run_code", {"code": "print(6 * 7)"})
            assert text_of(ran) == "42\n"
            await run(client, "echo kept > file")
        async with served.client("alice", mode=mode) as client:
            assert await run(client, "cat file") == "kept\n"


@MODES
async def test_cancelling_kills_the_whole_tree(home: Place, mode: str) -> None:
    async with serving(home) as served, served.client("alice", mode=mode) as client:
        async with anyio.create_task_group() as tasks:
            endless = Begun()
            tasks.start_soon(endless.call, client)
            await endless.begun.wait()
            tasks.cancel_scope.cancel()
        await nothing_sleeps(client)


@on_bubblewrap
@MODES
async def test_closing_the_stream_kills_the_whole_tree(home: Place, mode: str) -> None:
    async with serving(home) as served:
        async with anyio.create_task_group() as tasks:
            endless = Begun()

            async def connect_and_call() -> None:
                async with served.client("alice", mode=mode) as client:
                    await endless.call(client)

            tasks.start_soon(connect_and_call)
            await endless.begun.wait()
            tasks.cancel_scope.cancel()
        async with served.client("alice") as client:
            await nothing_sleeps(client)


@on_bubblewrap
async def test_users_and_chats_are_apart_whatever_they_send(home: Place) -> None:
    async with serving(home) as served:
        async with served.client("alice", "work") as client:
            await run(client, "echo secret > file")
        for user, chat in (("bob", "work"), ("alice", "other"), ("Alice", "work")):
            async with served.client(user, chat) as client:
                assert "No such file" in await run(client, "cat file")
        async with served.client("alice", None, "legacy") as client:
            assert "No such file" in await run(client, "cat file")
        async with served.client("alice", "work") as client:
            assert await run(client, "cat file") == "secret\n"


@on_bubblewrap
async def test_a_chat_is_the_same_through_every_door(home: Place) -> None:
    async with serving(home) as served, in_chat(home, "work", user="alice") as local:
        async with served.client("alice", "work") as remote:
            await local.exec("echo by socket > file")
            assert await run(remote, "cat file") == "by socket\n"


@on_bubblewrap
async def test_revoking_a_token_ends_what_it_runs(home: Place) -> None:
    async with serving(home) as served, served.client("alice") as client:
        token, secret = await served.token("alice")
        headers = {"Authorization": f"Bearer {secret}", "Mcp-Sandbox-Chat": "work"}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call_by_hand, served, headers)
            while (await run(client, LEFT)).strip() == "0":
                pass
            await served.revoke(token)
            await nothing_sleeps(client)


async def call_by_hand(served: Served, headers: dict[str, str]) -> None:
    """Call as a client does that knows only the newest protocol, and see it refused."""
    fixed = {"Mcp-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": "exec"}
    accepts = {"Accept": "application/json, text/event-stream"}
    meta: dict[str, Any] = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": "exec", "arguments": {"command": HIDDEN}, "_meta": meta}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(
            served.url, headers={**headers, **fixed, **accepts}, json=message
        )
    assert answer.status_code == 401


@on_bubblewrap
@MODES
async def test_a_stopped_server_lets_calls_finish(home: Place, mode: str) -> None:
    async with serving(home) as served, served.client("alice", mode=mode) as client:
        await client.list_tools()
        told: list[str] = []

        async def finish() -> None:
            told.append(await run(client, "echo begun > file; sleep 1; echo done"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(finish)
            file = anyio.Path(home.data / "sandbox/workspace/alice/chat-work/file")
            while not await file.exists():
                await anyio.sleep(0.01)
            served.daemon.process.terminate()
        assert [text.splitlines()[0] for text in told] == ["done"]
        assert await served.daemon.end() == 0


@on_bubblewrap
async def test_figures_tell_of_calls_but_of_no_user(home: Place) -> None:
    async with serving(home) as served, served.client("alice", "work") as client:
        await run(client, "true")
        _, secret = await served.token("prometheus")
        page = served.url.replace("/mcp", "/metrics")
        async with httpx2.AsyncClient() as http:
            assert (await http.get(page)).status_code == 401
            found = await http.get(page, headers={"Authorization": f"Bearer {secret}"})
        assert 'mcp_sandbox_calls_total{outcome="ok",tool="exec"} 1.0' in found.text
        assert "alice" not in found.text
        assert "work" not in found.text


@on_bubblewrap
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--http", "0.0.0.0:0", "--allow-anonymous-loopback"), "would let everybody in"),
        (("--http", "nonsense"), "write HOST:PORT"),
        (("--allow-anonymous-loopback",), "give both"),
    ],
)
async def test_a_door_open_to_everybody_is_never_made(
    home: Place, options: tuple[str, ...], said: str
) -> None:
    with anyio.fail_after(30):
        async with starting(home, *options) as daemon:
            assert await daemon.end() == 1
            assert said in daemon.log
            assert "Traceback" not in daemon.log
