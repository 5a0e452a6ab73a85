import copy
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.backends.docker.spec import Placement, container_body, find_weaker_fields
from mcp_sandbox.backends.sandbox_records import find_weak_status
from mcp_sandbox.models import Mount, SandboxId, SandboxSpec

BODY = container_body(
    SandboxSpec(mounts=(Mount(Path("/w"), "/workspace"), Mount(Path("/h"), "/home/sandbox"))),
    Placement(
        name=SandboxId("mcs-0123456789abcdef"),
        image="sha256:1",
        instance="i",
        token="aa",
        user="10001:10001",
        shown=Path("/s"),
        runtime="runc",
    ),
)
MASKED = ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"]
READ_ONLY = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"]
STATUS = (
    "Name:\tpython3\nUid:\t10001\t10001\t10001\t10001\nGid:\t10001\t10001\t10001\t10001\n"
    + "".join(f"Cap{name}:\t{'0' * 16}\n" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb"))
    + "NoNewPrivs:\t1\nSeccomp:\t2\n"
)


def inspection() -> dict[str, Any]:
    """What an engine says of a container that is as it was asked for."""
    body = copy.deepcopy(BODY)
    host = body.pop("HostConfig")
    mounts = [
        {"Type": "bind", "Source": m["Source"], "Destination": m["Target"], "RW": not m["ReadOnly"]}
        for m in host["Mounts"]
    ]
    # Engines turn empty fields into null and fill in their own defaults.
    host |= {"Devices": None, "CapAdd": None, "Binds": None, "Sysctls": None, "Dns": ["9.9.9.9"]}
    host |= {"MaskedPaths": MASKED, "ReadonlyPaths": READ_ONLY}
    host["Ulimits"] = [*reversed(host["Ulimits"]), {"Name": "nproc", "Hard": 9, "Soft": 9}]
    return {"HostConfig": host, "Config": body, "Mounts": mounts}


def test_container_as_asked_for_has_no_weak_field() -> None:
    assert find_weaker_fields(BODY, inspection()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("Privileged", True),
        ("CapDrop", []),
        ("CapDrop", None),
        ("CapAdd", ["SYS_ADMIN"]),
        ("SecurityOpt", ["no-new-privileges:true"]),
        ("SecurityOpt", ["seccomp=unconfined", "no-new-privileges:true"]),
        ("ReadonlyRootfs", False),
        ("NetworkMode", "bridge"),
        ("PidMode", "host"),
        ("IpcMode", "shareable"),
        ("UTSMode", "host"),
        ("UsernsMode", "host"),
        ("CgroupnsMode", "host"),
        ("CgroupParent", "/other"),
        ("Memory", 0),
        ("NanoCpus", 0),
        ("PidsLimit", None),
        ("PidsLimit", -1),
        ("OomKillDisable", True),
        ("ShmSize", 1 << 40),
        ("Ulimits", []),
        ("Ulimits", None),
        ("Tmpfs", {"/tmp": "rw,exec"}),
        ("Devices", [{"PathOnHost": "/dev/sda"}]),
        ("DeviceRequests", [{"Count": -1}]),
        ("GroupAdd", ["docker"]),
        ("Binds", ["/:/host"]),
        ("VolumesFrom", ["other"]),
        ("Sysctls", {"kernel.msgmax": "1"}),
        ("PublishAllPorts", True),
        ("PortBindings", {"80/tcp": [{"HostPort": "80"}]}),
        ("ExtraHosts", ["host:host-gateway"]),
        ("RestartPolicy", {"Name": "always"}),
        ("LogConfig", {"Type": "json-file", "Config": {}}),
        ("AutoRemove", False),
        ("Runtime", "other"),
        ("MaskedPaths", []),
        ("ReadonlyPaths", None),
    ],
)
def test_weaker_field_is_named(field: str, value: object) -> None:
    found = inspection()
    found["HostConfig"][field] = value
    [problem] = find_weaker_fields(BODY, found)
    assert problem.startswith(field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("User", ""),
        ("User", "0:0"),
        ("Entrypoint", ["/bin/sh"]),
        ("NetworkDisabled", False),
        ("Tty", True),
    ],
)
def test_weaker_setting_of_the_program_is_named(field: str, value: object) -> None:
    found = inspection()
    found["Config"][field] = value
    [problem] = find_weaker_fields(BODY, found)
    assert problem.startswith(field)


@pytest.mark.parametrize("change", ["more", "fewer", "writable"])
def test_other_mounts_than_asked_for_are_named(change: str) -> None:
    found = inspection()
    if change == "more":
        found["Mounts"].append({"Type": "bind", "Source": "/", "Destination": "/host", "RW": False})
    elif change == "fewer":
        found["Mounts"].pop()
    else:
        found["Mounts"][0]["RW"] = False
    [problem] = find_weaker_fields(BODY, found)
    assert problem.startswith("Mounts")


def test_swap_that_the_kernel_cannot_count_is_no_reason_to_refuse() -> None:
    found = inspection()
    found["HostConfig"]["MemorySwap"] = -1
    assert find_weaker_fields(BODY, found) == []


def test_first_process_as_asked_for_has_no_problem() -> None:
    assert find_weak_status(STATUS, "10001:10001") == []


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("NoNewPrivs:\t1", "NoNewPrivs:\t0"),
        ("Seccomp:\t2", "Seccomp:\t0"),
        ("Seccomp:\t2\n", ""),
        ("Uid:\t10001\t10001", "Uid:\t0\t10001"),
        ("CapEff:\t0000000000000000", "CapEff:\t00000000a80425fb"),
        ("CapBnd:\t0000000000000000", "CapBnd:\t00000000a80425fb"),
    ],
)
def test_weaker_first_process_is_named(line: str, other: str) -> None:
    [problem] = find_weak_status(STATUS.replace(line, other), "10001:10001")
    assert problem.startswith(line.split(":", 1)[0])
