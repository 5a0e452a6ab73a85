"""What the allowed-tools of active skills leave of our tools."""

import pytest

from mcp_sandbox.policy.allowed_tools import ActiveSkill, refusal


def skill(name: str, *allowed_tools: str, folder: str | None = None) -> ActiveSkill:
    return ActiveSkill(f"skill://user/{name}/SKILL.md", name, "sha256:0", folder, allowed_tools)


def allowed(entries: tuple[str, ...], tool: str, **arguments: object) -> bool:
    folder = "/opt/skills/x"
    return refusal([skill("x", *entries, folder=folder)], tool, arguments) is None


@pytest.mark.parametrize(
    ("entries", "tool"),
    [
        (("Bash",), "exec"),
        (("Bash(*)",), "run_code"),
        (("Read",), "read_file"),
        (("Read",), "list_files"),
        (("Grep", "Glob"), "grep"),
        (("MultiEdit",), "edit_file"),
        (("write_file",), "write_file"),
        (("mcp__anything__write_file",), "write_file"),
        (("mcp__sandbox",), "delete_file"),
        (("mcp__mcp-sandbox__*",), "sandbox_reset"),
        (("*",), "move_file"),
        (("Read",), "sandbox_info"),
        (("Read",), "skill_activate"),
        ((), "exec"),
    ],
)
def test_a_tool_is_allowed_by_its_own_name_and_by_those_of_other_clients(
    entries: tuple[str, ...], tool: str
) -> None:
    assert allowed(entries, tool, command="ls", path="a", code="1", language="python")


@pytest.mark.parametrize(
    ("entries", "tool"),
    [
        (("Read", "Grep"), "exec"),
        (("Read", "Grep"), "glob"),
        (("Write",), "edit_file"),
        (("mcp__other__read",), "read_file"),
        (("mcp__other",), "read_file"),
        (("Bash(",), "exec"),
        (("WebFetch",), "sandbox_reset"),
    ],
)
def test_other_tools_are_not(entries: tuple[str, ...], tool: str) -> None:
    assert not allowed(entries, tool, command="ls", path="a")


@pytest.mark.parametrize(
    ("pattern", "command", "within"),
    [
        ("git:*", "git status", True),
        ("git:*", "git", True),
        ("git:*", "cd src && git diff | git apply", True),
        ("git *", "git log -1", True),
        ("git diff:*", "git diff HEAD", True),
        ("git diff:*", "git push", False),
        ("git:*", "gitk", False),
        ("git:*", "git status; rm -rf x", False),
        ("git:*", "git log $(rm x)", False),
        ("git:*", "git log `rm x`", False),
        ("git:*", 'git log "${a:-$(rm x)}"', False),
        ("git:*", "git apply <<E\n$(rm x)\nE\n", False),
        ("git:*", "git apply <<'E'\n$(rm x)\nE\n", True),
        ("git:*", "git() { rm x; }; git", False),
        ("git:*", "git diff > /workspace/other", False),
        ("git:*", "git diff >> ~/.bashrc", False),
        ("git:*", ": > other; git diff", False),
        ("git:*", "git diff 2>/dev/null >&2", True),
        ("git:*", "[[ 'a[$(rm x)]' -eq 1 ]]; git diff", False),
        ("git:*", "[ -v 'a[$(rm x)]' ]; git diff", False),
        ("git:*", "set -- 'a[$(rm x)]'; git diff", False),
        ("git:*", "set -euo pipefail; git diff", True),
        ("git:*", "for PATH in ./evil; do git diff; done", False),
        ("git:*", "for x in 'a[$(rm x)]'; do ((x)); git diff; done", False),
        ("git:*", "for x in 'a[$(rm x)]'; do git diff ${y:x}; done", False),
        ("git:*", "for x in a b; do git add $x; done", True),
        ("git:*", "PATH=/evil git status", False),
        ("git:*", "eval git status", False),
        ("git:*", "$X git", False),
        ("git:*", "git log <(rm x)", False),
        ("git:*", "git log $((1 + `rm x`))", False),
        ("git:*", "if git diff; then rm x; fi", False),
        ("git:*", "# git", False),
        ("git:*", "git log " + "$(" * 60 + "rm x" + ")" * 60, False),
        ("git:*", "git log;" * 6000 + "rm x", False),
        ("npm run test", "npm run test", True),
        ("npm run test", "npm run test:all", False),
        ("npm run *:unit", "npm run test:unit", True),
        ("python3 ${CLAUDE_SKILL_DIR}/a.py:*", "python3 /opt/skills/x/a.py 1", True),
        ("python3 {baseDir}/a.py:*", "python3 /workspace/b.py", False),
    ],
)
def test_a_command_line_is_allowed_if_each_of_its_commands_is(
    pattern: str, command: str, within: bool
) -> None:
    assert allowed((f"Bash({pattern})",), "exec", command=command) == within
    assert allowed((f"Bash({pattern})",), "run_code", code=command, language="bash") == within


def test_patterns_hold_for_code_files_and_variables_too() -> None:
    assert allowed(("Bash(python:*)",), "run_code", code="x", language="python")
    assert not allowed(("Bash(git:*)",), "run_code", code="git", language="python")
    assert allowed(("Bash(rm:*)",), "delete_file", path="a b")
    assert not allowed(("Bash(mv:*)",), "delete_file", path="a; mv x")
    assert allowed(("Read(docs/**)",), "read_file", path="/workspace/docs/a/b.md")
    assert not allowed(("Read(docs/**)",), "read_file", path="docs/../secret")
    for path in ("file:///etc/a.md", "'/etc/a.md", "$HOME/a.md", "~/a.md", " /etc/a.md"):
        assert not allowed(("Read(*.md)",), "read_file", path=path)
        assert not allowed(("Glob(*.md)",), "glob", pattern=path)
    assert allowed(("Read(~/docs/*)",), "read_file", path="~/docs/a.md")
    assert not allowed(("Glob(src/**)",), "glob", pattern="/tmp/*", path="src/a")
    assert allowed(("Glob(src/**)",), "glob", pattern="*.py", path="src/a")
    assert not allowed(("Bash(git:*)",), "exec", command="git log", env={"PATH": "/evil"})


def test_several_skills_allow_what_any_of_them_does_and_the_words_name_them() -> None:
    active = [skill("reads", "Read"), skill("greps", "Grep"), skill("open")]
    assert refusal(active, "grep", {}) is None
    assert refusal(active, "read_file", {"path": "a"}) is None
    said = refusal(active, "exec", {"command": "ls"})
    assert said
    assert "reads: Read; greps: Grep" in said
    assert "open" not in said
    assert refusal([skill("open")], "exec", {"command": "ls"}) is None


@pytest.mark.parametrize(
    ("command", "within"),
    [
        ("git diff > out/a", True),
        ("git diff > /workspace/out/a", True),
        ("cd src && git diff > /workspace/out/a", True),
        ("cd /etc && git diff > out/a", False),
        ("git diff > out/../a", False),
        ("git diff > out/$x", False),
        ("git diff > ~/a", False),
    ],
)
def test_a_command_writes_by_redirection_where_files_may_be_written(
    command: str, within: bool
) -> None:
    entries = ("Bash(git:*)", "Write(/workspace/out/*)")
    assert allowed(entries, "exec", command=command) is within
    assert allowed(("Bash", "Read"), "exec", command=command)
