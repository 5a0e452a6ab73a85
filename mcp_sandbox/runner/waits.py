"""One caller of a command: it owns it or looks on, hears output live, and is answered once."""

from __future__ import annotations

from mcp_sandbox.runner.protocol import OpError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.command import Command
    from mcp_sandbox.runner.connection import Reply

_LIVE_WINDOW = 512 * 1024  # Two pieces: one is read while the other is on its way.
_MOST_UNTIL = 200 * 4


class Wait:
    """A call that waits for a command's end, for a text in its output, or until it is released.

    The owner's is the one that started it: if it is cancelled, the command is killed. When the
    owner is answered before the end, the command goes on, and is nobody's.
    """

    def __init__(
        self, reply: Reply, command: Command, args: dict[str, Any], *, owns: bool = False
    ) -> None:
        self.command = command
        self.owns = owns
        # Not only what was printed since the last answer.
        self.whole = bool(args.get("whole"))
        self.met = False
        # All of stdout is the caller's; it is read on only as the caller takes it.
        self.takes = bool(args.get("take"))
        self._reply = reply
        self._live = _LIVE_WINDOW if self.takes or args.get("live") else 0
        self._until = (args.get("until") or "").encode()
        self._last: dict[str, bytes] = {}
        self._released = False
        if len(self._until) > _MOST_UNTIL:
            raise OpError("invalid", "the text to wait for is too long")
        if "text" in args:
            command.type(args["text"], args["key"])
        command.waits.append(self)

    def begin(self) -> None:
        """Look on: what is waited for may be there already."""
        for name, held in self.command.held():
            if not self._reply.is_open:
                return
            # What is left out before it is not there to be joined to.
            self._last.pop(name, None)
            self.hear(name, held)
        if self._reply.is_open and self.command.has_ended:
            self.command.leave(self)

    def feed(self, data: bytes, *, more: bool) -> None:
        self.took(len(data))
        self.command.feed(data, more=more)

    def took(self, size: int) -> None:
        """So much of what the caller gives was taken, and more may come."""
        self._reply.credit(size)

    @property
    def is_full(self) -> bool:
        """The caller is to take what was printed before anything more is read."""
        return self.takes and self._live <= 0

    def credit(self, size: int) -> None:
        was_full = self.is_full
        self._live += size
        if was_full and not self.is_full:
            self.command.read_on("stdout")

    def hear(self, name: str, data: bytes) -> None:
        if self.takes:
            if name == "stdout":
                self._live -= len(data)
                self._reply.data("body", data)
        # Live output is a courtesy: without credit it is left out, the result has it all.
        elif self._live >= len(data):
            self._live -= len(data)
            self._reply.data(name, data)
        if self._until and not self.met:
            seen = self._last.get(name, b"") + data
            self.met = self._until in seen
            self._last[name] = seen[max(0, len(seen) - len(self._until) + 1) :]
            if self.met:
                self.release()

    def release(self) -> None:
        """The caller waits no longer; it is answered when it is sure that the command runs."""
        self._released = True
        self.look()

    def look(self) -> None:
        if self._released and self.command.runs and self in self.command.waits:
            self.command.leave(self)

    def cancel(self) -> None:
        """End what the caller has started; who only looks on leaves it alone."""
        if self.owns:
            self.command.kill("cancelled")
        else:
            if self in self.command.waits:
                self.command.waits.remove(self)
            self.fail("cancelled", "the wait was cancelled; what it waited for goes on")

    def done(self, result: dict[str, Any], payload: bytes) -> None:
        self._reply.done({**result, "until_met": self.met}, payload)

    def fail(self, code: str, message: str) -> None:
        self._reply.fail(code, message)
