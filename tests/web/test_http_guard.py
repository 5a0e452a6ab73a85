"""Attacks on the HTTP door: each is refused by the right status, and the server goes on."""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.web.uvicorn_server import listen
from tests.web.clients import JSON, LEGACY, Web, call, http_client, initialize, ping, served

CHAT = {"Mcp-Sandbox-Chat": "work"}


async def is_well(web: Web, headers: dict[str, str]) -> bool:
    """Whether a client that behaves is served."""
    return (await web.post(headers, initialize())).status_code == 200


def said(response: httpx2.Response) -> str:
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.parametrize(
    "sent",
    ["", "Bearer", "Bearer wrong", "Basic YTpi", "Bearer " + "x" * 9000, "bearer mcs_"],
)
async def test_without_a_right_token_nothing_is_served(data_root: Path, sent: str) -> None:
    async with served(data_root) as web:
        headers = await web.headers()
        for message in (ping(), initialize(), call("echo")):
            refused = await web.post({"Authorization": sent} if sent else {}, message)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Bearer ")
            assert "mcp-sandbox token add" in said(refused)
        async with http_client() as client:
            assert (await client.get(f"{web.origin}/metrics")).status_code == 401
        assert await is_well(web, headers)
    assert web.computers.chats == []


async def test_a_token_must_be_the_only_one_that_is_sent(data_root: Path) -> None:
    async with served(data_root) as web, http_client() as client:
        right = (await web.headers())["Authorization"]
        twice = [*JSON.items(), ("Authorization", right), ("Authorization", "Bearer other")]
        assert (await client.post(web.door.url, headers=twice, json=ping())).status_code == 401


async def test_a_revoked_token_is_refused_at_once(data_root: Path) -> None:
    async with served(data_root) as web:
        token, secret = await web.token("alice")
        headers = {"Authorization": f"Bearer {secret}"}
        assert await is_well(web, headers)
        await web.revoke(token)
        assert (await web.post(headers)).status_code == 401


async def test_an_expired_token_is_refused(data_root: Path) -> None:
    async with served(data_root) as web:
        _, secret = await web.token("alice", 0.001)
        assert (await web.post({"Authorization": f"Bearer {secret}"})).status_code == 401


async def test_what_a_revoked_token_began_is_ended(data_root: Path) -> None:
    async with served(data_root) as web, anyio.create_task_group() as tasks:
        token, secret = await web.token("alice")
        headers = {"Authorization": f"Bearer {secret}", **CHAT}

        async def long_call() -> None:
            opened = await web.post(headers, initialize())
            session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
            await web.post({**headers, **session, "Mcp-Protocol-Version": LEGACY}, call("x"))

        tasks.start_soon(long_call)
        await web.computers.begun.wait()
        await web.revoke(token)
        await web.computers.cancelled.wait()


async def test_tokens_that_cannot_be_checked_let_nobody_in(data_root: Path) -> None:
    async with served(data_root) as web:
        headers = await web.headers()
        file = anyio.Path(data_root / "sandbox" / "tokens.json")
        kept = await file.read_bytes()
        await file.write_bytes(kept[:-5])
        refused = await web.post(headers)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert str(data_root) not in refused.text
        await file.write_bytes(kept)
        assert await is_well(web, headers)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "0", ""),
        *("localhost@evil.example", "127.0.0.1:{port}/", "localhost:{port}, evil.example"),
        *("[::1", "local host"),
    ],
)
async def test_a_foreign_host_is_misdirected(data_root: Path, host: str) -> None:
    async with served(data_root, anonymous=True) as web:
        forged = {"Host": host.format(port=web.port)}
        refused = await web.post(forged, initialize())
        assert refused.status_code in ((400, 421) if host in ("", "local host") else (421,))
        async with http_client() as client:
            health = await client.get(f"{web.origin}/health", headers=forged)
            assert health.status_code == refused.status_code
        assert await is_well(web, {"Host": f"LOCALHOST:{web.port}"})


