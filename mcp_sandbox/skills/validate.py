"""Looks at one skill's folder as a whole: can it be used, and what is wrong with it. Blocking.

Harmful text is found by reading the files, never by running them. Such findings are advice: a text
that teaches about attacks looks like one. No skill is refused for them.
"""

import difflib
import importlib
import posixpath
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from mcp_sandbox.errors import Busy, TooLarge, Unsupported
from mcp_sandbox.skills import front_matter
from mcp_sandbox.skills.contents import gather, kind_of, open_folder, read_whole
from mcp_sandbox.skills.parse import HIDDEN, of_body, parse
from mcp_sandbox.skills.skill import (
    DOCUMENT,
    Diagnostic,
    FrontMatter,
    document_among,
    make_diagnostic,
)

_BYTES_READ = 1 << 20
_SHELL = r"(?:sudo\s+(?:-\S+\s+)*)?(?:ba|z|da|k|fi)?sh\b"
_KEYS = {
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----[^\S\n]*+\n\s*+[A-Za-z0-9+/]{20}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{60,255})",
    "an Anthropic key": r"\bsk-ant-[\w-]{32,255}",
    "an OpenAI key": r"\bsk-(?!ant-)(?:proj-)?[A-Za-z0-9_-]{40,255}",
    "a Google key": r"\bAIza[\w-]{35}\b",
    "a Slack token": r"\bxox[abprs]-[0-9A-Za-z-]{20,255}",
    "a Stripe key": r"\b[rs]k_live_[0-9A-Za-z]{20,255}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}\b",
}
_REVOKE = "Revoke it, and let the script read it from a variable."
_MAX_OF_A_KIND = 20
_EXAMPLE = re.compile(r"example|x{6,}|\.\.\.|1234567|abcdef|(.)\1{7}", re.IGNORECASE)
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"7z\xbc\xaf", b"Rar!")
# Documents that are archives inside; they are opened by what knows them.
_DOCUMENTS = frozenset({".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp", ".epub", ".jar", ".whl"})
_PROGRAMS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_LINK = re.compile(
    r"\[[^\[\]\n]{0,300}\]\(\s*<?([^()\[\]\s>]{1,300})>?(?:\s+[\"'(][^\n)]{0,200})?\)"
)
# Paths under the folders that skills have by custom, as they stand in code and in sentences.
_PLAIN = re.compile(
    r"(?<![\w./~$}\\*:<>-])(?:\./)?((?:scripts|references|assets|resources|templates|examples)/"
    r"[\w./-]{0,200}[\w-]\.[A-Za-z0-9]{1,8})(?![\w/*{<$-])"
)
_OWN_FOLDER = re.compile(r"^(?:\$?\{(?:baseDir|CLAUDE_SKILL_DIR|SKILL_DIR)\}|\$SKILL_DIR)/")
# A block of code; a last one that does not end has to end in a line feed.
_FENCED = re.compile(
    r"^[ \t]*(?P<fence>`{3,}+|~{3,}+)[^\n]*+\n(?:(?!^[ \t]*(?P=fence))[^\n]*\n)*"
    r"(?:^[ \t]*(?P=fence)[^\n]*)?",
    re.MULTILINE,
)
_ELSEWHERE = re.compile(r"^(?:[A-Za-z][A-Za-z0-9+.-]*:|//|/|#|~|\$|\{)")
_PLACEHOLDER = re.compile(
    r"[<>{}*$|…]|\.\.\.|\b(?:path|your|example|file(?:name)?|url|link)\b", re.I
)
_RUN = re.compile(r"(?:^|[\s`;&|(])\./([\w.-]+(?:/[\w.-]+){0,8})")
_COMPARED = 500


@dataclass(frozen=True)
class ExaminedSkill:
    """A skill's folder. `front` is None where it cannot be used; `files` by their paths in it."""

    folder: Path
    front: FrontMatter | None
    diagnostics: tuple[Diagnostic, ...]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)

    @property
    def name(self) -> str:
        return self.front.name if self.front else self.folder.name

    @property
    def faulty(self) -> bool:
        return any(each.level == "error" for each in self.diagnostics)


