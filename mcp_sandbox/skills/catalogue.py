"""What is offered at one moment: the skills of all roots of a chat. Immutable, no I/O.

As text for a model it keeps to a budget, and says what it leaves out.

Descriptions are untrusted text: each gets one line, without line breaks, hidden characters or
marks that change the direction of reading. The files themselves stay as they are.

The words of texts and queries are found here, too: without stop words, and corrected if mistyped.
"""

import difflib
import re
import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import accumulate, islice
from typing import Literal

from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.skills.skill import DOCUMENT, SCHEME, Problem, Skill

MOST_OF_A_DESCRIPTION = 1536
_LEAST_OF_A_DESCRIPTION = 40
_LONGEST_NAME = 64
# Controls, formats (direction marks, zero width, tags), lone surrogates, private, line ends.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# One letter makes another word of a shorter one: "two" is no mistyped "to".
_SHORTEST_MISTYPED = 5
_WORD = re.compile(r"[^\W_]+")
# Scripts without spaces between words: every character counts as a word, a run as a phrase.
_UNSPACED = re.compile(r"([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff])")

_EMPTY_WORDS = """
a about after all also an and any are as at be been before but by can could did do does each every
few for from get give has have help how i if in into is it its just let like make many me more
most my need new not now of off on once one only or other our out over own per please should so some
such than that the their them then there these they this those three to too two up upon us use used
user using want was way we well why were what when where which while who will with would you your
"""
_EMPTY = frozenset(_EMPTY_WORDS.split())
_NEAREST_OF = 300


@dataclass(frozen=True)
class Overview:
    """Lines on skills: how many are `shown`, of these `cut` in what they say, and `hidden`."""

    kind: Literal["descriptions", "names", "subjects"]
    text: str
    shown: int
    cut: int
    hidden: int


def build_overview(skills: Sequence[Skill], budget: int) -> Overview:
    """Return what fits into `budget` characters: descriptions, cut ones, names or subjects.

    Every skill is treated alike, so that the same skills always give the same text.
    """
    cards = [(call_name(skill), one_line(skill.front.description)) for skill in skills]
    most = _longest_that_fits(cards, budget)
    if most:
        lines = [f"- {name}: {cut_short(description, most)}" for name, description in cards]
        longer = sum(len(description) > most for _, description in cards)
        return Overview("descriptions", "\n".join(lines), len(cards), longer, 0)
    names = ", ".join(name for name, _ in cards)
    if len(names) <= budget:
        return Overview("names", names, len(cards), len(cards), 0)
    return Overview("subjects", _subjects_of(skills, budget), 0, 0, len(cards))


def _longest_that_fits(cards: Sequence[tuple[str, str]], budget: int) -> int:
    """Return how many characters of each description fit; 0 if too few to be worth reading."""
    room = budget - sum(len(name) + len("- : \n") for name, _ in cards)

    def needs(most: int) -> int:
        return sum(min(len(description), most) for _, description in cards)

    longest = bisect_right(range(MOST_OF_A_DESCRIPTION + 1), room, key=needs) - 1
    return longest if longest >= _LEAST_OF_A_DESCRIPTION else 0


def _subjects_of(skills: Sequence[Skill], budget: int) -> str:
    counted = Counter(group for skill in skills for group in _subjects(skill))
    frequent = sorted(counted.items(), key=lambda each: (-each[1], each[0]))[:100]
    texts = accumulate((f"{group} ({number:,})" for group, number in frequent), "{}, {}".format)
    return max((text for text in texts if len(text) <= budget), key=len, default="")


def _subjects(skill: Skill) -> Iterable[str]:
    filed = skill.front.metadata.get("category") or skill.front.fields.get("category")
    if isinstance(filed, str) and one_line(filed):
        return (cut_short(one_line(filed), 40),)
    return (word for word in split_query(one_line(skill.name)) if not word.isdigit())


def call_name(skill: Skill) -> str:
    """Return how calls name a skill: by its name if that is plain and not shadowed, or its uri."""
    plain = one_line(skill.name) == skill.name and len(skill.name) <= _LONGEST_NAME
    return skill.name if plain and skill.shadowed_by is None else skill.uri


def one_line(text: str) -> str:
    """Return the text on one line, without invisible characters."""
    if text.isprintable():
        # Most texts are, and one by one their characters take long.
        return " ".join(text.split())
    seen = (" " if char.isspace() else char for char in text)
    return " ".join("".join(c for c in seen if unicodedata.category(c) not in _UNSEEN).split())