async def test_a_request_without_a_host_is_refused(data_root: Path) -> None:
    async with served(data_root, anonymous=True) as web, web.peer() as (stream, lines):
        await stream.send(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 421 " in await lines.receive_until(b"\r\n", 1000)


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "null", "http://localhost.evil.example", "file://", ""),
        *("http://localhost@e", "chrome-extension://abc", "http://127.0.0.1.evil.example:80"),
        *("http://localhost/x", "localhost"),
    ],
)
async def test_pages_of_a_foreign_origin_are_forbidden(data_root: Path, origin: str) -> None:
    async with served(data_root, anonymous=True) as web:
        refused = await web.post({"Origin": origin}, initialize())
        assert refused.status_code == 403
        assert not [name for name in refused.headers if name.startswith("access-control")]
        assert await is_well(web, {"Origin": f"http://localhost:{web.port}"})


async def test_names_that_the_operator_allows_are_served(data_root: Path) -> None:
    names = ("box.example.org", "other.example.org:8443")
    async with served(data_root, anonymous=True, allowed_hosts=names) as web:
        for host in ("box.example.org", "Box.Example.org:443", "other.example.org:8443"):
            assert await is_well(web, {"Host": host, "Origin": f"https://{host}"})
        assert not await is_well(web, {"Host": "other.example.org"})
    with pytest.raises(ConfigError, match="allowed_hosts: '\\*' is no host name"):
        async with served(data_root, allowed_hosts=("*",)):
            pass


@pytest.mark.parametrize(
    "chat", ["../other", "a/b", "", "a b", "-a", "x" * 129, "caf\u00e9", "a,b", "%2e%2e"]
)
async def test_an_unusable_chat_is_refused_and_never_bent_to_another(
    data_root: Path, chat: str
) -> None:
    async with served(data_root) as web:
        headers = {**(await web.headers()), "Mcp-Sandbox-Chat": chat}
        raw: Any = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        async with http_client() as client:
            names = [*((k.encode(), v.encode()) for k, v in JSON.items()), *raw]
            refused = await client.post(web.door.url, headers=names, json=initialize())
        assert refused.status_code == 400
        assert "mcp-sandbox-chat" in said(refused)


async def test_a_chat_must_be_named_once(data_root: Path) -> None:
    async with (
        served(data_root, anonymous=True) as web,
        http_client() as client,
    ):
        twice = [*JSON.items(), ("Mcp-Sandbox-Chat", "a"), ("Mcp-Sandbox-Chat", "b")]
        refused = await client.post(web.door.url, headers=twice, json=ping())
        assert refused.status_code == 400


@pytest.mark.parametrize("kind", ["text/plain", "", "multipart/form-data", "application/jsonp"])
async def test_another_content_type_is_refused(data_root: Path, kind: str) -> None:
    async with served(data_root, anonymous=True) as web:
        assert (await web.post({"content-type": kind}, initialize())).status_code == 415
        assert await is_well(web, {"content-type": "application/json; charset=utf-8"})


async def test_a_body_over_the_limit_is_refused_before_it_is_sent(data_root: Path) -> None:
    async with served(data_root, anonymous=True, max_body=100_000) as web:
        async with web.peer() as (stream, lines):
            await stream.send(head(web, "Content-Length: 100001"))
            assert b" 413 " in await lines.receive_until(b"\r\n", 1000)
        assert await is_well(web, {})


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(data_root: Path) -> None:
    async with served(data_root, anonymous=True, max_body=100_000) as web:
        async with web.peer() as (stream, lines):
            await stream.send(head(web, "Transfer-Encoding: chunked"))
            await stream.send(b"186a1\r\n" + b"x" * 100_001)
            assert b" 413 " in await lines.receive_until(b"\r\n", 1000)
        assert await is_well(web, {})


async def test_a_body_at_the_limit_is_read(data_root: Path) -> None:
    async with served(data_root, anonymous=True, max_body=100_000) as web:
        message = initialize()
        message["params"]["clientInfo"]["name"] = "x" * 90_000
        assert (await web.post({}, message)).status_code == 200


