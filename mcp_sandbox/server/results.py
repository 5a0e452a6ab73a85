"""Our values -> MCP content that is text to be read. Pure functions.

What a program printed, what it wrote to stderr and what we say about it are three content blocks,
so that output cannot pass itself off as ours. The machine-readable form is in the result's `_meta`
under `RESULT_KEY`. No structured content: clients that see it hide the text.
"""

import base64
import re
from shlex import quote
from typing import Any

from mcp.types import CallToolResult, ContentBlock, ImageContent, TextContent

from mcp_sandbox.models import (
    TROUBLE,
    DeleteResult,
    EditResult,
    ExecResult,
    FileContent,
    GlobResult,
    GrepResult,
    MoveResult,
    WriteResult,
)
from mcp_sandbox.server.pictures import inspect
from mcp_sandbox.server.text import (
    MAX_TEXT_BYTES,
    Shortened,
    byte_length,
    clip,
    printed,
    shorten,
    show,
    show_name,
    without_internals,
)

RESULT_KEY = "mcp-sandbox/result"
"""Where `_meta` keeps the machine-readable form of a result."""

# What is left for our own lines: names of changed files, the end of the call, the gap.
_RESERVED_BYTES = 3_000
_OUTPUT_BYTES = MAX_TEXT_BYTES - _RESERVED_BYTES
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
    ((b"\xff\xfe", b"\xfe\xff"), "UTF-16 text", "iconv -f UTF-16 -t UTF-8 {0}"),
    (b"", "", "a program that reads this type, such as python3; all bytes: od -A x -t x1z {0}"),
)
_GAP = " bytes left out here; "
_TROUBLE = re.compile(f"^.*(?:{TROUBLE})", re.IGNORECASE | re.MULTILINE)
_IN_META = (
    *("exit_code", "signal", "duration_ms", "timed_out", "out_of_memory", "killed_because"),
    *("limit", "stdout_bytes", "stderr_bytes", "output_file", "file_counts"),
)


