"""`mcp-sandbox init …` writes the files by which agents find the server, and takes them back."""

import json
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import json5
import pytest
from typer.testing import CliRunner, Result

from mcp_sandbox.cli import cli

OTHERS = '{\n    "mcpServers": {\n        "other": {"command": "x"}\n    },\n    "kept": 1.50\n}\n'
WRITTEN = {
    "claude": (".mcp.json", "mcpServers", ["connect"]),
    "cursor": (".cursor/mcp.json", "mcpServers", ["connect", "--project", "${workspaceFolder}"]),
    "vscode": (".vscode/mcp.json", "servers", ["connect", "--project", "${workspaceFolder}"]),
}
Init = Callable[..., Result]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_STATE_HOME", "CLAUDE_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def init(project: Path) -> Init:
    """Run it in a project of its own, in an empty home, without the first call."""

    def run(*arguments: str, answer: str = "") -> Result:
        return CliRunner().invoke(cli, ["init", *arguments, "--no-check"], input=answer)

    return run


def entry(file: Path, section: str = "mcpServers") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())[section]["sandbox"]
    return found


@pytest.mark.parametrize("client", WRITTEN)
def test_the_file_names_the_relay_by_a_path_that_exists(
    client: str, init: Init, project: Path
) -> None:
    name, section, arguments = WRITTEN[client]
    done = init(client, "--yes")
    assert done.exit_code == 0, done.output
    written = entry(project / name, section)
    assert written["args"] == arguments
    assert os.access(written["command"], os.X_OK)
    assert done.stdout.splitlines()[-1].startswith("Next: ")


def test_claude_is_connected_for_all_projects_in_its_own_settings(
    init: Init, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert init("claude", "--user", "--yes").exit_code == 0
    settings = project.parent / "home" / ".claude.json"
    assert entry(settings)["type"] == "stdio"
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(project.parent))
    assert init("claude", "--user", "--yes").exit_code == 0
    assert entry(project.parent / ".claude.json")["type"] == "stdio"


def test_settings_with_many_projects_get_the_entry_in_no_time(init: Init, project: Path) -> None:
    one = {"history": ["x" * 80] * 40, "mcpServers": {"sandbox": {"command": "x"}}}
    projects = {f"/project/{number}": one for number in range(100)}
    settings = project.parent / "home" / ".claude.json"
    settings.write_text(json.dumps({"projects": projects, "mcpServers": {}}, indent=2))
    started = time.process_time()
    assert init("claude", "--user", "--yes").exit_code == 0
    assert time.process_time() - started < 5
    assert entry(settings)["type"] == "stdio"
    assert json.loads(settings.read_text())["projects"] == projects


def test_the_inspector_finds_the_server_in_its_list(init: Init, project: Path) -> None:
    assert init("inspector", "--yes").exit_code == 0
    written = entry(project.parent / "home" / ".mcp-inspector" / "mcp.json")
    assert (written["args"], written["protocolEra"]) == (["connect", "--chat", "inspector"], "auto")


def test_the_diff_is_shown_and_a_no_changes_nothing(init: Init, project: Path) -> None:
    (project / ".mcp.json").write_text(OTHERS)
    for answer in ("n\n", ""):
        done = init("claude", answer=answer)
        assert done.exit_code == 1
        assert '+        "sandbox": {' in done.stdout
        assert "nothing was changed" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("nothing was changed")
    assert (project / ".mcp.json").read_text() == OTHERS
    assert init("claude", answer="y\n").exit_code == 0
    assert entry(project / ".mcp.json")


def test_print_shows_the_lines_and_writes_nothing(init: Init, project: Path) -> None:
    shown = init("vscode", "--print")
    assert json.loads(shown.stdout)["servers"]["sandbox"]["args"][0] == "connect"
    assert list(project.iterdir()) == []


