"""`shell`, on a real terminal."""

import fcntl
import hashlib
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from tests.daemon.running import Place, command, in_chat, place, running
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR, UNSAFE, if_whole

BACKENDS = [BUBBLEWRAP, DOCKER, if_whole(UNSAFE), if_whole(GVISOR)]
WAIT_S = 15


class Screen:
    """A person's terminal with `mcp-sandbox shell` on it. Its methods block."""

    def __init__(self, master: int, slave: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.slave = slave
        self._master = master
        self._seen = b""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def shows(self, text: str) -> str:
        """Wait until it has shown this, since the last such wait; what it has shown before it."""
        while text.encode() not in self._seen:
            ready, _, _ = select.select([self._master], [], [], WAIT_S)
            assert ready, f"{text!r} is not in {self._seen.decode()!r}"
            self._seen += os.read(self._master, 65536)
        before, self._seen = self._seen.split(text.encode(), 1)
        return before.decode()

    def resize(self, rows: int, columns: int) -> None:
        set_size(self._master, rows, columns)

    def exit_code(self) -> int:
        # What is still shown must be taken, or the shell could not end.
        while self.process.poll() is None:
            time.sleep(0.01)
        return self.process.returncode


def set_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@contextmanager
def screen(where: Place, *arguments: str) -> Iterator[Screen]:
    master, slave = pty.openpty()
    set_size(master, 33, 111)
    process = subprocess.Popen(
        # The terminal must be its controlling one to tell it of a new size.
        ["setsid", "--ctty", *where.command("shell", *arguments)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**where.environment(), "TERM": "xterm"},
    )
    try:
        yield Screen(master, slave, process)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_shell_has_a_real_terminal(tmp_path: Path, backend: str) -> None:
    runtime = {"MCP_SANDBOX_DOCKER__RUNTIME": "runsc"} if backend == "docker-runsc" else {}
    where = place(tmp_path, backend.partition("-runsc")[0], more=runtime)

    def use() -> None:
        with screen(where, "a") as shown:
            shown.type("cat note; tty; stty size; echo $TERM$PAGER$GIT_EDITOR\n")
            shown.shows("by the agent\r\n")
            shown.shows("/dev/pts/")
            shown.shows("33 111\r\n")
            shown.shows("xterm\r\n")
            shown.resize(44, 77)
            shown.type("stty size\n")
            shown.shows("44 77\r\n")
            # As soon as it is resized the programs in it are told.
            wait = "trap 'stty size; exit' WINCH; echo trap''ped; while :; do sleep 0.1; done"
            shown.type(f"({wait})\n")
            shown.shows("trapped")
            shown.resize(20, 50)
            shown.shows("20 50\r\n")
            shown.type("exec sleep 600 & echo of the person > note; exit 7\n")
            assert shown.exit_code() == 7

    async with running(where), in_chat(where, "a") as client:
        await client.exec("echo by the agent > note")
        await to_thread.run_sync(use, abandon_on_cancel=True)
        assert await client.exec("cat note") == "of the person\n"
        assert "sleep 600" not in await client.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '") or (
            backend == "unsafe-local"
        )


async def test_a_command_has_the_terminal_that_it_is_started_on(tmp_path: Path) -> None:
    where = place(tmp_path)

    def use() -> None:
        with screen(where, "a", "--", "sh", "-c", "tty; stty size; read line; exit $line") as shown:
            shown.shows("/dev/pts/")
            shown.shows("33 111\r\n")
            shown.type("5\n")
            assert shown.exit_code() == 5

    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        await to_thread.run_sync(use, abandon_on_cancel=True)


async def test_keys_reach_the_shell_and_the_terminal_is_as_before_at_the_end(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)

    def use() -> None:
        with screen(where, "a") as shown:
            before = termios.tcgetattr(shown.slave)
            shown.type("echo rea''dy\n")
            shown.shows("ready")
            assert termios.tcgetattr(shown.slave) != before
            # Before it runs, the key would reach nobody.
            shown.type("sh -c \"echo beg''un; exec sleep 600\"; echo ended $?\n")
            shown.shows("begun\r\n")
            shown.type("\x03")
            shown.shows("$ ")
            shown.type("echo code $?\n")
            shown.shows("code 130\r\n")
            # Until it reads a line again, its terminal makes another character of this.
            shown.shows("$ ")
            shown.type("\x04")
            assert shown.exit_code() == 0
            assert termios.tcgetattr(shown.slave) == before

    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        await to_thread.run_sync(use, abandon_on_cancel=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
async def test_a_shell_whose_person_is_gone_ends_with_all_in_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    where = place(tmp_path)

    def use() -> list[str]:
        with screen(where, "a") as shown:
            before = termios.tcgetattr(shown.slave)
            shown.type("nohup sleep 600 & nohup setsid sleep 600 & echo pi''ds:$!:$$:\n")
            shown.shows("pids:")
            pids = shown.shows("\r\n").split(":")[:2]
            shown.process.send_signal(number)
            assert shown.exit_code() in (-number, 128 + number)
            if number != signal.SIGKILL:
                assert termios.tcgetattr(shown.slave) == before
            return pids

    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        for pid in await to_thread.run_sync(use, abandon_on_cancel=True):
            while "lives" in await client.exec(f"[ -e /proc/{pid} ] && echo lives; true"):
                await anyio.sleep(0.02)
        assert await client.exec("echo goes on") == "goes on\n"


async def test_much_output_and_much_input_come_whole(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        typed = b"".join(b"%d\n" % number for number in range(50_000))
        begin = f"head -c {len(typed)} | md5sum; seq 100000; exit 3\n".encode()
        done = await command(where, "shell", "a", stdin=begin + typed)
        assert done.code == 3
        assert hashlib.md5(typed).hexdigest() in done.out
        assert "\n".join(map(str, range(1, 100_001))) in done.out


async def test_a_shell_ends_with_its_sandbox_and_says_so(tmp_path: Path) -> None:
    where = place(tmp_path)

    def use() -> None:
        with screen(where, "a") as shown:
            shown.type("echo rea''dy\n")
            shown.shows("ready")
            subprocess.run(where.command("stop", "a"), env=where.environment(), check=True)
            shown.shows("error: ")
            assert shown.exit_code() == 1

    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        await to_thread.run_sync(use, abandon_on_cancel=True)


async def test_an_open_shell_keeps_the_daemon_up_until_it_must_end(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_SERVE__GRACE": "1s"})

    def use() -> None:
        with screen(where, "a") as shown:
            shown.type("echo rea''dy\n")
            shown.shows("ready")
            subprocess.run(where.command("shutdown"), env=where.environment(), check=True)
            shown.shows("error: the daemon ended")
            assert shown.exit_code() == 3

    async with running(where) as daemon, in_chat(where, "a") as client:
        await client.exec("true")
        await to_thread.run_sync(use, abandon_on_cancel=True)
        assert await daemon.end() == 0
