"""Rules: what is looked for in code, and how bad it is. All but reading their files is pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from mcp_sandbox.errors import ConfigError

Level = Literal["safe", "low", "medium", "high", "critical"]
LEVELS: Mapping[Level, int] = {"safe": 0, "low": 1, "medium": 2, "high": 3, "critical": 4}

_SHIPPED = Path(__file__).with_name("default.yaml")
_LANGUAGES = ("shell", "python", "javascript", "browser")
_TAGS = frozenset({"destroys", "leaves"})
# The kinds of conditions, in the order in which they are tried.
_KINDS = ("piped from", "program", "subcommand", "flags", "argument", "writes", "import", "call",
          "name", "literal")  # fmt: skip
_KEYS = {*_KINDS, "id", "language", "level", "tags", "reason", "match", "not_match", "replaces"}
# What they find is what the call is about.
_TARGETS = frozenset({"argument", "writes", "literal"})


@dataclass(frozen=True)
class Code:
    """Code that is to be read: the text itself, or what stands inside of it."""

    language: str
    text: str


@dataclass(frozen=True)
class Fact:
    """Something that code does: for each kind of condition the texts that it is tried on."""

    language: str
    target: str
    values: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Match:
    """A rule that applies: what it destroys or where it sends something is its `target`."""

    rule: str
    level: Level
    tags: frozenset[str]
    reason: str
    target: str = ""


@dataclass(frozen=True)
class Rule:
    """It applies to a fact that fulfils all `conditions`: by kind, for the whole of a text.

    `match` and `not_match` are examples; `at` says where the rule stands.
    """

    id: str
    language: str
    level: Level
    tags: frozenset[str]
    reason: str
    match: tuple[str, ...]
    not_match: tuple[str, ...]
    replaces: str
    conditions: tuple[tuple[str, re.Pattern[str]], ...]
    at: str

    def applied(self, fact: Fact) -> Match | None:
        """Return the match with a fact of the rule's language, if it is one."""
        target = fact.target
        for kind, pattern in self.conditions:
            found = next(
                (text for text in fact.values.get(kind, ()) if pattern.fullmatch(text)), None
            )
            if found is None:
                return None
            target = found if kind in _TARGETS else target
        shown = "".join(c if c.isprintable() else "…" for c in target[:200])
        reason = self.reason.replace("{target}", shown)
        return Match(self.id, self.level, self.tags, reason, shown)


Rules = Mapping[str, Rule]
"""The rules in force, by their id."""


def read_rules(files: Sequence[Path] = ()) -> Rules:
    """Return the shipped rules with those of an operator, whose examples are not tried yet.

    Raises:
        ConfigError: a file cannot be read or understood; the message has line and reason.
    """
    rules: dict[str, Rule] = {}
    for file in (_SHIPPED, *files):
        for rule in _read(file):
            if rule.replaces:
                if rules.pop(rule.replaces, None) is None:
                    raise ConfigError(f"{rule.at} replaces {rule.replaces}, which is no rule")
            elif file != _SHIPPED and LEVELS[rule.level] < LEVELS["medium"]:
                wrong = f"{rule.at} is {rule.level}, but a further rule can only make stricter"
                raise ConfigError(f"{wrong}: make it medium, or name the rule that it `replaces`")
            if rule.id in rules:
                raise ConfigError(f"{rule.at} has the id of another rule: take another one")
            rules[rule.id] = rule
    return rules


def _read(file: Path) -> Iterator[Rule]:
    at = str(file)
    try:
        loader = yaml.CSafeLoader(file.read_bytes())
        node = loader.get_single_node()
        for each in node.value if node else ():
            at = f"{file}:{each.start_mark.line + 1}"
            yield _rule(loader.construct_object(each, deep=True), at)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as exc:
        why = f"{exc} is missing" if isinstance(exc, KeyError) else exc
        raise ConfigError(f"{at}: not a rule: {why}; correct it") from exc


def _rule(given: Mapping[str, object], at: str) -> Rule:
    if unknown := sorted(map(str, given.keys() - _KEYS)):
        raise ValueError(f"it has the unknown key {unknown[0]!r}")
    texts = {kind: str(given[kind]) for kind in _KINDS if kind in given}
    level = next((level for level in LEVELS if level == given["level"]), None)
    language, tags = str(given["language"]), frozenset(_list(given, "tags"))
    if level is None or language not in _LANGUAGES or not tags <= _TAGS:
        raise ValueError("its level, language or tags are none that there are")
    conditions: list[tuple[str, re.Pattern[str]]] = []
    for kind, text in texts.items():
        try:
            conditions.append((kind, re.compile(text, re.DOTALL)))
        except re.error as exc:
            raise ValueError(f"{kind} {text!r} is no regular expression: {exc}") from exc
    match = _list(given, "match")
    if not conditions or not match:
        raise ValueError("it needs a condition, and an example to match")
    return Rule(
        str(given["id"]), language, level, tags, str(given["reason"]),
        match, _list(given, "not_match"), str(given.get("replaces", "")), tuple(conditions),
        f"{at}: rule {given['id']}",
    )  # fmt: skip


def _list(given: Mapping[str, object], key: str) -> tuple[str, ...]:
    found = given.get(key, [])
    if not isinstance(found, list):
        raise TypeError(f"{key} is no list")
    return tuple(str(each) for each in found)
