"""Archives that nobody packed here: each is refused, and nothing of it is left."""

import io
import itertools
import os
import re
import shutil
import signal
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mcp_sandbox.runner.files import archive
from mcp_sandbox.runner.files.moving import remove_tree
from mcp_sandbox.runner.files.operations import OPS
from mcp_sandbox.runner.wire.protocol import OpError
from tests.runner.files.bench import call, leftovers, make_deep, refused

ROOTS = ["workspace", "home"]
MOST: dict[str, Any] = {"roots": ROOTS, "max_bytes": 1 << 24, "max_entries": 1000}
END = bytes(1024)


@pytest.fixture(autouse=True)
def sigterm_as_before() -> Iterator[None]:
    """A worker is a process of its own, so that an operation may ignore the signal."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def entry(name: str, kind: bytes = tarfile.REGTYPE, content: bytes = b"", **facts: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mode = kind, len(content), 0o755
    for key, value in facts.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512)


def folder(name: str) -> bytes:
    return entry(name, tarfile.DIRTYPE)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> bytes:
    return entry(name, kind, linkname=target)


def extended(records: bytes) -> bytes:
    return entry("pax", tarfile.XHDTYPE, records)


W = folder("workspace")
HOSTILE = {
    "noise": (b"\xff" * 4096, "cannot be used"),
    "a name that leads up": (W + entry("workspace/../x"), "no usable name"),
    "a name that leads up from the root": (entry("../x"), "no usable name"),
    "an absolute name": (W + entry("/etc/x"), "no usable name"),
    "an empty part": (W + entry("workspace//x"), "no usable name"),
    "a dot": (W + entry("workspace/./x"), "no usable name"),
    "a name with a NUL": (
        W + extended(b"22 path=workspace/a\0b\n") + entry("x"),
        "cannot be used",
    ),
    "a name of ours": (W + entry("workspace/.~mcp-unpacked"), "no usable name"),
    "another root": (folder("etc"), "is no root"),
    "a root that is a file": (entry("workspace"), "is no folder"),
    "a root that is a link": (link("workspace", "/etc"), "is no folder"),
    "a root twice": (W + folder("home") + W, "not empty|twice"),
    "a file without its folder": (W + entry("workspace/a/b"), "right before its content"),
    "a file before its root": (entry("workspace/a"), "right before its content"),
    "a folder that is entered again": (
        W + folder("workspace/a") + folder("workspace/b") + entry("workspace/a/x"),
        "right before its content",
    ),
    "a path through a link": (
        W + link("workspace/out", "/tmp") + entry("workspace/out/x"),
        "right before its content",
    ),
    "a folder over a link": (W + link("workspace/a", "/tmp") + folder("workspace/a"), "twice"),
    "a file over a link": (W + link("workspace/a", "/tmp/x") + entry("workspace/a"), "twice"),
    "a file twice": (W + entry("workspace/a") + entry("workspace/a"), "twice"),
    "a folder twice": (W + folder("workspace/a") + folder("workspace/a"), "twice"),
    "a link without target": (W + link("workspace/a", ""), "no such file|cannot be used"),
    "a hard link": (W + link("workspace/a", "workspace/b", tarfile.LNKTYPE), "is no file"),
    "a fifo": (W + entry("workspace/a", tarfile.FIFOTYPE), "is no file"),
    "a device": (W + entry("workspace/a", tarfile.CHRTYPE, devmajor=1), "is no file"),
    "a sparse file": (W + entry("workspace/a", tarfile.GNUTYPE_SPARSE), "is no file"),
    "a long name as GNU has it": (W + entry("l", tarfile.GNUTYPE_LONGNAME, b"x"), "is no file"),
    "a header for all": (W + entry("g", tarfile.XGLTYPE, b"9 path=a\n"), "is no file"),
    "a folder with content": (W + entry("workspace/a", tarfile.DIRTYPE, b"x"), "is no file"),
    "a size that no memory holds": (W + entry("workspace/a", size=8**11 - 1), "ends too early"),
    "a size below zero": (
        W + extended(b"11 size=-5\n") + entry("workspace/a"),
        "is no file",
    ),
    "a header that no memory holds": (entry("p", tarfile.XHDTYPE, size=8**11 - 1), "too long"),
    "a header without records": (W + extended(b"") + entry("workspace/a"), "too long"),
    "records of no length": (W + extended(b"0 a=b\n") + entry("workspace/a"), "broken"),
    "records of a length below zero": (W + extended(b"-1 a=b\n") + entry("workspace/a"), "broken"),
    "records that end too early": (W + extended(b"99 a=b\n") + entry("workspace/a"), "broken"),
    "records that are none": (W + extended(b"\xff" * 100) + entry("workspace/a"), "cannot be"),
    "two headers for one entry": (W + extended(b"6 a=b\n") * 2 + entry("workspace/a"), "is no"),
    "a time that is none": (
        W + extended(b"13 mtime=nan\n") + entry("workspace/a"),
        "cannot be used",
    ),
    "a time that no disk holds": (
        W + extended(b"15 mtime=1e300\n") + entry("workspace/a"),
        "cannot be used",
    ),
    "a part of a name that no disk holds": (W + entry("workspace/" + "n" * 300), "255 bytes"),
}
ENDS = {
    "no archive": (b"hello", "ends too early"),
    "no end": (W + entry("workspace/a"), "ends too early"),
    "half a file": (W + entry("workspace/a", content=bytes(512))[:-1], "ends too early"),
    "half an end": (W + bytes(512), "ends too early"),
    "an end that goes on": (W + bytes(512) + W, "follows its end"),
    "bytes after the end": (W + END + b"x", "follows its end"),
    "zeros after the end": (W + END + END, "follows its end"),
    "an entry after the end": (W + END + entry("workspace/a") + END, "follows its end"),
}
CASES = ENDS | {case: (data + END, said) for case, (data, said) in HOSTILE.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_archive_is_refused_and_leaves_nothing(case: str, workspace: Path) -> None:
    data, said = CASES[case]
    if data.startswith(W):
        data = W + entry("workspace/first", content=b"first") + data[len(W) :]
    error = refused("unpack", data, **MOST)
    assert re.search(said, error.message)
    assert left(workspace) == []


@pytest.mark.parametrize(
    ("data", "limits"),
    [
        (b"".join(entry(f"workspace/{number}") for number in range(20)), {"max_entries": 20}),
        (
            entry("workspace/1", content=b"1" * 600) + entry("workspace/2", content=b"2" * 600),
            {"max_bytes": 1199},
        ),
        (entry("workspace/1", content=bytes(1 << 20) + b"1"), {"max_bytes": 0}),
    ],
    ids=["entries", "bytes", "a byte behind zeros"],
)
def test_too_much_is_refused_when_it_becomes_too_much(
    data: bytes, limits: dict[str, int], workspace: Path
) -> None:
    error = refused("unpack", W + data + END, **MOST | limits)
    assert (error.code, left(workspace)) == ("too_large", [])


def test_zeros_become_holes_that_take_no_room(workspace: Path) -> None:
    with open(workspace / "holes", "wb") as file:
        for at in (0, 9 << 20, 20 << 20):
            file.seek(at)
            file.write(b"here")
        file.truncate(64 << 20)
    before = (workspace / "holes").read_bytes()
    _, data = call("pack", roots=["workspace"], leave_out=[])
    (workspace / "holes").unlink()
    call("unpack", data, **MOST | {"max_bytes": 1 << 20})
    assert (workspace / "holes").read_bytes() == before
    assert (workspace / "holes").stat().st_blocks * 512 <= 1 << 20


def test_a_body_without_its_mark_counts_for_nothing(workspace: Path) -> None:
    body, source = b"mark".join([W + entry("workspace/a") + END, b"mar"]), os.pipe()
    os.write(source[1], body)
    os.close(source[1])
    with pytest.raises(OpError, match="did not come whole"):
        OPS["unpack"](MOST, source[0], 1, b"mark")
    os.close(source[0])
    assert left(workspace) == []


WHOLE = W + b"".join(
    [
        entry("workspace/a", content=b"a" * 700),
        folder("workspace/b"),
        entry("workspace/b/\u00e9" + "x" * 200, content=b"c"),
        link("workspace/b/l", "/nowhere"),
        folder("workspace/c"),
        folder("home"),
        folder("home/d"),
        entry("home/d/e", content=b"e"),
        END,
    ]
)
CHANGES = st.lists(
    st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 600), st.binary(max_size=600)), max_size=4
)


@given(CHANGES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_bytes_do_anything_but_fail_or_fill_the_roots(
    workspace: Path, changes: list[tuple[int, int, bytes]]
) -> None:
    data = WHOLE
    for at, size, new in changes:
        data = data[:at] + new + data[at + size :]
    try:
        call("unpack", data, **MOST)
    except OpError:
        assert left(workspace) == []
    beside = {each.name for each in workspace.parent.iterdir()}
    assert (beside, leftovers(workspace.parent)) == ({"workspace", "home"}, [])
    for root in ("workspace", "home"):
        shutil.rmtree(workspace.parent / root)
        (workspace.parent / root).mkdir()


def left(workspace: Path) -> list[str]:
    """All that is in the roots."""
    found = [(at, folders + files) for at, folders, files in os.walk(workspace.parent)]
    return [f"{at}/{name}" for at, names in found[1:] for name in sorted(names)]


STEPS = ("os.chmod", "os.mkdir", "os.rename", "os.rmdir", "os.symlink", "os.utime", "open")


def unpack_until(step: int) -> bool:
    """Unpack in a child that kills itself at that step; return whether it came so far."""
    child = os.fork()
    if child == 0:
        steps = itertools.count()

        def count(event: str, _: object) -> None:
            if event in STEPS and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        try:
            call("unpack", WHOLE, **MOST)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_kill_at_any_step_leaves_nothing_or_all(workspace: Path) -> None:
    call("unpack", WHOLE, **MOST)
    everything, outcomes = left(workspace), []
    for step in itertools.count():
        for root in ("workspace", "home"):
            shutil.rmtree(workspace.parent / root)
            (workspace.parent / root).mkdir()
        if not unpack_until(step):
            break
        # What a new runner does when it starts.
        archive.finish_unpacking()
        seen = [path for path in left(workspace) if ".~mcp-" not in path]
        assert seen in ([], everything)
        outcomes.append(bool(seen))
        if seen:
            assert refused("unpack", WHOLE, **MOST).code == "exists"
        else:
            call("unpack", WHOLE, **MOST)
        assert left(workspace) == everything
    # From one step on everything is there.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


@pytest.mark.parametrize(("size", "filled"), [(100_000, 1), (9_000_000, 0)])
def test_a_file_that_changes_while_it_is_read_keeps_its_size(
    workspace: Path, size: int, filled: int
) -> None:
    (workspace / "file").write_bytes(b"x" * 5_000_000)
    (workspace / "zz").write_bytes(b"after")
    source, stdout = os.pipe()
    received = bytearray()

    def drain() -> None:
        with open(source, "rb") as pipe:
            while data := pipe.read(65536):
                os.truncate(workspace / "file", size)
                received.extend(data)

    thread = threading.Thread(target=drain)
    thread.start()
    said = OPS["pack"]({"roots": ["workspace"], "leave_out": []}, 0, stdout)
    os.close(stdout)
    thread.join()
    assert (said["filled"], said["bytes"]) == (filled, len(received))
    with tarfile.open(fileobj=io.BytesIO(received)) as packed:
        sizes = {info.name: info.size for info in packed if info.isreg()}
    assert sizes == {"workspace/file": 5_000_000, "workspace/zz": 5}


def test_much_is_packed_and_unpacked_in_little_memory(workspace: Path) -> None:
    with open(workspace / "large", "wb") as file:
        for _ in range(100):
            file.write(b"x" * (1 << 20))
    for number in range(5_000):
        os.symlink("nowhere", workspace / f"link {number}")
    archive_file = workspace.parent / "archive"
    given = {**MOST, "max_bytes": 1 << 30, "max_entries": 30_000, "leave_out": []}
    packed = grown(lambda: OPS["pack"](given, 0, os.open(archive_file, os.O_CREAT | os.O_RDWR)))
    shutil.rmtree(workspace)
    workspace.mkdir()
    unpacked = grown(lambda: OPS["unpack"](given, os.open(archive_file, os.O_RDONLY), 1))
    assert max(packed, unpacked) <= 64 << 10
    assert len(os.listdir(workspace)) == 5_001


def grown(work: Callable[[], object]) -> int:
    """By how many KiB the memory of a child grows that does the work."""
    source, target = os.pipe()
    child = os.fork()
    if not child:
        try:
            Path("/proc/self/clear_refs").write_text("5")
            idle = memory("VmRSS")
            work()
            os.write(target, str(memory("VmHWM") - idle).encode())
        finally:
            os._exit(0)
    os.close(target)
    with open(source) as said:
        size = said.read()
    os.waitpid(child, 0)
    return int(size)


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def test_folders_deeper_than_a_path_can_be_go_both_ways(workspace: Path) -> None:
    make_deep(workspace, 300, "d" * 20)
    said, data = call("pack", roots=["workspace"], leave_out=[])
    remove_tree(f"{workspace}/{'d' * 20}")
    unpacked, _ = call("unpack", data, **MOST)
    assert unpacked == {"entries": 302, "bytes": said["bytes"]}
    assert call("pack", roots=["workspace"], leave_out=[])[0] == said
    remove_tree(f"{workspace}/{'d' * 20}")


def test_what_is_there_already_makes_way_if_it_holds_no_file(workspace: Path) -> None:
    (workspace / "b").mkdir()
    (workspace / "b" / "kept").symlink_to("/opt/kept")
    (workspace / "b" / "l").symlink_to("/opt/replaced")
    (workspace / "a" / "empty").mkdir(parents=True)
    (workspace / "c").symlink_to("b")
    call("unpack", WHOLE, **MOST)
    links = {name: os.readlink(workspace / "b" / name) for name in ("kept", "l")}
    assert links == {"kept": "/opt/kept", "l": "/nowhere"}
    assert (workspace / "a").read_bytes() == b"a" * 700
    assert (workspace / "c").is_dir()
    assert not (workspace / "c").is_symlink()


def test_roots_that_are_not_asked_for_are_passed_over(workspace: Path) -> None:
    (workspace / "own").write_text("own")
    project = folder("project") + entry("project/x", content=b"x")
    said, _ = call("unpack", project + WHOLE, **MOST | {"roots": ["home"]})
    assert said["entries"] == 11
    assert (workspace.parent / "home" / "d" / "e").read_text() == "e"
    assert [each.name for each in workspace.iterdir()] == ["own"]
