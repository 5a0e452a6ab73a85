"""The meter holds the limits with few measurements."""

from collections.abc import Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import SandboxError, StorageUnavailable, WorkspaceFull
from mcp_sandbox.workspace.meter import (
    Checkpoint,
    DiskUsage,
    FreeSpace,
    Measurement,
    TreeUsage,
    find_overshoot,
    measuring_interval_s,
    refusal,
)

MIB = 1024**2
CONFIG = WorkspaceConfig(size_limit=100 * MIB, max_files=1000, min_free=50 * MIB)
PLENTY = FreeSpace(10_000 * MIB, 1_000_000)


class Disk:
    """A tree and a clock for the meter, set by the test; measuring takes `cost_s`."""

    def __init__(self) -> None:
        self.usage = TreeUsage(10 * MIB, 10)
        self.free = PLENTY
        self.now = 1000.0
        self.cost_s = 0.01
        self.measured = 0
        self.on_measure: Callable[[Checkpoint], None] = lambda _: None

    def measure(self, checkpoint: Checkpoint) -> tuple[TreeUsage, FreeSpace]:
        self.measured += 1
        self.now += self.cost_s
        self.on_measure(checkpoint)
        return self.usage, self.free

    def meter(self) -> DiskUsage:
        limiter = anyio.CapacityLimiter(1)
        return DiskUsage(self.measure, CONFIG, limiter=limiter, clock=lambda: self.now)


def test_a_reading_is_good_for_a_quarter_of_a_second_or_twenty_times_its_cost() -> None:
    assert measuring_interval_s(0.001) == 0.25
    assert measuring_interval_s(0.5) == 10


@pytest.mark.parametrize(
    ("usage", "free", "adding", "error", "text"),
    [
        (TreeUsage(99 * MIB, 1), PLENTY, 0, None, ""),
        (TreeUsage(100 * MIB, 1), PLENTY, 0, None, ""),
        (TreeUsage(100 * MIB, 1), PLENTY, 1, WorkspaceFull, "100 MiB of 100 MiB are used"),
        (TreeUsage(101 * MIB, 1), PLENTY, 0, WorkspaceFull, "delete files"),
        (TreeUsage(1, 1000), PLENTY, 0, None, ""),
        (TreeUsage(1, 1001), PLENTY, 0, WorkspaceFull, "1001 files and directories, 1000 are"),
        (TreeUsage(1, 1), FreeSpace(50 * MIB, None), 0, None, ""),
        (TreeUsage(1, 1), FreeSpace(50 * MIB, None), 1, StorageUnavailable, "50 MiB left"),
        (TreeUsage(1, 1), FreeSpace(99 * MIB, 3), 0, StorageUnavailable, "only 3 more files"),
    ],
)
def test_writes_are_refused_exactly_beyond_a_limit(
    usage: TreeUsage, free: FreeSpace, adding: int, error: type[SandboxError] | None, text: str
) -> None:
    problem = refusal(usage, free, CONFIG, adding)
    assert type(problem) is (error or type(None))
    assert text in str(problem)


def reading(usage: TreeUsage, free: FreeSpace = PLENTY) -> Measurement:
    return Measurement(usage, free, taken_at=0.0, duration_s=0.0)


def test_a_call_in_a_full_workspace_may_run_as_long_as_it_adds_nothing() -> None:
    full = reading(TreeUsage(150 * MIB, 10))
    assert find_overshoot(full, full, CONFIG) is None
    assert find_overshoot(full, reading(TreeUsage(120 * MIB, 10)), CONFIG) is None
    assert isinstance(
        find_overshoot(full, reading(TreeUsage(152 * MIB, 10)), CONFIG), WorkspaceFull
    )
    assert (
        find_overshoot(reading(TreeUsage(1, 1)), reading(TreeUsage(99 * MIB, 10)), CONFIG) is None
    )
    many = reading(TreeUsage(1, 2000))
    assert isinstance(find_overshoot(many, reading(TreeUsage(1, 3000)), CONFIG), WorkspaceFull)


def test_a_call_that_fills_the_disk_by_files_in_no_tree_is_ended() -> None:
    empty = TreeUsage(1, 1)
    before = reading(empty, FreeSpace(60 * MIB, None))
    after = reading(empty, FreeSpace(40 * MIB, None))
    assert isinstance(find_overshoot(before, after, CONFIG), StorageUnavailable)


