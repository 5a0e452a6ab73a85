"""A fake cluster whose state a test may change; each test gets it as it was made."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import anyio
import pytest
import yaml

from mcp_sandbox.backends.kubernetes.watch import Row
from mcp_sandbox.cli.setup import manifests
from mcp_sandbox.config import Config
from tests.conftest import CLUSTER, in_cluster
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.real import reached

# What is slow and the same for both kinds of objects: with pods only if --whole asks for it.
ONE_KIND = {
    "test_a_cluster_whose_clock_is_wrong_changes_nothing",
    "test_a_pod_in_which_nothing_answers_is_ended_and_its_files_stay",
    "test_a_server_lost_while_a_pod_begins_again_costs_no_file",
    "test_a_storm_of_429_is_waited_out_and_makes_nothing_twice",
    "test_a_person_who_deletes_a_pod_on_such_a_node_does_not_end_what_may_go_on",
    "test_a_pod_that_ends_on_a_node_that_is_away_is_waited_for_until_it_is_gone",
    "test_code_that_shuts_the_server_out_does_not_lose_its_files_by_that",
    "test_where_files_are_in_the_pod_alone_a_node_may_be_away_for_ten_minutes",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in CLUSTER:
        item.add_marker(getattr(pytest.mark, mark))
    called = getattr(item, "callspec", None)
    of_pods = called is not None and called.params.get("kind") == "pods"
    if of_pods and getattr(item, "originalname", "") in ONE_KIND:
        item.add_marker(pytest.mark.whole)


@pytest.fixture
def fake(
    cluster: Cluster | None, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Cluster]:
    if cluster is None and not request.config.getoption("--break-cluster"):
        pytest.skip("a real cluster is not to be broken, unless by --break-cluster")
    with nullcontext(cluster) if cluster else reached(in_cluster(tmp_path).kubernetes) as there:
        there.reset()
        # One that is there has what can be done to any.
        yield cast("Cluster", there)
        there.reset()


@pytest.fixture(params=["pods", "sandboxes"])
def kind(request: pytest.FixtureRequest, fake: Cluster) -> str:
    """Both kinds of objects."""
    fake.has_sandboxes = ["v1beta1"] if request.param == "sandboxes" else []
    kind: str = request.param
    return kind


SetUp = Callable[..., Awaitable[list[str]]]


@pytest.fixture
def set_up(fake: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> SetUp:
    """Apply what is printed of the pool; return the pods that are warm."""
    fake.has_sandboxes = ["v1beta1"]

    def apply(config: Config, warm: int) -> None:
        file, settings = tmp_path / "config.yaml", config.kubernetes.model_dump(mode="json")
        given = {"backend": "kubernetes", "kubernetes": settings, "network": config.network}
        file.write_text(yaml.safe_dump(given))
        manifests(warm=warm, config=file)
        for each in yaml.safe_load_all(capsys.readouterr().out):
            if each["kind"] in ("SandboxTemplate", "SandboxWarmPool"):
                plural = f"{each['kind'].lower()}s"
                if (name := each["metadata"]["name"]) in fake.names(plural):
                    fake.change(plural, name, each)
                else:
                    fake.do(fake.store.add, plural, each)

    async def set_up(config: Config, warm: int = 0) -> list[str]:
        await anyio.to_thread.run_sync(apply, config, warm)
        pods, templates = (fake.store.objects[each] for each in ("pods", "sandboxtemplates"))
        made = templates[config.kubernetes.warm_pool]["spec"]["podTemplate"]["metadata"]

        def waiting() -> list[str]:
            return [
                name
                for name, pod in pods.items()
                if Row.of(pod).runs and pod["metadata"].get("annotations") == made["annotations"]
            ]

        await fake.until(lambda: len(waiting()) >= warm)
        return waiting()

    return set_up
