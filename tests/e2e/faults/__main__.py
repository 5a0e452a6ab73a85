"""`python -m tests.e2e.faults`: strike, print the counts, and exit 1 when a promise was broken."""

import argparse
import secrets
import sys
import time

import anyio

from tests.e2e.faults.report import table
from tests.e2e.faults.run import FAULTS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.faults")
    parser.add_argument("--times", type=int, default=50, help="how often each fault strikes")
    parser.add_argument("--backend", choices=("docker", "bubblewrap"), default="bubblewrap")
    parser.add_argument("--only", action="append", choices=[fault.name for fault in FAULTS])
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    given = parser.parse_args()
    reports = []
    for fault in FAULTS:
        if fault.name in (given.only or [fault.name]):
            # What makes sense on one backend only is shown there.
            backend = given.backend if given.backend in fault.backends else fault.backends[0]
            started = time.monotonic()
            reports.append(anyio.run(run, [fault], backend, given.times, given.seed, None))
            taken = time.monotonic() - started
            sys.stderr.write(table(reports[-1:], given.seed) + f"  in {taken:.0f} s\n")
    sys.stdout.write(table(reports, given.seed))
    return int(any(report.broken for report in reports))


if __name__ == "__main__":
    sys.exit(main())
