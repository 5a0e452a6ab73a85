"""What follows from a grade: which kind of sandbox fits, and whether the code may run. Pure."""

import re
from dataclasses import dataclass
from typing import Literal

from mcp_sandbox.models import Network
from mcp_sandbox.policy.rules import LEVELS, Assessment, Level, Match, Suggested

Profile = Literal["isolated", "strict", "off"]

_BROWSER = re.compile(r"selenium|playwright|puppeteer|browser|screenshot", re.IGNORECASE)
_KEPT = "sandbox_reset empties the workspace instead, and keeps a copy for a day"
_INSTEAD = "find a way without it, or have the user do it"


@dataclass(frozen=True)
class Decision:
    """What happens to a call, in one `sentence`, and the match that decided (None: no match).

    `asks` are all matches about which a person is to be asked.
    """

    verdict: Literal["allow", "deny", "ask"]
    sentence: str = ""
    match: Match | None = None
    asks: tuple[Match, ...] = ()


def suggest(level: Level, language: str, content: str) -> Suggested:
    """Return the kind of sandbox that fits: any, isolated, one with a browser, or none."""
    if language == "shell" and level == "critical":
        return "refuse"
    if LEVELS[level] < LEVELS["medium"] and language != "browser":
        return "any"
    return "browser" if language == "browser" or _BROWSER.search(content) else "isolated"


def decide(found: Assessment, profile: Profile, network: Network, language: str) -> Decision:
    """Return what a profile does with graded code in a sandbox that reaches `network`."""
    if profile == "off":
        return Decision("allow")
    worst = next(iter(found.patterns), None)
    if destroys := _tagged(found, "destroys"):
        return Decision("deny", f"{destroys}; {_KEPT}", destroys)
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


def _tagged(found: Assessment, tag: str) -> Match | None:
    return next((each for each in found.patterns if tag in each.tags), None)


def profile_of(setting: Literal[Profile, "auto"], backend: str) -> Profile:
    """Return the profile that a setting means on a backend: auto is strict where none isolates."""
    if setting == "auto":
        return "strict" if backend == "unsafe-local" else "isolated"
    return setting


def risk_level(level: str) -> Literal["low", "medium", "high", "critical"]:
    """Return a level on the scale of four that callers know; an unknown one is high."""
    if level in ("safe", "low"):
        return "low"
    return "medium" if level == "medium" else "critical" if level == "critical" else "high"
