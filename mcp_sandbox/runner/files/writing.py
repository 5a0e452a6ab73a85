"""Writes and edits files: completely, or not at all.

An edit replaces text byte by byte, so that line endings, marks and odd bytes stay.
"""

from __future__ import annotations

import os
import os.path
import re
import stat
from bisect import bisect
from contextlib import suppress
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from mcp_sandbox.runner.files.call import closing_fd, copy, put, read_chunks, take
from mcp_sandbox.runner.files.paths import TEMPORARY, relativize, resolve, show
from mcp_sandbox.runner.files.reading import guess_encoding, open_regular
from mcp_sandbox.runner.files.walk import kind_of
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mcp_sandbox.runner.files.call import OperationCall

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_FILE = 32 * 1024 * 1024
MAX_BODY = 64 * 1024 * 1024
MAX_DIFF = 64 * 1024
MAX_CHANGES = 100_000
_SHOWN_LINES = 20
_CONTEXT = 3
# Larger parts are shown as all old lines, then all new ones: comparing takes seconds.
_COMPARABLE = 2000
_WINDOW = 256 * 1024


class TextEdit(NamedTuple):
    """The bytes from `start` to `end` become `new`."""

    start: int
    end: int
    new: bytes


def write(call: OperationCall) -> dict[str, Any]:
    """Put the body into a file, replacing it at once or appending to it."""
    path = resolve(call.text("path"))
    append = call.flag("append")
    parents = _make_parents(path)
    try:
        call.wait_turn(os.path.realpath(path))
        target, found = find_destination(path)
        if append:
            written = _append(target, call.body(), new=found is None)
        else:
            mode = found.st_mode & 0o777 if found else None
            written = replace(target, lambda fd: copy(call.body(), fd), mode)
    except BaseException:
        # Another program may use one by now; the first error is the one to report.
        with suppress(OSError):
            for directory in parents:
                os.rmdir(directory)
        raise
    return {"path": relativize(path), "written": written, "created": found is None}


