"""What happened in a run, counted, and what should not have happened, in words."""

from collections import Counter
from dataclasses import dataclass, field

_FAULTS_KEPT = 40


@dataclass
class Tally:
    """Counts by name, and faults: each is a broken promise."""

    counts: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    oddities: list[str] = field(default_factory=list[str])

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] += by

    def fault(self, kind: str, told: str) -> None:
        self.counts[kind] += 1
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append(f"{kind}: {told}")

    def oddity(self, kind: str, told: str) -> None:
        """Something that a kill explains, but that could be told better."""
        self.counts[kind] += 1
        if len(self.oddities) < _FAULTS_KEPT:
            self.oddities.append(f"{kind}: {told}")


ROWS = (
    "calls",
    "answered",
    "ended by a kill",
    "odd errors after a kill",
    "errors without a cause",
    "lost replies",
    "mixed-up replies",
    "acknowledged changes",
    "unacknowledged changes that happened",
    "unacknowledged changes that happened late",
    "appends cut short by a kill",
    "files checked",
    "lost or wrong files",
    "servers started",
    "servers that did not start",
    "killed: runner",
    "killed: container",
    "killed: server",
)


def table(tally: Tally, title: str, remains: dict[str, dict[str, int]]) -> str:
    """Counts for people: what was done, then what is left at each moment looked at."""
    lines = [title, *(f"  {row:<41}{tally.counts[row]:>9,}" for row in ROWS)]
    moments = list(remains)
    if moments:
        lines.append(f"  {'left behind':<26}" + "".join(f"{moment:>22}" for moment in moments))
        lines += [
            f"    {kind:<24}" + "".join(f"{remains[moment][kind]:>22,}" for moment in moments)
            for kind in remains[moments[0]]
        ]
    lines += [f"  FAULT {fault}" for fault in tally.faults]
    lines += [f"  odd   {oddity}" for oddity in tally.oddities]
    return "\n".join(lines) + "\n"
