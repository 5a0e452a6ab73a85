"""A daemon for tests of the relay: `program.py SOCKET VERSION [stays]` serves scripted calls.

The first line and the server behind it are the real ones. `exec` with the command `forever` never
ends; anything else is echoed. What
happens is noted on stdout. It hands over by closing its door and leaving when its clients have
gone, unless it `stays`.
"""

import json
import os
import signal
import sys
from functools import partial
from typing import Any

import anyio
from anyio.abc import SocketListener, SocketStream, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream

from mcp_sandbox.models import ExecResult
from mcp_sandbox.server.server import SandboxServer
from mcp_sandbox.server.transports import serve_lines
from tests.server.scripted import ScriptedSession, server_of


def note(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


async def answer(what: Any, *_: Any, **__: Any) -> ExecResult:
    note(call=str(what))
    if what == "forever":
        try:
            await anyio.sleep_forever()
        finally:
            note(cancelled=str(what))
    return ExecResult(stdout=str(what), stderr="", exit_code=0, duration_ms=1)


async def greet(
    server: SandboxServer,
    version: str,
    tasks: TaskGroup,
    door: SocketListener | None,
    peer: SocketStream,
) -> None:
    async with peer:
        stream = BufferedByteReceiveStream(peer)
        first = json.loads(await stream.receive_until(b"\n", 8192))
        note(first=first)
        chat = first.get("chat")
        if chat == "refused":
            await say(peer, ok=False, error="no such chat; give another")
            return
        await say(peer, ok=True, version=version, pid=os.getpid(), chat=f"local/{chat}")
        if first["role"] == "chat":
            await serve_lines(server.core, stream, peer)
            note(gone=chat)
        elif door is None:
            await say(peer, error="there is no such command")
        elif first["command"] == "hand-over":
            await door.aclose()
            await say(peer, result={})
            tasks.cancel_scope.cancel()


async def say(peer: SocketStream, **fields: Any) -> None:
    await peer.send(json.dumps(fields).encode() + b"\n")


async def main(path: str, version: str, leaves: bool) -> None:
    server = server_of(ScriptedSession(answer))
    async with await anyio.create_unix_listener(path) as door, anyio.create_task_group() as tasks:
        note(listening=path)
        await door.serve(partial(greet, server, version, tasks, door if leaves else None), tasks)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    anyio.run(main, sys.argv[1], sys.argv[2], "stays" not in sys.argv)
