"""Words of persons end in time, and what waits for them is bounded."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mcp_sandbox.audit import Audit
from mcp_sandbox.config import AuditConfig
from mcp_sandbox.errors import Busy, ConsentNeeded, NotFound, NotPermitted
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.approvals import Approval, Approvals, Question, Word
from mcp_sandbox.sessions.records import ChatRecords, Ledger
from tests.sessions.clocks import SetClock

CHAT = ChatId("me", "work")
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


@dataclass(frozen=True)
class Desk:
    clock: SetClock
    records: ChatRecords
    approvals: Approvals

    async def question(self, call: Approval) -> Question:
        with pytest.raises(ConsentNeeded) as needed:
            await self.approvals.check(CHAT, call)
        question: Question = needed.value.question
        return question


@pytest.fixture
async def desk(data_root: Path) -> Desk:
    clock, records = SetClock(), ChatRecords(data_root)
    audit = Audit(data_root, AuditConfig(enabled=False))
    return Desk(clock, records, Approvals(Ledger(records, clock), audit, DAY))


def call(number: int = 0, *about: str) -> Approval:
    keys = about or ("git-push origin",)
    return Approval("exec", keys, f"digest {number}", "It pushes?", "git push", "x" * 20_000)


@pytest.mark.parametrize(("word", "lasts_s"), [("once", HOUR), ("chat", DAY), ("no", 10 * MINUTE)])
async def test_a_word_holds_for_its_time(desk: Desk, word: Word, lasts_s: float) -> None:
    await (await desk.question(call())).answer(word)
    desk.clock.pass_(lasts_s - 1)
    if word == "no":
        with pytest.raises(NotPermitted, match="has said no"):
            await desk.approvals.check(CHAT, call(1))
    else:
        await desk.approvals.check(CHAT, call())
    desk.clock.pass_(2)
    assert (await desk.question(call())).approval.state == "open"


async def test_a_yes_for_the_chat_is_for_what_was_shown(desk: Desk) -> None:
    await (await desk.question(call(0, "git-push a", "git-push b"))).answer("chat")
    await desk.approvals.check(CHAT, call(1, "git-push a"))
    await desk.question(call(2, "git-push a", "git-push c"))
    with pytest.raises(ConsentNeeded):
        await desk.approvals.check(ChatId("me", "other"), call(1, "git-push a"))


async def test_a_question_that_nobody_answers_is_kept_for_an_hour(desk: Desk) -> None:
    first = await desk.question(call())
    assert (await desk.question(call())).approval.id == first.approval.id
    desk.clock.pass_(HOUR + 1)
    with pytest.raises(NotFound, match="nothing waits under"):
        await first.answer("once")
    assert (await desk.question(call())).approval.id != first.approval.id


async def test_a_yes_for_the_chat_is_taken_back(desk: Desk) -> None:
    question = await desk.question(call())
    await question.answer("chat")
    await desk.approvals.answer(CHAT, question.approval.id, "no", "root")
    with pytest.raises(NotPermitted):
        await desk.approvals.check(CHAT, call())


async def test_what_waits_is_bounded_and_drops_no_answer(desk: Desk) -> None:
    await (await desk.question(call())).answer("chat")
    for number in range(40):
        await desk.question(call(number, f"git-push {number}"))
    found = [each for _, each in await desk.approvals.list()]
    assert [each.state for each in found] == ["chat", *["open"] * 16]
    assert all(len(each.text) == 8_000 for each in found)
    await desk.approvals.check(CHAT, call())


async def test_while_a_user_is_asked_nothing_else_is(desk: Desk) -> None:
    question = await desk.question(call())
    question.begin()
    desk.clock.pass_(HOUR - 1)
    with pytest.raises(Busy, match="another call of this chat"):
        await desk.approvals.check(CHAT, call(1))
    assert (await desk.question(call())).approval.id == question.approval.id
    question.end(waits=True)
    with pytest.raises(Busy):
        await desk.approvals.check(CHAT, call(1))
    # Whoever never answers holds up nobody.
    desk.clock.pass_(MINUTE + 1)
    await desk.question(call(1))


async def test_what_a_newer_version_has_noted_allows_nothing(desk: Desk) -> None:
    await (await desk.question(call())).answer("chat")
    record = await desk.records.get(CHAT)
    assert record is not None
    (noted,) = record.further["approvals"]
    await desk.records.put(replace(record, further={"approvals": [{**noted, "newer": 1}]}))
    await desk.question(call())
