import io
import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console

from mcp_sandbox.config import Config, DockerConfig, SkillsConfig, WorkspaceConfig
from mcp_sandbox.config.sections import SandboxConfig
from mcp_sandbox.doctor.machine import (
    Check,
    Report,
    examine,
    examine_engine,
    examine_machine,
    examine_network,
    examine_place,
    examine_skills,
    find_vulnerabilities,
    remedy,
    render,
)
from mcp_sandbox.durable import set_aside
from tests.server.skills.taught import write_skill


@pytest.mark.parametrize(
    ("program", "version", "names"),
    [
        ("runc", "1.1.5+ds1-1+deb12u1", ["CVE-2024-21626", "CVE-2025-31133"]),
        ("runc", "1.1.15", ["CVE-2025-31133"]),
        ("runc", "1.2.7", ["CVE-2025-31133"]),
        ("runc", "1.2.8", []),
        ("runc", "1.3.2", ["CVE-2025-31133"]),
        ("runc", "v1.3.3", []),
        ("runc", "2.0.0", []),
        ("containerd", "1.6.20~ds1", ["CVE-2024-40635"]),
        ("containerd", "v2.1.1", []),
        ("docker", "20.10.24+dfsg1", ["CVE-2024-24557", "CVE-2025-54410"]),
        ("docker", "27.5.1", ["CVE-2025-54410"]),
        ("docker", "28.2.2", []),
        ("docker", "dev", []),
    ],
)
def test_known_holes_of_a_version(program: str, version: str, names: list[str]) -> None:
    assert [hole.names.split(",")[0] for hole in find_vulnerabilities(program, version)] == names


def test_distribution_build_is_not_called_vulnerable_for_sure() -> None:
    text = "1.1.5+ds1-1+deb12u1"
    assert "security tracker" in remedy("runc", text, find_vulnerabilities("runc", text))
    assert "security tracker" not in remedy("runc", "1.1.5", find_vulnerabilities("runc", "1.1.5"))
    assert "1.3.3 or 1.4.0 or newer" in remedy(
        "runc", "1.1.5", find_vulnerabilities("runc", "1.1.5")
    )


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    checks = examine_machine(Config(data_dir=tmp_path / "not/there/yet"))
    assert [check.name for check in checks if check.status == "fail"] == []
    assert [check for check in checks if check.status == "warn" and not check.remedy] == []


def test_a_damaged_state_file_is_told_with_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "sandbox" / "records" / "ann"
    folder.mkdir(parents=True)
    for _ in range(2):
        (folder / "chat-one.json").write_bytes(b"garbage")
        set_aside(folder / "chat-one.json", "it is garbage")
    checks = examine_machine(Config(data_dir=tmp_path))
    (check,) = (check for check in checks if check.name == "state files")
    assert check.status == "warn"
    assert check.found.startswith(f"2 damaged and set aside, at last {folder}/chat-one.json.dam")
    assert "delete them" in check.remedy


def test_an_account_whose_id_a_sandbox_may_have_is_told(tmp_path: Path) -> None:
    account = next(each for each in pwd.getpwall() if each.pw_uid > 1)
    near = f"{account.pw_uid - 1}-{account.pw_uid + 1}"
    for uids, status in ((near, "warn"), ("1073741824-1073741833", "ok"), ("", "ok")):
        config = Config(data_dir=tmp_path, sandbox=SandboxConfig(uid_range=uids))
        (check,) = (check for check in examine_machine(config) if check.name == "sandbox users")
        assert check.status == (status if os.geteuid() == 0 else "ok")
        if check.status == "warn":
            assert re.search(rf"\b{account.pw_name}\b.* can look into sandboxes", check.found)
            assert "sandbox.uid_range" in check.remedy


def test_full_disk_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path, workspace=WorkspaceConfig(min_free=1 << 60))
    (disk,) = (check for check in examine_machine(config) if check.name == "data directory")
    assert disk.status == "fail"
    assert "min_free" in disk.remedy


def test_table_shows_the_remedy_below_the_finding() -> None:
    bad = Check("docker", "backend", "fail", "it is off", "start it")
    stream = io.StringIO()
    render(Report(checks=(bad,), usable=()), Console(file=stream, width=120))
    lines = [line.strip() for line in stream.getvalue().splitlines()]
    assert lines[1].endswith("it is off")
    assert lines[2] == "→ start it"
    assert lines[-1].startswith("No sandbox works here")


async def test_engine_that_does_not_answer_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    docker = DockerConfig(host=f"unix://{tmp_path}/absent.sock")
    config = Config(data_dir=tmp_path / "data", docker=docker)
    with anyio.fail_after(30):
        assert await examine_engine(config) == []
        (check,) = await examine_place("docker", config)
    assert check.status == "fail"
    assert "absent.sock" in check.remedy


