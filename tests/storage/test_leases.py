"""Which of several servers answers for a chat, as a real Redis decides it."""

import logging
import signal
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import pytest
from anyio import to_thread
from redis.asyncio import Redis

from mcp_sandbox.config import FleetConfig
from mcp_sandbox.errors import ChatElsewhere, ConfigError, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.storage.leases import Leases
from mcp_sandbox.storage.redis import FleetStore, Lease, LeaseState, Server
from tests.redis_server import RedisServer

logger = logging.getLogger(__name__)
pytestmark = [pytest.mark.anyio, pytest.mark.redis]

CHAT, OTHER = ChatId("ann", "one"), ChatId("ann", "two")
LEASE_S = 1.5


@dataclass
class Machine:
    """What a server does with its chats, and what it had to let go."""

    store: FleetStore
    leases: Leases
    free: int = 4
    uses: set[ChatId] = field(default_factory=set)
    gone: dict[ChatId, tuple[str, bool, float]] = field(default_factory=dict)
    went: anyio.Event = field(default_factory=anyio.Event)
    shared: list[ChatId] = field(default_factory=list)

    def used(self) -> set[ChatId]:
        return self.uses

    async def let_go(self, chat: ChatId, why: str, lost: bool) -> None:
        self.gone[chat] = why, lost, time.monotonic()
        self.went.set()

    async def share(self, chat: ChatId) -> None:
        self.shared.append(chat)


def who(name: str, place: str = "") -> Server:
    return Server(name, f"http://{name}", f"run of {name}", place or f"disk of {name}")


@asynccontextmanager
async def store(
    server: RedisServer, name: str = "a", lease_s: float = LEASE_S
) -> AsyncGenerator[FleetStore]:
    opened = FleetStore(server.url, who(name), lease_s)
    try:
        yield opened
    finally:
        await opened.aclose()


