"""Which sandbox is opened, which makes room, and which waits how long."""

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from mcp_sandbox.errors import CapacityReached
from mcp_sandbox.sessions.sandbox.capacity import Capacity
from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox


class Sandbox(ChatSandbox):
    """A hold as the queue sees it, in use or not, without a sandbox."""

    def __init__(self, capacity: Capacity, name: str, *, busy: bool = False) -> None:
        self._slots = capacity
        self.name = name
        self.user = name[0]
        self.busy = busy
        self.in_background = False
        self.closing: Callable[[], Awaitable[None]] | None = None

    @property
    def is_busy(self) -> bool:
        return self.busy

    async def release_if_idle(self, *, background_too: bool = False, at_once: bool = False) -> bool:
        if self.in_background:
            return False
        await self.close()
        return True

    async def close(self) -> None:
        if self.closing:
            await self.closing()
        self._slots.release(self)

    def end_call(self) -> None:
        self.busy = False
        self._slots.mark_idle(self)


def names(capacity: Capacity) -> list[str]:
    return [slot.name for slot in capacity.list_taken() if isinstance(slot, Sandbox)]


def capacity_for(most: int, *, per_user: int = 99, wait_s: float = 0) -> Capacity:
    return Capacity(most, most_per_user=per_user, wait_s=wait_s)


async def opened(capacity: Capacity, *given: str, busy: bool = False) -> list[Sandbox]:
    made = [Sandbox(capacity, name, busy=busy) for name in given]
    for sandbox in made:
        await capacity.take(sandbox)
    return made


async def test_the_one_used_longest_ago_makes_room() -> None:
    capacity = capacity_for(3)
    a, _, _ = await opened(capacity, "a", "b", "c")
    capacity.mark_used(a)
    await opened(capacity, "d")
    assert names(capacity) == ["c", "a", "d"]


async def test_a_polled_one_survives_any_number_of_others() -> None:
    capacity = capacity_for(3)
    (polled,) = await opened(capacity, "p")
    for number in range(50):
        capacity.mark_used(polled)
        await opened(capacity, f"x{number}")
    assert names(capacity) == ["x48", "p", "x49"]


async def test_what_is_in_use_is_never_closed() -> None:
    capacity = capacity_for(2)
    await opened(capacity, "a", "b", busy=True)
    with pytest.raises(CapacityReached, match=r"all 2 sandboxes are in use: .*max_open"):
        await opened(capacity, "c")
    assert names(capacity) == ["a", "b"]


async def test_what_works_in_the_background_is_passed_over() -> None:
    capacity = capacity_for(2)
    a, _ = await opened(capacity, "a", "b")
    a.in_background = True
    await opened(capacity, "c")
    assert names(capacity) == ["a", "c"]


async def test_a_user_at_the_limit_closes_an_own_one_though_there_is_room() -> None:
    capacity = capacity_for(10, per_user=2)
    await opened(capacity, "b1", "a1", "a2", "a3")
    assert names(capacity) == ["b1", "a2", "a3"]


async def test_a_user_at_the_limit_is_told_which_limit() -> None:
    capacity = capacity_for(10, per_user=2)
    await opened(capacity, "a1", "a2", busy=True)
    with pytest.raises(CapacityReached, match=r"one user may have open.*max_per_user"):
        await opened(capacity, "a3")
    await opened(capacity, "b1")


async def test_waiting_ends_when_a_call_ends() -> None:
    capacity = capacity_for(1, wait_s=30)
    (a,) = await opened(capacity, "a", busy=True)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened, capacity, "b")
            await wait_all_tasks_blocked()
            assert capacity.waiting == 1
            assert capacity.free == 0
            a.end_call()
    assert names(capacity) == ["b"]
    assert capacity.waiting == 0


async def test_waiting_ends_when_background_work_ends() -> None:
    capacity = capacity_for(1, wait_s=30)
    (a,) = await opened(capacity, "a")
    a.in_background = True
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened, capacity, "b")
            await wait_all_tasks_blocked()
            a.in_background = False
    assert names(capacity) == ["b"]


async def test_waiting_ends_after_its_time_with_a_reason() -> None:
    capacity = capacity_for(1, wait_s=0.05)
    await opened(capacity, "a", busy=True)
    with anyio.fail_after(5), pytest.raises(CapacityReached, match=r"stayed so for 0\.05 s"):
        await opened(capacity, "b")
    assert capacity.waiting == 0


async def order_of_service(capacity: Capacity, holder: Sandbox, *waiting: str) -> list[str]:
    """Who gets the only slot, one after the other, when all these wait in this order."""
    served: list[str] = []

    async def wait(name: str) -> None:
        sandbox = Sandbox(capacity, name, busy=True)
        await capacity.take(sandbox)
        served.append(name)
        sandbox.end_call()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for name in waiting:
                tasks.start_soon(wait, name)
                await wait_all_tasks_blocked()
            holder.end_call()
    return served


