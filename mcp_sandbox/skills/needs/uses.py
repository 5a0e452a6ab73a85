"""What readers of each language record, and reading commands and lists of packages. Pure."""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from mcp_sandbox.reading.commands import DYNAMIC, WRAPPERS, drop_assignments, names, unwrap_command

Kind = Literal["command", "python", "distribution", "node", "npx", "interpreter", "network"]
"""A `distribution` is what pip installs, under its own name; `npx` runs a command of a package."""
Weight = Literal["always", "sometimes", "optional"]
"""Needed whenever the file runs; by some of what it does; or it does without."""

Language = Literal["python", "shell", "javascript"]

_MOST = 500
_HOST = re.compile(
    r"\b(?:https?|wss?|ftp)://(?:[^\s/@\0]*@)?([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)"
)
# Hosts in names of XML languages and of licences; programs do not connect to them.
_NO_HOSTS = re.compile(
    r"(?:schemas?\..*|(?:.*\.)?(?:w3\.org|purl\.org|opensource\.org|apache\.org|"
    r"openxmlformats\.org|openoffice\.org|example\.(?:com|org|net)|example|gnu\.org|json-schema\.org))"
)
# Package names as npm allows them: other text of an author must not get into our messages.
_PACKAGE_NAME = re.compile(r"@?[A-Za-z0-9][\w./-]{0,99}")
_LOCAL = re.compile(r"localhost|127\..*|0\.0\.0\.0|\[?::1\]?|host\.docker\.internal")
_PROGRAM = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,63}")
_BUILTINS = names(
    ". : [ [[ alias bg bind break builtin caller case cd command compgen complete compopt continue "
    "coproc declare dirs disown do done echo elif else enable esac eval exec exit export false fc "
    "fg fi for function getopts hash help history if in jobs kill let local logout mapfile popd "
    "printf pushd pwd read readarray readonly return select set shift shopt source suspend test "
    "then time times trap true type typeset ulimit umask unalias unset until wait while"
)
_OF_THE_SHELL = names("exec command builtin time then do else")
_PYTHONS = re.compile(r"python(?:[23](?:\.\d+)?)?")
_MODULE = re.compile(r"[A-Za-z_][\w.]*")
_INSTALLS = {
    ("pip", "install"), ("pip3", "install"), ("npm", "install"), ("npm", "i"), ("npm", "ci"),
    ("npm", "add"), ("yarn", "add"), ("pnpm", "add"), ("pnpm", "install"), ("yarn", "install"),
    ("bun", "add"), ("bun", "install"), ("uv", "add"), ("uv", "sync"), ("apt-get", "install"),
    ("apt", "install"), ("apk", "add"), ("dnf", "install"), ("yum", "install"),
    ("cargo", "install"), ("go", "install"), ("gem", "install"), ("conda", "install"),
    ("git", "clone"), ("git", "fetch"), ("git", "pull"), ("git", "push"), ("docker", "pull"),
}  # fmt: skip
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][\w.-]*)")
_BLOCK = re.compile(
    r"^# /// script\r?\n((?:(?!# /// script\r?$)#(?: [^\n]*+\n|\r?\n))*?)# ///\r?$", re.MULTILINE
)
FENCED = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<language>[\w+-]*+)[^\n]*+\n"
    r"(?P<code>(?:(?!^[ \t]*(?P=fence))[^\n]*\n)*)"
    r"(?:^[ \t]*(?P=fence)[^\n]*)?",
    re.MULTILINE,
)
"""A block of code in Markdown; a last one that does not end has to end in a line feed."""
_LANGUAGES: dict[str, Language] = {
    "bash": "shell", "sh": "shell", "shell": "shell", "zsh": "shell", "console": "shell",
    "shell-session": "shell", "python": "python", "py": "python", "python3": "python",
    "javascript": "javascript", "js": "javascript", "typescript": "javascript", "ts": "javascript",
}  # fmt: skip
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w .|-]*>")


@dataclass(frozen=True)
class Requirement:
    """Something that a script needs, or the `files`; not where `unless` is importable."""

    kind: Kind
    name: str
    weight: Weight = "always"
    unless: str = ""
    files: tuple[str, ...] = ()