def examine(folder: Path, *, strictly: bool = False) -> ExaminedSkill:
    """Look at the skill in a folder; `strictly`: the reference tool looks at it, too.

    Raises Unsupported: the reference tool is wanted and not installed.
    """
    folder = folder.absolute()
    try:
        document = document_among(place.name for place in folder.iterdir())
        if not stat.S_ISREG(mode := (folder / document).lstat().st_mode):
            flaw = make_diagnostic("link" if stat.S_ISLNK(mode) else "not-a-file", document)
            return ExaminedSkill(folder, None, (flaw,))
        contents = gather(folder, document).contents
        with open_folder(folder, None) as directory:
            spelled = {DOCUMENT: document}
            files = {
                file.path: read_whole(directory, spelled.get(file.path, file.path)).data
                for file in contents.files
            }
    except OSError as exc:
        return ExaminedSkill(folder, None, (make_diagnostic("unreadable", error=exc),))
    except (TooLarge, Busy) as exc:
        fix = "Make its files small enough, and leave them alone for a moment."
        return ExaminedSkill(folder, None, (Diagnostic("unreadable", "error", str(exc), fix),))
    found = examine_files(files, folder.name, document)
    # The tool reads without limits, so it gets only what was read within ours.
    refused = _refused(folder) if strictly and found.front is not None else ()
    return replace(
        found, folder=folder, diagnostics=(*refused, *found.diagnostics, *contents.diagnostics)
    )


def examine_files(
    files: Mapping[str, bytes], folder_name: str, document: str = DOCUMENT
) -> ExaminedSkill:
    """Look at a skill's files, which lie in a folder of that name or shall do so. Pure."""
    parsed = parse(files[DOCUMENT], folder_name, document)
    return ExaminedSkill(
        Path(folder_name), parsed.front, (*parsed.diagnostics, *judge(files)), files
    )


def _refused(folder: Path) -> Iterator[Diagnostic]:
    try:
        tool = importlib.import_module("skills_ref")
    except ModuleNotFoundError as exc:
        raise Unsupported(
            "--strict asks the reference tool, which is not installed: "
            "pip install 'mcp-sandbox[strict]', or leave --strict out"
        ) from exc
    try:
        faults: list[str] = tool.validate(folder)
    except (ValueError, AttributeError, RecursionError) as exc:
        faults = [f"The reference tool fails: {exc}"]
    for fault in faults:
        fix = "Correct it; where other remarks name a line, begin there."
        yield Diagnostic("reference-tool", "error", " ".join(fault.split())[:400], fix)


@dataclass(frozen=True)
class _Sign:
    """A pattern of harmful text; "{}" in the reason stands for the match."""

    code: str
    reason: str
    fix: str
    pattern: re.Pattern[str]


_SIGNS = (
    _Sign(
        "pipe-to-shell",
        "It runs what a server sends, unseen: {}.",
        "Save it to a file and check its digest first, or install a package.",
        re.compile(
            r"\b(?:curl|wget)\b(?=[^\n|]{0,300}(?:://|\$|<\w))"
            rf"[^\n|;&]{{0,300}}\|\s*(?:{_SHELL}|python[0-9.]*\b|node\b|perl\b)"
            r"|\b(?:ba|z|da)?sh\s+(?:-c\s+[\"']?\$\(|<\(\s*)(?:curl|wget)\b"
            r"|\b(?:eval|source|\.)\s+[\"']?(?:\$\(|`|<\()\s*(?:curl|wget)\b"
            rf"|\bbase64\s+(?:-d|-D|--decode)\b[^\n|]{{0,200}}\|\s*{_SHELL}"
            r"|\b(?:iex|invoke-expression)\b[^\n]{0,80}\b(?:iwr|irm|invoke-webrequest|download)",
            re.IGNORECASE,
        ),
    ),
    _Sign(
        "injection",
        "It tells a model to drop its instructions: {}.",
        "Look why it says that, and what comes after it.",
        re.compile(
            r"\b(?:ignore|disregard|forget)\s+(?:all\s+|any\s+|the\s+|your\s+)*"
            r"(?:previous|prior|above|earlier|system)\s+(?:instructions|prompts?|messages|rules)\b",
            re.IGNORECASE,
        ),
    ),
    *(
        _Sign("secret", f"It seems to hold {what}.", _REVOKE, re.compile(pattern))
        for what, pattern in _KEYS.items()
    ),
)


def judge(files: Mapping[str, bytes]) -> Sequence[Diagnostic]:
    """Return what is to say about a skill's files, by path; the document is SKILL.md."""
    parts = front_matter.split(files.get(DOCUMENT, b""))
    first_line = len(re.findall(rb"\r\n?|\n", parts.head)) + 1
    body = parts.body[:_BYTES_READ].decode("utf-8", "replace")
    found = [
        *of_body(parts.body, first_line),
        *_missing_references(body, files, first_line),
        *_run_by_path(body, files, first_line),
    ]
    for path, data in files.items():
        found += _of_file(path, data)
    if (total := sum(map(len, files.values()))) > 8 * 2**20:
        reason = f"The skill has {total / 2**20:.1f} MiB; clients take 16 at most."
        found.append(Diagnostic("large-skill", "note", reason, "Leave out what can be fetched."))
    return _limit_each_kind(found)


