"""A look at a container's first process from the host: what the kernel says, not the engine."""

from pathlib import Path
from typing import Any

from mcp_sandbox.backends.docker.verify import process_problems
from mcp_sandbox.backends.mount_table import wrong_mounts


def first_process_problems(inspected: dict[str, Any]) -> list[str]:
    """What is weaker than asked; nothing where the process cannot be seen from here. Blocks."""
    folder = Path("/proc") / str(inspected["State"]["Pid"])
    try:
        status = (folder / "status").read_text()
        groups = (folder / "cgroup").read_text()
        mounts = (folder / "mountinfo").read_text()
    except OSError:
        return []
    # An engine that counts processes elsewhere would give the number of a process of somebody else.
    if inspected["Id"] not in groups:
        return []
    wanted = {mount["Destination"]: not mount["RW"] for mount in inspected["Mounts"]}
    return process_problems(status, inspected["Config"]["User"]) + wrong_mounts(mounts, wanted)