def cut_short(text: str, most: int) -> str:
    """Return the text, cut to at most `most` characters with an ellipsis at the end."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def spaced(text: str) -> str:
    """Put spaces around each character of a script that has none between words."""
    return _UNSPACED.sub(r" \1 ", text)


def split_words(text: str) -> list[str]:
    """Return the words of a text in lower case; a run of an unspaced script counts as one."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def split_query(query: str) -> tuple[str, ...]:
    """Return the distinct words of a query, without stop words if others remain."""
    found = dict.fromkeys(word[:40] for word in split_words(query))
    return tuple(([word for word in found if word not in _EMPTY] or [*found])[:16])


def find_near_words(term: str, known: Iterable[str]) -> list[str]:
    """Return the known words that a mistyped one may have meant, the nearest first."""
    if len(term) < _SHORTEST_MISTYPED:
        return []
    lengths = range(_SHORTEST_MISTYPED, len(term) + 3)
    alike = (word for word in known if word[0] == term[0] and len(word) in lengths)
    # Comparing is slow: of very many that begin alike only the first are looked at.
    some = [word for word in islice(alike, 1000) if word not in _EMPTY]
    return get_close_matches(term, some, n=3, cutoff=0.8)


@dataclass(frozen=True, eq=False)
class Catalogue:
    """All skills, those of the roots with precedence first, then by name.

    Of several with one name all but the first have `shadowed_by` set: only their uri or `root/name`
    finds them. `problems` has every folder with a SKILL.md of any spelling that is not
    among them, and what of the roots was not searched.
    """

    skills: tuple[Skill, ...] = ()
    problems: tuple[Problem, ...] = ()

    def find(self, name: str, listing: str = "skills_list") -> Skill:
        """Return the skill that a bare name, `root/name`, `root/folders/name` or uri means.

        Raises UnknownSkill: none; the message names the nearest, and `listing` for the others.
        """
        if (skill := self._meant.get(name)) is not None:
            return skill
        raise UnknownSkill(self._unknown(name, listing))

    def changed_since(self, before: "Catalogue") -> Set[str]:
        old, new = before.by_uri, self.by_uri
        edited = {uri for uri in old.keys() & new.keys() if old[uri].stamp != new[uri].stamp}
        return (old.keys() ^ new.keys()) | edited

    @cached_property
    def by_uri(self) -> Mapping[str, Skill]:
        return {skill.uri: skill for skill in self.skills}

    @cached_property
    def unusable(self) -> tuple[Problem, ...]:
        """Return the problems without those that only say how far the search went."""
        return tuple(
            one for one in self.problems if any(each.level != "note" for each in one.diagnostics)
        )

    @cached_property
    def _meant(self) -> Mapping[str, Skill]:
        found = {**self.by_uri}
        for skill in self.skills:
            if skill.shadowed_by is None:
                found.setdefault(skill.name, skill)
        for skill in self.skills:
            found.setdefault(f"{skill.root}/{skill.name}", skill)
        for uri, skill in self.by_uri.items():
            found.setdefault(uri.removeprefix(SCHEME).removesuffix(f"/{DOCUMENT}"), skill)
        return found

    def _unknown(self, name: str, listing: str) -> str:
        message = f"there is no skill {name[:140]!r}"
        by_name = (skill for skill in self.skills if skill.shadowed_by is None)
        offered = [skill for skill in by_name if skill.front.model_invocable]
        names = [skill.name for skill in offered]
        asked = split_words(name[:64])
        # Comparing is slow: only some names of about that length are compared.
        alike = [known for known in names if abs(len(known) - len(name)) <= 3]
        near = difflib.get_close_matches("-".join(asked), alike[:_NEAREST_OF], n=1)
        for skill in offered[:_NEAREST_OF] if asked else ():
            if {*asked} <= {*split_words(f"{skill.name} {skill.front.description}")}:
                near.append(skill.name)
        if near:
            return f"{message}: the nearest is {near[0]!r}; {listing} shows all"
        some = f" ({', '.join(names)})" if 0 < len(names) <= 12 else ""
        return f"{message}: {listing} shows those that there are{some}"


def merge(parts: Iterable[Catalogue]) -> Catalogue:
    """Merge the catalogues of several roots, which come in order of precedence."""
    skills: list[Skill] = []
    problems: list[Problem] = []
    winners: dict[str, str] = {}
    for part in parts:
        for skill in part.skills:
            winner = winners.setdefault(skill.name, skill.uri)
            skills.append(skill if winner == skill.uri else replace(skill, shadowed_by=winner))
        problems += part.problems
    return Catalogue(tuple(skills), tuple(problems))
