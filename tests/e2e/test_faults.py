"""A few strokes of what `python -m tests.e2e.faults` does fifty times."""

import os
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from tests.e2e.attacks import BUBBLEWRAP, DOCKER, WHOLE
from tests.e2e.faults import engine, ground
from tests.e2e.faults.report import table
from tests.e2e.faults.run import FAULTS, Fault, run

TIMES = 1
MOUNTS = {"disk"}


# One world stands all of these, one after another; with --whole each has its own as well.
TOGETHER = tuple(fault for fault in FAULTS if fault.ground is ground.folder)


def case(fault: Fault) -> object:
    place = BUBBLEWRAP if "bubblewrap" in fault.backends else DOCKER
    # An engine of its own takes all cores as it starts.
    marks = [pytest.mark.alone] if fault.name == "engine" else []
    marks += [WHOLE] if fault in TOGETHER else []
    return pytest.param([fault], place.values[0], id=fault.name, marks=(*place.marks, *marks))


CASES = [pytest.param(TOGETHER, *BUBBLEWRAP.values, id="together", marks=BUBBLEWRAP.marks)]


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("faults", "backend"), [*CASES, *map(case, FAULTS)])
async def test_fault(faults: Sequence[Fault], backend: str, tmp_path: Path) -> None:
    names = {fault.name for fault in faults}
    if "engine" in names and (reason := engine.absent()):
        pytest.skip(reason)
    if names & MOUNTS and os.geteuid() != 0:
        pytest.skip("a small disk needs root to be mounted")
    with anyio.fail_after(180):
        report = await run(faults, backend, TIMES, 7, tmp_path)
    assert not report.broken, table([report], 7)
    assert report.tally.counts["acknowledged changes"] > 0
