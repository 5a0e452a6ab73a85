"""Where a world lies: an ordinary folder, a small disk, beside an engine of its own."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.daemon.running import Place
from tests.daemon.running import place as place_at
from tests.e2e.faults.engine import Engine, own_engine

ORPHANED_S = 2
# Enough for what the workers write, with room that is quick to fill.
_SMALL_MB = 64
_SETTINGS = {
    "MCP_SANDBOX_SESSIONS__ORPHANED": f"{ORPHANED_S}s",
    "MCP_SANDBOX_WORKSPACE__CLEANUP": "* * * * *",
    "MCP_SANDBOX_WORKSPACE__RETENTION": "1d",
}


@dataclass(frozen=True)
class Ground:
    """A place, and what of it may be struck besides."""

    place: Place
    engine: Engine | None = None
    clock: Path | None = None


@contextmanager
def folder(backend: str, parent: Path | None, orphaned_s: int = ORPHANED_S) -> Generator[Ground]:
    """A folder that goes with the block, unless something fails in it."""
    home = Path(tempfile.mkdtemp(prefix="mcs-", dir=parent))
    settings = {**_SETTINGS, "MCP_SANDBOX_SESSIONS__ORPHANED": f"{orphaned_s}s"}
    yield Ground(place_at(home, backend, settings))
    shutil.rmtree(home)


# What has ended in a sandbox is told by the next daemon, and that may come late.
patient = partial(folder, orphaned_s=20)


@contextmanager
def set_clock(backend: str, parent: Path | None) -> Generator[Ground]:
    """The same, with a file that sets the clocks of the daemon."""
    with folder(backend, parent) as ground:
        clock = ground.place.home / "clock"
        clock.write_text("0 0")
        yield Ground(ground.place, clock=clock)


@contextmanager
def small_disk(backend: str, parent: Path | None) -> Generator[Ground]:
    """Everything, also the log and the socket, lies on a disk that can be filled up."""
    home = Path(tempfile.mkdtemp(prefix="mcs-", dir=parent))
    options = f"size={_SMALL_MB}m,mode=0755"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "mcs", str(home)], check=True)
    try:
        settings = {**_SETTINGS, "MCP_SANDBOX_WORKSPACE__MIN_FREE": "0"}
        # A name of its own tells what is left in it from the disk itself; both are short, for
        # the path of the socket.
        yield Ground(place_at(home / f"{home.name}-d", backend, settings))
    finally:
        subprocess.run(["umount", "-l", str(home)], check=True)
        home.rmdir()


@contextmanager
def own_machine(backend: str, parent: Path | None) -> Generator[Ground]:
    """A folder beside an engine of its own, which DOCKER_HOST names meanwhile."""
    before = os.environ.get("DOCKER_HOST")
    with own_engine() as engine, folder(backend, parent) as ground:
        os.environ["DOCKER_HOST"] = engine.address
        try:
            yield Ground(ground.place, engine=engine)
        finally:
            del os.environ["DOCKER_HOST"]
            if before is not None:
                os.environ["DOCKER_HOST"] = before
