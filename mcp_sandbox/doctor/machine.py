"""Checks the host and the skills, then tries each backend with a real sandbox."""

import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
from anyio import to_thread
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcp_sandbox.app.chats import (
    ISOLATING,
    on_trial,
    open_backend,
    open_fleet,
    open_manager,
    read_allowed_hosts,
    server_folder,
    temporary_data,
)
from mcp_sandbox.backends.docker.client import connection_of
from mcp_sandbox.backends.docker.engine import is_gvisor, security_options
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.config import Config
from mcp_sandbox.daemon.control_client import ask_daemon
from mcp_sandbox.daemon.lock import lock_file
from mcp_sandbox.durable import DAMAGED, is_locked, make_folder
from mcp_sandbox.errors import OperatorError, SandboxError
from mcp_sandbox.models import BackendName, ChatId
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.workspace.users import find_range

Status = Literal["ok", "warn", "fail"]
# A status, what was found, and what to do about it.
Finding = tuple[Status, str, str]
Version = tuple[int, int, int]
_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "red"}
_GIB = 1 << 30
_MACHINES = ("x86_64", "aarch64")
_CGROUPS = Path("/sys/fs/cgroup")
_TIME_LIMIT_S = 120.0
_CODE = "print(6*7)"
_OLDER = (
    "programs of the image need a newer kernel: install gVisor's own runsc, not a distribution's"
)
# Locks a file until its input ends.
_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""
_PROGRAMS = {"Engine": "docker", "containerd": "containerd", "runc": "runc"}
_LIMITS = {
    "MemoryLimit": "memory",
    "SwapLimit": "swap",
    "PidsLimit": "processes",
    "CpuCfsQuota": "processor time",
}
# Settings that disable user namespaces: the name, the disabling value, and the remedy.
_SWITCHES = (
    ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "give bwrap an AppArmor profile with `userns,`, or run: "
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")
# How distributions mark their builds, into which they often take fixes without a new number.
_DISTRIBUTION = re.compile(r"[+~](ds|dfsg|deb)|ubuntu|\.(el|fc)\d")


@dataclass(frozen=True)
class Check:
    """The result of one check. `remedy` is what to do about a warning or a failure."""

    area: str
    name: str
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """All checks, and the backends in which a sandbox really ran."""

    usable: tuple[str, ...]
    checks: tuple[Check, ...]


def render(report: Report, console: Console) -> None:
    """Print the report as a table with the remedy under each line that needs one."""
    table = Table("", "area", "check", "found", box=None)
    for check in report.checks:
        found = Text(check.found)
        if check.remedy:
            found.append(f"\n→ {check.remedy}", style="bold")
        table.add_row(Text(check.status, _STYLES[check.status]), check.area, check.name, found)
    console.print(table)
    console.print()
    if report.usable:
        console.print(f"Sandboxes work here: {', '.join(report.usable)}.", style="bold green")
    else:
        console.print("No sandbox works here; follow the remedies above.", style="bold red")


async def examine(config: Config, socket: Path) -> Report:
    """Look at the machine, a daemon at `socket` and the skills; try the cluster or each backend."""
    checks = await to_thread.run_sync(examine_machine, config)
    checks += await to_thread.run_sync(examine_daemon, socket)
    checks.append(await examine_skills(config))
    checks += await to_thread.run_sync(examine_network, config)
    checks += [*await examine_storage(config), *await examine_fleet(config)]
    usable, places = list[BackendName](), ISOLATING
    if config.backend == "kubernetes":
        checks += (found := await examine_cluster(config))
        places = () if found[0].status == "fail" else ("kubernetes",)
    else:
        checks += await examine_engine(config)
    for place in places:
        checks += (found := await examine_place(place, config))
        if all(check.status != "fail" for check in found):
            usable.append(place)
    return Report(checks=tuple(checks), usable=tuple(usable))


def examine_machine(config: Config) -> list[Check]:
    """Return the checks that do not depend on a backend. Only reads."""
    found = {
        "kernel": _kernel(),
        "data directory": _disk(config),
        "state files": _damaged(config.data_dir / "sandbox"),
        "sandbox users": _sandbox_users(config),
        "user namespaces": _user_namespaces(),
        "control groups": _control_groups(),
        "seccomp": _system_call_filter(),
    }
    return [Check("machine", name, *finding) for name, finding in found.items()]


def examine_daemon(socket: Path) -> list[Check]:
    """Return how often all chats had to wait for the daemon; nothing where none listens."""
    try:
        blocked = ask_daemon(socket, "status").get("loop_blocked", 0)
    except OperatorError:
        return []
    check = partial(Check, "daemon", "event loop", found=f"blocked {blocked} times since its start")
    remedy = "all chats waited for over half a second: report what `mcp-sandbox logs` says"
    return [check("warn", remedy=remedy) if blocked else check("ok")]


def _kernel() -> Finding:
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        return "fail", found, "sandboxes need Linux: use a Linux machine"
    if platform.machine() not in _MACHINES:
        remedy = f"tried on {' and '.join(_MACHINES)} only: run the test suite before relying on it"
        return "warn", found, remedy
    return "ok", found, ""


def _disk(config: Config) -> Finding:
    folder = config.data_dir
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    found = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free at {config.data_dir}"
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = f"make {folder} writable for this user, or set data_dir"
        return "fail", f"{folder} cannot be written", remedy
    if usage.free < config.workspace.min_free:
        remedy = "free some space, set data_dir to another disk, or lower workspace.min_free"
        return "fail", found, remedy
    if usage.free < config.workspace.size_limit:
        return "warn", found, "one chat may fill it: lower workspace.size_limit"
    return "ok", found, ""


def _damaged(folder: Path) -> Finding:
    places = ("*", "records/*/*", "locks/*/*", "pool/*/*")
    found = [path for place in places for path in folder.glob(f"{place}{DAMAGED}????????T*Z")]
    if not found:
        return "ok", "none was damaged", ""
    latest = max(found, key=lambda path: path.name.rpartition(DAMAGED)[2])
    remedy = "made anew, and no chat's files are concerned: check the disk, then delete them"
    return "warn", f"{len(found)} damaged and set aside, at last {latest}", remedy


def _sandbox_users(config: Config) -> Finding:
    if os.geteuid() != 0:
        return "ok", f"all sandboxes run as this user, uid {os.geteuid()}", ""
    wanted = "{0}-{0}".format(*sandbox_user()) if config.project.access == "rw" else ""
    found = find_range(config.data_dir, wanted or config.sandbox.uid_range) or ()
    clashing = [each.pw_name for each in pwd.getpwall() if each.pw_uid in found]
    said = f"uid {found[0]}-{found[-1]}" if found else "their ids are picked at the first start"
    if not clashing:
        return "ok", said, ""
    remedy = "set sandbox.uid_range to ids of no account, or give that account another id"
    return "warn", f"{said}: {', '.join(clashing)} of this host can look into sandboxes", remedy


def _user_namespaces() -> Finding:
    if os.geteuid() == 0:
        return "ok", "made by root, which needs no permission", ""
    for path, closed, remedy in _SWITCHES:
        if _line(Path("/proc/sys") / path) == closed:
            return "warn", f"{path.replace('/', '.')} = {closed}", remedy
    return "ok", "allowed", ""


def _control_groups() -> Finding:
    controllers = _line(_CGROUPS / "cgroup.controllers")
    if controllers is not None:
        return "ok", f"v2 with {controllers or 'no controllers'}", ""
    found = [part for part in ("memory", "pids", "cpu") if (_CGROUPS / part).is_dir()]
    if len(found) < 3:
        remedy = "boot with cgroup v2 (systemd.unified_cgroup_hierarchy=1)"
        return "warn", f"v1 with {', '.join(found) or 'nothing'}", remedy
    return "ok", f"v1 with {', '.join(found)}", ""


def _system_call_filter() -> Finding:
    actions = _line(Path("/proc/sys/kernel/seccomp/actions_avail"))
    if actions is None or "errno" not in actions.split():
        remedy = "use a kernel built with CONFIG_SECCOMP_FILTER; sandboxes are refused without"
        return "fail", "the kernel has no system call filter", remedy
    return "ok", "the kernel filters system calls", ""


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


async def examine_skills(config: Config) -> Check:
    """Return what the user of this machine has; the skills in files of chats are not looked at."""
    check = partial(Check, "skills", "skills")
    if not config.skills.enabled:
        return check("ok", "switched off by skills.enabled")
    try:
        catalogue = await SkillLibrary(config.skills, config.data_dir).catalogue("local")
    except OperatorError as exc:
        return check("fail", "they cannot be read", str(exc))
    roots = Counter(skill.root for skill in catalogue.skills)
    parts = ", ".join(f"{number:,} {root}" for root, number in roots.items())
    found = f"{len(catalogue.skills):,} offered{f' ({parts})' if parts else ''}"
    broken = len(catalogue.unusable)
    odd = sum(any(d.level != "note" for d in s.diagnostics) for s in catalogue.skills)
    if not broken and not odd:
        return check("ok", found)
    what = f"{found}; {broken:,} cannot be used, {odd:,} have something that others may refuse"
    remedy = "`mcp-sandbox skills doctor` says what and how to mend it"
    return check("warn" if broken else "ok", what, remedy)


def examine_network(config: Config) -> list[Check]:
    """Return what holds for allowed hosts and secrets; nothing where none are configured."""
    check = partial(Check, "network", "allowed hosts")
    try:
        rules = read_allowed_hosts(config)
    except OperatorError as exc:
        return [check("fail", "they cannot be used", str(exc))]
    if rules is None:
        found = f"they do nothing with network: {config.network}"
        idle = Check("network", "secrets", "warn", found, "set network to allowlist")
        return [idle] if config.secrets else []
    if not rules.allow:
        return [check("warn", "none: nothing leaves a sandbox", "name some in egress.allow")]
    checks = [check("ok", f"{len(rules.allow)}, those of lists included")]
    if upstream := config.egress.upstream_proxy:
        found = f"{upstream} looks names up: they are judged, their addresses not"
        remedy = "let that proxy refuse private addresses, or do without egress.upstream_proxy"
        checks.append(Check("network", "upstream proxy", "warn", found, remedy))
    return checks


async def examine_storage(config: Config) -> list[Check]:
    """Return whether the object store takes, returns, lists and removes; nothing without one."""
    if not config.storage.endpoint:
        return []
    check = partial(Check, "storage", "object store")
    try:
        from mcp_sandbox.storage.backups import Backups  # noqa: PLC0415 - with a store alone

        started = time.perf_counter()
        await Backups(config.storage).check()
    except OperatorError as exc:
        return [check("fail", "no chat is saved", str(exc))]
    took_ms = (time.perf_counter() - started) * 1000
    where = f"{config.storage.endpoint}, bucket {config.storage.bucket}"
    return [check("ok", f"{where}: put, get, list and delete took {took_ms:.0f} ms")]


async def examine_fleet(config: Config) -> list[Check]:
    """Return whether servers can share chats by the Redis; nothing where they do not."""
    if not config.fleet.name:
        return []
    check = partial(Check, "fleet", "Redis")
    try:
        async with open_fleet(config) as store:
            await store.check()
            servers = await store.servers()
    except OperatorError as exc:
        return [check("fail", "no chats are shared", str(exc))]
    living = ", ".join(f"{each.name} at {each.url}" for each in servers)
    found = f"{store.place}; servers that live: {living or 'none'}"
    if config.fleet.shared_data_dir:
        locks = await to_thread.run_sync(_locks, config, [each.name for each in servers])
        return [check("ok", found), Check("fleet", "data directory", *locks)]
    if config.storage.endpoint:
        return [check("ok", found)]
    return [check("warn", f"{found}; no files follow a chat", "set storage: see docs/storage.md")]


def _locks(config: Config, living: Sequence[str]) -> Finding:
    """Try whether locks in the shared directory hold: of another process, and of the servers."""
    own, pipe = server_folder(config), subprocess.PIPE
    tried = own / "tried.lock"
    files = {"process": tried, **{name: lock_file(own.with_name(name)) for name in living}}
    try:
        make_folder(own)
        command = [sys.executable, "-c", _LOCK, str(tried)]
        with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:  # noqa: S603
            assert other.stdout  # noqa: S101
            other.stdout.readline()
            free = [name for name, file in files.items() if not is_locked(file)]
    except OSError as exc:
        return "fail", f"{own} cannot be used: {exc}", "have this user own data_dir on all machines"
    if not free:
        return "ok", f"locks hold in {config.data_dir}: of another {', '.join(files)}", ""
    remedy = (
        "have all servers mount one file system whose locks hold between machines, such as NFS 4 "
        "without local_lock; or give each its own data_dir, and set storage (a server that has "
        "just died counts as living until its lease is over)"
    )
    return "fail", f"{config.data_dir} has no lock of another {free[0]} that lives", remedy


async def examine_cluster(config: Config) -> list[Check]:
    """Return whether a cluster lets us do what its Role allows, and how well pods are filtered."""
    from mcp_sandbox.backends.kubernetes import manifests  # noqa: PLC0415
    from mcp_sandbox.backends.kubernetes.client import ApiServer  # noqa: PLC0415 - an extra

    settings, remedy = config.kubernetes, "apply the Role of `mcp-sandbox kubernetes manifests`"
    checks, check = list[Check](), partial(Check, "kubernetes", "rights")
    try:
        async with aclosing(ApiServer(settings)) as api:
            if missing := await manifests.missing_rights(api, settings):
                checks.append(check("fail", f"this user may not {', '.join(missing)}", remedy))
            else:
                checks.append(check("ok", f"all in namespace {settings.namespace}"))
                if settings.warm_pool:
                    pool = await manifests.examine_pool(api, config)
                    checks.append(Check("kubernetes", "warm pool", *pool))
    except OperatorError as exc:
        return [check("fail", "the cluster cannot be asked", str(exc))]
    if not settings.seccomp_profile:
        weak = "the runtime's default profile, which allows more system calls than sandboxes need"
        remedy = (
            "put what `mcp-sandbox kubernetes seccomp` prints into a file on the nodes, below "
            "/var/lib/kubelet/seccomp, and name it in kubernetes.seccomp_profile"
        )
        checks.append(Check("kubernetes", "system calls", "warn", weak, remedy))
    return checks


async def examine_engine(config: Config) -> list[Check]:
    """Return what the Docker engine says of itself; nothing when it does not answer."""
    try:
        with anyio.fail_after(_TIME_LIMIT_S):
            async with aclosing(connection_of(config.docker)) as connection:
                engine = await connection.engine()
                info = await connection.info()
                versions = await connection.call(lambda api: api.version())
    except (OperatorError, TimeoutError):
        # examine_place("docker") says so, with the remedy.
        return []
    parts = {part["Name"]: str(part["Version"]) for part in versions.get("Components") or []}
    found = {
        "engine": ("ok", f"{info.get('Name')} at {engine.url}", ""),
        **{
            f"{_PROGRAMS[name]} version": _version(_PROGRAMS[name], text)
            for name, text in parts.items()
            if name in _PROGRAMS
        },
        "security options": _filter(info),
        "limits": _limits(info),
        "second wall": _second_wall(config, info),
    }
    return [Check("docker", name, *finding) for name, finding in found.items()]


def _version(program: str, text: str) -> Finding:
    holes = find_vulnerabilities(program, text)
    if not holes:
        return "ok", text, ""
    known = "; ".join(f"{hole.names}: {hole.what}" for hole in holes)
    return "warn", f"{text} is older than the fix of {known}", remedy(program, text, holes)


def _filter(info: Mapping[str, Any]) -> Finding:
    names = security_options(info)
    found = ", ".join(names) or "none"
    if "seccomp" not in names:
        return "fail", found, "use an engine with seccomp: sandboxes are refused without"
    return "ok", found, ""


def _limits(info: Mapping[str, Any]) -> Finding:
    missing = [word for name, word in _LIMITS.items() if not info.get(name)]
    found = f"cgroup v{info.get('CgroupVersion', '1')}"
    if missing:
        what = "boot with cgroup v2, or with cgroup_enable=memory swapaccount=1"
        return "warn", f"{found} without a limit of {', '.join(missing)}", what
    return "ok", found, ""


def _second_wall(config: Config, info: dict[str, Any]) -> Finding:
    if is_gvisor(info, config.docker.runtime):
        return "ok", "gVisor", ""
    what = (
        "for hostile code set docker.runtime to runsc (gVisor), or run everything in a virtual "
        "machine of its own"
    )
    return "warn", "the kernel alone keeps containers apart", what


async def examine_place(place: BackendName, config: Config) -> list[Check]:
    """Return whether a sandbox can be made there and runs Python, and which limits hold."""
    check = partial(Check, place, "backend")
    probed = config.model_copy(update={"backend": place})
    try:
        with anyio.fail_after(_TIME_LIMIT_S):
            async with open_backend(place, probed) as backend:
                found = await backend.probe()
            return [check("ok", found), *await _run_code(place, probed)]
    except SandboxError as exc:
        # Our messages say what happened and then what to do.
        return [check("fail", "no sandbox can be made", str(exc))]
    except TimeoutError:
        what = f"no answer within {_TIME_LIMIT_S:g} s"
        return [check("fail", what, "look at the engine's log, or restart it")]


async def _run_code(place: BackendName, config: Config) -> list[Check]:
    async with temporary_data() as folder:
        started = time.perf_counter()
        async with open_manager(on_trial(config, folder)) as manager:
            session = await manager.session(ChatId("doctor", "check"))
            try:
                result = await session.run_code(_CODE, "python", timeout_s=30)
                took_ms = (time.perf_counter() - started) * 1000
                listed = await session.exec("ls /", timeout_s=30)
                report = await session.info()
            finally:
                if manager.saving:
                    await manager.remove(ChatId("doctor", "check"))
    limits = "; ".join(f"{name}: {words}" for name, words in report.limits.items())
    is_weak = "does not enforce" in report.network
    plugin = "install a network plugin that enforces NetworkPolicies" if is_weak else ""
    if result.stdout.strip() != "42":
        found = f"{_CODE} printed {result.stdout!r} {result.stderr!r}"
        what = f"run `mcp-sandbox demo --backend {place}` and report what it prints"
        return [Check(place, _CODE, "fail", found, what)]
    return [
        Check(place, _CODE, "ok", f"42 after {took_ms:.0f} ms, the sandbox's start included"),
        Check(place, "isolation", "ok", report.isolation),
        Check(place, "network", "warn" if is_weak else "ok", report.network, plugin),
        Check(place, "limits that hold", "ok", limits),
        *([] if listed.success else [Check(place, "ls /", "warn", listed.stderr.strip(), _OLDER)]),
    ]


@dataclass(frozen=True)
class KnownVulnerability:
    """A known vulnerability and the first version without it in each line of releases."""

    names: str
    what: str
    fixed: tuple[Version, ...]

    def open_in(self, version: Version) -> bool:
        same_line = [fixed for fixed in self.fixed if version[:2] == fixed[:2]]
        return version < same_line[0] if same_line else version <= max(self.fixed)


HOLES = {
    "runc": (
        KnownVulnerability(
            "CVE-2024-21626", "a leaked file descriptor leads out of a container", ((1, 1, 12),)
        ),
        KnownVulnerability(
            "CVE-2025-31133, CVE-2025-52565, CVE-2025-52881",
            "races at start-up can make host files writable",
            ((1, 2, 8), (1, 3, 3), (1, 4, 0)),
        ),
    ),
    "containerd": (
        KnownVulnerability(
            "CVE-2024-40635",
            "an overlong user id runs as root",
            ((1, 6, 38), (1, 7, 27), (2, 0, 4)),
        ),
    ),
    "docker": (
        KnownVulnerability(
            "CVE-2024-24557, CVE-2024-23651",
            "building a hostile image can reach the host",
            ((24, 0, 9), (25, 0, 2)),
        ),
        KnownVulnerability(
            "CVE-2025-54410",
            "a reload of firewalld opens container networks to each other",
            ((25, 0, 13), (28, 0, 0)),
        ),
    ),
}


def find_vulnerabilities(program: str, text: str) -> list[KnownVulnerability]:
    """Return the vulnerabilities that upstream's release of that version has."""
    match = _NUMBERS.match(text)
    if match is None:
        return []
    version = (int(match[1]), int(match[2]), int(match[3] or 0))
    return [hole for hole in HOLES[program] if hole.open_in(version)]


def remedy(program: str, text: str, holes: list[KnownVulnerability]) -> str:
    """Say what to install, and that a distribution's build may have the fixes already."""
    versions = sorted({version for hole in holes for version in hole.fixed})
    wanted = " or ".join(".".join(map(str, version)) for version in versions[-2:])
    update = f"update {program} to {wanted} or newer"
    if _DISTRIBUTION.search(text):
        return (
            f"{update}, unless your distribution's security tracker says that this build has the "
            "fixes; the number cannot tell"
        )
    return update
