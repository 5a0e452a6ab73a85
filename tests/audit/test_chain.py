"""The chain of an audit: whatever is changed in it is found, and where."""

import random
import re
from collections.abc import Callable
from hashlib import sha256

import pytest

from mcp_sandbox.audit.chain import START, ChainHead, ChainVerifier, find_last_sealed, make_line

NAME = "audit.jsonl"
SEED = 13


def chain(lines: int, head: ChainHead = START) -> list[bytes]:
    made = list[bytes]()
    for number in range(lines):
        line, head = make_line(head, "begun", {"tool": "exec", "arguments": f"J*{number} \u00e4"})
        made.append(line)
    return made


def checked(lines: list[bytes] | bytes, wanted: ChainHead | None = None) -> ChainVerifier:
    lines = lines.splitlines(keepends=True) if isinstance(lines, bytes) else lines
    check = ChainVerifier(wanted)
    check.see(NAME, lines)
    check.end()
    return check


def head_of(line: bytes) -> ChainHead:
    found, _ = find_last_sealed(line)
    assert found
    return found


def test_a_chain_as_it_was_written_is_intact() -> None:
    lines = chain(30)
    check = checked(lines, head_of(lines[11]))
    assert (check.problems, check.notes) == ([], [])
    assert (check.first, check.head) == (1, head_of(lines[-1]))


def test_each_flipped_bit_is_found_with_the_number_of_its_line() -> None:
    lines, pick = chain(20), random.Random(SEED)
    whole = b"".join(lines)
    for _ in range(1000):
        at = pick.randrange(len(whole))
        changed = bytearray(whole)
        changed[at] ^= 1 << pick.randrange(8)
        number = whole[:at].count(b"\n") + 1
        found = checked(bytes(changed)).problems
        assert found, (at, number)
        assert re.match(rf"line {number}\b", found[0]), (found, number)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: lines.pop(6), "line 7 is missing"),
        (lambda lines: [lines.pop(6), lines.pop(6)], "lines 7 to 8 are missing"),
        (lambda lines: lines.insert(6, lines[6]), "line 7 is there again, after line 7"),
        (lambda lines: lines.insert(6, lines.pop(7)), "line 7 is missing"),
        (lambda lines: lines.insert(9, lines.pop(6)), "line 7 stands too late, after line 10"),
        (lambda lines: lines.pop(0), "what line 2 follows is missing"),
        (lambda lines: lines.insert(6, b"{}\n"), "line 7 (audit.jsonl:7) is not one of an audit"),
        (lambda lines: lines.append(b'{"n":13,'), "line 13 (audit.jsonl:13) is torn"),
    ],
)
def test_a_line_that_is_gone_doubled_moved_or_foreign_is_named(
    change: Callable[[list[bytes]], object], problem: str
) -> None:
    lines = chain(12)
    change(lines)
    assert any(each.startswith(problem) for each in checked(lines).problems)


def test_a_line_that_was_written_anew_does_not_fit_those_after_it() -> None:
    lines = chain(12)
    lines[6], _ = make_line(head_of(lines[5]), "begun", {"tool": "harmless"})
    assert checked(lines).problems == ["line 8 does not follow line 7 as that is now"]


def test_a_removed_end_and_an_audit_written_anew_show_against_a_head_that_was_kept() -> None:
    lines = chain(12)
    kept = head_of(lines[-1])
    assert checked(lines[:9]).problems == []
    assert checked(lines[:9], kept).problems == [
        "lines 10 to 12 are missing from the end, by the head that you keep"
    ]
    other, _ = make_line(START, "begun", {})
    anew = [other, *chain(14, head_of(other))]
    assert checked(anew).problems == []
    assert checked(anew, kept).problems == ["line 12 is another than the head that you keep says"]


def test_a_front_that_a_later_line_says_was_removed_is_no_problem() -> None:
    lines = chain(12)
    gone = head_of(lines[4])
    last, _ = make_line(head_of(lines[-1]), "removed", {"until": gone.n, "head": gone.hash})
    kept = [*lines[5:], last]
    assert checked(kept).problems == []
    assert checked(kept).notes == ["lines 1 to 5 were removed, as audit.keep says"]
    assert checked(kept[1:]).problems[0].startswith("what line 7 follows is missing")


def test_a_clock_that_was_set_back_is_noted() -> None:
    line = chain(1)[0]
    body = line[: line.index(b',"hash"')].replace(b'"time":"20', b'"time":"30') + b"}"
    digest = sha256(body).hexdigest()
    early, _ = make_line(ChainHead(1, digest), "begun", {})
    check = checked([body[:-1] + b',"hash":"%b"}\n' % digest.encode(), early])
    assert check.problems == []
    assert check.notes == ["line 2 is dated before line 1: the clock was set back"]


def test_the_last_line_that_is_as_it_was_written_is_found_before_what_is_not() -> None:
    lines = chain(5)
    whole = b"".join(lines)
    assert find_last_sealed(whole) == (head_of(lines[-1]), len(whole))
    for torn in (lines[4][:-1], lines[4][:40], b"\0" * 500 + b"\n", b"\n\n", b"{}\nx"):
        assert find_last_sealed(b"".join(lines[:4]) + torn) == (
            head_of(lines[3]),
            len(b"".join(lines[:4])),
        )
    assert find_last_sealed(b"") == find_last_sealed(b"\n{}\n") == (None, 0)


def test_a_line_may_hold_any_text() -> None:
    line, head = make_line(
        START, "begun", {"a": '\n"hash":"\0\udc80\u2028', "b": None, "c": "x" * 9999}
    )
    assert checked([line]).problems == []
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert len(line) < 5000
    assert head_of(line) == head


def test_a_head_is_read_as_it_is_printed() -> None:
    head = head_of(chain(3)[-1])
    assert ChainHead.of(f" {head}\n") == head
    with pytest.raises(ValueError, match="N:HASH"):
        ChainHead.of("3")
