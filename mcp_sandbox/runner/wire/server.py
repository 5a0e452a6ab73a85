"""The server: accepts connections, starts calls, and ends the runner when it is unused."""

from __future__ import annotations

import os
import sys
import time

from mcp_sandbox.runner.calls.command import Command, Wait
from mcp_sandbox.runner.calls.doors import Dial, DoorTable
from mcp_sandbox.runner.calls.operation import Operation
from mcp_sandbox.runner.calls.table import ProcessTable
from mcp_sandbox.runner.files.kept import base_of
from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.loop import READ, DeferredAction, Loop
from mcp_sandbox.runner.kernel.native import Socket, accept, signal
from mcp_sandbox.runner.wire.connection import Connection
from mcp_sandbox.runner.wire.protocol import OpError, ProtocolError
from mcp_sandbox.runner.workers.notebooks import Notebooks
from mcp_sandbox.runner.workers.pool import MOST_NAMED, Pool, describe_processes
from mcp_sandbox.runner.workers.warm_shell import WarmShell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.kernel.loop import Timer
    from mcp_sandbox.runner.wire.connection import OpenCall, Reply

_MOST_CONNECTIONS = 32
_MOST_UNPROVED = 16
# The connection that asked for the end gets its answer first, and then closes.
_FAREWELL_S = 1.0
_LULL_S = 0.02
_COUNT_S = 1.0

_TOO_MANY = b"[ended: more than %d terminals were open in the sandbox; open fewer at a time]\n"

# Where the client's folder is mounted, if any.
_PROJECT = "/project"


