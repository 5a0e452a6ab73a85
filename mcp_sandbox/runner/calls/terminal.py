"""A person's shell or command, on a terminal of its own or on pipes; frames carry both directions.

It runs below a worker, which ends with it, and with the worker all that the shell left running.
"""

from __future__ import annotations

import errno
import os
import select
import time

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.native import signal
from mcp_sandbox.runner.wire import terminal_frames
from mcp_sandbox.runner.wire.terminal_frames import DATA, SIZE, STDERR, FrameError
from mcp_sandbox.runner.workers import programs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SHELL = "/bin/bash"
_PIECE = 64 * 1024
# Where the kernel has no pidfd: how often to check for the shell's end.
_LOOK_MS = 100
_LAST_LOOKS, _LAST_LOOK_S = 20, 0.05
# Output of background processes after the shell's end may be endless.
_REST = 1024 * 1024


def run(args: dict[str, Any], typed: int, output: int, *_more: object) -> dict[str, Any]:
    """Serve a shell until it ends or the person leaves; OpError if it cannot be started."""
    pid, *_ = started = _start(args)
    try:
        status = _Terminal(started, typed, output).run()
    finally:
        # Leftovers outside the shell's session end with this worker. Where the kernel has no
        # subreapers they stay, as leftovers of commands do.
        for left in processes.map_parents():
            if processes.read_session(left) == pid:
                processes.send(left, signal.SIGKILL)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    if code is not None and code < 0:
        return {"exit_code": None, "signal": -code}
    return {"exit_code": code, "signal": None}


def _start(args: dict[str, Any]) -> tuple[int, int, dict[int, bytes]]:
    """Start the shell; return its pid, its input, and its outputs with their kind of frame."""
    programs.enter(args["cwd"])
    env = programs.drop_unwatched(args["env"]) if args["tty"] else args["env"]
    command = ["-c", 'exec "$@"', "bash", *args["command"]] if args["command"] else []
    job = {**args, "program": _SHELL, "argv": ["bash", *command], "env": env}
    try:
        if args["tty"]:
            master, slave = os.openpty()
            # Before the program starts, which may ask for it at once.
            programs.resize(slave, *args["size"])
            theirs, keys, outputs = [slave] * 3, os.dup(master), {master: DATA}
        else:
            (stdin, keys), (out, stdout), (err, stderr) = os.pipe(), os.pipe(), os.pipe()
            theirs, outputs = [stdin, stdout, stderr], {out: DATA, err: STDERR}
        pid = programs.begin(job, theirs)
    except OSError as exc:
        raise programs.cannot_start(_SHELL, exc) from exc
    for end in {*theirs}:
        os.close(end)
    programs.lower_priority(pid, grow=args["grow"])
    return pid, keys, outputs


class _Terminal:
    """Copies in both directions without ever blocking on one of them."""

    def __init__(self, started: tuple[int, int, dict[int, bytes]], typed: int, output: int) -> None:
        self._pid, self._keys, self._outputs = started
        self._tty = os.isatty(self._keys)
        self._typed = typed
        self._shown = output
        self._frames = terminal_frames.Frames()
        self._to_shell = bytearray()
        self._to_person = bytearray()
        # Whether the shell's side of the terminal is closed by all.
        self._closed = self._typed_all = False
        self._shell: list[int] = []
        for end in (self._keys, *self._outputs, typed, output):
            os.set_blocking(end, False)

    def run(self) -> int | None:
        """Return the shell's wait status, or None when the person hung up."""
        look_ms = None
        try:
            self._shell.append(os.pidfd_open(self._pid))
        except (AttributeError, OSError):
            look_ms = _LOOK_MS
        while True:
            ready = dict(self._watched().poll(look_ms))
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            try:
                self._copy(ready)
            except (BrokenPipeError, EOFError, FrameError):
                return None
            if ended:
                self._show_rest()
                return status
            if self._closed:
                return self._last_status()

    def _watched(self) -> select.poll:
        """Return a poll that reads from one side only what the other has room for."""
        poll = select.poll()
        poll.register(self._typed, 0 if self._to_shell else select.POLLIN)
        poll.register(self._shown, select.POLLOUT if self._to_person else 0)
        if self._to_shell:
            poll.register(self._keys, select.POLLOUT)
        for end in (*self._shell, *(() if self._to_person else self._outputs)):
            poll.register(end, select.POLLIN)
        return poll

    def _copy(self, ready: dict[int, int]) -> None:
        if ready.get(self._typed):
            self._take_typed()
        self._type()
        if not self._to_person:
            self._to_person += self._take_shown()
        if ready.get(self._shown, 0) & select.POLLERR:
            raise BrokenPipeError
        if self._to_person:
            _put(self._shown, self._to_person)

    def _type(self) -> None:
        try:
            if self._to_shell:
                _put(self._keys, self._to_shell)
        except BrokenPipeError:
            self._to_shell.clear()
        if self._typed_all and not self._to_shell:
            self._typed_all = False
            os.close(self._keys)

    def _take_typed(self) -> None:
        """Read frames from the person; raise EOFError when the person hung up."""
        data = os.read(self._typed, _PIECE)
        if not data:
            raise EOFError
        for kind, content in self._frames.feed(data):
            if kind == DATA:
                self._to_shell += content or (b"\x04" if self._tty else b"")
                self._typed_all = not content and not self._tty
            elif kind == SIZE and self._tty:
                self._resize(*terminal_frames.rows_and_columns(content))

    def _resize(self, rows: int, columns: int) -> None:
        programs.resize(self._keys, rows, columns)
        try:
            os.tcgetpgrp(self._keys)
        except OSError:
            # gVisor signals no foreground group and does not name it: programs that are not
            # concerned ignore the signal.
            for pid in (
                self._pid,
                *processes.find_descendants([self._pid], processes.map_parents()),
            ):
                processes.send(pid, signal.SIGWINCH)

    def _take_shown(self) -> bytes:
        return b"".join([self._take_from(end) for end in [*self._outputs]])

    def _take_from(self, end: int) -> bytes:
        try:
            data = os.read(end, _PIECE)
        except BlockingIOError:
            return b""
        except OSError as exc:
            if exc.errno != errno.EIO:
                raise
            self._closed = True
            return b""
        return terminal_frames.frame(self._outputs[end] if data else self._outputs.pop(end), data)

    def _show_rest(self) -> None:
        """Send the shell's last output, for as long as it is read."""
        os.set_blocking(self._shown, True)
        left = _REST
        while left > 0 and (data := bytes(self._to_person) or self._take_shown()):
            self._to_person.clear()
            left -= len(data)
            try:
                os.write(self._shown, data)
            except BrokenPipeError:
                return

    def _last_status(self) -> int | None:
        """Return the wait status; the shell mostly ends just after its terminal is closed."""
        for _ in range(_LAST_LOOKS):
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                self._show_rest()
                return status
            time.sleep(_LAST_LOOK_S)
        return None


def _put(target: int, data: bytearray) -> None:
    try:
        del data[: os.write(target, data)]
    except BlockingIOError:
        return
