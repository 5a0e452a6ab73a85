"""What a chat's computer is: for the agent that lives in it and for the operator."""

from collections.abc import Mapping
from dataclasses import dataclass

from mcp_sandbox.models import BackendName, ChatId, WorkspaceUsage
from mcp_sandbox.runner.protocol import VERSION
from mcp_sandbox.sessions.rooms import Held

# One line "name version" for each program that is there; all asked at once, none waited for long.
_ASK = r"""
ask() {
  command -v "$1" >/dev/null || return
  v=$(timeout 5 "$@" 2>&1 </dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n1)
  echo "$1 ${v:-present}"
}
for p in python3 node git rg jq sqlite3 curl make gcc; do ask "$p" --version & done
# These take long to say their version.
for p in pip npm uv; do command -v "$p" >/dev/null && echo "$p present"; done
echo "bash $BASH_VERSION"
wait
"""


@dataclass(frozen=True)
class SandboxReport:
    """The answer of `sandbox_info`. `programs` maps a name to its version.

    `project` says whether and how the folder of the chat's client is shown.
    """

    chat: ChatId
    backend: BackendName
    image: str | None
    state: str
    isolation: str
    limits: Mapping[str, str]
    network: str
    programs: Mapping[str, str]
    workspace: str
    project: str
    usage: WorkspaceUsage
    versions: Mapping[str, str]


async def ask_programs(held: Held) -> dict[str, str]:
    """The programs of a sandbox with their versions."""
    result = await held.runtime.exec(_ASK, timeout_s=15)
    pairs = (line.partition(" ") for line in sorted(result.stdout.splitlines()))
    return {name: version for name, _, version in pairs}


def report_on(
    chat: ChatId, held: Held, programs: Mapping[str, str], usage: WorkspaceUsage
) -> SandboxReport:
    """Put together what is known."""
    facts = held.facts
    return SandboxReport(
        chat=chat,
        backend=facts.backend,
        image=facts.image,
        state="running",
        isolation=facts.isolation,
        limits=facts.limits,
        network=facts.network,
        programs=programs,
        workspace="/workspace",
        project=held.shown.said,
        usage=usage,
        versions={"runner": VERSION, "python": held.runtime.hello.python},
    )
