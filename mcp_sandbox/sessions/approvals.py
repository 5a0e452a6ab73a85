"""The user's answers to the questions of the policy about single calls.

Stored in a chat's record, as the grants of hosts are, which nothing inside a sandbox can reach. A
question is stored before it is asked, so that it can be answered by the command line too.
"""

import math
import secrets
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from mcp_sandbox.audit import Audit
from mcp_sandbox.errors import Busy, ConsentNeeded, NotFound, NotPermitted
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import BACKUP, UseTimes

Word = Literal["once", "chat", "no"]
"""Yes to this very call, yes to such calls in this chat, no to such calls for a while."""
USER = "the user"
"""The `by` of an answer that came by the chat's client."""
Ask = Callable[["Approval"], Awaitable[Word | Literal["later"] | None]]
"""Asks the user of a chat. "later": the answer comes with the same call made again. None: none."""

_NOTED = "approvals"  # What a chat's record calls them.
_OPEN_S, _NO_S, _ASKING_S = 3600.0, 600.0, 60.0
_MOST_OPEN, _MOST_KEPT, _MOST_TEXT = 16, 64, 8_000
# Letters and digits that are not mistaken for each other.
_LETTERS = "23456789ABCDEFGHJKMNPQRSTVWXYZ"


@dataclass(frozen=True)
class Approval:
    """A call that needs consent, and the answer once given; `until_s` is in seconds of the epoch.

    `about` are the rules that ask, each with its target: an answer for the chat is about these.
    `digest` is of the call. `effect` says what the call does, `part` which part of it does that,
    `text` has all of it.
    """

    what: str
    about: Sequence[str]
    digest: str
    effect: str
    part: str
    text: str
    id: str = ""
    state: Literal["open", "once", "chat", "no"] = "open"
    by: str = ""
    until_s: float = 0.0


async def _nobody(_: Approval) -> None:
    pass


asks = ContextVar[Ask]("asks", default=_nobody)
"""How to ask the user of the call that is under way."""


