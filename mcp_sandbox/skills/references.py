"""Which files a skill's text refers to, and which of them are not there. Pure."""

import difflib
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from urllib.parse import unquote

from mcp_sandbox.skills.models import Diagnostic

_LINK = re.compile(
    r"\[[^\[\]\n]{0,300}\]\(\s*<?([^()\[\]\s>]{1,300})>?(?:\s+[\"'(][^\n)]{0,200})?\)"
)
# Paths under the folders that skills have by custom, as they stand in code and in sentences.
_PLAIN = re.compile(
    r"(?<![\w./~$}\\*:<>-])(?:\./)?((?:scripts|references|assets|resources|templates|examples)/"
    r"[\w./-]{0,200}[\w-]\.[A-Za-z0-9]{1,8})(?![\w/*{<$-])"
)
_OWN_FOLDER = re.compile(r"^(?:\$?\{(?:baseDir|CLAUDE_SKILL_DIR|SKILL_DIR)\}|\$SKILL_DIR)/")
_ELSEWHERE = re.compile(r"^(?:[A-Za-z][A-Za-z0-9+.-]*:|//|/|#|~|\$|\{)")
_PLACEHOLDER = re.compile(
    r"[<>{}*$|…]|\.\.\.|\b(?:path|your|example|file(?:name)?|url|link)\b", re.I
)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})", re.MULTILINE)
_RUN = re.compile(r"(?:^|[\s`;&|(])\./([\w.-]+(?:/[\w.-]+){0,8})")
_COMPARED = 500
_MAX_TOLD = 20


def missing_references(
    body: str, files: Collection[str], first_line: int = 1
) -> Iterator[Diagnostic]:
    """Yield what the text refers to in the skill's folder and is not there, up to 20."""
    known = {*files, *_folders(files)}
    told = set[str]()
    for at, path in references(body):
        if path in known or path in told:
            continue
        told.add(path)
        if len(told) > _MAX_TOLD:
            return
        near = difflib.get_close_matches(path, sorted(known)[:_COMPARED], n=1)
        fix = f"Write {near[0]}, or add the file." if near else "Add the file, or correct the path."
        line = first_line + body.count("\n", 0, at)
        reason = f"The text refers to {path!a}, which is not there."
        yield Diagnostic("missing-reference", "warning", reason, fix, line)


def run_by_path(body: str, files: Mapping[str, bytes], first_line: int = 1) -> Iterator[Diagnostic]:
    """Yield where the text runs a script as a program: the right to be run is easily lost."""
    told = set[str]()
    for match in _RUN.finditer(body):
        path = match[1]
        if path in told or not files.get(path, b"").startswith(b"#!"):
            continue
        told.add(path)
        program = files[path][2:100].split(b"\n")[0].decode("utf-8", "replace").split()
        names = [posixpath.basename(word) for word in program if not word.startswith("-")]
        name = next((each for each in names if each != "env"), "sh")
        line = first_line + body.count("\n", 0, match.start())
        reason = f"The text runs {'./' + path!a} itself, which archives and copies may forbid."
        yield Diagnostic("run-by-path", "note", reason, f"Write `{name} {path}`.", line)


def references(body: str) -> Iterator[tuple[int, str]]:
    """Yield where the text refers to a path in the skill's folder, and to which."""
    fenced = list(_fenced(body))
    found = [(match.start(), match[1], True) for match in _LINK.finditer(body)]
    found += [(match.start(), match[1], False) for match in _PLAIN.finditer(body)]
    for at, target, is_link in sorted(found):
        if is_link and any(start <= at < end for start, end in fenced):
            continue
        path = _path(target, is_link)
        if path:
            yield at, path


def _path(target: str, is_link: bool) -> str | None:
    target = _OWN_FOLDER.sub("", target)
    if _ELSEWHERE.match(target):
        return None
    path = target.partition("#")[0].partition("?")[0]
    path = posixpath.normpath(unquote(path)) if path else ""
    if path in ("", ".") or path.startswith("..") or _PLACEHOLDER.search(path):
        return None
    # "[text](word)" may be anything; a file has an ending or a folder.
    return path if not is_link or "." in path or "/" in path else None


def _fenced(body: str) -> Iterator[tuple[int, int]]:
    """Where blocks of code are: links in them are examples."""
    opened: re.Match[str] | None = None
    for match in _FENCE.finditer(body):
        if opened is None:
            opened = match
        elif match[1].startswith(opened[1]):
            yield opened.start(), match.end()
            opened = None
    if opened is not None:
        yield opened.start(), len(body)


def _folders(files: Collection[str]) -> Iterator[str]:
    for path in files:
        while (path := posixpath.dirname(path)) != "":
            yield path
