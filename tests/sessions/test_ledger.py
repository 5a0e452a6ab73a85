"""Times of use, as one process knows them, and as they come to the records."""

import os
from pathlib import Path

import pytest

from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import (
    AssistantSpec,
    ChatRecord,
    ChatRecords,
    UseTimes,
    read_assistant_spec,
)
from tests.sessions.clocks import NOON, SetClock

ANN, BOB = ChatId("ann", "one"), ChatId("bob", "one")


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


async def test_use_counts_at_once_and_is_written_later(tmp_path: Path, clock: SetClock) -> None:
    records = ChatRecords(tmp_path)
    ledger = UseTimes(records, clock)
    await records.put(ChatRecord(ANN, "docker", NOON, NOON))
    clock.pass_(60)
    ledger.note_use(ANN)
    clock.pass_(30)
    assert (ledger.idle_s(ANN), ledger.idle_s(BOB)) == (30, 0)
    record = await records.get(ANN)
    assert record is not None
    assert record.used_s == NOON
    assert ledger.times(ANN, record)[1].timestamp() == NOON + 60
    await ledger.write()
    record = await records.get(ANN)
    assert record is not None
    assert (record.created_s, record.used_s) == (NOON, NOON + 60)
    assert ledger.times(ANN, record)[1].timestamp() == NOON + 60


async def test_a_disk_that_fails_is_told_once_and_tried_again(
    tmp_path: Path, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    records = ChatRecords(tmp_path)
    ledger = UseTimes(records, clock)
    await records.put(ChatRecord(ANN, "docker", NOON, NOON))
    folder = tmp_path / "sandbox" / "records" / "ann"
    folder.rename(tmp_path / "away")
    folder.write_bytes(b"in the way")
    clock.pass_(60)
    ledger.note_use(ANN)
    for _ in range(3):
        await ledger.write()
    assert caplog.text.count("trying again until it works") == 1
    os.unlink(folder)
    (tmp_path / "away").rename(folder)
    await ledger.write()
    assert [record.used_s for record in await records.list()] == [NOON + 60]


async def test_what_a_newer_version_has_noted_of_an_assistant_is_left_out(tmp_path: Path) -> None:
    records = ChatRecords(tmp_path)
    noted = {"name": "coder", "limits": {"pids": 64, "newer": 1}, "newer": {}}
    await records.put(ChatRecord(ANN, "docker", NOON, NOON, further={"assistant": noted}))
    spec = read_assistant_spec(await records.get(ANN))
    assert spec == AssistantSpec("coder", limits={"pids": 64})
