"""Our values -> MCP content: text to be read, structured where the answer is data. No I/O.

What a program printed, what it wrote to stderr and what we say about it are three content blocks,
so that output cannot pass itself off as ours. The machine-readable form is in the result's `_meta`
under `RESULT_KEY`. Text has no structured content beside it: clients that see that hide the text.
"""

import base64
import re
import struct
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Any, NamedTuple

from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent
from pydantic import BaseModel

from mcp_sandbox import models
from mcp_sandbox.runner.files.reading import MAX_IMAGE, image_type
from mcp_sandbox.server.text import (
    MAX_TEXT_BYTES,
    Shortened,
    clean_output,
    clip,
    count_bytes,
    count_overwritten,
    shorten,
    show,
    show_name,
    take_fitting,
    without_internals,
)
from mcp_sandbox.sessions.sandbox.notices import say_state
from mcp_sandbox.sessions.session import SandboxReport

MAX_SIDE = 8_000
_MAX_PARTS = 50_000
# What begins a part of a JPEG: neither an escaped byte of data nor a point to restart from.
_MARK = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
# Where a WebP has its two sides, and how many bits apart, long and too low by one they are.
_WEBP = {b"VP8 ": (26, 16, 14, 0), b"VP8L": (21, 14, 14, 1), b"VP8X": (24, 24, 24, 1)}
# The first frame as each kind begins it; an extended file holds one of the others.
_WEBP_BEGINS = re.compile(rb"(?s)VP8 .{7}\x9d\x01\x2a|VP8L.{4}/|VP8X.*?(?:VP8[ L]|ANMF)")
RESULT_KEY = "mcp-sandbox/result"
"""Where `_meta` keeps the machine-readable form of a result."""
# What is left for our own lines: names of changed files, the end of the call, the gap.
_OUTPUT_BYTES = MAX_TEXT_BYTES - 3_000
_ENTRIES_BYTES = MAX_TEXT_BYTES - 1_000
_QUERY = (
    'python3 -c "import sqlite3, sys; print(*sqlite3.connect(sys.argv[1]).execute(sys.argv[2]), '
    "sep='\\n')\" {0} 'SELECT sql FROM sqlite_master'"
)
# How files begin that are not text, what they are, and how to read them without more programs.
_READERS = (
    (b"SQLite format 3\0", "a SQLite database", _QUERY),
    (b"%PDF-", "a PDF", "pdftotext {0} - (poppler-utils) or pypdf, where one is installed"),
    (b"PK\3\4", "a zip file", "python3 -m zipfile -l {0}; with -e {0} DIR it is unpacked"),
    (b"\x1f\x8b", "gzip data", "zcat {0} | head -n 50, or for a tar file tar -tzf {0}"),
    (b"", "", "a program that reads this type, such as python3; all bytes: od -A x -t x1z {0}"),
)
_CONVERT = "iconv -f {1} -t UTF-8 {0}"
_STRAY = "all lines with such: exec LC_ALL=C.UTF-8 grep -naxv '.*' {0}"
_SILENT = {True: "(nothing new was printed)", False: "(no output)"}
_GAP = " bytes left out here; "
_TROUBLE = re.compile(f"^.*(?:{models.TROUBLE})", re.IGNORECASE | re.MULTILINE)
# Clients showed ten pictures of this size, and not many more.
_FIGURES_SHOWN, _FIGURE_BYTES, _FIGURE_SIDE = 10, 1024 * 1024, 2_000
_IN_META = (
    *("exit_code", "signal", "duration_ms", "timed_out", "out_of_memory", "killed_because"),
    *("limit", "stdout_bytes", "stderr_bytes", "output_file", "file_counts"),
    *("process", "running", "backend"),
)
_OF_FILE = ("kind", "mime", "size", "first_line", "lines", "total_lines", "more")


class Picture(NamedTuple):
    """A picture's type and pixels; `fault` says why no model can be shown it, empty if one can."""

    mime: str
    width: int = 0
    height: int = 0
    fault: str = ""


