"""What a sandbox leaves on the machine: looked for by the names it had while it ran."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException, NotFound

_GRACE_S = 8.0
_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Traces:
    """Sandbox ids, and the engine's long ids of those that are containers."""

    sandboxes: tuple[str, ...]
    containers: tuple[str, ...]


def of(data_root: Path) -> Traces:
    """The sandboxes that run on a data root now."""
    run = data_root / "sandbox" / "run"
    names = tuple(sorted(path.name for path in run.iterdir())) if run.is_dir() else ()
    return Traces(names, tuple(filter(None, map(_container, names))))


def still_there(data_root: Path, known: Traces) -> list[str]:
    """What is left of them after a moment of grace."""
    deadline = time.monotonic() + _GRACE_S
    while (found := _look(data_root, known)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _look(data_root: Path, known: Traces) -> list[str]:
    names = (*known.sandboxes, *known.containers)
    run = data_root / "sandbox" / "run"
    found = [f"record {path}" for path in (run.iterdir() if run.is_dir() else ())]
    found += [f"container {name}" for name in known.sandboxes if _container(name)]
    found += [f"network {name}" for name in known.sandboxes if _network(name)]
    # Not by glob: groups of others come and go while one looks.
    groups = {folder for folder, _, _ in os.walk(_CGROUPS) if Path(folder).name in names}
    found += [f"cgroup {folder}" for folder in sorted(groups)]
    return found + [f"process {line}" for line in _processes(names)]


def _processes(names: tuple[str, ...]) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(name in line for name in names):
            found.append(f"{path.parent.name} {line[:200]}")
    return found


def _container(name: str) -> str | None:
    engine = _engine()
    if engine is None:
        return None
    try:
        return str(engine.containers.get(name).id)
    except NotFound:
        return None
    finally:
        engine.close()


def _network(name: str) -> bool:
    engine = _engine()
    if engine is None:
        return False
    try:
        return bool(engine.networks.list(names=[name]))
    finally:
        engine.close()


def _engine() -> docker.DockerClient | None:
    try:
        return docker.from_env(timeout=30)
    except DockerException:
        return None
