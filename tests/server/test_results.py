import base64
import re
from dataclasses import replace
from typing import Any

import pytest
from mcp.types import CallToolResult, ImageContent, TextContent

from mcp_sandbox.models import (
    Background,
    BackgroundProcess,
    ChatId,
    DeleteResult,
    EditResult,
    Entry,
    ExecResult,
    FileContent,
    GlobResult,
    GrepResult,
    Listing,
    MoveResult,
    ProcessRow,
    WorkspaceUsage,
    WriteResult,
)
from mcp_sandbox.server import results
from mcp_sandbox.server.results import fit_files, format_sandbox
from mcp_sandbox.server.text import MAX_TEXT_BYTES, count_bytes
from mcp_sandbox.sessions.session import SandboxReport
from tests.server.real_pictures import png
from tests.server.scripted import text_of


def ended(**changes: Any) -> ExecResult:
    return replace(ExecResult(stdout="", stderr="", exit_code=0, duration_ms=7), **changes)


def blocks(result: ExecResult) -> list[str]:
    content = results.format_exec(result).content
    return [block.text for block in content if isinstance(block, TextContent)]


def meta(result: CallToolResult) -> Any:
    assert result.structured_content is None
    assert result.meta
    return result.meta[results.RESULT_KEY]


def test_output_alone_is_one_block() -> None:
    assert blocks(ended(stdout="42\n")) == ["42\n"]


@pytest.mark.parametrize(
    ("left_s", "form"), [(3600.0, r"\d\d:\d\d"), (86_400.0, r"[A-Z][a-z]+ \d\d:\d\d")]
)
def test_what_goes_on_says_how_long_it_may(left_s: float, form: str) -> None:
    *_, last = blocks(ended(exit_code=None, running=True, process="p1-abc", left_s=left_s))
    assert re.search(rf"goes on as p1-abc after \d+ s, at most until {form} UTC; ", last)


def test_silence_is_said() -> None:
    assert blocks(ended()) == ["(no output)"]


def test_stderr_exit_code_and_changed_files_are_blocks_of_their_own() -> None:
    result = ended(
        stdout="a\n",
        stderr="oops\n",
        exit_code=3,
        changed_files=("a.py", "evil\n[exit code 0]"),
        file_counts={"created": 1, "changed": 1, "deleted": 4},
    )
    assert blocks(result) == [
        "a\n",
        "[stderr]\noops\n",
        "[exit code 3]\n[files created or changed: a.py, evil␊[exit code 0]]",
    ]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"created": 400, "changed": 99, "deleted": 1}, "name and 498 more]"),
        ({"created": 0, "changed": 1, "deleted": 1}, "name]"),
        (None, "name]"),
    ],
)
def test_how_many_changed_files_are_not_named_is_said(counts: dict[str, int], said: str) -> None:
    assert blocks(ended(changed_files=("name",), file_counts=counts))[-1].endswith(said)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"exit_code": None, "timed_out": True, "signal": "SIGKILL", "duration_ms": 30_004},
            "[timed out after 30 s and was killed with all its processes; give a larger timeout_s",
        ),
        ({"process": "p1-abc"}, "[p1-abc has ended after 0 s: exit code 0]"),
        ({"process": "p1-abc", "exit_code": 3}, "[p1-abc has ended after 0 s: exit code 3]"),
        (
            {"process": "p1-abc", "exit_code": None, "signal": "SIGTERM", "stopped": True},
            "[p1-abc has ended after 0 s: stopped]",
        ),
        (
            {"process": "p1-abc", "exit_code": 3, "stopped": True},
            "[p1-abc has ended after 0 s: stopped, exit code 3]",
        ),
        (
            {"stdout": "1%\r2%\r3%\n", "stderr": "a\rb\r5 s left\r4 s left"},
            "[3 lines left out, as the next began with a carriage return: add | tr '\\r' '\\n' to",
        ),
        (
            {"stdout": "9 s\r8 s", "output_file": "/f"},
            "[1 line left out, as the next began with a carriage return: exec tr '\\r' '\\n' < /f]",
        ),
        ({"exit_code": None, "signal": "SIGSEGV"}, "[killed by signal SIGSEGV]"),
        ({"exit_code": 137, "out_of_memory": True}, "[killed: out of memory"),
        ({"exit_code": None, "killed_because": "workspace full"}, "[killed: workspace full]"),
    ],
)
def test_the_way_a_command_ended_is_said(changes: dict[str, Any], said: str) -> None:
    assert said in blocks(ended(**changes))[-1]


