"""One chat's client, which starts its server, or its relay, again whenever that is killed."""

import math
import os
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters
from mcp.shared.exceptions import MCPError
from mcp.types import TextContent

from mcp_sandbox.server.errors import sole_error
from tests.e2e.endurance.tally import Tally

ROOT = Path(__file__).parents[3]
USER = "endurance"
REPLY_S = 90.0
_CONNECT_S = 60.0
_ENDED = "The sandbox ended during this call"
# What a relay says that goes on, when its daemon has gone.
_RELAYED = ("the sandbox server ended during this call", "so nothing ran")
_ERAS = ("auto", "legacy")


class Unanswered(Exception):
    """A call ended without an answer: nobody knows whether it was done."""


class Chat:
    """Calls tools of one chat, and knows when a failure has a cause."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        tally: Tally,
        *,
        pid_file: Path,
        era: int = 0,
    ) -> None:
        """`command` serves the chat on stdin and stdout; `era`: which protocol comes first."""
        self.name = name
        self.tally = tally
        self._pid_file = pid_file
        self._era = era
        # The shell notes the number of the process that becomes the server.
        note = 'echo $$ >"$0"; exec "$@"'
        self._server = StdioServerParameters(
            command="/bin/sh",
            args=["-c", note, str(pid_file), *command],
            env=dict(environment),
            cwd=ROOT,
        )
        self._client: Client | None = None
        self._ready = anyio.Event()
        self._lost = anyio.Event()
        self._over = False
        self._troubles = 0
        self._kills = 0
        self._healed = 0
        # Who wants to see every result, and to know when a call without one began, and its words.
        self.heard: list[Callable[[Any], None]] = []
        self.cut: list[Callable[[float, str], None]] = []

    async def serve(self) -> None:
        """Keep a server running until `stop`; first with one protocol era, then the other."""
        started = self._era
        while not self._over:
            kills = self._kills
            try:
                with sole_error(), anyio.fail_after(_CONNECT_S) as limit:
                    await self._connect(_ERAS[started % 2], limit)
            except (MCPError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
                if kills == self._kills or isinstance(exc, TimeoutError):
                    self.tally.fault("servers that did not start", f"{self.name}: {exc!r}")
            started += 1

    async def _connect(self, era: str, limit: anyio.CancelScope) -> None:
        self._lost = anyio.Event()
        async with Client(self._server, mode=era) as client:
            limit.deadline = math.inf
            self.tally.count("servers started")
            self._client = client
            self._ready.set()
            await self._lost.wait()
            self._ready = anyio.Event()

    def stop(self) -> None:
        """Let the server go: its client closes stdin."""
        self._over = True
        self._lost.set()

    def kill_server(self) -> bool:
        """SIGKILL it, wherever it is; False when there is none."""
        try:
            pid = int(self._pid_file.read_text())
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return False
        if self.name.encode() not in line:
            return False
        self.note_kill()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._lost.set()
        return True

    def drop(self) -> bool:
        """Let the client go without a word, under its calls; another one comes."""
        self.note_kill()
        self._lost.set()
        return self._ready.is_set()

    def note_kill(self) -> None:
        """Something of this chat is about to be killed: calls may fail until one succeeds."""
        self._kills += 1

    @contextmanager
    def in_trouble(self) -> Generator[None]:
        """While the block runs calls may fail, even after one succeeded; then as after a kill."""
        self._troubles += 1
        self.note_kill()
        try:
            yield
        finally:
            self._troubles -= 1
            self.note_kill()

    async def call(self, tool: str, **arguments: object) -> Any:
        """The result of a tool that must succeed.

        Raises:
            Unanswered: it did not; the tally knows whether that has a cause.
        """
        while not self._ready.is_set():
            await self._ready.wait()
        client, kills = self._client, self._kills
        wounded = self._troubles > 0 or kills > self._healed
        assert client is not None
        self.tally.count("calls")
        began = time.time()
        try:
            with anyio.fail_after(REPLY_S):
                result = await client.call_tool(tool, dict(arguments))
        except TimeoutError as exc:
            self.tally.fault("lost replies", f"{self.name}: {tool} {_short(arguments)}")
            raise Unanswered from exc
        except (MCPError, anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            self._judge(repr(exc), excused=wounded or kills != self._kills, usual=True)
            for learn in self.cut:
                learn(began, str(exc))
            if client is self._client and not any(told in str(exc) for told in _RELAYED):
                self._lost.set()
            raise Unanswered from exc
        text, excused = text_of(result), wounded or kills != self._kills
        for hear in self.heard:
            hear(result)
        if result.is_error or (excused and _failed(result)):
            self._judge(text, excused=excused, usual=_ENDED in text)
            raise Unanswered(text)
        self._healed = max(self._healed, kills)
        self.tally.count("answered")
        return result

    def _judge(self, told: str, *, excused: bool, usual: bool) -> None:
        if not excused:
            self.tally.fault("errors without a cause", f"{self.name}: {told[:600]}")
        elif usual:
            self.tally.count("ended by a kill")
        else:
            self.tally.oddity("odd errors after a kill", f"{self.name}: {told[:600]}")


def text_of(result: Any) -> str:
    """All text of a result."""
    return "".join(block.text for block in result.content if isinstance(block, TextContent))


def _failed(result: Any) -> bool:
    """Whether it is of a command that ended with another exit code than 0."""
    return bool((result.meta or {}).get("mcp-sandbox/result", {}).get("exit_code"))


def _short(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={str(value)[:60]!r}" for name, value in arguments.items())
