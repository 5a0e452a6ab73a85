"""Which server answers for a chat: the one that has its lease.

A server that cannot prove its lease lets the chat go, before the lease can have ended: by its own
steady clock, and counted from before the last renewal was sent. Chats of the user `local`, as the
unix socket has them, are their machine's own and have no lease.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.errors import ChatElsewhere, SandboxError, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.storage.breaker import CircuitBreaker
from mcp_sandbox.storage.redis import FleetStore, Lease, LeaseState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOCAL = "local"
# How long before the end of a lease its calls are ended, at most.
_MARGIN_S = 5.0
_LOOK_AGAIN_S = 0.2
# How long a Redis that did not answer is taken for one that does not.
_PAUSE_S = 1.0
_LOST = "another server has this chat now"


@dataclass(eq=False)
class Held:
    """A lease of this server; times are by the steady clock."""

    epoch: int
    until_s: float
    used_s: float
    state: LeaseState = "own"


class Leases:
    """The leases of one server, `held` by chat.

    What asks Redis raises StorageUnavailable: the servers cannot agree who has a chat.
    """

    # Set before `run`: the chats in use; how many sandboxes can be opened without closing any, and
    # how many are open; what ends the calls of a chat at once, and whether another server has it;
    # what writes the record of a chat that Redis has lost.
    used: Callable[[], Collection[ChatId]]
    places: Callable[[], tuple[int, int]]
    let_go: Callable[[ChatId, str, bool], Awaitable[None]]
    share: Callable[[ChatId], Awaitable[None]]

    def __init__(
        self, store: FleetStore, now_s: Callable[[], float], *, lease_s: float, wait_s: float
    ) -> None:
        """`now_s`: the steady clock; a call waits up to `wait_s` for what passes by itself."""
        self.wait_s = wait_s
        self._me, self._store = store.server, store
        self._now_s = now_s
        self._lease_s, self._margin_s = lease_s, min(_MARGIN_S, lease_s / 6)
        self.held: dict[ChatId, Held] = {}
        self._turns: WeakValueDictionary[ChatId, anyio.Lock] = WeakValueDictionary()
        self._breaker = CircuitBreaker(now_s, most_s=_PAUSE_S)
        self._leaving = False
        self._tasks: TaskGroup

    @staticmethod
    def covers(chat: ChatId) -> bool:
        """Return whether the servers share the chat."""
        return chat.user != _LOCAL

    def epoch(self, chat: ChatId) -> int | None:
        """Return the epoch of the chat's lease; None if this server has none that is valid."""
        return self.held[chat].epoch if self._is_valid(chat) else None

    def check(self, chat: ChatId) -> None:
        """Raise StorageUnavailable unless this server may run calls of the chat now."""
        if self.covers(chat) and not self._note_use(chat):
            raise self._disagreement()

    async def hold(self, chat: ChatId) -> None:
        """Take the chat's lease unless this server has it. Raises ChatElsewhere."""
        if self.covers(chat) and (other := await self._settle(chat)):
            raise ChatElsewhere(
                f"chat {chat} is on the server {other.owner} ({other.url}): connect there, or "
                "call again when that one has let it go"
            )

    async def find(self, chat: ChatId, *, may_place: bool) -> str | None:
        """Return the address of the server that is to answer a call; None for this one.

        With `may_place` a new chat goes to the server with the most free places, if all of this
        one are used.
        """
        if not self.covers(chat) or self._note_use(chat):
            return None
        is_full = may_place and self.places()[0] <= 0
        if is_full and await self.ask(self._store.look, [chat]) == [None]:
            found = await self.ask(self._store.servers)
            others = (each for each in found if each.free > 0 and each.name != self._me.name)
            if best := max(others, key=lambda server: server.free, default=None):
                return best.url
        other = await self._settle(chat)
        return other.url if other else None

    async def elsewhere(self, chats: Iterable[ChatId]) -> set[ChatId]:
        """Return those of the chats that other servers have."""
        asked = [chat for chat in chats if self.covers(chat) and chat not in self.held]
        found = zip(asked, await self.ask(self._store.look, asked), strict=True)
        return {chat for chat, lease in found if lease and lease.owner != self._me.name}

    async def end(self, chat: ChatId) -> None:
        """Note that the chat's sandbox is being removed: no server sends calls here meanwhile."""
        if held := self.held.get(chat):
            held.state = "ending"
            if not self._breaker.is_open:
                await self._tell({chat: held})

    async def release_ended(self, chat: ChatId) -> None:
        """Give the lease of a chat back whose sandbox was removed."""
        if (held := self.held.get(chat)) and held.state == "ending":
            await self._release([chat])

    async def leave(self) -> None:
        """Give back what is not used, and have other servers wait until the rest has ended."""
        self._leaving, used = True, self.used()
        await self._release([chat for chat in self.held if chat not in used])
        await self._tell(self.held)

    async def run(self) -> None:
        """Renew all leases, and let go what cannot be renewed in time, until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._watch)
            while True:
                await self._renew()
                await anyio.sleep(self._lease_s / 3)

    async def _watch(self) -> None:
        """Let go of chats before their leases can have ended."""
        while True:
            for chat in [chat for chat in self.held if not self._is_valid(chat)]:
                self._tasks.start_soon(self._lose, chat)
            now_s = self._now_s()
            end_s = min(
                (held.until_s for held in self.held.values()), default=now_s + self._lease_s
            )
            await anyio.sleep(max(0.05, end_s - self._margin_s - now_s))

    async def _renew(self) -> None:
        sent_s, used = self._now_s(), self.used()
        for chat, held in [*self.held.items()]:
            if chat not in used and sent_s - held.used_s >= self._lease_s:
                await self._release([chat])
        asked = {chat: held for chat, held in self.held.items() if self._is_valid(chat)}
        for (chat, held), answer in zip(asked.items(), await self._tell(asked), strict=False):
            if self.held.get(chat) is not held:
                continue
            if answer == "renewed":
                held.until_s = sent_s + self._lease_s
            elif answer == "lapsed":
                self._tasks.start_soon(self._take_again, chat, held)
            else:
                self._tasks.start_soon(self._lose, chat, _LOST)

    async def _take_again(self, chat: ChatId, held: Held) -> None:
        """Take a lease that Redis has lost, as long as it cannot have ended by itself."""
        sent_s = self._now_s()
        try:
            lease = await self._store.take(chat, held.epoch)
            if self.held.get(chat) is not held or not self._is_valid(chat):
                return
            if lease and lease.run == self._me.run:
                held.epoch, held.until_s = lease.epoch, sent_s + self._lease_s
                await self.share(chat)
            else:
                await self._lose(chat, _LOST)
        except StorageUnavailable as exc:
            self._note_failure(exc)

    async def _settle(self, chat: ChatId) -> Lease | None:
        """Take the lease; return that of the server that has it, None if this one has.

        What another server is ending is waited for, and a Redis that is too young.
        """
        until_s = self._now_s() + self.wait_s
        while not self._note_use(chat):
            lease = await self._take(chat)
            if lease and lease.state == "own":
                return None if lease.run == self._me.run else lease
            if self._now_s() >= until_s:
                raise StorageUnavailable(
                    f"chat {chat} cannot be opened yet: its server is ending it, or Redis was "
                    "empty a moment ago and is given the time of a lease: call again"
                )
            await anyio.sleep(_LOOK_AGAIN_S)
        return None

    async def _take(self, chat: ChatId) -> Lease | None:
        # One after the other, for this chat alone: each take has an epoch of its own.
        async with self._turns.setdefault(chat, anyio.Lock()):
            if self._is_valid(chat):
                return None
            # What runs from an earlier lease may have been another server's meanwhile.
            await self._lose(chat)
            sent_s = self._now_s()
            lease = await self.ask(self._store.take, chat)
            if lease and lease.run == self._me.run:
                self.held[chat] = Held(lease.epoch, sent_s + self._lease_s, self._now_s())
            return lease

    async def _lose(self, chat: ChatId, lost: str = "") -> None:
        if self.held.pop(chat, None):
            why = lost or str(self._disagreement())
            logger.warning("chat %s is let go: %s", chat, why)
            try:
                await self.let_go(chat, why, bool(lost))
            except SandboxError:
                logger.exception("chat %s: what ran for it could not be ended", chat)

    async def _release(self, chats: Collection[ChatId]) -> None:
        gone = {chat: held for chat in chats if (held := self.held.pop(chat, None))}
        if gone and not self._breaker.is_open:
            await self._tell(gone, gone=True)

    async def _tell(self, leases: dict[ChatId, Held], *, gone: bool = False) -> list[str]:
        """Renew leases in their states; where Redis does not answer, they end by themselves."""
        usual: LeaseState = "gone" if gone else "ending"
        states = [
            (chat, held.epoch, usual if gone or self._leaving else held.state)
            for chat, held in leases.items()
        ]
        free, load = self.places()
        try:
            answers = await self._store.renew(states, free=0 if self._leaving else free, load=load)
        except StorageUnavailable as exc:
            self._note_failure(exc)
            return []
        self._breaker.note_answer()
        return [*answers]

    def _note_use(self, chat: ChatId) -> bool:
        """Return whether this server has a lease that is valid, and note that it is used."""
        if not self._is_valid(chat):
            return False
        held = self.held[chat]
        held.used_s, held.state = self._now_s(), "own"
        return True

    def _is_valid(self, chat: ChatId) -> bool:
        held = self.held.get(chat)
        return held is not None and self._now_s() < held.until_s - self._margin_s

    async def ask(self, ask: Callable[..., Awaitable[T]], *given: object) -> T:
        """Ask Redis, unless it has just failed to answer."""
        if self._breaker.is_open:
            raise self._disagreement()
        try:
            return await ask(*given)
        except StorageUnavailable as exc:
            if exc.__cause__ is None:
                # Redis has answered, with a lease that cannot be read.
                raise
            self._note_failure(exc)
            raise self._disagreement() from exc

    def _note_failure(self, exc: StorageUnavailable) -> None:
        if not self._breaker.failures:
            logger.warning("%s; chats that are open go on until their leases end", exc)
        self._breaker.note_failure(str(exc))

    def _disagreement(self) -> StorageUnavailable:
        why = self._breaker.why.rstrip(".") or "this server was not heard of for too long"
        return StorageUnavailable(
            f"the servers cannot agree who has this chat: {why}. Files are kept; call again when "
            f"Redis at {self._store.place} answers"
        )
