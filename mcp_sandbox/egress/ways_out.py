"""The ways out as the server has them: it starts their process, and hands over what that serves.

The process has no key: what needs one it asks for, by the number of a way. It is started with the
first need, and again when it ends: connections that were open are lost then, and nothing else is.
"""

import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from subprocess import DEVNULL

import anyio
from anyio.abc import ByteStream, Process, TaskGroup

from mcp_sandbox.backends.local_socket import SocketStream
from mcp_sandbox.egress.link import Files, Link, Rate, carry
from mcp_sandbox.egress.process.walls import NAMES
from mcp_sandbox.egress.rules import EgressRules, write_rule
from mcp_sandbox.errors import BackendUnavailable, Busy, OperatorError, SandboxError, SandboxGone
from mcp_sandbox.models import ChatId
from mcp_sandbox.runner.wire.protocol import MAX_PAYLOAD, ProtocolError
from mcp_sandbox.runtime.call import JsonObject
from mcp_sandbox.runtime.channel import Channel, own_tasks

logger = logging.getLogger(__name__)

_START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from mcp_sandbox.egress.process.child import main; main()"
)
# How long it may take to serve; how soon it is started again; how long it may take to end.
_READY_S, _PAUSE_S, _END_S = 10.0, 0.2, 1.0
# How soon it has to answer; after two that it does not, it is taken for stuck.
_ASKED_S = 10.0
# Kept for what is no connection, and the most that it makes sense to have of these.
_KEPT_FILES, _MOST = 256, 1024
# How long a call waits for a door, and how soon one is tried again without a call.
_CALL_S, _AGAIN_S = 2.0, 5.0

LOST = "the process that connects to the outside ended, and is started again"


async def _know_nothing(_: JsonObject) -> JsonObject:
    return {"refused": "the server knows nothing of it", "verdict": "failed"}


