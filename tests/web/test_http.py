"""Streamable HTTP with the SDK's client: both eras, identity, cancellation, the end."""

from pathlib import Path

import anyio
import anyio.lowlevel
import httpx2
import pytest

from mcp_sandbox.models import ChatId
from tests.server.scripted import text_of
from tests.server.test_tools import TABLE
from tests.web.clients import LEGACY, MODERN, call, http_client, initialize, served

ERAS = pytest.mark.parametrize(("mode", "spoken"), [("auto", MODERN), ("legacy", LEGACY)])
MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
CHAT = "Mcp-Sandbox-Chat"


@ERAS
async def test_the_sdk_client_works_in_both_eras(data_root: Path, mode: str, spoken: str) -> None:
    async with served(data_root) as web:
        headers = await web.headers("alice", **{CHAT: "work"})
        async with web.client(mode, headers) as client:
            assert client.protocol_version == spoken
            assert [tool.name for tool in (await client.list_tools()).tools] == list(TABLE)
            result = await client.call_tool("exec", {"command": "echo"})
            assert text_of(result) == "alice/work\n"


@MODES
async def test_progress_reaches_the_client_while_the_call_runs(data_root: Path, mode: str) -> None:
    told: list[str | None] = []
    async with served(data_root) as web:

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            told.append(message)
            web.computers.release.set()

        headers = await web.headers("alice", **{CHAT: "work"})
        async with web.client(mode, headers) as client:
            await client.call_tool("exec", {"command": "x"}, progress_callback=on_progress)
    assert told == ["begun"]


@MODES
async def test_a_client_that_cancels_ends_the_call(data_root: Path, mode: str) -> None:
    async with served(data_root) as web:
        headers = await web.headers("alice", **{CHAT: "work"})
        async with web.client(mode, headers) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.call_tool, "exec", {"command": "x"})
                await web.computers.begun.wait()
                tasks.cancel_scope.cancel()
            await web.computers.cancelled.wait()
            result = await client.call_tool("exec", {"command": "echo"})
            assert text_of(result) == "alice/work\n"


@MODES
async def test_a_client_that_goes_away_ends_its_calls(data_root: Path, mode: str) -> None:
    async with served(data_root) as web:
        headers = await web.headers("alice", **{CHAT: "work"})
        async with anyio.create_task_group() as tasks:

            async def connect_and_call() -> None:
                async with web.client(mode, headers) as client:
                    await client.call_tool("exec", {"command": "x"})

            tasks.start_soon(connect_and_call)
            await web.computers.begun.wait()
            tasks.cancel_scope.cancel()
        await web.computers.cancelled.wait()


async def test_an_older_client_without_a_chat_gets_one_for_its_session(data_root: Path) -> None:
    async with served(data_root) as web:
        headers = await web.headers("alice")
        for _ in range(2):
            async with web.client("legacy", headers) as client:
                for _ in range(2):
                    await client.call_tool("exec", {"command": "echo"})
    first, again, second, _ = web.computers.chats
    assert first == again != second
    assert {first.user, second.user} == {"alice"}


async def test_a_client_that_names_no_chat_is_told_which_line_to_add(data_root: Path) -> None:
    async with served(data_root) as web, web.client("auto", await web.headers()) as client:
        assert len((await client.list_tools()).tools) == 14
        result = await client.call_tool("exec", {"command": "echo"})
        assert result.is_error
        assert '"headers": {"Mcp-Sandbox-Chat": "my-project"}' in text_of(result)
        assert ".mcp.json" in text_of(result)
    assert web.computers.chats == []


@MODES
async def test_there_are_no_previews_for_a_browser_that_is_elsewhere(
    data_root: Path, mode: str
) -> None:
    async with served(data_root) as web:
        headers = await web.headers("alice", **{CHAT: "work"})
        async with web.client(mode, headers) as client:
            result = await client.call_tool("preview", {"port": 3000})
            assert result.is_error
            assert "over HTTP" in text_of(result)
            assert "curl http://127.0.0.1:3000/" in text_of(result)


async def test_a_newer_client_cannot_name_a_session_instead_of_a_chat(data_root: Path) -> None:
    async with served(data_root) as web:
        headers = await web.headers("alice", **{"Mcp-Session-Id": "a" * 32})
        async with web.client("auto", headers) as client:
            assert (await client.call_tool("exec", {"command": "echo"})).is_error
    assert web.computers.chats == []


