"""`shell`: this terminal becomes one of a chat's sandbox."""

import json
import os
import select
import shutil
import signal
import socket
import sys
import termios
import tty
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from typing import Annotated

import typer

from mcp_sandbox.cli.control import Chat
from mcp_sandbox.cli.options import started
from mcp_sandbox.config.environment import variable
from mcp_sandbox.daemon.control_client import open_control_call
from mcp_sandbox.errors import NoDaemon, OperatorError
from mcp_sandbox.runner.wire import terminal_frames

_PIECE = 64 * 1024
# What follows the chat is the command's own, also what looks like an option.
SETTINGS = {"allow_interspersed_args": False}


def shell(
    chat: Chat,
    command: Annotated[list[str] | None, typer.Argument(help="A program, or a line.")] = None,
) -> None:
    """Open a shell in the sandbox of a chat, or run a command; its exit code is theirs."""
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass  # A standard descriptor that is closed would become our socket.
    tty = os.isatty(0) and os.isatty(1)
    columns, rows = shutil.get_terminal_size()
    arguments = {"chat": chat, "rows": rows, "columns": columns, "term": variable("TERM")}
    given = (command or [])[(command or [])[:1] == ["--"] :]
    arguments |= {"tty": tty, "command": ["bash", "-c", *given] if len(given) == 1 else given}
    with started() as path, open_control_call(path, "shell", arguments) as talk:
        talk.receive()
        with _signals() as woken, _raw_terminal() if tty else nullcontext():
            code = _Joined(talk.connection, woken).run(bytes(talk.rest))
    raise typer.Exit(code)


@contextmanager
def _raw_terminal() -> Generator[None]:
    """Hand every key on as it is; the terminal is as it was before, however this ends."""
    before = termios.tcgetattr(0)
    try:
        # What was typed meanwhile is kept.
        tty.setraw(0, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextmanager
def _signals() -> Generator[int]:
    """Yield a descriptor that wakes at a change of the terminal's size; an end runs clean-ups."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    ends = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), lambda number, _: sys.exit(128 + number))
    handlers = {signal.SIGWINCH: lambda *_: None, **ends}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    waking = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(waking)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


class _Joined:
    """This terminal and the daemon, neither waiting for the other to take what it is sent."""

    def __init__(self, daemon: socket.socket, woken: int) -> None:
        self._daemon = daemon
        self._woken = woken
        self._frames = terminal_frames.Frames()
        self._to_daemon = bytearray()
        self._typing = True

    def run(self, already: bytes) -> int:
        """Return the exit code of the shell; OperatorError says why it ended otherwise."""
        self._daemon.setblocking(False)
        code = self._show(already)
        while code is None:
            daemon = self._daemon.fileno()
            typing = [0] if self._typing and not self._to_daemon else []
            sending = [daemon] if self._to_daemon else []
            ready, _, _ = select.select([daemon, self._woken, *typing], sending, [])
            # Before what was typed, which `select` may find ready while the signal is on its way.
            with suppress(BlockingIOError):
                os.read(self._woken, _PIECE)
                columns, rows = shutil.get_terminal_size()
                self._to_daemon += terminal_frames.size(rows, columns)
            if 0 in ready:
                typed = os.read(0, _PIECE)
                self._typing = bool(typed)
                self._to_daemon += b"".join(terminal_frames.frames(typed)) or terminal_frames.frame(
                    terminal_frames.DATA, b""
                )
            # A daemon that is gone is met when we read.
            with suppress(BlockingIOError, ConnectionError):
                del self._to_daemon[: self._daemon.send(self._to_daemon)]
            if daemon in ready:
                code = self._show(self._receive())
        return code

    def _receive(self) -> bytes:
        data = b""
        with suppress(ConnectionError):
            data = self._daemon.recv(_PIECE)
        if not data:
            raise NoDaemon("the daemon ended, and the shell with it; files are kept")
        return data

    def _show(self, data: bytes) -> int | None:
        for kind, content in self._frames.feed(data):
            if kind in (terminal_frames.DATA, terminal_frames.STDERR):
                _write(1 if kind == terminal_frames.DATA else 2, content)
            elif kind == terminal_frames.ERROR:
                raise OperatorError(content.decode("utf-8", "replace"))
            elif kind == terminal_frames.END:
                ended = json.loads(content)
                return int(128 + ended["signal"] if ended["signal"] else ended["exit_code"] or 0)
        return None


def _write(to: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(to, rest) :]
