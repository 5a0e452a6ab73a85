"""Tries the places where a sandbox can live: the engine's words, then a real sandbox."""

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any

import anyio

from mcp_sandbox.app import open_backend, open_manager, temporary_data
from mcp_sandbox.backends.docker.client import Connection
from mcp_sandbox.backends.docker.engine import Engine, find_engine
from mcp_sandbox.backends.docker.machine import is_gvisor
from mcp_sandbox.config import Config, docker_variables, home
from mcp_sandbox.doctor.report import Check
from mcp_sandbox.doctor.versions import holes_of, remedy
from mcp_sandbox.errors import OperatorError, SandboxError
from mcp_sandbox.models import BackendName, ChatId

_TIME_LIMIT_S = 120.0
_CODE = "print(6*7)"
_SWITCHES = {
    "MemoryLimit": "memory",
    "SwapLimit": "swap",
    "PidsLimit": "processes",
    "CpuCfsQuota": "processor time",
}


async def examine_engine(config: Config) -> list[Check]:
    """Return what the Docker engine says of itself; nothing when it does not answer."""

    def find() -> Engine:
        return find_engine(config.docker.host, docker_variables(), home())

    try:
        with anyio.fail_after(_TIME_LIMIT_S):
            async with aclosing(Connection(find)) as connection:
                engine = await connection.engine()
                info = await connection.info()
                versions = await connection.call(lambda api: api.version())
    except (OperatorError, TimeoutError):
        # examine_place("docker") says so, with the remedy.
        return []
    return [
        Check("docker", "engine", "ok", f"{info.get('Name')} at {engine.url}"),
        *(_version(program, text) for program, text in _versions(versions)),
        _filter(info),
        _limits(info),
        _second_wall(config, info),
    ]


def _versions(answer: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    names = {"Engine": "docker", "containerd": "containerd", "runc": "runc"}
    parts = answer.get("Components") or []
    return [(names[part["Name"]], str(part["Version"])) for part in parts if part["Name"] in names]


def _version(program: str, text: str) -> Check:
    holes = holes_of(program, text)
    if not holes:
        return Check("docker", f"{program} version", "ok", text)
    known = "; ".join(f"{hole.names}: {hole.what}" for hole in holes)
    found = f"{text} is older than the fix of {known}"
    return Check("docker", f"{program} version", "warn", found, remedy(program, text, holes))


def _filter(info: Mapping[str, Any]) -> Check:
    options = info.get("SecurityOptions") or []
    names = [str(option).partition(",")[0].removeprefix("name=") for option in options]
    found = ", ".join(names) or "none"
    if "seccomp" not in names:
        what = "use an engine with seccomp: sandboxes are refused without"
        return Check("docker", "security options", "fail", found, what)
    return Check("docker", "security options", "ok", found)


def _limits(info: Mapping[str, Any]) -> Check:
    missing = [word for name, word in _SWITCHES.items() if not info.get(name)]
    found = f"cgroup v{info.get('CgroupVersion', '1')}"
    if missing:
        found += f" without a limit of {', '.join(missing)}"
        what = "boot with cgroup v2, or with cgroup_enable=memory swapaccount=1"
        return Check("docker", "limits", "warn", found, what)
    return Check("docker", "limits", "ok", found)


def _second_wall(config: Config, info: dict[str, Any]) -> Check:
    if is_gvisor(info, config.docker.runtime):
        return Check("docker", "second wall", "ok", "gVisor")
    what = (
        "for hostile code set docker.runtime to runsc (gVisor), or run everything in a virtual "
        "machine of its own"
    )
    return Check("docker", "second wall", "warn", "the kernel alone keeps containers apart", what)


async def examine_place(place: BackendName, config: Config) -> list[Check]:
    """Return whether a sandbox can be made there and runs Python, and which limits hold."""
    probed = config.model_copy(update={"backend": place})
    try:
        with anyio.fail_after(_TIME_LIMIT_S):
            async with open_backend(place, probed) as backend:
                found = await backend.probe()
            return [Check(place, "backend", "ok", found), *await _run_code(place, probed)]
    except SandboxError as exc:
        # Our messages say what happened and then what to do.
        return [Check(place, "backend", "fail", "no sandbox can be made", str(exc))]
    except TimeoutError:
        what = f"no answer within {_TIME_LIMIT_S:g} s"
        return [Check(place, "backend", "fail", what, "look at the engine's log, or restart it")]


async def _run_code(place: BackendName, config: Config) -> list[Check]:
    async with temporary_data() as folder:
        started = time.perf_counter()
        async with open_manager(config.model_copy(update={"data_dir": folder})) as manager:
            session = await manager.session(ChatId("doctor", "check"))
            result = await session.run_code(_CODE, "python", timeout_s=30)
            took_ms = (time.perf_counter() - started) * 1000
            report = await session.info()
    limits = "; ".join(f"{name}: {words}" for name, words in report.limits.items())
    if result.stdout.strip() != "42":
        found = f"{_CODE} printed {result.stdout!r} {result.stderr!r}"
        what = f"run `mcp-sandbox demo --backend {place}` and report what it prints"
        return [Check(place, _CODE, "fail", found, what)]
    return [
        Check(place, _CODE, "ok", f"42 after {took_ms:.0f} ms, the sandbox's start included"),
        Check(place, "isolation", "ok", report.isolation),
        Check(place, "network", "ok", report.network),
        Check(place, "limits that hold", "ok", limits),
    ]
