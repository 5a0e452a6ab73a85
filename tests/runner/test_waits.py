"""What is waited for is found wherever it is printed; what has ended is known for a while."""

import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.runner.calls.command import Wait
from mcp_sandbox.runner.calls.output import HALF, OutputBuffer
from mcp_sandbox.runner.calls.table import MOST_RUNNING, ProcessTable
from mcp_sandbox.runner.wire.protocol import OpError

# Of what is printed; what steers a terminal is not shown.
PRINTED = st.binary(max_size=20).filter(lambda data: not {*b"\x1b\b\r"} & {*data})
PIECES = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.text("ab€", max_size=5)))


class Scripted:
    """A command as its waits and the table see it, and the reply to who waits for it."""

    is_open = runs = True
    text, main, keeper, shell = "make", None, None, None

    def __init__(self, *, released: bool = True) -> None:
        self.waits: list[Wait] = []
        self.streams = self
        self.kept = {"stdout": OutputBuffer(), "stderr": OutputBuffer()}
        self.answers = 0
        self.released, self.told, self.has_ended, self.ended_at = released, False, False, 0.0
        self.id = ""

    def print(self, stream: str, data: bytes) -> None:
        self.kept[stream].add(data)
        for wait in self.waits if data else ():
            wait.on_output(stream, data)

    def held(self) -> list[tuple[str, bytes]]:
        streams = self.kept.items()
        return [(name, part) for name, each in streams for part in each.parts() if part]

    def leave(self, _wait: Wait) -> None:
        self.answers += 1

    def row(self) -> dict[str, Any]:
        return {"id": self.id, "told": self.told}


def wait_for(command: Any, until: str) -> Wait:
    return Wait(command, command, "wait", {"until": until})


@given(PIECES, PIECES, st.text("ab€", min_size=1, max_size=4))
def test_a_text_is_found_across_reads_as_soon_as_a_stream_holds_it(
    before: list[tuple[str, str]], after: list[tuple[str, str]], until: str
) -> None:
    command = Scripted()
    printed = {"stdout": "", "stderr": ""}
    for name, piece in before:
        command.print(name, piece.encode())
        printed[name] += piece
    wait = wait_for(command, until)
    wait.start(b"", more=False)
    assert wait.met == any(until in text for text in printed.values())
    for name, piece in after:
        command.print(name, piece.encode())
        printed[name] += piece
        assert wait.met == any(until in text for text in printed.values())
    assert command.answers == wait.met


@given(PRINTED, st.lists(st.integers(0, 20), max_size=6), PRINTED)
def test_any_bytes_may_be_cut_anywhere(data: bytes, cuts: list[int], rest: bytes) -> None:
    text = "ü\N{ROCKET}"
    command = Scripted()
    wait = wait_for(command, text)
    whole = data + text.encode() + rest
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(whole)], strict=True):
        command.print("stdout", whole[start:end])
    assert wait.met


def test_nothing_is_found_across_what_is_left_out() -> None:
    command = Scripted()
    for part in (b"x" * (HALF - 3) + b"rea", b"-" * 3 * HALF, b"dy" + b"x" * (HALF - 2)):
        command.print("stdout", part)
    assert len(command.held()) == 2
    wait = wait_for(command, "ready")
    wait.start(b"", more=False)
    assert not wait.met
    command.print("stderr", b"rea")
    command.print("stdout", b"rea")
    assert not wait.met
    command.print("stdout", b"dy")
    assert wait.met


def started(table: ProcessTable, count: int = 1, *, released: bool = True) -> list[Any]:
    commands: list[Any] = [Scripted(released=released) for _ in range(count)]
    for command in commands:
        table.note(command)
    return commands


def end(table: ProcessTable, command: Any, *, told: bool = False) -> None:
    command.has_ended, command.ended_at = True, time.monotonic()
    command.told = told
    table.note(command)


def ids(table: ProcessTable) -> list[str]:
    return [row["id"] for row in table.rows()]


def test_ids_are_counted_and_are_those_of_one_sandbox() -> None:
    table = ProcessTable(lambda: None, lambda _: None)
    first, second = started(table, 2)
    assert re.fullmatch(r"p1-[2-9a-hjkmnp-z]{3}", first.id)
    assert second.id == first.id.replace("p1", "p2")
    assert table.find(second.id) is second
    tables = [ProcessTable(lambda: None, lambda _: None) for _ in range(20)]
    assert len({started(each)[0].id for each in tables}) > 10


@pytest.mark.parametrize("unknown", [None, 7, "", "p9", "x" * 9999, ["p1"], "p3\n"])
def test_an_unknown_id_is_answered_with_the_known_ones(unknown: object) -> None:
    table = ProcessTable(lambda: None, lambda _: None)
    (command,) = started(table)
    with pytest.raises(OpError, match=f"there is no process .*there are: {command.id} ") as refused:
        table.find(unknown)
    assert (refused.value.code, len(refused.value.message) < 200) == ("not_found", True)


def test_the_last_that_ended_are_kept_for_an_hour() -> None:
    table = ProcessTable(lambda: None, lambda _: None)
    commands = started(table, 40)
    for command in commands:
        end(table, command)
    assert ids(table) == [each.id for each in commands[-32:]]
    commands[-1].ended_at -= 3590
    commands[-2].ended_at -= 3610
    assert ids(table) == [each.id for each in [*commands[-32:-2], commands[-1]]]
    with pytest.raises(OpError, match="there is no process"):
        table.find(commands[-2].id)


def test_what_was_answered_with_its_end_is_not_kept() -> None:
    ends: list[dict[str, Any]] = []
    table = ProcessTable(lambda: None, ends.append)
    (command,) = started(table, released=False)
    end(table, command)
    assert (ids(table), ends, table.untold()) == ([], [], [])


def test_an_end_is_untold_until_somebody_was_told_of_it() -> None:
    ends: list[dict[str, Any]] = []
    table = ProcessTable(lambda: None, ends.append)
    waited_for, missed, told_later = started(table, 3)
    end(table, waited_for, told=True)
    end(table, missed)
    end(table, told_later)
    assert [each["id"] for each in ends] == [missed.id, told_later.id]
    table.tell([told_later.id, "p9-xyz"])
    assert [each["id"] for each in table.untold()] == [missed.id]


def test_those_whose_call_waits_do_not_count_towards_the_most() -> None:
    table = ProcessTable(lambda: None, lambda _: None)
    started(table, 10, released=False)
    going = started(table, MOST_RUNNING)
    assert table.in_background() == going
    with pytest.raises(OpError, match=rf"64 processes run .* They are {going[0].id} \(make\), "):
        started(table)
    end(table, going[0])
    started(table)
