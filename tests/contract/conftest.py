"""A chat's computer on every backend, through the door that the tools use."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.conftest import CLUSTER, PLACES, configured
from tests.e2b_server import serving
from tests.holding import holding_files

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
    "test_one_that_ran_out_of_memory_says_so",
    "test_what_user_code_kills_under_a_process_is_never_a_false_success",
    "test_what_user_code_has_stopped_of_ours_goes_on",
    "test_searches_see_skills_only_when_they_ask_for_them",
}
# bubblewrap runs all, docker all but `ONCE`. gVisor is another kernel, slow to start: it runs
# `ON_EVERY_KERNEL` too; unsafe-local is bubblewrap without walls. These two run what is in
# `EVERYWHERE` and the module `test_backend`; all run all with --whole.
# What a sandbox and a call of each kind go through.
EVERYWHERE = {
    # sandboxes and their servers
    "test_files_and_home_outlive_the_sandbox",
    "test_a_sandbox_that_nobody_uses_ends_itself",
    "test_a_dead_runner_is_reported_and_the_next_call_has_the_files",
    "test_a_sandbox_that_nobody_uses_is_removed_and_its_files_stay",
    "test_each_new_chat_gets_a_warm_sandbox_of_its_own",
    "test_one_that_was_killed_says_so",
    "test_what_ended_while_no_server_looked_is_told_once_by_the_next",
    "test_nothing_is_told_of_the_same_sandbox",
    "test_a_pause_that_ends_what_runs_is_told_by_the_next_server",
    # files
    "test_lists_globs_and_searches_find_what_is_there",
    "test_files_come_back_as_they_were",
    "test_a_commit_in_a_new_chat_needs_no_setting",
    # skills
    "test_an_agent_inside_finds_the_skills_in_its_home",
    "test_an_activated_skill_is_there_at_once_and_its_scripts_run",
    # commands, processes and shells
    "test_a_command_answers_with_its_output_and_exit_code",
    "test_a_signal_that_ends_a_command_is_named",
    "test_python_prints_and_exits_as_python_does",
    "test_what_runs_in_the_background_lives_on_and_may_print",
    "test_a_server_inside_is_reached_over_the_sandboxs_own_loopback",
    "test_output_comes_live_to_who_listens",
    "test_a_timeout_kills_the_whole_tree_and_keeps_the_output",
    "test_a_call_answers_when_its_time_is_over_and_the_command_goes_on",
    "test_an_end_that_nobody_waited_for_is_told_once",
    "test_a_process_is_stopped_with_all_that_it_started",
    "test_what_fills_the_workspace_is_stopped_and_the_sandbox_stays",
    # notebooks, terminals and previews
    "test_variables_functions_and_modules_stay",
    "test_a_value_that_is_a_picture_is_shown_as_one",
    "test_a_command_has_a_terminal_of_its_own",
    "test_a_program_is_interrupted_by_its_key",
    "test_a_page_is_seen_from_outside",
    "test_who_does_not_know_the_name_is_not_let_in",
    # doors
    "test_only_what_a_rule_allows_leaves",
    "test_who_connects_is_answered_by_the_handler",
    "test_it_is_told_when_the_sandbox_ends",
}
# What depends on the kernel: signals, process trees, memory, files and mounts.
ON_EVERY_KERNEL = {
    "test_one_that_dies_is_replaced",
    "test_one_that_ran_out_of_memory_says_so",
    "test_the_next_call_wakes_a_paused_sandbox",
    "test_a_secret_goes_to_its_host_and_never_comes_in",
    "test_every_alias_shows_the_same_bytes_and_takes_writes",
    "test_a_warm_sandbox_shows_skills_too",
    "test_python_ends_as_it_ends_anywhere",
    "test_the_largest_tree_gives_way_and_the_result_names_it",
    "test_directory_and_variables_that_are_given_stay",
    "test_a_command_of_a_shell_has_the_descriptors_of_every_command",
    "test_nothing_of_one_command_is_left_for_the_next",
    "test_who_ends_or_stops_the_one_that_waits_harms_no_command",
    "test_what_user_code_kills_under_a_process_is_never_a_false_success",
    "test_what_a_stopped_process_leaves_is_killed_after_its_grace",
    "test_a_cell_that_ignores_the_interrupt_is_killed_with_all_it_started",
    "test_a_command_on_a_terminal_that_runs_too_long_is_killed_with_its_tree",
    "test_a_process_that_a_cell_forks_lives_on_alone",
    "test_a_terminal_controls_its_session",
    "test_bytes_go_both_ways_untouched",
    "test_a_shell_outlives_its_sandbox",
    "test_what_runs_in_the_background_keeps_it",
    "test_a_kill_in_the_middle_of_an_adoption_loses_no_file_and_leaves_nothing",
    "test_two_servers_share_a_sandbox_that_ends_with_the_last_of_them",
    "test_the_shipped_skills_lack_nothing",
    "test_a_fork_bomb_left_in_the_background_makes_room",
    "test_killing_everything_spares_the_tools",
    "test_a_full_tmp_stops_nobody",
    "test_three_hundred_clients_at_once_are_all_answered",
}
# What our own code does alike in every sandbox runs in bubblewrap, and everywhere with --whole.
ONCE = {
    *("test_sessions", "test_pool", "test_lifetimes", "test_operator", "test_room"),
    *("test_processes", "test_shells", "test_terminals", "test_figures", "test_previews"),
    *("test_sharing", "test_warm_chats", "test_notebooks", "test_whole_output", "test_warm_shell"),
    *("test_skills", "test_health", "test_gateways", "test_doors"),
    "test_archives",
}
# What sandboxes that hold their files have not, by the name of a test or of its module: a pool of
# this server, folders of this host, files that outlive them without a backup.
ABOUT_MOUNTS = {
    *("test_pool", "test_warm_chats", "test_projects", "test_aliases"),
    "test_each_new_chat_gets_a_warm_sandbox_of_its_own",
    "test_programs_for_agents_come_first_and_cannot_be_changed",
    "test_programs_come_before_a_path_of_the_operators_own",
    "test_the_lines_of_the_docs_bring_the_agent",
    "test_the_highest_age_waits_for_the_end_of_a_call_and_new_calls_for_the_new_sandbox",
    "test_files_that_nobody_used_go_to_the_trash_unless_their_sandbox_runs",
    "test_a_chat_whose_backend_is_lost_is_told_and_never_loses_its_isolation",
    "test_a_sandbox_of_a_chat_without_files_is_ended_on_request",
    "test_draining_lets_running_calls_finish_and_refuses_new_ones",
    "test_what_nobody_owns_is_removed_when_a_daemon_starts",
    "test_a_chat_that_cannot_be_taken_over_leaves_the_others_to_the_daemon",
    "test_one_that_shows_what_is_not_the_chats_any_more_is_replaced",
    "test_what_died_between_calls_is_told_once_with_its_background",
    "test_what_died_under_a_call_is_named_with_its_background",
    "test_background_work_that_had_ended_is_not_mourned",
    "test_a_sandbox_that_is_killed_is_followed_by_one_with_nothing_or_all",
    "test_a_sandbox_ends_if_what_fills_the_workspace_is_not_found",
}
HOLDING = ("holding", "e2b", "kubernetes", "kubernetes-backups")
# Its node may be another after a pause, and so its clock: the age is that since a server opened it.
ABOUT_AGE = {"test_the_age_of_a_sandbox_is_known_to_whoever_finds_it"}
# E2B pauses what nobody holds, after a time that is not less than a minute; a pod with unsaved
# files waits for a day.
ABOUT_IDLENESS = {
    *("test_a_sandbox_that_nobody_uses_ends_itself", "test_doors_keep_no_sandbox"),
    # Without it a chat is known by its backups alone, which are not listed.
    "test_a_lost_record_costs_nothing_but_the_times_of_use",
}
# gVisor's kernel is a program of the host: these keep every core busy, also while it is removed.
BUSY_UNDER_GVISOR = {
    "test_a_fork_bomb_ends_and_the_next_call_works",
    "test_a_fork_bomb_left_in_the_background_makes_room",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    name = getattr(item, "originalname", "")
    called = getattr(item, "callspec", None)
    place = called.params.get("backend_name", "") if called else ""
    module = item.path.stem
    on_every_kernel = name in EVERYWHERE | ON_EVERY_KERNEL or module == "test_backend"
    runs = {
        "holding": name in EVERYWHERE - ABOUT_MOUNTS or module == "test_backend",
        "e2b": name in EVERYWHERE - ABOUT_MOUNTS - ABOUT_IDLENESS or module == "test_backend",
        "kubernetes": name in EVERYWHERE - ABOUT_MOUNTS or module == "test_backend",
        "kubernetes-backups": name in EVERYWHERE - ABOUT_MOUNTS - ABOUT_IDLENESS
        or module == "test_backend",
        "docker": on_every_kernel or module not in ONCE,
        "docker-runsc": on_every_kernel,
        "unsafe-local": name in EVERYWHERE or module == "test_backend",
    }
    if not runs.get(place, True):
        item.add_marker(pytest.mark.whole)
    if place == "docker-runsc" and name in BUSY_UNDER_GVISOR:
        item.add_marker(pytest.mark.alone)
        item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(
    params=[
        *PLACES,
        pytest.param("holding", marks=(pytest.mark.bubblewrap, pytest.mark.s3)),
        pytest.param("e2b", marks=(pytest.mark.bubblewrap, pytest.mark.s3, pytest.mark.e2b)),
        *(
            pytest.param(name, marks=[getattr(pytest.mark, each) for each in CLUSTER])
            for name in ("kubernetes", "kubernetes-backups")
        ),
    ],
    scope="module",
)
def backend_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every place where a sandbox can live, and those where sandboxes hold the chats' files."""
    name: str = request.param
    with ExitStack() as stack:
        if name == "holding":
            stack.enter_context(holding_files())
        if name == "e2b":
            stack.enter_context(serving())
        if name.startswith("kubernetes"):
            request.getfixturevalue("cluster")
        yield name


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
    """Skip what a place does not promise: see the sets that begin with `ABOUT`."""
    called = getattr(request.node, "callspec", None)
    place = called.params.get("backend_name", "") if called else ""
    not_here = {
        *(ABOUT_ISOLATION if place in ("unsafe-local", "holding") else ()),
        *(ABOUT_IDLENESS if place in ("e2b", "kubernetes-backups") else ()),
        *(ABOUT_AGE if place == "kubernetes" else ()),
        *(ABOUT_MOUNTS if place in HOLDING else ()),
    }
    if {request.node.originalname, request.path.stem} & not_here:
        pytest.skip("its place does not promise this")
