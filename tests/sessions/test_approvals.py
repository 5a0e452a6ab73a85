"""Words of persons end in time, and what waits for them is bounded."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import anyio
import pytest

from mcp_sandbox.audit import Audit
from mcp_sandbox.config import AuditConfig
from mcp_sandbox.errors import Busy, ConsentNeeded, NotFound, NotPermitted
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.approvals import Approval, Approvals, Word, asks
from mcp_sandbox.sessions.chat_records import ChatRecords, UseTimes
from tests.sessions.clocks import SetClock

CHAT = ChatId("me", "work")
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


@dataclass(frozen=True)
class Desk:
    clock: SetClock
    records: ChatRecords
    approvals: Approvals

    async def question(self, call: Approval, word: Literal["later"] | None = None) -> Approval:
        """What is asked about a call, by a client that has no answer."""
        asked = list[Approval]()

        async def ask(approval: Approval) -> Literal["later"] | None:
            asked.append(approval)
            return word

        token = asks.set(ask)
        with pytest.raises(ConsentNeeded, match="there is no answer yet"):
            await self.approvals.check(CHAT, call)
        asks.reset(token)
        return asked[0]

    async def answered(self, call: Approval, word: Word) -> Approval:
        """A call after a person has answered at the machine of the server."""
        asked = await self.question(call)
        return await self.approvals.answer(CHAT, asked.id, word, "me")


@pytest.fixture
async def desk(data_root: Path) -> Desk:
    clock, records = SetClock(), ChatRecords(data_root)
    audit = Audit(data_root, AuditConfig(enabled=False))
    return Desk(clock, records, Approvals(UseTimes(records, clock), audit, DAY))


def call(number: int = 0, *about: str) -> Approval:
    keys = about or ("git-push origin",)
    return Approval("exec", keys, f"digest {number}", "It pushes?", "git push", "x" * 20_000)


@pytest.mark.parametrize(("word", "lasts_s"), [("once", HOUR), ("chat", DAY), ("no", 10 * MINUTE)])
async def test_a_word_holds_for_its_time(desk: Desk, word: Word, lasts_s: float) -> None:
    await desk.answered(call(), word)
    desk.clock.pass_(lasts_s - 1)
    if word == "no":
        with pytest.raises(NotPermitted, match="has said no"):
            await desk.approvals.check(CHAT, call(1))
    else:
        await desk.approvals.check(CHAT, call())
    desk.clock.pass_(2)
    assert (await desk.question(call())).state == "open"


async def test_a_yes_for_the_chat_is_for_what_was_shown(desk: Desk) -> None:
    await desk.answered(call(0, "git-push a", "git-push b"), "chat")
    await desk.approvals.check(CHAT, call(1, "git-push a"))
    await desk.question(call(2, "git-push a", "git-push c"))
    with pytest.raises(ConsentNeeded):
        await desk.approvals.check(ChatId("me", "other"), call(1, "git-push a"))


async def test_a_question_that_nobody_answers_is_kept_for_an_hour(desk: Desk) -> None:
    first = await desk.question(call())
    assert (await desk.question(call())).id == first.id
    desk.clock.pass_(HOUR + 1)
    with pytest.raises(NotFound, match="nothing waits under"):
        await desk.approvals.answer(CHAT, first.id, "once", "me")
    assert (await desk.question(call())).id != first.id


async def test_a_yes_for_the_chat_is_taken_back(desk: Desk) -> None:
    answered = await desk.answered(call(), "chat")
    await desk.approvals.answer(CHAT, answered.id, "no", "root")
    with pytest.raises(NotPermitted):
        await desk.approvals.check(CHAT, call())


async def test_what_waits_is_bounded_and_drops_no_answer(desk: Desk) -> None:
    await desk.answered(call(), "chat")
    for number in range(40):
        await desk.question(call(number, f"git-push {number}"))
    found = [each for _, each in await desk.approvals.list()]
    assert [each.state for each in found] == ["chat", *["open"] * 16]
    assert all(len(each.text) == 8_000 for each in found)
    await desk.approvals.check(CHAT, call())


async def test_while_a_user_is_asked_nothing_else_is(desk: Desk) -> None:
    asked = await desk.question(call(), "later")
    with pytest.raises(Busy, match="another call of this chat"):
        await desk.approvals.check(CHAT, call(1))
    assert (await desk.question(call(), "later")).id == asked.id
    # Whoever never answers holds up nobody.
    desk.clock.pass_(MINUTE + 1)
    await desk.question(call(1))


async def test_of_many_calls_at_once_one_is_asked_about_and_noted(desk: Desk) -> None:
    asked, busy = list[Approval](), list[int]()
    all_others = anyio.Event()

    async def ask(approval: Approval) -> Word:
        asked.append(approval)
        await all_others.wait()
        return "once"

    async def check(number: int) -> None:
        try:
            await desk.approvals.check(CHAT, call(number // 2))
        except Busy:
            busy.append(number)
        if len(busy) == 999:
            all_others.set()

    asks.set(ask)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            for number in range(1000):
                tasks.start_soon(check, number)
    assert (len(asked), len(busy)) == (1, 999)
    assert await desk.approvals.list() == []


async def test_what_a_newer_version_has_noted_allows_nothing(desk: Desk) -> None:
    await desk.answered(call(), "chat")
    record = await desk.records.get(CHAT)
    assert record is not None
    (noted,) = record.further["approvals"]
    await desk.records.put(replace(record, further={"approvals": [{**noted, "newer": 1}]}))
    await desk.question(call())
