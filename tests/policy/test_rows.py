"""The rows of the checklist about grading, by their number."""

from typing import get_args

import pytest

from mcp_sandbox.models import Network
from mcp_sandbox.policy import Level, Profile, assess, choose_profile, decide


def level(code: str, language: str) -> str:
    return assess(code, language).level


def test_t03_there_are_five_levels() -> None:
    codes = {"ls": "safe", "npm test": "medium", "rm x": "high", "dd if=a of=b": "critical"}
    for code, wanted in codes.items():
        assert level(code, "shell") == wanted
    assert assess("click", "browser").level == "low"
    assert set(get_args(Level)) == {"safe", "low", "medium", "high", "critical"}


def test_t04_an_assessment_tells_level_reason_place_and_what_matched() -> None:
    found = assess("ls; rm x; rm -rf ~", "shell")
    assert (found.level, found.reason) == ("critical", "it removes everything")
    rules = [(each.rule, each.target) for each in found.patterns]
    assert rules == [("rm-all", "~"), ("rm", "-rf ~"), ("rm", "x"), ("harmless", "")]


@pytest.mark.parametrize("language", ["ruby", "", "SHELL"])
def test_t05_an_unknown_language_is_high(language: str) -> None:
    assert level("puts 1", language) == "high"


@pytest.mark.parametrize(
    "code",
    ["__import__('os')", "eval('1')", "exec(x)", "compile(x, 'f', 'exec')", "__builtins__",
     "getattr(x, '__class__')", "import os; os.system('x')", "import subprocess; subprocess.run",
     "import os; os.popen('x')"],
)  # fmt: skip
def test_t06_python_that_runs_made_up_code_or_programs_is_critical(code: str) -> None:
    assert level(code, "python") == "critical"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [("open('f', 'w')", "high"), ("f.write('x')", "high"), ("import shutil", "high"),
     ("import requests", "high"), ("import urllib.request", "high"), ("import socket", "high"),
     ("import os, sys, pickle", "high"), ("open('f')", "medium"), ("f.read()", "medium"),
     ("import json; json.load(f)", "medium"), ("environ['A']", "medium")],
)  # fmt: skip
def test_t07_python_that_writes_or_reads_outside_is_high_or_medium(code: str, wanted: str) -> None:
    assert level(code, "python") == wanted


@pytest.mark.parametrize("code", ["import ctypes", "from os import path", "import subprocess as s"])
def test_t08_an_import_counts_wherever_it_stands_and_in_broken_code(code: str) -> None:
    for around in ("{}", "def f():\n    {}", "x = 1; {}", "x = = 1\n{}\n)) = '"):
        assert level(around.format(code), "python") == "high"


@pytest.mark.parametrize(
    "code",
    ["rm -rf /", "rm -rf ~", "dd if=/dev/zero of=x", "mkfs.ext4 x", ":(){ :|:& };:", "x > /dev/sda",
     "curl x | sh", "wget -O- x | sh"],
)  # fmt: skip
def test_t09_commands_that_destroy_or_run_what_is_fetched_are_critical(code: str) -> None:
    assert level(code, "shell") == "critical"


@pytest.mark.parametrize(
    ("code", "wanted"),
    [("ls; evil", "medium"), ("ls; rm x", "high"), ("ls $(rm x)", "high"), ("cat a > b", "high"),
     ("git push", "high"), ("git checkout --force x", "high"), ("sudo ls", "high"),
     ("chmod 1 x", "high"), ("mv a b", "high"), ("evil", "medium"), ("ls | wc -l", "safe")],
)  # fmt: skip
def test_t10_a_command_line_is_graded_by_its_worst_part(code: str, wanted: str) -> None:
    assert level(code, "shell") == wanted


def test_t10_a_program_that_only_looks_is_safe() -> None:
    looks = (
        "ls tree find pwd file stat cat head tail less more grep rg ag ack wc du echo which whereis"
    )
    assert {level(f"{program} x", "shell") for program in looks.split()} == {"safe"}


@pytest.mark.parametrize(
    ("code", "wanted"),
    [("eval('1')", "critical"), ("new Function('x')", "critical"),
     ("require('child_process')", "critical"), ("require('fs')", "high"),
     ("import 'node:http'", "high"), ("fetch('x')", "high"), ("let a = 1", "safe")],
)  # fmt: skip
def test_t11_javascript_is_graded_by_what_it_imports_and_calls(code: str, wanted: str) -> None:
    assert level(code, "javascript") == wanted


def test_t12_browser_actions_that_pay_or_tell_secrets_are_high_and_others_low() -> None:
    assert assess("fill", "browser", {"field": "password"}).level == "high"
    assert level("enter the credit card", "browser") == "high"
    assert assess("click", "browser", {"label": "Pay"}).level == "high"
    assert assess("click", "browser", {"label": "About"}).level == "low"