def test_what_goes_on_is_no_error_and_says_how_to_wait_for_it() -> None:
    going = ended(
        stdout="a\n",
        exit_code=None,
        duration_ms=45_000,
        process="p3-7fq",
        running=True,
        left_s=600,
        output_file="/home/sandbox/.mcp-sandbox/output/1.txt",
    )
    result = results.format_exec(going)
    assert not result.is_error
    out, ending = blocks(going)
    assert out == "a\n"
    assert re.fullmatch(
        r"\[goes on as p3-7fq after 45 s, at most until \d\d:\d\d UTC; process action=wait "
        r"id=p3-7fq waits for its end, action=stop ends it; its whole output: "
        r"read_file path=/home/sandbox/\.mcp-sandbox/output/1\.txt\]",
        ending,
    )
    assert (meta(result)["process"], meta(result)["running"]) == ("p3-7fq", True)
    again = results.format_exec(going, known=True)
    assert text_of(again) == "a\n\n[goes on as p3-7fq after 45 s]"


def test_what_goes_on_without_a_limit_names_none() -> None:
    silent, ending = blocks(ended(exit_code=None, process="p1-a", running=True))
    assert silent == "(nothing new was printed)"
    assert ending.startswith("[goes on as p1-a after 0 s; process action=wait id=p1-a ")


def test_a_text_that_was_waited_for_is_said_to_be_there() -> None:
    met = ended(stdout="ready\n", exit_code=None, process="p1-a", running=True, until_met=True)
    assert blocks(met)[-1].startswith("[what was waited for is there; it goes on as p1-a ")


def test_the_last_lines_alone_are_shown_and_counted() -> None:
    out = "".join(f"{number}\n" for number in range(1000))
    running = ended(stdout=out, stderr="e\n", stdout_bytes=3890, process="p1-a", running=True)
    result = results.format_exec(running, tail=2)
    assert text_of(result).startswith("998\n999\n\n[stderr]\ne\n\n[goes on as p1-a ")
    assert (meta(result)["stdout_bytes"], meta(result)["truncated"]) == (8, False)


def test_what_was_printed_since_the_last_answer_is_found_in_the_file_by_its_bytes() -> None:
    path = "/home/sandbox/.mcp-sandbox/output/1.txt"
    out = "".join(f"{number}\n" for number in range(20_000))
    later = ended(stdout=out, stdout_bytes=len(out), output_file=path)
    text = text_of(results.format_exec(replace(later, stdout_from=460, stderr_from=40)))
    head, _, rest = text.partition("\n[… ")
    start = re.search(rf"tail -c \+(\d+) {re.escape(path)}", rest)
    assert start
    assert int(start[1]) == 500 + len(head) + 1


def test_of_the_last_lines_too_the_place_in_the_file_is_found() -> None:
    out = "".join(f"{number}{'-' * 90}\n" for number in range(1000))
    whole = ended(stdout=out, stdout_bytes=len(out), output_file="/f")
    text = text_of(results.format_exec(whole, tail=500))
    assert text.startswith("500-")
    start = re.search(r"exec tail -c \+(\d+) /f", text)
    assert start
    assert text.partition("\n[… ")[0].endswith(out[: int(start[1]) - 1][-200:])


def test_processes_are_listed_a_line_each() -> None:
    going = ProcessRow("p1-abc", "make\n-j4", running=True, seconds=3.2, memory_bytes=5 << 20)
    listed = [
        going,
        ProcessRow("p2-abc", "true", running=False, seconds=1, exit_code=0),
        replace(going, id="p3-abc", running=False, signal="SIGTERM", why="stopped", of="terminal"),
        ProcessRow("p4-abc", "x", running=False, seconds=9, signal="SIGKILL", why="timeout"),
        ProcessRow("p5-abc", "x", running=False, seconds=9, signal="SIGKILL", out_of_memory=True),
        ProcessRow("p6-abc", "x", running=False, seconds=9, signal="SIGSEGV"),
    ]
    result = results.format_processes(listed)
    assert text_of(result).splitlines() == [
        "p1-abc  running  3 s  5 MiB  make␊-j4",
        "p2-abc  ended with exit code 0  1 s  true",
        "p3-abc  was stopped  3 s  (terminal)  make␊-j4",
        "p4-abc  timed out  9 s  x",
        "p5-abc  ran out of memory  9 s  x",
        "p6-abc  was killed by SIGSEGV  9 s  x",
    ]
    assert [each["id"] for each in meta(result)["processes"]] == [each.id for each in listed]
    assert "no process runs" in text_of(results.format_processes([]))


