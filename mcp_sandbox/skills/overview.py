"""The catalogue as text for a model, within a budget, saying what it leaves out.

What skills say of themselves was written by anybody: each gets one line, in which nothing breaks
the line, hides, or changes the direction of reading. The files themselves stay as they are.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mcp_sandbox.skills.models import Skill
from mcp_sandbox.skills.words import terms

MOST_OF_A_DESCRIPTION = 1536
_LEAST_OF_A_DESCRIPTION = 40
_LONGEST_NAME = 64
_MOST_GROUPS = 100
# Controls, formats (direction marks, zero width, tags), lone surrogates, private, line ends.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


Kind = Literal["descriptions", "names", "subjects"]


@dataclass(frozen=True)
class Overview:
    """Lines on skills: how many are `shown`, of these `cut` in what they say, and `hidden`."""

    kind: Kind
    text: str
    shown: int
    cut: int
    hidden: int


def overview(skills: Sequence[Skill], budget: int) -> Overview:
    """What fits into so many characters: descriptions, shorter ones, names, or their subjects.

    Every skill is treated alike, so that the same skills always give the same text.
    """
    cards = [(call_name(skill), one_line(skill.front.description)) for skill in skills]
    most = _longest_that_fits(cards, budget)
    if most:
        lines = [f"- {name}: {cut_short(said, most)}" for name, said in cards]
        longer = sum(len(said) > most for _, said in cards)
        return Overview("descriptions", "\n".join(lines), len(cards), longer, 0)
    names = ", ".join(name for name, _ in cards)
    if len(names) <= budget:
        return Overview("names", names, len(cards), len(cards), 0)
    return Overview("subjects", _subjects_of(skills, budget), 0, 0, len(cards))


def _longest_that_fits(cards: Sequence[tuple[str, str]], budget: int) -> int:
    """How much of each description there is room for; 0 when less than is worth reading."""
    room = budget - sum(len(name) + len("- : \n") for name, _ in cards)

    def fits(most: int) -> bool:
        return sum(min(len(said), most) for _, said in cards) <= room

    low, high = _LEAST_OF_A_DESCRIPTION, MOST_OF_A_DESCRIPTION
    if not fits(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _subjects_of(skills: Sequence[Skill], budget: int) -> str:
    """What they are about and how often, the most frequent first, as far as there is room."""
    counted = Counter(group for skill in skills for group in _subjects(skill))
    frequent = sorted(counted.items(), key=lambda each: (-each[1], each[0]))[:_MOST_GROUPS]
    text = ""
    for group, number in frequent:
        longer = f"{text}, {group} ({number:,})" if text else f"{group} ({number:,})"
        if len(longer) > budget:
            break
        text = longer
    return text


def _subjects(skill: Skill) -> Iterable[str]:
    """What its author filed it under, else the words of its name."""
    filed = skill.front.metadata.get("category") or skill.front.fields.get("category")
    if isinstance(filed, str) and one_line(filed):
        return (cut_short(one_line(filed), 40),)
    return (word for word in terms(one_line(skill.name)) if not word.isdigit())


def call_name(skill: Skill) -> str:
    """By what it is asked for: its name, if that means this one and can be read; else its uri."""
    plain = one_line(skill.name) == skill.name and len(skill.name) <= _LONGEST_NAME
    return skill.name if plain and skill.shadowed_by is None else skill.uri


def one_line(text: str) -> str:
    """The text on one line, without characters that are not seen."""
    if text.isprintable():
        # Most texts are, and one by one their characters take long.
        return " ".join(text.split())
    seen = (" " if char.isspace() else char for char in text)
    return " ".join("".join(c for c in seen if unicodedata.category(c) not in _UNSEEN).split())


def cut_short(text: str, most: int) -> str:
    """The text, or as much of it as there is room for, with a sign where it was cut."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"
