"""Copies whole lines between the client and one daemon after another, in one loop.

Only whole lines are passed on: what a daemon left half written never reaches the client, and a
line that had not gone out whole goes to the next daemon, since nobody can have acted on it.
Reading waits for writing, so a slow reader slows the writer on the other side.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable

from mcp_sandbox.connect.ledger import Ledger, refusal
from mcp_sandbox.connect.lines import Lines, Message, TooLong, messages
from mcp_sandbox.connect.link import CHUNK_BYTES, Link, NotRunning, Unavailable
from mcp_sandbox.connect.place import say

# The server refuses a line of 32 MiB by itself, and needs no more of it for that.
LONGEST_FROM_CLIENT = 33 << 20
LONGEST_FROM_SERVER = 64 << 20
GRACE_S = 3.0
"""How long nothing may move after the client has closed its side: a bit more than the server's."""
PAUSE_S = 2.0
"""After a failure to reach a daemon no other attempt is made for so long."""
_WAITING_BYTES = 1 << 20
# A pipe that is ready for writing takes this much without blocking.
_ATOMIC_BYTES = 4096


class ClientGone(Exception):
    """Nobody reads what we write."""


class Copying:
    """The two directions, and the connection that they use at the moment."""

    def __init__(self, reach: Callable[[], Link], link: Link | None) -> None:
        """Without a `link` the first request calls `reach`."""
        self._reach = reach
        self._link = link
        self._ever_connected = link is not None
        self._ledger = Ledger()
        self._from_client = Lines(LONGEST_FROM_CLIENT)
        self._from_server = Lines(LONGEST_FROM_SERVER)
        self._unsent = deque[Message]()
        self._sent_bytes = 0
        self._output = bytearray()
        self._ended = False
        self._failure = ""
        self._failed_at = -PAUSE_S

    def note_sent(self, early: bytes) -> None:
        """Take over what was read from the client before, of which whole lines have been sent."""
        for message in messages(self._from_client.feed(early)):
            self._ledger.note_sent(message)

    def note_failure(self, reason: str) -> None:
        """Requests get this answer until the next attempt to reach a daemon."""
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
            wanted = select.POLLIN if len(self._output) < _WAITING_BYTES else 0
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
        for message in messages(lines):
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

    def _send(self, link: Link) -> None:
        try:
            while self._unsent:
                message = self._unsent[0]
                rest = memoryview(message.line)[self._sent_bytes :]
                self._sent_bytes += link.send(rest)
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
                self._link.end_sending()
            except OSError:
                self._drain(self._link)

    def _receive(self, link: Link) -> bool:
        """Take what has come. False: nothing more comes now, or never."""
        try:
            data = link.receive()
            lines = self._from_server.feed(data)
        except BlockingIOError:
            return False
        except (OSError, TooLong):
            data = lines = b""
        self._output += lines
        for message in messages(lines):
            self._ledger.note_received(message)
        if not data:
            self._lose(link)
        return bool(data)

    def _drain(self, link: Link) -> None:
        """Take what a daemon that does not listen any more has said before."""
        while self._receive(link):
            pass
        if self._link is link:
            self._lose(link)

    def _lose(self, link: Link) -> None:
        link.close()
        self._link = None
        self._sent_bytes = 0
        self._from_server = Lines(LONGEST_FROM_SERVER)
        if not self._ended or self._unsent:
            self._unsent.extendleft(reversed(self._ledger.repeatable()))
            self._output += self._ledger.end()
        self._unsent = deque(message for message in self._unsent if not message.is_answer)
        self._keep_what_needs_a_server()

    def _write(self, state: int) -> None:
        if not state & select.POLLOUT:
            raise ClientGone
        try:
            written = os.write(1, self._output[:_ATOMIC_BYTES])
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
            except Unavailable as exc:
                self.note_failure(str(exc))
            else:
                self._ever_connected = True
                return
        for message in self._unsent:
            if message.is_request:
                self._output += refusal(message, self._failure)
        self._unsent.clear()

    def _introduced(self) -> Link:
        """Return a link on which the client can go on where it is."""
        try:
            return self._repeat_handshake(self._reach())
        except NotRunning:
            # It ended in that moment. The next one may live longer; a third is not tried.
            return self._repeat_handshake(self._reach())

    def _repeat_handshake(self, link: Link) -> Link:
        """Repeat the older era's handshake, of which the client has its answer already."""
        handshake, confirmation = self._ledger.handshake, self._ledger.confirmation
        if handshake is None:
            return link
        try:
            link.send_all(handshake.line)
            answer = self._answer_to(handshake, link)
            if confirmation is not None:
                link.send_all(confirmation.line)
        except (OSError, EOFError) as exc:
            link.close()
            raise NotRunning("the sandbox server ended again at once; see its log") from exc
        if answer.failed:
            link.close()
            said = answer.line[:500].decode(errors="replace").rstrip()
            raise Unavailable(f"the sandbox server takes no client of this kind: {said}")
        return link

    def _answer_to(self, request: Message, link: Link) -> Message:
        while True:
            message = Message(link.receive_line())
            if message.is_answer and message.id == request.id:
                return message
            self._output += message.line
