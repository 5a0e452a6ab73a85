"""Typed file operations in one sandbox, with checked replies.

User code may have changed the program that replies, so every type and size is checked here. A
path is text; bytes of a name that are not UTF-8 are lone surrogates in it.
"""

import json
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from mcp_sandbox.errors import InvalidArgument, SandboxGone
from mcp_sandbox.models import (
    DeleteResult,
    EditResult,
    FileContent,
    GlobResult,
    GrepResult,
    Listing,
    Mark,
    Measured,
    MoveResult,
    Packed,
    WriteResult,
)
from mcp_sandbox.runtime.call import CallResult, JsonObject
from mcp_sandbox.runtime.channel import Channel

MAX_READ = 256 * 1024 * 1024
ROOTS = ("workspace", "home", "project")
_MAX_REPLY = 40 * 1024 * 1024
# A large file over a slow engine takes long, and no person waits for it at a prompt.
_TRANSFER_S = 600.0

_Value = TypeVar("_Value")
_Row = tuple[str, str, int, float, str | None]
_ADAPTERS: dict[object, TypeAdapter[Any]] = {}
_COLUMNS = ("path", "kind", "size", "modified", "target")


class Files:
    """The files of one sandbox, over one channel.

    Every method raises a CallerError that says what to do, or SandboxGone if the sandbox died or
    sent a malformed answer.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return the bytes of a regular file or a part of it; TooLarge above 256 MiB."""
        args: JsonObject = {"path": path, "offset": offset, "length": length}
        args["max_bytes"] = MAX_READ
        reply = await self._call("read", args, timeout_s=_TRANSFER_S, max_body=MAX_READ)
        _require(_checked(dict[str, int], reply.result).get("sent") == len(reply.body))
        return reply.body

    async def read_to(self, path: str, take: Callable[[bytes], Awaitable[None]]) -> int:
        """Give the bytes of a regular file to `take`, piece by piece; return how many there were.

        It may take as long as it likes, and is given no more meanwhile.
        """
        result, given = await self._stream("read", {"path": path}, take)
        _require(_checked(dict[str, int], result).get("sent") == given)
        return given

    async def read_lines(
        self, path: str, *, offset: int = 1, limit: int = 2000, max_bytes: int = 30_000
    ) -> FileContent:
        """Return some lines of a text file, a complete image, or the first bytes of other files."""
        args = {"path": path, "offset": offset, "limit": limit, "max_bytes": max_bytes}
        reply = await self._call("read_lines", args)
        return replace(_checked(FileContent, {**reply.result, "data": ""}), data=reply.body)

    async def write(
        self, path: str, data: bytes | AsyncIterable[bytes], *, append: bool = False
    ) -> WriteResult:
        """Write a file, all or nothing; missing parent directories are made."""
        args = {"path": path, "append": append}
        # A stream comes as fast as its sender is.
        limit_s = _TRANSFER_S if isinstance(data, bytes) else inf
        reply = await self._channel.call("write", args, body=data, timeout_s=limit_s)
        return _checked(WriteResult, reply.result)

    async def edit(
        self, path: str, old: str, new: str, *, replace_all: bool = False, dry_run: bool = False
    ) -> EditResult:
        """Replace text that occurs once in a file, or every occurrence with `replace_all`.

        Raises:
            NoMatch: the text does not occur; the message shows the nearest lines.
            Ambiguous: it occurs more than once; the message names the lines.
        """
        before, after = _encode(old), _encode(new)
        args = {"old_bytes": len(before), "replace_all": replace_all, "dry_run": dry_run}
        reply = await self._call("edit", {"path": path, **args}, before + after)
        return _checked(EditResult, {**reply.result, "diff": reply.body.decode("utf-8", "replace")})

    async def list(
        self, path: str = ".", *, depth: int = 1, limit: int = 500, hidden: bool = True
    ) -> Listing:
        """Return the entries of a directory, down to `depth` levels, sorted by path."""
        args = {"path": path, "depth": depth, "limit": limit, "hidden": hidden}
        reply = await self._call("list", args)
        rows = _checked(tuple[_Row, ...], reply.body)
        _require(len(rows) <= limit)
        entries = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        return _checked(Listing, {**reply.result, "entries": tuple(entries)})

    async def glob(self, pattern: str, path: str = ".", *, limit: int = 500) -> GlobResult:
        """Return the files whose path matches, newest first."""
        reply = await self._call("glob", {"pattern": pattern, "path": path, "limit": limit})
        paths = _checked(tuple[str, ...], reply.body)
        _require(len(paths) <= limit)
        return _checked(GlobResult, {**reply.result, "paths": paths})

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        context: int = 0,
        limit: int = 200,
    ) -> GrepResult:
        """Return the lines that match a regular expression, in files that match `glob`."""
        args = {"pattern": pattern, "path": path, "glob": glob, "ignore_case": ignore_case}
        reply = await self._call("grep", {**args, "context": context, "limit": limit})
        lines = tuple(reply.body.decode("utf-8", "replace").split("\n")[:-1])
        return _checked(GrepResult, {**reply.result, "lines": lines})

    async def delete(self, path: str, *, recursive: bool = False) -> DeleteResult:
        """Remove a file, a link itself, an empty directory, or with `recursive` a tree."""
        args = {"path": path, "recursive": recursive}
        reply = await self._call("delete", args, timeout_s=_TRANSFER_S)
        return _checked(DeleteResult, reply.result)

    async def move(self, source: str, destination: str, *, overwrite: bool = False) -> MoveResult:
        """Rename a file, link or directory; only with `overwrite` over an existing one."""
        args = {"source": source, "destination": destination, "overwrite": overwrite}
        return _checked(MoveResult, (await self._call("move", args, timeout_s=_TRANSFER_S)).result)

    async def pack(
        self,
        take: Callable[[bytes], Awaitable[None]],
        *,
        roots: Sequence[str],
        leave_out: Sequence[str] = (),
    ) -> Packed:
        """Hand a tar stream (PAX) of "workspace", "home" or "project" to `take`.

        `leave_out` are paths in the home. What is mounted in a root is left out, too. The stream
        is whole once this returns; it has no limit of size or time: `take` may raise.
        """
        args: JsonObject = {"roots": list(roots), "leave_out": list(leave_out)}
        result, size = await self._stream("pack", args, take)
        packed = _checked(Packed, result)
        _require(packed.bytes == size)
        return packed

    async def unpack(
        self,
        data: AsyncIterable[bytes],
        *,
        max_bytes: int,
        max_entries: int = 1_000_000,
        roots: Sequence[str] = ROOTS,
    ) -> Packed:
        """Bring a stream of `pack` into its roots once `data` has ended: all of it, or nothing.

        What it has of roots that are not named is passed over. Folders and links that are there
        stay unless the stream has their names. If `data` raises, nothing has changed. `max_bytes`
        is for what files hold; zeros become holes.

        Raises:
            AlreadyExists: there are files in a root.
            TooLarge: its files have more bytes, or it has more entries.
            InvalidArgument: it is no such stream, or is damaged.
        """
        args = {"roots": list(roots), "max_bytes": max_bytes, "max_entries": max_entries}
        reply = await self._channel.call("unpack", args, body=data, timeout_s=inf)
        return _checked(Packed, reply.result)

    async def _stream(
        self, op: str, args: JsonObject, take: Callable[[bytes], Awaitable[None]]
    ) -> tuple[object, int]:
        """Make a call that may last; return its result, and how many bytes `take` was given."""
        given = 0

        async def pass_on(_: str, data: bytes) -> None:
            nonlocal given
            given += len(data)
            await take(data)

        reply = await self._channel.call(op, args, timeout_s=inf, sink=pass_on)
        return reply.result, given

    async def mark(self, mark: str = "") -> Mark:
        """Return whose files these are, as they are marked, after marking them if `mark` is given.

        The sandbox can change that itself.
        """
        return _checked(Mark, (await self._call("mark", {"mark": mark})).result)

    async def measure(self) -> Measured:
        """Return what the files occupy; this is no use of the sandbox."""
        return _checked(Measured, (await self._call("measure", {})).result)

    async def _call(
        self,
        op: str,
        args: JsonObject,
        body: bytes = b"",
        *,
        timeout_s: float = 60.0,
        max_body: int = _MAX_REPLY,
    ) -> CallResult:
        """Make one call and collect the body of its reply piece by piece."""
        received = bytearray()

        async def collect(_: str, data: bytes) -> None:
            _require(len(received) + len(data) <= max_body)
            received.extend(data)

        reply = await self._channel.call(op, args, body=body, timeout_s=timeout_s, sink=collect)
        return CallResult(reply.result, bytes(received) or reply.body)


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as exc:
        raise InvalidArgument(
            "the text holds half of a surrogate pair, which no file can hold: correct it"
        ) from exc


def _checked(kind: type[_Value], message: object) -> _Value:
    """Return JSON bytes, or parsed JSON, as a value of that kind; SandboxGone if it is none."""
    # In strict mode pydantic builds a value class from a JSON object, but not from a dict.
    text = message if isinstance(message, bytes) else json.dumps(message)
    adapter = _ADAPTERS.get(kind) or _ADAPTERS.setdefault(kind, TypeAdapter(kind))
    try:
        value: _Value = adapter.validate_json(text, strict=True)
    except ValidationError as exc:
        raise _nonsense() from exc
    return value


def _require(holds: bool) -> None:
    if not holds:
        raise _nonsense()


def _nonsense() -> SandboxGone:
    return SandboxGone(
        "the sandbox sent a malformed answer, so it is no longer trusted. "
        "Reset it and call again: files are kept"
    )