def exec_result(result: ExecResult, *, timeout_s: float) -> CallToolResult:
    """Standard output, standard error and how the command ended, each a block when not empty."""
    out_bytes, err_bytes = (byte_length(printed(each)) for each in (result.stdout, result.stderr))
    err_bytes = min(err_bytes, max(_OUTPUT_BYTES // 3, _OUTPUT_BYTES - out_bytes))
    shown_out = _stream(result.stdout, _OUTPUT_BYTES - err_bytes, result, result.stdout_bytes)
    shown_err = _stream(result.stderr, err_bytes, result, result.stderr_bytes)
    shown_err = shown_err if result.success else without_internals(shown_err)
    unseen = result.trouble_lines - len(_TROUBLE.findall(f"{shown_out}\n{shown_err}"))
    blocks = [
        shown_out,
        f"[stderr]\n{shown_err}" if shown_err else "",
        "\n".join(_ending(result, timeout_s, unseen)),
    ]
    meta = _exec_meta(result, truncated=_GAP in shown_out + shown_err)
    return texts([block for block in blocks if block] or ["(no output)"], meta)


def _stream(text: str, max_bytes: int, result: ExecResult, total_bytes: int) -> str:
    cut, size = Shortened(text), max_bytes
    # What was printed is cut, not what is shown of it: so the hint knows the place in the file.
    lost = total_bytes > byte_length(text)  # The runner has left out the middle already.
    while (lost and not cut.left_out) or byte_length(printed(cut.head + cut.tail)) > max_bytes:
        cut, size = shorten(text, size), size * 2 // 3
    head, tail = printed(cut.head), printed(cut.tail)
    if not cut.left_out:
        return head
    # What is no UTF-8 is a character of three bytes now, and was one byte or more.
    first, last = (byte_length(end) - 2 * end.count("\ufffd") for end in (cut.head, cut.tail))
    missing = total_bytes - first - last
    # The kept file holds both streams in order of arrival: places count only if there is one.
    alone = total_bytes == result.stdout_bytes + result.stderr_bytes
    if not result.output_file:
        rest = "print less to see them"
    elif head.endswith("\n") and "\n" in text[len(cut.head) :][:2_000]:
        line = cut.next_line if alone else 1
        rest = f"to see them: read_file path={result.output_file} offset={line}"
    else:
        start, size = first + 1 if alone else 1, min(missing, _OUTPUT_BYTES)
        rest = f"to see them: exec tail -c +{start} {result.output_file} | head -c {size}"
    return f"{head}\n[… {missing:,}{_GAP}{rest} …]\n{tail}"


def _ending(result: ExecResult, timeout_s: float, unseen: int) -> list[str]:
    lines = []
    if unseen > 0:
        look = f"grep -naiE '{TROUBLE}' {result.output_file}"
        lines.append(f"[{_count(unseen, 'line')} left out with {TROUBLE}: exec {look}]")
    if ended := _how_it_ended(result, timeout_s):
        lines.append(f"[{ended}]")
    if result.limit:
        lines.append(f"[{show_name(result.limit)}]")
    if result.changed_files:
        names = [clip(show_name(name), 120) for name in result.changed_files[:20]]
        counts = result.file_counts
        more = (
            counts["created"] + counts["changed"] - len(names)
            if counts
            else "perhaps" * (len(names) == 20)
        )
        others = f" and {more} more" if more else ""
        lines.append(f"[files created or changed: {', '.join(names)}{others}]")
    return lines


def _how_it_ended(result: ExecResult, timeout_s: float) -> str:
    if result.timed_out:
        return (
            f"timed out after {timeout_s:g} s and was killed with all its processes; "
            "give a larger timeout_s, or do less in one call"
        )
    if result.out_of_memory:
        return "killed: out of memory; see sandbox_info for the limit"
    if result.killed_because:
        return f"killed: {show_name(result.killed_because)}"
    if result.signal:
        return f"killed by signal {result.signal}"
    return f"exit code {result.exit_code}" if result.exit_code else ""


def _exec_meta(result: ExecResult, *, truncated: bool) -> dict[str, Any]:
    names = result.changed_files
    return {
        **{name: getattr(result, name) for name in _IN_META},
        "truncated": truncated,
        "changed_files": None if names is None else [show_name(name) for name in names],
    }


def file_content(content: FileContent) -> CallToolResult:
    """Numbered lines, an image, or a description of bytes that are neither."""
    meta = {
        "path": show_name(content.path),
        "kind": content.kind,
        "mime": content.mime,
        "size": content.size,
        "first_line": content.first_line,
        "lines": content.lines,
        "total_lines": content.total_lines,
        "more": content.more,
    }
    if content.kind == "text":
        return _numbered(content, meta)
    if content.mime.startswith("image/"):
        return _picture(content, meta)
    return texts([_binary(content)], meta)


def _picture(content: FileContent, meta: dict[str, Any]) -> CallToolResult:
    name, size = show_name(content.path), max(content.size, len(content.data))
    found = inspect(name, content.data, size)
    pixels = f"{found.width:,} × {found.height:,} pixels, " if found.width or found.height else ""  # noqa: RUF001
    text = f"{name}: {found.mime}, {pixels}{size:,} bytes"
    if found.fault:
        return texts([f"{text}; not an image to show: {found.fault}"], meta | {"kind": "binary"})
    data = base64.b64encode(content.data).decode()
    image = ImageContent(data=data, mime_type=found.mime, type="image")
    return _result([TextContent(text=text, type="text"), image], meta)


def _binary(content: FileContent) -> str:
    name = show_name(content.path)
    kind, reader = next(row[1:] for row in _READERS if content.data.startswith(row[0]))
    what = kind or f"not text, {content.mime}, begins with {content.data[:64]!r}"
    return f"{name}: {content.size:,} bytes, {what}\n[to get at it: {reader.format(quote(name))}]"


def _numbered(content: FileContent, meta: dict[str, Any]) -> CallToolResult:
    text = content.data.decode("utf-8", "replace")
    lines = show(text).removesuffix("\n").split("\n") if text else []
    numbered: list[str] = []
    used = 0
    for number, line in enumerate(lines, content.first_line):
        row = shorten(f"{number:6}\t{line}", _OUTPUT_BYTES)
        used += byte_length(row.head) + 1
        if used > _OUTPUT_BYTES and numbered:
            break
        numbered.append(f"{row.head}…" if row.left_out else row.head)
    notes = _file_notes(content, len(numbered))
    meta |= {"lines": len(numbered), "more": content.more or len(numbered) < len(lines)}
    return texts(["\n".join(numbered), "\n".join(notes)], meta)


def _file_notes(content: FileContent, shown: int) -> list[str]:
    of = "" if content.total_lines is None else f" of {content.total_lines:,}"
    notes = []
    if not (content.size or content.data):
        notes.append("[the file is empty]")
    elif not shown:
        has = "" if content.total_lines is None else f", it has {content.total_lines:,} lines"
        notes.append(f"[no line {content.first_line:,}: the file ends before it{has}]")
    elif content.more or shown < content.lines:
        last = content.first_line + shown - 1
        notes.append(
            f"[lines {content.first_line:,} to {last:,}{of}; read on with offset={last + 1}]"
        )
    if content.long_lines_cut:
        cut = _count(content.long_lines_cut, "long line")
        notes.append(f"[{cut} shortened here; exec with cut -c shows more]")
    return notes


def write_result(result: WriteResult, *, append: bool) -> CallToolResult:
    """What was written where."""
    done = "created" if result.created else "appended to" if append else "replaced"
    text = f"{done} {show_name(result.path)} ({_count(result.written, 'byte')})"
    return texts(
        [text],
        {"path": show_name(result.path), "written": result.written, "created": result.created},
    )


def edit_result(result: EditResult, *, dry_run: bool) -> CallToolResult:
    """The unified diff."""
    cut = shorten(show(result.diff), _OUTPUT_BYTES)
    gap = f"[… {cut.left_out:,} bytes of the diff left out …]\n"
    diff = f"{cut.head}\n{gap}{cut.tail}" if cut.left_out else cut.head
    count = _count(result.replacements, "replacement")
    done = f"[dry run, nothing written: {count}]" if dry_run else f"[{count}]"
    return texts(
        [diff, done], {"path": show_name(result.path), "replacements": result.replacements}
    )


def glob_result(result: GlobResult) -> CallToolResult:
    """One path a line, newest first."""
    lines = _fitting([show_name(path) for path in result.paths])
    notes = []
    if not lines:
        notes.append("[nothing matches]")
    elif result.truncated or len(lines) < len(result.paths):
        notes.append(
            f"[{len(lines):,} of {result.total:,} or more shown: narrow the pattern or the path]"
        )
    truncated = result.truncated or len(lines) < len(result.paths)
    meta = {"shown": len(lines), "total": result.total, "truncated": truncated}
    return texts(["\n".join(lines), *notes], meta)


def grep_result(result: GrepResult) -> CallToolResult:
    """`file:line:text`, then how many matches there are."""
    lines = _fitting([clip(show_name(line), 2_000) for line in result.lines])
    truncated = result.truncated or len(lines) < len(result.lines)
    note = (
        "[nothing matches]"
        if not lines
        else f"[{_count(result.matches, 'match', 'matches')} in {_count(result.files, 'file')}"
        f"{'; shortened: narrow the pattern, path or glob' if truncated else ''}]"
    )
    meta = {"matches": result.matches, "files": result.files, "truncated": truncated}
    return texts(["\n".join(lines), note], meta)


def _fitting(lines: list[str]) -> list[str]:
    used, fitting = 0, []
    for line in lines:
        used += byte_length(line) + 1
        if used > _OUTPUT_BYTES:
            break
        fitting.append(line)
    return fitting


def delete_result(result: DeleteResult) -> CallToolResult:
    """What was removed."""
    inside = _count(result.entries - 1, "entry", "entries")
    more = f" with {inside}" if result.entries > 1 else ""
    text = f"deleted {result.kind} {show_name(result.path)}{more}"
    return texts([text], {"path": show_name(result.path), "entries": result.entries})


def move_result(result: MoveResult) -> CallToolResult:
    """What went where."""
    source, destination = show_name(result.source), show_name(result.destination)
    replaced = " (replaced what was there)" if result.replaced else ""
    meta = {"source": source, "destination": destination, "replaced": result.replaced}
    return texts([f"moved {source} to {destination}{replaced}"], meta)


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def with_news(result: CallToolResult, news: list[str]) -> CallToolResult:
    """The result, followed by what became of the sandbox before it."""
    if not news:
        return result
    told = [TextContent(text=f"[{clip(show(each), 2000)}]", type="text") for each in news]
    return result.model_copy(update={"content": [*result.content, *told]})


def texts(blocks: list[str], meta: dict[str, Any]) -> CallToolResult:
    """Blocks of text, and their machine-readable form."""
    return _result([TextContent(text=block, type="text") for block in blocks if block], meta)


def plain(text: str) -> CallToolResult:
    """A sentence of ours."""
    return texts([show(text)], {})


def _result(content: list[ContentBlock], meta: dict[str, Any]) -> CallToolResult:
    return CallToolResult(content=content, _meta={RESULT_KEY: meta} if meta else None)
