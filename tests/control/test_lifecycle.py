"""Sessions that a platform steers, through a real daemon over HTTP."""

import json
import re
from contextlib import AsyncExitStack, aclosing, closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from anyio.abc import SocketStream

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.control.lifecycle import Control
from mcp_sandbox.models import ChatId, TokenScope
from mcp_sandbox.sessions.chat_records import ChatRecords
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.storage.redis import SandboxBoard
from mcp_sandbox.web.tokens import TokenFile
from tests.control.daemon import Platform, platform, serving
from tests.control.test_remote import opened
from tests.rclone import S3Server
from tests.redis_server import RedisServer
from tests.streams import everything
from tests.web.clients import http_client

pytestmark = [pytest.mark.anyio, pytest.mark.bubblewrap]


async def test_a_chat_is_prepared_used_terminated_and_prepared_again(tmp_path: Path) -> None:
    async with platform(tmp_path) as here:
        first = await here.prepare("c1", projectId="p7")
        assert (first["status"], first["providerSandboxId"]) == ("warm", None)
        assert (first["isNewProvision"], first["projectId"]) == (False, "p7")
        ready = await here.made(first["id"])
        assert (ready["status"], ready["provider"]) == ("running", "unsafe-local")
        assert await here.data("GET", "sandbox/by-chat/c1") == ready
        assert ready["sessionId"] == first["sessionId"] == first["id"]
        again = await here.prepare("c1")
        assert again["providerSandboxId"] == ready["providerSandboxId"]
        at = f"sandbox/{first['id']}"
        assert (await here.ask("PUT", f"{at}/files?path=a.txt", content=b"kept")).status_code == 200
        assert (await here.data("GET", f"{at}/health")) == {"status": "running", "healthy": True}
        for _ in range(2):
            assert (await here.data("POST", f"{at}/terminate"))["status"] == "terminated"
        assert (await here.data("GET", f"{at}/status"))["status"] == "terminated"
        for verb, path in (("GET", "files?path=a.txt"), ("POST", "pause"), ("POST", "resume")):
            refused = await here.ask(verb, f"{at}/{path}")
            assert (refused.status_code, refused.json()["title"]) == (404, "NotFound")
        back = await here.prepare("c1")
        assert (back["id"], back["status"], back["isNewProvision"]) == (first["id"], "warm", True)
        await here.made(first["id"])
        assert (await here.ask("GET", f"{at}/files?path=a.txt")).content == b"kept"


async def test_a_hundred_prepares_at_once_make_one_sandbox(tmp_path: Path) -> None:
    async with platform(tmp_path, more={"MCP_SANDBOX_HTTP__REQUESTS_PER_USER": "200"}) as here:
        told: list[object] = []

        async def prepare() -> None:
            found = await here.prepare("c1")
            told.append((found["id"], found["isNewProvision"]))

        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(prepare)
        assert len(set(map(str, told))) == 1
        await here.made((await here.prepare("c1"))["id"])
        assert (await here.data("GET", "stats"))["open"] == 1
        rows = await here.data("GET", "sandbox")
        assert [row["chatSessionId"] for row in rows] == ["c1"]


AFTER = "MCP_SANDBOX_STORAGE__AFTER"
JSON = {"content-type": "application/json"}
BAD: dict[str, list[object]] = {
    "chatSessionId": [
        *({}, {"chatSessionId": "../x"}, {"chatSessionId": 7}, {"chatSessionId": ""}),
        *({"chatSessionId": "x" * 200_000}, {"chatSessionId": "c\n"}, '{"chatSessionId": NaN}'),
    ],
    "projectId": [{"chatSessionId": "c", "projectId": "x" * 200_000}],
    "expertIdentifier": [{"chatSessionId": "c", "expertIdentifier": "x" * 200_000}],
    "more": [{"chatSessionId": "c", "more": 1}],
    "the body": ["", "[]", "NaN", '{"chatSessionId": "c"'],
}


