"""What a skill needs and a sandbox lacks. Pure: what the sandbox has comes as a value.

`PROGRAM` lists inside the sandbox what it has. Its answer is untrusted, as all that comes out of a
sandbox. It names only what was asked for, so it is no longer than the question, however much is
installed.

`layers.toml` says where a command or a package can come from: a layer is a group of packages that
an operator adds to the image of the sandboxes; the shipped image has none.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, reduce
from importlib.resources import files
from operator import getitem, or_
from typing import Any, cast

from pydantic import TypeAdapter

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.skills.needs.uses import Kind, Use, distribution
from mcp_sandbox.skills.skill import Need, Unmet

_MOST = 50
_NEEDS: Mapping[Kind, Need] = {
    "command": "command", "python": "python", "distribution": "python", "node": "node",
    "npx": "node", "interpreter": "interpreter", "network": "network",
}  # fmt: skip
_INSTALL = {"apt": "apt-get install", "pip": "pip install", "npm": "npm install -g"}
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

_ANSWERED_BY: Mapping[str, tuple[Kind, ...]] = {
    "commands": ("command", "interpreter", "npx"),
    "modules": ("python",),
    "distributions": ("distribution",),
    "node": ("node", "npx"),
}
_STEPS = {
    "apt": "RUN apt-get update && apt-get install -y --no-install-recommends {} "
    "&& rm -rf /var/lib/apt/lists/*",
    "pip": "RUN pip install --no-cache-dir {}",
    # Node.js looks in /node_modules, wherever the program itself lies.
    "npm": "RUN npm install --prefix /opt/node --no-audit --no-fund {} "
    "&& ln -s /opt/node/node_modules /node_modules",
}
_END = (
    "# Nothing in a sandbox gains privileges.",
    "RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +",
    "USER 10001:10001",
)


@dataclass(frozen=True)
class Inventory:
    """What a sandbox has: commands on its PATH, modules that its Python and Node.js can import.

    `distributions` are what pip has installed, by normalised names.
    """

    commands: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    distributions: frozenset[str] = frozenset()
    node: frozenset[str] = frozenset()
    network: bool = False

    def __or__(self, other: "Inventory") -> "Inventory":
        return Inventory(*map(or_, astuple(self), astuple(other)))


_INVENTORY = TypeAdapter(Inventory)


def unmet(needs: Sequence[Use], inventory: Inventory) -> tuple[Unmet, ...]:
    """Return what is missing, first what every use of the skill needs."""
    modules = (each.name for each in needs if each.kind == "python")
    imported = {distribution(distribution_of(module)) for module in modules}
    lacking = [
        _unmet(each)
        for each in needs
        if each.weight != "optional"
        and not (each.unless and each.unless in inventory.modules)
        and not (each.kind == "distribution" and each.name in imported)
        and not _has(each, inventory)
    ]
    lacking.sort(key=lambda each: (not each.always, each.need, each.name))
    return tuple(lacking[:_MOST])


def _has(need: Use, inventory: Inventory) -> bool:
    if need.kind == "network":
        return inventory.network
    if need.kind == "python":
        return need.name in inventory.modules
    if need.kind == "npx" and need.name.rsplit("/", 1)[-1] in inventory.commands:
        return True
    has = {"distribution": inventory.distributions, "node": inventory.node, "npx": inventory.node}
    return need.name in has.get(need.kind, inventory.commands)


def _unmet(need: Use) -> Unmet:
    name = need.name
    if need.kind == "network":
        layer, fix = None, "this sandbox has no network"
    elif need.kind in ("node", "npx"):
        layer, fix = layer_of("npm", name), f"npm install {name}"
    else:
        layer, fix = _remedy(name, of_python=need.kind in ("python", "distribution"))
    return Unmet(_NEEDS[need.kind], name, need.files, layer, fix, always=need.weight == "always")


def _remedy(name: str, *, of_python: bool) -> tuple[str | None, str]:
    if why := keys_in("elsewhere", "modules" if of_python else "commands").get(name):
        return None, why
    if of_python:
        package = distribution_of(name)
        return layer_of("pip", package), f"pip install {distribution(package)}"
    for installer, line in _INSTALL.items():
        if package := keys_in("commands", installer).get(name, ""):
            return layer_of(installer, package), f"{line} {package}"
    return None, "no layer is known to have it"


def question(needs: Iterable[Use]) -> bytes:
    """Return what the program shall look for, as JSON."""
    needs = tuple(needs)
    asked: dict[str, list[str]] = {}
    for key, kinds in _ANSWERED_BY.items():
        wanted = [need for need in needs if need.kind in kinds]
        # A command of a package has the package's last name.
        asked[key] = [need.name.rsplit("/", 1)[-1] for need in wanted]
        if key != "commands":
            asked[key] = [name for need in wanted for name in (need.name, need.unless) if name]
    return json.dumps(asked).encode()


def read_inventory(answer: str) -> Inventory:
    """Parse what the program printed. Raises ValueError: it is not an inventory."""
    return replace(_INVENTORY.validate_json(answer), network=False)


@cache
def _read() -> Mapping[str, Any]:
    found = tomllib.loads((files(__package__) / "layers.toml").read_text(encoding="utf-8"))
    for installer, packages in found["same_name"].items():
        found["commands"][installer] |= {package: [package] for package in packages}
    return found


@cache
def keys_in(*table: str) -> Mapping[str, str]:
    """Name -> the key under which a table lists it.

    ("commands", "apt" or "pip" or "npm"): the package that has a command. ("elsewhere", "commands"
    or "modules"): why no layer has it. ("modules",): the name by which pip knows a Python module.
    """
    return {name: key for key, names in reduce(getitem, table, _read()).items() for name in names}


def distribution_of(module: str) -> str:
    """Return the name by which pip knows a Python module."""
    return keys_in("modules").get(module, module.replace(".", "-"))


def layers() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the packages of each layer, by "apt", "pip" and "npm"."""
    return cast("Mapping[str, Mapping[str, list[str]]]", _read()["layers"])


def layer_of(installer: str, package: str) -> str | None:
    """Return the layer that a package belongs to; None if it is in none."""
    return next((name for name, has in layers().items() if package in has[installer]), None)


def recipe(names: Sequence[str]) -> str:
    """Return a Dockerfile that adds layers to the image of the sandboxes.

    Raises InvalidArgument: there is no layer of a name.
    """
    if unknown := [name for name in names if name not in layers()]:
        known = ", ".join(layers())
        raise InvalidArgument(f"there is no layer {unknown[0]!r}: the layers are {known}")
    steps = list[str]()
    for installer, step in _STEPS.items():
        if packages := {package for name in names for package in layers()[name][installer]}:
            steps.append(step.format(" ".join(sorted(packages))))
    return "\n".join(["FROM mcp-sandbox/base:latest", "USER root", *steps, *_END, ""])
