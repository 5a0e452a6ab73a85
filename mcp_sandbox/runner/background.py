"""What runs on though its command has ended, in words that fit into one frame."""

from __future__ import annotations

from mcp_sandbox.runner.command import BASH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

_MOST_NAMED = 20
_MOST_COMMAND = 120


def described(pids: Iterable[int]) -> dict[str, Any]:
    """The first of these processes by name, and how many there are."""
    found = sorted(pids)
    named = [{"pid": pid, "command": _command(pid)} for pid in found[:_MOST_NAMED]]
    return {"background": named, "background_total": len(found)}


def _command(pid: int) -> str:
    """The command line of a process; what it calls itself when it shows none."""
    for name in ("cmdline", "comm"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                words = file.read(4 * _MOST_COMMAND).replace(b"\0", b" ").strip()
        except OSError:
            return ""
        if BASH.encode() in words:
            return "bash (a subshell)"
        if words:
            return words.decode("utf-8", "replace")[:_MOST_COMMAND]
    return ""