@asynccontextmanager
async def machine(
    server: RedisServer,
    name: str,
    *,
    wait_s: float = 2 * LEASE_S,
    now_s: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[Machine]:
    async with store(server, name) as opened, anyio.create_task_group() as tasks:
        leases = Leases(opened, now_s, FleetConfig(lease=LEASE_S), wait_s=wait_s)
        found = Machine(opened, leases)
        leases.list_used, leases.count_free = found.used, lambda: found.free
        leases.stop_chat, leases.write_record = found.let_go, found.share
        tasks.start_soon(leases.run)
        yield found
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def grown(server: RedisServer) -> AsyncGenerator[None]:
    """A Redis that has known leases for long."""
    async with Redis.from_url(server.url) as asked:
        await asked.set("born", 1)
        yield


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    while not await is_so():
        await anyio.sleep(0.02)


async def test_of_fifty_servers_that_want_a_chat_one_gets_it(server: RedisServer) -> None:
    found: list[Lease | None] = []

    async def take(name: str) -> None:
        async with store(server, name, 30) as opened:
            found.append(await opened.take(CHAT))

    async with grown(server), anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(take, f"s{number}")
    assert len(found) == 50
    assert len({(each.owner, each.epoch) for each in found if each}) == 1


async def test_a_renewal_renews_takes_again_or_finds_another_holder(server: RedisServer) -> None:
    async with grown(server), store(server) as a, store(server, "b") as b:
        lease = await a.take(CHAT)
        assert lease
        renew = partial(a.renew, free=1)
        assert await renew([(CHAT, lease.epoch, "own")]) == [lease]
        assert await b.renew([(CHAT, lease.epoch, "gone")], free=1) == [lease]
        (again,) = await renew([(OTHER, 7, "own")])
        assert again
        assert (again.run, again.epoch > 7) == (lease.run, True)
        assert await renew([(CHAT, lease.epoch, "gone")]) == [None]
        taken = await b.take(CHAT)
        assert taken
        assert taken.epoch > lease.epoch
        # What was delayed on its way changes nothing any more.
        late: list[tuple[ChatId, int, LeaseState]] = [
            (CHAT, lease.epoch, "gone"),
            (OTHER, 1, "gone"),
        ]
        assert await renew(late) == [taken, again]
        assert await b.look([CHAT, OTHER]) == [taken, again]


async def test_epochs_grow_even_where_the_clock_of_redis_does_not(server: RedisServer) -> None:
    far = 9_000_000_000_000
    async with grown(server), store(server) as a:
        lease = await a.take(CHAT, far)
        assert lease
        assert lease.epoch == far + 1
        again = await a.take(CHAT)
        assert again
        assert again.epoch == far + 2


async def test_in_a_redis_that_came_back_empty_only_a_former_holder_takes(
    server: RedisServer,
) -> None:
    async with store(server) as a, store(server, "b") as b:
        assert await a.take(CHAT) is None
        former = await a.take(CHAT, 7)
        assert former
        assert await b.take(OTHER) is None
        await eventually(partial(_takes, b, OTHER))


async def _takes(of: FleetStore, chat: ChatId) -> bool:
    return await of.take(chat) is not None


async def test_a_chat_of_another_server_is_passed_on_and_never_opened_here(
    server: RedisServer,
) -> None:
    async with grown(server), machine(server, "a") as a, machine(server, "b") as b:
        assert await a.leases.find(CHAT, may_place=True) is None
        assert await b.leases.find(CHAT, may_place=True) == "http://a"
        with pytest.raises(ChatElsewhere, match="on the server a "):
            await b.leases.hold(CHAT)
        assert await b.leases.find_elsewhere([CHAT, OTHER]) == {CHAT: "a"}
        assert a.leases.epoch(CHAT)
        assert b.leases.epoch(CHAT) is None
        a.leases.check(CHAT)
        with pytest.raises(StorageUnavailable):
            b.leases.check(CHAT)


async def test_chats_of_this_machine_need_no_lease(server: RedisServer) -> None:
    server.strike()
    async with machine(server, "a") as a:
        await a.leases.hold(ChatId("local", "one"))
        a.leases.check(ChatId("local", "one"))
        assert await a.leases.find(ChatId("local", "one"), may_place=True) is None


async def test_a_new_chat_goes_where_most_is_free_if_all_here_is_used(server: RedisServer) -> None:
    async with (
        grown(server),
        machine(server, "a") as a,
        machine(server, "b") as b,
        machine(server, "c") as c,
    ):
        a.free, b.free, c.free = 0, 2, 3
        for each in (b, c):
            await each.store.renew((), free=each.free)
        # What Redis says of this server is old.
        await a.store.renew((), free=9)
        assert await a.leases.find(CHAT, may_place=True) == "http://c"
        assert await a.leases.find(CHAT, may_place=False) is None
        for each in (b, c):
            await each.store.renew((), free=0)
        assert await a.leases.find(OTHER, may_place=True) is None


async def test_a_chat_that_is_being_ended_is_waited_for(server: RedisServer) -> None:
    found: list[str | None] = []

    async def wait(b: Machine) -> None:
        found.append(await b.leases.find(CHAT, may_place=True))

    async with grown(server), machine(server, "a") as a, machine(server, "b") as b:
        await a.leases.hold(CHAT)
        await a.leases.end(CHAT)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, b)
            await anyio.wait_all_tasks_blocked()
            assert found == []
            await a.leases.release_ended(CHAT)
        assert found == [None]
        assert b.leases.epoch(CHAT)


async def test_what_is_not_used_is_given_back(server: RedisServer) -> None:
    async with grown(server), machine(server, "a") as a, machine(server, "b") as b:
        a.uses = {OTHER}
        await a.leases.hold(CHAT)
        await a.leases.hold(OTHER)

        async def is_free() -> bool:
            return await b.store.look([CHAT]) == [None]

        await eventually(is_free)
        assert a.gone == {}
        assert a.leases.epoch(OTHER)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_redis_a_chat_is_let_go_before_its_lease_can_end(
    server: RedisServer, number: int
) -> None:
    async with grown(server), machine(server, "a") as a, machine(server, "b", wait_s=0) as b:
        a.uses = {CHAT}
        await a.leases.hold(CHAT)
        began = time.monotonic()
        server.strike(number)
        for refused in (a.leases.hold(OTHER), b.leases.hold(CHAT)):
            with pytest.raises(StorageUnavailable, match="cannot agree who has this chat"):
                await refused
        with anyio.fail_after(5):
            await a.went.wait()
        why, lost, at = a.gone[CHAT]
        # A renewal that was sent before may have succeeded.
        assert at - began < LEASE_S
        assert not lost
        assert "cannot agree who has this chat" in why
        with pytest.raises(StorageUnavailable):
            a.leases.check(CHAT)
        server.strike(signal.SIGCONT)


async def test_what_a_restarted_redis_has_lost_is_taken_again_by_its_holders(
    server: RedisServer,
) -> None:
    async with grown(server), machine(server, "a") as a, machine(server, "b", wait_s=0) as b:
        a.uses = {CHAT}
        await a.leases.hold(CHAT)
        epoch = a.leases.epoch(CHAT)
        server.strike()
        await to_thread.run_sync(server.start)
        with pytest.raises(StorageUnavailable, match=r"empty a moment ago"):
            await eventually(partial(_held, b, CHAT))

        async def is_back() -> bool:
            is_later = (a.leases.epoch(CHAT) or 0) > (epoch or 0)
            return is_later and any(await b.store.look([CHAT])) and a.shared == [CHAT]

        await eventually(is_back)
        assert a.gone == {}


