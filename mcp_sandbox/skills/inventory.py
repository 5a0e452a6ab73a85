"""What a sandbox has of what is needed, as a program inside of it tells.

Its answer is as untrusted as all that comes out of a sandbox. Only what is asked for is answered:
so the answer is no longer than the question, however much is installed.
"""

import json
from collections.abc import Iterable, Mapping

from mcp_sandbox.skills.findings import Required
from mcp_sandbox.skills.preflight import Inventory
from mcp_sandbox.skills.scripts.uses import Kind

PROGRAM = r"""
import json, os, re, sys
asked = json.load(sys.stdin)
def names(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []
commands, modules, packages, node = set(), set(sys.builtin_module_names), set(), set()
for folder in os.environ.get("PATH", "").split(":"):
    commands.update(n for n in names(folder) if os.access(os.path.join(folder, n), os.X_OK))
for folder in sys.path[1:]:
    for name in names(folder):
        stem, _, rest = name.partition(".")
        path = os.path.join(folder, name)
        if name.endswith((".dist-info", ".egg-info")):
            name = name.rpartition(".")[0].split("-")[0]
            packages.add(re.sub(r"[-_.]+", "-", name).lower())
        elif rest == "py" or rest.endswith("so"):
            modules.add(stem)
        elif name.isidentifier() and os.path.isdir(path):
            modules.add(name)
            if not os.path.exists(os.path.join(path, "__init__.py")):
                modules.update(name + "." + n.partition(".")[0] for n in names(path))
folders = os.environ.get("NODE_PATH", "").split(":")
home = os.path.expanduser("~")
folders += ["/workspace/node_modules", "/node_modules", home + "/.node_modules"]
folders += ["/usr/share/nodejs", "/usr/lib/nodejs"]
for folder in filter(None, folders):
    for name in names(folder):
        if name.startswith("@"):
            node.update(name + "/" + n for n in names(os.path.join(folder, name)))
        else:
            node.add(name)
    commands.update(names(os.path.join(folder, ".bin")))
found = {"commands": commands, "modules": modules, "distributions": packages, "node": node}
print(json.dumps({key: sorted(value & set(asked[key])) for key, value in found.items()}))
"""

COMMAND = ("python3", "-c", PROGRAM)
"""What to run in the sandbox; the question comes on its standard input."""

_KINDS: Mapping[str, tuple[Kind, ...]] = {
    "commands": ("command", "interpreter", "npx"),
    "modules": ("python",),
    "distributions": ("distribution",),
    "node": ("node", "npx"),
}


def question(needs: Iterable[Required]) -> bytes:
    """What the program is to look for."""
    needs = tuple(needs)
    asked = {
        key: [name for need in needs if need.kind in kinds for name in _names_of(key, need)]
        for key, kinds in _KINDS.items()
    }
    return json.dumps(asked).encode()


def _names_of(key: str, need: Required) -> Iterable[str]:
    if key == "commands":
        return (need.name.rsplit("/", 1)[-1],)
    return filter(None, (need.name, need.unless))


def read_inventory(answer: str) -> Inventory:
    """What the program printed.

    Raises:
        ValueError: it is not what the program prints.
    """
    try:
        found = json.loads(answer)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    if not isinstance(found, dict):
        raise ValueError("no object")  # noqa: TRY004
    return Inventory(
        commands=_names(found.get("commands")),
        modules=_names(found.get("modules")),
        distributions=_names(found.get("distributions")),
        node=_names(found.get("node")),
    )


def _names(value: object) -> frozenset[str]:
    listed = value if isinstance(value, list) else []
    return frozenset(each for each in listed if isinstance(each, str))