@dataclass
class Uses:
    """What one file uses. Each list is bounded; what comes after its end is left out.

    `embedded` is code that stands inside of it, as in `python3 -c`. `inline`: it declares its
    packages itself (PEP 723).
    """

    needs: list[Requirement] = field(default_factory=list[Requirement])
    hosts: set[str] = field(default_factory=set[str])
    variables: set[str] = field(default_factory=set[str])
    packages: set[str] = field(default_factory=set[str])
    writes: set[str] = field(default_factory=set[str])
    embedded: list[tuple[Language, str]] = field(default_factory=list[tuple[Language, str]])
    inline: bool = False

    def need(self, kind: Kind, name: str, weight: Weight = "always", unless: str = "") -> None:
        """Note a need, unless there are too many, or no package can have the name."""
        if kind in ("node", "npx") and not _PACKAGE_NAME.fullmatch(name):
            return
        if len(self.needs) < _MOST and 0 < len(name) <= 100:
            self.needs.append(Requirement(kind, name, weight, unless))

    def text(self, text: str) -> None:
        """Note the hosts of the addresses in a text."""
        for found in _HOST.finditer(text):
            host = found[1].lower()
            is_one = "." in host and ".." not in host and len(host) <= 253
            no_host = _NO_HOSTS.fullmatch(host) or _LOCAL.fullmatch(host)
            if is_one and not no_host and len(self.hosts) < _MOST:
                self.hosts.add(host)

    def variable(self, name: str) -> None:
        if len(self.variables) < _MOST and re.fullmatch(r"[A-Za-z_]\w{0,99}", name):
            self.variables.add(name)

    def package(self, name: str) -> None:
        if len(self.packages) < _MOST and _PACKAGE_NAME.fullmatch(name):
            self.packages.add(name)

    def write(self, path: str) -> None:
        """Note a path that is written, if it is outside of where scripts are run."""
        outside = path.startswith(("/", "~")) and not path.startswith(("/dev/", "/tmp/"))  # noqa: S108
        if outside and DYNAMIC not in path and len(path) <= 200 and len(self.writes) < _MOST:
            self.writes.add(path)

    def embed(self, language: Language, text: str) -> None:
        """Note code in the file, of a language that may be another."""
        if len(self.embedded) < _MOST:
            self.embedded.append((language, text))

    def add(self, other: "Uses", weight: Weight = "always") -> None:
        """Take over what a part of the file uses; it is needed `weight` at most."""
        for use in other.needs:
            lighter = weight if use.weight == "always" else use.weight
            self.need(use.kind, use.name, lighter, use.unless)
        self.hosts |= other.hosts
        self.variables |= other.variables
        self.packages |= other.packages
        self.writes |= other.writes
        self.inline |= other.inline


def read_command(words: Sequence[str], uses: Uses, weight: Weight = "always") -> None:
    """Note what a command needs; `words` have DYNAMIC where they are not known."""
    for word in words:
        uses.text(word)
    rest = list(words)
    for _ in range(10):
        rest = drop_assignments(rest)
        if not rest or DYNAMIC in rest[0]:
            return
        name = rest[0]
        if name not in WRAPPERS:
            _program(name, rest[1:], uses, weight)
            return
        if name not in _OF_THE_SHELL:
            uses.need("command", name, weight)
        rest = unwrap_command(name, rest[1:])


def _program(name: str, words: list[str], uses: Uses, weight: Weight) -> None:
    if name.startswith(("/usr/", "/bin/", "/sbin/", "/opt/")):
        name = name.rsplit("/", 1)[-1]
    if name in ("eval", "trap") and words and DYNAMIC not in words[0]:
        uses.embed("shell", words[0])
    if name in _BUILTINS or not _PROGRAM.fullmatch(name) or name.isdecimal():
        return
    uses.need("command", name, weight)
    _network(name, words, uses)
    if name in ("bash", "sh", "zsh", "dash", "ksh"):
        _shell(words, uses)
    elif _PYTHONS.fullmatch(name):
        _python(words, uses, weight)
    elif name in ("node", "bun") and words[:1] in (["-e"], ["--eval"], ["-p"]) and words[1:]:
        uses.embed("javascript", words[1])
    elif name in ("npx", "bunx", "pnpx"):
        _npx(words, uses, weight)
    elif name in ("uv", "uvx", "pipx"):
        _uv(name, words, uses, weight)
    elif name == "find":
        read_command(unwrap_command(name, words)[:29], uses, weight)