async def test_what_cannot_be_prepared_names_the_field_and_makes_nothing(tmp_path: Path) -> None:
    async with platform(tmp_path, more={"MCP_SANDBOX_HTTP__MAX_BODY": "300k"}) as here:
        for field, bodies in BAD.items():
            for body in bodies:
                text = body if isinstance(body, str) else json.dumps(body)
                answer = await here.ask("POST", "sandbox/prepare", content=text, headers=JSON)
                assert answer.status_code == 400, (body, answer.text)
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["field"] == field, (body, answer.text)
                assert answer.json()["detail"].startswith(f"{field}: ")
                assert len(answer.text) < 500
        large = await here.ask("POST", "sandbox/prepare", content=b" " * 400_000, headers=JSON)
        assert large.status_code == 413
        assert await here.data("GET", "sandbox") == []


HALF = b'{"command": "\\ud800"}'
MULTIPART = {"content-type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("method", "path", "given"),
    [
        ("POST", "sandbox/prepare", {"content": b"\xff{", "headers": JSON}),
        ("POST", "sandbox/prepare", {"content": b"[" * 100_000, "headers": JSON}),
        ("POST", "sandbox/prepare", {"content": b"{}"}),
        ("POST", "sandbox/{}/exec", {"content": HALF, "headers": JSON}),
        ("POST", "sandbox/{}/upload", {"content": b"noise", "headers": MULTIPART}),
        ("POST", "sandbox/{}/upload", {"content": b"noise", "headers": {"content-type": "x"}}),
        ("PUT", "sandbox/{}/files?path=a&append=7", {"content": b"x"}),
        ("PATCH", "sandbox/{}/files?path=a", {}),
        ("GET", "sandbox/", {}),
    ],
)
async def test_whatever_cannot_be_read_is_answered_by_a_problem(
    served: Platform, method: str, path: str, given: dict[str, Any]
) -> None:
    session = (await served.prepare("noise"))["id"]
    answer = await served.ask(method, path.format(session), **given)
    assert answer.status_code in (400, 404, 405, 413), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["status"] == answer.status_code


async def test_an_id_has_96_bits_and_the_short_one_of_earlier_versions_is_taken(
    tmp_path: Path,
) -> None:
    async with platform(tmp_path) as here:
        session = (await here.prepare("c1"))["id"]
        assert re.fullmatch("[0-9a-f]{24}", session)
    async with platform(tmp_path) as here:  # A server that knows it from the record alone.
        for name in (session[:12], session):
            assert (await here.data("GET", f"sandbox/{name}/status"))["id"] == session
        assert (await here.ask("GET", f"sandbox/{session[:13]}/status")).status_code == 404
        other = await here.with_token("bob", "control")
        assert (await other.ask("GET", f"sandbox/{session[:12]}/status")).status_code == 404
        await other.http.aclose()


async def test_sessions_of_others_and_unknown_ones_are_not_there_alike(tmp_path: Path) -> None:
    async with platform(tmp_path) as here:
        session = (await here.prepare("c1"))["id"]
        other = await here.with_token("bob", "control")
        answers = [
            (await other.ask("GET", f"sandbox/{name}/status")) for name in (session, "0" * 12, "x")
        ]
        assert {answer.status_code for answer in answers} == {404}
        assert len({answer.text.replace(session, "0" * 12) for answer in answers[:2]}) == 1
        assert (await other.ask("GET", "sandbox/by-chat/c1")).status_code == 404
        steering = await here.with_token("platform", "platform", **{"Mcp-Sandbox-User": "ada"})
        assert (await steering.data("GET", "sandbox/by-chat/c1"))["id"] == session
        await other.http.aclose()
        await steering.http.aclose()


