"""What a sandbox lacks for a skill's scripts -> lines for the agent. Pure."""

from collections.abc import Iterable, Sequence

from mcp_sandbox.server.text import show_name
from mcp_sandbox.skills.models import Need, Unmet
from mcp_sandbox.skills.overview import cut_short

_WHAT: dict[Need, str] = {
    "command": "command",
    "interpreter": "program",
    "python": "Python module",
    "node": "Node.js package",
    "network": "network for",
}
_MOST_LINES = 15
_MOST_FILES = 2


def missing(unmet: Sequence[Unmet]) -> Iterable[str]:
    """A line for each thing, what every use needs first; and one for all that is out of reach."""
    local = [lack for lack in unmet if lack.need != "network"]
    for lack in local[:_MOST_LINES]:
        yield _line(lack)
    if len(local) > _MOST_LINES:
        yield f"Missing besides: {', '.join(show_name(each.name) for each in local[_MOST_LINES:])}."
    remote = [show_name(lack.name) for lack in unmet if lack.need == "network"]
    if remote:
        yield (
            f"This sandbox has no network; the skill seems to want it for {', '.join(remote)}. "
            "Nothing can be installed from here: do without what is missing, or tell the user."
        )
    elif local:
        yield "Do without what is missing, install it if that works, or tell the user."
    layers = dict.fromkeys(lack.layer for lack in local if lack.layer)
    if layers:
        made = f"mcp-sandbox images recipe {' '.join(layers)}"
        yield f"The operator can make an image that has more of it: `{made}` prints how."


def _line(lack: Unmet) -> str:
    files = cut_short(", ".join(map(show_name, lack.needed_by[:_MOST_FILES])), 200)
    if len(lack.needed_by) > _MOST_FILES:
        files += f" and {len(lack.needed_by) - _MOST_FILES} more"
    when = "" if lack.always else ", for some of its uses"
    fix = f" ({show_name(lack.fix)})" if lack.fix else ""
    what = f"{_WHAT[lack.need]} {show_name(lack.name)}"
    return f"Missing in this sandbox{when}: {what}, for {files}{fix}."
