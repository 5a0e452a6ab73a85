"""An operator's own rules, and the command line that tries them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mcp_sandbox.cli import cli
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.policy import assess, check_examples, load_rules

RULE = """\
- id: no-prod
  language: shell
  level: critical
  tags: [leaves]
  reason: it deploys
  program: deploy
  argument: prod.*
  match: [deploy production]
  not_match: [deploy staging]
"""


def file_of(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rules.yaml"
    file.write_text(text)
    return file


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rules([file_of(tmp_path, text)])
    return str(caught.value)


def run(*arguments: str, given: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["policy", *arguments], input=given)


def test_the_examples_of_every_shipped_rule_hold() -> None:
    assert list(check_examples(load_rules())) == []


def test_a_rule_of_the_operator_makes_stricter(tmp_path: Path) -> None:
    rules = load_rules([file_of(tmp_path, RULE)])
    found = assess("deploy production", "bash", rules=rules)
    assert (found.level, found.patterns[0].target) == ("critical", "production")
    assert assess("deploy staging", "bash", rules=rules).level == "medium"
    assert assess("rm x", "bash", rules=rules).level == "high"


def test_a_text_that_comes_again_is_graded_by_the_rules_and_folder_given(tmp_path: Path) -> None:
    rules = load_rules([file_of(tmp_path, RULE)])
    line = "deploy production; rm -rf *"
    for _ in range(2):
        assert assess(line, "bash").level == "high"
        assert assess(line, "bash", {"cwd": "/"}).patterns[0].rule == "rm-all"
        assert assess(line, "bash", rules=rules).patterns[0].rule == "no-prod"


def test_a_rule_that_names_the_one_it_replaces_may_grade_lower(tmp_path: Path) -> None:
    text = (
        RULE.replace("critical", "low")
        .replace("deploy", "rm")
        .replace("tags", "replaces: rm\n  tags")
    )
    rules = load_rules([file_of(tmp_path, text)])
    assert assess("rm production", "bash", rules=rules).level == "low"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("program: deploy", "program: '('", "rules.yaml:1: no regular expression: '('"),
        ("reason", "raeson", "unknown or missing"),
        ("  reason: it deploys\n", "", "'reason' is unknown or missing"),
        ("level: critical", "level: grave", "level"),
        ("level: critical", "level: safe", "can only make stricter"),
        ("[deploy staging]", "[deploy prod]", "no-prod: the example 'deploy prod' matches"),
        ("[deploy production]", "[x]", "the example 'x' does not match"),
        ("[deploy production]", "x", "match is no list"),
        ("id: no-prod", "id: rm", "id of another rule"),
        ("tags: [leaves]", "replaces: none-such", "replaces none-such, which is no rule"),
        ("- id: no-prod\n", "id: no-prod\n", "cannot"),
        ("match: [deploy production]", "match: [", "rules.yaml"),
    ],
)
def test_a_wrong_rule_is_refused_with_file_and_reason(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    assert old in RULE
    message = refused(tmp_path, RULE.replace(old, new))
    assert "rules.yaml" in message
    assert told in message or told == "cannot"


def test_a_file_that_is_not_there_is_no_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none-such\.yaml"):
        load_rules([tmp_path / "none-such.yaml"])


def test_check_tells_level_rules_and_what_each_profile_does() -> None:
    shown = run("check", "cat a | sudo tee /etc/x").output
    assert shown.startswith("high: ")
    assert "sudo (high)" in shown
    assert "isolated: run" in shown
    assert "strict: ask" in shown


def test_check_reads_lines_from_its_input_and_answers_in_json() -> None:
    shown = run("check", "-", "--lines", "--json", given="ls\n\nrm -rf /\n").output
    first, second = map(json.loads, shown.splitlines())
    assert (first["level"], second["level"]) == ("safe", "critical")
    assert second["profiles"] == {"isolated": "refuse", "strict": "refuse"}
    assert second["patterns"][0]["tags"] == ["destroys"]


def test_check_of_another_language_names_it() -> None:
    assert run("check", "eval(x)", "--language", "python").output.startswith("critical: ")
    assert run("check", "x", "--language", "cobol").exit_code == 2


def test_test_tries_the_examples_of_a_file(tmp_path: Path) -> None:
    good = run("test", str(file_of(tmp_path, RULE)))
    assert (good.exit_code, "0 wrong examples" in good.output) == (0, True)
    bad = run("test", str(file_of(tmp_path, RULE.replace("staging", "prod"))))
    assert bad.exit_code == 1
    assert "the example 'deploy prod' matches, which it must not" in bad.output