async def test_a_body_where_none_belongs_is_refused(data_root: Path) -> None:
    async with (
        served(data_root, anonymous=True) as web,
        http_client() as client,
    ):
        for method in ("GET", "DELETE"):
            sent = await client.request(method, web.door.url, headers=JSON, content=b"x" * 100)
            assert sent.status_code == 400


NO_MESSAGES = [
    b"",
    b"nonsense",
    b"[" * 100_000,
    b"9" * 100_000,
    b"[]",
    b'{"jsonrpc":"2.0"}',
    b"\xff",
]


@pytest.mark.slow
@pytest.mark.parametrize("version", [LEGACY, "2026-07-28", "1999-01-01", "\x7f"])
async def test_what_is_no_message_is_refused(data_root: Path, version: str) -> None:
    async with (
        served(data_root, anonymous=True) as web,
        http_client() as client,
    ):
        headers = {**JSON, "Mcp-Protocol-Version": version}
        for body in NO_MESSAGES:
            refused = await client.post(web.door.url, headers=headers, content=body)
            assert 400 <= refused.status_code < 500, body[:80]
            assert len(refused.content) < 2000
            assert await is_well(web, {})


async def test_a_slow_body_is_given_up(data_root: Path) -> None:
    async with served(data_root, anonymous=True, request_time=0.3) as web:
        async with web.peer() as (stream, lines):
            await stream.send(head(web, "Content-Length: 50") + b"{")
            assert b" 408 " in await lines.receive_until(b"\r\n", 1000)
        assert await is_well(web, {})


async def test_a_client_that_leaves_in_its_body_leaves_nothing(data_root: Path) -> None:
    async with served(data_root, anonymous=True, requests_per_user=1) as web:
        for _ in range(5):
            async with web.peer() as (stream, _):
                await stream.send(head(web, "Content-Length: 50") + b"{")
        while not await is_well(web, {}):
            await anyio.sleep(0.01)


@pytest.mark.parametrize(
    "path", ["/", "/mcp/", "/mcp/x", "/.well-known/x", "/%6dcp/..", "/metrics/"]
)
async def test_there_is_nothing_elsewhere(data_root: Path, path: str) -> None:
    async with (
        served(data_root, anonymous=True) as web,
        http_client() as client,
    ):
        assert (await client.get(f"{web.origin}{path}")).status_code == 404


async def test_health_tells_nothing_but_that_it_is_there(data_root: Path) -> None:
    async with served(data_root) as web, http_client() as client:
        health = await client.get(f"{web.origin}/health")
        assert (health.status_code, health.text) == (200, "ok\n")
        assert set(health.headers) == {"date", "content-type", "content-length"}
        assert (await client.head(f"{web.origin}/health")).text == ""
        assert (await client.post(f"{web.origin}/health")).status_code == 404


async def test_figures_are_for_who_has_a_token(data_root: Path) -> None:
    async with served(data_root) as web, http_client() as client:
        headers = await web.headers()
        assert (await client.get(f"{web.origin}/metrics", headers=headers)).text == "figures 1\n"


@pytest.mark.slow
async def test_more_requests_than_the_rate_must_wait(data_root: Path) -> None:
    async with served(data_root, rate=1) as web:
        alice, bob = await web.headers("alice"), await web.headers("bob")
        answers: list[httpx2.Response] = []

        async def ask() -> None:
            answers.append(await web.post(alice))

        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(ask)
        refused = [answer for answer in answers if answer.status_code == 429]
        assert 0 < len(refused) <= 30
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        assert await is_well(web, bob)


async def test_many_large_messages_at_once_must_wait(data_root: Path) -> None:
    size = 64 << 10
    async with served(data_root, max_body=size) as web, AsyncExitStack() as stack:
        alice, bob = await web.headers("alice"), await web.headers("bob")
        own = f"Authorization: {alice['Authorization']}\r\nContent-Length: {size}"
        # One of them may come while another message is served, and be refused itself.
        while (refused := await web.post(alice)).status_code != 429:
            stream, _ = await stack.enter_async_context(web.peer())
            await stream.send(head(web, own) + b" " * (size - 1))
        assert "large messages" in refused.text
        assert await is_well(web, bob)
        await stack.aclose()
        while not await is_well(web, alice):
            await anyio.sleep(0.01)


