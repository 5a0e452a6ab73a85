"""`mcp-sandbox` whose clocks a file sets: `python -m tests.e2e.faults.clocked FILE serve …`.

FILE holds two numbers of seconds: what the wall clock shows too much, and how much more time has
passed, by every clock, than really has.
"""

import sys
import time
from pathlib import Path

_wall, _steady = time.time, time.clock_gettime


def _ahead(file: Path) -> tuple[float, float]:
    jump, passed = file.read_text().split()
    return float(jump), float(passed)


def main() -> None:
    """Set the clocks before anything of the program has been imported."""
    file = Path(sys.argv.pop(1))

    def wall() -> float:
        return _wall() + sum(_ahead(file))

    def steady(which: int) -> float:
        return _steady(which) + (_ahead(file)[1] if which == time.CLOCK_BOOTTIME else 0.0)

    time.time, time.clock_gettime = wall, steady
    from mcp_sandbox.cli import main as mcp_sandbox

    mcp_sandbox()


if __name__ == "__main__":
    main()
