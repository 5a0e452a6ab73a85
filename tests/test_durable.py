"""Whole files, whole folders and locks."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sandbox.durable import lock, publish_folder, read_note, unlock, write_file, write_note


def test_a_file_is_replaced_as_a_whole_and_no_draft_stays(tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        write_file(tmp_path / "note", text)
    assert (tmp_path / "note").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["note"]


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "note").mkdir()
    with pytest.raises(OSError, match="note"):
        write_file(tmp_path / "note", b"new")
    assert os.listdir(tmp_path) == ["note"]


def test_a_name_that_is_taken_keeps_its_folder(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    assert publish_folder(tmp_path / "first", tmp_path / "target")
    assert not publish_folder(tmp_path / "second", tmp_path / "target")
    assert (tmp_path / "target" / "file").read_text() == "first"


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from mcp_sandbox.durable import lock;"
        "lock(Path(sys.argv[1]), wait=True); print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "lock"], stdin=pipe, stdout=pipe
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"\n"
        assert lock(tmp_path / "lock", wait=False) is None
        holder.kill()
    ours = lock(tmp_path / "lock", wait=False)
    assert ours is not None
    unlock(ours)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"7", b"\xff", b"[" * 100_000])
def test_what_is_no_note_is_told_apart_from_none(tmp_path: Path, text: bytes) -> None:
    assert read_note(tmp_path / "note") is None
    (tmp_path / "note").write_bytes(text)
    with pytest.raises(ValueError):  # noqa: PT011 - its words are json's
        read_note(tmp_path / "note")


def test_a_note_is_written_also_where_a_folder_lies(tmp_path: Path) -> None:
    (tmp_path / "note").mkdir()
    with pytest.raises(ValueError, match="directory"):
        read_note(tmp_path / "note")
    write_note(tmp_path / "note", {"a": 1})
    assert read_note(tmp_path / "note") == {"a": 1}
    (aside,) = tmp_path.glob("note.damaged-*")
    assert aside.is_dir()


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_file_and_its_name_are_synced_in_this_order(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from mcp_sandbox.durable import make_folder, write_note;"
        "make_folder(Path(sys.argv[1], 'a', 'b')); write_note(Path(sys.argv[1], 'a', 'b', 'n'), {})"
    )
    command = [
        "strace",
        "-y",
        "-e",
        "trace=write,fsync,rename,mkdir",
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    steps = [re.sub(rf".*?(\w+)\(.*?{tmp_path}([^>\"]*).*", r"\1 \2", line) for line in lines]
    steps = [re.sub(r"\.n\..*", "draft", step) for step in steps if "exit" not in step]
    assert steps == [
        "mkdir /a",
        "fsync ",
        "mkdir /a/b",
        "fsync /a",
        "write /a/b/draft",
        "fsync /a/b/draft",
        "rename /a/b/draft",
        "fsync /a/b",
    ]