@pytest.mark.docker
async def test_docker_runs_code_and_says_which_limits_hold(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        engine = await examine_engine(Config(data_dir=tmp_path / "data"))
        checks = await examine_place("docker", Config(data_dir=tmp_path / "data"))
    assert {"docker version", "runc version", "limits"} <= {check.name for check in engine}
    assert {check.status for check in checks} == {"ok"}
    assert "42" in next(check.found for check in checks if check.name == "print(6*7)")
    assert "memory" in next(check.found for check in checks if check.name == "limits that hold")


@pytest.mark.docker
async def test_second_wall_that_is_recommended_is_one_that_the_backend_takes(
    tmp_path: Path,
) -> None:
    found = []
    for runtime in ("", "runsc"):
        config = Config(data_dir=tmp_path / "data", docker=DockerConfig(runtime=runtime))
        with anyio.fail_after(50):
            checks = await examine_engine(config)
        (wall,) = (check for check in checks if check.name == "second wall")
        found.append((wall.status, wall.found))
        assert not {"rootless", "userns-remap"} & set(wall.remedy.split())
    assert found == [("warn", "the kernel alone keeps containers apart"), ("ok", "gVisor")]


@pytest.mark.docker
@pytest.mark.runsc
async def test_programs_that_need_a_newer_kernel_are_told(tmp_path: Path) -> None:
    image = os.environ.get("MCP_SANDBOX_DOCKER__IMAGE", DockerConfig().image)
    docker = DockerConfig(runtime="runsc", image=image)
    with anyio.fail_after(50):
        checks = await examine_place("docker", Config(data_dir=tmp_path / "data", docker=docker))
    found = [(check.name, check.status, check.found) for check in checks if check.remedy]
    # That of Debian 12 is of 2022; a newer one runs them.
    is_old = b"release-" not in (await anyio.run_process(["runsc", "--version"])).stdout
    assert found == [("ls /", "warn", "ls: cannot access '/': Invalid argument")] * is_old


@pytest.mark.bubblewrap
async def test_bubblewrap_runs_code_and_says_which_limits_hold(tmp_path: Path) -> None:
    with anyio.fail_after(50):
        checks = await examine_place("bubblewrap", Config(data_dir=tmp_path / "data"))
    assert {check.status for check in checks} == {"ok"}
    assert "memory" in next(check.found for check in checks if check.name == "limits that hold")


@pytest.mark.bubblewrap
async def test_one_isolating_backend_is_enough(tmp_path: Path) -> None:
    docker = DockerConfig(host=f"unix://{tmp_path}/absent.sock")
    with anyio.fail_after(50):
        report = await examine(
            Config(data_dir=tmp_path / "data", docker=docker), tmp_path / "absent.sock"
        )
    assert report.usable == ("bubblewrap",)
    assert [c for c in report.checks if c.status != "ok" and not c.remedy] == []
    assert "daemon" not in {c.area for c in report.checks}


@pytest.mark.bubblewrap
def test_command_prints_json_and_succeeds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mcp_sandbox", "doctor", "--json", "--data", str(tmp_path / "d")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "bubblewrap" in answer["usable"]
    assert {"area", "name", "status", "found", "remedy"} == set(answer["checks"][0])


async def test_skills_are_counted_and_what_cannot_be_used_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "skills"
    write_skill(folder, "one")
    write_skill(folder, "two")
    (folder / "broken").mkdir()
    (folder / "broken" / "SKILL.md").write_text("no front matter")
    settings = SkillsConfig(folders=(folder,), shipped=False)
    check = await examine_skills(Config(data_dir=tmp_path / "data", skills=settings))
    assert (check.status, check.found.split(";")[0]) == ("warn", "2 offered (2 assistant)")
    assert "1 cannot be used" in check.found
    assert "skills doctor" in check.remedy
    off = Config(data_dir=tmp_path / "data", skills=SkillsConfig(enabled=False))
    assert (await examine_skills(off)).status == "ok"


def network_told(**settings: Any) -> list[tuple[str, str, str]]:
    checks = examine_network(Config(**settings))
    return [(check.name, check.status, check.found) for check in checks]


def test_what_holds_for_allowed_hosts_and_secrets_is_told(tmp_path: Path) -> None:
    secrets = {"TOKEN": {"from": "file:/nonexistent", "hosts": ["api.example.com"]}}
    assert network_told() == []
    ((name, status, found),) = network_told(network="open", secrets=secrets)
    assert (name, status) == ("secrets", "warn")
    assert "do nothing with network: open" in found
    ((_, status, found),) = network_told(network="allowlist")
    assert (status, found) == ("warn", "none: nothing leaves a sandbox")
    ((_, status, found),) = network_told(network="allowlist", egress={"allow": ["*.com"]})
    assert status == "fail"
    egress = {"allow": ["git", "api.example.com"], "upstream_proxy": "http://127.0.0.1:3128"}
    hosts, upstream = network_told(network="allowlist", egress=egress)
    assert hosts == ("allowed hosts", "ok", "7, those of lists included")
    assert upstream[:2] == ("upstream proxy", "warn")
    assert "their addresses not" in upstream[2]
