"""What is offered at one moment: the skills of all roots of a chat. Immutable, no I/O."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.skills.models import Change, Problem, Skill
from mcp_sandbox.skills.uris import DOCUMENT, SCHEME
from mcp_sandbox.skills.words import words

_NEAREST_OF = 300
_FEW = 12


@dataclass(frozen=True)
class Catalogue:
    """All skills, those of the roots with precedence first, then by name.

    Of several with one name all but the first have `shadowed_by` set: they are meant by their uri
    or `root/name` only. `problems` has every folder with a SKILL.md of any spelling that is not
    among them, and what of the roots was not searched. `versions` tells one state of a skill's
    SKILL.md from another, by uri.
    """

    skills: tuple[Skill, ...] = ()
    problems: tuple[Problem, ...] = ()
    versions: Mapping[str, object] = field(default_factory=dict[str, object], repr=False)

    def find(self, name: str) -> Skill:
        """The skill that a bare name, `root/name`, `root/folders/name` or uri means.

        Raises:
            UnknownSkill: none; the message names the nearest.
        """
        for known in (self.by_uri, self._by_name, self._qualified):
            if (skill := known.get(name)) is not None:
                return skill
        raise UnknownSkill(self._unknown(name))

    def offered(self, *, for_model: bool = True) -> tuple[Skill, ...]:
        """The skills that bare names mean; for a model without those that only users may invoke."""
        return self._for_models if for_model else tuple(self._by_name.values())

    def change_since(self, before: "Catalogue") -> Change:
        """What came, went or was edited."""
        old, new = before.versions, self.versions
        edited = (uri for uri in old.keys() & new.keys() if old[uri] != new[uri])
        return Change(
            frozenset(new.keys() - old.keys()),
            frozenset(old.keys() - new.keys()),
            frozenset(edited),
        )

    @cached_property
    def by_uri(self) -> Mapping[str, Skill]:
        """All skills by their uris."""
        return {skill.uri: skill for skill in self.skills}

    @cached_property
    def unusable(self) -> tuple[Problem, ...]:
        """The problems without those that only tell how far was searched."""
        noted = (all(each.level == "note" for each in one.diagnostics) for one in self.problems)
        return tuple(one for one, is_note in zip(self.problems, noted, strict=True) if not is_note)

    @cached_property
    def _by_name(self) -> Mapping[str, Skill]:
        return {skill.name: skill for skill in self.skills if skill.shadowed_by is None}

    @cached_property
    def _qualified(self) -> Mapping[str, Skill]:
        found: dict[str, Skill] = {}
        for skill in self.skills:
            found.setdefault(f"{skill.root}/{skill.name}", skill)
        for skill in self.skills:
            path = skill.uri.removeprefix(SCHEME).removesuffix(f"/{DOCUMENT}")
            found.setdefault(path, skill)
        return found

    @cached_property
    def _for_models(self) -> tuple[Skill, ...]:
        return tuple(skill for skill in self._by_name.values() if skill.front.model_invocable)

    def _unknown(self, name: str) -> str:
        shown = f"there is no skill {name[:140]!r}"
        names = [skill.name for skill in self._for_models]
        asked = words(name[:64])
        # Comparing is slow: only names of about that length are looked at, and not too many.
        alike = [known for known in names if abs(len(known) - len(name)) <= 3]
        near = difflib.get_close_matches("-".join(asked), alike[:_NEAREST_OF], n=1)
        for skill in self._for_models[:_NEAREST_OF] if asked else ():
            if {*asked} <= {*words(f"{skill.name} {skill.front.description}")}:
                near.append(skill.name)
        if near:
            return f"{shown}: the nearest is {near[0]!r}; skills_list shows all"
        some = f" ({', '.join(names)})" if 0 < len(names) <= _FEW else ""
        return f"{shown}: skills_list shows those that there are{some}"


def merge(parts: Iterable["Catalogue"]) -> Catalogue:
    """One catalogue of those of several roots, which come by precedence."""
    skills: list[Skill] = []
    problems: list[Problem] = []
    versions: dict[str, object] = {}
    winners: dict[str, str] = {}
    for part in parts:
        for skill in part.skills:
            winner = winners.setdefault(skill.name, skill.uri)
            shadowed = winner != skill.uri
            skills.append(replace(skill, shadowed_by=winner) if shadowed else skill)
        problems += part.problems
        versions.update(part.versions)
    return Catalogue(tuple(skills), tuple(problems), versions)
