"""Whatever code inside may write to is measured by the meter of its chat, or a bounded memory."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR
from tests.e2e.writable_places import MIB

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user"),
    pytest.mark.parametrize("backend_name", [DOCKER, GVISOR, BUBBLEWRAP], indirect=True),
]
_MEASURED = {"/workspace", "/home/sandbox"}
_MOST_IN_MEMORY = 2048 * MIB
ORDINARY = 12345


@pytest.fixture(params=["root", "ordinary"])
def user(request: pytest.FixtureRequest) -> int:
    """Whose daemon it is. An ordinary user's own are all files that a sandbox is shown."""
    return ORDINARY if request.param == "ordinary" else 0


@pytest.fixture
def folder(user: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mcs-writable-", dir="/var/tmp") as name:
        os.chown(name, user, user)
        yield Path(name)


async def looked(name: str, folder: Path, user: int) -> Any:
    site = next(path for path in sys.path if path.endswith("site-packages"))
    engine = Path("/var/run/docker.sock")
    variables = {name: text for name, text in os.environ.items() if name[:11] == "MCP_SANDBOX"}
    python = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    done = await anyio.run_process(
        [python, "-m", "tests.e2e.writable_places", name, str(folder / "data")],
        env={"PYTHONPATH": f"{os.getcwd()}:{site}", "PATH": "/usr/bin:/bin", **variables}
        | {"HOME": str(folder)},
        check=False,
        user=user,
        group=user,
        extra_groups=[engine.stat().st_gid] if engine.exists() else [],
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


async def test_each_place_that_code_may_write_to_is_measured_or_bounded(
    backend_name: str, folder: Path, user: int
) -> None:
    with anyio.fail_after(90):
        places, grown = await looked(backend_name, folder, user)
    on_disk = {at for at, (kind, _, _) in places.items() if kind not in ("tmpfs", "mqueue")}
    assert on_disk == _MEASURED, places
    assert grown >= len(on_disk) * 4 * MIB
    sizes = {at: size for at, (kind, size, _) in places.items() if kind == "tmpfs"}
    assert {"/tmp", "/dev/shm"} <= set(sizes)
    assert all(0 < size <= _MOST_IN_MEMORY for size in sizes.values()), sizes
