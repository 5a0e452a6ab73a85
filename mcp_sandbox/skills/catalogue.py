"""The skills of all roots of a chat at one moment. Immutable, no I/O."""

import difflib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property

from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.skills.overview import words
from mcp_sandbox.skills.skill import Problem, Skill
from mcp_sandbox.skills.uris import DOCUMENT, SCHEME

_NEAREST_OF = 300


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
        """Return the uris of the skills that were added, removed or edited."""
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
        shown = f"there is no skill {name[:140]!r}"
        by_name = (skill for skill in self.skills if skill.shadowed_by is None)
        offered = [skill for skill in by_name if skill.front.model_invocable]
        names = [skill.name for skill in offered]
        asked = words(name[:64])
        # Comparing is slow: only some names of about that length are compared.
        alike = [known for known in names if abs(len(known) - len(name)) <= 3]
        near = difflib.get_close_matches("-".join(asked), alike[:_NEAREST_OF], n=1)
        for skill in offered[:_NEAREST_OF] if asked else ():
            if {*asked} <= {*words(f"{skill.name} {skill.front.description}")}:
                near.append(skill.name)
        if near:
            return f"{shown}: the nearest is {near[0]!r}; {listing} shows all"
        some = f" ({', '.join(names)})" if 0 < len(names) <= 12 else ""
        return f"{shown}: {listing} shows those that there are{some}"


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