async def _held(one: Machine, chat: ChatId) -> bool:
    try:
        await one.leases.hold(chat)
    except StorageUnavailable as exc:
        if "cannot agree" in str(exc):
            return False
        raise
    return True


async def test_a_chat_that_another_server_has_taken_is_lost(server: RedisServer) -> None:
    async with grown(server), machine(server, "a") as a, store(server, "b") as b:
        a.uses = {CHAT}
        await a.leases.hold(CHAT)
        async with Redis.from_url(server.url) as asked:
            await asked.delete(f"lease:{CHAT}")
        await b.take(CHAT)
        with anyio.fail_after(5):
            await a.went.wait()
        assert a.gone[CHAT][:2] == ("another server has this chat now", True)
        with pytest.raises(ChatElsewhere):
            await a.leases.hold(CHAT)


async def test_a_machine_that_slept_trusts_no_lease_from_before(server: RedisServer) -> None:
    slept_s = 0.0
    async with (
        grown(server),
        machine(server, "a", now_s=lambda: time.monotonic() + slept_s) as a,
    ):
        a.uses = {CHAT}
        await a.leases.hold(CHAT)
        epoch = a.leases.epoch(CHAT) or 0
        slept_s = 600.0
        with pytest.raises(StorageUnavailable):
            a.leases.check(CHAT)
        # A new lease is none for what runs from before.
        assert await a.leases.find(CHAT, may_place=True) is None
        assert CHAT in a.gone
        assert (a.leases.epoch(CHAT) or 0) > epoch


@pytest.mark.parametrize("text", ["garbage", "7", "{}", '{"owner": "a", "epoch": "x"}'])
async def test_a_lease_that_nobody_can_read_is_believed_by_nobody(
    server: RedisServer, text: str
) -> None:
    async with grown(server), machine(server, "b") as b:
        async with Redis.from_url(server.url) as asked:
            await asked.set(f"lease:{CHAT}", text)
        with pytest.raises(StorageUnavailable, match="is no lease"):
            await b.leases.hold(CHAT)
        await b.leases.hold(OTHER)


async def test_a_redis_that_cannot_serve_is_told_at_the_start(server: RedisServer) -> None:
    locked = await to_thread.run_sync(RedisServer, "--requirepass", "right")
    replica = await to_thread.run_sync(RedisServer, "--replicaof", "127.0.0.1", str(server.port))
    try:
        wrong = locked.url.replace("//", "//:wrong@")
        for url in (locked.url, wrong, replica.url):
            await _refused(url, "may be written")
        fine = FleetStore(locked.url.replace("//", "//:right@"), who("a"), LEASE_S)
        await fine.check()
        await fine.aclose()
    finally:
        locked.close()
        replica.close()
    async with Redis.from_url(server.url) as asked:
        for name, value in (("born", "soon"), ("chats", "x"), ("servers", "x")):
            await asked.set(name, value)
            await _refused(server.url, "another program|may be written")
            await asked.delete(name)
    async with store(server) as a:
        await a.renew((), free=1)
        await _refused(server.url, "is named a too", place="another disk")
        await a.check()
    server.strike()
    async with store(server) as a:
        with pytest.raises(StorageUnavailable, match=str(server.port)):
            await a.check()


async def _refused(url: str, why: str, place: str = "") -> None:
    opened = FleetStore(url, who("a", place), LEASE_S)
    with pytest.raises(ConfigError, match=why):
        await opened.check()
    await opened.aclose()


async def test_leases_cost_little(server: RedisServer) -> None:
    async with grown(server), store(server, lease_s=30) as a:
        took: list[float] = []
        held: list[tuple[ChatId, int, LeaseState]] = []
        for number in range(500):
            began = time.perf_counter()
            lease = await a.take(ChatId("ann", f"c{number}"))
            took.append(1000 * (time.perf_counter() - began))
            assert lease
            held.append((ChatId("ann", f"c{number}"), lease.epoch, "own"))
        began = time.perf_counter()
        assert all(await a.renew(held, free=1))
        renewal = 1000 * (time.perf_counter() - began)
        logger.info("a take %.2f ms, 500 renewals %.0f ms", statistics.median(took), renewal)
        assert statistics.median(took) < 10
        assert renewal < 500