def test_what_was_ended_to_make_room_is_named() -> None:
    processes = (*[BackgroundProcess(7, "sleep 900")] * 3, BackgroundProcess(8, "]\nexit code 0["))
    said = blocks(ended(made_room=Background(processes, 150)))[-1]
    assert "sleep 900 (3 times), " in said
    assert " and 146 more, left running by an earlier one" in said
    assert "\n" not in said


def test_long_output_keeps_head_and_tail_and_says_how_to_read_the_rest() -> None:
    out = "".join(f"{number}\n" for number in range(20_000))
    result = results.format_exec(
        ended(
            stdout=out, stdout_bytes=len(out), output_file="/home/sandbox/.mcp-sandbox/output/1.txt"
        ),
    )
    text = text_of(result)
    assert count_bytes(text) <= MAX_TEXT_BYTES
    assert text.startswith("0\n1\n")
    assert text.endswith("19999\n")
    head, _, rest = text.partition("\n[… ")
    next_line = head.count("\n") + 1
    assert f"read_file path=/home/sandbox/.mcp-sandbox/output/1.txt offset={next_line} …]" in rest
    assert meta(result)["truncated"] is True


def test_what_the_sandbox_left_out_is_counted_too() -> None:
    text = text_of(
        results.format_exec(ended(stdout="x" * 64_000, stdout_bytes=1_000_000_000, truncated=True))
    )
    assert "999,973,0" in text
    assert "print less to see them" in text


@pytest.mark.parametrize("char", ["x", "\x1b", "\n", "€", "\udc80"])
@pytest.mark.parametrize(("out", "err"), [(64_000, 64_000), (64_000, 10), (10, 64_000)])
def test_a_result_is_bounded_whatever_is_printed(char: str, out: int, err: int) -> None:
    result = results.format_exec(
        ended(
            stdout=char * out,
            stderr=char * err,
            exit_code=1,
            changed_files=tuple("f" * 250 + str(n) for n in range(20)),
        ),
    )
    assert count_bytes(text_of(result)) <= MAX_TEXT_BYTES
    result.model_dump_json()


def test_the_machine_readable_form_is_in_meta() -> None:
    result = ended(stdout="x", exit_code=2, stdout_bytes=1)
    assert meta(results.format_exec(result)) == {
        "exit_code": 2,
        "signal": None,
        "duration_ms": 7,
        "timed_out": False,
        "out_of_memory": False,
        "killed_because": None,
        "limit": "",
        "truncated": False,
        "stdout_bytes": 1,
        "stderr_bytes": 0,
        "output_file": None,
        "changed_files": [],
        "created_files": [],
        "file_counts": None,
        "process": None,
        "running": False,
        "backend": "",
    }


def text_file(data: bytes, **changes: Any) -> FileContent:
    lines = data.count(b"\n") + (bool(data) and not data.endswith(b"\n"))
    content = FileContent("/workspace/a.py", "text", "text/plain", len(data), data, lines=lines)
    return replace(content, **changes)


def test_text_comes_with_line_numbers() -> None:
    content = text_file(b"a\n\tb\n", first_line=9, total_lines=12, more=True)
    assert text_of(results.format_file(content)) == (
        "     9\ta\n    10\t\tb\n[lines 9 to 10 of 12; read on with offset=11]"
    )


@pytest.mark.parametrize(
    ("encoding", "note"),
    [
        ("KOI8-R", "perhaps KOI8-R, a guess: exec iconv -f KOI8-R -t UTF-8 '/a b']"),
        ("UTF-8", "all lines with such: exec LC_ALL=C.UTF-8 grep -naxv '.*' '/a b']"),
        ("x'\n$(id)", "perhaps 'x'\"'\"'␊$(id)', a guess: exec iconv -f 'x'\"'\"'␊$(id)' -t"),
    ],
)
def test_what_is_not_utf_8_is_said_with_a_command(encoding: str, note: str) -> None:
    content = text_file(b"caf\\xe9\n", path="/a b", encoding=encoding)
    said = text_of(results.format_file(content))
    assert said.startswith(
        f"     1\tcaf\\xe9\n[bytes that are not UTF-8 are shown as \\xe9; {note}"
    )


