"""Rules: what code is looked for, and how bad it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["safe", "low", "medium", "high", "critical"]
LEVELS: dict[str, int] = {"safe": 0, "low": 1, "medium": 2, "high": 3, "critical": 4}


@dataclass(frozen=True)
class Match:
    """A rule that applies: what it destroys or where it sends something is its `target`."""

    rule: str
    level: Level
    tags: frozenset[str]
    reason: str
    target: str = ""


@dataclass(frozen=True)
class Rules:
    """The rules of every language."""


def load_rules(files: Sequence[Path] = ()) -> Rules:
    """Return the shipped rules and those of the operator's files."""
    _ = files
    return Rules()
