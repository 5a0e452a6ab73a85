"""What tests share: which backends are here, and proof that nothing is left behind."""

import functools
import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import anyio
import pytest
from blockbuster import BlockBuster
from hypothesis import settings

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.config import Config, DockerConfig, KubernetesConfig
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.models import BackendName
from tests import e2b_server, forked, leftovers, rclone, redis_server, steps
from tests.e2e import chromium, npm

if TYPE_CHECKING:
    from tests.kubernetes.cluster import Cluster

REQUIRED = frozenset(os.environ.get("MCP_SANDBOX_REQUIRE", "").split(",")) - {""}
PROGRAMS = {"s3": rclone.PROGRAM, "redis": redis_server.PROGRAM, "systemd": "systemd-analyze"}
LOOKED_FOR = {"chromium": chromium.absent, "e2b": e2b_server.absent}
NEEDS = ("docker", "runsc", "bubblewrap", *LOOKED_FOR, *PROGRAMS, *npm.PACKAGES)

# Their sandboxes are those of unsafe-local unless they name another backend.
WITHOUT_WALLS = (
    *(
        "daemon/",
        "control/",
        "relay/",
        "web/test_tokens.py",
        "server/skills/",
        "server/test_observer.py",
        "server/test_real_sandbox.py",
    ),
    *("skills/test_commands.py", "telemetry/test_spans.py", "app/test_app.py"),
    *("clients/test_first_call.py", "contract/test_store_faults.py", "e2e/stumbles/test_people.py"),
)


