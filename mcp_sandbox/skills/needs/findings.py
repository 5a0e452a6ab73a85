"""What a skill's scripts use and need, and what of that a sandbox lacks. Pure, bounded.

`PROGRAM` lists inside the sandbox what it has. Its answer is untrusted, as all that comes out of a
sandbox. It names only what was asked for, so it is no longer than the question, however much is
installed.

`layers.toml` says where a command or a package can come from: a layer is a group of packages that
an operator adds to the image of the sandboxes; the shipped image has none.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, reduce
from importlib.resources import files
from operator import getitem, or_
from pathlib import PurePosixPath
from typing import Any, cast

from pydantic import TypeAdapter

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.skills.needs.python import read_python
from mcp_sandbox.skills.needs.shell import read_javascript, read_shell
from mcp_sandbox.skills.needs.uses import (
    Kind,
    Language,
    Requirement,
    Uses,
    Weight,
    code_blocks,
    distribution,
    read_inline_metadata,
    read_package_json,
    read_requirements,
    read_shebang,
)
from mcp_sandbox.skills.skill import Findings, MissingRequirement, Need, is_document

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
MAX_FILE_BYTES = 256 * 1024
MAX_BYTES = 1024 * 1024
"""The limit for all files together."""

_LANGUAGES: Mapping[str, Language] = {
    ".py": "python", ".pyw": "python", ".sh": "shell", ".bash": "shell", ".zsh": "shell",
    ".js": "javascript", ".mjs": "javascript", ".cjs": "javascript", ".ts": "javascript",
    ".mts": "javascript", ".tsx": "javascript", ".jsx": "javascript",
}  # fmt: skip
_RUN_BY: Mapping[str, Language] = {
    "python": "python", "uv": "python", "bash": "shell", "sh": "shell", "zsh": "shell",
    "dash": "shell", "ksh": "shell", "node": "javascript", "bun": "javascript",
    "tsx": "javascript", "deno": "javascript",
}  # fmt: skip
_INTERPRETERS = {
    ".py": "python3", ".sh": "bash", ".bash": "bash", ".zsh": "zsh", ".js": "node",
    ".mjs": "node", ".cjs": "node", ".rb": "ruby", ".pl": "perl", ".ps1": "pwsh", ".r": "Rscript",
    ".php": "php", ".lua": "lua",
}  # fmt: skip
# Files there are copied or tried out; no use of the skill runs them as they are.
_NOT_RUN = frozenset({"assets", "templates", "template", "node_modules", "fixtures", "__pycache__"})
_SELDOM_RUN = frozenset({"tests", "test", "examples", "evals", "references"})
_TEST = re.compile(r"test_.*|.*_test\.\w+|.*\.(?:test|spec)\.\w+|conftest\.py")
_SET = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=", re.MULTILINE)
_DECLARED = {"requirements.txt": read_requirements, "package.json": read_package_json}
_READERS = {"python": read_python, "shell": read_shell, "javascript": read_javascript}
_WEIGHTS: tuple[Weight, ...] = ("optional", "sometimes", "always")
_SHOWN = 50


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


def find_missing(
    needs: Sequence[Requirement], inventory: Inventory
) -> tuple[MissingRequirement, ...]:
    """Return what is missing, first what every use of the skill needs."""
    modules = (each.name for each in needs if each.kind == "python")
    imported = {distribution(distribution_of(module)) for module in modules}
    missing = [
        _unmet(each)
        for each in needs
        if each.weight != "optional"
        and not (each.unless and each.unless in inventory.modules)
        and not (each.kind == "distribution" and each.name in imported)
        and not _has(each, inventory)
    ]
    missing.sort(key=lambda each: (not each.always, each.need, each.name))
    return tuple(missing[:_MOST])


def _has(need: Requirement, inventory: Inventory) -> bool:
    if need.kind == "network":
        return inventory.network
    if need.kind == "python":
        return need.name in inventory.modules
    if need.kind == "npx" and need.name.rsplit("/", 1)[-1] in inventory.commands:
        return True
    has = {"distribution": inventory.distributions, "node": inventory.node, "npx": inventory.node}
    return need.name in has.get(need.kind, inventory.commands)


def _unmet(need: Requirement) -> MissingRequirement:
    name = need.name
    if need.kind == "network":
        layer, fix = None, "this sandbox has no network"
    elif need.kind in ("node", "npx"):
        layer, fix = layer_of("npm", name), f"npm install {name}"
    else:
        layer, fix = _remedy(name, of_python=need.kind in ("python", "distribution"))
    return MissingRequirement(
        _NEEDS[need.kind], name, need.files, layer, fix, always=need.weight == "always"
    )


def _remedy(name: str, *, of_python: bool) -> tuple[str | None, str]:
    if why := map_table_keys("elsewhere", "modules" if of_python else "commands").get(name):
        return None, why
    if of_python:
        package = distribution_of(name)
        return layer_of("pip", package), f"pip install {distribution(package)}"
    for installer, line in _INSTALL.items():
        if package := map_table_keys("commands", installer).get(name, ""):
            return layer_of(installer, package), f"{line} {package}"
    return None, "no layer is known to have it"


def build_question(needs: Iterable[Requirement]) -> bytes:
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
def map_table_keys(*table: str) -> Mapping[str, str]:
    """Name -> the key under which a table lists it.

    ("commands", "apt" or "pip" or "npm"): the package that has a command. ("elsewhere", "commands"
    or "modules"): why no layer has it. ("modules",): the name by which pip knows a Python module.
    """
    return {name: key for key, names in reduce(getitem, table, _read()).items() for name in names}


def distribution_of(module: str) -> str:
    """Return the name by which pip knows a Python module."""
    return map_table_keys("modules").get(module, module.replace(".", "-"))


def read_layers() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the packages of each layer, by "apt", "pip" and "npm"."""
    return cast("Mapping[str, Mapping[str, list[str]]]", _read()["layers"])


