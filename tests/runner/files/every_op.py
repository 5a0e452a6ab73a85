"""Runs each file operation once: for an interpreter that has nothing but the standard library.

Arguments: the folder that holds mcp_sandbox/runner, and a fresh workspace.
"""

import os
import sys

sys.path.insert(0, sys.argv[1])
os.environ["MCP_SANDBOX_WORKSPACE"] = os.environ["MCP_SANDBOX_HOME"] = sys.argv[2]

from mcp_sandbox.runner.files.operations import OPS
from mcp_sandbox.runner.wire.protocol import OpError


def call(op: str, body: bytes, args: "dict[str, object]") -> "tuple[object, bytes]":
    stdin, feeding = os.pipe()
    draining, stdout = os.pipe()
    os.write(feeding, body)
    os.close(feeding)
    result: object
    try:
        result = OPS[op](args, stdin, stdout)
    except OpError as exc:
        result = exc.code
    os.close(stdin)
    os.close(stdout)
    with open(draining, "rb") as pipe:
        return result, pipe.read()


CALLS: "list[tuple[str, bytes, dict[str, object]]]" = [
    ("write", b"one\ntwo\n", {"path": "d/f"}),
    ("write", b"three\n", {"path": "d/f", "append": True}),
    ("edit", b"two2", {"path": "d/f", "old_bytes": 3}),
    ("edit", b"twe2", {"path": "d/f", "old_bytes": 3}),
    ("read", b"", {"path": "d/f"}),
    ("read_lines", b"", {"path": "d/f", "offset": 2}),
    ("list", b"", {"depth": 3}),
    ("glob", b"", {"pattern": "**/[a-f]"}),
    ("grep", b"", {"pattern": "t.*e"}),
    ("move", b"", {"source": "d/f", "destination": "g"}),
    ("delete", b"", {"path": "d", "recursive": True}),
    ("delete", b"", {"path": "."}),
]
for op, body, args in CALLS:
    result, out = call(op, body, args)
    if isinstance(result, dict):
        result.pop("modified", None)
    if op == "list":
        out = b"%d" % len(out.split(b"],["))
    sys.stdout.write(f"{op} {result} {out!r}\n")