@pytest.mark.parametrize(
    ("scope", "headers", "status"),
    [
        ("mcp", {}, 403),
        ("control", {}, 200),
        ("control", {"Mcp-Sandbox-User": "bob"}, 200),
        ("control", {"Mcp-Sandbox-User": "ada"}, 403),
        ("platform", {}, 403),
        ("platform", {"Mcp-Sandbox-User": "../x"}, 400),
        ("platform", {"Mcp-Sandbox-User": "ada"}, 200),
    ],
)
async def test_a_token_opens_what_its_scope_says(
    served: Platform, scope: TokenScope, headers: dict[str, str], status: int
) -> None:
    client = await served.with_token("bob", scope, **headers)
    async with client.http:
        answer = await client.ask("GET", "sandbox")
        assert answer.status_code == status, answer.text
        if scope != "mcp":
            at_mcp = await client.http.post(f"{served.url}/mcp", json={})
            assert at_mcp.status_code == 403


async def test_those_whom_a_platform_serves_have_their_limits_each(tmp_path: Path) -> None:
    async with platform(tmp_path, more={"MCP_SANDBOX_HTTP__REQUESTS_PER_USER": "1"}) as here:
        steering = await here.with_token("platform", "platform")
        ada, bob = {"Mcp-Sandbox-User": "ada"}, {"Mcp-Sandbox-User": "bob"}
        async with steering.http as http:
            async with http.stream("GET", f"{here.url}/api/events", headers=ada) as stream:
                lines = stream.aiter_lines()
                assert (await anext(lines)).startswith(":")
                assert (await steering.ask("GET", "stats", headers=ada)).status_code == 429
                assert (await steering.ask("GET", "stats", headers=bob)).status_code == 200


async def test_without_a_token_or_by_another_name_nobody_comes_in(served: Platform) -> None:
    without = await served.ask("GET", "sandbox", headers={"authorization": ""})
    assert (without.status_code, without.json()["status"]) == (401, 401)
    foreign = await served.ask("GET", "sandbox", headers={"host": "evil.example"})
    assert foreign.status_code == 421
    assert (await served.ask("GET", "nothing")).status_code == 404
    assert (await served.ask("DELETE", "sandbox")).status_code == 405


async def test_the_description_of_the_api_is_the_copy_that_is_kept(served: Platform) -> None:
    told = (await served.ask("GET", "openapi.json")).json()
    del told["info"]["version"]
    copy = Path(__file__).with_name("openapi.json")
    # Clients are made from it: who changes the API on purpose writes `told` there, and tells them.
    assert told == json.loads(await to_thread.run_sync(copy.read_text))


async def test_where_nothing_can_pause_the_sandbox_ends_and_resume_makes_another(
    tmp_path: Path,
) -> None:
    async with platform(tmp_path) as here:
        session = (await here.prepare("c1"))["id"]
        first = await here.made(session)
        paused = await here.data("POST", f"sandbox/{session}/pause")
        assert paused == {"status": "warm", "keepsProcesses": False}
        assert (await here.data("POST", f"sandbox/{session}/pause"))["status"] == "warm"
        await here.data("POST", f"sandbox/{session}/resume")
        second = await here.made(session)
        assert second["providerSandboxId"] != first["providerSandboxId"]
        assert second["isNewProvision"]


async def test_a_chat_with_a_call_under_way_is_not_paused(tmp_path: Path) -> None:
    async with platform(tmp_path) as here:
        session = (await here.prepare("c1"))["id"]
        await here.made(session)
        async with anyio.create_task_group() as tasks:
            command = {"command": "sleep 60"}
            run = here.http.stream("POST", f"{here.url}/api/sandbox/{session}/exec", json=command)
            tasks.start_soon(_until_ended, run)
            while (await here.data("GET", "stats"))["busy"] == 0:
                await anyio.sleep(0.01)
            answer = await here.ask("POST", f"sandbox/{session}/pause")
            assert (answer.status_code, answer.json()["title"]) == (409, "Busy")
            tasks.cancel_scope.cancel()


async def _until_ended(run: object) -> None:
    async with run as response:  # type: ignore[attr-defined]
        async for _ in response.aiter_bytes():
            pass


