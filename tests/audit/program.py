"""A server's share in an audit: records calls, and prints the number of each answered one.

`python -m tests.audit.program FOLDER CALLS`; 0 calls are without end.
"""

import sys
from itertools import count
from pathlib import Path

import anyio
import anyio.lowlevel

from mcp_sandbox.audit import open_audit
from mcp_sandbox.config import AuditConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.gate import RecordedCall
from mcp_sandbox.telemetry.calls import CallRecord


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def main(folder: str, calls: str) -> None:
    settings = AuditConfig.model_validate({"max_file": "64k"})
    async with open_audit(Path(folder), settings) as audit:
        say("ready")
        for number in range(int(calls)) if int(calls) else count():
            record = CallRecord("exec", chat=ChatId("local", "a"))
            async with RecordedCall(audit, {"command": f"echo {number}"}, record):
                await anyio.lowlevel.checkpoint()
            say(number)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
