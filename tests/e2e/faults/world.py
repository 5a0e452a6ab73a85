"""One data root with a daemon that relays start, and the clients that work through them."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random

import anyio

from tests.e2e.endurance.chat import USER, Chat
from tests.e2e.endurance.places import Place as Machine
from tests.e2e.endurance.tally import Tally
from tests.e2e.endurance.worker import Worker
from tests.e2e.faults.ground import Ground
from tests.e2e.faults.runs import Runs, Starter
from tests.relay.relays import environment

# Relays by chat: two clients work in the first one at the same time.
CHATS = ("shared", "shared", "own", "other")
_WORKERS = 2
_GONE_S = 30.0


class World:
    """Who works where, and what can be done to them."""

    def __init__(self, ground: Ground, random: Random, tally: Tally) -> None:
        self.ground = ground
        self.place = place = ground.place
        self.random = random
        self.tally = tally
        self.machine = Machine(place.data, place.backend, set())
        self.chats = [self._chat(number, name) for number, name in enumerate(CHATS)]
        self.workers = {
            chat: [Worker(chat, f"r{n}w{m}", Random(random.random())) for m in range(_WORKERS)]
            for n, chat in enumerate(self.chats)
        }
        self.runs = {name: Runs(tally) for name in dict.fromkeys(CHATS)}
        self.starters = [
            Starter(chat, f"{chat.name}{n}", self.runs[chat.name], Random(random.random()))
            for n, chat in enumerate(self.chats)
        ]
        self._children: list[subprocess.Popen[bytes]] = []

    def _chat(self, number: int, name: str) -> Chat:
        return Chat(
            name,
            self.place.command("connect", "--user", USER, "--chat", name),
            environment(self.place),
            self.tally,
            pid_file=self.place.home / f"relay-{number}.pid",
            era=number % 2,
        )

    def everybody_in_trouble(self) -> ExitStack:
        """While it is open any call may fail, and the first ones after it."""
        stack = ExitStack()
        for chat in self.chats:
            stack.enter_context(chat.in_trouble())
        return stack

    def in_trouble(self, name: str) -> ExitStack:
        """The same for whoever works in one chat."""
        stack = ExitStack()
        # Only who is in trouble alone has lost something of its sandbox.
        self.runs[name].is_struck = True
        for chat in self.chats:
            if chat.name == name:
                stack.enter_context(chat.in_trouble())
        return stack

    def daemons(self) -> list[int]:
        """The daemons of this socket that are alive, however they were started."""
        return [pid for pid in _pids() if self._is_daemon(pid)]

    def _is_daemon(self, pid: int) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"serve" in words and os.fsencode(self.place.socket) in words

    async def kill_daemons(self) -> int:
        """SIGKILL them; returns how many there were, when they have gone."""
        found = self.daemons()
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(map(_is_alive, found)):
            await anyio.sleep(0.01)
        return len(found)

    def start_daemon(self, *program: str) -> subprocess.Popen[bytes]:
        """Start one as a relay does, tied to nothing; its program may be another."""
        command = self.place.command("serve")
        if program:
            command[1:3] = program
        with (self.place.home / f"daemon-{len(self._children)}.log").open("wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.place),
                cwd="/",
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def log_of(self, child: subprocess.Popen[bytes]) -> str:
        number = self._children.index(child)
        return (self.place.home / f"daemon-{number}.log").read_text()

    async def end(self) -> None:
        """Tell the daemon to end, as a person does, and see it go."""
        with anyio.move_on_after(_GONE_S) as limit:
            while found := self.daemons():
                for pid in found:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                await anyio.sleep(0.1)
        if limit.cancelled_caught:
            self.tally.fault("daemons that did not end", f"{found} after {_GONE_S:g} s")
            await self.kill_daemons()
        for child in self._children:
            child.wait()


def _is_alive(pid: int) -> bool:
    # One that has ended and that nobody has waited for yet has no program any more.
    return Path(f"/proc/{pid}/exe").exists()


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)