async def test_many_questions_cost_one_measurement() -> None:
    disk = Disk()
    meter = disk.meter()
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(meter.check_room)
        assert (await meter.usage()).used_bytes == 10 * MIB
        assert disk.measured == 1
        disk.now += 0.2
        await meter.usage()
        assert disk.measured == 1
        disk.now += 0.1
        await meter.usage()
        assert disk.measured == 2


async def test_an_expensive_tree_is_measured_less_often() -> None:
    disk = Disk()
    disk.cost_s = 1.0
    meter = disk.meter()
    with anyio.fail_after(5):
        await meter.usage()
        disk.now += 19
        await meter.usage()
        assert disk.measured == 1
        disk.now += 2
        await meter.usage()
        assert disk.measured == 2


@pytest.mark.parametrize("noted", [True, False])
async def test_after_a_deletion_a_full_chat_may_write_at_once(*, noted: bool) -> None:
    """Also if what deletes is no call: a process in the background, or a person on the host."""
    disk = Disk()
    disk.usage, disk.cost_s = TreeUsage(200 * MIB, 10), 1.0
    meter = disk.meter()
    with anyio.fail_after(5):
        assert await meter.find_problem() is not None
        disk.now += 0.1
        with pytest.raises(WorkspaceFull):
            await meter.check_room()
        assert disk.measured == 2
        disk.now += 0.1
        disk.usage = TreeUsage(20 * MIB, 10)
        if noted:
            meter.note_change()
        await meter.check_room(adding=79 * MIB)
        disk.now += 0.1
        with pytest.raises(WorkspaceFull):
            await meter.check_room(adding=2 * MIB)
        disk.free = FreeSpace(10 * MIB, None)
        disk.now += 100
        assert await meter.find_problem() is not None
        disk.free = PLENTY
        disk.now += 0.1
        assert await meter.find_problem() is None


async def test_an_overshooting_call_is_noticed() -> None:
    disk = Disk()

    def grow(_: Checkpoint) -> None:
        if disk.measured == 3:
            disk.usage = TreeUsage(101 * MIB, 11)

    disk.on_measure = grow
    limiter = anyio.CapacityLimiter(1)
    meter = DiskUsage(disk.measure, CONFIG, limiter=limiter, least_interval_s=0.01)
    with anyio.fail_after(5):
        problem = await meter.wait_for_overshoot()
    assert disk.measured == 3
    assert isinstance(problem, WorkspaceFull)


async def test_a_measurement_has_a_deadline() -> None:
    disk = Disk()

    def endless(step: Checkpoint) -> None:
        try:
            while True:
                step()
        except TimeoutError:
            disk.usage = TreeUsage(1, 1, complete=False)

    disk.on_measure = endless
    meter = DiskUsage(disk.measure, CONFIG, limiter=anyio.CapacityLimiter(1), deadline_s=0.05)
    with anyio.fail_after(5):
        assert not (await meter.usage()).exact


async def test_an_incomplete_measurement_is_not_called_exact() -> None:
    disk = Disk()
    disk.usage = TreeUsage(10 * MIB, 10, complete=False)
    with anyio.fail_after(5):
        assert not (await disk.meter().usage()).exact


async def test_cancelling_stops_a_long_measurement() -> None:
    disk = Disk()
    meter = disk.meter()
    started = anyio.Event()

    def endless(step: Checkpoint) -> None:
        anyio.from_thread.run_sync(started.set)
        while True:
            step()

    disk.on_measure = endless
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(meter.usage)
            await started.wait()
            group.cancel_scope.cancel()
        disk.on_measure = lambda _: None
        await checkpoint()
        assert (await meter.usage()).used_bytes == 10 * MIB


async def test_what_a_failed_measurement_did_not_see_is_looked_at_by_the_next() -> None:
    disk = Disk()
    meter = disk.meter()
    await meter.check_room(1)
    meter.note_change()
    disk.usage = TreeUsage(101 * MIB, 10)

    def fail(_: Checkpoint) -> None:
        raise StorageUnavailable("the disk does not answer")

    disk.on_measure = fail
    with pytest.raises(StorageUnavailable):
        await meter.check_room(1)
    disk.on_measure = lambda _: None
    with pytest.raises(WorkspaceFull):
        await meter.check_room(1)
