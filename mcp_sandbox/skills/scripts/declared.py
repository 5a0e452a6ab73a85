"""What a skill declares: lists of requirements, shebangs, blocks of code in its text. Pure."""

import json
import re
import tomllib
from collections.abc import Iterator

from mcp_sandbox.skills.scripts.command import read_command
from mcp_sandbox.skills.scripts.uses import DYNAMIC, Language, Uses

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")
_BLOCK = re.compile(r"^# /// script\r?\n((?:#(?: [^\n]*)?\r?\n)*?)# ///\r?$", re.MULTILINE)
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w+-]*)[^\n]*\n"
    r"(?P<code>(?:(?!^[ \t]*(?P=fence))[^\n]*\n)*)"
    r"(?:^[ \t]*(?P=fence)[^\n]*)?",
    re.MULTILINE,
)
_LANGUAGES: dict[str, Language] = {
    "bash": "shell", "sh": "shell", "shell": "shell", "zsh": "shell", "console": "shell",
    "shell-session": "shell", "python": "python", "py": "python", "python3": "python",
    "javascript": "javascript", "js": "javascript", "typescript": "javascript", "ts": "javascript",
}  # fmt: skip
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w .|-]*>")
_SET = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=", re.MULTILINE)
_MOST_TOML = 16_384
_MOST_BLOCKS = 100


def distribution(name: str) -> str:
    """A distribution's name in the one spelling that all others are compared by."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_requirements(text: str) -> Uses:
    """A `requirements.txt`."""
    uses = Uses()
    for line in text.splitlines():
        if not line.lstrip().startswith(("#", "-", "http:", "https:", "git+", ".", "/")):
            _requirement(line, uses)
    return uses


def _requirement(line: str, uses: Uses) -> None:
    if found := _REQUIREMENT.match(line):
        uses.package(found[1])
        uses.need("distribution", distribution(found[1]))


def read_package_json(text: str) -> Uses:
    """A `package.json`: what its scripts need when they run, not what building them needs."""
    uses = Uses()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return uses
    found = document.get("dependencies") if isinstance(document, dict) else None
    for name in found if isinstance(found, dict) else ():
        uses.package(name)
        uses.need("node", name)
    return uses


def read_inline_metadata(text: str) -> Uses:
    """The `# /// script` block of a Python script (PEP 723)."""
    uses = Uses()
    found = _BLOCK.search(text[:_MOST_TOML])
    if not found:
        return uses
    uses.inline = True
    body = "".join(line[2:] if line.startswith("# ") else "\n" for line in _lines(found[1]))
    try:
        dependencies = tomllib.loads(body).get("dependencies")
    except (tomllib.TOMLDecodeError, RecursionError):
        return uses
    for each in dependencies if isinstance(dependencies, list) else ():
        if isinstance(each, str):
            _requirement(each, uses)
    return uses


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").splitlines(keepends=True)


def read_shebang(text: str) -> tuple[str, Uses]:
    """The program that runs the file, by its first line; empty without one."""
    if not text.startswith("#!"):
        return "", Uses()
    words = text[2:300].partition("\n")[0].split()
    if words and words[0].rsplit("/", 1)[-1] == "env":
        words = [word for word in words[1:] if word not in ("-S", "--split-string", "-i")]
    uses = Uses()
    words = [word for word in words if "=" not in word.split("/")[0]]
    if not words:
        return "", uses
    program = words[0].rsplit("/", 1)[-1]
    read_command([program, *words[1:], "this.py"], uses)
    return program, uses


def code_blocks(text: str) -> Iterator[tuple[Language, str]]:
    """The fenced blocks of a Markdown text that are in a language known here."""
    for number, found in enumerate(_FENCE.finditer(text + "\n")):
        language = _LANGUAGES.get(found["language"].lower())
        if language and number < _MOST_BLOCKS:
            code = found["code"]
            yield (
                language,
                _unprompted(_PLACEHOLDER.sub(DYNAMIC, code)) if language == "shell" else code,
            )


def set_in_blocks(text: str) -> frozenset[str]:
    """The variables that blocks of a Markdown text set, for each other, too."""
    return frozenset(_SET.findall(text))


def _unprompted(code: str) -> str:
    """Without the prompts of a console, and then without what the programs said."""
    lines = code.splitlines()
    if any(line.lstrip().startswith("$ ") for line in lines):
        lines = [line.lstrip()[2:] for line in lines if line.lstrip().startswith("$ ")]
    return "\n".join(lines)
