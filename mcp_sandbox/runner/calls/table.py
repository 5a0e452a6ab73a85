"""Commands by id: which run, which have ended, and whether a call has reported their end."""

from __future__ import annotations

import os
import time

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.wire.protocol import OpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from mcp_sandbox.runner.calls.command import Command

# Each takes four descriptors of pid 1.
MOST_RUNNING = min(64, os.sysconf("SC_OPEN_MAX") // 8)
_MOST_ENDED = 32
_ENDED_S = 3600.0
_LETTERS = "23456789abcdefghjkmnpqrstuvwxyz"
_NAMED = 20


class ProcessTable:
    """Commands that outlived their call or left what does; ended ones: 32, of the last hour."""

    def __init__(
        self, on_change: Callable[[], None], ended: Callable[[dict[str, Any]], None]
    ) -> None:
        """Call `told` when the list changes, `ended` with the row of an end that no call saw."""
        self._count = 0
        # Random for each sandbox: an id from an earlier one never names another command.
        self._sandbox = "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(3))
        self._running: dict[str, Command] = {}
        self._ended: dict[str, Command] = {}
        self._changed = on_change
        self._on_end = ended

    def note(self, command: Command) -> None:
        """Track a command that begins, outlives its call, or has ended.

        At its begin it gets its id; OpError when too many run, or its shell is busy.
        """
        if not command.id:
            self._enter(command)
            return
        if command.has_ended or not command.released:
            self._running.pop(command.id, None)
        if not (command.released or command.keeper):
            self._ended.pop(command.id, None)
            return
        if command.has_ended:
            self._ended[command.id] = command
            self._forget_old()
            if not command.told:
                self._on_end(command.row())
        self._changed()

    def _enter(self, command: Command) -> None:
        shell = command.shell
        busy = [each for each in self._running.values() if each.shell == shell] if shell else []
        if busy:
            raise OpError(
                "busy",
                f"a shell runs one command at a time, and {shell!r} is busy with "
                f"{busy[0].id} ({busy[0].text}): wait for its end, stop it, or take another shell",
            )
        released = self.in_background()
        if len(released) >= MOST_RUNNING:
            named = ", ".join(f"{each.id} ({each.text})" for each in released[:_NAMED])
            raise OpError(
                "busy",
                f"{len(released)} processes run in this sandbox, and no more may: end some with "
                f"process action=stop. They are {named}, …",
            )
        self._count += 1
        command.id = f"p{self._count}-{self._sandbox}"
        self._running[command.id] = command

    def find(self, number: object) -> Command:
        """Return the command with this id; OpError that lists the known ids."""
        self._forget_old()
        known = {**self._ended, **self._running}
        if isinstance(number, str) and number in known:
            return known[number]
        there = ", ".join(known) or "none"
        why = f"there is no process {str(number)[:60]!r}"
        if isinstance(number, str) and number.partition("-")[2] not in ("", self._sandbox):
            why = f"{number[:60]!r} is of an earlier sandbox of this chat, and ended with it"
        raise OpError("not_found", f"{why}; there are: {there} (process action=list)")

    def in_background(self) -> list[Command]:
        return [each for each in self._running.values() if each.released]

    def end_newest(self, why: bytes) -> bool:
        """Kill the command that began last, which then says why; False if none runs."""
        for newest in [*self._running.values()][-1:]:
            newest.streams.capture.add("stderr", why)
            newest.kill("stopped")
        return bool(self._running)

    def untold(self) -> list[dict[str, Any]]:
        self._forget_old()
        return [each.row() for each in self._ended.values() if not each.told]

    def tell(self, numbers: list[str]) -> None:
        for each in filter(None, map(self._ended.get, numbers)):
            each.told = True

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows, the newest last, with the memory of what runs in bytes."""
        self._forget_old()
        tree, rows = processes.map_parents(), []
        for each in [*self._ended.values(), *self._running.values()]:
            left = {"running": True, "of": "left running"} if each.keeper else {}
            top = each.keeper or each.main or -1
            pids = {each.main or -1, *processes.find_descendants([top], tree)}
            rows.append({**each.row(), **left, "memory": sum(map(processes.read_memory, pids))})
        return rows

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _ENDED_S
        for at, each in enumerate(reversed([*self._ended.values()])):
            if not each.keeper and (at >= _MOST_ENDED or each.ended_at < oldest):
                del self._ended[each.id]
