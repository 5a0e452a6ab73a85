from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from mcp_sandbox import open_session
from mcp_sandbox.app.chats import LazyManager, choose_backend, open_manager
from mcp_sandbox.config import Config, DockerConfig, WorkspaceConfig
from mcp_sandbox.errors import ConfigError, InvalidArgument, OperatorError
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from tests.e2e.attacks import on_gvisor_if_whole


def no_engine(folder: Path) -> DockerConfig:
    return DockerConfig(host=f"unix://{folder}/absent.sock")


@pytest.mark.docker
async def test_auto_is_docker_where_an_engine_has_the_image(data_root: Path) -> None:
    with anyio.fail_after(50):
        async with choose_backend(Config(data_dir=data_root)) as (backend, why):
            assert backend.name == "docker"
            assert "mcp-sandbox/base:latest" in why


@pytest.mark.bubblewrap
async def test_auto_is_bubblewrap_where_no_engine_answers(data_root: Path) -> None:
    config = Config(data_dir=data_root, docker=no_engine(data_root))
    with anyio.fail_after(50):
        async with choose_backend(config) as (backend, why):
            assert backend.name == "bubblewrap"
            assert "docker cannot be used" in why
            assert "absent.sock" in why


async def test_auto_fails_rather_than_run_code_without_isolation(tmp_path: Path) -> None:
    # bubblewrap cannot work on a data root that is no directory; a plain process could.
    (tmp_path / "file").touch()
    config = Config(data_dir=tmp_path / "file/data", docker=no_engine(tmp_path))
    with anyio.fail_after(50), pytest.raises(OperatorError):
        async with choose_backend(config):
            pytest.fail("a backend was chosen")


async def test_named_backend_is_taken_without_asking(data_root: Path) -> None:
    config = Config(data_dir=data_root, backend="docker", docker=no_engine(data_root))
    async with choose_backend(config) as (backend, _):
        assert backend.name == "docker"


@on_gvisor_if_whole
async def test_chat_finds_its_files_in_the_next_session(config: Config) -> None:
    with anyio.fail_after(50):
        async with open_session("demo", config=config) as session:
            assert (await session.exec("echo kept > note.txt")).success
        async with open_session("demo", config=config) as session:
            assert (await session.exec("cat note.txt")).stdout == "kept\n"


async def test_unusable_chat_is_refused_before_anything_is_made(data_root: Path) -> None:
    with pytest.raises(InvalidArgument, match="not usable"):
        async with open_session("../demo", config=Config(data_dir=data_root)):
            pytest.fail("a session was opened")
    assert not await anyio.Path(data_root).exists()


async def test_unusable_alias_is_refused_at_the_start(data_root: Path) -> None:
    workspace = WorkspaceConfig(aliases=("/etc",))
    config = Config(data_dir=data_root, backend="unsafe-local", workspace=workspace)
    with pytest.raises(ConfigError, match="/etc"):
        async with open_manager(config):
            pytest.fail("a manager was opened")


async def test_failed_opening_is_tried_again_at_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    workspace = WorkspaceConfig(aliases=("/etc",))
    config = Config(data_dir=folder, backend="unsafe-local", workspace=workspace)
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            manager = LazyManager(tasks, partial(open_manager, config))
            for _ in range(2):
                with pytest.raises(ConfigError, match="/etc"):
                    await manager.session(ChatId("local", "demo"))
            tasks.cancel_scope.cancel()


async def test_manager_opens_once_for_calls_at_the_same_time(data_root: Path) -> None:
    config = Config(data_dir=data_root, backend="unsafe-local")
    chats = set[str]()
    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            manager = LazyManager(tasks, partial(open_manager, config))

            async def call(number: int) -> None:
                session = await manager.session(ChatId("local", f"chat-{number}"))
                chats.add((await session.run_code(f"print({number})")).stdout)

            async with anyio.create_task_group() as calls:
                for number in range(4):
                    calls.start_soon(call, number)
            tasks.cancel_scope.cancel()
    assert chats == {"0\n", "1\n", "2\n", "3\n"}


async def test_a_manager_that_is_cancelled_as_it_opens_is_left_again(data_root: Path) -> None:
    config = Config(data_dir=data_root, backend="unsafe-local")
    with anyio.fail_after(20):
        async with open_manager(config) as opened:
            with anyio.CancelScope() as cancelled:
                cancelled.cancel()
                rooms = replace(opened._context, pool=None)
                async with SessionManager(rooms, opened._skills, opened._judge):
                    await anyio.sleep_forever()
    assert cancelled.cancelled_caught
