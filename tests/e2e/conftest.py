"""Live sandboxes for attacks: only where code is isolated, and nothing of them may be left."""

import secrets
import shutil
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests import world as worlds
from tests.conftest import REQUIRED, configured
from tests.e2e import doors, traces
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR, KUBERNETES

CHAT = ChatId("mallory", "attack")
# What goes through a door is judged outside, under every kernel alike: of the tests that share a
# daemon in the world these run in gVisor, and all with --whole.
IN_GVISOR = {
    "test_what_a_rule_names_is_reached_and_stays_end_to_end",
    "test_no_route_leads_out_beside_it",
    "test_the_bound_host_gets_it_and_the_sandbox_a_placeholder",
    "test_it_is_nowhere_inside_nor_in_what_we_keep",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    called = getattr(item, "callspec", None)
    in_gvisor = called is not None and called.params.get("served") == "docker-runsc"
    if in_gvisor and getattr(item, "originalname", "") not in IN_GVISOR:
        item.add_marker(pytest.mark.whole)


@pytest.fixture(params=[DOCKER, GVISOR, BUBBLEWRAP, KUBERNETES], scope="module")
def backend_name(request: pytest.FixtureRequest) -> str:
    """Never unsafe-local: what runs here would reach the machine itself."""
    name: str = request.param
    assert name != "unsafe-local"
    if name == "kubernetes":
        request.getfixturevalue("cluster")
    return name


@pytest.fixture
def config(backend_name: str, data_root: Path) -> Config:
    return configured(backend_name, data_root)


@pytest.fixture
async def manager(config: Config) -> AsyncGenerator[SessionManager]:
    """All chats of a data root; what they leave on the machine fails the test."""
    async with managing(config) as opened:
        yield opened


@asynccontextmanager
async def managing(config: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(config) as opened:
        yield opened
        known = traces.of(config.data_dir)
    left = traces.still_there(config.data_dir, known)
    assert not left, left


@pytest.fixture
async def session(manager: SessionManager) -> Session:
    return await manager.session(CHAT)


@pytest.fixture(scope="module")
async def lasting(
    backend_name: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[SessionManager]:
    """Where the tests of a module share a chat, whose sandbox starts once."""
    async with managing(configured(backend_name, tmp_path_factory.mktemp("data"))) as opened:
        yield opened


@pytest.fixture
async def shared(lasting: SessionManager) -> Session:
    """The chat that attacks share which a sandbox survives, with nothing of an earlier one."""
    session = await lasting.session(CHAT)
    await session.exec("find /workspace /home/sandbox /tmp /dev/shm -mindepth 1 -delete")
    return session


@pytest.fixture
def treasure() -> Iterator[Path]:
    """A directory of the host that every user may change, with a secret that no chat may see."""
    folder = Path("/var/tmp") / f"mcs-treasure-{secrets.token_hex(6)}"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "secret").write_text(secrets.token_hex(16))
    (folder / "secret").chmod(0o666)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[worlds.World]:
    """A world of its own; see `tests/world`."""
    reason = worlds.absent()
    if reason is not None and "bubblewrap" in REQUIRED:
        pytest.fail(f"no network namespace: {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(f"no network namespace: {reason}")
    with worlds.opened(tmp_path_factory.mktemp("world")) as opened:
        yield opened


@pytest.fixture(params=[DOCKER, GVISOR, BUBBLEWRAP], scope="module")
async def served(
    request: pytest.FixtureRequest, world: worlds.World, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[doors.Served]:
    """A daemon in the world with a chat that the tests of a module share."""
    where = doors.placed(world, tmp_path_factory.mktemp("doors"), request.param)
    async with doors.served(world, where, request.param) as opened:
        yield opened
