"""Both ways of resolving refuse the same things, also while somebody swaps names for links."""

import errno
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mcp_sandbox.workspace import beneath
from mcp_sandbox.workspace.beneath import Resolver, by_kernel, by_walking, open_directory, open_file

ROUNDS = 20_000
# Swaps "door" between a directory, a link to the outside, a link to "..", and nothing.
SWAPPER = """
import os, sys
outside = sys.argv[1]
print("ready", flush=True)
while os.getppid() == int(sys.argv[2]):
    os.rename("door", "aside")
    os.symlink(outside, "door")
    os.unlink("door")
    os.symlink("../" + os.path.basename(outside), "door")
    os.unlink("door")
    os.rename("aside", "deep/er/door")
    os.rename("deep/er/door", "door")
"""


@pytest.fixture(params=[by_kernel, by_walking])
def resolver(request: pytest.FixtureRequest) -> Resolver:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    """An open directory with a tree of every kind of thing in it, and a secret beside it."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    (inside / "door").mkdir(parents=True)
    (inside / "deep" / "er").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").write_text("secret")
    (inside / "door" / "file").write_text("public")
    (inside / "file").write_text("public")
    os.mkfifo(inside / "fifo")
    (inside / "to-file").symlink_to("door/file")
    (inside / "to-door").symlink_to("door")
    (inside / "to-door-and-back").symlink_to("deep/../door/")
    (inside / "absolute").symlink_to(outside)
    (inside / "above").symlink_to("../outside")
    (inside / "loop").symlink_to("loop")
    (inside / "dangling").symlink_to("nothing")
    directory = os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    yield directory
    os.close(directory)


def read(root: int, path: bytes, *, resolver: Resolver) -> str:
    file = open_file(root, path, resolver=resolver)
    with os.fdopen(file) as stream:
        return stream.read()


def errno_of(action: Callable[[], object]) -> str:
    try:
        action()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]
    return "no error"


@pytest.mark.parametrize("path", [b"door/file", b"./door//file", b"door/./file", b"deep/../file"])
def test_a_plain_path_opens(root: int, resolver: Resolver, path: bytes) -> None:
    assert read(root, path, resolver=resolver) == "public"


@pytest.mark.parametrize("path", [b"to-file", b"to-door/file", b"to-door-and-back/file"])
def test_even_a_link_that_stays_inside_is_not_followed(
    root: int, resolver: Resolver, path: bytes
) -> None:
    assert errno_of(lambda: read(root, path, resolver=resolver)) == "ELOOP"


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (b"..", "EXDEV"),
        (b"../outside/file", "EXDEV"),
        (b"deep/../../outside/file", "EXDEV"),
        (b"/etc/passwd", "EXDEV"),
        (b"nothing", "ENOENT"),
        (b"nothing/file", "ENOENT"),
        (b"", "ENOENT"),
        (b"file/", "ENOTDIR"),
        (b"file/.", "ENOTDIR"),
        (b"file/deeper", "ENOTDIR"),
        (b"fifo", "EINVAL"),
        (b"door", "EINVAL"),
        (b"file\0.txt", "EINVAL"),
        (b"loop", "ELOOP"),
        (b"x" * 300, "ENAMETOOLONG"),
        (b"door/../" * 600 + b"file", "ENAMETOOLONG"),
    ],
)
def test_what_does_not_open_says_why(root: int, resolver: Resolver, path: bytes, code: str) -> None:
    assert errno_of(lambda: open_file(root, path, resolver=resolver)) == code


@pytest.mark.parametrize("path", [b"absolute/file", b"above/file", b"absolute", b"above"])
def test_a_link_that_leads_outside_never_opens(root: int, resolver: Resolver, path: bytes) -> None:
    assert errno_of(lambda: open_file(root, path, resolver=resolver)) == "ELOOP"


@pytest.mark.parametrize("name", [b"\xff\xfe", b"new\nline", b"-rf", b"\x1b[31m", b"x" * 255])
def test_every_name_that_the_kernel_allows_works(
    root: int, resolver: Resolver, name: bytes
) -> None:
    owner = (os.geteuid(), os.getegid())
    beneath.create_file(root, b"door/" + name, b"text", owner=owner, resolver=resolver)
    assert read(root, b"door/" + name, resolver=resolver) == "text"
    with pytest.raises(FileExistsError):
        beneath.create_file(root, b"door/" + name, b"", owner=owner, resolver=resolver)


def test_a_new_file_is_not_written_through_a_link(
    root: int, resolver: Resolver, tmp_path: Path
) -> None:
    (tmp_path / "inside" / "trap").symlink_to(tmp_path / "outside" / "made")
    with pytest.raises(FileExistsError):
        beneath.create_file(root, b"trap", b"x", owner=(0, 0), resolver=resolver)
    assert not (tmp_path / "outside" / "made").exists()


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="/proc is not a mount point here")
@pytest.mark.parametrize("path", [b"proc", b"proc/self", b"proc/self/status"])
def test_a_mount_inside_is_not_entered(resolver: Resolver, path: bytes) -> None:
    top = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert errno_of(lambda: open_directory(top, path, resolver=resolver)) == "EXDEV"
    finally:
        os.close(top)


def test_no_descriptor_is_left_open(root: int, resolver: Resolver) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (b"door/file", b"above/file", b"to-file", b"deep/../nothing", b"loop", b"fifo"):
        with suppress(OSError):
            os.close(open_file(root, path, resolver=resolver))
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def swapping(tmp_path: Path) -> Iterator[None]:
    command = [sys.executable, "-I", "-S", "-c", SWAPPER, str(tmp_path / "outside")]
    process = subprocess.Popen(
        [*command, str(os.getpid())], cwd=tmp_path / "inside", stdout=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


def naive(root: int, path: bytes, flags: int, mode: int) -> int:
    return os.open(path, flags, mode, dir_fd=root)


def outcomes(root: int, resolver: Resolver, *wanted: set[str]) -> set[str]:
    """What the rounds of one race brought: "public", "secret" or an error's name.

    Goes on until one of each `wanted` was among them, so that a slow swapper is met as well.
    """
    paths = (b"door/file", b"deep/../door/file", b"deep/er/door/../../../file")
    seen: set[str] = set()
    give_up_at = time.monotonic() + 30
    for index in itertools.count():
        if index >= ROUNDS and (
            all(map(seen.intersection, wanted)) or time.monotonic() > give_up_at
        ):
            return seen
        try:
            seen.add(read(root, paths[index % 3], resolver=resolver))
        except OSError as exc:
            seen.add(errno.errorcode[exc.errno or 0])
    raise AssertionError("unreachable")


@pytest.mark.slow
def test_a_racing_renamer_never_gets_us_outside(
    root: int, resolver: Resolver, tmp_path: Path
) -> None:
    with swapping(tmp_path):
        seen = outcomes(root, resolver, {"public"}, {"ELOOP", "EXDEV"})
    assert "public" in seen
    assert seen <= {"public", "ENOENT", "ELOOP", "EXDEV", "ENOTDIR", "EAGAIN"}
    assert seen & {"ELOOP", "EXDEV"}, "the race was never met, so the test proves nothing"


def test_the_same_race_catches_who_trusts_strings(root: int, tmp_path: Path) -> None:
    with swapping(tmp_path):
        assert "secret" in outcomes(root, naive, {"secret"})


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_the_walk_takes_over_where_openat2_is_missing_or_forbidden(code: int) -> None:
    def missing(*_: object) -> int:
        raise OSError(code, "not here")

    assert beneath.choose_resolver(missing) is by_walking
    assert beneath.choose_resolver(by_kernel) is by_kernel
