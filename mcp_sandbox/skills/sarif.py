"""Diagnostics as SARIF 2.1.0, which code hosts show beside the lines that they are about. Pure."""

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from mcp_sandbox.skills.models import Diagnostic, Json

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(found: Iterable[tuple[Path, Diagnostic]], version: str, here: Path) -> dict[str, Json]:
    """Return a log of one run; each diagnostic comes with its skill's folder.

    Paths are given in relation to `here` where they lie in it, which is the repository's top as a
    rule.
    """
    pairs = list(found)
    rules: dict[str, Diagnostic] = {}
    for _, each in pairs:
        rules.setdefault(each.code, each)
    ids = list(rules)
    driver: dict[str, Json] = {
        "name": "mcp-sandbox skills",
        "semanticVersion": version,
        "informationUri": "https://agentskills.io/specification",
        "rules": [_rule(each) for each in rules.values()],
    }
    results: list[Json] = [
        _result(folder, each, ids.index(each.code), here) for folder, each in pairs
    ]
    run: dict[str, Json] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(example: Diagnostic) -> dict[str, Json]:
    name = "".join(word.capitalize() for word in example.code.split("-"))
    return {
        "id": example.code,
        "name": name,
        "shortDescription": {"text": example.code.replace("-", " ").capitalize() + "."},
        "help": {"text": example.fix},
        "defaultConfiguration": {"level": example.level},
    }


def _result(folder: Path, each: Diagnostic, rule: int, here: Path) -> dict[str, Json]:
    physical: dict[str, Json] = {"artifactLocation": {"uri": _uri(folder / each.file, here)}}
    if each.line is not None:
        physical["region"] = {"startLine": each.line}
    return {
        "ruleId": each.code,
        "ruleIndex": rule,
        "level": each.level,
        "message": {"text": f"{each.reason} {each.fix}"},
        "locations": [{"physicalLocation": physical}],
    }


def _uri(path: Path, here: Path) -> str:
    if path.is_relative_to(here):
        return quote(path.relative_to(here).as_posix())
    return path.as_uri()