def find_destination(path: str) -> tuple[str, os.stat_result | None]:
    """Return the regular file to write, and its status if it exists; OpError if not writable."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return os.path.realpath(path), None
    if not stat.S_ISREG(found.st_mode):
        raise OpError(
            "wrong_kind",
            f"{show(path)} is a {kind_of(found.st_mode)}: only regular files can be written",
        )
    if not os.access(path, os.W_OK, effective_ids=True):
        why = "is read-only: make it writable with chmod first"
        if found.st_uid != os.geteuid():
            why = "belongs to another user: copy it into the workspace and change the copy"
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            why = "is on a read-only mount: copy it into the workspace and change the copy"
        raise OpError("permission", f"{show(path)} {why}")
    return os.path.realpath(path), found


def replace(
    target: str,
    fill: Callable[[int], int],
    mode: int | None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Let `fill` write a new file, then rename it to `target`; return what `fill` returned.

    `check` runs last and may raise to keep the old file.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with closing_fd(os.open(os.path.dirname(target), flags)) as parent:
        draft = _Draft(parent)
        try:
            draft.open()
            written = fill(draft.fd)
            if mode is not None:
                os.fchmod(draft.fd, mode)
            os.fsync(draft.fd)
            check()
            draft.publish(os.path.basename(target))
        finally:
            draft.discard()
        os.fsync(parent)
    return written


class _Draft:
    """A file in the directory `parent` that has no name, or a temporary one, until published."""

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._name = ""
        self.fd = -1

    def open(self) -> None:
        self.fd = self._nameless()
        if self.fd < 0:
            self._name = _temporary()
            self.fd = os.open(self._name, _NEW, 0o666, dir_fd=self._parent)

    def _nameless(self) -> int:
        """Open a file that vanishes with this process; return -1 where that is impossible."""
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o666, dir_fd=self._parent)
        except OSError:
            return -1
        # It gets its name through /proc, which a process that cannot be dumped may not use.
        if os.access(f"/proc/self/fd/{fd}", os.F_OK):
            return fd
        os.close(fd)
        return -1

    def publish(self, name: str) -> None:
        if not self._name and not self._link(name):
            self._name = _temporary()
            self._link(self._name)
        if self._name:
            os.rename(self._name, name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
            self._name = ""

    def _link(self, name: str) -> bool:
        try:
            os.link(f"/proc/self/fd/{self.fd}", name, dst_dir_fd=self._parent, follow_symlinks=True)
        except FileExistsError:
            return False
        return True

    def discard(self) -> None:
        """Delete the draft unless published. Safe after any step: a signal may come there."""
        if self.fd >= 0:
            os.close(self.fd)
        # It may have been stopped before the draft got its name, or after it gave it up.
        with suppress(FileNotFoundError):
            if self._name:
                os.unlink(self._name, dir_fd=self._parent)


def _temporary() -> str:
    return TEMPORARY + os.urandom(8).hex()


def _append(target: str, body: Iterator[bytes], *, new: bool) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    flags |= os.O_CREAT | os.O_EXCL if new else 0
    with closing_fd(os.open(target, flags, 0o666)) as fd:
        before = os.fstat(fd).st_size
        try:
            first = next(body, b"")
            _require_suited(lambda most: os.pread(fd, min(most, before), 0), first, target)
            written = put(fd, first) + copy(body, fd)
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, before)
            if new:
                os.unlink(target)
            raise
    return written


def _require_suited(read: Callable[[int], bytes], text: bytes, path: str) -> None:
    """Raise OpError if this is UTF-8 text, and the file that it is put into is something else."""
    encoding = guess_encoding(read(2 if text.isascii() else MAX_FILE))
    other = encoding == "UTF-16" if text.isascii() else encoding not in ("", "UTF-8")
    if other and b"\0" not in text and not guess_encoding(text):
        raise OpError(
            "wrong_kind",
            f"{show(path)} is perhaps {encoding}, not UTF-8, and would become a mixture: convert "
            f"it with iconv -f {encoding} -t UTF-8 OLD > NEW first, or change it with a program",
        )


def _make_parents(path: str) -> list[str]:
    """Create the directories above `path`; return the new ones, the lowest first."""
    missing, parent = [], os.path.dirname(path)
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    if missing:
        os.makedirs(missing[0], exist_ok=True)
    return missing


def edit(call: OperationCall) -> dict[str, Any]:
    """Replace `old` by `new` (the two halves of the body) in a file; sends the diff."""
    path = resolve(call.text("path"))
    body = take(call.body(), MAX_BODY)
    old_bytes = call.number("old_bytes", 0, high=len(body))
    call.wait_turn(os.path.realpath(path))
    content, before = _load(path)
    old, new = body[:old_bytes], body[old_bytes:]
    _require_difference(old, new)
    _require_suited(lambda n: content[:n], new if old in content else old + new, path)
    changes = _changes(content, old, new, path, every=call.flag("replace_all"))
    diff = _shorten(unify_diff(content, changes, relativize(path), MAX_DIFF))
    if not call.flag("dry_run"):
        _store(path, before, apply(content, changes, 0, len(content)))
    put(call.stdout, diff)
    return {"path": relativize(path), "replacements": len(changes), "diff_bytes": len(diff)}


def _load(path: str) -> tuple[bytes, os.stat_result]:
    fd, found = open_regular(path)
    with closing_fd(fd):
        if found.st_size > MAX_FILE:
            raise OpError(
                "too_large",
                f"{show(path)} has {found.st_size} bytes, more than the {MAX_FILE} that can be "
                "edited so: change it with a program, such as sed through exec",
            )
        return take(read_chunks(fd), MAX_FILE), found


def _changes(content: bytes, old: bytes, new: bytes, path: str, *, every: bool) -> list[TextEdit]:
    """Return the change at each place; line ends stay as the file has them."""
    pairs = content.count(b"\r\n")
    throughout = 0 < pairs == content.count(b"\n")
    given = old + (new.replace(b"\r\n", b"") if throughout else new)
    if old not in content or (pairs and b"\n" in old and b"\r" not in given):
        return _bridged(content, old, new, path, every=every)
    if throughout:
        new = new.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        _require_difference(old, new)
    return [TextEdit(at, at + len(old), new) for at in _find(content, old, path, every=every)]


def _bridged(content: bytes, old: bytes, new: bytes, path: str, *, every: bool) -> list[TextEdit]:
    """Do the same where line ends differ, or the last line lacks the newline of `old`."""
    plain, old, new = (each.replace(b"\r\n", b"\n") for each in (content, old, new))
    if len(old) > 1 and plain[-1:] != b"\n" and old not in plain and (plain + b"\n").endswith(old):
        old, new = old[:-1], new.removesuffix(b"\n")
        starts = [len(plain) - len(old)]
    else:
        starts = _find(plain, old, path, every=every)
    _require_difference(old, new)
    # Where in the plain text each CR LF ends: from there on the content is one more byte ahead.
    pairs = list(accumulate(len(part) + 1 for part in content.split(b"\r\n")[:-1]))
    spans = [(at + bisect(pairs, at), at + len(old)) for at in starts]
    spans = [(start, end + bisect(pairs, end)) for start, end in spans]
    usual = b"\r\n" if pairs else b"\n"
    return [TextEdit(a, b, _fitted(content[a:b], old, new, usual)) for a, b in spans]


def _fitted(found: bytes, old: bytes, new: bytes, usual: bytes) -> bytes:
    """Return `new` with the line ends found for `old`; unchanged lines keep theirs."""
    ends = re.findall(rb"\r?\n", found) or [usual]
    first, *lines = new.split(b"\n")
    both = [each.split(b"\n")[::-1] for each in (old, new)]
    same = len(os.path.commonprefix(both))  # noqa: RUF071 - of lines, not paths
    parts = [first]
    for index, line in enumerate(lines):
        below = index - len(lines)
        parts += [ends[below if -below < same else min(index, len(ends) - 1)], line]
    return b"".join(parts)


def _require_difference(old: bytes, new: bytes) -> None:
    if not old:
        raise OpError(
            "invalid", "old is empty: give the text to replace, or use write_file for a new file"
        )
    if old == new:
        raise OpError("invalid", "old and new are the same: there is nothing to change")


def _find(content: bytes, old: bytes, path: str, *, every: bool) -> list[int]:
    """Return where `old` is: once, or with `every` all places without overlap; else OpError."""
    most = MAX_CHANGES if every else _SHOWN_LINES
    starts = list(islice(_starts(content, old, len(old) if every else 1), most + 1))
    if not starts:
        # Only a failed edit needs difflib, and that takes some milliseconds to import.
        from mcp_sandbox.runner.files.nearest import describe_nearest  # noqa: PLC0415

        raise OpError("no_match", describe_nearest(content, old, show(path)))
    if every and len(starts) > most:
        raise OpError(
            "too_large",
            f"old is there more than {MAX_CHANGES} times: change the file with a program, "
            "such as sed through exec",
        )
    if not every and len(starts) > 1:
        lines = ", ".join(str(content.count(b"\n", 0, at) + 1) for at in starts[:most])
        raise OpError(
            "ambiguous",
            f"old is in {show(path)} more than once, beginning in lines {lines}"
            f"{' and further ones' if len(starts) > most else ''}: give more of the text around "
            "the place you mean, or pass replace_all=true",
        )
    return starts


def _starts(content: bytes, old: bytes, step: int) -> Iterator[int]:
    at = content.find(old)
    while at >= 0:
        yield at
        at = content.find(old, at + step)


def _store(path: str, before: os.stat_result, content: bytes) -> None:
    target, found = find_destination(path)

    def version(of: os.stat_result) -> tuple[int, ...]:
        return of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns

    def unchanged() -> None:
        if version(os.stat(target)) != version(before):
            raise OpError(
                "no_match",
                f"{show(path)} was changed by something else meanwhile and was left so: read it "
                "again, then repeat the edit",
            )

    mode = (found or before).st_mode & 0o777
    replace(target, lambda fd: put(fd, content), mode, check=unchanged)


def _shorten(diff: bytes) -> bytes:
    if len(diff) <= MAX_DIFF:
        return diff
    note = b"... the rest of the diff is left out; the edit itself is whole\n"
    whole = diff[: MAX_DIFF - len(note)]
    return whole[: whole.rfind(b"\n") + 1] + note


def apply(content: bytes, changes: Iterable[TextEdit], start: int, end: int) -> bytes:
    """Return `content` from `start` to `end` with the changes, which are in order."""
    parts = []
    for change in changes:
        parts += [content[start : change.start], change.new]
        start = change.end
    return b"".join([*parts, content[start:end]])


def unify_diff(content: bytes, changes: Sequence[TextEdit], name: str, limit: int) -> bytes:
    """Return the diff as UTF-8; it ends soon after `limit` bytes."""
    out = f"--- {name}\n+++ {name}\n".encode()
    line, where, shift = 1, 0, 0
    for start, end, within in _windows(content, changes):
        line += content.count(b"\n", where, start)
        where = start
        old = _lines(content[start:end])
        new = _lines(apply(content, within, start, end))
        for hunk in _hunks(old, new, line, line + shift):
            out += hunk
            if len(out) > limit:
                return out
        shift += len(new) - len(old)
    return out


def _windows(
    content: bytes, changes: Sequence[TextEdit]
) -> Iterator[tuple[int, int, list[TextEdit]]]:
    """Yield whole lines around changes; changes whose lines meet share a window."""
    first = last = 0
    within: list[TextEdit] = []
    for change in changes:
        start, end = _above(content, change.start), _below(content, change.end)
        if within:
            if start <= last and (last - first < _WINDOW or change.start < last):
                within.append(change)
                last = end
                continue
            yield first, last, within
            start = max(start, last)
        first, last, within = start, end, [change]
    if within:
        yield first, last, within


def _above(content: bytes, start: int) -> int:
    """Return where the context above the line of `start` begins."""
    start = content.rfind(b"\n", 0, start) + 1
    for _ in range(_CONTEXT):
        start = content.rfind(b"\n", 0, max(start - 1, 0)) + 1
    return start


def _below(content: bytes, end: int) -> int:
    """Return where the context below the line of `end` ends."""
    for _ in range(_CONTEXT + 1):
        found = content.find(b"\n", end)
        if found < 0:
            return len(content)
        end = found + 1
    return end


def _lines(content: bytes) -> list[bytes]:
    """Split into lines with their newlines; a carriage return ends no line here."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def _hunks(old: list[bytes], new: list[bytes], line: int, new_line: int) -> Iterator[bytes]:
    groups: Iterable[list[tuple[str, int, int, int, int]]]
    if len(old) > _COMPARABLE or len(new) > _COMPARABLE:
        groups = [[("replace", 0, len(old), 0, len(new))]]
    else:
        # Only edits need it, and it takes some milliseconds to import.
        from difflib import SequenceMatcher  # noqa: PLC0415

        groups = SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(_CONTEXT)
    for group in groups:
        first, last = group[0], group[-1]
        before = _range(line + first[1], last[2] - first[1])
        after = _range(new_line + first[3], last[4] - first[3])
        yield f"@@ -{before} +{after} @@\n".encode()
        for tag, a, b, c, d in group:
            yield b"".join(_marked(b" " if tag == "equal" else b"-", old[a:b]))
            if tag != "equal":
                yield b"".join(_marked(b"+", new[c:d]))


def _range(line: int, count: int) -> str:
    """Format a range as diffs do: an empty one names the line before."""
    return str(line) if count == 1 else f"{line - 1 if count == 0 else line},{count}"


def _marked(sign: bytes, lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        text = line.decode("utf-8", "backslashreplace").encode()
        end = b"\n" if text.endswith(b"\n") else b"\n\\ No newline at end of file\n"
        yield sign + re.sub(rb"\r?\n\Z", b"", text) + end
