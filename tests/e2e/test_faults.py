"""A few strokes of what `python -m tests.e2e.faults` does fifty times."""

import os
from pathlib import Path

import anyio
import pytest

from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.faults import engine
from tests.e2e.faults.report import table
from tests.e2e.faults.run import FAULTS, Fault, run

TIMES = 1
MOUNTS = {"disk"}


def case(fault: Fault) -> object:
    place = BUBBLEWRAP if "bubblewrap" in fault.backends else DOCKER
    # An engine of its own takes all cores as it starts.
    alone = [pytest.mark.alone] if fault.name == "engine" else []
    return pytest.param(fault, place.values[0], id=fault.name, marks=(*place.marks, *alone))


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("fault", "backend"), [case(fault) for fault in FAULTS])
async def test_fault(fault: Fault, backend: str, tmp_path: Path) -> None:
    if fault.name == "engine" and (reason := engine.absent()):
        pytest.skip(reason)
    if fault.name in MOUNTS and os.geteuid() != 0:
        pytest.skip("a small disk needs root to be mounted")
    with anyio.fail_after(180):
        report = await run(fault, backend, TIMES, 7, tmp_path)
    assert not report.broken, table([report], 7)
    assert report.tally.counts["acknowledged changes"] > 0
