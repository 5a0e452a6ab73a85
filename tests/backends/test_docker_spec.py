import json
from dataclasses import replace
from pathlib import Path

import pytest

from mcp_sandbox.backends.docker.spec import Placement, container_body, instance_of, profile
from mcp_sandbox.backends.runner_copy import OFFLINE, USUAL
from mcp_sandbox.models import Limits, Mount, SandboxId, SandboxSpec

PLACE = Placement(
    name=SandboxId("mcs-0123456789abcdef"),
    image="sha256:1",
    instance="i",
    token="aa" * 32,
    user="10001:10001",
    shown=Path("/data/shown"),
)
SPEC = SandboxSpec(
    mounts=(
        Mount(Path("/data/w, x:y"), "/workspace"),
        Mount(Path("/data/h"), "/home/sandbox"),
        Mount(Path("/data/skills"), "/skills", read_only=True),
    ),
    limits=Limits(memory_mb=100, cpus=0.5, pids=7, tmp_mb=3, shm_mb=4, open_files=5, file_mb=6),
    labels={"chat": "u/c"},
    env={"LANG": "de_DE.UTF-8", "EXTRA": "1", "HOME": "/elsewhere"},
)


def test_program_of_pid_1_does_not_depend_on_what_user_code_can_write() -> None:
    body = container_body(SPEC, PLACE)
    assert body["Entrypoint"][0] == "/usr/bin/python3"
    assert body["Entrypoint"][1:3] == ["-I", "-S"]


def test_limits_arrive_in_the_units_of_the_engine() -> None:
    host = container_body(SPEC, PLACE)["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 100 * 1024**2
    assert host["NanoCpus"] == 500_000_000
    assert host["PidsLimit"] == 7
    assert host["ShmSize"] == 4 * 1024**2
    assert "size=3m" in host["Tmpfs"]["/tmp"]
    assert {u["Name"]: u["Hard"] for u in host["Ulimits"]} == {
        "nofile": 5,
        "core": 0,
        "fsize": 6 * 1024**2,
        "memlock": 65536,
        "msgqueue": 819200,
    }


def test_no_more_processors_are_asked_for_than_the_engine_has() -> None:
    spec = replace(SPEC, limits=Limits(cpus=64))
    for processors, wanted in ((2, 2), (128, 64), (None, 64)):
        host = container_body(spec, replace(PLACE, processors=processors))["HostConfig"]
        assert host["NanoCpus"] == wanted * 1_000_000_000


def test_threads_of_gvisor_itself_have_room_beside_the_limit() -> None:
    host = container_body(SPEC, replace(PLACE, gvisor=True))["HostConfig"]
    assert host["PidsLimit"] == 7 + 4096


def test_paths_with_commas_and_colons_are_mounted_as_they_are() -> None:
    mounts = container_body(SPEC, PLACE)["HostConfig"]["Mounts"]
    assert [(m["Source"], m["Target"], m["ReadOnly"]) for m in mounts] == [
        ("/data/w, x:y", "/workspace", False),
        ("/data/h", "/home/sandbox", False),
        ("/data/skills", "/skills", True),
        ("/data/shown", "/run/mcp-sandbox", True),
        ("/data/shown/hosts", "/etc/hosts", True),
    ]
    assert all(
        m["BindOptions"] == {"Propagation": "rprivate", "NonRecursive": True} for m in mounts
    )


def test_sandbox_without_a_shared_socket_keeps_it_in_memory() -> None:
    place = replace(PLACE, shown=None)
    host = container_body(SPEC, place)["HostConfig"]
    assert "uid=10001,gid=10001" in host["Tmpfs"]["/run/mcp-sandbox"]
    assert "/run/mcp-sandbox" not in [m["Target"] for m in host["Mounts"]]


def test_environment_holds_what_was_asked_and_nothing_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    alone = dict(line.split("=", 1) for line in container_body(SPEC, PLACE)["Env"])
    assert alone.pop("MCP_SANDBOX_STARTER") == "/run/mcp-sandbox/starter"
    apart = container_body(SPEC, replace(PLACE, shown=None))
    env = dict(line.split("=", 1) for line in apart["Env"])
    assert env.pop("MCP_SANDBOX_TOKEN") == "aa" * 32
    assert env.pop("MCP_SANDBOX_SOCKET") == "/run/mcp-sandbox/runner.sock"
    assert env == alone
    assert env == {
        **USUAL,
        **OFFLINE,
        "LANG": "de_DE.UTF-8",
        "EXTRA": "1",
        "HOME": "/home/sandbox",
        "PATH": "/home/sandbox/.local/bin:/usr/local/bin:/usr/bin:/bin"
        ":/usr/local/sbin:/usr/sbin:/sbin",
        "MCP_SANDBOX_IDLE_S": "900",
        "MCP_SANDBOX_PIDS": "7",
        "MCP_SANDBOX_WORKSPACE": "/workspace",
        "MCP_SANDBOX_HOME": "/home/sandbox",
    }


def test_a_token_that_is_handed_over_is_in_no_variable_and_variables_do_not_steer_pid_1() -> None:
    body = container_body(SPEC, replace(PLACE, plain=True))
    assert body["Entrypoint"] == [
        "/usr/bin/python3",
        "/opt/mcp-sandbox/mcp_sandbox/runner/__main__.py",
    ]
    env = dict(line.split("=", 1) for line in body["Env"])
    assert PLACE.token not in env.values()
    assert env["MCP_SANDBOX_STARTER"] == "/run/mcp-sandbox/starter"
    assert {name for name in env if not name.startswith("MCP_SANDBOX_")} == {"LANG", "TZ", "HOME"}
    assert env["HOME"] == "/nonexistent"
    assert env["MCP_SANDBOX_ENV_HOME"] == "/home/sandbox"
    assert env["MCP_SANDBOX_ENV_EXTRA"] == "1"


def test_labels_never_hold_the_token_and_cannot_be_taken_over() -> None:
    spec = SandboxSpec(mounts=(), labels={"app": "other", "mcp-sandbox.instance": "other"})
    labels = container_body(spec, PLACE)["Labels"]
    assert labels["app"] == "mcp-sandbox"
    assert labels["mcp-sandbox.instance"] == "i"
    assert PLACE.token not in json.dumps(labels)


def test_data_roots_have_instances_of_their_own() -> None:
    assert instance_of(Path("/a")) != instance_of(Path("/b"))


def test_apparmor_is_asked_for_where_the_engine_has_it() -> None:
    place = replace(PLACE, apparmor=True)
    assert "apparmor=docker-default" in container_body(SPEC, place)["HostConfig"]["SecurityOpt"]


@pytest.mark.parametrize(
    "name",
    [
        *("io_uring_setup", "io_uring_enter", "io_uring_register"),
        *("keyctl", "add_key", "request_key", "userfaultfd", "bpf", "perf_event_open"),
        *("mount", "umount2", "setns", "unshare", "pivot_root", "open_by_handle_at", "socketcall"),
        *("init_module", "finit_module", "kexec_load", "reboot", "swapon", "syslog", "quotactl"),
    ],
)
def test_dangerous_call_is_in_no_rule_that_allows(name: str) -> None:
    allowed = [r for r in profile()["syscalls"] if r["action"] == "SCMP_ACT_ALLOW"]
    assert not any(name in rule["names"] for rule in allowed)
    assert profile()["defaultAction"] == "SCMP_ACT_ERRNO"
