"""The log is what SARIF 2.1.0 demands; these are the facts of its schema that apply to it."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mcp_sandbox.cli.skills.check import sarif
from mcp_sandbox.skills.skill import Diagnostic

HERE = Path("/project")
ABSENT = Diagnostic("no-description", "error", "It has none.", "Add.", 2)
FOUND = [
    (HERE / "skills" / "größe & co", ABSENT),
    (HERE / "skills" / "b", Diagnostic("archive", "note", "One.", "Unpack.", file="a b/x.zip")),
    (Path("/elsewhere/c"), Diagnostic("archive", "note", "Another.", "Unpack.", None, "y.zip")),
]


def log() -> dict[str, Any]:
    return dict(sarif(FOUND, "1.2.3", HERE))


def test_log_has_one_run_of_the_version_with_a_named_tool() -> None:
    made = log()
    assert set(made) == {"$schema", "version", "runs"}
    assert made["version"] == "2.1.0"
    (run,) = made["runs"]
    assert set(run) == {"tool", "columnKind", "results"}
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    driver = run["tool"]["driver"]
    assert driver["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", driver["semanticVersion"])


def test_every_rule_is_there_once_and_results_point_to_it() -> None:
    (run,) = log()["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["no-description", "archive"]
    for rule in rules:
        assert rule["shortDescription"]["text"].endswith(".")
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]


def test_places_are_uri_references_with_lines_from_one() -> None:
    places = [result["locations"][0]["physicalLocation"] for result in log()["runs"][0]["results"]]
    uris = [place["artifactLocation"]["uri"] for place in places]
    assert all(re.fullmatch(r"[\w.~!$&'()*+,;=:@/%-]+", uri, re.ASCII) for uri in uris)
    assert [unquote(uri) for uri in uris] == [
        "skills/größe & co/SKILL.md",
        "skills/b/a b/x.zip",
        "file:///elsewhere/c/y.zip",
    ]
    assert [place.get("region") for place in places] == [{"startLine": 2}, None, None]


def test_nothing_found_is_a_run_without_results() -> None:
    made: dict[str, Any] = dict(sarif([], "1.2.3", HERE))
    assert [run["results"] for run in made["runs"]] == [[]]