IN_A_REAL_CLUSTER = "kubernetes" in REQUIRED and "KUBECONFIG" in os.environ
# What it has, by the names of settings; no other test is to depend on that.
_PREFIX = "MCP_SANDBOX_KUBERNETES__"
GIVEN = {
    name: os.environ.get(f"{_PREFIX}{name.upper()}", "")
    for name in ("namespace", "objects", "image", "seccomp_profile")
}
# The data roots of tests that ask for a cluster.
IN_CLUSTER = set[Path]()
# The pods of the fake cluster are containers of the engine here.
CLUSTER = (*(() if IN_A_REAL_CLUSTER else ("docker",)), "s3", "kubernetes")
# On its node lies the profile of system calls that Docker's sandboxes have.
PROFILE = "mcp-sandbox.json"
# Attacks and agents that run in pods too, one of each kind; with --whole all of them do.
IN_PODS = {
    "test_no_link_leads_out_of_the_sandbox",
    "test_code_runs_without_any_privilege",
    "test_the_kernels_side_doors_are_shut",
    "test_nothing_of_a_skill_can_be_changed",
    "test_a_prompt_puts_the_skill_into_the_sandbox_and_is_active_from_then_on",
    "test_special_files_hold_no_tool_up",
    "test_a_memory_bomb_takes_the_limit_and_no_more",
    "test_what_happens_is_told_in_its_order_and_the_result_comes_last",
    "test_the_tree_is_dead_before_a_cancelled_caller_goes_on",
}
# Attacks that succeed in pods.
GAPS_IN_PODS = {
    "test_only_the_chats_own_places_are_writable": "the runner's socket is its own",
    "test_processes_are_limited": "what a call starts is the node's to limit",
}
# What looks at folders of this host, or at limits by blocks of its disk.
NOT_IN_PODS = {
    "test_the_key_is_nowhere_but_in_the_requests_to_its_service",
    "test_the_host_follows_no_link_that_took_a_directorys_place",
    "test_a_workspace_that_became_a_link_is_refused",
    "test_a_bomb_of_empty_files_is_stopped",
    "test_who_takes_the_port_inside_harms_its_own_chat_until_it_leaves_it",
    "test_one_that_hangs_is_given_up_and_replaced",
    "test_one_of_other_settings_that_hangs_is_replaced",
    # They kill or stop the relay, too; the next call connects again.
    "test_signals_to_the_runner_and_its_workers",
    "test_killing_everything_spares_the_tools",
    "test_killing_everything_again_and_again_is_told_as_it_was",
    "test_who_kills_everything_keeps_the_memory_of_before_and_is_told",
    "test_what_user_code_kills_under_a_process_is_never_a_false_success",
    "test_what_user_code_has_stopped_of_ours_goes_on",
    "test_a_sandbox_that_dies_under_a_run_is_told_and_the_next_has_its_files",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--break-cluster",
        action="store_true",
        help="in a real cluster, too, the tests that delete and change all of its sandboxes",
    )
    parser.addoption(
        "--whole", action="store_true", help="long runs, and every repetition, on every backend"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.removeprefix("tests/").startswith(WITHOUT_WALLS):
        item.add_marker(pytest.mark.bubblewrap)
    called = getattr(item, "callspec", None)
    places = ("backend_name", "data_root")
    if called is None or not {"kubernetes", "kubernetes-backups"}.intersection(
        str(called.params.get(each)) for each in places
    ):
        return
    name, is_contract = getattr(item, "originalname", ""), "tests/contract/" in item.nodeid
    if name in NOT_IN_PODS:
        item.add_marker(pytest.mark.skip("see NOT_IN_PODS"))
    if reason := GAPS_IN_PODS.get(name):
        item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    if not is_contract and name not in IN_PODS:
        item.add_marker(pytest.mark.whole)


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("short", max_examples=40)
    settings.load_profile("default" if config.getoption("--whole") else "short")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    # Eight thousand tests: the collector need not look at them again and again.
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    left_out = [item for item in items if item.get_closest_marker("whole")]
    items[:] = [item for item in items if not item.get_closest_marker("whole")]
    config.hook.pytest_deselected(items=left_out)


def configured(name: str, data_dir: Path) -> Config:
    """Return the configuration of a backend by its name in `backend_name`."""
    backend: BackendName = "docker"
    if name in ("bubblewrap", "unsafe-local"):
        backend = name  # type: ignore[assignment]
    if name in ("holding", "e2b"):
        where: BackendName = "e2b" if name == "e2b" else "unsafe-local"
        store = rclone.shared().settings(prefix=f"at{hashlib.sha256(bytes(data_dir)).hexdigest()}")
        return Config(data_dir=data_dir, backend=where, storage=store)
    if name.startswith("kubernetes"):
        own = GIVEN["seccomp_profile"]
        storage = "backups" if name.endswith("backups") else "volume"
        profile = own if IN_A_REAL_CLUSTER else PROFILE
        return in_cluster(data_dir, seccomp_profile=profile, storage=storage)
    runtime = "runsc" if name == "docker-runsc" else ""
    image = os.environ.get("MCP_SANDBOX_DOCKER__IMAGE", DockerConfig().image)
    docker = DockerConfig(runtime=runtime, image=image)
    return Config(data_dir=data_dir, backend=backend, docker=docker)


def in_cluster(data_dir: Path, **given: object) -> Config:
    """Return the configuration of the cluster that KUBECONFIG names."""
    store = rclone.shared().settings(prefix=f"at{hashlib.sha256(bytes(data_dir)).hexdigest()}")
    image = os.environ.get("MCP_SANDBOX_DOCKER__IMAGE", KubernetesConfig().image)
    named = {"image": GIVEN["image"] or image}
    for name in ("namespace", "objects") if IN_A_REAL_CLUSTER else ():
        if value := GIVEN[name]:
            named[name] = value
    IN_CLUSTER.add(data_dir)
    settings = KubernetesConfig.model_validate({**named, **given})
    return Config(data_dir=data_dir, backend="kubernetes", kubernetes=settings, storage=store)


@functools.cache
def absent(need: str, scratch: Path) -> str | None:
    """Return why a need is not met on this machine, after really trying it."""
    if need in npm.PACKAGES:
        return _absent_program(need, scratch)
    if need in LOOKED_FOR:
        return LOOKED_FOR[need]()
    if need in PROGRAMS:
        return None if shutil.which(PROGRAMS[need]) else f"{need}: there is no {PROGRAMS[need]}"
    config = configured("docker-runsc" if need == "runsc" else need, scratch / f"probe-{need}")
    assert config.backend != "auto"
    try:
        anyio.run(_probe, config.backend, config)
    except OperatorError as exc:
        return f"{need}: {exc}"
    return None


def _absent_program(need: str, cache: Path) -> str | None:
    if need in npm.ON_REQUEST and need not in REQUIRED:
        return f"{need}: a large download; MCP_SANDBOX_REQUIRE={need} installs and runs it"
    try:
        npm.installed(need, cache)
    except npm.NotInstalled as exc:
        return f"{need}: {exc}"
    return None


def npm_folder(config: pytest.Config) -> Path:
    """Return where programs from npm are kept, also for the next run."""
    assert config.cache is not None
    return Path(config.cache.mkdir("npm"))


async def _probe(name: BackendName, config: Config) -> None:
    async with open_backend(name, config) as backend:
        await backend.probe()


def pytest_runtest_setup(item: pytest.Item) -> None:
    factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    for need in NEEDS:
        if item.get_closest_marker(need) is None:
            continue
        in_npm = need in npm.PACKAGES
        reason = absent(need, npm_folder(item.config) if in_npm else factory.getbasetemp())
        if reason is not None and need in REQUIRED:
            pytest.fail(f"required by MCP_SANDBOX_REQUIRE, but {reason}", pytrace=False)
        if reason is not None:
            pytest.skip(reason)


@pytest.fixture(scope="session")
def blocking_calls() -> BlockBuster:
    return BlockBuster("mcp_sandbox")


@pytest.fixture(autouse=True)
def no_blocking_calls(blocking_calls: BlockBuster) -> Iterator[None]:
    """Fail a test in which our async code blocks the event loop."""
    blocking_calls.activate()
    yield
    blocking_calls.deactivate()


@pytest.fixture(scope="session")
def long_steps() -> Callable[[], str]:
    """What there is of long steps since it was asked last, here and in programs that run."""
    own = list[str]()
    steps.watch(own.append)

    def ask() -> str:
        file = forked.long_steps()
        found = "".join(own) + os.pread(file, 1 << 20, 0).decode()
        os.ftruncate(file, 0)
        own.clear()
        return found

    return ask


@pytest.fixture(autouse=True)
def no_long_steps(long_steps: Callable[[], str]) -> Iterator[None]:
    """Fail a test in which an event loop of ours lets all others wait for one step."""
    yield
    if found := long_steps():
        pytest.fail(f"over {steps.LIMIT_S:g} s of processor time:\n{found}", pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def no_settings_of_a_cluster() -> Iterator[None]:
    """Have them in GIVEN alone, which `in_cluster` reads."""
    with mock.patch.dict(os.environ):
        for name in GIVEN:
            os.environ.pop(f"{_PREFIX}{name.upper()}", None)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove and report every container, process and mount that a test left behind."""
    yield
    found = leftovers.remove(tmp_path_factory.getbasetemp())
    if IN_A_REAL_CLUSTER and (roots := [*IN_CLUSTER]):
        from tests.kubernetes.leftovers import remove

        found += remove(in_cluster(roots[0]).kubernetes, roots)
    if found:
        pytest.fail("tests left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Cluster | None"]:
    """A cluster in KUBECONFIG: a fake one, unless a real one is required."""
    if IN_A_REAL_CLUSTER:
        yield None
        return
    from mcp_sandbox.backends.docker.spec import profile
    from tests.kubernetes.cluster import running

    # Before KUBECONFIG is set: its path would mark the server as one that a test left.
    rclone.shared()
    folder = tmp_path_factory.mktemp("cluster")
    (folder / PROFILE).write_text(json.dumps(profile()))
    with running(folder) as cluster:
        yield cluster


@pytest.fixture
def npm_cache(request: pytest.FixtureRequest) -> Path:
    return npm_folder(request.config)


@pytest.fixture
def data_root(tmp_path: Path) -> Path:
    return tmp_path / "data"


PLACES = [
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("docker-runsc", marks=(pytest.mark.docker, pytest.mark.runsc)),
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("unsafe-local", marks=pytest.mark.bubblewrap),
]


@pytest.fixture(params=PLACES, scope="module")
def backend_name(request: pytest.FixtureRequest) -> str:
    """Every place where a sandbox can live; a test with this runs once in each."""
    name: str = request.param
    if name == "kubernetes":
        request.getfixturevalue("cluster")
    return name


@pytest.fixture
def config(backend_name: str, data_root: Path) -> Config:
    """The configuration of that place, with a data root of the test's own."""
    return configured(backend_name, data_root)
