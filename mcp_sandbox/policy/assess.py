"""Grades code by its text. Pure, but for the shipped rules, which are read once."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from anyio import to_thread

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.policy.javascript import read_javascript
from mcp_sandbox.policy.python import read_python
from mcp_sandbox.policy.routing import Suggested, suggest
from mcp_sandbox.policy.rules import LEVELS, Code, Fact, Level, Match, Rule, Rules, read_rules
from mcp_sandbox.policy.shell import read_commands

READ = 65_536
"""Characters of the code that are looked at."""
LANGUAGES: Mapping[str, str] = {
    **{name: name for name in ("shell", "python", "javascript", "browser")},
    "bash": "shell",
}
"""What is graded, by the names that callers use."""

_NOTHING: Mapping[str, object] = MappingProxyType({})
# Above it grading takes more than a millisecond or two.
_LONG = 4096
_DEEPEST = 8
_MOST_PATTERNS = 50
_NONE = frozenset[str]()
_UNREAD = Match("unread", "high", _NONE, "only the first 64 KiB were read")
_NESTED = Match("unread", "high", _NONE, "code within code goes deeper than is read")
_UNKNOWN = Match("unknown-language", "high", _NONE, "code in this language is not read")
_OTHER = "other-program"


@dataclass(frozen=True)
class Assessment:
    """How bad code is, by its worst part; `patterns` has what matched, the worst first."""

    level: Level
    reason: str
    requires_confirmation: bool
    requires_isolation: bool
    suggested: Suggested
    patterns: tuple[Match, ...]


def assess(
    content: str,
    language: str,
    params: Mapping[str, object] = _NOTHING,
    rules: Rules | None = None,
) -> Assessment:
    """Grade code; without `rules` by the shipped ones.

    Of `params` the folder `cwd` of a command line counts, and with browser all texts.
    """
    language = LANGUAGES.get(language, "")
    matches = {_UNKNOWN} if not language else set(_matches(content, language, params, rules))
    worst = sorted(matches, key=lambda match: (-LEVELS[match.level], match.rule, match.target))
    level: Level = worst[0].level if worst else "low" if language == "browser" else "safe"
    return Assessment(
        level,
        worst[0].reason if worst else "nothing risky is in it",
        LEVELS[level] >= LEVELS["high"],
        LEVELS[level] >= LEVELS["medium"],
        suggest(level, language, content),
        tuple(worst[:_MOST_PATTERNS]),
    )


async def assess_aside(
    content: str,
    language: str,
    params: Mapping[str, object] = _NOTHING,
    rules: Rules | None = None,
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
    own = [rule for rule in rules.values() if rule.id not in _shipped()]
    if wrong := next(failures(rules, own), None):
        raise ConfigError(f"{wrong}: correct the rule or the example")
    return rules


def failures(rules: Rules, tried: Sequence[Rule] = ()) -> Iterator[str]:
    """Yield a sentence for each example that is not as its rule has it, of all or those `tried`."""
    for rule in tried or rules.values():
        for examples, wanted in ((rule.match, True), (rule.not_match, False)):
            for example in examples:
                found = set(_matches(example, rule.language, _NOTHING, rules))
                if any(match.rule == rule.id for match in found) != wanted:
                    word = "does not match" if wanted else "matches, which it must not"
                    yield f"{rule.at}: the example {example!r} {word}"


@functools.cache
def _shipped() -> Rules:
    return read_rules()


def _matches(
    content: str, language: str, params: Mapping[str, object], rules: Rules | None
) -> Iterator[Match]:
    """Yield what applies to the code and to code inside of it."""
    rules = rules or _shipped()
    if len(content) > READ:
        yield _UNREAD
    content = content[:READ].removeprefix("\ufeff")
    if language == "browser":
        texts = (content, *map(str, params.values()))
        yield from _of(Fact("browser", "", {"literal": texts}), rules)
        return
    cwd = params.get("cwd")
    facts = _read(Code(language, content), cwd if isinstance(cwd, str) else "")
    left = READ
    inside = [(facts, 0)]
    while inside:
        facts, depth = inside.pop()
        for fact in facts:
            if isinstance(fact, Fact):
                yield from _of(fact, rules)
            elif depth == _DEEPEST or left < len(fact.text):
                yield _NESTED
            else:
                left -= len(fact.text)
                inside.append((_read(fact, ""), depth + 1))


def _of(fact: Fact, rules: Rules) -> Iterator[Match]:
    found = [rule.applied(fact) for rule in rules.values() if rule.language == fact.language]
    yield from (match for match in found if match)
    if not any(found) and fact.values.get("program"):
        yield Match(_OTHER, "medium", _NONE, "its programs are not all known to be harmless")


def _read(code: Code, cwd: str) -> Iterator[Fact | Code]:
    if code.language == "shell":
        return read_commands(code.text, cwd)
    return read_python(code.text) if code.language == "python" else read_javascript(code.text)
