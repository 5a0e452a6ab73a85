#!/usr/bin/env python3
"""Sum up a change, and name the added lines that a reviewer should look at first.

Without BASE: what is not committed, new files too. With BASE: what was committed since the branch
left it (BASE...HEAD). With --diff: a patch file, or - for standard input.

Exit codes: 0 = no hints, 1 = hints, 2 = no change, no repository, or a wrong call.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

# What is looked for in added lines, one alternative a line, and why a reviewer wants to know.
HINTS = {
    "conflict": (r"^(<{7}|>{7}) ", "a merge conflict was left in"),
    "secret": (
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
        r"|\bAKIA[0-9A-Z]{16}\b"
        r"|\bgh[pousr]_\w{36}\b"
        r"|(?i:\b\w*(passw(or)?d|secret|api_?key|token)\w*['\"]?\s*[:=]\s*"
        r"['\"][^'\"\s${<]{8,}['\"])",
        "is this a secret?",
    ),
    "swallowed-error": (
        r"^\s*except(\s+(Base)?Exception)?(\s+as\s+\w+)?\s*:"
        r"|catch\s*(\(\w*\))?\s*\{\s*\}",
        "catches everything, or throws an error away",
    ),
    "runs-text": (
        r"\b(eval|exec)\s*\(|new Function\("
        r"|shell\s*=\s*True|os\.system\("
        r"|pickle\.loads?\(|yaml\.load\(",
        "who controls what is run?",
    ),
    "html-from-text": (
        r"\.innerHTML\s*=|dangerouslySetInnerHTML|\|\s*safe\b|mark_safe\(",
        "puts text into a page unescaped",
    ),
    "sql-from-text": (
        r"(?i)\b(execute|query|raw)\w*\(\s*"
        r"(f['\"]|['\"][^'\"]*\b(select|insert|update|delete)\b[^'\"]*['\"]\s*(%|\+|\.format))",
        "builds SQL by pasting",
    ),
    "no-certificate-check": (
        r"verify\s*=\s*False|rejectUnauthorized\s*:\s*false|InsecureSkipVerify\s*:\s*true",
        "does not check certificates",
    ),
    "test-off": (
        r"@(pytest\.mark\.|unittest\.)?(skip|xfail)\b"
        r"|\b(it|test|describe)\.(skip|only)\b"
        r"|\bfdescribe\(|\bt\.Skip\(",
        "a test is switched off, or it alone is on",
    ),
    "silenced": (
        r"#\s*(type:\s*ignore|noqa)|eslint-disable|@ts-ignore|\bnolint\b",
        "a checker is silenced",
    ),
    "debugging": (
        r"\b(breakpoint|pdb\.set_trace)\(|\bdebugger\s*;|console\.log\(",
        "left from debugging?",
    ),
    "to-do": (r"\b(TODO|FIXME|XXX|HACK)\b", "unfinished, by its own words"),
}
TESTS = re.compile(r"(^|/)(tests?|spec|__tests__)/|(^|/)test_|[._](test|spec)\.\w+$|_test\.\w+$")
CODE = re.compile(r"\.(py|js|mjs|ts|tsx|jsx|go|rs|java|kt|rb|php|c|cc|cpp|h|cs|swift|sh)$")
DEPENDENCIES = re.compile(
    r"(^|/)(package\.json|pyproject\.toml|requirements[\w.-]*\.txt|go\.mod|Cargo\.toml|Gemfile|pom\.xml)$"
)
LARGE = 400
# Nothing in the reviewed repository decides what is run, and its owner may be another user.
GIT = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.quotePath=false"]
DIFF = ["diff", "--no-color", "--no-ext-diff", "--no-textconv", "--find-renames", "-U0"]


class NoChange(Exception):
    """The message says why there is nothing to review."""


@dataclass
class File:
    path: str
    added: int = 0
    removed: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class Hint:
    path: str
    line: int
    code: str
    text: str


def git(repo: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [*GIT, "-C", str(repo), *arguments], capture_output=True, check=False, timeout=120
        )
    except FileNotFoundError:
        raise NoChange("git is not installed; use --diff") from None
    if done.returncode:
        raise NoChange(done.stderr.decode(errors="replace").strip())
    return done.stdout.decode(errors="replace")


def change(repo: Path, base: str | None) -> str:
    if base:
        return git(repo, *DIFF, "--end-of-options", f"{base}...HEAD", "--")
    commits = git(repo, "rev-list", "--all", "--max-count=1")
    tracked = git(repo, *DIFF, *(["HEAD"] if commits else ["--cached"]), "--")
    new = git(repo, "ls-files", "--others", "--exclude-standard", "-z").split("\0")
    return tracked + "".join(as_added(repo, path) for path in new if path)


def as_added(repo: Path, path: str) -> str:
    """A file that git does not know, as a diff shows it."""
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n"
    file = repo / path
    if file.is_symlink() or not file.is_file():
        return head
    data = file.read_bytes()
    if b"\0" in data[:8000]:
        return f"{head}Binary files /dev/null and b/{path} differ\n"
    lines = data.decode(errors="replace").splitlines()
    body = "".join(f"+{line}\n" for line in lines)
    return f"{head}--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{len(lines)} @@\n{body}"


class Review:
    """Reads a unified diff, line by line."""

    def __init__(self, diff: str) -> None:
        self.files: list[File] = []
        self.hints: list[Hint] = []
        self._line = self._left_old = self._left_new = 0
        for text in diff.split("\n"):
            if self._left_old or self._left_new:
                self._changed(text)
            else:
                self._head(text)
        self._judge_files()

    def _head(self, text: str) -> None:
        hunk = re.match(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", text)
        if hunk:
            self._left_old, self._left_new = int(hunk[1] or 1), int(hunk[3] or 1)
            self._line = int(hunk[2])
        elif text.startswith("diff --git "):
            self.files.append(File(text.rpartition(" b/")[2]))
        elif text.startswith("--- ") and not self._begins_file():
            self.files.append(File(text[4:].split("\t", maxsplit=1)[0]))
        elif text.startswith("+++ ") and self.files:
            name = text[4:].split("\t", maxsplit=1)[0]
            if name != "/dev/null":
                self.files[-1].path = name.removeprefix("b/") if name.startswith("b/") else name
        elif self.files:
            self._note(text)

    def _begins_file(self) -> bool:
        return bool(self.files) and not (self.files[-1].added or self.files[-1].removed)

    def _note(self, text: str) -> None:
        for start, note in (
            ("new file", "new"),
            ("deleted file", "deleted"),
            ("rename from ", f"was {text[12:]}"),
            ("new mode ", f"mode {text[9:]}"),
            ("Binary files ", "binary"),
        ):
            if text.startswith(start):
                self.files[-1].notes.append(note)

    def _changed(self, text: str) -> None:
        if text.startswith("+"):
            self.files[-1].added += 1
            self._left_new -= 1
            self._look(text[1:])
            self._line += 1
        elif text.startswith("-"):
            self.files[-1].removed += 1
            self._left_old -= 1
        elif not text.startswith("\\"):
            self._left_old -= 1
            self._left_new -= 1
            self._line += 1

    def _look(self, text: str) -> None:
        for code, (pattern, why) in HINTS.items():
            if re.search(pattern, text[:2000]):
                self.hint(code, f"{why}: {text.strip()[:100]}", self._line)

    def hint(self, code: str, text: str, line: int = 0, path: str = "") -> None:
        self.hints.append(Hint(path or self.files[-1].path, line, code, text))

    def _judge_files(self) -> None:
        for file in self.files:
            if DEPENDENCIES.search(file.path):
                self.hint("dependencies", "are these needed, spelt right, pinned?", path=file.path)
            if "binary" in file.notes:
                self.hint("binary", "cannot be read: where is it from?", path=file.path)
            if "deleted" in file.notes and TESTS.search(file.path):
                self.hint("test-off", "a test file was deleted", path=file.path)
            if file.added > LARGE:
                self.hint("large", f"{file.added} new lines in one file", path=file.path)
        code = [f for f in self.files if CODE.search(f.path) and not TESTS.search(f.path)]
        if sum(f.added for f in code) > 10 and not any(TESTS.search(f.path) for f in self.files):
            self.hint("no-tests", "code was changed and no test", path=code[0].path)


def show(review: Review) -> None:
    width = max(len(file.path) for file in review.files)
    for file in review.files:
        notes = f"  ({', '.join(file.notes)})" if file.notes else ""
        print(f"{file.path.ljust(width)}  +{file.added} -{file.removed}{notes}")
    added, removed = sum(f.added for f in review.files), sum(f.removed for f in review.files)
    print(f"{len(review.files)} files, +{added} -{removed}, {len(review.hints)} hints")
    for hint in review.hints:
        where = f"{hint.path}:{hint.line}" if hint.line else hint.path
        print(f"{where}: {hint.code}: {hint.text}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="review_diff.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="BASE", nargs="?", help="a branch, tag or commit")
    parser.add_argument("--repo", type=Path, default=Path(), help="default: the current folder")
    parser.add_argument("--diff", metavar="FILE", help="a patch file, or -")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    try:
        if given.diff:
            data = sys.stdin.buffer.read() if given.diff == "-" else Path(given.diff).read_bytes()
            diff = data.decode(errors="replace")
        else:
            diff = change(given.repo, given.base)
    except (NoChange, OSError) as exc:
        print(f"review_diff.py: {exc}", file=sys.stderr)
        return 2
    review = Review(diff)
    if not review.files:
        print(
            "review_diff.py: there is no change; give a BASE such as main, or --diff FILE",
            file=sys.stderr,
        )
        return 2
    if given.json:
        print(json.dumps({"files": [asdict(f) for f in review.files],
                          "hints": [asdict(h) for h in review.hints]}))  # fmt: skip
    else:
        show(review)
    return 1 if review.hints else 0


if __name__ == "__main__":
    sys.exit(main())
