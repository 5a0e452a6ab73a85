"""The one way into a sandbox, for an agent's call, a person's shell and a program alike.

What the active skills leave -> no call while the server ends -> a place among the open sandboxes
-> room on the disk -> the call. How it ended is recorded once, for the log, figures and spans.
"""

import shlex
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from mcp_sandbox.errors import Draining, SandboxError
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.hold import Hold
from mcp_sandbox.sessions.rooms import Held
from mcp_sandbox.telemetry.calls import CallRecord, Count, recorded

Narrowed = Callable[[ChatId, str, Mapping[str, object]], None]

# A call that is not named here changes nothing, or only deletes.
_ACCESS = {
    "write_file": "write",
    "edit_file": "write",
    "move_file": "write",
    "run_code": "run",
    "exec": "run",
    "shell": "run",
}
# They take as long as a person likes.
_ENDLESS = ("shell", "preview", "door")


@dataclass(frozen=True)
class Action:
    """What is wanted of a chat's sandbox: `what` is the name of a tool, or "shell".

    `arguments` are as the caller gave them; `size` is how many bytes are to be written. Cancelling
    `leave` has the call answered before its end, if that can be.
    """

    chat: ChatId
    what: str
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    size: int = 0
    leave: anyio.CancelScope = field(default_factory=anyio.CancelScope)


@dataclass
class Entered:
    """An open sandbox during one call; `runtime` has the limits of this call.

    `full`: why nothing may be written. `stop` is cancelled when the call has written too much.
    `grew` is False once it is known that the call has changed no file. `leave` is the action's.
    """

    held: Held
    runtime: Runtime
    record: CallRecord
    leave: anyio.CancelScope
    full: SandboxError | None = None
    stop: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    grew: bool = True

    def leaving(self, wait_s: float | None) -> anyio.CancelScope:
        """The scope whose end has a call answered: after `wait_s`, or when it is cancelled."""
        if wait_s is not None:
            self.leave.deadline = anyio.current_time() + wait_s
        return self.leave


class Gate:
    """Lets calls in to the sandboxes of one manager, until it is closed."""

    def __init__(
        self, hold_of: Callable[[ChatId], Hold], narrow: Narrowed, count: Count | None = None
    ) -> None:
        """`narrow` raises for what a chat's skills leave out; `count` gets every call's record."""
        self._hold_of = hold_of
        self._narrow = narrow
        self._count = count
        self._calls = 0
        self._ended = anyio.Event()
        self._leaves: set[anyio.CancelScope] = set()
        self._closed: str | None = None
        self.closing = anyio.Event()

    def close(self, why: str) -> None:
        """Let no call in from now on; the first reason is the one that callers are told."""
        self._closed = self._closed or why
        self.closing.set()

    def let_go(self) -> None:
        """Have those calls answered that wait for a process; it goes on."""
        for leave in self._leaves:
            leave.cancel()

    async def wait_empty(self) -> None:
        """Return when all calls have ended that were let in."""
        while self._calls:
            self._ended = anyio.Event()
            await self._ended.wait()

    @asynccontextmanager
    async def enter(self, action: Action) -> AsyncGenerator[Entered]:
        """The chat's sandbox for one call, opened if need be.

        Raises:
            NotPermitted: the active skills leave no such call.
            OperatorError: no sandbox can be made, or the server ends.
            WorkspaceFull, StorageUnavailable: there is no room for what is to be written.
            SandboxGone: it died; the message says of what.
        """
        hold = self._hold_of(action.chat)
        async with self.passed(action) as record:
            endless, keeps = action.what in _ENDLESS, action.what == "door"
            async with hold.open_sandbox(endless=endless, keeps=keeps) as held:
                entered = Entered(held, held.runtime, record, action.leave)
                match _ACCESS.get(action.what, "read"):
                    case "read":
                        yield entered
                    case "write":
                        await hold.meter.check_room(action.size)
                        with held.guard.call():
                            yield entered
                    case "run":
                        if action.size:
                            await hold.meter.check_room(action.size)
                        # A command may grow files; in a full workspace it can look and delete, but
                        # not write.
                        full = entered.full = await hold.meter.problem()
                        answers = action.what != "shell"
                        try:
                            with held.guard.call(may_end=full is None, answers=answers) as stop:
                                entered.stop = stop
                                entered.runtime = held.runtime.bounded(
                                    stop if answers else None, may_grow=full is None
                                )
                                yield entered
                        finally:
                            hold.meter.note_change(grew=entered.grew)

    @asynccontextmanager
    async def passed(self, action: Action) -> AsyncGenerator[CallRecord]:
        """The same for what needs no open sandbox."""
        with recorded(action.what, self._count) as record:
            record.chat, record.backend = action.chat, self._hold_of(action.chat).backend
            # The tool that does what the action does, a command as one line.
            tool, given = action.what, action.arguments
            if tool == "process" and given.get("text"):
                # What is typed can be a command.
                given = {"command": given["text"]}
            tool = "exec" if "command" in given else tool
            command = given.get("command")
            if isinstance(command, list | tuple):
                given = {**given, "command": shlex.join(map(str, command))}
            self._narrow(action.chat, tool, given)
            # Whether it may be done is to be decided here, when there is something that decides.
            if self._closed:
                raise Draining(self._closed)
            self._calls += 1
            self._leaves.add(action.leave)
            try:
                yield record
            finally:
                self._leaves.discard(action.leave)
                self._calls -= 1
                self._ended.set()
