"""The pure parts of the bubblewrap backend, with what this machine cannot show."""

import errno
import os
import resource
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.backends.bubblewrap import cgroups, host, seccomp, verify
from mcp_sandbox.backends.bubblewrap.arguments import (
    Descriptors,
    HostSystem,
    SandboxLayout,
    arguments,
    list_sources,
    look_at_system,
    make_etc,
)
from mcp_sandbox.backends.bubblewrap.host import limits_in_words
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import Limits, Mount, Network, SandboxSpec

ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM
UNKNOWN = 0x50000 | errno.ENOSYS
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, nr: int, *args: int, arch: int | None = None) -> int:
    """What the kernel would answer: runs the filter on a call."""
    data = struct.pack("<IIQ6Q", nr, arch or ARCHES[machine], 0, *(*args, *[0] * 6)[:6])
    code = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    place, loaded = 0, 0
    while True:
        kind, if_true, if_false, value = code[place]
        place += 1
        if kind == 0x06:
            return int(value)
        if kind == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
            continue
        if kind == 0x05:
            place += value
            continue
        tests = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}
        place += if_true if tests[kind] else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_refuses_the_listed_calls_and_allows_the_usual_ones(machine: str) -> None:
    for number in seccomp.REFUSED[machine].values():
        assert verdict(machine, number) == REFUSE
    usual = {"x86_64": (0, 1, 2, 9, 57, 59, 101, 257, 302, 318, 334), "aarch64": (56, 63, 64, 221)}
    for number in usual[machine]:
        assert verdict(machine, number, 2**64 - 1) == ALLOW
    assert verdict(machine, 435) == UNKNOWN
    assert verdict(machine, 470) == UNKNOWN
    assert verdict(machine, 0, arch=0x40000003) == KILL


@pytest.mark.parametrize(
    ("machine", "clone", "ioctl", "socket"), [("x86_64", 56, 16, 41), ("aarch64", 220, 29, 198)]
)
def test_filter_looks_into_arguments(machine: str, clone: int, ioctl: int, socket: int) -> None:
    assert verdict(machine, clone, 0x01200011) == ALLOW
    assert verdict(machine, clone, 0x10000011) == REFUSE
    assert verdict(machine, ioctl, 0, 0x5401) == ALLOW
    assert verdict(machine, ioctl, 0, 0x5412) == REFUSE
    assert verdict(machine, ioctl, 0, (7 << 32) | 0x5412) == REFUSE
    families = {number: verdict(machine, socket, number) for number in range(60)}
    assert {number for number, said in families.items() if said == ALLOW} == {1, 2, 10, 16}
    protocols = {number: verdict(machine, socket, 16, 3, number) for number in range(32)}
    assert {number for number, said in protocols.items() if said == ALLOW} == {0}
    assert verdict(machine, socket, 16, 3, 1 << 32 | 9) == REFUSE
    assert verdict(machine, socket, 2, 3, 6) == ALLOW
    pair = {"x86_64": 53, "aarch64": 199}[machine]
    pairs = {number for number in range(60) if verdict(machine, pair, number) == ALLOW}
    assert pairs == {1}


def test_filter_refuses_no_call_that_is_not_listed() -> None:
    listed = set(seccomp.REFUSED["x86_64"].values())
    refused = {number for number in range(470) if verdict("x86_64", number) == REFUSE}
    # The calls whose arguments are looked into start with harmless ones here: family 0 is none.
    assert refused - listed == {41, 53}


