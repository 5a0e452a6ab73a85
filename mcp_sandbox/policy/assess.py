"""Grades code by its text, and says whether it may run. Pure; the shipped rules are read once."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from anyio import to_thread

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import Network
from mcp_sandbox.policy.code import read_javascript, read_python
from mcp_sandbox.policy.rules import (
    LEVELS,
    Assessment,
    Code,
    Fact,
    Level,
    RuleMatch,
    Rules,
    read_rules,
)
from mcp_sandbox.policy.shell import read_commands

Profile = Literal["isolated", "strict", "off"]

_INSTEAD = "find a way without it, or have the user do it"
_READERS = {"python": read_python, "javascript": read_javascript}
_READ = 65_536
_DEEPEST = 8
_MOST_OF_A_RULE = 20
# Characters of code above which grading can take more than a few milliseconds.
_LONG = 4096
# Characters of code up to which a grade is cached.
_SHORT = 2048
_GIVEN: Mapping[str, object] = MappingProxyType({})
_UNREAD = RuleMatch("unread", "high", "only the first 64 KiB were read")
_NESTED = RuleMatch("unread", "high", "it goes on longer or deeper than is read")
_UNKNOWN = RuleMatch("unknown-language", "high", "code in this language is not read")
_OTHER = RuleMatch("other-program", "medium", "not all that it runs is known to be harmless")


@dataclass(frozen=True)
class Decision:
    """What happens to a call, in one `sentence`, and the match that decided (None: no match).

    `asks` are all matches about which a person is to be asked.
    """

    verdict: Literal["allow", "deny", "ask"]
    sentence: str = ""
    match: RuleMatch | None = None
    asks: tuple[RuleMatch, ...] = ()


def decide(found: Assessment, profile: Profile, network: Network, language: str) -> Decision:
    """Return what a profile does with graded code in a sandbox that reaches `network`."""
    if profile == "off":
        return Decision("allow")
    worst = next(iter(found.patterns), None)
    if destroys := _tagged(found, "destroys"):
        return Decision("deny", f"{destroys}; {destroys.instead or _INSTEAD}", destroys)
    strict = profile == "strict"
    if strict and found.level == "critical" and language in ("shell", "bash"):
        return Decision("deny", f"{worst}; {_INSTEAD}", worst)
    leaving = strict or network == "open"
    asks = [
        each
        for each in found.patterns
        if (strict and LEVELS[each.level] >= LEVELS["high"]) or (leaving and "leaves" in each.tags)
    ]
    if asks:
        first = _tagged(found, "leaves") or asks[0]
        return Decision("ask", str(first), first, tuple(asks))
    return Decision("allow", match=worst)


def _tagged(found: Assessment, tag: str) -> RuleMatch | None:
    return next((each for each in found.patterns if tag in each.tags), None)


def choose_profile(setting: Literal[Profile, "auto"], backend: str) -> Profile:
    """Return the profile that a setting means on a backend: auto is strict where none isolates."""
    if setting == "auto":
        return "strict" if backend == "unsafe-local" else "isolated"
    return setting


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
    language = given[1]
    matches = set(_matches(given, rules))
    worst = sorted(matches, key=lambda m: (-LEVELS[m.level], not m.tags, m.rule, m.target))
    rules_apart = groupby(worst, key=lambda match: match.rule)
    level: Level = worst[0].level if worst else "low" if language == "browser" else "safe"
    return Assessment(
        level=level,
        reason=worst[0].reason if worst else "nothing risky is in it",
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

    Raises ConfigError: a file or an example in it is wrong; the message has file, line and reason.
    """
    rules = read_rules(files) if files else _shipped()
    if wrong := next(check_examples(rules, _shipped()), None):
        raise ConfigError(f"{wrong}: correct the rule or the example")
    return rules


def check_examples(rules: Rules, tried: Rules | None = None) -> Iterator[str]:
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


def _matches(given: tuple[str, ...], rules: Rules) -> Iterator[RuleMatch]:
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
                key = (fact.language, fact.folder, *fact.values.items())
                yield from () if key in tried else _applied(fact, rules)
                tried.add(key)
            elif depth == _DEEPEST or left < len(fact.text) or not fact.language:
                yield _NESTED
            else:
                left -= len(fact.text)
                shell = functools.partial(read_commands, cwd=fact.folder)
                inside.append((_READERS.get(fact.language, shell)(fact.text), depth + 1))


def _applied(fact: Fact, rules: Rules) -> list[RuleMatch]:
    found = [*rules.applied(fact)]
    return found if found or "program" not in fact.values else [_OTHER]
