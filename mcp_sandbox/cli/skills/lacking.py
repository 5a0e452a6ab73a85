"""What a sandbox lacks for skills, as what is wrong with them."""

import sys
from collections.abc import Mapping, Sequence

import anyio

from mcp_sandbox.config import Config
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.skills.models import Diagnostic, Level, Unmet


def lacking_for(
    skills: Mapping[str, Mapping[str, bytes]], config: Config
) -> Mapping[str, Sequence[Diagnostic]]:
    """Return what a sandbox lacks of what scripts need; where there is none, say why not."""
    from mcp_sandbox.lacking import lacking

    try:
        found = anyio.run(lacking, skills, config)
    except SandboxError as exc:
        print(f"what a sandbox lacks was not looked at: {exc}", file=sys.stderr)
        return {}
    return {name: [_as_diagnostic(each) for each in unmet] for name, unmet in found.items()}


def _as_diagnostic(each: Unmet) -> Diagnostic:
    needed = "It needs" if each.always else "Some of it needs"
    reason = f"{needed} {each.name} ({each.need}), which sandboxes lack."
    fix = each.fix or "Do without, or use an image that has it."
    if each.layer:
        fix += f", in an image: mcp-sandbox images recipe {each.layer}"
    level: Level = "warning" if each.always else "note"
    return Diagnostic("unmet", level, reason, fix, file=each.needed_by[0])
