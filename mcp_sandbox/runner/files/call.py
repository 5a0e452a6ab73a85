"""What every operation needs: checked arguments, its pipes, and messages for errors of the kernel.

Memory is bounded by one chunk. Operations may raise OSError: `explained` translates it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import os.path
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zlib import crc32

from mcp_sandbox.runner.files.paths import show, workspace
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import NoReturn

    Op = Callable[..., dict[str, Any]]

CHUNK = 256 * 1024
MAX_ROWS = 8 * 1024 * 1024
BIGGEST = 2**62
# How many names of a directory are compared with one that does not exist.
_LOOKED_AT = 2000
_FULL = ("no_space", "no space is left there: delete files that are no longer needed, then retry")
_DENIED = (
    "permission",
    "the sandbox user may not do this: check owner and mode with 'ls -la', or use another place",
)
_ANSWERS: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("not_found", "no such file or directory: look with list_files or glob"),
    errno.EEXIST: ("exists", "it exists already: choose another name or delete it first"),
    errno.ENOTDIR: ("wrong_kind", "a file is where a directory is needed: check the path"),
    errno.EISDIR: ("wrong_kind", "it is a directory: name a file"),
    errno.ENOTEMPTY: (
        "wrong_kind",
        "the directory is not empty: pass recursive=true to delete it with everything in it",
    ),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: (
        "permission",
        "that place is read-only: use the workspace, the home directory or /tmp",
    ),
    errno.ETXTBSY: ("permission", "the program is running: stop it first"),
    errno.EBUSY: ("permission", "it is in use or a mount point: choose another path"),
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: ("too_large", "the file would pass the size limit: write less or split it"),
    errno.ELOOP: ("invalid", "its symbolic links form a loop: name the real file"),
    errno.ENAMETOOLONG: ("invalid", "the name is too long: use at most 255 bytes for each part"),
    errno.EINVAL: ("invalid", "the system does not accept this: check the arguments"),
    errno.ENXIO: ("wrong_kind", "it is not a regular file: use exec to talk to it"),
    errno.EOPNOTSUPP: ("unsupported", "the file system there cannot do this: use the workspace"),
}


def read_chunks(source: int) -> Iterator[bytes]:
    """Yield the bytes of `source` up to its end."""
    while data := os.read(source, CHUNK):
        yield data


def read_until(source: int, end: bytes) -> Iterator[bytes]:
    """Yield the bytes of `source` before the last ones, `end`; OpError if those are missing."""
    tail = b""
    for data in read_chunks(source):
        tail += data
        # A shorter body is used only when complete: an append then happens at once.
        if len(tail) > CHUNK + len(end):
            yield tail[: len(tail) - len(end)]
            tail = tail[len(tail) - len(end) :]
    if not tail.endswith(end):
        raise OpError("cancelled", "the body did not come whole")
    if rest := tail[: len(tail) - len(end)]:
        yield rest


def take(source: Iterable[bytes], limit: int) -> bytes:
    """Return all of `source`; raise OpError if that is over `limit` bytes."""
    parts, size = [], 0
    for data in source:
        parts.append(data)
        size += len(data)
        if size > limit:
            raise OpError("too_large", f"more than {limit} bytes were given: send less at once")
    return b"".join(parts)


def put(target: int, data: bytes | bytearray | memoryview) -> int:
    """Write all of `data`; return its size."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(target, rest) :]
    return len(data)


