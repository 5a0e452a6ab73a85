"""What a skill needs and a sandbox lacks. Pure: what the sandbox has comes as a value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcp_sandbox.skills import layers
from mcp_sandbox.skills.findings import Required
from mcp_sandbox.skills.models import Need, Unmet
from mcp_sandbox.skills.scripts.declared import distribution
from mcp_sandbox.skills.scripts.uses import Kind

_MOST = 50
_NO_NETWORK = "this sandbox has no network"
_NEEDS: Mapping[Kind, Need] = {
    "command": "command",
    "python": "python",
    "distribution": "python",
    "node": "node",
    "npx": "node",
    "interpreter": "interpreter",
    "network": "network",
}
_INSTALL = {"apt": "apt-get install", "pip": "pip install", "npm": "npm install -g"}


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
        """What either of them has."""
        return Inventory(
            self.commands | other.commands,
            self.modules | other.modules,
            self.distributions | other.distributions,
            self.node | other.node,
            self.network or other.network,
        )


def unmet(needs: Sequence[Required], inventory: Inventory) -> tuple[Unmet, ...]:
    """What is lacking, what every use needs first."""
    imported = {_distribution_of(each.name) for each in needs if each.kind == "python"}
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


def _has(need: Required, inventory: Inventory) -> bool:
    if need.kind == "network":
        return inventory.network
    if need.kind == "python":
        return need.name in inventory.modules
    if need.kind == "npx" and need.name.rsplit("/", 1)[-1] in inventory.commands:
        return True
    has = {"distribution": inventory.distributions, "node": inventory.node, "npx": inventory.node}
    return need.name in has.get(need.kind, inventory.commands)


def _distribution_of(module: str) -> str:
    return distribution(layers.distribution_of(module))


def _unmet(need: Required) -> Unmet:
    layer, fix = _remedy(need)
    always = need.weight == "always"
    return Unmet(_NEEDS[need.kind], need.name, need.files, layer, fix, always=always)


def _remedy(need: Required) -> tuple[str | None, str]:
    """The layer that has it, and what a person can do."""
    if need.kind == "network":
        return None, _NO_NETWORK
    if need.kind in ("python", "distribution"):
        return _python_remedy(need.name)
    if need.kind in ("node", "npx"):
        return layers.layer_of("npm", need.name), f"npm install {need.name}"
    return _command_remedy(need.name)


def _python_remedy(name: str) -> tuple[str | None, str]:
    if why := layers.elsewhere("modules").get(name):
        return None, why
    package = layers.distribution_of(name)
    return layers.layer_of("pip", package), f"pip install {distribution(package)}"


def _command_remedy(name: str) -> tuple[str | None, str]:
    if why := layers.elsewhere("commands").get(name):
        return None, why
    for installer, line in _INSTALL.items():
        if package := layers.commands(installer).get(name):
            return layers.layer_of(installer, package), f"{line} {package}"
    return None, "no layer is known to have it"