def test_what_others_wrote_stays_in_its_order_and_style(init: Init, project: Path) -> None:
    file = project / ".mcp.json"
    file.write_text(OTHERS)
    file.chmod(0o640)
    assert init("claude", "--yes").exit_code == 0
    assert [*json.loads(file.read_text())] == ["mcpServers", "kept"]
    assert json.loads(file.read_text())["mcpServers"]["other"] == {"command": "x"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(os.listdir(project)) == [".mcp.json"]


@pytest.mark.parametrize(
    "before",
    [
        pytest.param('{"mcpServers": {"a": {}}}', id="one line"),
        pytest.param('{\r\n\t"mcpServers": {\r\n\t\t"a": {}\r\n\t}\r\n}\r\n', id="tabs, CRLF"),
        pytest.param('{\n   "ä": "\u2028é"\n}', id="three blanks, no last line end, no ASCII"),
        pytest.param('{\n  "a": "\\u00e9\\ud800"\n}\n', id="escapes"),
        pytest.param("", id="empty"),
    ],
)
def test_the_style_of_the_file_is_kept(before: str, init: Init, project: Path) -> None:
    file = project / ".mcp.json"
    file.write_bytes(before.encode())
    assert init("claude", "--yes").exit_code == 0
    written = file.read_bytes().decode()
    found = json.loads(written)
    del found["mcpServers"]["sandbox"]
    given = json.loads(before or "{}")
    assert found == {**given, "mcpServers": given.get("mcpServers", {})}
    assert written.endswith("\n") == (before.endswith("\n") or not before)
    assert written.count("\r\n") == (written.count("\n") if "\r\n" in before else 0)
    assert written.isascii() == before.isascii()
    if indents := re.findall(r"\n([ \t]+)", before):
        assert min(re.findall(r"\n([ \t]+)", written), key=len) == indents[0]
    assert ("\n" in written.strip()) == ("\n" in before.strip() or not before)
    assert init("claude", "--undo", "--yes").exit_code == 0
    assert file.read_bytes().decode() == before


def test_what_the_user_added_to_our_entry_stays(init: Init, project: Path) -> None:
    file = project / ".mcp.json"
    assert init("claude", "--yes").exit_code == 0
    added = {**entry(file), "url": "http://old", "timeout": 60000, "env": {"A": "b"}}
    file.write_text(json.dumps({"mcpServers": {"sandbox": added}}))
    assert init("claude", "--yes").exit_code == 0
    written = entry(file)
    assert (written["timeout"], written["env"]) == (60000, {"A": "b"})
    assert "url" not in written


def test_nothing_stays_of_an_entry_that_somebody_else_wrote(init: Init, project: Path) -> None:
    """It would set what our program starts in, and the diff would not show it."""
    file = project / ".mcp.json"
    old = {"command": "x", "env": {"MCP_SANDBOX_BACKEND": "unsafe-local"}, "cwd": "."}
    file.write_text(json.dumps({"mcpServers": {"sandbox": old}}))
    assert init("claude", "--yes").exit_code == 0
    assert sorted(entry(file)) == ["args", "command", "type"]
    assert init("claude", "--undo", "--yes").exit_code == 0
    assert entry(file) == old


COMMENTED = """\
\ufeff{
    // Servers of "mcpServers", "servers": { not here }
    "inputs": [{"servers": {"sandbox": 1}},], /* , */
    "servers": {
        "web": {"url": "https://example.com/a//b", }, // "sandbox": {}
        /* the one
           that is old */
        "old": {}%s // last
        // "sandbox": {"command": "none"},
    },
    // end
}
"""


@pytest.mark.parametrize("comma", ["", ",", " /* , */"])
def test_comments_and_last_commas_stay_where_they_are(
    comma: str, init: Init, project: Path
) -> None:
    file = project / ".vscode" / "mcp.json"
    file.parent.mkdir()
    before = COMMENTED % comma
    file.write_text(before)
    assert init("vscode", "--yes").exit_code == 0
    written = file.read_text()
    assert [*json5.loads(written.removeprefix("\ufeff"))["servers"]] == ["sandbox", "web", "old"]
    head, tail = before.split('    "servers": {\n')
    assert written.startswith(head + '    "servers": {\n        "sandbox": {\n')
    assert written.endswith("\n        },\n" + tail)
    # Another program writes: only our entry goes.
    file.write_text(written.replace('"old"', '"new"'))
    assert init("vscode", "--undo", "--yes").exit_code == 0
    assert file.read_text() == before.replace('"old"', '"new"')


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"servers": {"sandbox": 1 /* ours */, "b": 2}} // end', ["sandbox", "b"]),
        ('{"servers": {} // none yet\n}', ["sandbox"]),
        ('// nothing\n', ["sandbox"]),
        ('// nothing\n{ /* at all */ }', ["sandbox"]),
        ('{"a": 1, // one\n}', ["sandbox"]),
    ],
)  # fmt: skip
def test_an_entry_finds_its_place_among_comments(
    before: str, after: list[str], init: Init, project: Path
) -> None:
    file = project / ".vscode" / "mcp.json"
    file.parent.mkdir()
    file.write_text(before)
    assert init("vscode", "--yes").exit_code == 0
    written = file.read_text()
    assert [*json5.loads(written)["servers"]] == after
    assert json5.loads(written)["servers"]["sandbox"]["type"] == "stdio"
    assert all(each in written for each in re.findall(r"//.*|/\*.*?\*/", before))
    assert init("vscode", "--undo", "--yes").exit_code == 0
    assert file.read_text() == before


