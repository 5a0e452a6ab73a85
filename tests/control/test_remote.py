"""RemoteSandbox: how a runtime connects, works, and lets go."""

from pathlib import Path

import anyio
import pytest

from mcp_sandbox import RemoteSandbox
from mcp_sandbox.config import Config
from mcp_sandbox.errors import (
    BackendUnavailable,
    InvalidArgument,
    NotFound,
    SandboxGone,
    Unsupported,
)
from tests.control.working import working
from tests.web.clients import http_client

_WARM = {"id": "work", "status": "warm", "providerSandboxId": None, "provider": "unsafe-local"}


def local(data: Path) -> Config:
    given = {"data_dir": data, "backend": "unsafe-local", "policy": {"profile": "off"}}
    return Config.model_validate(given)


async def opened(url: str) -> str:
    """What a browser would see at the address of a preview."""
    host = url.removeprefix("http://")
    port = host.rpartition(":")[2]
    async with http_client() as http:
        return (await http.get(f"http://127.0.0.1:{port}", headers={"host": host})).text


async def used(sandbox: RemoteSandbox) -> None:
    """Call all that a runtime calls."""
    seen = list[tuple[str, bytes]]()

    async def show(stream: str, data: bytes) -> None:
        seen.append((stream, data))

    result = await sandbox.run_command(
        "echo $A; echo no >&2; exit 3", env={"A": "x"}, on_output=show
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("x\n", "no\n", 3)
    assert sorted(seen) == [("stderr", b"no\n"), ("stdout", b"x\n")]
    assert (await sandbox.write_file("d/f", b"\xff one")).created
    assert (await sandbox.edit_file("d/f", "one", "two")).replacements == 1
    assert await sandbox.read_file("d/f") == b"\xff two"
    await sandbox.upload_user_files({"a.txt": "1", "b.txt": b"2"})
    listed = await sandbox.list_files("uploads")
    assert [each.path for each in listed.entries] == ["uploads/a.txt", "uploads/b.txt"]
    with pytest.raises(NotFound, match="no such file"):
        await sandbox.read_file("none")
    assert await sandbox.run_command(["printf", "%s", "a b"], timeout_s=10)


async def test_a_runtime_works_by_http_as_in_its_own_process(tmp_path: Path) -> None:
    async with working(tmp_path / "served") as api:
        await api.exec("true")
        async with RemoteSandbox(api.url) as sandbox:
            await sandbox.wait_and_connect(_WARM)
            await used(sandbox)
    async with RemoteSandbox(mode="local", config=local(tmp_path / "own")) as sandbox:
        await sandbox.wait_and_connect({"id": "work"})
        await used(sandbox)


async def test_connecting_makes_nothing_and_raises_for_what_is_not_there(tmp_path: Path) -> None:
    async with working(tmp_path) as api, RemoteSandbox(api.url) as sandbox:
        with pytest.raises(InvalidArgument, match="not connected"):
            await sandbox.run_command("true")
        with pytest.raises(NotFound, match="has no sandbox"):
            await sandbox.connect_to("work", "unsafe-local")
        with pytest.raises(InvalidArgument, match="unsafe-local, not e2b"):
            await sandbox.connect_to("work", "e2b")
        with pytest.raises(InvalidArgument, match="not connected"):
            await sandbox.run_command("true")
        assert [each.sandbox_id for each in await api.manager.list()] in ([], [None])


async def test_a_sandbox_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    async with working(tmp_path) as api, RemoteSandbox(api.url) as sandbox:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sandbox.wait_and_connect, _WARM)
            await anyio.sleep(0.2)
            tasks.start_soon(api.exec, "echo made > note")
        assert await sandbox.read_file("note") == b"made\n"


@pytest.mark.slow
async def test_a_sandbox_that_does_not_come_is_given_up_after_five_seconds(tmp_path: Path) -> None:
    async with working(tmp_path) as api, RemoteSandbox(api.url) as sandbox:
        began_s = anyio.current_time()
        with pytest.raises(NotFound, match="is warm and has no sandbox"):
            await sandbox.wait_and_connect(_WARM)
        assert 4.5 < anyio.current_time() - began_s < 8


async def test_who_disconnects_leaves_all_running(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        await api.exec("true")
        async with RemoteSandbox(api.url) as sandbox:
            await sandbox.wait_and_connect(_WARM)
            begun = await sandbox.run_command("echo $$ up; exec sleep 1000", until="up")
            alive = f"kill -0 {begun.stdout.split()[0]}"
            await sandbox.disconnect()
            with pytest.raises(InvalidArgument, match="not connected"):
                await sandbox.run_command("true")
            await sandbox.connect_to("work", "unsafe-local")
            assert begun.process
            assert (await sandbox.run_command(alive)).exit_code == 0
        assert await api.stdout(f"{alive} && echo yes") == "yes\n"


async def test_a_run_without_a_sandbox_says_so_at_each_call() -> None:
    async with RemoteSandbox(mode="none") as sandbox:
        await sandbox.wait_and_connect({"id": "work"})
        with pytest.raises(Unsupported, match="no sandbox"):
            await sandbox.run_command("true")
        with pytest.raises(Unsupported, match="no sandbox"):
            await sandbox.upload_user_files({"a": "1"})


async def test_a_website_is_started_and_restarted_behind_one_address(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        await api.exec("echo first > index.html")
        async with RemoteSandbox(api.url) as sandbox:
            await sandbox.wait_and_connect(_WARM)
            with pytest.raises(InvalidArgument, match="bootstrap_website"):
                await sandbox.restart_dev_server()
            serve = "exec python3 -um http.server 18765"
            url = await sandbox.bootstrap_website(serve, 18765)
            assert await opened(url) == "first\n"
            await sandbox.write_file("index.html", "second\n")
            assert await sandbox.restart_dev_server() == url
            assert await opened(url) == "second\n"


async def test_a_control_plane_that_is_not_there_is_named() -> None:
    async with RemoteSandbox("http://127.0.0.1:9") as sandbox:
        with pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1:9 does not answer"):
            await sandbox.connect_to("work", "docker")


async def test_a_result_that_never_came_is_no_result(tmp_path: Path) -> None:
    async with working(tmp_path) as api, RemoteSandbox(api.url) as sandbox:
        await api.exec("true")
        await sandbox.wait_and_connect(_WARM)

        async def end(_: str, __: bytes) -> None:
            for status in await api.manager.list():
                await api.manager.stop(status.chat)

        with pytest.raises(SandboxGone):
            await sandbox.run_command("echo begun; sleep 1000", on_output=end)
        assert (await sandbox.run_command("echo again")).stdout == "again\n"
