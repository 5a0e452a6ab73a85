"""`policy`: how code is graded, and what follows from it. No daemon is asked, and nothing run."""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from mcp_sandbox.cli.options import AsJson, Group, given, load, printable, table, tell
from mcp_sandbox.models import Network
from mcp_sandbox.policy import Assessment, Profile, assess, check_examples, decide, load_rules
from mcp_sandbox.policy.rules import read_rules

group = Group("See how code is graded before it runs.", "config")
Language = Literal["bash", "shell", "python", "javascript", "browser"]
_PROFILES: tuple[Profile, ...] = ("isolated", "strict")
_VERDICTS = {"allow": "run", "deny": "refuse", "ask": "ask"}


@group.command()
def check(
    code: Annotated[str, typer.Argument(help="What would run; - reads it from stdin.")],
    language: Annotated[
        Language, given("--language", "NAME", f"One of {', '.join(get_args(Language))}.")
    ] = "bash",
    lines: Annotated[bool, typer.Option("--lines", help="Grade each line on its own.")] = False,
    as_json: AsJson = False,
) -> None:
    """Grade a piece of code: its level, the rules that match, what each profile would do."""
    rules = load_rules(load().config.policy.rules)
    text = sys.stdin.buffer.read().decode(errors="replace") if code == "-" else code
    pieces = [line for line in text.splitlines() if line.strip()] if lines else [text]
    graded = [(piece, assess(piece, language, rules=rules)) for piece in pieces]
    if lines and not as_json:
        rows = ((found.level, _rules(found), printable(piece, "")) for piece, found in graded)
        tell("", table("level", "rules", "line", rows=rows), as_json=False, none="no lines")
        return
    for _, found in graded:
        about = {**asdict(found), "profiles": dict(_profiles(found, language))}
        patterns = [{**asdict(each), "tags": sorted(each.tags)} for each in found.patterns]
        tell({**about, "patterns": patterns}, _shown(found, language), as_json=as_json)


def _rules(found: Assessment) -> str:
    return " ".join(dict.fromkeys(each.rule for each in found.patterns)) or "-"


def _profiles(found: Assessment, language: str) -> Iterator[tuple[str, str]]:
    """Yield what a profile does; the network is named where it makes a difference."""
    for profile in _PROFILES:
        done = {
            network: _VERDICTS[decide(found, profile, network, language).verdict]
            for network in get_args(Network)
        }
        same = len(set(done.values())) == 1
        each = ", ".join(f"{verdict} with network {name}" for name, verdict in done.items())
        yield profile, done["none"] if same else each


def _shown(found: Assessment, language: str) -> str:
    rows = [f"{found.level}: {found.reason}"]
    rows += [f"  {each.rule} ({each.level}): {each}" for each in found.patterns]
    rows += [f"{profile}: {done}" for profile, done in _profiles(found, language)]
    return "\n".join(rows)


@group.command(name="test")
def try_examples(
    file: Annotated[Path | None, typer.Argument(help="A file of further rules.")] = None,
) -> None:
    """Try the examples of every rule: the shipped ones, the operator's, and those of FILE."""
    rules = read_rules([*load().config.policy.rules, *([file] if file else ())])
    wrong = list(check_examples(rules))
    print(*wrong, f"{len(rules.all)} rules, {len(wrong)} wrong examples", sep="\n")
    raise typer.Exit(1 if wrong else 0)