def test_a_second_time_changes_nothing(init: Init, project: Path) -> None:
    assert init("cursor", "--yes").exit_code == 0
    before = (project / ".cursor" / "mcp.json").stat()
    again = init("cursor")
    assert again.exit_code == 0
    assert "is as it should be" in again.stdout
    after = (project / ".cursor" / "mcp.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_undo_restores_exactly_what_was_there(init: Init, project: Path) -> None:
    file = project / ".mcp.json"
    odd = '\ufeff{ "mcpServers"\r\n:{ }   ,"b":\t[ ]}'
    file.write_bytes(odd.encode())
    assert init("claude", "--yes").exit_code == 0
    assert file.read_bytes().startswith("\ufeff{".encode())
    assert init("claude", "--undo", "--yes").exit_code == 0
    assert file.read_bytes() == odd.encode()


def test_undo_removes_the_file_and_folder_that_were_not_there(init: Init, project: Path) -> None:
    assert init("cursor", "--yes").exit_code == 0
    assert init("cursor", "--undo", "--yes").exit_code == 0
    assert list(project.iterdir()) == []
    told = init("cursor", "--undo", "--yes")
    assert told.exit_code == 1
    assert "nothing to undo" in str(told.exception)


def test_undo_takes_only_our_entry_when_others_wrote_since(init: Init, project: Path) -> None:
    file = project / ".mcp.json"
    assert init("claude", "--yes").exit_code == 0
    changed = json.loads(file.read_text())
    changed["mcpServers"]["later"] = {"command": "y"}
    file.write_text(json.dumps(changed))
    assert init("claude", "--yes").exit_code == 0
    assert init("claude", "--undo", "--yes").exit_code == 0
    assert json.loads(file.read_text()) == {"mcpServers": {"later": {"command": "y"}}}


def test_undo_after_two_changes_goes_back_to_before_the_first(init: Init, project: Path) -> None:
    file = project / ".mcp.json"
    file.write_text(OTHERS)
    assert init("claude", "--yes").exit_code == 0
    file.write_text(file.read_text().replace('"connect"', '"stdio"'))
    assert init("claude", "--yes").exit_code == 0
    assert entry(file)["args"] == ["connect"]
    assert init("claude", "--undo", "--yes").exit_code == 0
    assert file.read_text() == OTHERS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  // by hand\n  "mcpServers": {\n', "line 4 is no JSON"),
        ('{"mcpServers": {', "is no JSON"),
        ('{"mcpServers": []}', "something else"),
        ('{"a": 1,,}', "line 1 is no JSON"),
        ('{"mcpServers": {"a": 1 /* , */ /* open */', "is no JSON"),
        ('{"a": 1, "a": 2}', "two values of the same name"),
        ("[]", "holds no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
        ("\x00\x80", "not UTF-8"),
    ],
)
def test_a_file_that_would_suffer_is_left_alone(
    text: str, said: str, init: Init, project: Path
) -> None:
    data = text.encode("latin-1")
    (project / ".mcp.json").write_bytes(data)
    done = init("claude", "--yes")
    assert done.exit_code == 1
    assert said in str(done.exception)
    assert (project / ".mcp.json").read_bytes() == data


def test_a_link_stays_and_its_file_is_changed(init: Init, project: Path) -> None:
    real = project.parent / "dotfiles.json"
    real.write_text(OTHERS)
    link = project / ".mcp.json"
    link.symlink_to("../dotfiles.json")
    done = init("claude", "--yes")
    assert done.exit_code == 0
    assert str(real) in done.stdout
    assert link.is_symlink()
    assert entry(real)
    assert init("claude", "--undo", "--yes").exit_code == 0
    assert real.read_text() == OTHERS


def test_a_read_only_file_a_dangling_link_and_a_folder_are_refused(
    init: Init, project: Path
) -> None:
    file = project / ".mcp.json"
    file.write_text(OTHERS)
    file.chmod(0o444)
    assert "is read-only" in str(init("claude", "--yes").exception)
    assert file.read_text() == OTHERS
    file.unlink()
    file.symlink_to("nowhere.json")
    assert "a link to nothing" in str(init("claude", "--yes").exception)
    file.unlink()
    file.mkdir()
    assert "is not a file" in str(init("claude", "--yes").exception)


def test_what_a_stranger_hid_in_the_file_does_not_reach_the_terminal(
    init: Init, project: Path
) -> None:
    (project / ".mcp.json").write_text('{"a": "\x9b31m", "b": "\u202e"}')
    done = init("claude", "--yes")
    assert done.exit_code == 0
    assert not {"\x9b", "\u202e"} & set(done.output)


def test_what_it_remembers_is_private_and_damage_to_it_is_told(init: Init, project: Path) -> None:
    (project / ".mcp.json").write_text(OTHERS)
    assert init("claude", "--yes").exit_code == 0
    folder = project.parent / "home" / ".local" / "state" / "mcp-sandbox" / "init"
    (kept,) = folder.iterdir()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, kept)] == [0o700, 0o600]
    kept.write_text("{}")
    before = (project / ".mcp.json").read_text()
    assert "is damaged" in str(init("claude", "--undo", "--yes").exception)
    assert (project / ".mcp.json").read_text() == before