async def test_a_user_with_many_waiting_does_not_hold_up_the_others() -> None:
    capacity = capacity_for(1, wait_s=30)
    (holder,) = await opened(capacity, "a0", busy=True)
    served = await order_of_service(capacity, holder, "a1", "a2", "a3", "b1", "c1", "b2")
    assert served == ["b1", "c1", "a1", "b2", "a2", "a3"]


async def test_who_waits_for_the_own_limit_holds_up_nobody() -> None:
    capacity = capacity_for(2, per_user=1, wait_s=30)
    (a,) = await opened(capacity, "a1", busy=True)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened, capacity, "a2")
            await wait_all_tasks_blocked()
            await opened(capacity, "b1")
            assert names(capacity) == ["a1", "b1"]
            a.end_call()
    assert names(capacity) == ["b1", "a2"]


async def test_who_gives_up_leaves_the_place_to_the_next() -> None:
    capacity = capacity_for(1, wait_s=30)
    (a,) = await opened(capacity, "a", busy=True)
    gone = anyio.CancelScope()

    async def give_up() -> None:
        with gone:
            await opened(capacity, "b")

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            await wait_all_tasks_blocked()
            tasks.start_soon(opened, capacity, "c")
            await wait_all_tasks_blocked()
            gone.cancel()
            a.end_call()
    assert names(capacity) == ["c"]


def closing_slowly(sandbox: Sandbox) -> tuple[anyio.Event, anyio.Event]:
    """Let it set the first event when it is being closed, then wait for the second, as an end does.

    Nobody can cancel that.
    """
    closing, go_on = anyio.Event(), anyio.Event()

    async def close() -> None:
        with anyio.CancelScope(shield=True):
            closing.set()
            await go_on.wait()

    sandbox.closing = close
    return closing, go_on


async def test_who_gives_up_while_room_is_made_takes_no_slot() -> None:
    capacity = capacity_for(1, wait_s=30)
    (a,) = await opened(capacity, "a")
    closing, go_on = closing_slowly(a)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened, capacity, "b")
            await closing.wait()
            tasks.cancel_scope.cancel()
            go_on.set()
        assert names(capacity) == []
        await opened(capacity, "c")
    assert names(capacity) == ["c"]


async def test_who_gives_up_just_when_granted_takes_no_slot() -> None:
    capacity = capacity_for(1, wait_s=30)
    (a,) = await opened(capacity, "a", busy=True)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for name in ("b", "c", "d"):
                tasks.start_soon(opened, capacity, name)
            await wait_all_tasks_blocked()
            a.end_call()
            tasks.cancel_scope.cancel()
    assert capacity.waiting == 0
    await opened(capacity, "e")
    assert names(capacity) == ["e"]


async def test_a_place_that_is_free_is_given_at_once_while_another_user_makes_room() -> None:
    capacity = capacity_for(16, per_user=1, wait_s=30)
    (a,) = await opened(capacity, "a1")
    closing, go_on = closing_slowly(a)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened, capacity, "a2")
            await closing.wait()
            began = anyio.current_time()
            await opened(capacity, "b1")
            assert anyio.current_time() - began < 0.05
            assert names(capacity) == ["a1", "b1"]
            go_on.set()
    assert names(capacity) == ["b1", "a2"]


async def test_two_who_wait_close_one_each() -> None:
    capacity = capacity_for(2, wait_s=30)
    made = await opened(capacity, "a1", "a2")
    both, closing = anyio.Event(), set[str]()

    async def close_together(name: str) -> None:
        closing.add(name)
        if len(closing) == 2:
            both.set()
        await both.wait()

    for sandbox in made:
        sandbox.closing = partial(close_together, sandbox.name)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(opened, capacity, "b1")
            tasks.start_soon(opened, capacity, "c1")
    assert sorted(names(capacity)) == ["b1", "c1"]


async def test_a_place_that_one_makes_goes_to_the_user_served_longest_ago() -> None:
    capacity = capacity_for(1, wait_s=30)
    (b,) = await opened(capacity, "b0")
    closing, go_on = closing_slowly(b)
    waiting = Sandbox(capacity, "b1", busy=True), Sandbox(capacity, "c1", busy=True)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(capacity.take, waiting[0])
            await closing.wait()
            tasks.start_soon(capacity.take, waiting[1])
            await wait_all_tasks_blocked()
            go_on.set()
            await wait_all_tasks_blocked()
            assert names(capacity) == ["c1"]
            waiting[1].end_call()
    assert names(capacity) == ["b1"]


async def test_adopted_ones_count_but_are_never_refused() -> None:
    capacity = capacity_for(1)
    for name in ("a", "b"):
        capacity.adopt(Sandbox(capacity, name))
    assert capacity.free == 0
    await opened(capacity, "c")
    assert len(names(capacity)) == 1


async def test_nothing_is_remembered_of_users_who_have_gone() -> None:
    capacity = capacity_for(2)
    for number in range(300):
        await opened(capacity, f"{chr(1000 + number)}")
    assert len(capacity._served) <= 2