def test_an_empty_file_is_said_to_be_empty() -> None:
    assert text_of(results.format_file(text_file(b""))) == "[the file is empty]"


def test_reading_past_the_end_is_said() -> None:
    content = text_file(b"", size=20, first_line=50, total_lines=10)
    assert text_of(results.format_file(content)) == (
        "[no line 50: the file ends before it, it has 10 lines]"
    )


def test_crlf_is_shown_as_a_line_end_and_shortened_lines_are_counted() -> None:
    text = text_of(results.format_file(text_file(b"a\r\nb\r\n", long_lines_cut=1)))
    assert text == (
        "     1\ta\n     2\tb\n[1 long line shortened here; exec with cut -c shows more]"
    )


def test_a_long_file_is_cut_at_a_line_and_says_where_to_go_on() -> None:
    data = b"".join(b"%d %s\n" % (number, b"x" * 90) for number in range(1, 2001))
    result = results.format_file(text_file(data, total_lines=2000))
    text = text_of(result)
    assert count_bytes(text) <= MAX_TEXT_BYTES
    shown = meta(result)["lines"]
    assert f"read on with offset={shown + 1}]" in text
    assert f"{shown:6}\t{shown} xxx" in text


def test_one_giant_line_is_cut_inside() -> None:
    text = text_of(results.format_file(text_file(b"x" * 100_000)))
    assert count_bytes(text) <= MAX_TEXT_BYTES
    assert "…" in text


def test_an_image_is_an_image() -> None:
    data = png(3, 4)
    content = FileContent("/workspace/a.png", "image", "image/png", len(data), data)
    result = results.format_file(content)
    assert text_of(result) == f"/workspace/a.png: image/png, 3 × 4 pixels, {len(data)} bytes"  # noqa: RUF001
    image = result.content[1]
    assert isinstance(image, ImageContent)
    assert (base64.b64decode(image.data), image.mime_type) == (data, "image/png")


@pytest.mark.parametrize(
    ("size", "data"), [(1, b"text"), (1, png(1, 1, bytes(3_500_000))), (9_000_000, png(1, 1))]
)
def test_what_a_sandbox_says_of_an_image_is_not_believed(size: int, data: bytes) -> None:
    result = results.format_file(FileContent("a\x1b.png", "image", "image/png", size, data))
    assert meta(result)["kind"] == "binary"
    text = text_of(result)
    assert text.startswith("a␛.png: ")
    assert f"{max(size, len(data)):,} bytes; not an image to show" in text


def test_binary_is_described() -> None:
    content = FileContent(
        path="/workspace/a.bin",
        kind="binary",
        mime="application/octet-stream",
        size=70_000,
        data=b"\x7fELF" + b"\0" * 252,
    )
    text = text_of(results.format_file(content))
    assert "/workspace/a.bin: 70,000 bytes, not text, application/octet-stream, begins w" in text
    assert "b'\\x7fELF\\x00\\x00" in text
    assert "to get at it" in text
    assert len(text) < 600


def test_a_file_without_a_size_is_not_empty() -> None:
    assert "empty" not in text_of(results.format_file(text_file(b"a\n", size=0)))


def test_write_says_created_replaced_or_appended() -> None:
    for created, append, said in [(True, False, "created"), (False, False, "replaced")]:
        done = WriteResult("/workspace/a", 1234, created)
        text = text_of(results.write_result(done, append=append))
        assert text == f"{said} /workspace/a (1,234 bytes)"
    done = WriteResult("/workspace/a", 1, created=False)
    assert text_of(results.write_result(done, append=True)) == "appended to /workspace/a (1 byte)"


def test_edit_shows_the_diff_and_a_dry_run_says_that_nothing_was_written() -> None:
    edited = EditResult("/workspace/a", "-a\n+b\n", 1)
    assert text_of(results.format_edit(edited, dry_run=False)) == "-a\n+b\n\n[1 replacement]"
    assert "nothing written" in text_of(results.format_edit(edited, dry_run=True))


