"""What a command's own words do not say: of this computer, and of what was meant."""

import re

from anyio import to_thread

from mcp_sandbox.models import ExecResult, Language
from mcp_sandbox.skills.findings import Required
from mcp_sandbox.skills.preflight import Inventory, unmet

# How programs say that there is no network, and what pip and apt say instead.
_UNREACHED = re.compile(
    r"Temporary failure (?:in name resolution|resolving)|Could(?: not|n't) resolve host|EAI_AGAIN"
    r"|ENETUNREACH|Network is unreachable|no servers could be reached|dial tcp: lookup "
    r"|Failed to connect to (?!localhost|127\.|0\.0\.0\.0|::1)|UnknownHostException"
    r"|No matching distribution found for|TLS CA certificate bundle|/var/lib/(?:apt/|dpkg/lock)"
)
_OFFLINE = (
    "this computer has no network: nothing can be downloaded; sandbox_info lists what is installed"
)
_MODULE = re.compile(r"No module named '?(\w{1,100})\b(?!\.)", re.ASCII)
# What belongs to a prompt or a notebook, and how interpreters refuse it.
_FOREIGN = re.compile(r"^(?:\$ |>>> |!\w+|%%?[a-z]{2,})", re.MULTILINE)
_REFUSED = re.compile("SyntaxError|syntax error|command not found|no job control|no such job")
_FOR_PROMPTS = "{!r} is for prompts and notebooks: leave it out, and run shell commands with exec"
_PRINTS = {"python": "print()", "javascript": "console.log()"}


async def hints(result: ExecResult, code: str, language: Language) -> list[str]:
    """Sentences for an agent about a piece of code that failed, or that showed nothing."""
    if not result.success:
        return await to_thread.run_sync(_hints, result, code)
    shown = result.stdout or result.stderr or result.changed_files or language == "bash"
    return [] if shown else [f"nothing was printed: show values with {_PRINTS[language]}"]


def _hints(result: ExecResult, code: str) -> list[str]:
    said = f"{result.stderr}\n{result.stdout}"
    found = _FOREIGN.search(code) if _REFUSED.search(result.stderr) else None
    lines = [_FOR_PROMPTS.format(found[0])] if found else []
    lines += [_OFFLINE] if result.offline and _UNREACHED.search(said) else []
    module = _MODULE.search(said)
    for lack in unmet([Required("python", module[1], ())], Inventory()) if module else ():
        if lack.layer:
            fix = "" if result.offline else f"`{lack.fix}` may help, or "
            plain = "; the skill python-data-analysis does without" if lack.layer == "data" else ""
            lines.append(
                f"{lack.name} is not installed: {fix}the operator can make an image for the docker "
                f"backend that has it, `mcp-sandbox images recipe {lack.layer}` prints how{plain}"
            )
    return lines
