import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_sandbox.runner.files.operations import OPS
from mcp_sandbox.runner.wire.protocol import OpError
from tests.runner.files.bench import RUNNER, call, leftovers, refused, small_disk


def test_a_new_file_is_written_with_the_directories_above_it(workspace: Path) -> None:
    result, _ = call("write", b"hello", path="a/b/c.txt")
    assert result == {"path": "a/b/c.txt", "written": 5, "created": True}
    assert (workspace / "a/b/c.txt").read_bytes() == b"hello"
    assert (workspace / "a/b/c.txt").stat().st_mode & 0o777 == 0o644
    assert leftovers(workspace) == []


def test_a_replaced_file_keeps_its_mode(workspace: Path) -> None:
    (workspace / "run.sh").write_text("old")
    (workspace / "run.sh").chmod(0o750)
    data = os.urandom(2_000_000)
    assert call("write", data, path="run.sh")[0]["created"] is False
    assert (workspace / "run.sh").read_bytes() == data
    assert (workspace / "run.sh").stat().st_mode & 0o777 == 0o750


def test_a_reader_of_the_old_file_sees_it_whole(workspace: Path) -> None:
    (workspace / "f").write_text("old")
    with open(workspace / "f") as before:
        call("write", b"new", path="f")
        assert before.read() == "old"


def test_writing_through_a_link_changes_its_target(workspace: Path) -> None:
    (workspace / "target").write_text("old")
    (workspace / "link").symlink_to("target")
    (workspace / "dangling").symlink_to("later")
    call("write", b"new", path="link")
    assert (workspace / "link").is_symlink()
    assert (workspace / "target").read_text() == "new"
    call("write", b"made", path="dangling")
    assert (workspace / "later").read_text() == "made"


def test_appending_adds_to_the_end(workspace: Path) -> None:
    assert call("write", b"one", path="log", append=True)[0]["created"] is True
    result, _ = call("write", b"two", path="log", append=True)
    assert result == {"path": "log", "written": 3, "created": False}
    assert (workspace / "log").read_text() == "onetwo"


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        (b"caf\xe9", "é", "WINDOWS-1252"),
        (b"caf\xe9\n", "é" * 200_000, "WINDOWS-1252"),
        (b"x\n" * 3_000_000 + b"caf\xe9\n", "é", "WINDOWS-1252"),
        ("Привет всем\n".encode("koi8-r"), "é", "KOI8-R"),
        ("a\n".encode("utf-16"), "b\n", "UTF-16"),
    ],
)
def test_text_is_not_appended_where_it_would_mix_encodings(
    workspace: Path, data: bytes, text: str, encoding: str
) -> None:
    (workspace / "f").write_bytes(data)
    error = refused("write", text.encode(), path="f", append=True)
    assert error.code == "wrong_kind"
    assert f"iconv -f {encoding} -t UTF-8" in error.message
    assert (workspace / "f").read_bytes() == data


@pytest.mark.parametrize(
    ("data", "added"),
    [
        (b"caf\xe9\n", b"plain\n"),
        (b"caf\xe9\n", b"caf\xe8\n"),
        ("a\n".encode("utf-16"), "é\n".encode("utf-16-le")),
        ("naïve\n".encode() + b"stray \xe9\n", "é\n".encode()),
        ("naï".encode()[:-1], "ï".encode()[1:] + "ve, é\n".encode()),
        (b"\0caf\xe9", "é".encode()),
        (b"", "é".encode()),
    ],
)
def test_what_mixes_no_encodings_is_appended(workspace: Path, data: bytes, added: bytes) -> None:
    (workspace / "f").write_bytes(data)
    call("write", added, path="f", append=True)
    assert (workspace / "f").read_bytes() == data + added
    assert call("write", "é".encode(), path="f")[0]["created"] is False
    assert (workspace / "f").read_text() == "é"


@pytest.mark.parametrize("append", [False, True])
def test_only_regular_files_are_written(workspace: Path, append: bool) -> None:
    os.mkfifo(workspace / "fifo")
    (workspace / "folder").mkdir()
    (workspace / "loop").symlink_to("loop")
    (workspace / "file").touch()
    for name in ("fifo", "folder", "/dev/null"):
        assert refused("write", b"x", path=name, append=append).code == "wrong_kind"
    assert refused("write", b"x", path="loop", append=append).code == "invalid"
    assert refused("write", b"x", path="file/below", append=append).code == "wrong_kind"


