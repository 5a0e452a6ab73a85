"""Calls the runner's file operations as a worker does: with arguments and real pipes."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.runner.files.operations import OPS
from mcp_sandbox.runner.wire.protocol import OpError

_TURNS = os.memfd_create("turns")
RUNNER = Path(__file__).parents[3] / "mcp_sandbox" / "runner"


def call(op: str, body: bytes = b"", **args: Any) -> tuple[dict[str, Any], bytes]:
    """Run one operation; returns its result and the body it sent."""
    stdin, feeding = os.pipe()
    draining, stdout = os.pipe()
    received = bytearray()
    threads = [
        threading.Thread(target=_feed, args=(feeding, body)),
        threading.Thread(target=_drain, args=(draining, received)),
    ]
    for thread in threads:
        thread.start()
    try:
        result = OPS[op](args, stdin, stdout, b"", _TURNS)
    finally:
        os.close(stdin)
        os.close(stdout)
        for thread in threads:
            thread.join()
    assert len(json.dumps(result)) < 32 * 1024
    return result, bytes(received)


def _feed(fd: int, body: bytes) -> None:
    try:
        with open(fd, "wb") as pipe:
            pipe.write(body)
    except BrokenPipeError:
        # An operation that fails does not take the rest.
        return


def _drain(fd: int, received: bytearray) -> None:
    with open(fd, "rb") as pipe:
        while data := pipe.read(65536):
            received.extend(data)


def rows(op: str, **args: Any) -> list[Any]:
    """The JSON array that an operation sends."""
    found: list[Any] = json.loads(call(op, **args)[1])
    return found


def refused(op: str, body: bytes = b"", **args: Any) -> OpError:
    """The error of an operation that must fail."""
    with pytest.raises(OpError) as caught:
        call(op, body, **args)
    assert "\n" not in caught.value.message.split("The nearest")[0]
    return caught.value


def leftovers(folder: Path) -> list[str]:
    """Unfinished files below a folder."""
    return [str(path) for path in folder.rglob(".~mcp-*")]


def make_deep(folder: Path, levels: int, name: str = "d") -> None:
    """Make directories nested deeper than any path can say."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(os.open("bottom.txt", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd))
    os.close(fd)


@contextmanager
def small_disk(folder: Path, size: str = "64k") -> Iterator[Path]:
    """A file system that is soon full; needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    folder.mkdir()
    mount = shutil.which("mount") or "/bin/mount"
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode()}")
    try:
        yield folder
    finally:
        subprocess.run([shutil.which("umount") or "/bin/umount", str(folder)], check=True)
