"""Notes each step of an event loop that took too much of its own thread's processor time.

A wall clock would tell of the machine's other work. A step that loads modules is a start, and one
of a test's own task is the test's: neither is a step of serving. Nor does the collection of garbage
count, of which a process that has run thousands of tests has much.
"""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

LIMIT_S = 0.2
# The task of a test and its fixtures, as anyio runs them, and of what a test runs by itself.
_TESTS = ("_run_tests_and_fixtures", "wrapper")
_run_step = asyncio.Handle._run


class _Garbage(threading.local):
    """What the collection of garbage took of one thread: two threads may be in it at once."""

    begun_s = took_s = 0.0

    def note(self, phase: str, _: object) -> None:
        if phase == "start":
            self.begun_s = time.thread_time()
        else:
            self.took_s += time.thread_time() - self.begun_s


def watch(note: Callable[[str], object], *, tests_too: bool = False) -> None:
    """Note from now on the long steps of all loops of this process, a line for each."""

    garbage = _Garbage()

    def run(handle: asyncio.Handle) -> None:
        modules, begun_s = len(sys.modules), time.thread_time()
        before_s = garbage.took_s
        _run_step(handle)
        took_s = time.thread_time() - begun_s - (garbage.took_s - before_s)
        if took_s > LIMIT_S and len(sys.modules) == modules:
            stack = list(_stack_of(getattr(handle, "_callback", None)))
            if tests_too or not _is_a_tests(stack):
                where = " > ".join(f"{code.co_filename}:{code.co_name}" for code in stack)
                note(f"{took_s * 1000:.0f} ms in a step of {where or handle}\n")

    gc.callbacks.append(garbage.note)
    asyncio.Handle._run = run  # type: ignore[assignment, method-assign]


def _stack_of(callback: Any) -> Iterator[CodeType]:
    """The coroutines of the task that a step belongs to, the outermost first."""
    task = getattr(callback, "__self__", None)
    coroutine = task.get_coro() if isinstance(task, asyncio.Task) else None
    while code := getattr(coroutine, "cr_code", None) or getattr(coroutine, "ag_code", None):
        yield code
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "ag_await", None)


def _is_a_tests(stack: list[CodeType]) -> bool:
    own = next((code for code in stack if "/anyio/" not in code.co_filename), None)
    is_run = own is not stack[0] and stack[0].co_name in _TESTS if stack else False
    return is_run or (own is not None and "/tests/" in own.co_filename)