async def test_what_a_revoked_token_began_is_ended(served: Platform) -> None:
    session = (await served.prepare("revoked"))["id"]
    add = partial(TokenFile(served.place.data).add, "ada", scope="control")
    info, secret = await to_thread.run_sync(add)
    command = {"command": "echo begun; sleep 1000"}
    async with http_client(headers={"authorization": f"Bearer {secret}"}, timeout=30) as http:
        path = f"{served.url}/api/sandbox/{session}/exec"
        async with http.stream("POST", path, json=command) as response:
            lines = response.aiter_lines()
            assert "begun" in await anext(lines)
            await to_thread.run_sync(TokenFile(served.place.data).revoke, info.id)
            with anyio.fail_after(10):
                assert [line async for line in lines if "data" in line] == []
    path = f"sandbox/{session}/exec"
    left = await served.ask("POST", path, json={"command": "pgrep -x -f 'sleep 1000'"})
    assert json.loads(left.text.splitlines()[-1])["data"]["exitCode"] == 1


async def test_slow_and_broken_requests_hold_up_no_other(tmp_path: Path) -> None:
    head = "POST /api/sandbox/prepare HTTP/1.1\r\nHost: localhost\r\nAuthorization: {}\r\n"
    slow = head + "Content-Length: 100\r\n\r\n{{"
    noise = head + "Content-Length: 2\r\n\r\n{{}}\0\0 no request\r\n\r\n"
    async with platform(tmp_path, more={"MCP_SANDBOX_HTTP__REQUEST_TIME": "500ms"}) as here:
        port = int(here.url.rpartition(":")[2])
        for text, statuses in ((slow, [b"408"]), (noise, [b"400", b"400"])):
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                await stream.send(text.format(here.http.headers["authorization"]).encode())
                assert (await here.prepare("beside"))["status"]
                with anyio.fail_after(10):
                    answers = await everything(stream)
            assert re.findall(rb"HTTP/1.1 (\d+)", answers) == statuses
        rows = await here.data("GET", "sandbox")
        assert [row["chatSessionId"] for row in rows] == ["beside"]


async def test_what_a_browser_sees_of_a_session_is_told(served: Platform) -> None:
    session = (await served.prepare("site"))["id"]
    command = {"command": "python3 -m http.server 8123", "waitS": 0}
    await served.ask("POST", f"sandbox/{session}/exec", json=command)
    url = await served.data("POST", f"sandbox/{session}/preview", json={"port": 8123})
    told = await served.data("GET", f"sandbox/{session}/status")
    assert told["containerUrl"] == url["containerUrl"]
    assert "Directory listing" in await opened(told["containerUrl"])
    assert len(await served.data("GET", "sandbox?limit=1")) == 1
    assert await served.data("GET", "sandbox?offset=1000") == []
    await served.data("POST", f"sandbox/{session}/terminate")


async def test_changes_are_told_to_who_listens(served: Platform) -> None:
    async with served.http.stream("GET", f"{served.url}/api/events") as stream:
        lines = stream.aiter_lines()
        assert (await anext(lines)).startswith(":")
        session = (await served.prepare("told"))["id"]
        async for line in lines:
            if line.startswith("data: "):
                said = json.loads(line[6:])["data"]
                assert (said["id"], said["status"]) == (session, "running")
                break


async def test_who_reads_events_too_slowly_is_cut_off_and_nobody_else(tmp_path: Path) -> None:
    config = Config.model_validate({"data_dir": tmp_path, "backend": "noop"})
    async with open_manager(config) as manager, anyio.create_task_group() as tasks:

        async def opened() -> SessionManager:
            return manager

        async def allowed(*_: object) -> None:
            """Let everybody in."""

        async def heard(event: bytes) -> None:
            if event.startswith(b":"):
                listening.set()
                await anyio.sleep_forever()

        control = Control(opened, tasks, allowed, nullcontext)
        chat, listening = ChatId("ada", "c1"), anyio.Event()
        await control.make(chat, None, None)
        tasks.start_soon(control.listen, "ada", heard)
        await listening.wait()
        for _ in range(300):
            assert await control.announce(chat)
        tasks.cancel_scope.cancel()


