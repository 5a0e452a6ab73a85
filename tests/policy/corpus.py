"""Labelled lines: what they are graded, by whom wrote them and not by the rules."""

from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.policy import Level, assess
from mcp_sandbox.policy.rules import LEVELS

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Line:
    level: str
    language: str
    code: str

    @property
    def graded(self) -> Level:
        return assess(self.code, self.language).level


@dataclass(frozen=True)
class Accuracy:
    """How well lines that are high or worse are told from the rest."""

    lines: int
    precision: float
    recall: float
    same_level: float

    def __str__(self) -> str:
        figures = f"precision {self.precision:.3f}, recall {self.recall:.3f}"
        return f"{self.lines} lines: {figures}, the very level {self.same_level:.3f}"


def read(name: str) -> list[Line]:
    """The lines of a file: level, language and code, with `⏎` for the end of a line in it."""
    rows = (row.split("\t") for row in (FOLDER / name).read_text().splitlines())
    return [Line(level, language, code.replace("⏎", "\n")) for level, language, code in rows]


def accuracy(lines: list[Line]) -> Accuracy:
    levels = {str(level): rank for level, rank in LEVELS.items()}
    high = levels["high"]
    pairs = [(levels[line.level], levels[line.graded]) for line in lines]
    both = sum(wanted >= high and graded >= high for wanted, graded in pairs)
    found, bad = (sum(pair[i] >= high for pair in pairs) for i in (1, 0))
    same = sum(wanted == graded for wanted, graded in pairs) / len(pairs)
    return Accuracy(len(pairs), both / found, both / bad, same)
