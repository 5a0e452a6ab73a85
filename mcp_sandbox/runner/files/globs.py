"""Turns a glob into a test for paths, with the rules of .gitignore lines and ripgrep's --glob.

`*` and `?` stay within a name, `**` as a whole name is any number of directories, `[a-z]` and
`[!a-z]` are sets, `{a,b}` are alternatives, a backslash takes the next character as it is. A
pattern without a slash is for the name alone, at any depth; with one it is for the whole path. A
slash at its end means all that is in that directory; `!` at its start turns it round.
"""

from __future__ import annotations

import os.path
import re
from typing import TYPE_CHECKING

from mcp_sandbox.runner.files.paths import resolve, show
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_GLOB = 1000
_MAX_STARS = 32
_MAX_NESTING = 8
# What ripgrep reads byte by byte, or otherwise than we do, is left out of this set.
_SAME_IN_RIPGREP = re.compile(r"(?!!)(?:[\w\-. +@%=,/*]|\{[\w\-. +@%=,*]*\})+", re.ASCII)


def placed(pattern: str, base: str) -> tuple[str, str]:
    """The directory that a glob is for, and the glob below it: `~/*.py` is for the home."""
    beginning = re.split(r"[*?\[{\\]", pattern)[0] if pattern.startswith(("/", "~")) else ""
    folder = beginning.rpartition("/")[0]
    place = resolve(folder) if folder and not os.path.exists(f"{base}/{folder}") else ""
    return (place, pattern[len(folder) :]) if os.path.isdir(place) else (base, pattern)


def normalize(pattern: str, base: str) -> str:
    """The glob relative to the directory `base`, ready to be compiled.

    Raises:
        OpError: it is empty, too long, too costly, or leads out of `base`.
    """
    glob = pattern[2:] if pattern.startswith("./") else pattern
    inside = base.rstrip("/") + "/"
    if glob.startswith(inside):
        glob = "/" + glob[len(inside) :]
    if glob.endswith("/") and glob != "/":
        glob += "**"
    stars = len(re.findall(r"\*+", glob))
    if not glob.strip("/!") or "\0" in glob or len(glob) > MAX_GLOB or stars > _MAX_STARS:
        raise _bad(pattern, f"it must have 1 to {MAX_GLOB} characters, not only slashes, few stars")
    if ".." in glob.split("/"):
        raise _bad(pattern, "'..' matches nothing: give the directory as path instead")
    return glob


def names_git(glob: str) -> bool:
    """Whether the glob asks for what is in .git itself."""
    return ".git" in glob.lstrip("!").split("/")


def same_in_ripgrep(glob: str) -> bool:
    """Whether ripgrep surely reads this normalized glob as `compile_glob` does."""
    return _SAME_IN_RIPGREP.fullmatch(glob) is not None and "***" not in glob


def compile_glob(glob: str) -> Callable[[str], bool]:
    """A test for paths relative to the base of the normalized glob.

    Raises:
        OpError: a set or an alternative is not closed.
    """
    turned = glob.startswith("!")
    body = glob[1:] if turned else glob
    anchored = "/" in body
    expression = _Translation(body.lstrip("/") if anchored else f"**/{body}").run()
    try:
        matches = re.compile(expression, re.DOTALL).fullmatch
    except (re.error, OverflowError, RecursionError) as exc:
        raise _bad(glob, str(exc)) from exc
    if turned:
        return lambda path: matches(path) is None
    return lambda path: matches(path) is not None


def _bad(glob: str, why: str) -> OpError:
    return OpError("invalid", f"the glob {show(glob[:200])!r} cannot be used: {why}")


class _Translation:
    """A glob on its way to a regular expression."""

    def __init__(self, glob: str) -> None:
        self._glob = glob
        self._at = 0
        self._nesting = 0

    def run(self) -> str:
        out = []
        while self._at < len(self._glob):
            out.append(self._next())
        if self._nesting:
            raise _bad(self._glob, "a '{' has no '}'")
        return "".join(out)

    def _next(self) -> str:
        char = self._glob[self._at]
        if char == "*":
            return self._star()
        self._at += 1
        if char == "?":
            return "[^/]"
        if char == "[":
            return self._set()
        if char in "{},":
            return self._brace(char)
        if char == "\\" and self._at < len(self._glob):
            char = self._glob[self._at]
            self._at += 1
        return re.escape(char)

    def _star(self) -> str:
        start = self._at
        while self._glob[self._at : self._at + 1] == "*":
            self._at += 1
        whole_name = start == 0 or self._glob[start - 1] == "/"
        if self._at - start < 2 or not whole_name:
            return "[^/]*"
        if self._at == len(self._glob):
            return ".+"
        if self._glob[self._at] != "/":
            return "[^/]*"
        while self._glob.startswith("/**/", self._at):
            self._at += 3
        self._at += 1
        return "(?:.*/)?"

    def _brace(self, char: str) -> str:
        if char == "{":
            self._nesting += 1
            if self._nesting > _MAX_NESTING:
                raise _bad(self._glob, f"'{{' is nested more than {_MAX_NESTING} deep")
            return "(?:"
        if char == "}":
            if not self._nesting:
                raise _bad(self._glob, "a '}' has no '{'")
            self._nesting -= 1
            return ")"
        return "|" if self._nesting else ","

    def _set(self) -> str:
        """What follows a '[' up to its ']', which may come first without closing."""
        turned = self._glob[self._at : self._at + 1] in ("!", "^")
        start = self._at + turned
        end = self._glob.find("]", start + 1)
        if end < 0:
            raise _bad(self._glob, "a '[' has no ']'")
        inner = re.sub(r"([\\\[\]^&~|])", r"\\\1", self._glob[start:end]).replace("--", r"-\-")
        self._at = end + 1
        return f"(?!/)[{'^' if turned else ''}{inner}]"