async def test_who_is_refused_gets_no_sandbox(tmp_path: Path) -> None:
    more = {"MCP_SANDBOX_CONTROL__ACCESS_CHECK": "tests.control.access:may_open"}
    async with platform(tmp_path, more=more) as here:
        for given in ({}, {"expertIdentifier": "nobody", "projectId": "open"}):
            body = {"chatSessionId": "c1", **given}
            answer = await here.ask("POST", "marketplace/expert/prepare-invoke", json=body)
            assert (answer.status_code, answer.json()["title"]) == (403, "NotPermitted")
        run = {"messages": [{"role": "user", "content": "x"}], "sandbox_mode": "local"}
        answer = await here.ask("POST", "agent/invoke", json=run)
        assert (answer.status_code, answer.json()["title"]) == (403, "NotPermitted")
        assert await here.data("GET", "sandbox") == []
        await here.prepare("c1", projectId="open")


async def test_noop_has_sessions_and_does_no_work(tmp_path: Path) -> None:
    async with platform(tmp_path, "noop") as here:
        session = await here.prepare("c1")
        assert (session["provider"], session["status"]) == ("noop", "warm")
        answer = await here.ask("GET", f"sandbox/{session['id']}/list")
        assert answer.status_code == 503
        assert "backend: noop" in answer.json()["detail"]
        assert (await here.data("POST", f"sandbox/{session['id']}/terminate")) == {
            "status": "terminated",
            "saved": None,
        }


@pytest.mark.parametrize("after_s", [0, 0.03, 0.1, 0.3])
async def test_a_server_that_is_killed_while_it_makes_one_leaves_one_to_the_next(
    tmp_path: Path, after_s: float
) -> None:
    async with platform(tmp_path) as here:
        session = (await here.prepare("c1", projectId="p"))["id"]
        await anyio.sleep(after_s)
        here.daemon.process.kill()
        await here.daemon.process.wait()
        where = here.place
    async with serving(where) as here:
        known = await here.data("GET", f"sandbox/{session}/status")
        assert (known["chatSessionId"], known["projectId"]) == ("c1", "p")
        assert (await here.prepare("c1"))["id"] == session
        ready = await here.made(session)
        assert (ready["status"], ready["error"]) == ("running", None)
        assert (await here.data("GET", "stats"))["open"] == 1


async def test_a_chat_whose_record_is_locked_holds_up_no_other(tmp_path: Path) -> None:
    async with platform(tmp_path) as here, anyio.create_task_group() as tasks:
        locked = ChatId("ada", "c1")
        async with ChatRecords(here.place.data).hold(locked):
            tasks.start_soon(here.prepare, "c1")
            with anyio.fail_after(10):
                await here.made((await here.prepare("c2"))["id"])


async def test_a_check_that_fails_opens_nothing(tmp_path: Path) -> None:
    more = {"MCP_SANDBOX_CONTROL__ACCESS_CHECK": "tests.control.access:cannot_tell"}
    async with platform(tmp_path, more=more) as here:
        answer = await here.ask("POST", "sandbox/prepare", json={"chatSessionId": "c1"})
        assert (answer.status_code, answer.json()["title"]) == (503, "OperatorError")
        assert await here.data("GET", "sandbox") == []


async def test_an_expert_is_an_assistant_whose_user_has_access(tmp_path: Path) -> None:
    (tmp_path / "experts" / "writer").mkdir(parents=True)
    written = "access: [ada]\nsandbox: {max_memory: 512m}\n"
    (tmp_path / "experts" / "writer" / "assistant.yaml").write_text(written)
    folders = json.dumps([str(tmp_path / "experts")])
    async with platform(tmp_path, more={"MCP_SANDBOX_AGENTS__FOLDERS": folders}) as here:
        given = {"chatSessionId": "c1", "expertIdentifier": "writer"}
        stranger = await here.with_token("bob", "control")
        async with stranger.http:
            refused = await stranger.ask("POST", "sandbox/prepare", json=given)
            assert (refused.status_code, refused.json()["title"]) == (403, "NotPermitted")
            assert await stranger.data("GET", "sandbox") == []
        session = await here.prepare("c1", expertIdentifier="writer")
        assert (await here.made(session["id"]))["status"] == "running"


