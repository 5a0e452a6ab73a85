"""Finds what tests left running, by the folder that all their data roots lie in."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import docker
from docker.errors import APIError, DockerException


def remove(base: Path, *, grace_s: float = 5.0) -> list[str]:
    """Remove what lives on data beneath `base` and return a line for each thing found.

    What is just ending gets a few seconds to do so.
    """
    deadline = time.monotonic() + grace_s
    while found := [*_containers(base), *_processes(base), *_mounts(base)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for pid, _ in _pids(base) if found else ():
        os.kill(pid, signal.SIGKILL)
    for name in (line.split()[1] for line in found if line.startswith("container ")):
        _remove_container(name)
    return found


def _engine() -> docker.DockerClient | None:
    # docker-py leaks a socket when nobody answers, so knock first.
    if "DOCKER_HOST" not in os.environ:
        with socket.socket(socket.AF_UNIX) as knock:
            if knock.connect_ex("/var/run/docker.sock") != 0:
                return None
    try:
        return docker.from_env(timeout=30)
    except DockerException:
        return None


def _containers(base: Path) -> Iterator[str]:
    engine = _engine()
    if engine is None:
        return
    for container in engine.containers.list(
        all=True, filters={"label": "app=mcp-sandbox"}, ignore_removed=True
    ):
        sources = [str(mount.get("Source")) for mount in container.attrs["Mounts"]]
        if any(source.startswith(f"{base}/") for source in sources):
            yield f"container {container.name} ({container.status}) on {sources}"
    engine.close()


def _remove_container(name: str) -> None:
    engine = _engine()
    assert engine is not None
    try:
        engine.containers.get(name).remove(force=True)
    except APIError as exc:
        # It is gone, or another is removing it.
        if exc.status_code not in (404, 409):
            raise
    finally:
        engine.close()


def _processes(base: Path) -> Iterator[str]:
    for pid, command in _pids(base):
        yield f"process {pid} {command}"


def _pids(base: Path) -> Iterator[tuple[int, str]]:
    # A mount namespace shows paths without the mount point, so only the tail of `base` is sure.
    # With a worker's folder the last two names would be those of every other run, too.
    mark = f"/{'/'.join(base.parts[2:][-3:])}/".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        command = _read(entry / "cmdline").replace(b"\0", b" ")
        environment = _read(entry / "environ")
        if mark in command + environment + _link(entry / "cwd") + _foreign_mounts(entry):
            yield int(entry.name), os.fsdecode(command[:200])


def _foreign_mounts(process: Path) -> bytes:
    same = _link(process / "ns/mnt") == _link(Path("/proc/self/ns/mnt"))
    return b"" if same else _read(process / "mountinfo")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _link(path: Path) -> bytes:
    try:
        return os.readlink(os.fsencode(path)) + b"/"
    except OSError:
        return b""


def _mounts(base: Path) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[4].startswith(f"{base}/"):
            yield f"mount {line.split()[4]}"