@contextmanager
def closing_fd(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def copy(source: Iterable[bytes], target: int) -> int:
    """Write all of `source` to `target`; return the size."""
    return sum(put(target, data) for data in source)


def send(source: int, target: int, start: int, length: int) -> int:
    """Write `length` bytes of a file from `start`, or fewer if it ends; return how many."""
    sent = 0
    try:
        while sent < length:
            step = os.sendfile(target, source, start + sent, min(length - sent, 64 * CHUNK))
            if step == 0:
                break
            sent += step
    except BrokenPipeError:
        raise
    except OSError:
        # Files of /proc and some file systems cannot feed a pipe directly.
        while sent < length and (data := os.pread(source, min(length - sent, CHUNK), start + sent)):
            sent += put(target, data)
    return sent


def put_rows(target: int, rows: Iterable[object], limit: int) -> int:
    """Write at most `limit` rows and 8 MiB as a JSON array; return how many rows."""
    texts: list[str] = []
    size = 0
    for row in rows:
        text = json.dumps(row)
        size += len(text)
        if len(texts) == limit or size > MAX_ROWS:
            break
        texts.append(text)
    put(target, f"[{','.join(texts)}]".encode())
    return len(texts)


class OperationCall:
    """The arguments of an operation. A body comes in from `stdin`; one goes out to `stdout`.

    `end` are the bytes that mark the end of a complete body; places in the file `turns` are locked.
    """

    def __init__(
        self, args: dict[str, Any], stdin: int, stdout: int, end: bytes = b"", turns: int = -1
    ) -> None:
        self._args = args
        self._stdin = stdin
        self._end, self._turns = end, turns
        self.stdout = stdout

    def body(self) -> Iterator[bytes]:
        """Yield the incoming body in pieces; raise OpError if it is incomplete."""
        return read_until(self._stdin, self._end)

    def wait_turn(self, *paths: str) -> None:
        """Wait until no other operation changes these files; others wait until this one ends."""
        parts = [os.path.split(path) for path in paths if self._turns >= 0]
        places = [(os.stat(folder), name) for folder, name in parts]
        # A name in a directory, as an edit puts another file there.
        keys = {crc32(os.fsencode(f"{at.st_dev} {at.st_ino} {name}")) for at, name in places}
        for key in sorted(keys):
            fcntl.lockf(self._turns, fcntl.LOCK_EX, 1, key)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string argument, which is required unless it has a default."""
        value = self._args.get(name)
        if value is None and default is not None:
            return default
        return value if isinstance(value, str) else _refuse(name, "text")

    def texts(self, name: str) -> list[str]:
        """Return a required list of strings."""
        value = self._args.get(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            _refuse(name, "a list of texts")
        return value

    def number(self, name: str, default: int, *, low: int = 0, high: int = BIGGEST) -> int:
        """Return a whole number between `low` and `high`; true and false are not numbers."""
        value = self._args.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            upper = "" if high == BIGGEST else f" and at most {high}"
            _refuse(name, f"a whole number of at least {low}{upper}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._args.get(name, default)
        return value if isinstance(value, bool) else _refuse(name, "true or false")


def _refuse(name: str, wanted: str) -> NoReturn:
    raise OpError("invalid", f"argument {name!r} must be {wanted}: correct it and call again")


def explain(error: OSError, path: str) -> OpError:
    """Return the OpError for an OSError; `path` is used when the error names no path."""
    own = error.filename
    name = own if isinstance(own, str) and own.startswith("/") else path
    if isinstance(error, FileNotFoundError) and name.startswith("/"):
        return OpError("not_found", f"{show(name)}: no such file or directory: {_nearby(name)}")
    reason = os.strerror(error.errno) if error.errno else str(error)
    code, sentence = _ANSWERS.get(
        error.errno or 0, ("invalid", f"{reason}: check the path and try again")
    )
    return OpError(code, f"{show(name)}: {sentence}")


def _nearby(path: str) -> str:
    parent, name = os.path.split(path)
    if os.path.lexists(path):
        return "it is a link whose target does not exist"
    if "*" in path or "?" in path:
        return "a path is one name, no pattern: find names with glob, or use exec (rm, mv, cat)"
    ends = (path.split("/", at)[at] for at in range(1, path.count("/") + 1))
    known = [end for end in ends if os.path.exists(os.path.join(workspace(), end))]
    if likely := known[:1] or _similar(parent, name):
        return f"did you mean {' or '.join(map(show, likely))}?"
    if os.path.isdir(parent):
        return "look with list_files or glob"
    while parent != "/" and not os.path.lexists(parent):
        name = os.path.basename(parent)
        parent = os.path.dirname(parent)
    return f"{show(parent)} is there, but has no {show(name)}. Look with list_files or glob"


def _similar(directory: str, name: str) -> list[str]:
    # Only missing files need it, and it takes some milliseconds to import.
    from difflib import get_close_matches  # noqa: PLC0415

    from mcp_sandbox.runner.files.nearest import describe_name  # noqa: PLC0415

    try:
        with os.scandir(directory) as found:
            names = [entry.name for entry, _ in zip(found, range(_LOOKED_AT))]
    except OSError:
        return []
    same = [other for other in names if other.lower() == name.lower()]
    similar = same or get_close_matches(name, names, 3, 0.7)
    return [describe_name(each, name) for each in similar]


def explain_errors(operation: Callable[[OperationCall], dict[str, Any]]) -> Op:
    """Wrap an operation so that it raises OpError for errors of the kernel."""

    def run(args: dict[str, Any], *more: Any) -> dict[str, Any]:  # noqa: ANN401 - as for the call
        try:
            return operation(OperationCall(args, *more))
        except BrokenPipeError:
            # The body has no reader any more: this says nothing about the file.
            raise
        except OSError as exc:
            named = args.get("path", args.get("source", "the archive"))
            raise explain(exc, named if isinstance(named, str) else "?") from exc

    return run