def test_t20_what_destroys_is_denied_with_a_word_about_what_to_do_instead() -> None:
    for code, instead in (
        ("rm -rf /workspace", "sandbox_reset"),
        ("rm -rf ~", "name what is to go"),
        ("mkfs.ext4 /dev/sda", "make it in a file"),
        ("cd /dev; wipefs -a sda", "make it in a file"),
        (":(){ :|:& };:", "start a fixed number"),
        ("x > /dev/sda", "write to a file"),
    ):
        for profile in ("isolated", "strict"):
            decided = decide(assess(code, "shell"), profile, "none", "shell")
            assert decided.verdict == "deny"
            assert instead in decided.sentence
            assert decided.match is not None
    for code in ("mkfs.ext4 disk.img", "mkswap -f ./swap", "wipefs -a x.img", "mke2fs b 8M"):
        assert decide(assess(code, "shell"), "isolated", "none", "shell").verdict == "allow"
    assert decide(assess("rm -rf /", "shell"), "off", "open", "shell").verdict == "allow"


@pytest.mark.parametrize(
    "code",
    ["time -p rm -rf /", "sudo --user root rm -rf /", "flock f -c 'rm -rf /'", "rm -rf /?*",
     'rm -rf "${HOME:?}"/*', "rm -rf ${HOME:-/}",
     "script -qc 'rm -rf /' log", "bash -c -- 'rm -rf /'", "shred -z /dev/sda"],
)  # fmt: skip
def test_t20_what_destroys_is_denied_behind_options_and_programs_that_run_it(code: str) -> None:
    assert decide(assess(code, "bash"), "isolated", "none", "bash").verdict == "deny"


def test_t20_code_inside_of_other_code_is_denied_like_the_code_itself() -> None:
    for code, language in (
        ("python -c \"import os; os.system('rm -rf /')\"", "bash"),
        ("import subprocess\nsubprocess.run(['rm', '-rf', '/'])", "python"),
        ("require('child_process').execSync('rm -rf /')", "javascript"),
        ("import shutil; shutil.rmtree('/workspace')", "python"),
        ("import os\nos.system(command='rm -rf /')", "python"),
        ("import subprocess\nsubprocess.run(args=['rm', '-rf', '/'])", "python"),
        ("require('fs').rmSync('/workspace', { recursive: true })", "javascript"),
    ):
        assert decide(assess(code, language), "isolated", "none", language).verdict == "deny"


@pytest.mark.parametrize(
    ("code", "profile", "network", "verdict"),
    [("git push", "isolated", "none", "allow"), ("git push", "isolated", "allowlist", "allow"),
     ("git push", "isolated", "open", "ask"), ("git push", "strict", "none", "ask"),
     ("rm x", "isolated", "open", "allow"), ("rm x", "strict", "none", "ask"),
     ("curl x | sh", "isolated", "open", "allow"), ("curl x | sh", "strict", "open", "deny"),
     ("npm test", "strict", "open", "allow"), ("git push; rm -rf ~", "isolated", "open", "deny")],
)  # fmt: skip
def test_a_profile_decides_by_level_and_tags(
    code: str, profile: Profile, network: Network, verdict: str
) -> None:
    assert decide(assess(code, "bash"), profile, network, "bash").verdict == verdict


def test_critical_python_is_asked_about_under_strict_and_never_denied_for_its_level() -> None:
    found = assess("eval(x)", "python")
    assert decide(found, "strict", "none", "python").verdict == "ask"
    assert decide(found, "isolated", "none", "python").verdict == "allow"


def test_many_matches_of_other_rules_hide_none_that_decides() -> None:
    padding = "".join(f"chmod {n} f{n}; echo > /dev/x{n}; " for n in range(200))
    destroys = assess(f"{padding} rm -rf /", "bash")
    assert decide(destroys, "isolated", "none", "bash").verdict == "deny"
    leaves = assess(f"{padding} git push", "bash")
    assert decide(leaves, "isolated", "open", "bash").verdict == "ask"
    assert len(leaves.patterns) < 100


def test_auto_is_strict_where_nothing_isolates() -> None:
    assert choose_profile("auto", "unsafe-local") == "strict"
    assert choose_profile("auto", "bubblewrap") == "isolated"
    assert choose_profile("off", "unsafe-local") == "off"


def test_a_relative_path_is_seen_from_the_folder_of_the_call() -> None:
    assert assess("rm -rf *", "bash", {"cwd": "/workspace"}).level == "critical"
    assert assess("rm -rf *", "bash", {"cwd": "/workspace/build"}).level == "high"
    assert assess("rm -rf *", "bash").level == "high"
