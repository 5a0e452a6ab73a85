"""The streams of a command: where they lead, the part in memory, and the file of all output."""

from __future__ import annotations

import os

from mcp_sandbox.runner.files import kept
from mcp_sandbox.runner.kernel.loop import CHUNK, DRAIN, PipeReader, widen_pipe
from mcp_sandbox.runner.kernel.native import close
from mcp_sandbox.runner.wire.protocol import WINDOW, OpError
from mcp_sandbox.runner.workers import figures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol

    from mcp_sandbox.runner.calls.terminal_input import TerminalInput
    from mcp_sandbox.runner.kernel.loop import Loop

    class OutputListener(Protocol):
        """Receives output live; while it `is_full`, no more of stdout is read."""

        @property
        def is_full(self) -> bool: ...
        def on_output(self, name: str, data: bytes) -> None: ...


HALF = 32 * 1024
# Results are cut at about 30 kB of text: longer output is also written to a file.
KEEP_OVER = 20_000
_LITTLE, _GATHER_S = 4096, 0.002
_MOST_STDIN = 256 * 1024 * 1024


class OutputBuffer:
    """Head and tail of one stream."""

    def __init__(self) -> None:
        self.head = bytearray()
        self.tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = HALF - len(self.head)
        if room > 0:
            self.head += data[:room]
            data = data[room:]
        if data:
            self.tail += data[-HALF:]
            if len(self.tail) > 2 * HALF:
                del self.tail[:-HALF]

    def since(self, start: int = 0) -> tuple[bytes, bytes]:
        """Return what head and tail hold of the output after the first `start` bytes."""
        tail = bytes(self.tail[-HALF:])
        return bytes(self.head[start:]), tail[max(0, start - self.total + len(tail)) :]

    def parts(self, start: int = 0) -> list[bytes]:
        """Return the bytes of this in memory: two parts if something between them was dropped."""
        head, tail = self.since(start)
        return [head + tail] if len(head) + len(tail) == self.total - start else [head, tail]

    def shrink(self) -> None:
        """Drop the head when the command has ended and its tail is long enough."""
        if self.tail:
            self.head.clear()
            del self.tail[:-HALF]


