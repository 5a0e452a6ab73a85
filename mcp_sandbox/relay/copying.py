"""Copies whole lines between the client and one daemon after another, in one loop.

Only whole lines are passed on: what a daemon left half written never reaches the client, and a
line that had not gone out whole goes to the next daemon, since none can have acted on it.
Reading waits for writing, so a slow reader slows the writer on the other side.
"""

import json
import os
import re
import select
import time
from _socket import SHUT_WR
from collections import deque
from collections.abc import Callable

from mcp_sandbox.relay.place import CHUNK_BYTES, DaemonLink, DaemonUnavailable, NotRunning, say

Id = int | str
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
# The server refuses a line of 32 MiB by itself, and needs no more of it for that.
LONGEST_FROM_CLIENT = 33 << 20
LONGEST_FROM_SERVER = 64 << 20
GRACE_S = 3.0
"""How long nothing may move after the client has closed its side: a bit more than the server's."""
PAUSE_S = 2.0
"""After a failure to reach a daemon no other attempt is made for so long."""
LONGEST_READ_WHOLE = 64 << 10
# In text without escapes: a whole string, or a bracket.
_TOKEN = re.compile(rb'"[^"]*+"|[{}\[\]]')


class TooLong(Exception):
    """A line passed the limit."""


class LineBuffer:
    """Collects bytes until lines are whole."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._rest = bytearray()
        self._dropping = False

    def feed(self, data: bytes) -> bytes:
        """Return the lines that are whole now, with their ends.

        Raises TooLong: the last line, which has no end yet, is too long.
        """
        if self._dropping:
            _, end, data = data.partition(b"\n")
            self._dropping = not end
        whole, end, rest = data.rpartition(b"\n")
        if end:
            lines = b"".join((self._rest, whole, end))
            self._rest = bytearray(rest)
            return lines
        self._rest += rest
        if len(self._rest) > self._longest:
            raise TooLong
        return b""

    def cut_short(self) -> bytes:
        """Return the beginning of the last line as if it ended there; the rest is dropped."""
        beginning = bytes(self._rest) + b"\n"
        self._rest.clear()
        self._dropping = True
        return beginning


class Message:
    """A line and what is known of it: its id, its method, and the request that it speaks of."""

    def __init__(self, line: bytes) -> None:
        self.line = line
        self.repeated = False
        fields = _top_level(line)
        method, params = fields.get("method"), fields.get("params")
        self.id = _id(fields.get("id"))
        self.method = method if isinstance(method, str) else None
        self.is_request = self.id is not None and self.method is not None
        self.is_answer = "method" not in fields and ("result" in fields or "error" in fields)
        # A server has something to say to a request, and to what cannot be read.
        self.needs_server = self.is_request or (self.method is None and not self.is_answer)
        self.failed = "error" in fields
        self.cancels: Id | None = None
        if method == "notifications/cancelled" and isinstance(params, dict):
            self.cancels = _id(params.get("requestId"))


def parse_messages(lines: bytes) -> list[Message]:
    """Return the messages of whole lines; blank lines are none."""
    return [Message(line + b"\n") for line in lines.split(b"\n") if line.strip()]


def _id(value: object) -> Id | None:
    return value if isinstance(value, int | str) and not isinstance(value, bool) else None


def _top_level(line: bytes) -> dict[str, object]:
    """Return the fields of an object; none of what cannot be read."""
    if len(line) > LONGEST_READ_WHOLE:
        line = outline(line)
    try:
        fields = json.loads(line) if len(line) <= LONGEST_READ_WHOLE else None
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def outline(line: bytes) -> bytes:
    """Return the JSON without what lies deeper than its parameters, and long texts.

    A message of megabytes is known by this at the price of copying it.
    """
    plain = line.replace(rb"\\", b"..").replace(rb"\"", b"..")
    parts = list[bytes]()
    depth = start = 0
    for token in _TOKEN.finditer(plain):
        first, size = plain[token.start()], token.end() - token.start()
        if first in b"{[":
            depth += 1
            if depth == 3:
                parts.append(line[start : token.end()])
                start = len(line)
        elif first in b"}]":
            if depth == 3:
                start = token.start()
            depth -= 1
        elif depth < 3 and size > 1024:
            parts.append(line[start : token.start()] + b'""')
            start = token.end()
    parts.append(line[start:])
    return b"".join(parts)


class OpenRequests:
    """Open requests of both sides, and the handshake of a client of the older era."""

    def __init__(self) -> None:
        self._open = dict[Id, Message | None]()
        self._asked = dict[Id | None, bool]()
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
        if message.id is None:
            return
        if message.is_request:
            self._asked[message.id] = True
            return
        self._open.pop(message.id, None)
        if self._opening is not None and message.id == self._opening.id:
            self.handshake = self.handshake if message.failed else self._opening
            self._opening = None

    def is_expected(self, message: Message) -> bool:
        """Say whether this daemon waits for that answer: the question may have been another's."""
        return self._asked.pop(message.id, False)

    def repeatable(self) -> list[Message]:
        """Take out the open requests that another daemon may get; each only once."""
        taken = {number: message for number, message in self._open.items() if message}
        for number, message in taken.items():
            message.repeated = True
            del self._open[number]
        return list(taken.values())

    def end(self) -> bytes:
        """Forget what was under way with a daemon that has gone; returns what to say to clients."""
        lines = [_error(number, _ENDED) for number in self._open]
        for number in self._asked:
            params = {"requestId": number, "reason": "the sandbox server has ended"}
            lines.append(_line({"method": "notifications/cancelled", "params": params}))
        self._open.clear()
        self._asked.clear()
        self._opening = None
        return b"".join(lines)


