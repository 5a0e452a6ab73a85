"""The commands that show an audit and prove it."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mcp_sandbox.audit.log import AuditWriter
from mcp_sandbox.cli import cli


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    writer = AuditWriter(tmp_path / "data" / "sandbox" / "audit", 1 << 20)
    for number in range(6):
        fields = {"user": "local", "chat": "ab"[number % 2], "arguments": "echo \x1b[2J"}
        assert writer.append("begun", fields, wait=True)
    writer.close()
    return tmp_path / "data"


def audit(data: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["audit", *words, "--data", str(data)])


def test_lines_are_shown_to_people_and_exported_as_they_were_written(data: Path) -> None:
    shown = audit(data, "show", "local/b", "-n", "2")
    assert shown.output.count("local/b") == 2
    assert "\x1b" not in shown.output
    exported = audit(data, "show", "--json").output
    assert exported == (data / "sandbox" / "audit" / "audit.jsonl").read_text()
    assert len(audit(data, "show", "a", "--json").output.splitlines()) == 3


def test_an_audit_is_proved_up_to_a_head_that_was_kept(data: Path) -> None:
    head = audit(data, "head").output.strip()
    assert (
        audit(data, "head", "--json").output
        == json.dumps(dict(zip(("n", "hash"), (6, head[2:]), strict=True))) + "\n"
    )
    proved = audit(data, "verify", "--head", head)
    assert (proved.exit_code, proved.output) == (0, f"lines 1 to 6 are intact; head {head}\n")
    path = data / "sandbox" / "audit" / "audit.jsonl"
    path.write_bytes(path.read_bytes().replace(b"echo", b"ecko", 1))
    changed = audit(data, "verify", "--json")
    assert changed.exit_code == 1
    assert json.loads(changed.output)["problems"] == ["line 1 was changed"]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:3]))
    said = audit(data, "verify", "--head", head)
    assert said.exit_code == 1
    assert "lines 4 to 6 are missing from the end" in said.output
    assert audit(data, "verify", "--head", "6").exit_code == 2


def test_lines_that_are_no_events_stop_no_command(data: Path) -> None:
    path = data / "sandbox" / "audit" / "audit.jsonl"
    head = path.read_bytes().splitlines()[-1][-66:-2]
    # Sealed as a line is, but no JSON.
    body = b'{"n":7,"time":"x","kind":"removed","until","prev":"%b"}' % head
    sealed = b'%b,"hash":"%b"}\n' % (body[:-1], sha256(body).hexdigest().encode())
    with path.open("ab") as file:
        file.write(b"[1]\n5\n%b\n" % (b"[" * 100_000))
    assert audit(data, "show", "-n", "9").exit_code == 0
    assert len(audit(data, "show", "--json").output.splitlines()) == 6
    assert json.loads(audit(data, "verify", "--json").output)["head"].startswith("6:")
    path.write_bytes(b"".join([*path.read_bytes().splitlines(keepends=True)[1:6], sealed]))
    shown = audit(data, "verify")
    assert (shown.exit_code, "what line 2 follows is missing" in shown.output) == (1, True)


def test_where_nothing_was_recorded_the_commands_say_so(data: Path) -> None:
    empty = data / "other"
    assert audit(empty, "verify").output == "nothing was recorded yet\n"
    assert audit(empty, "show", "--json").output == ""
