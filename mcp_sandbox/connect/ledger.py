"""What is under way between the client and one daemon after another."""

import json

from mcp_sandbox.connect.lines import Id, Message

SERVER_ERROR = -32000
# They only ask, so another daemon may be asked once more; a client would give up without them.
_HARMLESS = {
    "initialize",
    "ping",
    "prompts/list",
    "resources/list",
    "resources/templates/list",
    "server/discover",
    "tools/list",
}
_ENDED = (
    "the sandbox server ended during this call; files are kept; the call may or may not have run. "
    "Look what is there before you repeat it: the next call finds or starts another server"
)


class Ledger:
    """Open requests of both sides, and the handshake of a client of the older era."""

    def __init__(self) -> None:
        self._open = dict[Id, Message | None]()
        self._asked = dict[Id, None]()
        self._opening: Message | None = None
        self.handshake: Message | None = None
        self.confirmation: Message | None = None

    def note_sent(self, message: Message) -> None:
        """Remember a message of the client that the daemon has got whole."""
        if message.is_request and message.id is not None:
            may_repeat = message.method in _HARMLESS and not message.repeated
            self._open[message.id] = message if may_repeat else None
            if message.method == "initialize":
                self._opening = message
        elif message.method == "notifications/initialized":
            self.confirmation = message
        elif message.cancels is not None:
            # A cancelled request is never answered.
            self._open.pop(message.cancels, None)

    def note_received(self, message: Message) -> None:
        """Remember a message of the daemon."""
        if message.id is None:
            return
        if message.is_request:
            self._asked[message.id] = None
            return
        self._open.pop(message.id, None)
        if self._opening is not None and message.id == self._opening.id:
            self.handshake = self.handshake if message.failed else self._opening
            self._opening = None

    def is_expected(self, message: Message) -> bool:
        """Whether this daemon waits for that answer: the question may have been another's."""
        if message.id not in self._asked:
            return False
        del self._asked[message.id]
        return True

    def repeatable(self) -> list[Message]:
        """Take out the open requests that another daemon may get; each only once."""
        taken = {number: message for number, message in self._open.items() if message}
        for number, message in taken.items():
            message.repeated = True
            del self._open[number]
        return list(taken.values())

    def end(self) -> bytes:
        """Forget what was under way with a daemon that has gone; returns what to say to clients."""
        lines = [_error(number, SERVER_ERROR, _ENDED) for number in self._open]
        lines += [_cancelled(number) for number in self._asked]
        self._open.clear()
        self._asked.clear()
        self._opening = None
        return b"".join(lines)


def refusal(message: Message, reason: str) -> bytes:
    """The answer to a request that was not passed on."""
    return _error(message.id, SERVER_ERROR, f"this was not passed on, so nothing ran: {reason}")


def _error(number: Id | None, code: int, reason: str) -> bytes:
    return _line({"id": number, "error": {"code": code, "message": reason}})


def _cancelled(number: Id) -> bytes:
    params = {"requestId": number, "reason": "the sandbox server has ended"}
    return _line({"method": "notifications/cancelled", "params": params})


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode() + b"\n"
