"""A server on stdin and stdout whose `exec` never ends by itself; started by test_stdio.py.

It writes to stdout, as a careless library would, and notes on stderr what becomes of a call.
"""

import sys
from typing import Any

import anyio

from mcp_sandbox.app.chats import on_signals
from mcp_sandbox.models import ExecResult
from mcp_sandbox.server.transports import serve_stdio
from tests.server.scripted import ScriptedSession, server_of


async def answer(what: Any, *_: Any, **__: Any) -> ExecResult:
    sys.stdout.write("stray output of the server\n")
    sys.stdout.flush()
    if what != "forever":
        return ExecResult(stdout=str(what), stderr="", exit_code=0, duration_ms=1)
    sys.stderr.write("call started\n")
    try:
        await anyio.sleep_forever()
    finally:
        sys.stderr.write("call cancelled\n")
    raise AssertionError


async def main() -> None:
    async with anyio.create_task_group() as tasks, on_signals(tasks.cancel_scope.cancel):
        await serve_stdio(server_of(ScriptedSession(answer)).core)
    sys.stderr.write("left cleanly\n")


if __name__ == "__main__":
    anyio.run(main)