async def test_every_user_reaches_only_chats_of_its_own(data_root: Path) -> None:
    async with served(data_root) as web:
        for user in ("alice", "bob"):
            headers = await web.headers(user, **{CHAT: "shared-name"})
            async with web.client("auto", headers) as client:
                await client.call_tool("exec", {"command": "echo"})
    assert web.computers.chats == [ChatId("alice", "shared-name"), ChatId("bob", "shared-name")]


async def test_another_users_session_is_as_unknown_as_any_other(data_root: Path) -> None:
    async with served(data_root) as web:
        alice, bob = await web.headers("alice"), await web.headers("bob")
        opened = await web.post(alice, initialize())
        session = {
            "Mcp-Session-Id": opened.headers["mcp-session-id"],
            "Mcp-Protocol-Version": LEGACY,
        }
        stolen = await web.post({**bob, **session}, call("echo"))
        invented = await web.post({**bob, **session, "Mcp-Session-Id": "0" * 32}, call("echo"))
        assert (stolen.status_code, stolen.text) == (invented.status_code, invented.text)
        assert stolen.status_code == 404
        assert web.computers.chats == []
        own = await web.post({**alice, **session}, call("echo"))
        assert f"alice/{session['Mcp-Session-Id']}" in own.text


async def test_other_doors_keep_their_own_way_of_knowing_the_chat(data_root: Path) -> None:
    async with served(data_root, other=lambda _: ChatId("local", "socket")) as web:
        headers = await web.headers("alice", **{CHAT: "work"})
        async with web.client("auto", headers) as client:
            await client.call_tool("exec", {"command": "echo"})
    assert web.computers.chats == [ChatId("alice", "work")]


@MODES
async def test_draining_lets_calls_finish_and_takes_no_new_one(data_root: Path, mode: str) -> None:
    told: list[str] = []
    async with served(data_root) as web:
        headers = await web.headers("alice", **{CHAT: "work"})
        async with web.client(mode, headers) as client, anyio.create_task_group() as tasks:
            # The client looks at the listed tools when an answer comes.
            await client.list_tools()

            async def long_call() -> None:
                told.append(text_of(await client.call_tool("exec", {"command": "x"})))

            tasks.start_soon(long_call)
            await web.computers.begun.wait()
            async with http_client() as kept:
                assert (await kept.get(f"{web.origin}/health")).text == "ok\n"
                (connection,) = kept._transport._pool.connections  # type: ignore[attr-defined]
                tasks.start_soon(web.door.drain, 20)
                # One that is kept open ends, so that no request is refused that has another server.
                while not connection.has_expired():
                    await anyio.sleep(0.01)
            with pytest.raises(httpx2.ConnectError):
                await web.post(headers)
            web.computers.release.set()
    assert told == ["alice/work\n"]


@MODES
async def test_what_still_runs_at_the_end_is_cancelled(data_root: Path, mode: str) -> None:
    async with anyio.create_task_group() as tasks:
        async with served(data_root) as web:
            headers = await web.headers("alice", **{CHAT: "work"})
            answers: list[str] = []

            async def long_call() -> None:
                raw = {"Mcp-Protocol-Version": LEGACY}
                if mode == "legacy":
                    opened = await web.post(headers, initialize())
                    raw["Mcp-Session-Id"] = opened.headers["mcp-session-id"]
                else:
                    raw = {"Mcp-Protocol-Version": MODERN, "Mcp-Method": "tools/call"}
                    raw["Mcp-Name"] = "exec"
                message = call("x")
                message["params"]["_meta"] = {
                    "io.modelcontextprotocol/protocolVersion": MODERN,
                    "io.modelcontextprotocol/clientCapabilities": {},
                }
                answers.append((await web.post({**headers, **raw}, message)).text)

            tasks.start_soon(long_call)
            await web.computers.begun.wait()
            await web.door.drain(0.01)
        assert web.computers.cancelled.is_set()
    assert len(answers) == 1


async def test_an_answer_does_not_wait_for_the_client_to_acknowledge_its_head(
    data_root: Path,
) -> None:
    async with served(data_root) as web:
        async with web.client("auto", await web.headers("alice", **{CHAT: "work"})) as client:
            times = []
            for _ in range(10):
                started = anyio.current_time()
                await client.call_tool("exec", {"command": "echo"})
                times.append(anyio.current_time() - started)
    # A delayed acknowledgement takes at least 40 ms, every time.
    assert min(times) < 0.035
