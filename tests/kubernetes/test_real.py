"""The tests that run in a real cluster, for which another fake one stands here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CLUSTER
from tests.kubernetes.cluster import Cluster, running

pytestmark = [getattr(pytest.mark, mark) for mark in CLUSTER]
_LEAVES = """
import pytest
from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.models import SandboxSpec
from tests.conftest import in_cluster

@pytest.mark.kubernetes
@pytest.mark.parametrize("storage", ["volume", "backups"])
async def test_that_leaves_its_sandbox(tmp_path, storage):
    async with open_backend("kubernetes", in_cluster(tmp_path, storage=storage)) as backend:
        await backend.create(SandboxSpec(()))
"""


def run_in(cluster: Cluster, folder: Path, *selected: str) -> tuple[int, str]:
    """Run tests as in a cluster that is there; return the exit code and what is printed."""
    named = {"NAMESPACE": cluster.namespace, "OBJECTS": "pod"}
    settings = {f"MCP_SANDBOX_KUBERNETES__{name}": value for name, value in named.items()}
    own = {"KUBECONFIG": str(cluster.kubeconfig()), "MCP_SANDBOX_REQUIRE": "kubernetes"}
    options = ["-p", "no:cacheprovider", "-p", "no:randomly", f"--basetemp={folder}"]
    command = [sys.executable, "-m", "pytest", *options, "-m", "kubernetes", *selected]
    ended = subprocess.run(
        command, env={**os.environ, **settings, **own}, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.timeout(180)
def test_a_run_in_a_cluster_of_another_namespace_leaves_nothing_there(tmp_path: Path) -> None:
    with running(tmp_path / "cluster") as cluster:
        cluster.namespace = "elsewhere"
        code, printed = run_in(
            *(cluster, tmp_path / "base", "tests/kubernetes/test_set_up.py"),
            *("tests/contract/test_life.py", "-k", "kubernetes and not backups or test_set_up"),
        )
        assert code == 0, printed
        assert "passed" in printed
        assert "a real cluster is not to be broken" in printed
        assert cluster.is_empty()


@pytest.mark.timeout(180)
def test_what_breaks_a_cluster_runs_in_one_that_is_given_for_it(tmp_path: Path) -> None:
    with running(tmp_path / "cluster") as cluster:
        code, printed = run_in(
            *(cluster, tmp_path / "base", "--break-cluster", "tests/kubernetes/test_faults.py"),
            *("-k", "(pods and (deleted_by_hand or deleted_with_its_volume)) or version_4"),
        )
        assert code == 0, printed
        assert "2 passed, 1 skipped" in printed
        assert "only a fake cluster has protocols" in printed
        assert cluster.is_empty()


@pytest.mark.timeout(180)
def test_a_run_that_leaves_pods_fails_and_removes_them(tmp_path: Path) -> None:
    file = tmp_path / "test_left.py"
    file.write_text(_LEAVES)
    with running(tmp_path / "cluster") as cluster:
        own = ("-p", "tests.conftest", "-c", str(Path("pyproject.toml").absolute()))
        code, printed = run_in(cluster, tmp_path / "base", *own, str(file))
        assert "2 passed, 1 error" in printed
        assert "tests left behind:\n  Pod mcs-" in printed.replace("E   ", "")
        assert code == 1
        assert cluster.is_empty()