async def test_more_requests_at_once_than_allowed_must_wait(data_root: Path) -> None:
    async with served(data_root, requests_per_user=2) as web:
        alice, bob = await web.headers("alice"), await web.headers("bob")
        own = f"Authorization: {alice['Authorization']}\r\nContent-Length: 9"
        async with AsyncExitStack() as stack:
            # One of them may come while another request is served, and be refused itself.
            while (refused := await web.post(alice)).status_code != 429:
                stream, _ = await stack.enter_async_context(web.peer())
                await stream.send(head(web, own))
            assert refused.headers["retry-after"] == "1"
            assert await is_well(web, bob)
        while not await is_well(web, alice):
            await anyio.sleep(0.01)


async def test_more_sessions_than_allowed_must_wait_until_one_ends(data_root: Path) -> None:
    async with (
        served(data_root, sessions_per_user=2) as web,
        http_client() as client,
    ):
        alice, bob = await web.headers("alice"), await web.headers("bob")
        opened = [await web.post(alice, initialize()) for _ in range(2)]
        refused = await web.post(alice, initialize())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        known = {
            "Mcp-Session-Id": opened[0].headers["mcp-session-id"],
            "Mcp-Protocol-Version": LEGACY,
        }
        # Who only knows its id neither ends the session nor makes it count less.
        assert (await client.delete(web.door.url, headers={**bob, **known})).status_code == 404
        assert not await is_well(web, alice)
        assert await is_well(web, bob)
        assert (await client.delete(web.door.url, headers={**alice, **known})).status_code == 200
        assert await is_well(web, alice)


async def test_sessions_that_are_being_opened_count(data_root: Path) -> None:
    async with served(data_root, anonymous=True, sessions_per_user=2) as web:
        answers: list[int] = []

        async def begin() -> None:
            answers.append((await web.post({}, initialize())).status_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(begin)
    assert sorted(answers) == [200, 200, 429, 429, 429, 429]


async def test_refused_openings_take_no_room(data_root: Path) -> None:
    async with served(data_root, anonymous=True, sessions_per_user=1) as web:
        for _ in range(3):
            assert (await web.post({}, call("echo"))).status_code == 400
        assert await is_well(web, {})


async def test_without_tokens_loopback_is_one_local_user(data_root: Path) -> None:
    async with served(data_root, anonymous=True) as web:
        async with web.client("auto", CHAT) as client:
            await client.call_tool("exec", {"command": "echo"})
        assert (await web.post({"Authorization": "Bearer wrong"})).status_code == 401
        async with web.client("auto", {**(await web.headers("bob")), **CHAT}) as client:
            await client.call_tool("exec", {"command": "echo"})
    assert [str(chat) for chat in web.computers.chats] == ["local/work", "bob/work"]


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
async def test_without_tokens_other_machines_are_never_listened_to(address: str) -> None:
    with pytest.raises(ConfigError, match="--allow-anonymous-loopback would let everybody in"):
        await listen(address, anonymous=True)


@pytest.mark.parametrize(
    "address", ["", ":80", "8080", "localhost", "::1:80", "a:b", "[]:1", "localhost:70000", "a:-1"]
)
async def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        await listen(address)


async def test_an_address_in_use_is_refused(data_root: Path) -> None:
    async with served(data_root) as web:
        with pytest.raises(ConfigError, match="name another port"):
            await listen(f"127.0.0.1:{web.port}")


def head(web: Web, *lines: str) -> bytes:
    """The head of a request whose body is about to come."""
    fixed = [f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{web.port}", "Content-Type: application/json"]
    return "\r\n".join([*fixed, *lines, "", ""]).encode()
