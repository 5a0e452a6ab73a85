"""Rules: what is looked for in code, and how bad it is. All but reading their files is pure."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.reading.commands import DYNAMIC

Level = Literal["safe", "low", "medium", "high", "critical"]
LEVELS: Mapping[Level, int] = {"safe": 0, "low": 1, "medium": 2, "high": 3, "critical": 4}

UNKNOWN = "…"
"""Stands in a match for what is known only when the code runs."""
# Letters and marks without a shape; what else shows nothing is not printable.
_SHAPELESS = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]"
)
# libyaml is ten times as fast, where PyYAML has it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_SHIPPED = Path(__file__).with_name("default.yaml")
_LANGUAGES = ("shell", "python", "javascript", "browser")
_TAGS = frozenset({"destroys", "leaves"})
_KINDS = ("piped from", "program", "subcommand", "flags", "argument", "writes", "import", "call",
          "name", "literal")  # fmt: skip
_NAMES, _ANY = re.compile(r"[\w|-]+"), "*"
_WANTED = "write a list of rules with id, language, level, reason, match and a condition each"
_KEYS = {*_KINDS, "id", "language", "level", "tags", "reason", "match", "not_match"}
_KEYS |= {"replaces", "instead"}


@dataclass(frozen=True)
class Code:
    """Code that is to be read, and the folder in which it begins to run, if that is known."""

    language: str
    text: str
    folder: str = ""


@dataclass(frozen=True)
class Fact:
    """Something that code does in a folder: the texts that each kind of condition is tried on."""

    language: str
    target: str
    values: Mapping[str, tuple[str, ...]]
    folder: str = ""


@dataclass(frozen=True)
class RuleMatch:
    """A rule that applies: what it destroys or where it sends something is its `target`.

    `instead`: what to do in its place, "" if the rule does not say.
    """

    rule: str
    level: Level
    reason: str
    tags: frozenset[str] = frozenset()
    target: str = ""
    folder: str = ""
    instead: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.target}" if self.target else self.reason


@dataclass(frozen=True)
class Assessment:
    """How bad code is, by its worst part; `patterns` has what matched, the worst first."""

    level: Level
    reason: str
    patterns: tuple[RuleMatch, ...]


@dataclass(frozen=True)
class PolicyRule:
    """A rule applies to a fact that fulfils all `conditions`: by kind, for the whole of a text.

    `examples` say whether it applies to them; `at` says where the rule stands.
    """

    id: str
    language: str
    level: Level
    tags: frozenset[str]
    reason: str
    conditions: tuple[tuple[str, re.Pattern[str]], ...]
    examples: tuple[tuple[str, bool], ...]
    replaces: str
    instead: str
    at: str

    def applied(self, fact: Fact) -> RuleMatch | None:
        """Return the match with a fact of the rule's language, if it is one."""
        target = fact.target
        for kind, pattern in self.conditions:
            for text in fact.values.get(kind, ()):
                if pattern.fullmatch(text):
                    break
            else:
                return None
            if kind in ("argument", "writes", "literal"):
                target = text
            elif kind == "subcommand":
                target = target.removeprefix(text).strip()
        plain = (text.replace(DYNAMIC, UNKNOWN) for text in (target[:200], fact.folder))
        shown = (escape_unseen(text, kept="") for text in plain)
        told, folder = shown
        return RuleMatch(self.id, self.level, self.reason, self.tags, told, folder, self.instead)


def escape_unseen(text: str, kept: str = "\n\t") -> str:
    """Return text for a person: all that is invisible, moves, or turns its direction is escaped."""
    return "".join(
        char
        if char in kept or (char.isprintable() and not _SHAPELESS.match(char))
        else char.encode("unicode_escape").decode()
        for char in text
    )


class Rules:
    """The rules in force."""

    def __init__(self, rules: Iterable[PolicyRule]) -> None:
        """Index them by their first condition, which often is a list of names."""
        self.all = tuple(rules)
        self._index: dict[tuple[str, str], dict[str, list[PolicyRule]]] = {}
        for rule in self.all:
            kind, pattern = rule.conditions[0]
            by_name = self._index.setdefault((rule.language, kind), {})
            listed = _NAMES.fullmatch(pattern.pattern)
            for name in pattern.pattern.split("|") if listed else [_ANY]:
                by_name.setdefault(name, []).append(rule)

    def applied(self, fact: Fact) -> Iterator[RuleMatch]:
        for kind, texts in fact.values.items():
            if texts and (by_name := self._index.get((fact.language, kind))):
                for name in (*texts, _ANY):
                    for rule in by_name.get(name, ()):
                        if found := rule.applied(fact):
                            yield found


def read_rules(files: Sequence[Path] = ()) -> Rules:
    """Return the shipped rules with those of an operator, whose examples are not tried yet.

    Raises ConfigError: a file cannot be read or understood; the message has line and reason.
    """
    rules: dict[str, PolicyRule] = {}
    for file in (_SHIPPED, *files):
        for rule in _read(file):
            if rule.replaces and rules.pop(rule.replaces, None) is None:
                raise ConfigError(f"{rule.at} replaces {rule.replaces}, which is no rule: mend it")
            if file != _SHIPPED and not rule.replaces and LEVELS[rule.level] < LEVELS["medium"]:
                wrong = f"{rule.at} is {rule.level}, but a further rule can only make stricter"
                raise ConfigError(f"{wrong}: make it medium, or name the rule that it `replaces`")
            if rule.id in rules:
                raise ConfigError(f"{rule.at} has the id of another rule: choose another")
            rules[rule.id] = rule
    return Rules(rules.values())


def _read(file: Path) -> Iterator[PolicyRule]:
    at = str(file)
    try:
        loader = _LOADER(file.read_bytes())
        node = loader.get_single_node()
        for each in node.value if node else ():
            at = f"{file}:{each.start_mark.line + 1}"
            yield _rule(loader.construct_object(each, deep=True), at)
    except re.error as exc:
        raise ConfigError(f"{at}: no regular expression: {exc.pattern!r}: {exc}; mend it") from exc
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as exc:
        why = f"{exc} is missing" if isinstance(exc, KeyError) else exc
        raise ConfigError(f"{at}: no rule: {why}; {_WANTED}") from exc


def _rule(given: Mapping[str, object], at: str) -> PolicyRule:
    if wrong := [*(given.keys() - _KEYS), *({"id", "reason"} - given.keys())]:
        raise ValueError(f"the key {wrong[0]!r} is unknown or missing")
    level = next((level for level in LEVELS if level == given["level"]), None)
    language, tags = str(given["language"]), frozenset(_list(given, "tags"))
    if level is None or language not in _LANGUAGES or not tags <= _TAGS:
        raise ValueError("its level, its language or one of its tags does not exist")
    known = [kind for kind in _KINDS if kind in given]
    conditions = tuple((kind, re.compile(str(given[kind]), re.DOTALL)) for kind in known)
    good, bad = _list(given, "match"), _list(given, "not_match")
    if not conditions or not good:
        raise ValueError("it needs a condition, and an example to match")
    examples = (*((each, True) for each in good), *((each, False) for each in bad))
    text = {key: str(given.get(key, "")) for key in ("id", "reason", "replaces", "instead")}
    at = f"{at}: rule {text['id']}"
    return PolicyRule(
        language=language,
        level=level,
        tags=tags,
        conditions=conditions,
        examples=examples,
        at=at,
        **text,
    )


def _list(given: Mapping[str, object], key: str) -> list[str]:
    found = given.get(key, [])
    if not isinstance(found, list):
        raise TypeError(f"{key} is no list")
    return [str(each) for each in found]