@pytest.mark.redis
async def test_what_is_published_of_a_sandbox_goes_with_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(closing(RedisServer()))
        bridge = await stack.enter_async_context(aclosing(SandboxBoard(redis.url)))
        more = {"MCP_SANDBOX_FLEET__REDIS": redis.url}
        here = await stack.enter_async_context(platform(tmp_path, more=more))
        session = (await here.prepare("c1"))["id"]
        told = await bridge.wait(session)
        ready = await here.made(session)
        names = ("providerSandboxId", "provider", "containerUrl", "isNewProvision")
        assert told == {name: ready[name] for name in names}
        await here.data("POST", f"sandbox/{session}/terminate")
        assert await bridge.wait(session, within_s=0, tries=1) is None
        assert (await here.prepare("c1"))["isNewProvision"]
        again = await bridge.wait(session)
        assert again
        assert again["isNewProvision"]


@pytest.mark.docker
async def test_a_paused_sandbox_keeps_its_processes(tmp_path: Path) -> None:
    async with platform(tmp_path, "docker") as here:
        session = (await here.prepare("c1"))["id"]
        first = await here.made(session)
        at = f"sandbox/{session}"
        command = {"command": "echo up; sleep 1000", "until": "up"}
        assert (await here.ask("POST", f"{at}/exec", json=command)).status_code == 200
        for _ in range(2):
            paused = await here.data("POST", f"{at}/pause")
            assert paused == {"status": "paused", "keepsProcesses": True}
        assert (await here.data("GET", f"{at}/health"))["healthy"] is None
        for _ in range(2):
            resumed = await here.data("POST", f"{at}/resume")
            assert (resumed["status"], resumed["isNewProvision"]) == ("running", False)
        assert resumed["providerSandboxId"] == first["providerSandboxId"]
        found = await here.ask("POST", f"{at}/exec", json={"command": "pgrep -x sleep"})
        assert json.loads(found.text.splitlines()[-1])["data"]["exitCode"] == 0
        await here.data("POST", f"{at}/terminate")


@pytest.mark.docker
async def test_an_engine_that_goes_away_is_told_and_asked_again(tmp_path: Path) -> None:
    place, is_there = tmp_path / "engine.sock", True
    connections: list[anyio.CancelScope] = []

    async def join(client: SocketStream) -> None:
        async with client, await anyio.connect_unix("/var/run/docker.sock") as engine:
            async with anyio.create_task_group() as tasks:
                connections.append(tasks.cancel_scope)
                tasks.start_soon(copy, client, engine, tasks.cancel_scope)
                tasks.start_soon(copy, engine, client, tasks.cancel_scope)
                if not is_there:
                    tasks.cancel_scope.cancel()

    async def copy(source: SocketStream, target: SocketStream, both: anyio.CancelScope) -> None:
        with suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                await target.send(data)
        both.cancel()

    more = {"MCP_SANDBOX_DOCKER__HOST": f"unix://{place}"}
    async with await anyio.create_unix_listener(place) as listener:
        async with anyio.create_task_group() as engine:
            engine.start_soon(listener.serve, join)
            async with platform(tmp_path, "docker", more) as here:
                await here.made((await here.prepare("c1"))["id"])
                is_there = False
                for each in connections:
                    each.cancel()
                session = (await here.prepare("c2"))["id"]
                answer = await here.ask("POST", f"sandbox/{session}/terminate")
                assert (answer.status_code, answer.json()["title"]) == (503, "Unreachable")
                is_there = True
                for chat in ("c2", "c1"):
                    ready = await here.made((await here.prepare(chat))["id"])
                    assert (ready["status"], ready["error"]) == ("running", None)
                    await here.data("POST", f"sandbox/{ready['id']}/terminate")
            engine.cancel_scope.cancel()