@pytest.mark.parametrize("append", [False, True])
def test_a_full_disk_leaves_the_old_file_whole_and_nothing_new(
    workspace: Path, append: bool
) -> None:
    with small_disk(workspace / "disk") as disk:
        (disk / "f").write_text("old")
        error = refused("write", bytes(200_000), path="disk/f", append=append)
        assert error.code == "no_space"
        assert "delete" in error.message
        assert (disk / "f").read_text() == "old"
        assert refused("write", bytes(200_000), path="disk/d/new", append=append)
        assert [entry.name for entry in disk.iterdir()] == ["f"]
        assert call("delete", path="disk/f")[0]["entries"] == 1


def test_a_file_system_without_nameless_files_is_written_too(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What open then says is what such a file system says.
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    call("write", b"one", path="f")
    (workspace / "f").chmod(0o640)
    call("write", b"two", path="f")
    assert (workspace / "f").read_text() == "two"
    assert (workspace / "f").stat().st_mode & 0o777 == 0o640
    with small_disk(workspace / "disk") as disk:
        assert refused("write", bytes(200_000), path="disk/f").code == "no_space"
        assert list(disk.iterdir()) == []
    assert leftovers(workspace) == []


def test_a_read_only_place_says_where_to_write_instead(workspace: Path) -> None:
    with small_disk(workspace / "disk", "64k,ro"):
        for path in ("disk/f", "disk/new/f"):
            error = refused("write", b"x", path=path)
            assert error.code == "permission"
            assert "/tmp" in error.message


DRIVER = """
import os, signal, sys
if sys.argv[3:]:
    os.O_TMPFILE = os.O_DIRECTORY
sys.path.insert(0, sys.argv[1])
from mcp_sandbox.runner.files.operations import OPS
def stop(number, frame):
    raise SystemExit
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
append = sys.argv[2] == "append"
print(OPS["write"]({"path": "new/f" if append else "f", "append": append}, 0, 1), flush=True)
"""


def isolated(folder: Path) -> Path:
    """The runner alone, as it is in a sandbox."""
    shutil.copytree(RUNNER, folder / "mcp_sandbox" / "runner")
    return folder


def oldest_python() -> str:
    return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else "python3"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may enter, as they may not enter those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_the_sandbox_user_is_told_what_it_may_not_do(open_folder: Path) -> None:
    root, workspace = isolated(open_folder / "root"), open_folder / "workspace"
    workspace.mkdir()
    for name, owner, mode in [("mine", 10001, 0o444), ("theirs", 0, 0o600), ("shut", 0, 0o700)]:
        path = workspace / name
        path.mkdir() if name == "shut" else path.write_text("text")
        path.chmod(mode)
        os.chown(path, owner, owner)
    os.chown(workspace, 10001, 10001)
    calls = [
        ("write", {"path": "mine"}),
        ("edit", {"path": "mine", "old_bytes": 4}),
        ("read", {"path": "theirs"}),
        ("write", {"path": "shut/f"}),
        ("list", {"path": "shut"}),
        ("delete", {"path": "shut/f"}),
        ("move", {"source": "mine", "destination": "shut/f"}),
        ("grep", {"pattern": "text"}),
        ("list", {"depth": 3}),
    ]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import os\n"
        "from mcp_sandbox.runner.files.operations import OPS\n"
        "from mcp_sandbox.runner.wire.protocol import OpError\n"
        "for op, args in eval(sys.argv[2]):\n"
        "    body, feeding = os.pipe(); os.write(feeding, b'textnew'); os.close(feeding)\n"
        "    try: print(op, OPS[op](args, body, os.open('/dev/null', os.O_WRONLY)))\n"
        "    except OpError as exc: print(op, exc.code)\n"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", code, str(root), repr(calls)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "MCP_SANDBOX_WORKSPACE": str(workspace)},
        user=10001,
        group=10001,
        extra_groups=[],
    )
    assert done.stdout.splitlines() == [
        *(f"{op} permission" for op, _ in calls[:7]),
        "grep {'matches': 1, 'files': 1, 'truncated': False, 'hint': ''}",
        "list {'path': '.', 'total': 3, 'truncated': False}",
    ]
    assert leftovers(workspace) == []


