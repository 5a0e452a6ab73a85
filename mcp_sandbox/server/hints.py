"""What the output of a failed command does not say, or says at length."""

import re

from mcp_sandbox.models import ExecResult
from mcp_sandbox.skills.findings import Required
from mcp_sandbox.skills.preflight import Inventory, unmet

# How programs say that there is no network, and what pip and apt say instead.
_UNREACHED = re.compile(
    r"Temporary failure (?:in name resolution|resolving)|Could(?: not|n't) resolve host"
    r"|EAI_AGAIN|ENETUNREACH|Network is unreachable|no servers could be reached|dial tcp: lookup "
    r"|Failed to connect to (?!localhost|127\.|0\.0\.0\.0|::1)|UnknownHostException"
    r"|No matching distribution found for|TLS CA certificate bundle, invalid path"
    r"|/var/lib/(?:apt/lists|dpkg/lock)"
)
_OFFLINE = (
    "this computer has no network: nothing can be downloaded; sandbox_info lists what is installed"
)
_MODULE = re.compile(r"No module named '?(\w{1,100})\b(?!\.)", re.ASCII)
# Of an error as Node.js shows it: the line of Node.js that threw it, what led there, its version.
_INTERNALS = re.compile(
    r"^node:\S+:\d+\n(?:.+\n){1,3}\n|^ +at .*(?:\bnode:|/mcp_sandbox/runner/).*\n"
    r"|^\nNode\.js v[\d.]+\n",
    re.MULTILINE,
)


def hints(result: ExecResult) -> list[str]:
    """Sentences on why a command failed, where its own words mislead. May read a file."""
    said = f"{result.stderr}\n{result.stdout}"
    lines = [_OFFLINE] if result.offline and _UNREACHED.search(said) else []
    module = _MODULE.search(said)
    lacking = unmet([Required("python", module[1], ())], Inventory()) if module else ()
    for lack in lacking:
        if lack.layer:
            here = "and cannot be downloaded" if result.offline else f"here: `{lack.fix}` may help"
            lines.append(
                f"{lack.name} is not installed {here}; the operator can make a docker image that "
                f"has it: `mcp-sandbox images recipe {lack.layer}` prints how"
            )
    return lines


def without_internals(text: str) -> str:
    """What Node.js says of an error, without its own parts in it."""
    return _INTERNALS.sub(lambda found: "{\n" if found[0].endswith(" {\n") else "", text)