class Capture:
    """Both streams of one command, and the file that keeps them in order of arrival."""

    def __init__(self, base: str, limit: int) -> None:
        self.streams = {"stdout": OutputBuffer(), "stderr": OutputBuffer()}
        self._base, self._path = base, base + ".txt"
        # The file with all output, once a result cannot hold it.
        self.file: str | None = None
        self._left = limit
        self._fd = -1

    def add(self, name: str, data: bytes) -> None:
        if sum(stream.total for stream in self.streams.values()) + len(data) > KEEP_OVER:
            self.keep()
        if self._fd >= 0:
            self._keep(data)
        self.streams[name].add(data)

    def close(self) -> None:
        """Close the file: it is complete, and may be deleted later."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            kept.in_use.discard(os.path.basename(self._path))

    def figures(self) -> list[str]:
        """Return the paths of the pictures that the command has saved; see `workers.figures`."""
        found = figures.list_saved_figures(self._base)
        try:
            if found:
                kept.within(self._path, kept.clear)
        except OSError:
            # Show the files all the same.
            pass
        return found

    def keep(self) -> None:
        """Create the file and write the output so far, which the heads still hold completely."""
        if self.file or not self._left:
            return
        try:
            kept.within(self._path, kept.clear)
            self._fd = kept.create(self._path)
        except OSError:
            # The disk is full or the home cannot be written: keep head and tail, and name no file.
            self._left = 0
            return
        self.file = self._path
        kept.in_use.add(os.path.basename(self._path))
        for stream in self.streams.values():
            self._keep(stream.head)

    def _keep(self, data: bytes | bytearray) -> None:
        piece = data[: self._left]
        try:
            written = os.write(self._fd, piece) if piece else 0
        except OSError:
            self._left = 0
            return
        self._left = self._left - written if written == len(piece) else 0


class Streams:
    """All streams of one command. Its worker gets `theirs`: stdin, stdout, stderr, maybe code."""

    keyboard: TerminalInput | None = None

    def __init__(self, loop: Loop, args: dict[str, Any], hearers: Sequence[OutputListener]) -> None:
        self._loop = loop
        self._tty, self._takes = bool(args.get("tty")), bool(args.get("take"))
        self._hearers = hearers
        self.capture = Capture(args["kept"], args["keep_bytes"])
        # How much of each stream earlier answers have contained, in bytes.
        self._answered = self._looked_at = dict.fromkeys(self.capture.streams, 0)
        self._taps: dict[str, PipeReader] = {}
        self.theirs: list[int] = []
        self._stdin: int | None = None

    def open(self) -> None:
        """Make pipes or a terminal; OpError if none can be made."""
        if self._tty:
            from mcp_sandbox.runner.calls.terminal_input import TerminalInput  # noqa: PLC0415 - for these alone

            self.keyboard = TerminalInput(self._loop)
            self._listen(stdout=self.keyboard.master)
            self.theirs = self.keyboard.theirs
            return
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self._listen(stdout=out_read, stderr=err_read)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self.theirs = [nothing, out_write, err_write]

    def use(self, ours: tuple[int, int], theirs: list[int]) -> None:
        """Take the pipes of a program that was started before its command was known."""
        self.theirs = theirs
        self._listen(stdout=ours[0], stderr=ours[1])

    def give(self, code: bytes, *, on_stdin: bool) -> None:
        file = _make_memory_file(code)
        os.lseek(file, 0, os.SEEK_SET)
        if on_stdin:
            os.close(self.theirs[0])
            self.theirs[0] = file
        else:
            self.theirs.append(file)

    def begin_input(self, data: bytes) -> None:
        self._stdin = _make_memory_file(data)

    def feed(self, data: bytes, *, more: bool) -> bool:
        """Add to the input; return whether it is complete. OpError if it is over 256 MiB."""
        if self._stdin is None:
            return False
        if os.fstat(self._stdin).st_size + len(data) > _MOST_STDIN:
            why = "more input than 256 MiB: put it into a file, and read that"
            raise OpError("too_large", why)
        os.write(self._stdin, data)
        if not more:
            os.lseek(self._stdin, 0, os.SEEK_SET)
            os.close(self.theirs[0])
            self.theirs[0], self._stdin = _flowing(self._stdin), None
        return not more

    def _listen(self, **pipes: int) -> None:
        if self._takes:
            widen_pipe(pipes["stdout"], CHUNK)
        for name, pipe in pipes.items():
            self._tap(name, pipe)

    def _tap(self, name: str, pipe: int) -> None:
        self._taps[name] = PipeReader(self._loop, pipe, lambda data: self._take(name, data))

    def _take(self, name: str, data: bytes) -> None:
        if data:
            if not (self._takes and name == "stdout"):
                self.capture.add(name, data)
            if self.keyboard:
                self.keyboard.note(data)
            if len(data) < _LITTLE:
                # A program that prints line by line would wake the loop for every line.
                self._taps[name].pause()
                self._loop.call_later(_GATHER_S, lambda: self.read_on(name))
            for each in [*self._hearers]:
                each.on_output(name, data)
                if each.is_full and name == "stdout":
                    self._taps[name].pause()

    def read_on(self, name: str) -> None:
        """Resume reading a stream, unless a caller has no room for more of it."""
        if name != "stdout" or not any(each.is_full for each in self._hearers):
            self._taps[name].resume()

    def drain(self) -> None:
        for tap in self._taps.values():
            # The last read may go beyond the caller's credit: by at most what a pipe holds,
            # for which the caller has room.
            tap.drain(WINDOW if self._takes else DRAIN)

    def held(self) -> list[tuple[str, bytes]]:
        """Return what is in memory of each stream since it was looked at, with its name."""
        parts = {name: s.parts(self._looked_at[name]) for name, s in self.capture.streams.items()}
        return [(name, part) for name, both in parts.items() for part in both if part]

    def answer(self, *, looked: bool) -> dict[str, int]:
        """Mark all output as answered; return how much of each stream was answered before."""
        before = self._answered
        self._answered = {name: each.total for name, each in self.capture.streams.items()}
        self._looked_at = self._answered if looked else self._looked_at
        return before

    def printed(self, answered: dict[str, int] | None) -> tuple[dict[str, Any], bytes]:
        """Return the output after these offsets (from the start if None): its sizes, its bytes."""
        streams = self.capture.streams
        starts = answered or dict.fromkeys(streams, 0)
        ends = [part for name, each in streams.items() for part in each.since(starts[name])]
        result = {
            "sizes": [len(part) for part in ends],
            "starts": [starts[name] for name in streams],
            "totals": [stream.total for stream in streams.values()],
            "output_file": self.capture.file,
        }
        return result, b"".join(ends)

    def shrink(self) -> None:
        for stream in self.capture.streams.values():
            stream.shrink()

    def close(self, *, read_on: bool) -> None:
        """Close all; with `read_on` keep reading, and drop, what programs still write."""
        close(self.theirs)
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None
        if self.keyboard:
            self.keyboard.close()
        for tap in self._taps.values():
            tap.discard() if read_on else tap.close()
        self.capture.close()


def _make_memory_file(data: bytes) -> int:
    file = os.memfd_create("given", os.MFD_CLOEXEC)
    os.write(file, data)
    return file


def _flowing(file: int) -> int:
    """Return a pipe that holds the file's bytes, or the file itself if they do not fit."""
    theirs, ours = os.pipe()
    widen_pipe(ours)
    os.set_blocking(ours, False)
    size, sent = os.fstat(file).st_size, 0
    try:
        sent = os.sendfile(ours, file, 0, size) if size <= WINDOW else 0
    except OSError:
        sent = -1
    os.close(ours)
    if sent == size:
        os.close(file)
        return theirs
    os.close(theirs)
    return file
