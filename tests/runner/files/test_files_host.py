"""The host's side of file operations, over a real channel to a real runner."""

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from mcp_sandbox import errors
from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend
from mcp_sandbox.runtime.call import CallResult
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.files import Files
from tests.backends.live import spec_for

pytestmark = pytest.mark.bubblewrap


@asynccontextmanager
async def opened(folder: Path) -> AsyncGenerator[Files]:
    """The files of a sandbox whose workspace is `folder`/workspace."""
    backend = BubblewrapBackend(folder / "data")
    sandbox = await backend.create(spec_for(folder))
    try:
        with anyio.fail_after(50):
            async with anyio.create_task_group() as tasks:
                channel = Channel(await sandbox.open_channel(), sandbox.token)
                await channel.open(tasks)
                yield Files(channel)
                await channel.aclose()
    finally:
        with anyio.move_on_after(10, shield=True):
            await backend.destroy(sandbox.id)


async def test_every_operation_gives_its_value(tmp_path: Path) -> None:
    async with opened(tmp_path) as files:
        written = await files.write("a/f.txt", b"one\ntwo\n")
        assert (written.path, written.written, written.created) == ("a/f.txt", 8, True)
        assert (await files.write("a/f.txt", b"three\n", append=True)).created is False
        assert await files.read("a/f.txt", 4, 3) == b"two"
        content = await files.read_lines("a/f.txt", offset=2)
        assert (content.kind, content.data, content.total_lines) == ("text", b"two\nthree\n", 3)
        edited = await files.edit("a/f.txt", "two", "2")
        assert (edited.replacements, "-two\n+2\n" in edited.diff) == (1, True)
        listing = await files.list(depth=2)
        assert [(e.path, e.kind) for e in listing.entries] == [
            ("a", "directory"),
            ("a/f.txt", "file"),
        ]
        assert (await files.glob("*.txt")).paths == ("a/f.txt",)
        assert (await files.grep("^th", context=1)).lines == ("a/f.txt-2-2", "a/f.txt:3:three")
        moved = await files.move("a/f.txt", "g")
        assert (moved.destination, moved.replaced) == ("g", False)
        await files.write("b/c", b"")
        assert (await files.delete("b", recursive=True)).entries == 2


async def test_refusals_come_as_the_exact_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as files:
        await files.write("f", b"x\nx\n")
        await files.write("d/inside", b"")
        for error, call in [
            (errors.NotFound, files.read("missing")),
            (errors.WrongKind, files.read("d")),
            (errors.WrongKind, files.write("d", b"")),
            (errors.NoMatch, files.edit("f", "y", "z")),
            (errors.Ambiguous, files.edit("f", "x", "z")),
            (errors.InvalidArgument, files.edit("f", "\ud800", "z")),
            (errors.InvalidArgument, files.grep("(")),
            (errors.InvalidArgument, files.delete(".", recursive=True)),
            (errors.AlreadyExists, files.move("f", "d")),
        ]:
            with pytest.raises(error):
                await call


async def test_large_files_stream_both_ways_whole(tmp_path: Path) -> None:
    piece = os.urandom(1_000_003)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield piece

    async with opened(tmp_path) as files:
        assert (await files.write("big", pieces())).written == 30 * len(piece)
        assert await files.read("big") == piece * 30
        # Larger than the diff that comes back, and than one frame.
        await files.write("text", b"a" * 2_000_000)
        assert (await files.edit("text", "a" * 2_000_000, "b" * 1_500_000)).replacements == 1


async def test_a_write_whose_source_fails_leaves_the_old_file(tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield bytes(1_000_000)
        raise ValueError("the source broke")

    async with opened(tmp_path) as files:
        await files.write("f", b"old")
        with pytest.raises((ValueError, ExceptionGroup)):
            await files.write("f", broken())
        assert await files.read("f") == b"old"
        assert [entry.path for entry in (await files.list()).entries] == ["f"]


async def test_a_cancelled_write_leaves_the_old_file(tmp_path: Path) -> None:
    begun = anyio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1_000_000)
            begun.set()

    async with opened(tmp_path) as files:
        await files.write("f", b"old")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(files.write, "f", endless())
            await begun.wait()
            tasks.cancel_scope.cancel()
        assert await files.read("f") == b"old"
        assert [entry.path for entry in (await files.list()).entries] == ["f"]


async def test_a_file_too_large_for_memory_is_refused_and_the_channel_lives(tmp_path: Path) -> None:
    async with opened(tmp_path) as files:
        await files.write("big", b"")
        os.truncate(tmp_path / "workspace" / "big", 10 * 2**30)
        with pytest.raises(errors.TooLarge, match="offset and length"):
            await files.read("big")
        assert await files.read("big", offset=5 * 2**30, length=10) == bytes(10)


async def test_names_that_are_not_text_survive_the_way(tmp_path: Path) -> None:
    async with opened(tmp_path) as files:
        await files.write("caf\udce9", b"latin")
        (entry,) = (await files.list()).entries
        assert entry.path == r"caf\xe9"
        assert await files.read(entry.path) == b"latin"


class Lying(Channel):
    """A channel whose other end answers with what it is told to."""

    def __init__(self, result: Any, body: bytes) -> None:
        self._reply = CallResult(result, body)

    async def call(self, op: str, args: dict[str, Any], **_: Any) -> CallResult:
        return self._reply


@pytest.mark.parametrize(
    ("method", "args", "result", "body"),
    [
        ("read", ("f",), {"size": 5, "sent": 5}, b"four"),
        ("read", ("f",), {"sent": "4"}, b"four"),
        ("read_lines", ("f",), {}, b""),
        ("read_lines", ("f",), {"path": "f", "kind": "odd", "mime": "", "size": 0}, b""),
        ("read_lines", ("f",), {"path": "f", "kind": "text", "mime": "", "size": "0"}, b""),
        ("write", ("f", b""), {"path": 1, "written": 0, "created": True}, b""),
        ("edit", ("f", "a", "b"), {"path": "f", "replacements": None}, b""),
        ("list", (), {"path": ".", "total": 1, "truncated": False}, b"[1]"),
        ("list", (), {"path": ".", "total": 1, "truncated": False}, b"not json"),
        ("list", (), {"path": ".", "total": 0, "truncated": 0}, b"[]"),
        ("list", (), {"path": ".", "total": 0, "truncated": False}, b"[" * 100_000),
        ("list", (), {"path": ".", "total": 1, "truncated": False}, b'[["f","odd",1,1,null]]'),
        ("glob", ("*",), {"total": 1, "truncated": False}, b'["a", 1]'),
        ("glob", ("*",), {"total": 999, "truncated": False}, b"[%s]" % b",".join([b'"a"'] * 999)),
        ("grep", ("x",), {"matches": 1.5, "files": 1, "truncated": False}, b""),
        ("delete", ("f",), {"path": "f", "kind": "odd", "entries": 1}, b""),
        ("move", ("f", "g"), {}, b""),
    ],
)
async def test_a_senseless_answer_counts_as_a_broken_sandbox(
    method: str, args: tuple[Any, ...], result: Any, body: bytes
) -> None:
    with pytest.raises(errors.SandboxGone, match="malformed answer"):
        await getattr(Files(Lying(result, body)), method)(*args)