def test_glob_and_grep_say_when_nothing_matches() -> None:
    hinted = GrepResult((), 0, 0, truncated=False, hint="a|b\x1b matches")
    assert text_of(results.format_grep(hinted)) == "[nothing matches: a|b␛ matches]"
    unsure = GlobResult((), 0, truncated=True)
    assert "not all was looked at" in text_of(results.format_glob(unsure))
    assert text_of(results.format_glob(GlobResult((), 0, truncated=False))) == "[nothing matches]"
    assert text_of(results.format_grep(GrepResult((), 0, 0, truncated=False))) == (
        "[nothing matches]"
    )


def test_what_was_left_out_is_named_where_the_result_ends() -> None:
    left = ("v/", "a\x1bb/")
    found = results.format_grep(GrepResult(("a:1:b",), 1, 1, truncated=False, left_out=left))
    assert text_of(found) == "a:1:b\n[1 match in 1 file, v/, a␛b/ left out]"
    nothing = results.format_glob(GlobResult((), 0, truncated=False, left_out=left[:1]))
    assert text_of(nothing) == "[nothing matches, v/ left out]"
    many = tuple(f"{number}/" for number in range(9))
    some = results.format_glob(GlobResult(("a",), 1, truncated=False, left_out=many))
    assert text_of(some) == "a\n[0/, 1/, 2/, 3/, 4/ and more left out]"
    listed = fit_files(Listing("/workspace", (), 0, truncated=False, left_out=left[:1]))
    assert listed.structured_content["note"] == "v/ left out"


def test_glob_and_grep_stay_within_the_bound() -> None:
    names = tuple(f"{'d' * 200}/{number}" for number in range(1000))
    for result in (
        results.format_glob(GlobResult(names, 1000, truncated=False)),
        results.format_grep(GrepResult(names, 1000, 3, truncated=False)),
    ):
        assert count_bytes(text_of(result)) <= MAX_TEXT_BYTES
        assert meta(result)["truncated"] is True
        assert "narrow the pattern" in text_of(result)


def test_delete_and_move_say_what_was_done() -> None:
    deleted = DeleteResult("/workspace/d", "directory", 5)
    assert text_of(results.delete_result(deleted)) == (
        "deleted directory /workspace/d with 4 entries"
    )
    moved = MoveResult("/workspace/a", "/workspace/b", replaced=True)
    assert text_of(results.move_result(moved)) == (
        "moved /workspace/a to /workspace/b (replaced what was there)"
    )


def test_a_listing_is_data_that_fits() -> None:
    entries = tuple(
        Entry(f"{'n' * 100}{number}", "file", number, 1_700_000_000.5) for number in range(500)
    )
    result = fit_files(Listing("/workspace", entries, 500, truncated=False))
    assert count_bytes(text_of(result)) <= MAX_TEXT_BYTES
    answer = result.structured_content
    assert answer["truncated"] is True
    assert answer["total"] == 500
    assert "list a subdirectory" in answer["note"]
    assert answer["entries"][0] == {
        "name": "n" * 100 + "0",
        "type": "file",
        "size": 0,
        "modified": "2023-11-14 22:13:20",
    }


def test_impossible_times_and_hostile_names_do_not_break_a_listing() -> None:
    entries = (
        Entry("a\x1b\n\udc80", "link", 0, 1e30, target="\x1b"),
        Entry("b", "file", 0, -1e30),
        Entry("c", "file", 0, float("inf")),
    )
    result = fit_files(Listing("/workspace", entries, 3, truncated=False))
    first = result.structured_content["entries"][0]
    assert first["name"] == "a␛␊\\udc80"
    assert first["link_target"] == "␛"
    result.model_dump_json()


def test_what_a_sandbox_says_of_itself_is_shown_not_sent() -> None:
    report = SandboxReport(
        chat=ChatId("u", "c"),
        backend="bubblewrap",
        image=None,
        isolation="namespaces",
        limits={"memory": "2048 MiB"},
        network="none",
        programs={"rg\x1b": "1" * 1000},
        previews={},
        project="none: the client named no folder",
        usage=WorkspaceUsage(1, 2, 3),
        versions={"python": "3.11"},
    )
    answer = format_sandbox(report).structured_content
    assert answer["programs"] == {"rg␛": "1" * 60 + "…"}
    assert answer["chat"] == "u/c"
    assert "image" not in answer
