"""Which server answers for a chat: the one that has its lease.

A server that cannot prove its lease lets the chat go, before the lease can have ended: by its own
steady clock, and counted from before the last renewal was sent. Chats of the user `local`, as the
unix socket has them, are their machine's own and have no lease.
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.config import FleetConfig
from mcp_sandbox.errors import ChatElsewhere, SandboxError, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.storage.redis import FleetStore, Lease, LeaseState

logger = logging.getLogger(__name__)

_LOCAL = "local"
# How long before the end of a lease its calls are ended, at most.
_MARGIN_S = 5.0
_LOOK_AGAIN_S = 0.2
_LOST = "another server has this chat now"


@dataclass(eq=False)
class OwnLease:
    """A lease of this server; times are by the steady clock."""

    epoch: int
    until_s: float
    used_s: float
    state: LeaseState = "own"


class Leases:
    """The leases of one server, `own` by chat.

    What asks Redis raises StorageUnavailable: the servers cannot agree who has a chat.
    """

    # Set before `run`: the chats in use; how many sandboxes can be opened without closing any; what
    # ends the calls of a chat at once, and whether another server has it; what writes the record of
    # a chat that Redis has lost.
    list_used: Callable[[], Collection[ChatId]]
    count_free: Callable[[], int]
    stop_chat: Callable[[ChatId, str, bool], Awaitable[None]]
    write_record: Callable[[ChatId], Awaitable[None]]

    def __init__(
        self,
        store: FleetStore,
        now_s: Callable[[], float],
        settings: FleetConfig,
        *,
        wait_s: float,
    ) -> None:
        """`now_s`: the steady clock; a call waits up to `wait_s` for what passes by itself."""
        # The files of all chats are the same for all servers then, and all have leases.
        self.wait_s, self.shares_files = wait_s, settings.shared_data_dir
        self._server, self._store = store.server, store
        self._now_s = now_s
        self._lease_s, self._margin_s = settings.lease, min(_MARGIN_S, settings.lease / 6)
        self.own: dict[ChatId, OwnLease] = {}
        # Chats that were let go while nobody knew whether another server has them.
        self._unsettled = set[ChatId]()
        self._locks: WeakValueDictionary[ChatId, anyio.Lock] = WeakValueDictionary()
        self._leaving = False
        self._tasks: TaskGroup

    def covers(self, chat: ChatId) -> bool:
        """Return whether the servers share the chat."""
        return self.shares_files or chat.user != _LOCAL

    def epoch(self, chat: ChatId) -> int | None:
        """Return the epoch of the chat's lease; None if this server has none that is valid."""
        return self.own[chat].epoch if self._is_valid(chat) else None

    def check(self, chat: ChatId) -> None:
        """Raise StorageUnavailable unless this server may run calls of the chat now."""
        if self.covers(chat) and not self._note_use(chat):
            raise self._store.disagreement()

    async def hold(self, chat: ChatId) -> None:
        """Take the chat's lease unless this server has it. Raises ChatElsewhere."""
        if self.covers(chat) and (other := await self._take_or_find(chat)):
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
        is_full = may_place and self.count_free() <= 0
        if is_full and await self._store.look([chat]) == [None]:
            found = await self._store.servers()
            others = (each for each in found if each.free > 0 and each.name != self._server.name)
            if best := max(others, key=lambda server: server.free, default=None):
                return best.url
        other = await self._take_or_find(chat)
        return other.url if other else None

    async def find_elsewhere(self, chats: Iterable[ChatId]) -> dict[ChatId, str]:
        """Return those of the chats that other servers have, with the names of these."""
        asked = [chat for chat in chats if self.covers(chat) and chat not in self.own]
        found = zip(asked, await self._store.look(asked), strict=True)
        others = {chat: lease.owner for chat, lease in found if lease}
        return {chat: name for chat, name in others.items() if name != self._server.name}

    async def end(self, chat: ChatId) -> None:
        """Note that the chat's sandbox is being removed: no server sends calls here meanwhile."""
        if own := self.own.get(chat):
            own.state = "ending"
            await self._send({chat: own})

    async def release_ended(self, chat: ChatId) -> None:
        """Give the lease of a chat back whose sandbox was removed."""
        if (own := self.own.get(chat)) and own.state == "ending":
            await self._release([chat])

    async def leave(self) -> None:
        """Give back what is not used, and have other servers wait until the rest has ended."""
        self._leaving, used = True, self.list_used()
        await self._release([chat for chat in self.own if chat not in used])
        await self._send(self.own)

    async def run(self) -> None:
        """Renew all leases, and let go what cannot be renewed in time, until cancelled."""
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._watch)
            while True:
                is_answered = await self._renew_all()
                await anyio.sleep(self._lease_s / (3 if is_answered else 12))

    async def _watch(self) -> None:
        """Let go of chats before their leases can have ended."""
        while True:
            for chat in [chat for chat in self.own if not self._is_valid(chat)]:
                self._tasks.start_soon(self._give_up, chat)
            now_s = self._now_s()
            end_s = min((own.until_s for own in self.own.values()), default=now_s + self._lease_s)
            await anyio.sleep(max(0.05, end_s - self._margin_s - now_s))

    async def _renew_all(self) -> bool:
        """Renew the leases, and give back those of chats that are not used; False without Redis."""
        sent_s, used = self._now_s(), self.list_used()
        for chat, own in [*self.own.items()]:
            if chat not in used and sent_s - own.used_s >= self._lease_s:
                await self._release([chat])
        asked = {chat: own for chat, own in self.own.items() if self._is_valid(chat)}
        if (found := await self._send(asked)) is None:
            return False
        for (chat, own), lease in zip(asked.items(), found, strict=True):
            if self.own.get(chat) is own:
                await self._note_renewal(chat, own, lease, sent_s + self._lease_s)
        await self._look_at_unsettled()
        return True

    async def _look_at_unsettled(self) -> None:
        """End what is left of chats that another server has taken meanwhile."""
        self._unsettled -= self.own.keys()
        with suppress(StorageUnavailable):
            for chat in await self.find_elsewhere(self._unsettled):
                self._unsettled.remove(chat)
                self._tasks.start_soon(self._stop, chat, _LOST, True)

    async def _note_renewal(
        self, chat: ChatId, own: OwnLease, lease: Lease | None, until_s: float
    ) -> None:
        if lease and lease.run == self._server.run:
            own.until_s, is_anew = until_s, lease.epoch != own.epoch
            own.epoch = lease.epoch
            if is_anew:
                # Redis had lost it, and so the record of the chat.
                with suppress(StorageUnavailable):
                    await self.write_record(chat)
        elif lease and lease.owner == self._server.name:
            # The next process of this server goes on with the same sandbox.
            del self.own[chat]
        else:
            self._tasks.start_soon(self._give_up, chat, _LOST)

    async def _take_or_find(self, chat: ChatId) -> Lease | None:
        """Take the lease; return that of the server that has it, None if this one has.

        What another server is ending is waited for, and a Redis that is too young.
        """
        until_s = self._now_s() + self.wait_s
        while not self._note_use(chat):
            lease = await self._take(chat)
            if lease and lease.state == "own":
                return None if lease.run == self._server.run else lease
            if self._now_s() >= until_s:
                raise StorageUnavailable(
                    f"chat {chat} cannot be opened yet: its server is ending it, or Redis was "
                    "empty a moment ago and is given the time of a lease: call again"
                )
            await anyio.sleep(_LOOK_AGAIN_S)
        return None

    async def _take(self, chat: ChatId) -> Lease | None:
        # One after the other, for this chat alone: each take has an epoch of its own.
        async with self._locks.setdefault(chat, anyio.Lock()):
            if self._is_valid(chat):
                return None
            # What runs from an earlier lease may have been another server's meanwhile.
            await self._give_up(chat)
            sent_s = self._now_s()
            lease = await self._store.take(chat)
            if lease and lease.run == self._server.run:
                self.own[chat] = OwnLease(lease.epoch, sent_s + self._lease_s, self._now_s())
            return lease

    async def _give_up(self, chat: ChatId, lost: str = "") -> None:
        if self.own.pop(chat, None):
            why = lost or str(self._store.disagreement())
            self._unsettled.update(() if lost else [chat])
            logger.warning("chat %s is let go: %s", chat, why)
            await self._stop(chat, why, bool(lost))

    async def _stop(self, chat: ChatId, why: str, lost: bool) -> None:
        try:
            await self.stop_chat(chat, why, lost)
        except SandboxError:
            logger.exception("chat %s: what ran for it could not be ended", chat)

    async def _release(self, chats: Collection[ChatId]) -> None:
        gone = {chat: own for chat in chats if (own := self.own.pop(chat, None))}
        if gone:
            await self._send(gone, "gone")

    async def _send(
        self, leases: dict[ChatId, OwnLease], state: LeaseState | None = None
    ) -> Sequence[Lease | None] | None:
        """Renew leases in their states, or in one state; None if Redis does not answer.

        Then they end by themselves.
        """
        state = state or ("ending" if self._leaving else None)
        asked = [(chat, own.epoch, state or own.state) for chat, own in leases.items()]
        free = 0 if self._leaving else self.count_free()
        with suppress(StorageUnavailable):
            return await self._store.renew(asked, free=free, load=len(self.own))
        return None

    def _note_use(self, chat: ChatId) -> bool:
        """Return whether this server has a lease that is valid, and note that it is used."""
        if not self._is_valid(chat):
            return False
        own = self.own[chat]
        own.used_s, own.state = self._now_s(), "own"
        return True

    def _is_valid(self, chat: ChatId) -> bool:
        own = self.own.get(chat)
        return own is not None and self._now_s() < own.until_s - self._margin_s
