"""A chat's computer on every backend, through the door that the tools use."""

from collections.abc import AsyncGenerator

import pytest

from mcp_sandbox.app import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.conftest import configured

CHAT = ChatId("tester", "contract")
# Tests of what only a walled sandbox has: files of its own in /tmp, with a size and counted as
# memory; no network; nothing of the host: not its /etc, not its processes.
ABOUT_ISOLATION = {
    "test_a_commit_in_a_new_chat_needs_no_setting",
    "test_a_full_tmp_stops_nobody",
    "test_chats_do_not_see_each_other",
    "test_a_repository_of_another_user_is_trusted",
    "test_nearer_settings_come_before_the_sandboxs_own",
    "test_no_code_reaches_a_bash_that_waits",
    "test_hosts_are_out_of_reach_where_there_is_no_network",
    "test_one_that_ran_out_of_memory_says_so",
    "test_what_user_code_kills_under_a_process_is_never_a_false_success",
    "test_searches_see_skills_only_when_they_ask_for_them",
}
# Tests of what servers do with a chat, which is the same under every runtime of one engine, and in
# bubblewrap without walls: gVisor and unsafe-local have those of `EVERYWHERE`, all with --whole.
ABOUT_SERVERS = {
    *("test_sessions", "test_lifetimes", "test_sharing", "test_warm_chats", "test_pool"),
    *("test_retiring", "test_operator", "test_preflight", "test_skills"),
}
EVERYWHERE = {
    "test_files_and_home_outlive_the_sandbox",
    "test_a_sandbox_that_nobody_uses_ends_itself",
    "test_a_dead_runner_is_reported_and_the_next_call_has_the_files",
    "test_a_sandbox_that_nobody_uses_is_removed_and_its_files_stay",
    "test_two_servers_share_a_sandbox_that_ends_with_the_last_of_them",
    "test_each_new_chat_gets_a_warm_sandbox_of_its_own",
    "test_one_that_dies_is_replaced",
    "test_what_runs_in_the_background_keeps_it",
    "test_the_shipped_skills_lack_nothing",
    "test_an_agent_inside_finds_the_skills_in_its_home",
    "test_an_activated_skill_is_there_at_once_and_its_scripts_run",
    "test_a_warm_sandbox_shows_skills_too",
}
# gVisor's kernel is a program of the host: these keep every core busy, also while it is removed.
BUSY_UNDER_GVISOR = {
    "test_a_fork_bomb_ends_and_the_next_call_works",
    "test_a_fork_bomb_left_in_the_background_makes_room",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    name = getattr(item, "originalname", "")
    on_gvisor = item.get_closest_marker("runsc") is not None
    is_the_same = item.path.stem in ABOUT_SERVERS and name not in EVERYWHERE
    if is_the_same and (on_gvisor or "unsafe-local" in item.name):
        item.add_marker(pytest.mark.whole)
    if on_gvisor and name in BUSY_UNDER_GVISOR:
        item.add_marker(pytest.mark.alone)
        item.add_marker(pytest.mark.timeout(240))


@pytest.fixture
async def manager(config: Config) -> AsyncGenerator[SessionManager]:
    async with open_manager(config) as opened:
        yield opened


@pytest.fixture
async def session(manager: SessionManager) -> Session:
    return await manager.session(CHAT)


@pytest.fixture(scope="module")
async def lasting(
    backend_name: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[SessionManager]:
    """Where the tests of a module share a chat whose sandbox starts once."""
    async with open_manager(configured(backend_name, tmp_path_factory.mktemp("data"))) as opened:
        yield opened


@pytest.fixture
async def emptied(lasting: SessionManager) -> Session:
    """The shared chat, with nothing of an earlier test in its own places."""
    session = await lasting.session(CHAT)
    await session.exec("find /workspace /home/sandbox -mindepth 1 -delete")
    return session


@pytest.fixture(autouse=True)
def with_walls(request: pytest.FixtureRequest) -> None:
    """Skip what unsafe-local does not promise: see `ABOUT_ISOLATION`."""
    name = request.node.originalname
    if name in ABOUT_ISOLATION and request.getfixturevalue("backend_name") == "unsafe-local":
        pytest.skip("it is about isolation")
