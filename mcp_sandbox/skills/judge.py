"""Looks at a skill's files for what harms whoever uses it: by reading, never by running. Pure.

What it says is advice: a teaching text about attacks looks like one. Nothing is refused for it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from mcp_sandbox.skills import front_matter, rules
from mcp_sandbox.skills.contents import kind_of
from mcp_sandbox.skills.models import Diagnostic
from mcp_sandbox.skills.references import missing_references, run_by_path
from mcp_sandbox.skills.uris import DOCUMENT

LARGE_FILE = 1 << 20
LARGE_SKILL = 8 << 20
_BYTES_READ = 1 << 20


@dataclass(frozen=True)
class _Sign:
    """Text that tells of harm; "{}" in the reason stands for it."""

    code: str
    reason: str
    fix: str
    pattern: re.Pattern[str]


_SHELL = r"(?:sudo\s+(?:-\S+\s+)*)?(?:ba|z|da|k|fi)?sh\b"
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
)
_KEYS = {
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s*\n\s*[A-Za-z0-9+/]{20}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_\w{60,255})",
    "an Anthropic key": r"\bsk-ant-[\w-]{32,255}",
    "an OpenAI key": r"\bsk-(?!ant-)(?:proj-)?[A-Za-z0-9_-]{40,255}",
    "a Google key": r"\bAIza[\w-]{35}\b",
    "a Slack token": r"\bxox[abprs]-[0-9A-Za-z-]{20,255}",
    "a Stripe key": r"\b[rs]k_live_[0-9A-Za-z]{20,255}",
    "an npm token": r"\bnpm_[A-Za-z0-9]{36}\b",
}
_SECRETS = tuple(
    _Sign(
        "secret",
        f"It seems to hold {what}.",
        "Revoke it, and let the script read it from a variable.",
        re.compile(pattern),
    )
    for what, pattern in _KEYS.items()
)
_MAX_OF_A_KIND = 20
_EXAMPLE = re.compile(r"example|x{6,}|\.\.\.|1234567|abcdef|(.)\1{7}", re.IGNORECASE)
_ARCHIVES = (b"PK\x03\x04", b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"7z\xbc\xaf", b"Rar!")
# Documents that are archives inside; they are opened by what knows them.
_DOCUMENTS = frozenset({".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp", ".epub", ".jar", ".whl"})
_PROGRAMS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_POINTER = b"version https://git-lfs.github.com/spec/v1"


def judge(files: Mapping[str, bytes]) -> Sequence[Diagnostic]:
    """Return what is to say about a skill's files, by path; the document is SKILL.md."""
    found = list(_of_document(files))
    for path, data in files.items():
        found += _of_file(path, data)
    total = sum(map(len, files.values()))
    if total > LARGE_SKILL:
        reason = f"The skill has {total / 2**20:.1f} MiB; clients take 16 at most."
        found.append(Diagnostic("large-skill", "note", reason, "Leave out what can be fetched."))
    return _thinned(found)


def _of_document(files: Mapping[str, bytes]) -> Iterator[Diagnostic]:
    data = files.get(DOCUMENT, b"")
    parts = front_matter.split(data)
    first_line = len(re.findall(rb"\r\n?|\n", parts.head)) + 1
    yield from rules.of_body(parts.body, first_line)
    body = parts.body[:_BYTES_READ].decode("utf-8", "replace")
    yield from missing_references(body, files, first_line)
    yield from run_by_path(body, files, first_line)


def _of_file(path: str, data: bytes) -> Iterator[Diagnostic]:
    if len(data) > LARGE_FILE:
        reason = f"{path} has {len(data) / 2**20:.1f} MiB."
        yield Diagnostic(
            "large-file", "note", reason, "Make it smaller, or leave it out.", file=path
        )
    if kind_of(data) == "text":
        yield from _of_text(path, data[:_BYTES_READ].decode("utf-8", "replace"))
    else:
        yield from _of_binary(path, data)
    if data.startswith(_POINTER):
        reason = f"{path} is a pointer into large-file storage and not the file."
        fix = "Put the file itself there: `git lfs pull` in a clone of its repository."
        yield Diagnostic("lfs-pointer", "warning", reason, fix, file=path)


def _of_binary(path: str, data: bytes) -> Iterator[Diagnostic]:
    if data.startswith(_PROGRAMS):
        reason = f"{path} is a program that nobody can read."
        fix = "Put its source there, or say in the text how to install it."
        yield Diagnostic("program", "warning", reason, fix, file=path)
    elif data.startswith(_ARCHIVES) and PurePosixPath(path).suffix.lower() not in _DOCUMENTS:
        reason = f"{path} is an archive; what is in it was not looked at."
        yield Diagnostic("archive", "note", reason, "Put its files there.", file=path)


def _of_text(path: str, text: str) -> Iterator[Diagnostic]:
    for sign in _SIGNS:
        for match in sign.pattern.finditer(text):
            yield _at(sign, path, text, match)
    for sign in _SECRETS:
        for match in sign.pattern.finditer(text):
            if not _EXAMPLE.search(match[0]):
                yield _at(sign, path, text, match)
    # What hides in the document itself is told with its body.
    if path != DOCUMENT and (hidden := rules.HIDDEN.search(text.removeprefix("\ufeff"))):
        reason = f"It has the hidden character U+{ord(hidden[0]):04X}."
        fix = "Delete it, or write it as an escape."
        yield _at(_Sign("hidden-character", reason, fix, rules.HIDDEN), path, text, hidden)


def _at(sign: _Sign, path: str, text: str, match: re.Match[str]) -> Diagnostic:
    line = text.count("\n", 0, match.start()) + 1
    reason = sign.reason.format(_shown(match[0]))
    return Diagnostic(sign.code, "warning", reason, sign.fix, line, path)


def _shown(text: str) -> str:
    shown = " ".join(text.split())
    return ascii(shown if len(shown) <= 80 else shown[:79] + "…")


def _thinned(found: Sequence[Diagnostic]) -> Sequence[Diagnostic]:
    """The first of each kind; hundreds would hide the others."""
    counts: dict[str, int] = {}
    kept = list[Diagnostic]()
    for each in found:
        counts[each.code] = counts.get(each.code, 0) + 1
        if counts[each.code] <= _MAX_OF_A_KIND:
            kept.append(each)
    for code, count in counts.items():
        if count > _MAX_OF_A_KIND:
            reason = f"There are {count - _MAX_OF_A_KIND} more of the kind {code}."
            kept.append(Diagnostic("more", "note", reason, "Mend those above first."))
    return kept