class Approvals:
    """The approvals of a data root. `lifetime_s`: how long a yes for a chat lasts."""

    def __init__(self, ledger: UseTimes, audit: Audit, lifetime_s: float) -> None:
        self._records, self._clock, self._audit = ledger.records, ledger.clock, audit
        self._lasts_s: Mapping[Word, float] = {"once": _OPEN_S, "chat": lifetime_s, "no": _NO_S}
        # Which call a chat's user is being asked about, by its digest, and until when.
        self._asking: dict[ChatId, tuple[str, float]] = {}

    async def check(self, chat: ChatId, call: Approval) -> None:
        """Return if the call was allowed, or is now; a yes to this very call counts once.

        Raises:
            ConsentNeeded: there is no answer yet; the question is stored.
            NotPermitted: the user has said no, not long ago.
            Busy: the user is being asked about another call.
        """
        noted, about = self._current(await self._records.kept(chat, _NOTED)), set(call.about)
        if about <= {key for each in noted if each.state == "chat" for key in each.about}:
            return
        if any(each.state == "no" and about & {*each.about} for each in noted):
            raise _refusal(call)
        with self._turn(chat, call):
            found = _same(noted, call)
            if found is None or found.state == "once":
                found = await self._note(chat, call)
            if found.state == "once":
                return
            word = await asks.get()(found)
            if word == "later":
                # A client that never answers sends nothing: the wait has an end.
                self._asking[chat] = call.digest, self._clock().steady_s + _ASKING_S
            if word is None or word == "later":
                raise ConsentNeeded(
                    f"this needs the user's consent, and there is no answer yet: {found.effect} "
                    f"Nothing was run. Tell the user that `mcp-sandbox approvals allow {found.id}`"
                    ", typed by them on the machine of this server within an hour, allows it; "
                    "then make exactly the same call again. Until then go on with what does not "
                    "need it."
                )
            await self.answer(chat, found.id, word, USER)
        if word == "no":
            raise _refusal(call)

    @contextmanager
    def _turn(self, chat: ChatId, call: Approval) -> Generator[None]:
        """Allow one question at a time in a chat; taken before the question is stored.

        Raises:
            Busy: another is open, or waits for its call to be made again.
        """
        digest, until_s = self._asking.get(chat, ("", 0.0))
        is_next = digest == call.digest and until_s < math.inf
        if self._clock().steady_s < until_s and not is_next:
            raise Busy(
                "nothing was run: this needs the user's consent, and they are being asked "
                "about another call of this chat. Call again when that one is answered."
            )
        self._asking[chat] = now = call.digest, math.inf
        try:
            yield
        finally:
            if self._asking[chat] is now:
                del self._asking[chat]

    async def answer(self, chat: ChatId, approval_id: str, word: Word, by: str) -> Approval:
        """Store the answer to an open question; a yes of USER to one call is not stored.

        Raises:
            NotFound: it is not open any more.
        """
        found: Approval | None = None

        def answered(noted: Sequence[Approval]) -> Sequence[Approval]:
            nonlocal found
            same = [each for each in noted if each.id == approval_id and each.state != "no"]
            for each in same:
                # Hosts have grants of their own.
                state: Word = "once" if (word, each.what) == ("chat", "network_access") else word
                until_s = self._clock().wall_s + self._lasts_s[word]
                found = replace(each, state=state, by=by, until_s=until_s)
            kept = [found] if found and (found.state, by) != ("once", USER) else []
            return [*(each for each in noted if each not in same), *kept]

        await self._change(chat, answered)
        if found is None:
            raise NotFound(_unknown(approval_id))
        kind, told = "answer" if by == USER else "approval", {"id": approval_id, "word": word}
        about = [*found.about]
        await self._audit.write(kind, user=chat.user, chat=chat.chat, by=by, about=about, **told)
        return found

    async def find(self, approval_id: str) -> tuple[ChatId, Approval]:
        """Return the only approval with this id, of any chat; NotFound if there is not one."""
        found = [each for each in await self.list() if each[1].id == approval_id.upper()]
        if len(found) != 1:
            raise NotFound(_unknown(approval_id))
        return found[0]

    async def list(self) -> Sequence[tuple[ChatId, Approval]]:
        """Return the open questions, and the answers that still hold, of all chats."""
        noted = [(each.chat, each.further.get(_NOTED)) for each in await self._records.list()]
        return [(chat, each) for chat, found in noted for each in self._current(found)]

    def _current(self, noted: Any) -> Sequence[Approval]:  # noqa: ANN401 - JSON of any version
        # Entries that only a newer version understands are ignored.
        with suppress(TypeError):
            found = [Approval(**each) for each in noted or ()]
            return [each for each in found if each.until_s > self._clock().wall_s]
        return []

    async def _note(self, chat: ChatId, call: Approval) -> Approval:
        """Store the question, or use up the yes that has come meanwhile."""
        until_s = self._clock().wall_s + _OPEN_S
        new_id = "".join(secrets.choice(_LETTERS) for _ in range(4))
        result = replace(call, id=new_id, text=call.text[:_MOST_TEXT], until_s=until_s)

        def asked(noted: Sequence[Approval]) -> Sequence[Approval]:
            nonlocal result
            if same := _same(noted, call):
                result = same
                return [each for each in noted if each is not same or same.state == "open"]
            opened = [each for each in noted if each.state == "open"]
            dropped = opened[: max(0, len(opened) + 1 - _MOST_OPEN)]
            return [*(each for each in noted if each not in dropped), result]

        await self._change(chat, asked)
        return result

    async def _change(
        self, chat: ChatId, change: Callable[[Sequence[Approval]], Sequence[Approval]]
    ) -> None:
        def changed(noted: object) -> Sequence[Mapping[str, Any]]:
            return [asdict(each) for each in change(self._current(noted))][-_MOST_KEPT:]

        await self._records.keep(chat, _NOTED, changed, self._clock().wall_s)


def reset_kept(further: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a chat keeps when its agent discards its files: whatever restricts it.

    Its image and limits (`assistant_of`), refusals of the user, open questions, and from which
    backups it comes: else those would be another's.
    """
    noted = [each for each in further.get(_NOTED) or () if isinstance(each, dict)]
    bound = {name: value for name, value in further.items() if name in ("assistant", BACKUP)}
    return {**bound, _NOTED: [each for each in noted if each.get("state") in ("open", "no")]}


def _same(noted: Sequence[Approval], call: Approval) -> Approval | None:
    found = (each for each in noted if each.digest == call.digest)
    return next((each for each in found if each.state in ("open", "once")), None)


def _refusal(call: Approval) -> NotPermitted:
    return NotPermitted(
        f"the user has said no to this: {call.effect} Nothing was run, and they are not asked "
        "again for ten minutes. Do not look for another way to the same effect: ask them in the "
        "conversation what to do instead."
    )


def _unknown(approval_id: str) -> str:
    return (
        f"nothing waits under {approval_id[:20]!r}: `mcp-sandbox approvals list` shows what does; "
        "a question is kept for an hour"
    )