def inspect(path: str, data: bytes, size: int) -> Picture:
    """Describe a file of `size` bytes; `data` holds all of them, or the first of too many."""
    mime = image_type(data) or "application/octet-stream"
    if size > MAX_IMAGE:
        return Picture(mime, fault=f"over {MAX_IMAGE:,} bytes; {_smaller_copy(path)}")
    try:
        width, height = _MEASURES[mime](data)
    except (struct.error, LookupError, ValueError, StopIteration):
        return Picture(mime, fault="it is damaged or not whole")
    fault = "" if width and height else "it has no pixels"
    if max(width, height) > MAX_SIDE:
        fault = f"over {MAX_SIDE:,} pixels a side; {_smaller_copy(path)}"
    return Picture(mime, width, height, fault)


def _smaller_copy(path: str) -> str:
    return (
        "for a smaller copy, where Pillow or ImageMagick is installed:\n"
        'python3 -c "import sys; from PIL import Image as I; I.MAX_IMAGE_PIXELS = None; '
        "i = I.open(sys.argv[1]); i.thumbnail((1500, 1500)); i.convert('RGB').save(sys.argv[2])\" "
        "{0} {1} || convert {0}'[0]' -resize '1500x1500>' {1}"
    ).format(quote(path), quote(f"{path.rpartition('/')[2]}.small.jpg"))


def _png(data: bytes) -> tuple[int, int]:
    at, kinds = 8, [b""]
    while kinds[-1] != b"IEND" and len(kinds) < _MAX_PARTS:
        length, kind = struct.unpack_from(">I4s", data, at)
        (checksum,) = struct.unpack_from(">I", data, at + 8 + length)
        if checksum != zlib.crc32(memoryview(data)[at + 4 : at + 8 + length]):
            raise ValueError
        kinds.append(kind)
        at += 12 + length
    if (
        kinds[1] != b"IHDR"
        or data[24] not in (1, 2, 4, 8, 16)
        or data[25] not in (0, 2, 3, 4, 6)
        or b"IDAT" not in kinds
        or kinds[-1] != b"IEND"
    ):
        raise ValueError
    width, height = struct.unpack_from(">II", data, 16)
    return width, height


def _jpeg(data: bytes) -> tuple[int, int]:
    at, marks, size = 2, set(), (0, 0)
    for _ in range(_MAX_PARTS):
        found = next(_MARK.finditer(data, at))
        marks.add(mark := found[0][1])
        # Its end, its data, and the two kinds of tables without which they cannot be read.
        if mark == 0xD9 and marks >= {0xDA, 0xC4, 0xDB}:
            return size
        length, depth, height, width = struct.unpack_from(">HBHH", data, found.end())
        if 0xC0 <= mark <= 0xC2 and depth == 8:
            size = width, height
        at = found.end() + length
    raise ValueError


def _gif(data: bytes) -> tuple[int, int]:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at, in_blocks, frames = 13 + (flags >> 7) * (6 << (flags & 7)), False, 0
    for _ in range(_MAX_PARTS):
        kind = data[at]
        if in_blocks:
            at, in_blocks = at + 1 + kind, kind > 0
            continue
        if kind == 0x3B and frames:
            return width, height
        if kind not in (0x21, 0x2C):
            break
        at, in_blocks = at + 2, True
        if kind == 0x2C:
            flags, frames = data[at + 7], frames + 1
            at += 9 + (flags >> 7) * (6 << (flags & 7))
    raise ValueError


def _webp(data: bytes) -> tuple[int, int]:
    whole, kind = struct.unpack_from("<I4x4s", data, 4)
    if len(data) < max(30, 8 + whole) or not _WEBP_BEGINS.match(data, 12):
        raise ValueError
    start, apart, bits, less = _WEBP[kind]
    both = int.from_bytes(data[start:30], "little")
    width, height = (each % (1 << bits) + less for each in (both, both >> apart))
    return width, height


