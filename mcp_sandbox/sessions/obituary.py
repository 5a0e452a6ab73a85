"""What became of a sandbox, in words for the agent. Pure."""

from mcp_sandbox.config.units import MIB, show_size
from mcp_sandbox.models import Background, Ending, Limits

_WORDS: dict[Ending, str] = {
    "memory": "it ran out of memory ({memory})",
    "killed": "it was killed from outside",
    "failed": "its runner failed",
    "ended": "it was ended",
    "lost": "the engine that ran it has lost it, as after a restart",
}
_MOST_NAMED = 8


def cause(ending: Ending, limits: Limits) -> str:
    """What it died of."""
    return _WORDS[ending].format(memory=show_size(limits.memory_mb * MIB))


def ended_with(background: Background) -> str:
    """What was running in the background, and does so no more; empty if nothing was."""
    if not background.total:
        return ""
    named = [
        f"{process.command or 'a process'} (pid {process.pid})"
        for process in background.processes[:_MOST_NAMED]
    ]
    more = background.total - len(named)
    if more > 0:
        named.append(f"{more} more")
    return f" Ended with it, in the background: {', '.join(named)}."