def _of_file(path: str, data: bytes) -> Iterator[Diagnostic]:
    if len(data) > 2**20:
        reason = f"{path} has {len(data) / 2**20:.1f} MiB."
        fix = "Make it smaller, or leave it out."
        yield Diagnostic("large-file", "note", reason, fix, file=path)
    if kind_of(data) == "text":
        yield from _of_text(path, data[:_BYTES_READ].decode("utf-8", "replace"))
    elif data.startswith(_PROGRAMS):
        reason = f"{path} is a compiled program, which cannot be reviewed."
        fix = "Put its source there, or say in the text how to install it."
        yield Diagnostic("program", "warning", reason, fix, file=path)
    elif data.startswith(_ARCHIVES) and PurePosixPath(path).suffix.lower() not in _DOCUMENTS:
        reason = f"{path} is an archive; what is in it was not looked at."
        yield Diagnostic("archive", "note", reason, "Put its files there.", file=path)
    if data.startswith(b"version https://git-lfs.github.com/spec/v1"):
        reason = f"{path} is a pointer into large-file storage and not the file."
        fix = "Put the file itself there: `git lfs pull` in a clone of its repository."
        yield Diagnostic("lfs-pointer", "warning", reason, fix, file=path)


def _of_text(path: str, text: str) -> Iterator[Diagnostic]:
    for sign in _SIGNS:
        for match in sign.pattern.finditer(text):
            if sign.code != "secret" or not _EXAMPLE.search(match[0]):
                yield _at(sign, path, text, match)
    # Hidden characters of the document itself are reported with its body.
    if path != DOCUMENT and (hidden := HIDDEN.search(text.removeprefix("\ufeff"))):
        reason = f"It has the hidden character U+{ord(hidden[0]):04X}."
        fix = "Delete it, or write it as an escape."
        yield _at(_Sign("hidden-character", reason, fix, HIDDEN), path, text, hidden)


def _at(sign: _Sign, path: str, text: str, match: re.Match[str]) -> Diagnostic:
    line = text.count("\n", 0, match.start()) + 1
    excerpt = " ".join(match[0].split())
    reason = sign.reason.format(ascii(excerpt if len(excerpt) <= 80 else excerpt[:79] + "…"))
    return Diagnostic(sign.code, "warning", reason, sign.fix, line, path)


def _limit_each_kind(found: Sequence[Diagnostic]) -> Sequence[Diagnostic]:
    counts = Counter[str]()
    first = list[Diagnostic]()
    for each in found:
        counts[each.code] += 1
        if counts[each.code] <= _MAX_OF_A_KIND:
            first.append(each)
    for code, count in counts.items():
        if count > _MAX_OF_A_KIND:
            reason = f"There are {count - _MAX_OF_A_KIND} more of the kind {code}."
            first.append(Diagnostic("more", "note", reason, "Mend those above first."))
    return first


def _missing_references(body: str, files: Collection[str], first_line: int) -> Iterator[Diagnostic]:
    """Yield what the text refers to in the skill's folder and is not there, up to 20."""
    known = {*files, *{str(folder) for path in files for folder in PurePosixPath(path).parents}}
    named = set[str]()
    # Links in blocks of code are examples.
    blocks = [block.span() for block in _FENCED.finditer(f"{body}\n")]
    found = [(match.start(), match[1], True) for match in _LINK.finditer(body)]
    found += [(match.start(), match[1], False) for match in _PLAIN.finditer(body)]
    for at, target, is_link in sorted(found):
        path = _path(target, is_link)
        in_code = is_link and any(start <= at < end for start, end in blocks)
        if not path or in_code or path in known or path in named:
            continue
        named.add(path)
        if len(named) > 20:
            return
        near = difflib.get_close_matches(path, sorted(known)[:_COMPARED], n=1)
        fix = f"Write {near[0]}, or add the file." if near else "Add the file, or correct the path."
        line = first_line + body.count("\n", 0, at)
        reason = f"The text refers to {path!a}, which is not there."
        yield Diagnostic("missing-reference", "warning", reason, fix, line)


def _run_by_path(body: str, files: Mapping[str, bytes], first_line: int) -> Iterator[Diagnostic]:
    """Yield where the text runs a script as a program: the right to be run is easily lost."""
    named = set[str]()
    for match in _RUN.finditer(body):
        path = match[1]
        if path in named or not files.get(path, b"").startswith(b"#!"):
            continue
        named.add(path)
        program = files[path][2:100].split(b"\n")[0].decode("utf-8", "replace").split()
        names = [posixpath.basename(word) for word in program if not word.startswith("-")]
        name = next((each for each in names if each != "env"), "sh")
        line = first_line + body.count("\n", 0, match.start())
        reason = f"The text runs {'./' + path!a} itself, which archives and copies may forbid."
        yield Diagnostic("run-by-path", "note", reason, f"Write `{name} {path}`.", line)


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
