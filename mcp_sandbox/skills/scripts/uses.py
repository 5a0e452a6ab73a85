"""What the readers of the languages write down."""

import re
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["command", "python", "distribution", "node", "npx", "interpreter", "network"]
"""A `distribution` is what pip installs, under its own name; `npx` runs a command of a package."""
Weight = Literal["always", "sometimes", "optional"]
"""Needed whenever the file runs; by some of what it does; or it does without."""

Language = Literal["python", "shell", "javascript"]

DYNAMIC = "\0"
"""Stands in a text for what is known only when the script runs."""

_MOST = 500
_HOST = re.compile(
    r"\b(?:https?|wss?|ftp)://(?:[^\s/@\0]*@)?([A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)"
)
# Names of XML languages and of licences; nobody connects to them.
_NO_HOSTS = re.compile(
    r"(?:schemas?\..*|(?:.*\.)?(?:w3\.org|purl\.org|opensource\.org|apache\.org|"
    r"openxmlformats\.org|openoffice\.org|example\.(?:com|org|net)|example|gnu\.org|json-schema\.org))"
)
# What npm takes for a package: anything else would be words of its author among ours.
_PACKAGE = re.compile(r"@?[A-Za-z0-9][\w./-]{0,99}")
_LOCAL = re.compile(r"localhost|127\..*|0\.0\.0\.0|\[?::1\]?|host\.docker\.internal")


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


@dataclass(frozen=True)
class Use:
    """Something that a script needs; it does without where `unless` is importable."""

    kind: Kind
    name: str
    weight: Weight = "always"
    unless: str = ""


@dataclass
class Uses:
    """What one file uses. Each list is bounded; what comes after its end is left out.

    `embedded` is code that stands inside of it, as in `python3 -c`. `inline`: it declares its
    packages itself (PEP 723).
    """

    needs: list[Use] = field(default_factory=list[Use])
    hosts: set[str] = field(default_factory=set[str])
    variables: set[str] = field(default_factory=set[str])
    packages: set[str] = field(default_factory=set[str])
    writes: set[str] = field(default_factory=set[str])
    embedded: list[tuple[Language, str]] = field(default_factory=list[tuple[Language, str]])
    inline: bool = False

    def need(self, kind: Kind, name: str, weight: Weight = "always", unless: str = "") -> None:
        """Note a need, unless there are too many, or no package can have the name."""
        if kind in ("node", "npx") and not _PACKAGE.fullmatch(name):
            return
        if len(self.needs) < _MOST and 0 < len(name) <= 100:
            self.needs.append(Use(kind, name, weight, unless))

    def text(self, text: str) -> None:
        """Note the hosts of the addresses in a text."""
        for found in _HOST.finditer(text):
            host = found[1].lower()
            if len(self.hosts) < _MOST and _is_host(host):
                self.hosts.add(host)

    def variable(self, name: str) -> None:
        """Note an environment variable."""
        if len(self.variables) < _MOST and re.fullmatch(r"[A-Za-z_]\w{0,99}", name):
            self.variables.add(name)

    def package(self, name: str) -> None:
        """Note a package that a script or a list of requirements names."""
        if len(self.packages) < _MOST and _PACKAGE.fullmatch(name):
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


def _is_host(host: str) -> bool:
    if _NO_HOSTS.fullmatch(host) or _LOCAL.fullmatch(host):
        return False
    return "." in host and ".." not in host and len(host) <= 253
