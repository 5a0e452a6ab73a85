import subprocess
from pathlib import Path

import docker
import pytest

from tests import leftovers


def test_clean_folder_has_no_leftovers(tmp_path: Path) -> None:
    assert leftovers.remove(tmp_path, grace_s=0) == []


def test_process_that_works_on_test_data_is_found_and_killed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    with subprocess.Popen(["sleep", "60"], cwd=folder) as process:
        (found,) = leftovers.remove(tmp_path, grace_s=0)
        assert found == f"process {process.pid} sleep 60 "
        assert process.wait(timeout=10) == -9


def test_process_in_a_folder_whose_name_only_ends_alike_is_left_alone(tmp_path: Path) -> None:
    base, other = (tmp_path / name / "worker" for name in ("run", "other-run"))
    for folder in (base, other):
        folder.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"], cwd=other) as process:
        assert leftovers.remove(base, grace_s=0) == []
        assert process.poll() is None
        process.kill()


@pytest.mark.docker
def test_container_that_mounts_test_data_is_found_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    engine = docker.from_env()
    container = engine.containers.run(
        "mcp-sandbox/base:latest",
        entrypoint=["sleep", "60"],
        labels={"app": "mcp-sandbox"},
        volumes=[f"{folder}:/workspace"],
        network_mode="none",
        detach=True,
    )
    found = leftovers.remove(tmp_path, grace_s=0)
    left = engine.containers.list(all=True, filters={"id": str(container.id)})
    engine.close()
    assert any(line.startswith(f"container {container.name} ") for line in found)
    assert left == []
