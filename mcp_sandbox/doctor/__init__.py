"""Checks a machine and says what to do about what does not work.

`report.py` has the words of the answer, `versions.py` what is known of old versions, `machine.py`
looks at the host, `skills.py` at the skills, `places.py` tries each backend with a real sandbox.
Nothing here repairs anything, and nothing is decided here that a server would go by.
"""

from anyio import to_thread

from mcp_sandbox.config import Config
from mcp_sandbox.doctor.machine import examine_machine
from mcp_sandbox.doctor.places import examine_engine, examine_place
from mcp_sandbox.doctor.report import Check, Report, render
from mcp_sandbox.doctor.skills import examine_skills
from mcp_sandbox.models import BackendName

__all__ = ["Check", "Report", "examine", "render"]

_PLACES: tuple[BackendName, ...] = ("docker", "bubblewrap")


async def examine(config: Config) -> Report:
    """Look at the machine and the skills, then try a sandbox in each backend that isolates."""
    checks = await to_thread.run_sync(examine_machine, config)
    checks.append(await examine_skills(config))
    checks += await examine_engine(config)
    usable = list[BackendName]()
    for place in _PLACES:
        found = await examine_place(place, config)
        checks += found
        if all(check.status != "fail" for check in found):
            usable.append(place)
    return Report(checks=tuple(checks), usable=tuple(usable))
