"""What a skill declares that it needs, and what of that a sandbox lacks. Pure, bounded.

Its author has written it down in one of these; scripts are not read, and no sentence is guessed at:

    requirements.txt    distributions of Python
    package.json        `dependencies` of Node.js
    metadata            commands: the `bins` of what is called `requires`
    compatibility       commands: what stands between backticks

`PROGRAM` looks for the names in a sandbox; its answer is untrusted.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import StrictBool, TypeAdapter

from mcp_sandbox.skills.skill import FrontMatter, Json

Need = Literal["command", "python", "node"]

DECLARING = ("requirements.txt", "package.json", "scripts/requirements.txt", "scripts/package.json")
"""The paths of files that declare something."""
_MOST, _MOST_BYTES = 100, 1 << 16
_FIX = {"python": "pip install", "node": "npm install"}
# Other text of an author must not get into our messages.
_NAMES: Mapping[Need, re.Pattern[str]] = {
    "command": re.compile(r"[A-Za-z0-9_][\w.+-]{0,63}", re.ASCII),
    "python": re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII),
    "node": re.compile(r"(?:@[\w.~-]{1,100}/)?[A-Za-z0-9_~][\w.~-]{0,99}", re.ASCII),
}
# A marker behind a semicolon may say that it is not needed here: such a line does not match.
_REQUIREMENT = re.compile(
    r"\s*([A-Za-z0-9][\w.-]*)\s*(?:\[[^];]*\]\s*)?(?:[<>=!~(@][^;]*)?", re.ASCII
)

PROGRAM = r"""
import importlib.metadata, json, os, shutil, sys
home = os.path.expanduser("~")
places = [*filter(None, os.environ.get("NODE_PATH", "").split(":")), home + "/.node_modules"]
places += ["/workspace/node_modules", "/node_modules", "/usr/share/nodejs", "/usr/lib/nodejs"]
def has(need, name):
    if need == "command":
        return shutil.which(name) is not None
    if need == "node":
        return any(os.path.isdir(os.path.join(place, name)) for place in places)
    return any(importlib.metadata.Distribution.discover(name=name))
print(json.dumps([has(*each) for each in json.load(sys.stdin)]))
"""
COMMAND = ("python3", "-c", PROGRAM)
"""What to run in the sandbox; the question comes on its standard input."""
_ANSWER = TypeAdapter(list[StrictBool])


@dataclass(frozen=True)
class Requirement:
    """A command, a distribution of Python or a package of Node.js; `where` it is declared."""

    need: Need
    name: str
    where: str

    @property
    def fix(self) -> str:
        """What may install it; empty if only an image can have it."""
        return f"{_FIX[self.need]} {self.name}" if self.need in _FIX else ""


def read_declared(front: FrontMatter, files: Mapping[str, bytes]) -> Sequence[Requirement]:
    """Return what the front matter and the declaring files, by path, ask for; each name once."""
    found = dict[tuple[Need, str], Requirement]()
    for need, name, where in _declared(front, files):
        if _NAMES[need].fullmatch(name) and len(found) < _MOST:
            found.setdefault((need, name), Requirement(need, name, where))
    return tuple(found.values())


def build_question(needs: Sequence[Requirement]) -> bytes:
    """Return what the program shall look for."""
    return json.dumps([(each.need, each.name) for each in needs]).encode()


def find_missing(needs: Sequence[Requirement], answer: str) -> tuple[Requirement, ...]:
    """Return what the sandbox lacks. Raises ValueError: the program has not printed an answer."""
    has = zip(needs, _ANSWER.validate_json(answer), strict=True)
    return tuple(each for each, is_there in has if not is_there)


def _declared(front: FrontMatter, files: Mapping[str, bytes]) -> Iterator[tuple[Need, str, str]]:
    for path in filter(files.get, DECLARING):
        text = files[path][:_MOST_BYTES].decode("utf-8", "replace")
        if path.endswith(".txt"):
            lines = (line.partition("#")[0] for line in text.splitlines())
            yield from (("python", m[1], path) for m in map(_REQUIREMENT.fullmatch, lines) if m)
        else:
            yield from (("node", name, path) for name in _dependencies(text))
    yield from (("command", name, "metadata") for name in _bins(dict(front.metadata)))
    # In capitals it is a variable, such as `GITHUB_TOKEN`.
    quoted = re.findall(r"`([^`\s]+)`", front.compatibility)
    yield from (("command", name, "compatibility") for name in quoted if not name.isupper())


def _dependencies(text: str) -> Sequence[str]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    found = document.get("dependencies") if isinstance(document, dict) else None
    return tuple(found) if isinstance(found, dict) else ()


def _bins(value: Json, within: str = "") -> Iterator[str]:
    for key, each in value.items() if isinstance(value, dict) else ():
        if (within, key) == ("requires", "bins"):
            names = each if isinstance(each, list) else str(each).replace(",", " ").split()
            yield from (name for name in names if isinstance(name, str))
        yield from _bins(each, key)
