"""Our values -> MCP content that is text to be read. Pure functions.

What a program printed, what it wrote to stderr and what we say about it are three content blocks,
so that output cannot pass itself off as ours. The machine-readable form is in the result's `_meta`
under `RESULT_KEY`. No structured content: clients that see it hide the text.
"""

import base64
import re
from bisect import bisect_left
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
from mcp_sandbox.server.text import (
    MAX_TEXT_BYTES,
    byte_length,
    clip,
    shorten,
    show,
    show_name,
)

RESULT_KEY = "mcp-sandbox/result"
"""Where `_meta` keeps the machine-readable form of a result."""

# What is left for our own lines: names of changed files, the end of the call, the gap.
_RESERVED_BYTES = 3_000
_OUTPUT_BYTES = MAX_TEXT_BYTES - _RESERVED_BYTES
_HEX_BYTES = 256
_TROUBLE = re.compile(f"^.*(?:{TROUBLE})", re.IGNORECASE | re.MULTILINE)
_IN_META = (
    *("exit_code", "signal", "duration_ms", "timed_out", "out_of_memory", "killed_because"),
    *("limit", "stdout_bytes", "stderr_bytes", "output_file", "file_counts"),
)


def exec_result(result: ExecResult, *, timeout_s: float) -> CallToolResult:
    """Standard output, standard error and how the command ended, each a block when not empty."""
    out, err = show(result.stdout), show(result.stderr)
    err_bytes = min(byte_length(err), max(_OUTPUT_BYTES // 3, _OUTPUT_BYTES - byte_length(out)))
    shown_out = _stream(result.stdout, _OUTPUT_BYTES - err_bytes, result, result.stdout_bytes)
    shown_err = _stream(result.stderr, err_bytes, result, result.stderr_bytes)
    unseen = result.trouble_lines - len(_TROUBLE.findall(f"{shown_out}\n{shown_err}"))
    blocks = [
        shown_out,
        f"[stderr]\n{shown_err}" if shown_err else "",
        "\n".join(_ending(result, timeout_s, unseen)),
    ]
    return texts([block for block in blocks if block] or ["(no output)"], _exec_meta(result))


def _stream(text: str, max_bytes: int, result: ExecResult, total_bytes: int) -> str:
    cut = shorten(show(text), max_bytes)
    if not cut.left_out:
        return cut.head
    missing = max(cut.left_out, total_bytes - byte_length(cut.head) - byte_length(cut.tail))
    # The kept file holds both streams in order of arrival: places count only if there is one.
    alone = total_bytes == result.stdout_bytes + result.stderr_bytes
    if not result.output_file:
        rest = "print less to see them"
    elif cut.head.endswith("\n"):
        line = cut.next_line if alone else 1
        rest = f"to see them: read_file path={result.output_file} offset={line}"
    else:
        start = _printed_before(text, len(cut.head)) + 1 if alone else 1
        size = min(missing, _OUTPUT_BYTES)
        rest = f"to see them: exec tail -c +{start} {result.output_file} | head -c {size}"
    return f"{cut.head}\n[… {missing:,} bytes left out here; {rest} …]\n{cut.tail}"


def _printed_before(text: str, shown: int) -> int:
    """How many bytes were printed before so many characters were to be seen."""
    end = bisect_left(range(len(text)), shown, key=lambda size: len(show(text[:size])))
    # What is no UTF-8 is a character of three bytes now, and was one byte or more.
    return byte_length(text[:end]) - 2 * text.count("\ufffd", 0, end)


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
        more = counts["created"] + counts["changed"] - len(names) if counts else "perhaps"
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


def _exec_meta(result: ExecResult) -> dict[str, Any]:
    names = result.changed_files
    return {
        **{name: getattr(result, name) for name in _IN_META},
        "truncated": result.truncated or byte_length(result.stdout + result.stderr) > _OUTPUT_BYTES,
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
    if content.kind == "image":
        text = f"{show_name(content.path)}: {content.mime}, {content.size:,} bytes"
        image = ImageContent(
            data=base64.b64encode(content.data).decode(), mime_type=content.mime, type="image"
        )
        return _result([TextContent(text=text, type="text"), image], meta)
    if content.kind == "binary":
        return texts([_binary(content)], meta)
    return _numbered(content, meta)


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
    if not content.size:
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


def _binary(content: FileContent) -> str:
    data = content.data[:_HEX_BYTES]
    rows = [_hex_row(at, data[at : at + 16]) for at in range(0, len(data), 16)]
    return "\n".join(
        [
            f"{show_name(content.path)}: not text, {content.mime}, {content.size:,} bytes; "
            f"the first {len(data)}:",
            *rows,
            "[to get at it: run_code or exec with a program that reads this type "
            "(file, xxd, strings, unzip, python3 …)]",
        ]
    )


def _hex_row(at: int, row: bytes) -> str:
    text = "".join(chr(byte) if 0x20 <= byte < 0x7F else "." for byte in row)
    return f"{at:08x}  {row.hex(' '):<47}  {text}"


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