def layer_of(installer: str, package: str) -> str | None:
    """Return the layer that a package belongs to; None if it is in none."""
    return next((name for name, has in read_layers().items() if package in has[installer]), None)


def write_recipe(names: Sequence[str]) -> str:
    """Return a Dockerfile that adds layers to the image of the sandboxes.

    Raises InvalidArgument: there is no layer of a name.
    """
    if unknown := [name for name in names if name not in read_layers()]:
        known = ", ".join(read_layers())
        raise InvalidArgument(f"there is no layer {unknown[0]!r}: the layers are {known}")
    steps = list[str]()
    for installer, step in _STEPS.items():
        if packages := {package for name in names for package in read_layers()[name][installer]}:
            steps.append(step.format(" ".join(sorted(packages))))
    return "\n".join(["FROM mcp-sandbox/base:latest", "USER root", *steps, *_END, ""])


def worth_reading(path: str, size: int) -> bool:
    """Return whether `scan` uses the contents of the file."""
    known = PurePosixPath(path).suffix.lower() in {"", *_LANGUAGES, *_INTERPRETERS}
    return size <= MAX_FILE_BYTES and (known or _is_declaration(path))


def scan(
    files: Mapping[str, bytes], others: Sequence[str] = ()
) -> tuple[Findings, tuple[Requirement, ...]]:
    """Return what a skill's files, given by path, seem to use, and what running them needs.

    `others` are the paths of those that are not given.
    """
    found: dict[str, Uses] = {}
    unread = [path for path in others if PurePosixPath(path).suffix.lower() in _LANGUAGES]
    left = MAX_BYTES
    for path in sorted(files, key=lambda path: (path.count("/"), path)):
        name, data = PurePosixPath(path), files[path]
        is_script = name.suffix.lower() in {*_LANGUAGES, *_INTERPRETERS} or data[:2] == b"#!"
        is_run = not _NOT_RUN.intersection(name.parts)
        if not (is_run if _is_declaration(path) else is_script):
            continue
        if len(data) > min(MAX_FILE_BYTES, left):
            unread.append(path)
            continue
        left -= len(data)
        found[path] = _findings_read(path, data.decode("utf-8", "replace"))
    local = set[str]()
    for name in map(PurePosixPath, (*files, *others)):
        if name.suffix in (".py", ".pyi", ".so"):
            local.update((name.stem.split(".")[0], *name.parts[:-1]))
    needs = tuple(_needs(found, local))
    return _findings(found, needs, unread), needs