def _error(number: Id | None, reason: str) -> bytes:
    return _line({"id": number, "error": {"code": -32000, "message": reason}})


def _line(fields: dict[str, object]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **fields}).encode() + b"\n"


class ClientGone(Exception):
    """The reader of our output is gone."""


class LineRelay:
    """The two directions, and the connection that they use at the moment."""

    def __init__(self, reach: Callable[[], DaemonLink], link: DaemonLink | None) -> None:
        """Without a `link` the first request calls `reach`."""
        self._reach = reach
        self._link = link
        self._ever_connected = link is not None
        self._ledger = OpenRequests()
        self._from_client = LineBuffer(LONGEST_FROM_CLIENT)
        self._from_server = LineBuffer(LONGEST_FROM_SERVER)
        self._unsent = deque[Message]()
        self._sent_bytes = 0
        self._output = bytearray()
        self._ended = False
        self._failure = ""
        self._failed_at = -PAUSE_S

    def note_sent(self, early: bytes) -> None:
        """Take over what was read from the client before, of which whole lines have been sent."""
        for message in parse_messages(self._from_client.feed(early)):
            self._ledger.note_sent(message)

    def note_failure(self, reason: str) -> None:
        """Give requests this answer until the next attempt to reach a daemon."""
        self._failure, self._failed_at = reason, time.monotonic()
        say(reason)

    def run(self) -> int:
        """Copy until the client goes; returns the exit code."""
        try:
            while self._step():
                pass
        except ClientGone:
            return 0
        return 0 if self._ever_connected else 1

    def _step(self) -> bool:
        """Wait until something can move, and move it. False: everything is done."""
        if self._link is None and self._unsent and not self._output:
            self._connect()
        if self._ended and self._link is None and not (self._unsent or self._output):
            return False
        ready = self._ready()
        if 1 in ready:
            self._write(ready[1])
        if 0 in ready:
            self._read()
        if self._link is not None and self._link.fileno() in ready:
            self._receive(self._link)
        if self._link is not None and self._unsent:
            self._send(self._link)
        # After the end of input only what still moves is waited for.
        return bool(ready) or not self._ended

    def _ready(self) -> dict[int, int]:
        poll = select.poll()
        poll.register(1, select.POLLOUT if self._output else 0)
        if not self._unsent and not self._ended:
            poll.register(0, select.POLLIN)
        if self._link is not None:
            wanted = select.POLLIN if len(self._output) < 1 << 20 else 0
            wanted |= select.POLLOUT if self._unsent else 0
            if wanted:
                poll.register(self._link.fileno(), wanted)
        return dict(poll.poll(GRACE_S * 1000 if self._ended else None))

    def _read(self) -> None:
        try:
            data = os.read(0, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._ended = True
            self._half_close()
            return
        try:
            lines = self._from_client.feed(data)
        except TooLong:
            lines = self._from_client.cut_short()
        for message in parse_messages(lines):
            self._take(message)

    def _take(self, message: Message) -> None:
        if message.is_answer and not self._ledger.is_expected(message):
            return
        self._unsent.append(message)
        if self._link is None:
            self._keep_what_needs_a_server()

    def _keep_what_needs_a_server(self) -> None:
        """Drop what speaks only of things that were under way with a daemon that has gone."""
        if not any(message.needs_server for message in self._unsent):
            for message in self._unsent:
                self._ledger.note_sent(message)
            self._unsent.clear()

    def _send(self, link: DaemonLink) -> None:
        try:
            while self._unsent:
                message = self._unsent[0]
                self._sent_bytes += link.send(memoryview(message.line)[self._sent_bytes :])
                if self._sent_bytes == len(message.line):
                    self._unsent.popleft()
                    self._sent_bytes = 0
                    self._ledger.note_sent(message)
        except BlockingIOError:
            return
        except OSError:
            self._drain(link)
        else:
            self._half_close()

    def _half_close(self) -> None:
        if self._ended and self._link is not None and not self._unsent:
            try:
                self._link.shutdown(SHUT_WR)
            except OSError:
                self._drain(self._link)

    def _receive(self, link: DaemonLink) -> bool:
        """Take what has come. False: nothing more comes now, or never."""
        try:
            data = link.recv(CHUNK_BYTES)
            lines = self._from_server.feed(data)
        except BlockingIOError:
            return False
        except (OSError, TooLong):
            data = lines = b""
        self._output += lines
        for message in parse_messages(lines):
            self._ledger.note_received(message)
        if not data:
            self._lose(link)
        return bool(data)

    def _drain(self, link: DaemonLink) -> None:
        """Take what a daemon that does not listen any more has said before."""
        while self._receive(link):
            pass
        if self._link is link:
            self._lose(link)

    def _lose(self, link: DaemonLink) -> None:
        link.close()
        self._link = None
        self._sent_bytes = 0
        self._from_server = LineBuffer(LONGEST_FROM_SERVER)
        if not self._ended or self._unsent:
            self._unsent.extendleft(reversed(self._ledger.repeatable()))
            self._output += self._ledger.end()
        self._unsent = deque(message for message in self._unsent if not message.is_answer)
        self._keep_what_needs_a_server()

    def _write(self, state: int) -> None:
        if not state & select.POLLOUT:
            raise ClientGone
        try:
            # A pipe that is ready for writing takes this much without blocking.
            written = os.write(1, self._output[:4096])
        except BlockingIOError:
            return
        except OSError as exc:
            raise ClientGone from exc
        del self._output[:written]

    def _connect(self) -> None:
        """Find a daemon for the unsent messages, or answer them with why there is none."""
        if time.monotonic() >= self._failed_at + PAUSE_S:
            try:
                self._link = self._introduced()
            except DaemonUnavailable as exc:
                self.note_failure(str(exc))
            else:
                self._ever_connected = True
                return
        for message in self._unsent:
            if message.is_request:
                reason = f"this was not passed on, so nothing ran: {self._failure}"
                self._output += _error(message.id, reason)
        self._unsent.clear()

    def _introduced(self) -> DaemonLink:
        """Return a link on which the client can go on where it is."""
        try:
            return self._repeat_handshake(self._reach())
        except NotRunning:
            # It ended in that moment. The next one may live longer; a third is not tried.
            return self._repeat_handshake(self._reach())

    def _repeat_handshake(self, link: DaemonLink) -> DaemonLink:
        """Repeat the older era's handshake, of which the client has its answer already."""
        handshake, confirmation = self._ledger.handshake, self._ledger.confirmation
        if handshake is None:
            return link
        try:
            link.send_all(handshake.line)
            answer = Message(link.receive_line())
            while not (answer.is_answer and answer.id == handshake.id):
                self._output += answer.line
                answer = Message(link.receive_line())
            if confirmation is not None:
                link.send_all(confirmation.line)
        except (OSError, EOFError) as exc:
            link.close()
            raise NotRunning("the sandbox server ended again at once; see its log") from exc
        if answer.failed:
            link.close()
            text = answer.line[:500].decode(errors="replace").rstrip()
            raise DaemonUnavailable(f"the sandbox server takes no client of this kind: {text}")
        return link