def most_connections() -> int:
    """Return how many connections this process may have, with descriptors kept for all else."""
    return min(_MOST, max(8, (getrlimit(RLIMIT_NOFILE)[1] - _KEPT_FILES) // 2))


class Shares:
    """Who has how many of `most`: of these no user has more than half, and no chat an eighth."""

    def __init__(self, most: int) -> None:
        self._most, self._taken = most, Counter[ChatId | str]()

    @contextmanager
    def take(self, chat: ChatId) -> Generator[bool]:
        """Take one while the block lasts; yield False if there is no room."""
        taken, most, names = self._taken, self._most, (chat, chat.user)
        has_room = (
            taken[chat] < most // 8 and taken[chat.user] < most // 2 and taken.total() < 2 * most
        )
        taken.update(names if has_room else ())
        try:
            yield has_room
        finally:
            taken.subtract(names if has_room else ())
            for name in names:
                if not taken[name]:
                    del taken[name]


@dataclass(eq=False)
class Way:
    """A way out: of its `kind`, as `said`. `told` gets what the process tells of it.

    `asked` answers what it asks; `listening` is where it takes connections, if it does.
    """

    kind: str
    said: JsonObject
    told: Callable[[JsonObject, bytes, Files], None] = lambda *_: None
    asked: Callable[[JsonObject], Awaitable[JsonObject]] = _know_nothing
    listening: socket.socket | None = None
    number: int = 0
    port: int = 0  # Of its door while that is open.
    problem: SandboxError | None = None
    changed: anyio.Event = field(default_factory=anyio.Event)

    def change(self, port: int, problem: SandboxError | None = None) -> None:
        self.port, self.problem = port, problem
        before, self.changed = self.changed, anyio.Event()
        before.set()


@asynccontextmanager
async def open_ways_out(
    load_trusted: Callable[[], bytes], rules: EgressRules | None = None, upstream: str = ""
) -> AsyncGenerator["WaysOut"]:
    """Open them, without a process until there is need of it; what is open ends with the block."""
    async with own_tasks() as tasks:
        ways_out = WaysOut(tasks, load_trusted, rules or EgressRules(), upstream)
        tasks.start_soon(ways_out.run)
        yield ways_out


class WaysOut:
    """The ways out of all chats of a server, and the process that serves them."""

    def __init__(
        self, tasks: TaskGroup, load_trusted: Callable[[], bytes], rules: EgressRules, upstream: str
    ) -> None:
        self._tasks, self._load_trusted = tasks, load_trusted
        self._settings = {
            "allow": [*map(write_rule, rules.allow)],
            "deny": [*map(write_rule, rules.deny)],
            "upstream": upstream,
            "most": most_connections(),
        }
        self.visitors, self.refused = Shares(most_connections()), Shares(most_connections())
        self._ways: dict[int, Way] = {}
        self._numbers, self._lines = count(1), Rate(100, 1.0)
        self._wanted, self._ready = anyio.Event(), anyio.Event()
        self._link: Link | None = None
        self._is_looking = False
        self._problem: OperatorError | None = None  # Why the last attempt to start it failed.

    @asynccontextmanager
    async def open(self, way: Way) -> AsyncGenerator[Way]:
        """Have the process serve a way while the block lasts."""
        way.number = next(self._numbers)
        self._ways[way.number] = way
        self.begin()
        try:
            if self._link:
                self._tell_way(self._link, way)
            yield way
        finally:
            del self._ways[way.number]
            if self._link:
                self._link.tell("end", n=way.number)

    def begin(self) -> None:
        """Have the process started, if it does not run."""
        self._wanted.set()

    def take_news(self) -> None:
        """Take what the process has told by now."""
        if self._link:
            self._link.drain(_MOST)

    def renew_soon(self) -> None:
        """Have the process started anew if names are looked up by other files than when it began.

        It can read only those that there were.
        """
        if self._link and not self._is_looking:
            self._is_looking = True
            self._tasks.start_soon(self._renew, self._link)

    async def _renew(self, link: Link) -> None:
        if await anyio.to_thread.run_sync(_identify_names) != self._names:
            logger.warning("names are looked up in another way now")
            link.close()
        self._is_looking = False

    async def ask(self, what: str, way: Way) -> JsonObject:
        """Ask the process; the answer is empty if it has ended."""
        if self._link and way.number in self._ways:
            with suppress(anyio.BrokenResourceError):
                return await self._link.ask(what, n=way.number)
        return {}

    async def connect(self, way: Way) -> SocketStream:
        """Return a connection that is served by a way. Raises ClosedResourceError: it has ended."""
        if way.number not in self._ways:
            raise anyio.ClosedResourceError
        link = await self.up()
        ours, theirs = _pair()
        link.tell("stream", theirs, n=way.number)
        return ours

    def hand_over(self, stream: ByteStream) -> socket.socket:
        """Return a socket for the process that has what is sent by a stream, and sends by it."""
        if isinstance(stream, SocketStream):
            return stream.hand_over()
        ours, theirs = _pair()
        self._tasks.start_soon(carry, stream, ours)
        return theirs

    async def up(self) -> Link:
        """Return when the process serves. Raises OperatorError: it cannot be started."""
        self.begin()
        with anyio.move_on_after(_READY_S):
            await self._ready.wait()
            if self._link:
                return self._link
        raise self._problem or BackendUnavailable(
            "the process of the ways out does not start: the server's log says why"
        )

    async def run(self) -> None:
        """Keep the process running once it was wanted; wait ever longer if it ends at once."""
        pause_s = _PAUSE_S
        while True:
            await self._wanted.wait()
            began_s = anyio.current_time()
            try:
                await self._serve()
            except (OSError, OperatorError, ProtocolError) as exc:
                self._problem = exc if isinstance(exc, OperatorError) else None
                logger.warning("the process of the ways out cannot be started: %s", exc)
                self._end_wait()
            lost = BackendUnavailable(LOST)
            for way in self._ways.values():
                way.change(0, lost)
            if not self._ways:
                self._wanted = anyio.Event()
            lived = anyio.current_time() - began_s > _READY_S
            pause_s = _PAUSE_S if lived else min(2 * pause_s, _READY_S)
            await anyio.sleep(pause_s)

    async def _serve(self) -> None:
        """Start the process, and hear it until it ends."""
        trusted = await anyio.to_thread.run_sync(self._load_trusted)
        self._names = await anyio.to_thread.run_sync(_identify_names)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = await _start(theirs)
            link = Link(ours, self._told, lambda said: self._ways[said["n"]].asked(said))
            await self._hear(process, link, trusted)
        logger.warning(
            "the process of the ways out ended (%s): its open connections are lost, and it is "
            "started again",
            process.returncode,
        )

    async def _hear(self, process: Process, link: Link, trusted: bytes) -> None:
        try:
            begun = json.dumps({**self._settings, "trusted": trusted.decode("ascii")}).encode()
            for at in range(0, len(begun), MAX_PAYLOAD):
                more = at + MAX_PAYLOAD < len(begun)
                link.tell("begin", payload=begun[at : at + MAX_PAYLOAD], more=more)
            # The listener of all previews, which is the oldest, must know their names first.
            for way in reversed(self._ways.values()):
                self._tell_way(link, way)
            self._link = link
            async with own_tasks() as tasks:
                tasks.start_soon(_watch, link)
                await link.run()
        finally:
            self._link = None
            self._end_wait()
            # It ends with the link. To kill a process that has just ended loses its exit code.
            with anyio.move_on_after(_END_S, shield=True) as limit:
                await process.wait()
            with anyio.CancelScope(shield=True):
                if limit.cancelled_caught:
                    process.kill()
                await process.aclose()

    def _end_wait(self) -> None:
        """Have those told who wait for it that it does not serve."""
        before, self._ready = self._ready, anyio.Event()
        before.set()

    def _tell_way(self, link: Link, way: Way) -> None:
        files = [way.listening.dup()] if way.listening else []
        link.tell(way.kind, *files, payload=json.dumps(way.said).encode(), n=way.number)

    def _told(self, said: JsonObject, payload: bytes, files: Files) -> None:
        if said["t"] == "ready":
            self._ready.set()
            return
        if said["t"] == "log":
            line = str(said["line"])[:500].encode("unicode_escape").decode("ascii")
            if not self._lines.take():
                logger.warning("%s", line)
            return
        way = self._ways.get(said["n"])
        if way and said["t"] == "open":
            way.change(int(said["port"]))
        elif way and said["t"] == "ended":
            kind = Busy if said["busy"] else SandboxGone
            way.change(0, kind(str(said["why"])[:500] or "the door was closed"))
        elif way:
            way.told(said, payload, files)
        else:
            for each in files:
                each.close()


class Door:
    """A door of one open sandbox that leads to a way, from `run` until it is closed."""

    def __init__(  # noqa: PLR0913 - of a sandbox, of a way, and how
        self,
        ways_out: WaysOut,
        way: Way,
        open_channel: Callable[[], Awaitable[ByteStream]],
        token: bytes,
        tell: Callable[[str], object] = lambda _: None,
        *,
        at: int = 0,
        most: int = 64,
        shared: bool = False,
    ) -> None:
        self._ways_out, self.way, self._tell = ways_out, way, tell
        self._open_channel, self._token = open_channel, token
        self._said: JsonObject = {"at": at, "most": most, "shared": shared}
        self._scope = anyio.CancelScope()
        self.close = self._scope.cancel
        self.error: SandboxError | None = None  # Why the last attempt to open it failed.
        self._tried, self._wanted = anyio.Event(), anyio.Event()

    async def ready(self) -> None:
        """Return when it is open, or an attempt to open it has failed."""
        self._wanted.set()
        with anyio.move_on_after(_CALL_S):
            await self._tried.wait()

    async def run(self) -> None:
        """Keep it open, at one port; open it again whenever it was closed. The way is open."""
        told = False
        with self._scope:
            while True:
                was_open = await self._open()
                if was_open and isinstance(self.way.problem, BackendUnavailable):
                    self._tell(f"network: {LOST}; connections that were open are lost")
                if isinstance(self.error, Busy) and not told:
                    self._tell(f"network: nothing leaves this computer: {self.error}")
                told = isinstance(self.error, Busy)
                self._tried.set()
                self._tried, self._wanted = anyio.Event(), anyio.Event()
                with anyio.move_on_after(0 if was_open else _AGAIN_S):
                    await self._wanted.wait()

    async def _open(self) -> bool:
        """Open it, and return when it has ended, or at once if it cannot be opened."""
        try:
            await self._ask_to_open()
        except (SandboxError, OSError) as exc:
            failed = f"no door can be opened: {exc}"
            self.error = exc if isinstance(exc, SandboxError) else BackendUnavailable(failed)
            logger.info("a door is closed, and is tried again: %s", exc)
            return False
        self.error, self._said["at"] = None, self.way.port
        self._tried.set()
        while self.way.port:
            await self.way.changed.wait()
        return True

    async def _ask_to_open(self) -> None:
        link, way = await self._ways_out.up(), self.way
        channel = Channel(await self._open_channel(), self._token, "doors")
        await channel.prove()
        theirs = self._ways_out.hand_over(channel.stream)
        if link.ended:
            theirs.close()
            raise BackendUnavailable(LOST)
        way.change(0)
        link.tell("channel", theirs, n=way.number, **self._said)
        # The process gives a sandbox half of that, and says so.
        with anyio.move_on_after(2 * _READY_S):
            while not (way.port or way.problem):
                await way.changed.wait()
        if not way.port:
            raise way.problem or SandboxGone("the sandbox opened no door in time")


async def _start(link: socket.socket) -> Process:
    """Start the process in a fresh interpreter: a copy of this one would hold every key."""
    places = await anyio.to_thread.run_sync(lambda: [*map(os.path.abspath, sys.path)])
    command = [sys.executable, "-I", "-S", "-c", _START, str(link.fileno()), *places]
    return await anyio.open_process(
        command,
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=None,
        cwd="/",
        env={},
        start_new_session=True,
        pass_fds=(link.fileno(),),
    )


async def _watch(link: Link) -> None:
    """End a process that no longer answers: all that it serves would wait for it."""
    missed = 0
    while missed < 2 and not link.ended:
        await anyio.sleep(_ASKED_S)
        with anyio.move_on_after(_ASKED_S) as limit, suppress(anyio.BrokenResourceError):
            await link.ask("alive", n=0)
        missed = limit.cancelled_caught and missed + 1
    link.close()


def _pair() -> tuple[SocketStream, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return SocketStream(ours), theirs


def _identify_names() -> list[tuple[int, int]]:
    """Return which files say how names are looked up; the process cannot open others later."""
    found = list[tuple[int, int]]()
    for path in map(Path, NAMES):
        with suppress(OSError):
            status = path.stat()
            found.append((status.st_dev, status.st_ino))
    return found
