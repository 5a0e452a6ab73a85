"""Assistants as an operator writes them, and what is said of one that cannot be used."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from mcp_sandbox.agents.assistants import list_assistants, read_assistant
from mcp_sandbox.errors import ConfigError, InvalidArgument

WRITTEN = {
    "name": "Coder",
    "connector": "deepseek/v3",
    "sandbox": {
        "command": "claude",
        "image": "mcp-sandbox/claude-full:latest",
        "max_memory": "4g",
        "max_cpu": 2.0,
        "timeout": "10m",
        "arguments": {"max_turns": 20, "permission_mode": "acceptEdits"},
    },
    "mcp": {"servers": [{"server_id": "filesystem", "tools": ["read_file", "write_file"]}]},
    "access": ["local", "ann"],
}


def write(root: Path, name: str, text: object, file: str = "assistant.yaml") -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / file
    place.parent.mkdir(exist_ok=True)
    place.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return place


@pytest.mark.parametrize("file", ["assistant.yaml", "package.yao"])
def test_a_folder_is_an_assistant(tmp_path: Path, file: str) -> None:
    text = yaml.safe_dump(WRITTEN)
    if file == "package.yao":
        text = f"// what it is\n{json.dumps(WRITTEN)[:-1]}, /* and no more */ }}"
    folder = write(tmp_path, "coder", text, file).parent
    write(tmp_path, "coder", [{"role": "system", "content": "Be brief."}], "prompts.yml")
    write(tmp_path, "coder", {"command": ["fs", "--root", "/data"]}, "mcps/filesystem.yaml")
    (folder / "skills" / "adding").mkdir(parents=True)
    (folder / "skills" / "adding" / "SKILL.md").write_text("")
    (folder / "hooks.py").write_text("")
    found = read_assistant([tmp_path], "coder", "ann")
    assert found.connector == "deepseek/v3"
    assert found.sandbox
    assert (found.sandbox.max_memory, found.sandbox.max_cpu, found.sandbox.timeout) == (
        *(4 << 30, 2.0, 600),
    )
    assert found.sandbox.arguments == {"max_turns": 20, "permission_mode": "acceptEdits"}
    assert found.tools == {"filesystem": ("read_file", "write_file")}
    assert found.servers["filesystem"].command == ("fs", "--root", "/data")
    assert list(found.prompts) == [{"role": "system", "content": "Be brief."}]
    assert list(found.taught) == ["adding"]
    assert (found.skills, found.hooks) == (folder / "skills", folder / "hooks.py")


def test_without_a_sandbox_it_only_talks(tmp_path: Path) -> None:
    write(tmp_path, "plain", {"connector": "deepseek"})
    assert read_assistant([tmp_path], "plain", "local").sandbox is None
    assert read_assistant([], "", "local").sandbox


def test_what_it_has_found_is_shown_nowhere(tmp_path: Path) -> None:
    write(tmp_path, "coder", {})
    write(tmp_path, "coder", {"command": ["x"], "env": {"KEY": "a-secret"}}, "mcps/a.yaml")
    found = read_assistant([tmp_path], "coder", "local")
    assert "a-secret" not in f"{found!r} {found}"
    for write_down in (pickle.dumps, json.dumps):
        with pytest.raises(TypeError):
            write_down(found)


def test_only_the_users_that_it_names_have_it(tmp_path: Path) -> None:
    write(tmp_path, "mine", {})
    write(tmp_path, "anns", {"access": ["ann"]})
    assert list_assistants([tmp_path], "local") == ["mine"]
    assert list_assistants([tmp_path], "ann") == ["anns"]
    with pytest.raises(InvalidArgument, match="no assistant 'anns'; there are mine"):
        read_assistant([tmp_path], "anns", "local")


def test_of_two_of_a_name_the_first_counts(tmp_path: Path) -> None:
    write(tmp_path / "a", "coder", {"connector": "first"})
    write(tmp_path / "b", "coder", {"connector": "second"})
    found = read_assistant([tmp_path / "a", tmp_path / "b"], "coder", "local")
    assert found.connector == "first"


@pytest.mark.parametrize("name", ["..", "../coder", "/coder", "coder/.", "x\0", "Coder", "nobody"])
def test_a_name_is_no_path(tmp_path: Path, name: str) -> None:
    write(tmp_path / "all", "coder", {})
    write(tmp_path, "other", {})
    with pytest.raises(InvalidArgument, match="there are coder"):
        read_assistant([tmp_path / "all"], name, "local")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sandbox:\n  timeout: 10 parsecs\n", "line 2: sandbox.timeout: write a time as seconds"),
        ("sandbox:\n  max_memory: -1\n", "line 2: sandbox.max_memory: should be greater"),
        ("sandbox:\n  max_cpu: many\n", "line 2: sandbox.max_cpu: should be a valid number"),
        (
            "sandbox:\n  command: claude\n  arguments: {max_turns: x}\n",
            "line 3: sandbox.arguments: the arguments of claude cannot be used: max_turns: should",
        ),
        (
            "sandbox:\n  arguments: {max_turns: x}\n",
            "line 2: sandbox.arguments: the arguments of clau",
        ),
        ("connector: a\nsandbx: {}\n", "line 2: sandbx: there is no such key; there are name, con"),
        ("mcp:\n  servers:\n  - tools: [a]\n", "line 3: mcp.servers.0.server_id: Field required"),
        ("name: [\n", "cannot be read: "),
        ("- a\n", "valid dictionary"),
        ("a: \x01\n", "cannot be read: "),
        pytest.param(f"#{'x' * (1 << 20)}", "it has over 1,048,576 characters", id="large"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    place = write(tmp_path, "coder", text)
    with pytest.raises(ConfigError) as caught:
        read_assistant([tmp_path], "coder", "local", "claude")
    assert str(caught.value).startswith(str(place))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("prompts.yml", "- {role: user, content: a}"),
        ("prompts.yml", "hello"),
        ("mcps/a.yaml", "command: []"),
        ("mcps/a.yaml", "url: a\ncommand: [b]"),
        ("package.yao", "{name: "),
        ("package.yao", '{"name": "\\u12"}'),
    ],
)
def test_other_files_are_checked_too(tmp_path: Path, file: str, text: str) -> None:
    if file != "package.yao":
        write(tmp_path, "coder", {})
    place = write(tmp_path, "coder", text, file)
    with pytest.raises(ConfigError, match=str(place)):
        read_assistant([tmp_path], "coder", "local")


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agents\.folders: there is no folder"):
        list_assistants([tmp_path / "none"], "local")


def test_what_is_no_assistant_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    write(tmp_path, ".hidden", {})
    values: Any = list_assistants([tmp_path], "local")
    assert values == []
