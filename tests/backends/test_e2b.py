"""Sandboxes of E2B, by its own library: what the service fails to do is told in words."""

import json
import os
import urllib.request
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.app.chats import check, open_backend, open_manager
from mcp_sandbox.config import Config, E2BConfig, FleetConfig
from mcp_sandbox.errors import BackendUnavailable, ConfigError, SandboxGone
from mcp_sandbox.models import ChatId, SandboxSpec
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.backends.live import connected, made, spec_for
from tests.conftest import configured
from tests.control.daemon import platform
from tests.e2b_server import serving
from tests.rclone import BUCKET, S3Server
from tests.redis_server import RedisServer
from tests.sessions.sandbox.killed_holding import STEPS, try_kill

CHAT = ChatId("tester", "far")
pytestmark = [pytest.mark.e2b, pytest.mark.s3, pytest.mark.bubblewrap]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as found:
        if not found:
            pytest.skip("the service itself does not fail when it is told to")
        yield found


@pytest.fixture
def config(url: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    return configured("e2b", tmp_path_factory.mktemp("data"))


@pytest.fixture
async def manager(config: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(config) as opened:
        yield opened


@pytest.fixture
async def session(manager: SessionManager) -> Session:
    found = await manager.session(CHAT)
    await found.exec("echo kept > file; echo here > /tmp/here")
    return found


async def fail(
    url: str, status: int = 0, times: int = 0, *, cut: bool = False, late: int = 0
) -> list[str]:
    """Have the next answers fail, or cut all streams; return the requests so far."""

    def ask() -> Any:
        data = json.dumps({"status": status, "times": times, "cut": cut, "late": late}).encode()
        with urllib.request.urlopen(f"{url}/fault", data, timeout=10) as answer:
            return json.load(answer)

    found: list[str] = await to_thread.run_sync(ask)
    return found


@pytest.mark.parametrize(
    ("status", "said"),
    [(429, "too many requests"), (500, "could not list"), (503, "could not list")],
)
async def test_a_service_that_refuses_is_told_and_asked_again_by_the_next_call(
    url: str, manager: SessionManager, status: int, said: str
) -> None:
    session = await manager.session(ChatId("tester", f"refused-{status}"))
    # It is asked three times, with growing pauses.
    await fail(url, status, 3)
    with anyio.fail_after(40), pytest.raises(BackendUnavailable, match=said):
        await session.exec("true")
    await fail(url)
    assert (await session.exec("echo fine")).stdout == "fine\n"


async def test_a_wrong_key_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_fedcba9876543210")
    async with open_backend("e2b", config) as backend:
        with pytest.raises(BackendUnavailable, match=r"correct e2b\.api_key"):
            await backend.probe()


async def test_a_key_that_is_not_there_is_told(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("E2B_API_KEY")
    async with open_backend("e2b", config) as backend:
        with pytest.raises(BackendUnavailable, match="E2B_API_KEY is not set"):
            await backend.probe()


async def test_a_service_that_is_not_there_is_told(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    async with open_backend("e2b", config) as backend:
        with anyio.fail_after(40), pytest.raises(BackendUnavailable, match="could not list"):
            await backend.probe()


async def test_one_that_e2b_has_ended_is_told_and_its_files_come_from_the_backup(
    config: Config, manager: SessionManager, session: Session
) -> None:
    await manager.backups.save(CHAT)
    async with open_backend("e2b", config) as backend:
        (info,) = await backend.running()
        await backend.destroy(info.id)
        with pytest.raises(SandboxGone, match="E2B has ended"):
            await backend.attach(info.id)
    with anyio.fail_after(50):
        while True:
            try:
                assert (await session.exec("cat file")).stdout == "kept\n"
                break
            except SandboxGone:
                continue
    assert any("files are as of" in text for text in await session.take_notices())


async def test_one_whose_time_is_over_was_paused_and_goes_on_where_it_was(
    config: Config, manager: SessionManager, session: Session
) -> None:
    async with open_backend("e2b", config) as backend:
        (info,) = await backend.running()
        await backend._client.pause(info.id)  # type: ignore[attr-defined]
        assert [each.state for each in await backend.running()] == ["paused"]
    with anyio.fail_after(50):
        while True:
            try:
                assert (await session.exec("cat file /tmp/here")).stdout == "kept\nhere\n"
                break
            except SandboxGone:
                continue


async def test_a_stream_that_is_cut_costs_the_call_and_no_file(url: str, session: Session) -> None:
    started = anyio.Event()

    async def note(_name: str, _data: bytes) -> None:
        started.set()

    async def work() -> None:
        with pytest.raises(SandboxGone, match="next call"):
            await session.exec("echo started; sleep 600", on_output=note)

    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            await started.wait()
            await fail(url, cut=True)
        assert (await session.exec("cat file /tmp/here")).stdout == "kept\nhere\n"


async def test_one_that_cannot_be_reached_for_a_moment_is_not_taken_for_gone(
    url: str, config: Config, session: Session
) -> None:
    # Who is told that it is gone ends it, with files that are nowhere else.
    async with open_backend("e2b", config) as backend:
        (info,) = await backend.running()
        await fail(url, late=1)
        with pytest.raises(BackendUnavailable, match="again in a moment"):
            await backend.attach(info.id)
        await backend.attach(info.id)
    assert (await session.exec("cat file")).stdout == "kept\n"


@pytest.mark.parametrize("by", ["a call", "gc"])
async def test_what_a_killed_server_has_left_half_made_is_ended(config: Config, by: str) -> None:
    async with open_backend("e2b", config) as backend, open_manager(config) as manager:
        labels = {"user": CHAT.user, "chat": CHAT.chat}
        noted = {**labels, **backend._own}  # type: ignore[attr-defined]
        await backend._client.create("base", noted, online=False)  # type: ignore[attr-defined]
        (left,) = await backend.running()
        if by == "gc":
            await manager.collect()
        else:
            await (await manager.session(CHAT)).exec("true")
        assert left.id not in [info.id for info in await backend.running()]


async def test_a_pause_keeps_processes(manager: SessionManager, session: Session) -> None:
    with anyio.fail_after(50):
        await session.exec("sleep 86379 &")
        assert await manager.pause(CHAT)
        assert (await session.exec("cat /tmp/here; pgrep -fc 'sleep 86379'")).stdout == "here\n1\n"


async def test_who_has_no_rights_inside_gets_none_and_sees_no_token(session: Session) -> None:
    asked = (
        "id -u; grep -E 'NoNewPrivs|CapBnd' /proc/self/status; ls /run/mcp-sandbox/token; "
        "cat /opt/mcp-sandbox/secret; kill -9 1"
    )
    result = await session.exec(asked)
    assert result.stdout.split() == ["10001", "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]
    assert "token" in result.stderr
    assert "secret: Permission denied" in result.stderr
    assert (await session.exec("echo fine")).stdout == "fine\n"


async def test_its_end_is_put_off_while_it_is_held(
    url: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_sandbox.backends.e2b.client._RENEWALS", 1e9)
    async with open_backend("e2b", config) as backend:
        async with made(backend, SandboxSpec(())) as sandbox, connected(sandbox) as runtime:
            await runtime.exec("true")
            assert f"POST /sandboxes/{sandbox.id}/timeout" in await fail(url)


async def test_a_server_that_is_gone_for_good_costs_no_file_of_its_chats(
    config: Config, tmp_path: Path
) -> None:
    redis, store = RedisServer(), S3Server(tmp_path / "s3" / "buckets")

    def server(name: str) -> Config:
        given = {"redis": redis.url, "name": name, "url": f"http://{name}:1", "lease": 1}
        more = {"storage": store.settings(), "fleet": FleetConfig.model_validate(given)}
        return config.model_copy(update={**more, "data_dir": tmp_path / name})

    with anyio.fail_after(50):
        async with open_manager(server("a"), for_many=True) as manager:
            await (await manager.session(CHAT)).exec("echo kept > file; echo here > /tmp/here")
            store.strike()
        async with open_manager(server("b"), for_many=True) as manager:
            session = await manager.session(CHAT)
            assert (await session.exec("cat file /tmp/here")).stdout == "kept\nhere\n"
            assert [row.state for row in await manager.list()] == ["running"]
            async with open_manager(server("a"), for_many=True) as back:
                await back.collect()
                assert (await session.exec("cat file /tmp/here")).stdout == "kept\nhere\n"
        store.start()
        async with open_manager(server("c"), for_many=True) as manager:
            assert await manager.stop(CHAT)
            async with open_backend("e2b", server("a")) as backend:
                assert not await backend.running()
            assert (await (await manager.session(CHAT)).exec("cat file")).stdout == "kept\n"
    store.close()
    redis.close()


@pytest.mark.parametrize("step", STEPS)
async def test_a_kill_at_any_step_loses_no_write_and_leaves_no_sandbox(
    config: Config, step: int
) -> None:
    await try_kill("e2b", config, step)


async def test_python_starts_again_when_all_processes_were_killed(session: Session) -> None:
    await session.exec("kill -9 -1")
    assert (await session.run_code("print(6 * 7)")).stdout == "42\n"


async def test_it_says_what_holds(session: Session) -> None:
    report = await session.info()
    assert report.backend == "e2b"
    assert "nothing of it was verified" in report.isolation


async def test_it_shows_no_folder_of_the_machine(config: Config) -> None:
    async with open_backend("e2b", config) as backend:
        with pytest.raises(BackendUnavailable, match="cannot show folders"):
            await backend.create(spec_for(config.data_dir))


def test_without_an_object_store_it_does_not_start() -> None:
    with pytest.raises(ConfigError, match=r"set storage\.endpoint"):
        check(Config(backend="e2b", e2b=E2BConfig()))


async def test_a_platform_cannot_end_what_cannot_be_saved_but_by_force(
    url: str, tmp_path: Path
) -> None:
    store = S3Server(tmp_path / "s3" / "buckets")
    keys = {
        "access_key": store.folder.with_name("access"),
        "secret_key": store.folder.with_name("secret"),
    }
    settings = {"endpoint": store.endpoint, "bucket": BUCKET}
    settings |= {name: f"file:{path}" for name, path in keys.items()}
    more = {f"MCP_SANDBOX_STORAGE__{name.upper()}": value for name, value in settings.items()}
    more |= {name: os.environ[name] for name in os.environ if name.startswith("E2B_")}
    async with platform(tmp_path, "e2b", more) as here:
        session = await here.made((await here.prepare("c1"))["id"])
        work, at = {"command": "echo kept > file"}, f"sandbox/{session['id']}"
        assert session["provider"] == "e2b"
        await here.ask("POST", f"{at}/exec", json=work)
        store.close()
        refused = await here.ask("POST", f"{at}/terminate")
        assert (refused.status_code, refused.json()["title"]) == (503, "Unsaved")
        assert (await here.data("GET", f"{at}/status"))["status"] == "paused"
        ended = await here.data("POST", f"{at}/terminate?force=true")
        assert ended["status"] == "terminated"