def _shell(words: list[str], uses: Uses) -> None:
    texts = (after for word, after in pairwise(words[:6]) if re.fullmatch(r"-[a-z]*c", word))
    if text := next(texts, ""):
        uses.embed("shell", text)


def _python(words: list[str], uses: Uses, weight: Weight) -> None:
    for at, word in enumerate(words[:8]):
        if not word.startswith("-"):
            return
        after = words[at + 1] if at + 1 < len(words) else ""
        if word == "-c":
            uses.embed("python", after)
            return
        if word == "-m" and _MODULE.fullmatch(after):
            uses.need("python", after.partition(".")[0], weight)
            _network(after, words[at + 2 :], uses)
            return


def _npx(words: list[str], uses: Uses, weight: Weight) -> None:
    package = next((word for word in words if not word.startswith("-")), "")
    name = re.sub(r"(?<=.)@[^/]{0,200}$", "", package)
    if name and DYNAMIC not in name:
        uses.package(name)
        uses.need("npx", name, weight)


def _uv(name: str, words: list[str], uses: Uses, weight: Weight) -> None:
    if name == "uv" and words[:1] == ["run"]:
        rest = words[1:]
        while rest and rest[0].startswith("-"):
            if rest[0] == "--with" and rest[1:]:
                uses.package(re.split(r"[<>=~!\[]", rest[1])[0])
            rest = rest[2 if rest[0] in ("--with", "--python", "-p", "--from") else 1 :]
        if rest and not rest[0].endswith(".py"):
            read_command(rest, uses, weight)
    elif name == "uv" and words[:2] == ["pip", "install"]:
        _network("pip", words[1:], uses)


def _network(name: str, words: list[str], uses: Uses) -> None:
    plain = [word for word in words if not word.startswith("-")]
    if not plain or (name, plain[0]) not in _INSTALLS:
        return
    uses.need("network", f"{name} {plain[0]}", "sometimes")
    if name in ("pip", "pip3", "npm", "yarn", "pnpm", "bun"):
        for word in plain[1:20]:
            uses.package(re.split(r"[<>=~!\[;\s]|(?<=.)@", word)[0])


def distribution(name: str) -> str:
    """Return a distribution's normalised name, by which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_requirements(text: str) -> Uses:
    """Read a `requirements.txt`."""
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
    """Read from a `package.json` what scripts need when they run, not what building needs."""
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
    """Read the `# /// script` block of a Python script (PEP 723)."""
    uses = Uses()
    found = _BLOCK.search(text[:16_384])
    if not found:
        return uses
    uses.inline = True
    lines = found[1].replace("\r\n", "\n").splitlines(keepends=True)
    body = "".join(line[2:] if line.startswith("# ") else "\n" for line in lines)
    try:
        dependencies = tomllib.loads(body).get("dependencies")
    except (tomllib.TOMLDecodeError, RecursionError):
        return uses
    for each in dependencies if isinstance(dependencies, list) else ():
        if isinstance(each, str):
            _requirement(each, uses)
    return uses


def read_shebang(text: str) -> tuple[str, Uses]:
    """Return the program that the file's first line names ("" without one) and its needs."""
    uses = Uses()
    words = text[2:300].partition("\n")[0].split() if text.startswith("#!") else []
    if words and words[0].rsplit("/", 1)[-1] == "env":
        words = [word for word in words[1:] if word not in ("-S", "--split-string", "-i")]
    words = [word for word in words if "=" not in word.split("/")[0]]
    if not words:
        return "", uses
    program = words[0].rsplit("/", 1)[-1]
    read_command([program, *words[1:], "this.py"], uses)
    return program, uses


def code_blocks(text: str) -> Iterator[tuple[Language, str]]:
    """Yield the fenced blocks of a Markdown text that are in a supported language."""
    for number, found in enumerate(FENCED.finditer(text + "\n")):
        language = _LANGUAGES.get(found["language"].lower())
        if language and number < 100:
            code = found["code"]
            is_shell = language == "shell"
            yield language, _strip_prompts(_PLACEHOLDER.sub(DYNAMIC, code)) if is_shell else code


def _strip_prompts(code: str) -> str:
    lines = [line.lstrip() for line in code.splitlines()]
    prompted = [line[2:] for line in lines if line.startswith("$ ")]
    return "\n".join(prompted or code.splitlines())