def _is_declaration(path: str) -> bool:
    return is_document(path) or PurePosixPath(path).name in _DECLARED


def _findings_read(path: str, text: str) -> Uses:
    name, parts = PurePosixPath(path), PurePosixPath(path).parts
    text = text.removeprefix("\ufeff")
    if name.name in _DECLARED:
        return _DECLARED[name.name](text)
    uses = Uses()
    if is_document(path):
        for language, code in code_blocks(text):
            uses.add(_read_code(language, code), "sometimes")
        # Blocks set variables for each other, too.
        uses.variables -= {*_SET.findall(text)}
        return uses
    uses.add(_read_script(name.suffix.lower(), text))
    if _NOT_RUN.intersection(parts[:-1]):
        uses.needs.clear()
    elif _SELDOM_RUN.intersection(parts[:-1]) or _TEST.fullmatch(name.name):
        seldom = Uses()
        seldom.add(uses, "sometimes")
        return seldom
    return uses


def _read_script(suffix: str, text: str) -> Uses:
    program, uses = read_shebang(text)
    named = "python" if program.startswith("python") else program
    language = _LANGUAGES.get(suffix) or _RUN_BY.get(named)
    if not program and suffix in _INTERPRETERS:
        uses.need("interpreter", _INTERPRETERS[suffix])
    if language:
        uses.add(_read_code(language, text))
    if language == "python":
        uses.add(read_inline_metadata(text))
    return uses


def _read_code(language: Language, text: str) -> Uses:
    whole = Uses()
    waiting: list[tuple[Language, str, int]] = [(language, text, 0)]
    for _ in range(300):
        if not waiting:
            break
        language, text, depth = waiting.pop()
        uses = _READERS[language](text)
        whole.add(uses)
        if depth < 3:
            waiting.extend((inner, code, depth + 1) for inner, code in uses.embedded)
    return whole


def _needs(found: Mapping[str, Uses], local: set[str]) -> Iterator[Requirement]:
    gathered: dict[tuple[Kind, str], list[tuple[str, Requirement]]] = {}
    for path, uses in found.items():
        hosts = [Requirement("network", host, "sometimes") for host in sorted(uses.hosts)]
        for use in (*uses.needs, *hosts):
            if not (use.kind == "python" and use.name in local):
                gathered.setdefault((use.kind, use.name), []).append((path, use))
    for (kind, name), pairs in sorted(gathered.items()):
        weight = max((use.weight for _, use in pairs), key=_WEIGHTS.index)
        files = dict.fromkeys(path for path, use in pairs if use.weight == weight)
        unless = min(use.unless for _, use in pairs)
        yield Requirement(kind, name, weight, unless, tuple(files))


def _findings(
    found: Mapping[str, Uses], needs: tuple[Requirement, ...], unread: list[str]
) -> Findings:
    packages = {each.name for each in needs if each.kind in ("distribution", "node", "npx")}
    packages |= {
        distribution(distribution_of(each.name))
        for each in needs
        if each.kind == "python" and each.name not in sys.stdlib_module_names
    }
    every = found.values()
    return Findings(
        hosts=_shown(uses.hosts for uses in every),
        variables=_shown(uses.variables for uses in every),
        commands=_shown([{each.name for each in needs if each.kind in ("command", "interpreter")}]),
        packages=_shown([packages, *(uses.packages for uses in every)]),
        writes=_shown(uses.writes for uses in every),
        unread=tuple(unread[:_SHOWN]),
        inline=tuple(path for path, uses in found.items() if uses.inline)[:_SHOWN],
    )


def _shown(sets: Iterable[set[str]]) -> tuple[str, ...]:
    return tuple(sorted(set().union(*sets))[:_SHOWN])
