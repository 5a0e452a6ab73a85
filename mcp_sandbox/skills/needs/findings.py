"""What a skill's scripts use and need, found by reading its files. Pure, bounded, runs nothing."""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from mcp_sandbox.skills.needs.javascript import read_javascript
from mcp_sandbox.skills.needs.preflight import distribution_of
from mcp_sandbox.skills.needs.python import read_python
from mcp_sandbox.skills.needs.shell import read_shell
from mcp_sandbox.skills.needs.uses import (
    Kind,
    Language,
    Use,
    Uses,
    Weight,
    code_blocks,
    distribution,
    read_inline_metadata,
    read_package_json,
    read_requirements,
    read_shebang,
)
from mcp_sandbox.skills.skill import Findings
from mcp_sandbox.skills.uris import is_document

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


def worth_reading(path: str, size: int) -> bool:
    """Return whether `scan` uses the contents of the file."""
    known = PurePosixPath(path).suffix.lower() in {"", *_LANGUAGES, *_INTERPRETERS}
    return size <= MAX_FILE_BYTES and (known or _is_declaration(path))


def scan(
    files: Mapping[str, bytes], others: Sequence[str] = ()
) -> tuple[Findings, tuple[Use, ...]]:
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
        found[path] = _read(path, data.decode("utf-8", "replace"))
    local = set[str]()
    for name in map(PurePosixPath, (*files, *others)):
        if name.suffix in (".py", ".pyi", ".so"):
            local.update((name.stem.split(".")[0], *name.parts[:-1]))
    needs = tuple(_needs(found, local))
    return _findings(found, needs, unread), needs


def _is_declaration(path: str) -> bool:
    return is_document(path) or PurePosixPath(path).name in _DECLARED


def _read(path: str, text: str) -> Uses:
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


def _needs(found: Mapping[str, Uses], local: set[str]) -> Iterator[Use]:
    gathered: dict[tuple[Kind, str], list[tuple[str, Use]]] = {}
    for path, uses in found.items():
        hosts = [Use("network", host, "sometimes") for host in sorted(uses.hosts)]
        for use in (*uses.needs, *hosts):
            if not (use.kind == "python" and use.name in local):
                gathered.setdefault((use.kind, use.name), []).append((path, use))
    for (kind, name), pairs in sorted(gathered.items()):
        weight = max((use.weight for _, use in pairs), key=_WEIGHTS.index)
        files = dict.fromkeys(path for path, use in pairs if use.weight == weight)
        unless = min(use.unless for _, use in pairs)
        yield Use(kind, name, weight, unless, tuple(files))


def _findings(found: Mapping[str, Uses], needs: tuple[Use, ...], unread: list[str]) -> Findings:
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
