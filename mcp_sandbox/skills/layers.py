"""Where a command or a package can come from: what `layers.toml` says."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

Table = Mapping[str, str]


@cache
def _read() -> dict[str, dict[str, dict[str, list[str]]]]:
    return tomllib.loads((files(__package__) / "layers.toml").read_text(encoding="utf-8"))


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
    return _turned(_read()["modules"])  # type: ignore[arg-type]


def distribution_of(module: str) -> str:
    """The name by which pip knows a Python module."""
    return _distributions().get(module, module.replace(".", "-"))


@cache
def _layers() -> Table:
    return _turned(_read()["layers"])  # type: ignore[arg-type]


def layer_of(package: str) -> str | None:
    """The layer that a package belongs to."""
    return _layers().get(package)