@pytest.mark.parametrize(
    ("op", "args"),
    [("write", {}), ("write", {"append": True}), ("edit", {"old_bytes": 3})],
    ids=["replace", "append", "edit"],
)
@pytest.mark.parametrize("came", [b"oldne", b"oldnew the e", b""])
def test_a_body_that_did_not_come_whole_is_not_written(
    workspace: Path, op: str, args: dict[str, object], came: bytes
) -> None:
    """The pipe also ends when the runner dies: only its last bytes tell."""
    (workspace / "f").write_text("old")
    body, feeding = os.pipe()
    os.write(feeding, came)
    os.close(feeding)
    with pytest.raises(OpError, match="did not come whole"):
        OPS[op]({"path": "f", **args}, body, -1, b"the end")
    os.close(body)
    assert (workspace / "f").read_text() == "old"
    assert leftovers(workspace) == []


@pytest.mark.parametrize("how", [["replace"], ["append"], ["replace", "named"]])
def test_a_write_that_is_stopped_leaves_nothing_behind(
    workspace: Path, tmp_path: Path, how: list[str]
) -> None:
    (workspace / "f").write_text("old")
    root = isolated(tmp_path / "root")
    process = subprocess.Popen(
        [oldest_python(), "-I", "-S", "-c", DRIVER, str(root), *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    with process:
        assert process.stdout.readline() == b"ready\n"
        # More than a pipe holds: once it is taken, the write is under way.
        process.stdin.write(bytes(1_000_000))
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b""
    assert (workspace / "f").read_text() == "old"
    assert [entry.name for entry in workspace.iterdir()] == ["f"]


def test_the_runner_alone_imports_without_site_packages(tmp_path: Path) -> None:
    root = isolated(tmp_path / "root")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from mcp_sandbox.runner.files.operations import OPS\n"
        "heavy = {'subprocess', 'tarfile', 'difflib', 'pathlib', 'ctypes', 'asyncio'}\n"
        "print(len(OPS), sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [oldest_python(), "-I", "-S", "-c", code, str(root)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "13 []\n"


def interpreters() -> list[str]:
    """Ours and every other version of Python that is installed."""
    versions = ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14")
    found = filter(None, (shutil.which(f"python{version}") for version in versions))
    return sorted({sys.executable, *found})


@pytest.mark.parametrize("python", interpreters())
def test_every_operation_works_on_each_python(tmp_path: Path, python: str) -> None:
    # What a version manager puts there may start nothing.
    if not subprocess.run([python, "-V"], check=False, capture_output=True).stdout:
        pytest.skip(f"{python} does not start")
    (tmp_path / "workspace").mkdir()
    script = Path(__file__).with_name("every_op.py")
    root = isolated(tmp_path / "root")
    done = subprocess.run(
        [python, "-I", "-S", "-W", "error", str(script), str(root), str(tmp_path / "workspace")],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "write {'path': 'd/f', 'written': 8, 'created': True} b''",
        "write {'path': 'd/f', 'written': 6, 'created': False} b''",
        "edit {'path': 'd/f', 'replacements': 1, 'diff_bytes': 52} "
        "b'--- d/f\\n+++ d/f\\n@@ -1,3 +1,3 @@\\n one\\n-two\\n+2\\n three\\n'",
        "edit no_match b''",
        "read {'size': 12, 'sent': 12} b'one\\n2\\nthree\\n'",
        "read_lines {'path': 'd/f', 'size': 12, 'kind': 'text', 'mime': 'text/plain', "
        "'first_line': 2, 'lines': 2, 'total_lines': 3, 'more': False, 'long_lines_cut': 0, "
        "'encoding': ''} b'2\\nthree\\n'",
        "list {'path': '.', 'total': 2, 'truncated': False} b'2'",
        "glob {'total': 1, 'truncated': False, 'hint': ''} b'[\"d/f\"]'",
        "grep {'matches': 1, 'files': 1, 'truncated': False, 'hint': ''} b'd/f:3:three\\n'",
        "move {'source': 'd/f', 'destination': 'g', 'replaced': False} b''",
        "delete {'path': 'd', 'kind': 'directory', 'entries': 1} b''",
        "delete invalid b''",
    ]