@given(nr=st.integers(0, 2**32 - 1), args=st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_filter_always_comes_to_a_verdict(nr: int, args: list[int]) -> None:
    for machine in ARCHES:
        assert verdict(machine, nr, *args) in {ALLOW, REFUSE, UNKNOWN}


def test_x32_calls_are_refused() -> None:
    assert verdict("x86_64", 0x40000000 | 1) == REFUSE


def test_unknown_machine_is_told() -> None:
    with pytest.raises(BackendUnavailable, match="riscv64"):
        seccomp.program("riscv64")


def words(network: Network = "none", mounts: tuple[Mount, ...] = ()) -> list[str]:
    spec = SandboxSpec(mounts, network=network)
    inside = SandboxLayout(10001, 10001, spec, {"A": "b c"}, ("/cg/x", "/sys/fs/cgroup"))
    reach = {name: f"/reach/{name}" for name in list_sources(inside, Path("r"))}
    system = HostSystem({"/bin": "usr/bin"}, ("/usr",), ("/proc/keys",))
    return arguments(
        inside, system, ("/etc/alternatives",), Descriptors(5, 6, 7, 9, {"/etc/x": 8}), reach
    )


def test_arguments_never_show_the_hosts_root_and_keep_every_wall() -> None:
    mounts = (Mount(Path("/w/a"), "/workspace/a/b"), Mount(Path("/w"), "/workspace"))
    given_words = words(mounts=mounts)
    binds = [
        given_words[i + 1 : i + 3]
        for i, word in enumerate(given_words)
        if word in ("--bind", "--ro-bind", "--dev-bind")
    ]
    assert all(source != "/" and target != "/" for source, target in binds)
    assert "--dev-bind" not in given_words
    assert {"--unshare-all", "--disable-userns", "--assert-userns-disabled", "--new-session",
            "--as-pid-1", "--clearenv"} <= set(given_words)  # fmt: skip
    assert "--share-net" not in given_words
    assert "--share-net" in words("open")
    targets = [target for _, target in binds]
    assert targets.index("/workspace") < targets.index("/workspace/a/b")


def test_links_of_the_hosts_root_are_kept(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "lib").mkdir()
    found = look_at_system(tmp_path)
    assert dict(found.links) == {"/bin": "usr/bin"}
    assert found.bound == ("/usr", "/lib")


def test_private_files_of_etc_are_not_copied(tmp_path: Path) -> None:
    for name, mode in (("mime.types", 0o644), ("services", 0o600), ("shadow", 0o644)):
        (tmp_path / name).write_text("text")
        (tmp_path / name).chmod(mode)
    (tmp_path / "resolv.conf").write_text("nameserver 1.2.3.4\n")
    closed, opened = (make_etc(7, 8, network, tmp_path) for network in ("none", "open"))
    assert "/etc/mime.types" in closed.files
    assert not {"/etc/services", "/etc/shadow", "/etc/resolv.conf"} & set(closed.files)
    assert opened.files["/etc/resolv.conf"] == b"nameserver 1.2.3.4\n"
    assert b"sandbox:x:7:8:" in closed.files["/etc/passwd"]


def test_settings_that_usr_leads_to_are_shown_but_not_what_is_private(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    for name, mode in (
        *(("R/Renviron", 0o644), ("jdk/conf/net.properties", 0o644), ("aliases", 0o644)),
        *(("php/cli/php.ini", 0o644), ("php/password", 0o640), ("private/key", 0o644)),
        *(("environment", 0o644), ("passwd", 0o644), ("unused/file", 0o644), ("empty", 0o600)),
    ):
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_text("host")
        (etc / name).chmod(mode)
    (etc / "private").chmod(0o710)
    (etc / "php/link").symlink_to("password")
    (etc / "jdk/gone").symlink_to("nowhere")
    for link, target in (
        *(("lib/R/etc/Renviron", etc / "R/Renviron"), ("share/aliases", etc / "aliases")),
        *(("lib/jvm/jdk/conf/net", "../../../../../etc/jdk/conf/net.properties"),),
        *(("lib/keys", etc / "private"), ("lib/env", etc / "environment")),
        *(("lib/users", etc / "passwd"), ("lib/empty", etc / "empty"), ("lib/own", "R/etc")),
        *(("share/doc/unused/file", etc / "unused/file"), ("lib/beside", tmp_path / "etcetera")),
    ):
        (tmp_path / "usr" / link).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "usr" / link).symlink_to(target)
    found = make_etc(7, 8, "none", etc)
    assert found.bound == ("/etc/R", "/etc/aliases", "/etc/jdk", "/etc/php/cli")
    assert b"host" not in found.files["/etc/passwd"]
    assert "/etc/environment" not in found.files


def test_an_etc_that_is_closed_or_huge_keeps_no_sandbox_from_starting(tmp_path: Path) -> None:
    etc = tmp_path / "etc"
    for name in ("fonts", "ssl/certs", "many"):
        (etc / name).mkdir(parents=True)
    (etc / "ssl").chmod(0o750)
    for number in range(500):
        (etc / f"many/{number}").touch(0o644)
    os.mkfifo(etc / "many/fifo")
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/many").symlink_to(etc / "many")
    fonts, *many = make_etc(7, 8, "none", etc).bound
    assert fonts == "/etc/fonts"
    assert 100 < len(many) < 400
    assert {Path(path).parent for path in many} == {Path("/etc/many")}
    assert "/etc/many/fifo" not in many


MACHINE = host.KernelConfig(None, None, 15000, in_container=False)


@pytest.mark.parametrize(
    ("said", "machine", "remedy"),
    [
        ("setting up uid map: Permission denied",
         host.KernelConfig(True, None, 1, in_container=False),
         "apparmor_restrict_unprivileged_userns=0"),
        ("No permissions to create new namespace",
         host.KernelConfig(None, False, 1, in_container=False), "unprivileged_userns_clone=1"),
        ("Creating new namespace failed: No space left on device",
         host.KernelConfig(None, None, 0, in_container=True), "user.max_user_namespaces=15000"),
        ("Creating new namespace failed: Operation not permitted",
         host.KernelConfig(None, None, 1, in_container=True), "seccomp=unconfined"),
        ("Can't mount proc on /newroot/proc: Operation not permitted",
         host.KernelConfig(None, None, 1, in_container=True), "systempaths=unconfined"),
        ("No permissions to create new namespace", MACHINE, "docker backend"),
        ("execvp python3: No such file", MACHINE, "mcp-sandbox doctor"),
        ("", MACHINE, "it said nothing"),
    ],
)  # fmt: skip
def test_failure_names_the_step_and_the_remedy(
    said: str, machine: host.KernelConfig, remedy: str
) -> None:
    explained = host.explain(said, machine)
    assert said in explained
    assert remedy in explained


def test_settings_of_a_machine_are_read(tmp_path: Path) -> None:
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/apparmor_restrict_unprivileged_userns").write_text("1\n")
    (tmp_path / ".dockerenv").touch()
    assert host.look(tmp_path) == host.KernelConfig(True, None, None, in_container=True)


OWN = {name: number for number, name in enumerate(("cgroup", "ipc", "mnt", "net", "pid", "uts"))}
TOLD: dict[str, object] = {f"{name}-namespace": number + 100 for name, number in OWN.items()}


def shared_namespaces(
    told: Mapping[str, object], network: Network = "none", *, walls: bool = True
) -> list[str]:
    return verify.find_shared_namespaces(OWN, told, verify.namespaces(network, walls=walls))


def test_shared_namespace_is_found() -> None:
    assert not shared_namespaces(TOLD)
    shared = {**TOLD, "pid-namespace": OWN["pid"]}
    assert shared_namespaces(shared) == ["the pid namespace is the host's"]
    assert shared_namespaces(shared, walls=False) == ["the pid namespace is the host's"]
    without_net = {name: number for name, number in TOLD.items() if name != "net-namespace"}
    assert shared_namespaces(without_net)
    assert not shared_namespaces(without_net, network="open")
    assert not shared_namespaces(without_net, walls=False)


def test_missing_limit_and_group_are_found() -> None:
    values = {resource.RLIMIT_NOFILE: 128, resource.RLIMIT_CORE: 0}
    text = "Max core file size   0   0   bytes\nMax open files   128   4096   files\n"
    assert verify.find_missing_limits(text, values) == [
        "max open files is 128 and 4096 instead of 128"
    ]
    assert not verify.find_missing_limits(text.replace("4096", "128 "), values)
    assert (
        verify.find_outside_groups("4:memory:/mcp-sandbox/a\n3:pids:/\n", ["/x/mcp-sandbox/a"])
        == []
    )
    assert verify.find_outside_groups("4:memory:/other\n", ["/x/mcp-sandbox/a"]) == [
        "/x/mcp-sandbox/a"
    ]


def test_limits_without_groups_are_not_pretended() -> None:
    said = limits_in_words(Limits(), frozenset({"pids"}), 2)
    assert said["pids"] == "512 (cgroup)"
    assert said["cpus"] == "not limited: no writable cgroup"
    assert "no limit for all" in said["memory"]


def test_limit_that_takes_the_whole_machine_says_so() -> None:
    bounded = frozenset({"cpu"})
    assert limits_in_words(Limits(cpus=1), bounded, 2)["cpus"] == "1 (cgroup)"
    said = limits_in_words(Limits(cpus=2), bounded, 2)["cpus"]
    assert said == "2 (cgroup), all that this machine gives"


def v2(tmp_path: Path, controllers: str) -> tuple[str, Path]:
    """A tree that looks like a version 2 hierarchy with our session's own group in it."""
    session = tmp_path / "user.slice/session"
    session.mkdir(parents=True)
    for group in (tmp_path, tmp_path / "user.slice", session):
        (group / "cgroup.controllers").write_text(controllers)
        (group / "cgroup.subtree_control").write_text(controllers)
        (group / "cgroup.procs").write_text("")
    (tmp_path / "user.slice/mcp-sandbox").mkdir()
    for name in ("cgroup.controllers", "cgroup.subtree_control"):
        (tmp_path / "user.slice/mcp-sandbox" / name).write_text(controllers)
    return f"30 24 0:26 / {tmp_path} rw,nosuid - cgroup2 cgroup2 rw\n", session


def test_delegated_part_of_version_2_is_found_and_takes_limits(tmp_path: Path) -> None:
    mounts, _ = v2(tmp_path, "cpu memory pids")
    (found,) = cgroups.find(mounts, "0::/user.slice/session\n", root=False)
    assert found.base == tmp_path / "user.slice/mcp-sandbox"
    assert found.controllers == {"cpu", "memory", "pids"}
    assert found.unified
    groups = cgroups.Cgroups([found])
    from mcp_sandbox.models import SandboxId

    name = SandboxId("mcs-1")
    groups.create(name, Limits(memory_mb=64, pids=9, cpus=1.5))
    made = found.base / name
    assert (made / "memory.max").read_text() == str(64 << 20)
    assert (made / "pids.max").read_text() == "9"
    assert (made / "cpu.max").read_text() == "150000 100000"
    groups.add(name, 4242, joined=groups.joinable(name))
    assert (made / "cgroup.procs").read_text() == "4242"
    assert groups.memory_view(name) == (str(made), "/sys/fs/cgroup")


def test_hierarchy_without_controllers_bounds_nothing(tmp_path: Path) -> None:
    mounts, _ = v2(tmp_path, "hugetlb")
    assert cgroups.find(mounts, "0::/user.slice/session\n", root=False) == []
    assert cgroups.find("", "", root=True) == []
    assert cgroups.Cgroups([]).controllers == frozenset()
