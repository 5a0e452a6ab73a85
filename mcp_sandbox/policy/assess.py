"""Grades code by its text. Pure, but for the shipped rules, which are read once."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType

from anyio import to_thread

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.policy.code import read_javascript, read_python
from mcp_sandbox.policy.routing import suggest
from mcp_sandbox.policy.rules import LEVELS, Assessment, Code, Fact, Level, Match, Rules, read_rules
from mcp_sandbox.policy.shell import read_commands

_READERS = {"shell": read_commands, "python": read_python, "javascript": read_javascript}
_READ = 65_536
_DEEPEST = 8
_MOST_OF_A_RULE = 20
# Characters of code above which grading can take more than a few milliseconds.
_LONG = 4096
# Characters of code up to which a grade is cached.
_SHORT = 2048
_GIVEN: Mapping[str, object] = MappingProxyType({})
_UNREAD = Match("unread", "high", "only the first 64 KiB were read")
_NESTED = Match("unread", "high", "it goes on longer or deeper than is read")
_UNKNOWN = Match("unknown-language", "high", "code in this language is not read")
_OTHER = Match("other-program", "medium", "not all that it runs is known to be harmless")


def assess(
    content: str, language: str, params: Mapping[str, object] = _GIVEN, rules: Rules | None = None
) -> Assessment:
    """Grade code in shell (or bash), python, javascript or browser, by the shipped rules if none.

    Of `params` a command line uses the folder `cwd`, and browser every value.
    """
    language, cwd = "shell" if language == "bash" else language, params.get("cwd")
    seen = map(str, params.values()) if language == "browser" else (str(cwd or ""),)
    given = (content, language, *seen)
    grade = _grade if sum(map(len, given)) <= _SHORT else _grade.__wrapped__
    return grade(given, rules or _shipped())


@functools.lru_cache(maxsize=1024)
def _grade(given: tuple[str, ...], rules: Rules) -> Assessment:
    content, language, *_ = given
    matches = set(_matches(given, rules))
    worst = sorted(matches, key=lambda m: (-LEVELS[m.level], not m.tags, m.rule, m.target))
    rules_apart = groupby(worst, key=lambda match: match.rule)
    level: Level = worst[0].level if worst else "low" if language == "browser" else "safe"
    return Assessment(
        level=level,
        reason=worst[0].reason if worst else "nothing risky is in it",
        requires_confirmation=LEVELS[level] >= LEVELS["high"],
        requires_isolation=LEVELS[level] >= LEVELS["medium"] or language == "browser",
        suggested=suggest(level, language, content),
        # However much there is of one rule, no other is left out.
        patterns=tuple(match for _, same in rules_apart for match in islice(same, _MOST_OF_A_RULE)),
    )


async def assess_aside(
    content: str, language: str, params: Mapping[str, object] = _GIVEN, rules: Rules | None = None
) -> Assessment:
    """Grade code, long code in a thread."""
    if len(content) <= _LONG:
        return assess(content, language, params, rules)
    return await to_thread.run_sync(assess, content, language, params, rules)


def load_rules(files: Sequence[Path] = ()) -> Rules:
    """Return the shipped rules with those of an operator's files, whose examples hold.

    Raises:
        ConfigError: a file is wrong, or an example of it; the message names file, line and reason.
    """
    rules = read_rules(files) if files else _shipped()
    if wrong := next(failures(rules, _shipped()), None):
        raise ConfigError(f"{wrong}: correct the rule or the example")
    return rules


def failures(rules: Rules, tried: Rules | None = None) -> Iterator[str]:
    """Yield a sentence for each example that its rule gets wrong; skip the rules in `tried`."""
    for rule in rules.all:
        if tried and rule in tried.all:
            continue
        for example, wanted in rule.examples:
            found = _matches((example, rule.language, ""), rules)
            if any(match.rule == rule.id for match in found) != wanted:
                word = "does not match" if wanted else "matches, which it must not"
                yield f"{rule.at}: the example {example!r} {word}"


@functools.cache
def _shipped() -> Rules:
    return read_rules()


def _matches(given: tuple[str, ...], rules: Rules) -> Iterator[Match]:
    """Yield what applies to the code, and to code inside of it."""
    content, language, *seen = given
    if len(content) > _READ:
        yield _UNREAD
    content = content[:_READ].removeprefix("\ufeff")
    facts: Iterator[Fact | Code]
    if language == "shell":
        facts = read_commands(content, seen[0])
    elif language == "browser":
        facts = iter([Fact("browser", "", {"literal": (content, *seen)})])
    elif language in _READERS:
        facts = iter([Code(language, content)])
    else:
        yield _UNKNOWN
        return
    left, inside, tried = 2 * _READ, [(facts, 0)], set[object]()
    while inside:
        facts, depth = inside.pop()
        for fact in facts:
            if isinstance(fact, Fact):
                key = (fact.language, *fact.values.items())
                yield from () if key in tried else _applied(fact, rules)
                tried.add(key)
            elif depth == _DEEPEST or left < len(fact.text) or not fact.language:
                yield _NESTED
            else:
                left -= len(fact.text)
                inside.append((_READERS[fact.language](fact.text), depth + 1))


def _applied(fact: Fact, rules: Rules) -> list[Match]:
    found = [*rules.applied(fact)]
    return found if found or "program" not in fact.values else [_OTHER]
