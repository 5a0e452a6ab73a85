"""Looks at the skills: how many agents are offered, and how many cannot be."""

from collections import Counter

from mcp_sandbox.config import Config
from mcp_sandbox.doctor.report import Check
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.skills.library import Library

_USER = "local"


async def examine_skills(config: Config) -> Check:
    """Return what the user of this machine has; the skills in files of chats are not looked at."""
    if not config.skills.enabled:
        return Check("skills", "skills", "ok", "switched off by skills.enabled")
    try:
        catalogue = await Library(config.skills, config.data_dir).catalogue(_USER)
    except OperatorError as exc:
        return Check("skills", "skills", "fail", "they cannot be read", str(exc))
    roots = Counter(skill.root for skill in catalogue.skills)
    parts = ", ".join(f"{number:,} {root}" for root, number in roots.items())
    found = f"{len(catalogue.skills):,} offered{f' ({parts})' if parts else ''}"
    broken = len(catalogue.unusable)
    odd = sum(any(d.level != "note" for d in s.diagnostics) for s in catalogue.skills)
    if not broken and not odd:
        return Check("skills", "skills", "ok", found)
    what = f"{found}; {broken:,} cannot be used, {odd:,} have something that others may refuse"
    remedy = "`mcp-sandbox skills doctor` says what and how to mend it"
    return Check("skills", "skills", "warn" if broken else "ok", what, remedy)