@pytest.mark.docker
async def test_a_sandbox_that_cannot_be_made_is_told_and_the_server_goes_on(
    tmp_path: Path,
) -> None:
    more = {"MCP_SANDBOX_DOCKER__IMAGE": "mcp-sandbox/none:none"}
    async with platform(tmp_path, "docker", more) as here:
        session = (await here.prepare("c1"))["id"]
        failed = await here.made(session)
        assert failed["status"] == "warm"
        assert "mcp-sandbox/none:none" in failed["error"]
        again = await here.prepare("c1")
        assert (again["id"], again["isNewProvision"]) == (session, False)


@pytest.mark.s3
async def test_what_cannot_be_saved_at_the_end_is_told_and_saved_later(tmp_path: Path) -> None:
    with closing(S3Server(tmp_path / "buckets")) as store:
        async with platform(tmp_path, more={**store.variables(), AFTER: "200ms"}) as here:
            session = (await here.prepare("c1"))["id"]
            at = f"sandbox/{session}"
            await here.ask("PUT", f"{at}/files?path=a.txt", content=b"kept")
            store.strike()
            unsaved = {"status": "terminated", "saved": False}
            assert await here.data("POST", f"{at}/terminate") == unsaved
            store.start()
            while not (await here.data("POST", f"{at}/terminate"))["saved"]:
                await anyio.sleep(0.05)
        async with platform(tmp_path / "other", more=store.variables()) as there:
            again = await there.prepare("c1")
            assert (again["id"], again["isNewProvision"]) == (session, False)
            assert (await there.ask("GET", f"{at}/files?path=a.txt")).content == b"kept"
            assert (await there.made(session))["isNewProvision"]


@pytest.mark.s3
@pytest.mark.parametrize(
    "server",
    [
        {"command": "python3 -m http.server 8000", "waitS": 0},
        {"command": "while date >> log; do sleep 0.02; done", "waitS": 0},
        {"command": "cat", "tty": True, "waitS": 0.2},
    ],
)
async def test_what_a_running_server_wrote_last_is_saved_soon_after_the_end(
    tmp_path: Path, server: dict[str, Any]
) -> None:
    with closing(S3Server(tmp_path / "buckets")) as store:
        async with platform(tmp_path, more={**store.variables(), AFTER: "200ms"}) as here:
            at = f"sandbox/{(await here.prepare('c1'))['id']}"
            await here.ask("POST", f"{at}/exec", json=server)
            await here.data("POST", f"{at}/terminate")
            with anyio.fail_after(30):
                while (await here.data("GET", "stats"))["unsaved"]:
                    await anyio.sleep(0.05)
            assert (await here.data("POST", f"{at}/terminate"))["saved"]


@pytest.mark.s3
async def test_files_are_saved_shared_and_restored(tmp_path: Path) -> None:
    with closing(S3Server(tmp_path / "buckets")) as store:
        async with platform(tmp_path, more=store.variables()) as here:
            session = (await here.prepare("c1"))["id"]
            await here.made(session)
            at = f"sandbox/{session}"
            await here.ask("PUT", f"{at}/files?path=a.txt", content=b"first")
            shared = await here.data("POST", f"{at}/share", json={"path": "a.txt"})
            assert (await here.http.get(shared["url"], headers={"authorization": ""})).text == (
                "first"
            )
            saved = await here.data("POST", f"{at}/sync")
            await here.ask("PUT", f"{at}/files?path=a.txt", content=b"second")
            restored = await here.data("POST", f"{at}/restore", json={"key": saved["key"]})
            assert restored == saved
            assert (await here.data("GET", f"{at}/status"))["filesAsOf"] == saved["savedAt"]
            assert (await here.ask("GET", f"{at}/files?path=a.txt")).content == b"first"
