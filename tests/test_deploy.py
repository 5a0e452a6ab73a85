"""What `deploy/` holds is accepted by what it is for, and is as hard as it says."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcp_sandbox.config import load_config

DEPLOY = Path(__file__).parents[1] / "deploy"
UNIT = DEPLOY / "mcp-sandbox.service"
COMPOSE = DEPLOY / "compose.yaml"
ANALYZE = "systemd-analyze"
MOST_EXPOSED = 5.0


def ask(*words: str) -> str:
    done = subprocess.run([ANALYZE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def composed() -> Any:
    return yaml.safe_load(COMPOSE.read_text())


@pytest.mark.systemd
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    # It looks for the program too, which is not installed here.
    text = UNIT.read_text().replace("/opt/mcp-sandbox/bin/mcp-sandbox", "/bin/true")
    (tmp_path / UNIT.name).write_text(text)
    said = ask("verify", str(tmp_path / UNIT.name)).splitlines()
    assert not [line for line in said if UNIT.name in line and "DelegateSubgroup" not in line]


@pytest.mark.systemd
def test_the_units_exposure_is_low() -> None:
    found = re.search(
        r"exposure level for .*: ([\d.]+)", ask("security", "--offline=true", str(UNIT))
    )
    assert found
    assert float(found[1]) <= MOST_EXPOSED


def test_a_stop_of_the_unit_leaves_sandboxes_alone() -> None:
    text = UNIT.read_text()
    for line in ("KillMode=process", "Delegate=yes", "NoNewPrivileges=yes"):
        assert f"\n{line}\n" in text
    # After each of these the kernel gives no sandbox a /proc of its own, or no control group.
    for name in ("ProtectProc", "ProcSubset", "ProtectKernelTunables", "ProtectControlGroups"):
        assert f"\n{name}=" not in text


def test_every_service_is_bounded_and_without_rights() -> None:
    for name, service in composed()["services"].items():
        assert {"mem_limit", "cpus", "pids_limit"} <= service.keys(), name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "privileged" not in service
        assert not str(service["user"]).startswith("0")


def test_the_data_root_is_at_one_path_outside_and_in() -> None:
    server = composed()["services"]["server"]
    root = server["environment"]["MCP_SANDBOX_DATA_DIR"]
    assert f"{root}:{root}" in server["volumes"]


def test_what_it_builds_is_found_from_its_folder() -> None:
    build = composed()["services"]["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    # With another project folder the context would be another, and .env not be found by `exec`.
    assert "--project-directory" not in COMPOSE.read_text()


def test_its_settings_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in composed()["services"]["server"]["environment"].items():
        plain = re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", value)
        monkeypatch.setenv(name, plain.replace("the address of an object store", "http://s3.test"))
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_config().config
    assert (config.backend, config.storage.bucket, config.control.enabled) == (
        "docker",
        "workspace",
        True,
    )


def test_previews_are_told_where_they_are_published() -> None:
    server = composed()["services"]["server"]
    listens = server["environment"]["MCP_SANDBOX_PREVIEWS__LISTEN"].rpartition(":")[2]
    assert f"127.0.0.1:{listens}:{listens}" in server["ports"]
    assert f"-http://localhost:{listens}}}" in server["environment"]["MCP_SANDBOX_PREVIEWS__URL"]
    assert all(each.startswith("127.0.0.1:") for each in server["ports"])


def test_prometheus_reads_what_it_is_to_scrape() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    assert job["metrics_path"] == "/metrics"
