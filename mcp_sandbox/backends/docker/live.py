"""A look at a container's first process from the host: what the kernel says, not the engine."""

from pathlib import Path
from typing import Any

from mcp_sandbox.backends.docker.verify import process_problems


def first_process_problems(inspected: dict[str, Any]) -> list[str]:
    """What is weaker than asked; nothing where the process cannot be seen from here. Blocks."""
    folder = Path("/proc") / str(inspected["State"]["Pid"])
    try:
        status = (folder / "status").read_text()
        groups = (folder / "cgroup").read_text()
    except OSError:
        return []
    # An engine that counts processes elsewhere would give the number of a process of somebody else.
    if inspected["Id"] not in groups:
        return []
    return process_problems(status, inspected["Config"]["User"])