class Server:
    """The main object of pid 1."""

    def __init__(
        self,
        settings: dict[str, str],
        env: dict[str, str],
        listener: Socket,
        warm: tuple[int, Socket],
    ) -> None:
        self.token = bytes.fromhex(settings["TOKEN"])
        self.loop = Loop()
        self._workspace = settings.get("WORKSPACE", "/workspace")
        self._idle_s = float(settings.get("IDLE_S", "900"))
        self._env = env
        self._pool = Pool(self.loop, env, int(settings.get("PIDS", "0")))
        self._pool.on_quiet = self._consider_idle
        self._notebooks = Notebooks(self.loop, self._pool)
        self._standby = WarmShell(self.loop, self._pool, self._under_way)
        self._pool.on_background = self._tell_background
        self._table = ProcessTable(
            self._tell_background, lambda row: self._tell_all({"t": "ended", "processes": [row]})
        )
        self._told: dict[str, Any] = describe_processes([])
        self._life = os.urandom(8).hex()
        self.used_at = time.monotonic()
        self._retiring: Connection | None = None
        self._connections: set[Connection] = set()
        self._doors = DoorTable(self.loop)
        self._idle: Timer | None = None
        self._count = 0
        self._listener = listener
        self.loop.watch(listener.fileno(), READ, self._accept)
        if os.getpid() == 1:
            # Only user code could send it: backends end a sandbox by SIGKILL from outside.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            self.loop.on_signal(signal.SIGTERM, self.stop)
        self._pool.spares.interpreter.adopt(*warm)
        self._awaited = True
        self._most_terminals = int(settings.get("TERMINALS", "64"))
        self._counting = DeferredAction(self.loop, _COUNT_S, self._bound_terminals)

    def run(self) -> None:
        self._consider_idle()
        self.loop.run()

    def stop(self) -> None:
        """Kill everything in the sandbox, then leave the loop."""
        for connection in [*self._connections]:
            connection.close()
        for pid in processes.freeze([os.getpid()]):
            processes.send(pid, signal.SIGKILL)
        self.loop.stop()

    def _accept(self, _events: int) -> None:
        try:
            sock = accept(self._listener)
        except OSError:
            # The client is gone, or no descriptor is left: the next one may succeed.
            return
        unproved = sum(not connection.proved for connection in self._connections)
        if len(self._connections) >= _MOST_CONNECTIONS or unproved >= _MOST_UNPROVED:
            sock.close()
            return
        self._connections.add(Connection(self, sock))

    def _hosts(self) -> list[Connection]:
        """Return the connections that count as use: with the token proved, and not for doors."""
        return [each for each in self._connections if each.proved and not each.for_doors]

    def proved(self, connection: Connection) -> None:
        """Prepare workers for a connection that has proved the token and will call soon."""
        if connection.for_doors:
            return
        if self._awaited:
            # Only now: it runs the chat's start-up files, and before its proof the host has checked
            # the sandbox from outside.
            self._awaited = False
            self._pool.spares.prepare(is_python=True)
        # A call already on its way comes first.
        self.loop.call_later(_LULL_S, self._pool.spares.prepare)
        self._consider_idle()

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if connection is self._retiring:
            self.loop.call_later(0, self.stop)
        self._consider_idle()

    def _tell_background(self) -> None:
        background = self._in_background()
        if background != self._told:
            self._told = background
            self._tell_all({"t": "background", **background})

    def _tell_all(self, header: dict[str, Any]) -> None:
        for connection in self._hosts():
            connection.send(header)

    def _in_background(self) -> dict[str, Any]:
        """Return background processes: commands with an id first, then leftovers of others."""
        started = [
            {"pid": each.main or 0, "command": each.text, "id": each.id}
            for each in self._table.in_background()
        ]
        others = describe_processes(self._pool.background())
        named = [*started, *others["background"]][:MOST_NAMED]
        return {"background": named, "background_total": len(started) + others["background_total"]}

    def _calls(self) -> list[OpenCall]:
        """Return the calls; a look at the size of files is no use."""
        calls = (call for each in self._hosts() for call in each.calls.values())
        return [each for each in calls if not (isinstance(each, Operation) and each.looks)]

    def _under_way(self) -> int:
        """Return the number of calls; connections to ports inside do not count."""
        return sum(not isinstance(call, Dial) for call in self._calls())

    def _consider_idle(self) -> None:
        """Start the idle timer when no host is connected and nothing runs; else stop it."""
        if self._hosts() or not self._pool.quiet:
            if self._idle:
                self._idle.cancel()
            self._idle = None
        elif self._idle is None:
            self._idle = self.loop.call_later(self._idle_s, self._stop_if_idle)

    def _stop_if_idle(self) -> None:
        self._idle = None
        if self._in_background()["background_total"]:
            self._consider_idle()
        else:
            self.stop()

    def describe(self) -> dict[str, Any]:
        workspace = os.stat(self._workspace)
        return {
            "python": ".".join(map(str, sys.version_info[:3])),
            "workspace_inode": workspace.st_ino,
            "workspace_changed_ns": workspace.st_ctime_ns,
            "project": _identify_folder(_PROJECT),
            "ended": self._table.untold(),
            "life": self._life,
            **self._told,
        }

    def open_call(
        self, connection: Connection, reply: Reply, header: dict[str, Any], body: bytes
    ) -> None:
        """Start a call, or answer it at once. May raise OpError."""
        number, op, args = header["id"], header["op"], header["args"]
        if connection.for_doors:
            connection.calls[number] = self._doors.open_call(reply, op, args)
        elif call := self._call(connection, reply, op, args):
            connection.calls[number] = call
            call.start(body, more=bool(header.get("more")))
            if header.get("release"):
                self.release(call)

    def release(self, call: OpenCall) -> None:
        if isinstance(call, Wait):
            call.release()

    def _call(
        self, connection: Connection, reply: Reply, op: str, args: dict[str, Any]
    ) -> Operation | Wait | Dial | None:
        """Return the call, not yet started; None if it was answered at once. May raise OpError."""
        if not isinstance(args, dict):
            raise ProtocolError("arguments are not an object")
        if self._retiring:
            raise OpError("retired", "the sandbox is about to end")
        self._pool.waking.plan()
        self._counting.plan()
        if op == "run":
            args = self._complete(args)
            tools = self.loop, self._pool, self._notebooks, self._standby
            command = Command(*tools, self._table.note, args)
            return Wait(reply, command, op, args)
        if op in ("wait", "stop", "type"):
            return self._about(reply, op, args)
        if op == "dial":
            return Dial(self.loop, reply, args)
        if op not in ("ping", "status", "retire", "processes", "told"):
            args = self._complete(args) if op == "terminal" else args
            return Operation(self.loop, self._pool, reply, op, args)
        answer: dict[str, Any] = self._status(args) if op == "status" else {}
        if op == "processes":
            answer = {"processes": [*self._table.rows(), *self._notebooks.rows()]}
        elif op == "told":
            self._table.tell(args["processes"])
        elif op == "retire":
            why = self._retire(connection, background_too=bool(args.get("background_too")))
            connection.leaving = why == "users" and bool(args.get("leaving"))
            answer = {"why": why}
        reply.done(answer)
        return None

    def _bound_terminals(self) -> None:
        """End the newest command, or all that runs on, while it has too many of the host's."""
        too_many = processes.count_terminals() > self._most_terminals
        if too_many and not self._table.end_newest(_TOO_MANY % self._most_terminals):
            self._pool.kill_background(idle_too=True)
        if not self._pool.quiet or self._notebooks.notebooks:
            self._counting.plan()

    def _about(self, reply: Reply, op: str, args: dict[str, Any]) -> Wait | None:
        """Return a call about a command; a notebook's name stands for its current cell."""
        name = str(args.get("process"))
        notebook = self._notebooks.notebooks.get(name)
        if notebook and op == "stop" and not notebook.listener:
            self._notebooks.stop(name, reply.done)
            return None
        return Wait(reply, self._table.find(notebook.cell if notebook else name), op, args)

    def _users(self) -> list[Connection]:
        return [each for each in self._hosts() if not each.leaving]

    def _status(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the state; with `stop_background`, kill what runs there if no call is under way.

        Notebooks and unused workers may write, too: they are killed if nothing else runs.
        """
        calls, found = self._under_way(), self._in_background()
        stops = bool(args.get("stop_background")) and not calls
        if stops:
            for each in self._table.in_background():
                each.told = True
                each.kill("stopped")
            self._pool.kill_background(idle_too=not found["background"])
            names = [] if found["background"] else self._notebooks.notebooks
            found["background"] += [{"pid": 0, "command": "notebook", "id": name} for name in names]
            found["background_total"] += len(names)
        return {
            "connections": len(self._users()),
            "calls": calls,
            "stopped": stops,
            "idle_s": 0.0 if calls else time.monotonic() - self.used_at,
            **found,
        }

    def _retire(self, asking: Connection, *, background_too: bool) -> str:
        """Begin to end, unless others use the sandbox; return who does, or "".

        No event can come between the check and the end: there is one thread.
        """
        others = [each for each in self._users() if each is not asking]
        if others:
            return "users"
        if self._calls():
            return "calls"
        if not background_too and self._in_background()["background_total"]:
            return "background"
        self._retiring = asking
        self.loop.unwatch(self._listener.fileno())
        self._listener.close()
        self.loop.call_later(_FAREWELL_S, self.stop)
        return ""

    def _complete(self, args: dict[str, Any]) -> dict[str, Any]:
        self._count += 1
        name = f"{os.getpid():x}{self._count:x}-{os.urandom(3).hex()}"
        return {
            "timeout_s": None,
            "keep_bytes": 64 * 1024 * 1024,
            "grow": True,
            "memory": 0,
            **args,
            "cwd": args.get("cwd") or self._workspace,
            "env": {**self._env, **(args.get("env") or {})},
            # What a shell must take from this call instead of from its saved state.
            "moves": bool(args.get("cwd")),
            "given": list(args.get("env") or {}),
            "workspace": self._workspace,
            "name": name,
            "kept": base_of(name),
        }


def _identify_folder(path: str) -> list[int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_dev, found.st_ino, found.st_ctime_ns]
