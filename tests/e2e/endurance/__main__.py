"""`python -m tests.e2e.endurance`: run, print the table, and exit 1 when a promise was broken."""

import argparse
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import anyio

from tests.e2e.endurance.run import Plan, run
from tests.e2e.endurance.tally import table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.endurance")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--backend", choices=("docker", "bubblewrap"), required=True)
    parser.add_argument("--chats", type=int, default=3, help="chats under load and kills")
    parser.add_argument("--kill-every", type=float, default=4.0, help="seconds, mean, per chat")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mcs-endurance-"))
    plan = Plan(
        backend=given.backend,
        data=folder / "data",
        seconds=given.minutes * 60,
        seed=given.seed,
        chats=given.chats,
        mean_kill_s=given.kill_every,
        networks=("none", "open"),
    )
    tally, remains = anyio.run(run, plan)
    title = f"endurance on {given.backend}: {given.minutes:g} min of load, seed {given.seed}"
    sys.stdout.write(table(tally, title, remains))
    running = any(left["processes"] + left["containers"] for left in remains.values())
    if tally.faults or running:
        sys.stdout.write(f"data kept: {folder}\n")
        return 1
    shutil.rmtree(folder)
    return 0


sys.exit(main())
