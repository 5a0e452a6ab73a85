"""The sandboxes of a data root as the machine sees them: found, killed, looked for when over."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import docker
from docker.errors import APIError, NotFound

from mcp_sandbox.backends.docker.spec import INSTANCE_LABEL, instance_of
from mcp_sandbox.backends.sandbox_records import identify
from mcp_sandbox.runner.kernel import processes

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Place:
    """A data root on a backend. Its methods block.

    `known` collects every name that its sandboxes ever had: ids, and the engine's own.
    """

    data: Path
    backend: str
    known: set[str]

    def note(self) -> None:
        """Remember the sandboxes that run now."""
        run = self.data / "sandbox" / "run"
        self.known.update(path.name for path in _entries(run))
        if self.backend == "docker":
            with _engine() as engine:
                self.known.update(str(row.id) for row in self._containers(engine))

    def live(self) -> list[str]:
        """The chat of each sandbox that runs; "" is one that no chat has taken yet."""
        if self.backend == "docker":
            with _engine() as engine:
                rows = [row for row in self._containers(engine) if row.status == "running"]
                return [self._chat_of(row) for row in rows]
        return [
            str(state["labels"].get("chat", ""))
            for state in self._states()
            if state and state["process"] and _is_alive(state["process"])
        ]

    def kill_runner(self, chat: str) -> bool:
        """SIGKILL the first process of a sandbox, from outside; False when there is none."""
        return _kill(self.runner(chat))

    def kill_worker(self, chat: str, random: Random) -> bool:
        """SIGKILL one of the processes of ours below it."""
        runner = self.runner(chat)
        found = [*_ours_below(runner)] if runner else []
        return bool(found) and _kill(random.choice(found))

    def kill_notebook(self, chat: str, name: str) -> bool:
        """SIGKILL the process in a sandbox that calls itself so."""
        runner = self.runner(chat)
        inside = processes.find_descendants([runner], processes.map_parents()) if runner else ()
        found = [pid for pid in inside if _read(Path(f"/proc/{pid}/comm")) == f"{name}\n".encode()]
        return bool(found) and _kill(found[0])

    def kill_container(self, chat: str) -> bool:
        """`docker kill`, or the death of the bwrap that started a sandbox."""
        if self.backend != "docker":
            return _kill(self._newest(chat, "launcher"))
        with _engine() as engine:
            for container in self._of_chat(engine, chat)[:1]:
                try:
                    container.kill()
                except (NotFound, APIError):
                    return False
                return True
        return False

    def runner(self, chat: str) -> int:
        """The first process of a sandbox, as the host numbers it; 0 when there is none."""
        if self.backend != "docker":
            return self._newest(chat, "process")
        with _engine() as engine:
            for container in self._of_chat(engine, chat)[:1]:
                return int(container.attrs["State"]["Pid"])
        return 0

    def _newest(self, chat: str, which: str) -> int:
        newest: tuple[float, int] = (0.0, 0)
        for state in self._states():
            if state and state["labels"].get("chat") == chat and state[which]:
                newest = max(newest, (state[which]["started"], state[which]["pid"]))
        return newest[1]

    def _states(self) -> Iterator[Any]:
        for record in _entries(self.data / "sandbox" / "run"):
            yield _json(record / "state.json")

    def _of_chat(self, engine: Any, chat: str) -> list[Any]:
        return [row for row in self._containers(engine) if self._chat_of(row) == chat]

    def _chat_of(self, container: Any) -> str:
        """An engine never changes labels: those of one that a chat took over are in its record."""
        own = {"chat": container.labels.get("mcp-sandbox.label.chat", "")}
        record = _json(self.data / "sandbox" / "run" / container.name / "container") or {}
        return str((record.get("labels") or own).get("chat", ""))

    def _containers(self, engine: Any) -> list[Any]:
        wanted = [f"{INSTANCE_LABEL}={instance_of(self.data)}"]
        return list(
            engine.containers.list(all=True, filters={"label": wanted}, ignore_removed=True)
        )

    def remains(self) -> dict[str, int]:
        """How much of it is still there, by kind."""
        found = dict.fromkeys(
            ("processes", "containers", "networks", "mounts", "cgroups", "sockets", "records"), 0
        )
        run = self.data / "sandbox" / "run"
        found["processes"] = sum(1 for _ in self.processes())
        found["mounts"] = sum(
            self.data.parent.name in line for line in _lines(Path("/proc/self/mountinfo"))
        )
        found["cgroups"] = sum(
            1 for _, names, _ in os.walk(_CGROUPS) for name in names if name in self.known
        )
        found["sockets"] = sum(1 for _ in run.glob("*/sock/*"))
        found["records"] = len(_entries(run))
        if self.backend == "docker":
            with _engine() as engine:
                found["containers"] = len(self._containers(engine))
                label = f"{INSTANCE_LABEL}={instance_of(self.data)}"
                found["networks"] = len(engine.networks.list(filters={"label": label}))
        return found

    def processes(self) -> Iterator[str]:
        """Whatever names the data root or one of its sandboxes, anywhere."""
        # A mount namespace shows paths without the mount point, so only the tail is sure.
        marks = [self.data.parent.name.encode(), *(name.encode() for name in self.known)]
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in (os.getpid(), os.getppid()):
                continue
            seen = b"".join(_read(entry / name) for name in ("cmdline", "environ", "cgroup"))
            if not _same_mounts(entry):
                seen += _read(entry / "mountinfo")
            if any(mark in seen for mark in marks):
                yield f"{entry.name} {_read(entry / 'cmdline')[:200]!r}"


@contextmanager
def _engine() -> Iterator[Any]:
    engine = docker.from_env(timeout=60)
    try:
        yield engine
    finally:
        engine.close()


def _kill(pid: int) -> bool:
    if pid <= 1:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _ours_below(runner: int) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        name, _, fields = _read(path).partition(b" (")[2].rpartition(b") ")
        if name == b"mcp-sandbox" and int(fields.split()[1]) == runner:
            yield int(path.parent.name)


def _json(path: Path) -> Any:
    """What a file of a record says; None when it is just being written or removed."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _is_alive(process: Any) -> bool:
    found = identify(process["pid"])
    return found is not None and found.started == process["started"]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _same_mounts(entry: Path) -> bool:
    try:
        return os.readlink(entry / "ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except OSError:
        return True


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