_MEASURES = {"image/png": _png, "image/jpeg": _jpeg, "image/gif": _gif, "image/webp": _webp}


def format_exec(result: models.ExecResult, *, tail: int = 0, known: bool = False) -> CallToolResult:
    """Return stdout, stderr and how the command ended, each a block when not empty.

    With `tail` the last lines of what is held. How to look after what goes on may be `known`.
    """
    if tail:
        each_stream = (result.stdout, result.stderr)
        out, err = ("".join(text.splitlines(keepends=True)[-tail:]) for text in each_stream)
        out_bytes, err_bytes = count_bytes(out), count_bytes(err)
        begin = result.stdout_bytes + result.stderr_bytes - out_bytes - err_bytes
        result = replace(result, stdout=out, stderr=err, stdout_from=begin, stderr_from=0)
        result = replace(result, stdout_bytes=out_bytes, stderr_bytes=err_bytes)
    out_bytes, err_bytes = (
        count_bytes(clean_output(each)) for each in (result.stdout, result.stderr)
    )
    err_bytes = min(err_bytes, max(_OUTPUT_BYTES // 3, _OUTPUT_BYTES - out_bytes))
    shown_out = _stream(result.stdout, _OUTPUT_BYTES - err_bytes, result, result.stdout_bytes)
    shown_err = _stream(result.stderr, err_bytes, result, result.stderr_bytes)
    shown_err = shown_err if result.success else without_internals(shown_err)
    unseen = result.trouble_lines - len(_TROUBLE.findall(f"{shown_out}\n{shown_err}"))
    pictures, remarks = _choose_pictures(result.figures)
    ending = "\n".join(f"[{line}]" for line in (*_ending(result, unseen, known), *remarks))
    blocks = [shown_out, f"[stderr]\n{shown_err}" if shown_err else "", ending]
    meta = {name: getattr(result, name) for name in _IN_META}
    meta["truncated"] = _GAP in shown_out + shown_err
    for kind in ("changed_files", "created_files"):
        names: tuple[str, ...] | None = getattr(result, kind)
        meta[kind] = None if names is None else [show_name(name) for name in names]
    if result.figures:
        meta["figures"] = [show_name(each.path) for each in result.figures]
    silent = not (shown_out or shown_err) and (result.process or not ending)
    return texts([_SILENT[result.running] if silent else "", *blocks], meta, *pictures)


def _choose_pictures(figures: Sequence[models.FileContent]) -> tuple[list[ImageContent], list[str]]:
    pictures, remarks, names = list[ImageContent](), list[str](), list[str]()
    for figure in figures[:_FIGURES_SHOWN]:
        name, size = show_name(figure.path), max(figure.size, len(figure.data))
        found = inspect(name, figure.data, size) if figure.kind == "image" else None
        side = max(found.width, found.height) if found else 0
        if not found or found.fault:
            remarks.append(f"no picture to show, or damaged or too large: {name}")
        elif size > _FIGURE_BYTES or side > _FIGURE_SIDE:
            remarks.append(f"a large figure: read_file path={name} shows it")
        else:
            pictures.append(_image(figure, found))
            names.append(name)
    if further := [show_name(figure.path) for figure in figures[_FIGURES_SHOWN:]]:
        remarks.append(f"{_count(len(further), 'further figure')} to {further[-1]}, for read_file")
    if names:
        remarks.insert(0, f"shown below: {', '.join(names)}")
    return pictures, remarks


def _image(content: models.FileContent, found: Picture) -> ImageContent:
    data = base64.b64encode(content.data).decode()
    return ImageContent(data=data, mime_type=found.mime, type="image")


def _stream(text: str, max_bytes: int, result: models.ExecResult, total_bytes: int) -> str:
    cut, size = Shortened(text), max_bytes
    # What was printed is cut, not what is shown of it: so the hint knows the place in the file.
    lost = total_bytes > count_bytes(text)  # The runner has left out the middle already.
    while (lost and not cut.left_out) or count_bytes(clean_output(cut.head + cut.tail)) > max_bytes:
        cut, size = shorten(text, size), size * 2 // 3
    if lost and text.startswith("\n[... "):
        # Nothing is held any more of where it began.
        cut = replace(cut, head="")
    head, tail = clean_output(cut.head), clean_output(cut.tail)
    if not cut.left_out:
        return head
    # What is no UTF-8 is a character of three bytes now, and was one byte or more.
    first, last = (count_bytes(end) - 2 * end.count("\ufffd") for end in (cut.head, cut.tail))
    missing = total_bytes - first - last
    # The kept file holds both streams in order of arrival: places count only if there is one.
    alone = total_bytes == result.stdout_bytes + result.stderr_bytes
    begin = result.stdout_from + result.stderr_from
    if not result.output_file:
        rest = "print less to see them"
    elif not begin and head.endswith("\n") and "\n" in text[len(cut.head) :][:2_000]:
        line = cut.next_line if alone else 1
        rest = f"to see them: read_file path={result.output_file} offset={line}"
    else:
        start, size = begin + first * alone + 1, min(missing, _OUTPUT_BYTES)
        rest = f"to see them: exec tail -c +{start} {result.output_file} | head -c {size}"
    return f"{head}\n[… {missing:,}{_GAP}{rest} …]\n{tail}"


def _ending(result: models.ExecResult, unseen: int, known: bool) -> Iterable[str]:
    if unseen > 0:
        look = f"grep -naiE '{models.TROUBLE}' {result.output_file}"
        yield f"{_count(unseen, 'line')} left out with {models.TROUBLE}: exec {look}"
    if over := sum(map(count_overwritten, (result.stdout, result.stderr))):
        file = result.output_file
        look = f"exec tr '\\r' '\\n' < {file}" if file else "add | tr '\\r' '\\n' to the command"
        yield f"{_count(over, 'line')} left out, as the next began with a carriage return: {look}"
    if ended := _goes_on(result, known) if result.running else _how_it_ended(result):
        seconds = f"{result.process} has ended after {result.duration_ms / 1000:.0f} s: "
        yield seconds * bool(result.process and not result.running) + ended
    if result.notebook == "new":
        yield "a new notebook: nothing of earlier ones is in it"
    elif result.notebook == "ended":
        yield "the notebook has ended, its variables are gone; the next cell begins it anew"
    yield from result.shell
    if result.made_room.total:
        yield _what_made_room(result.made_room)
    if result.limit:
        yield show_name(result.limit)
    if result.changed_files:
        names = [clip(show_name(name), 120) for name in result.changed_files[:20]]
        counts, more = result.file_counts, "perhaps" * (len(names) == 20)
        if counts:
            more = str(counts["created"] + counts["changed"] - len(names) or "")
        others = f" and {more} more" if more else ""
        yield f"files created or changed: {', '.join(names)}{others}"


def _goes_on(result: models.ExecResult, known: bool) -> str:
    name, seconds = result.process, f"{result.duration_ms / 1000:.0f} s"
    how = "what was waited for is there; it " if result.until_met else ""
    until = ""
    if result.left_s is not None:
        ends = datetime.now(UTC) + timedelta(seconds=result.left_s)
        # In a day it is as late as now.
        day = "%a " if result.left_s > 43_200 else ""
        until = f", at most until {ends:{day}%H:%M} UTC"
    whole = f"; its whole output: read_file path={result.output_file}" if result.output_file else ""
    ways = f"{until}; process action=wait id={name} waits for its end, action=stop ends it{whole}"
    return f"{how}goes on as {name} after {seconds}{ways * (not known)}"


def format_processes(rows: Sequence[models.ProcessRow]) -> CallToolResult:
    """Return a line each: id, state, seconds, memory, what it belongs to, the command."""
    lines = [
        f"{row.id}  {say_state(row)}  {row.seconds:.0f} s  "
        f"{f'{row.memory_bytes >> 20} MiB  ' if row.running else ''}"
        f"{f'({row.of})  ' if row.of else ''}{show_name(row.command)}"
        for row in rows
    ]
    meta = {"processes": [vars(row) for row in rows]}
    return texts(["\n".join(lines) or "[no process runs in the background, or has lately]"], meta)


def _how_it_ended(result: models.ExecResult) -> str:
    seconds = round(result.duration_ms / 1000, 1)
    ended = f"exit code {result.exit_code}" if result.exit_code or result.process else ""
    if result.timed_out:
        goes_on = result.notebook in ("new", "kept")
        killed = "and was killed with all its processes"
        end = "and was interrupted, variables are kept" if goes_on else killed
        ended = (
            f"timed out after {seconds:g} s {end}; give a larger timeout_s, or do less in one call"
        )
    elif result.stopped:
        ended = f"stopped, {ended}" if result.exit_code is not None else "stopped"
    elif result.out_of_memory:
        ended = "killed: out of memory"
    elif result.killed_because:
        ended = f"killed: {show_name(result.killed_because)}"
    elif result.signal:
        ended = f"killed by signal {result.signal}"
    return ended


def _what_made_room(ended: models.Background) -> str:
    counts = Counter(show_name(each.command) or "a process" for each in ended.processes)
    names = [f"{clip(name, 80)}{f' ({n} times)' if n > 1 else ''}" for name, n in counts.items()]
    others = ended.total - len(ended.processes)
    more = f" and {others} more" if others > 0 else ""
    return (
        f"ended, as too few processes were left for this command: {', '.join(names[:8])}{more}, "
        "left running by an earlier one; see sandbox_info for the limit"
    )


def format_file(content: models.FileContent) -> CallToolResult:
    """Return numbered lines, an image, or a description of bytes that are neither."""
    meta = {name: getattr(content, name) for name in _OF_FILE} | {"path": show_name(content.path)}
    if content.kind == "text":
        return _numbered(content, meta)
    name, size = show_name(content.path), max(content.size, len(content.data))
    if not content.mime.startswith("image/"):
        kind, reader = next(row[1:] for row in _READERS if content.data.startswith(row[0]))
        if content.encoding not in ("", "UTF-8") and not kind:
            kind, reader = f"perhaps {show_name(content.encoding)} text", _CONVERT
        what = kind or f"not text, {content.mime}, begins with {content.data[:64]!r}"
        hint = f"[to get at it: {reader.format(quote(name), quote(show_name(content.encoding)))}]"
        return texts([f"{name}: {content.size:,} bytes, {what}\n{hint}"], meta)
    found = inspect(name, content.data, size)
    pixels = f"{found.width:,} × {found.height:,} pixels, " if found.width or found.height else ""  # noqa: RUF001
    text = f"{name}: {found.mime}, {pixels}{size:,} bytes"
    if found.fault:
        return texts([f"{text}; not an image to show: {found.fault}"], meta | {"kind": "binary"})
    return texts([text], meta, _image(content, found))


def _numbered(content: models.FileContent, meta: dict[str, Any]) -> CallToolResult:
    text = content.data.decode("utf-8", "replace")
    lines = show(text).removesuffix("\n").split("\n") if text else []
    cut = (
        shorten(f"{number:6}\t{line}", _OUTPUT_BYTES)
        for number, line in enumerate(lines, content.first_line)
    )
    rows = take_fitting(
        (f"{row.head}…" if row.left_out else row.head for row in cut), _OUTPUT_BYTES
    )
    meta |= {"lines": len(rows), "more": content.more or len(rows) < len(lines)}
    return texts(["\n".join(rows), "\n".join(_file_notes(content, len(rows)))], meta)


def _file_notes(content: models.FileContent, count: int) -> Iterable[str]:
    first, total = content.first_line, content.total_lines
    if not (content.size or content.data):
        yield "[the file is empty]"
    elif not count:
        has = "" if total is None else f", it has {total:,} lines"
        yield f"[no line {first:,}: the file ends before it{has}]"
    elif content.more or count < content.lines:
        last, of = first + count - 1, "" if total is None else f" of {total:,}"
        yield f"[lines {first:,} to {last:,}{of}; read on with offset={last + 1}]"
    if content.long_lines_cut:
        cut = _count(content.long_lines_cut, "long line")
        yield f"[{cut} shortened here; exec with cut -c shows more]"
    if content.encoding:
        way = _STRAY if content.encoding == "UTF-8" else f"perhaps {{1}}, a guess: exec {_CONVERT}"
        names = quote(show_name(content.path)), quote(show_name(content.encoding))
        yield f"[bytes that are not UTF-8 are shown as \\xe9; {way.format(*names)}]"


def write_result(result: models.WriteResult, *, append: bool) -> CallToolResult:
    """Return what was written where."""
    done = "created" if result.created else "appended to" if append else "replaced"
    meta = {"path": show_name(result.path), "written": result.written, "created": result.created}
    return texts([f"{done} {meta['path']} ({_count(result.written, 'byte')})"], meta)


def format_edit(result: models.EditResult, *, dry_run: bool) -> CallToolResult:
    """Return the unified diff."""
    cut = shorten(show(result.diff), _OUTPUT_BYTES)
    gap = f"[… {cut.left_out:,} bytes of the diff left out …]\n"
    diff = f"{cut.head}\n{gap}{cut.tail}" if cut.left_out else cut.head
    count = _count(result.replacements, "replacement")
    done = f"[dry run, nothing written: {count}]" if dry_run else f"[{count}]"
    return texts(
        [diff, done], {"path": show_name(result.path), "replacements": result.replacements}
    )


def format_glob(result: models.GlobResult) -> CallToolResult:
    """Return one path a line, newest first."""
    lines = take_fitting(map(show_name, result.paths), _OUTPUT_BYTES)
    truncated = result.truncated or len(lines) < len(result.paths)
    note = f"{len(lines):,} of {result.total:,} or more shown: narrow the pattern or the path"
    said = _say_nothing(result) if not lines else note if truncated else ""
    notes = _end_note(said, result)
    meta = {"shown": len(lines), "total": result.total, "truncated": truncated}
    return texts(["\n".join(lines), notes and f"[{notes}]"], meta)


def format_grep(result: models.GrepResult) -> CallToolResult:
    """Return lines of `file:line:text`, then how many matches there are."""
    lines = take_fitting((clip(show_name(line), 2_000) for line in result.lines), _OUTPUT_BYTES)
    truncated = result.truncated or len(lines) < len(result.lines)
    matches, files = _count(result.matches, "match", "matches"), _count(result.files, "file")
    cut = "; shortened: narrow the pattern, path or glob" if truncated else ""
    said = f"{matches} in {files}{cut}" if lines else _say_nothing(result)
    meta = {"matches": result.matches, "files": result.files, "truncated": truncated}
    return texts(["\n".join(lines), f"[{_end_note(said, result)}]"], meta)


def _end_note(said: str, result: models.GlobResult | models.GrepResult | models.Listing) -> str:
    names = [clip(show_name(name), 100) for name in result.left_out]
    more = (" and more" if names[5:] else "") + " left out" * bool(names)
    return ", ".join([said] * bool(said) + names[:5]) + more


def _say_nothing(result: models.GlobResult | models.GrepResult) -> str:
    unsure = "not all was looked at, so narrow the path or the glob"
    hint = unsure if result.truncated else clip(show_name(result.hint), 1_000)
    return f"nothing matches{hint and ': '}{hint}"


def delete_result(result: models.DeleteResult) -> CallToolResult:
    """Return what was removed."""
    inside = _count(result.entries - 1, "entry", "entries")
    more = f" with {inside}" if result.entries > 1 else ""
    text = f"deleted {result.kind} {show_name(result.path)}{more}"
    return texts([text], {"path": show_name(result.path), "entries": result.entries})


def move_result(result: models.MoveResult) -> CallToolResult:
    """Return what went where."""
    source, destination = show_name(result.source), show_name(result.destination)
    replaced = " (replaced what was there)" if result.replaced else ""
    meta = {"source": source, "destination": destination, "replaced": result.replaced}
    return texts([f"moved {source} to {destination}{replaced}"], meta)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def with_notices(result: CallToolResult, news: list[str]) -> CallToolResult:
    """Return the result, followed by what became of the sandbox before it."""
    notices = [TextContent(text=f"[{clip(show(each), 2000)}]", type="text") for each in news]
    return result.model_copy(update={"content": [*result.content, *notices]})


def texts(blocks: Iterable[str], meta: dict[str, Any], *more: ContentBlock) -> CallToolResult:
    """Return blocks of text that are not empty, and their machine-readable form."""
    content = [TextContent(text=block, type="text") for block in blocks if block]
    return CallToolResult(content=[*content, *more], _meta={RESULT_KEY: meta} if meta else None)


class ListedEntry(BaseModel, frozen=True):
    """One entry; `name` is a path that the other tools take, `modified` is in UTC."""

    name: str
    type: models.EntryKind
    size: int
    modified: str
    link_target: str | None = None


class ListedFiles(BaseModel, frozen=True):
    """What list_files answers."""

    path: str
    entries: list[ListedEntry]
    total: int
    truncated: bool
    note: str | None = None


class WorkspaceReport(BaseModel, frozen=True):
    """Where the files are and how much room they take."""

    path: str
    used_bytes: int
    limit_bytes: int
    files: int
    exact: bool


class SandboxInfoReport(BaseModel, frozen=True):
    """What sandbox_info answers; `programs` maps a name to its version."""

    chat: str
    backend: str
    image: str | None = None
    state: str
    isolation: str
    network: str
    limits: dict[str, str]
    programs: dict[str, str]
    previews: dict[int, str]
    workspace: WorkspaceReport
    project: str
    versions: dict[str, str]


def fit_files(listing: models.Listing) -> CallToolResult:
    """Return the entries that fit in one result, with a note on how to see the rest."""
    entries = take_fitting(map(_listed, listing.entries), _ENTRIES_BYTES, as_json)
    truncated = listing.truncated or len(entries) < len(listing.entries)
    cut = f"{len(entries)} shown: list a subdirectory, or use glob" if truncated else ""
    note = _end_note(cut, listing) or None
    path, total = show_name(listing.path), listing.total
    return structured(
        ListedFiles(path=path, entries=entries, total=total, truncated=truncated, note=note)
    )


def _listed(entry: models.Entry) -> ListedEntry:
    return ListedEntry(
        name=show_name(entry.path),
        type=entry.kind,
        size=entry.size,
        modified=_utc(entry.modified),
        link_target=None if entry.target is None else show_name(entry.target),
    )


def _utc(seconds: float) -> str:
    # A sandbox can set any time on its files, also one that no calendar has.
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"@{seconds:.0f}"


def format_sandbox(report: SandboxReport) -> CallToolResult:
    """Return everything `sandbox_info` knows."""
    # Whatever the sandbox says of itself is as hostile as any output.
    programs, versions = (
        {clip(show_name(name), 60): clip(show_name(version), 60) for name, version in pairs}
        for pairs in ([*report.programs.items()][:50], report.versions.items())
    )
    workspace = WorkspaceReport(path="/workspace", **vars(report.usage))
    facts = {"chat": str(report.chat), "state": "running", "workspace": workspace}
    report_fields = {**vars(report), **facts, "programs": programs, "versions": versions}
    return structured(SandboxInfoReport.model_validate(report_fields))


def structured(answer: BaseModel) -> CallToolResult:
    """Return data, and the same as text; clients show a model only this, so it must be complete."""
    text = TextContent(text=as_json(answer), type="text")
    data = answer.model_dump(mode="json", exclude_none=True)
    return CallToolResult(content=[text], structured_content=data)


def as_json(answer: BaseModel) -> str:
    """Return structured content as it goes over the wire."""
    return answer.model_dump_json(exclude_none=True)
