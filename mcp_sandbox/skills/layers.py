"""Where a command or a package can come from: what `layers.toml` says.

A layer is a group of packages that an operator adds to the image of the sandboxes; the image that
comes with this program has none of them.
"""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TypedDict, cast

from mcp_sandbox.errors import InvalidArgument

Table = Mapping[str, str]


class _Tables(TypedDict):
    """What the file has."""

    commands: dict[str, dict[str, list[str]]]
    elsewhere: dict[str, dict[str, list[str]]]
    layers: dict[str, dict[str, list[str]]]
    modules: dict[str, list[str]]


@cache
def _read() -> _Tables:
    text = (files(__package__) / "layers.toml").read_text(encoding="utf-8")
    return cast("_Tables", tomllib.loads(text))


def _turned(table: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names}


@cache
def commands(installer: str) -> Table:
    """Command -> the package that has it, for "apt", "pip" or "npm"."""
    return _turned(_read()["commands"][installer])


@cache
def elsewhere(what: str) -> Table:
    """Name -> why no layer has it, of the "commands" or "modules"."""
    return _turned(_read()["elsewhere"][what])


@cache
def _distributions() -> Table:
    return _turned(_read()["modules"])


def distribution_of(module: str) -> str:
    """The name by which pip knows a Python module."""
    return _distributions().get(module, module.replace(".", "-"))


def layers() -> Mapping[str, Mapping[str, list[str]]]:
    """What belongs to each layer: packages by "apt", "pip" and "npm"."""
    return _read()["layers"]


def layer_of(installer: str, package: str) -> str | None:
    """The layer that a package belongs to."""
    found = (name for name, has in layers().items() if package in has[installer])
    return next(found, None)


def recipe(names: Sequence[str], base: str = "mcp-sandbox/base:latest") -> str:
    """A Dockerfile that adds layers to the image `base`.

    Raises:
        InvalidArgument: there is no layer of a name.
    """
    unknown = [name for name in names if name not in layers()]
    if unknown:
        known = ", ".join(layers())
        raise InvalidArgument(f"there is no layer {unknown[0]!r}: the layers are {known}")
    packages = {
        installer: sorted({package for name in names for package in layers()[name][installer]})
        for installer in ("apt", "pip", "npm")
    }
    if packages["npm"]:
        packages["apt"] = sorted({*packages["apt"], "npm"})
    steps = [
        _STEPS[installer].format(" ".join(wanted))
        for installer, wanted in packages.items()
        if wanted
    ]
    return "\n".join([f"FROM {base}", "USER root", *steps, *_END, ""])


_STEPS = {
    "apt": "RUN apt-get update && apt-get install -y --no-install-recommends {} "
    "&& rm -rf /var/lib/apt/lists/*",
    "pip": "RUN pip install --no-cache-dir {}",
    # Where programs find packages, wherever they lie themselves.
    "npm": "RUN npm install --prefix /opt/node --no-audit --no-fund {} "
    "&& ln -s /opt/node/node_modules /node_modules",
}
_END = (
    "# Nothing in a sandbox gains privileges.",
    "RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +",
    "USER 10001:10001",
)
