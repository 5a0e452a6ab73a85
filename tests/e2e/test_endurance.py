"""Some seconds of what `python -m tests.e2e.endurance` does for minutes."""

import os
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import BackendName
from tests.backends.live import connected, made, spec_for, state_of
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.endurance.ledger import Found, Ledger, Possible, digest
from tests.e2e.endurance.run import Plan, run
from tests.e2e.endurance.tally import table

LOAD_S = 4
CROWD = 8
# Many containers at once keep an engine from all others.
ENGINE_FILLED = pytest.param(*DOCKER.values, marks=(*DOCKER.marks, pytest.mark.alone))
# Nothing of these may outlive the idle time; what a killed server wrote down is swept up later.
RUNNING = ("processes", "containers", "mounts")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", [ENGINE_FILLED, BUBBLEWRAP])
async def test_random_kills_lose_no_file_and_no_reply_and_leave_nothing(
    backend: BackendName, data_root: Path
) -> None:
    networks = ("none", "open")
    plan = Plan(backend, data_root, LOAD_S, 20, crowd=CROWD, mean_kill_s=0.7, networks=networks)
    with anyio.fail_after(280):
        tally, remains = await run(plan)
    report = table(tally, f"endurance on {backend}", remains)
    assert not tally.faults, report
    assert tally.counts["answered"] > 100, report
    assert all(tally.counts[f"killed: {what}"] for what in ("runner", "container", "server"))
    first, last = remains.values()
    assert not any(first[kind] for kind in RUNNING), report
    assert not any(last.values()), report


@pytest.mark.bubblewrap
async def test_a_write_whose_runner_dies_with_the_body_under_way_does_not_happen(
    tmp_path: Path,
) -> None:
    """The kernel closes the runner's pipes before it kills the rest: that is no end of a body."""
    config = Config(data_dir=tmp_path / "data", backend="bubblewrap")
    spec = spec_for(tmp_path)
    target = tmp_path / "workspace" / "a"
    with anyio.fail_after(50):
        async with open_backend("bubblewrap", config) as backend:
            for _ in range(8):
                target.write_bytes(b"old")
                target.chmod(0o666)
                async with made(backend, spec) as sandbox:
                    state = state_of(config.data_dir, sandbox.id)
                    await killed_while_writing(sandbox, state["process"]["pid"])
                assert target.read_bytes() == b"old"


async def killed_while_writing(sandbox: Sandbox, runner: int) -> None:
    async def body() -> AsyncGenerator[bytes]:
        yield b"half of the new content"
        # Calls are taken in order: once these are answered, the write has its half.
        for _ in range(5):
            await runtime.status()
        os.kill(runner, signal.SIGKILL)
        await anyio.sleep_forever()

    async with connected(sandbox) as runtime:
        # It leaves a worker behind that takes the next write at once.
        await runtime.files.write("b", b"")
        with pytest.raises(SandboxGone):
            await runtime.files.write("a", body())


def seen(data: bytes) -> Found:
    return Found(len(data), digest(data))


def test_the_ledger_notices_a_lost_and_a_changed_file() -> None:
    ledger = Ledger()
    ledger.acknowledge("a", b"old")
    ledger.acknowledge("b", b"old")
    assert "absent, not 3..3 bytes" in ledger.see("a", None)
    assert "not 3..3 bytes" in ledger.see("b", seen(b"new"))
    assert "not absent" in ledger.see("never written", seen(b""))


def test_the_ledger_lets_an_unanswered_change_happen_or_not() -> None:
    for found, told in ((b"ab", ""), (b"abcd", "happened"), (b"abc", "cut short"), (b"x", "x is")):
        ledger = Ledger()
        ledger.acknowledge("x", b"ab")
        ledger.doubt("x", Possible(b"ab", b"cd"))
        assert ledger.see("x", seen(found)).startswith(told)
        assert bool(told.startswith("x is")) or ledger.content("x") == found


def test_an_unanswered_change_may_come_late_but_not_undo_what_was_acknowledged_since() -> None:
    ledger = Ledger()
    ledger.doubt("x", Possible(b"new"))
    assert ledger.see("x", None) == ""
    assert ledger.see("x", seen(b"new")) == "late"
    ledger.doubt("x", Possible(None))
    assert ledger.see("x", seen(b"new")) == ""
    ledger.acknowledge("x", b"newer")
    assert "x is absent" in ledger.see("x", None)


def test_an_unanswered_replacement_may_not_happen_in_part() -> None:
    ledger = Ledger()
    ledger.acknowledge("x", b"ab")
    ledger.doubt("x", Possible(b"new content"))
    assert "x is" in ledger.see("x", seen(b"new"))
