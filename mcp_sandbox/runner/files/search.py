r"""Finds files by glob, and lines by regular expression; lists directories.

All look at hidden files, follow no links and pass over what `LeftOut` says. Lines are found by
ripgrep where there is one, else by Python, with equal results: a pattern is one of Python's `re`,
with `[[:alpha:]]`, `\<` and `\>` besides. One that names a line end is looked for across lines,
where `\n` is any line end and `$` is before it.

A glob has the rules of .gitignore lines and ripgrep's --glob: `*` and `?` stay within a name, `**`
as a whole name is any number of directories, `[a-z]` and `[!a-z]` are sets, `{a,b}` alternatives,
a backslash takes the next character as it is. What has such a name with `[` and `{` in it is found,
too. Folders before the first of all these may be links. A pattern without a slash is for the name
alone, at any depth; with one it is for the whole path. A slash at its end means all that is in
that directory; `!` at its start turns it round.
"""

from __future__ import annotations

import os
import os.path
import re
import signal
import stat
import warnings
from bisect import bisect
from collections import deque
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from mcp_sandbox.runner.files.call import closing_fd, put, put_rows
from mcp_sandbox.runner.files.paths import TEMPORARY, guess_path, relativize, resolve, show
from mcp_sandbox.runner.files.reading import open_regular, split
from mcp_sandbox.runner.files.walk import MAX_LIMIT, Budget, join, kind_of, open_directory, walk
from mcp_sandbox.runner.wire.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from mcp_sandbox.runner.files.call import OperationCall

    # A test for what paths have from a place on; whether it keeps; whether it is for folders alone.
    Rule = tuple[Callable[[str], bool], int, bool, bool]

SECONDS = 10.0
MAX_TEXT = 500
MAX_BYTES = 8 * 1024 * 1024
MAX_GLOB = 1000
_MAX_STARS = 32
_MAX_NESTING = 8
# A "]" right after the beginning of a set does not close it.
_TOKEN = (
    r"(?P<folders>(?<![^/])\*{2,}/(?:\*\*/)*)|(?P<all>(?<![^/])\*{2,}\Z)|(?P<some>\*+)|(?P<one>\?)"
    r"|\[(?:(?P<other>[!^])|(?![!^]))(?P<set>.[^\]]*)\]|\\?(?P<char>.)"
)
_MEANING = {"folders": "(?:.*/)?", "all": ".+", "some": "[^/]*", "one": "[^/]"}
# An escaped character, a set, the beginning of a group with a name, or any other character.
_PIECE = re.compile(r"(?s)\\.|\[\^?\]?(?:\[:\w+:\]|\\.|[^\]\\])*\]?|\(\?<(?![=!])|.")
_ACROSS = re.compile(r"\\[nrAzZ]|[\r\n]|\[(?!\^)(?s:.)*?(?:\\[nr]|[\r\n])")
_MEANT = {r"\<": r"\b", r"\>": r"\b", r"\z": r"\Z", "(?<": "(?P<"}
_MEANT_ACROSS = {"$": r"(?=\r?$)", **dict.fromkeys((r"\n", "\n"), r"(?:\r?\n)")}
_CLASSES = {"alpha": "a-zA-Z", "alnum": "a-zA-Z0-9", "digit": "0-9", "lower": "a-z", "upper": "A-Z"}
_CLASSES |= {"space": r"\s", "word": r"\w", "xdigit": "0-9a-fA-F", "punct": r"!-/:-@\[-`{-~"}
# How grep without -E writes what a pattern writes here.
_BASIC = {f"\\{char}": char for char in "|+?(){}"} | {char: f"\\{char}" for char in "|+?(){}"}
# Globs that ripgrep reads as `compile_glob` does.
_SAME_IN_RIPGREP = re.compile(r"(?!!|.*\*{3})(?:[\w\-. +@%=,/*]|\{[\w\-. +@%=,*]*\})+", re.ASCII)
# A set in a set, or what joins sets, is that to ripgrep alone.
_UNLIKE_RIPGREP = re.compile(r"\[[^\]]*[\[&~]")
_LEFT_OUT = {".git", ".mcp-sandbox", ".venv", "node_modules", "venv"}
# Not PATH: that begins in the home, where the chat could put its own program.
FOLDERS = ("/usr/local/bin", "/usr/bin", "/bin")
_LONGEST = 4 * 1024 * 1024
# A line of ripgrep's output with its path; the rest of a longer one is dropped.
_LONGEST_RECORD = _LONGEST + 8192
_HEAD = 64 * 1024
_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
_BINARY = b": WARNING: stopped searching binary file after match"
_FLAGS = [
    *("--no-config", "--color=never", "--no-heading", "--with-filename", "--line-number"),
    *("--column", "--null", "--sort=path", "--hidden", "--no-ignore", "--no-messages"),
    *("--no-mmap", "--crlf", "--encoding=none"),
]


def glob(call: OperationCall) -> dict[str, Any]:
    """Send the paths of the files whose path matches a glob, newest first."""
    base, pattern = _placed(guess_path(call.text("pattern")), resolve(call.text("path", ".")))
    pattern = normalize(pattern, base)
    limit = call.number("limit", 500, low=1, high=MAX_LIMIT)
    budget, left = Budget(), LeftOut(base, pattern)
    found, folder = list[tuple[int, str]](), ""
    with _time_limit(SECONDS, budget):
        for path, entry in _find(left, pattern, budget):
            if entry.is_dir(follow_symlinks=False):
                folder = folder or path
                continue
            with suppress(OSError):
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, path))
    found.sort(key=lambda row: (-row[0], row[1]))
    sent = put_rows(call.stdout, (relativize(join(base, path)) for _, path in found), limit)
    hint = "" if found else _explain_glob(base, pattern, folder)
    facts = {"total": len(found), "truncated": budget.cut or len(found) > sent}
    return {**facts, "hint": hint, **left.tell()}


def _find(left: LeftOut, glob: str, budget: Budget) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield path and entry of all that match a normalized glob, directories too."""
    matches: Callable[[str], bool] = compile_glob(glob) if glob else lambda _: True
    top = open_directory(left.base or "/")
    for path, entry, _ in walk(top, 100_000, budget, is_no_draft, left.enters):
        if matches(path) and not left.has(path):
            yield path, entry


def _explain_glob(base: str, glob: str, folder: str) -> str:
    """Say why no file matches, but perhaps a folder."""
    if folder:
        name = relativize(join(base, folder))
        return f"{name} is a directory: {name}/** finds what is in it"
    return "'[' begins a set: write \\[ for the character itself" if "[" in glob else ""


def list_directory(call: OperationCall) -> dict[str, Any]:
    """Send [path, kind, size, modified, target] of a directory's entries, sorted by path."""
    path = resolve(call.text("path", "."))
    depth = call.number("depth", 1, low=1, high=10_000)
    limit = call.number("limit", 500, low=1, high=MAX_LIMIT)
    hidden = call.flag("hidden", default=True)
    budget, left = Budget(), LeftOut(path, "")
    wanted = is_no_draft if hidden else lambda each: not each.rpartition("/")[2].startswith(".")
    found = walk(open_directory(path), depth, budget, wanted, left.enters)
    rows: dict[str, list[Any]] = {}
    with _time_limit(SECONDS, budget):
        rows.update((row[0], row[1:]) for row in map(_describe, found) if row)
    shown = ([relativize(join(path, name)), *facts] for name, facts in sorted(rows.items()))
    sent = put_rows(call.stdout, shown, limit)
    truncated = budget.cut or len(rows) > sent
    return {"path": relativize(path), "total": len(rows), "truncated": truncated, **left.tell()}


def _describe(found: tuple[str, os.DirEntry[str], int]) -> list[Any] | None:
    """Return a row of the listing; None if the entry vanished or may not be read."""
    name, entry, directory = found
    try:
        facts = entry.stat(follow_symlinks=False)
        target = show(os.readlink(entry.name, dir_fd=directory)) if entry.is_symlink() else None
    except OSError:
        return None
    return [name, kind_of(facts.st_mode), facts.st_size, facts.st_mtime, target]


def grep(call: OperationCall) -> dict[str, Any]:
    """Send `file:line:text` of the lines that a regular expression matches, by path and line."""
    query, hint, budget = _query(call), "", Budget()
    found = MatchOutput(query.limit, query.context)
    with _time_limit(SECONDS, budget):
        search(query, found)
    found.truncated |= budget.cut
    put(call.stdout, found.body())
    with _time_limit(SECONDS / 4, budget):
        hint = "" if found.matches or found.truncated else _explain_nothing(query)
    counts = {"matches": found.matches, "files": found.files}
    return {**counts, "truncated": found.truncated, "hint": hint, **query.left.tell()}


def _explain_nothing(query: Query) -> str:
    """Say why nothing matches: no file has such a path, or the pattern is of basic syntax."""
    if query.glob and not _files(query, Budget()):
        folder = next((path for path, _ in _find(query.left, query.glob, Budget())), "")
        why = _explain_glob(query.base, query.glob, folder)
        return f"no file matches the glob{why and '; '}{why}"
    given, other = query.pattern.pattern, MatchOutput(1, 0)
    if re.search(r"\\x[89a-fA-F]", given):
        return r"a byte that is shown as \xe9 is no character: search for the text beside it"
    meant = "".join(_BASIC.get(piece, piece) for piece in re.findall(_PIECE, given))
    with suppress(OpError):
        query = query._replace(pattern=compile_pattern(meant, query.pattern.flags))
        if meant != given and search(query, other).matches:
            return f"here | + ? ( ) {{ }} are special without a backslash: {show(meant)} matches"
    return ""


def _query(call: OperationCall) -> Query:
    path = resolve(call.text("path", "."))
    base, only = (path, "") if os.path.isdir(path) else os.path.split(os.path.realpath(path))
    if only:
        os.close(open_regular(path)[0])
    glob_text = guess_path(call.text("glob", ""))
    base, glob_text = (base, "") if only else _placed(glob_text, path)
    glob_text = normalize(glob_text, base) if glob_text else ""
    given = call.text("pattern")
    if not given or "\0" in given:
        raise OpError("invalid", "the pattern is empty or holds a NUL byte: give one without")
    return Query(
        pattern=compile_pattern(given, re.IGNORECASE * call.flag("ignore_case")),
        given_path=path if only else base,
        base=base,
        only=only,
        glob=glob_text,
        context=call.number("context", 0, high=50),
        limit=call.number("limit", 200, low=1, high=100_000),
        left=LeftOut(join(base, only), glob_text),
    )


class TimeUp(BaseException):
    """The time limit is reached. Not an Exception: only the setter of the limit catches it."""


def _ring(_signum: int, _frame: FrameType | None) -> None:
    raise TimeUp


@contextmanager
def _time_limit(seconds: float, budget: Budget) -> Iterator[None]:
    """End the `with` block when it takes longer: `budget` is spent. For the main thread only."""
    before = signal.signal(signal.SIGALRM, _ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    except TimeUp:
        budget.spend()


class Query(NamedTuple):
    """Look for `pattern` below the directory `base`, or in its file `only`.

    `given_path` is what the caller names; `glob` is normalized, or empty for all files. A pattern
    with MULTILINE may match across lines.
    """

    pattern: re.Pattern[str]
    given_path: str
    base: str
    only: str
    glob: str
    context: int
    limit: int
    left: LeftOut

    def name(self, path: str) -> str:
        return relativize(self.given_path if self.only else f"{self.given_path.rstrip('/')}/{path}")


def compile_pattern(given: str, flags: int) -> re.Pattern[str]:
    """Return a caller's pattern; raise OpError if it is no regular expression."""
    pieces = re.findall(_PIECE, given)
    across = re.match(r"\(\?[a-z]*[sm]", given) or any(map(_ACROSS.match, pieces))
    meanings = _MEANT | (_MEANT_ACROSS if across else {})
    text = "".join(meanings.get(piece, piece) for piece in pieces)
    text = re.sub(r"\[:(\w+):\]", lambda name: _CLASSES.get(name[1], name[0]), text)
    try:
        # Warnings are about the pattern's meaning in later versions of Python.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(text, flags | re.MULTILINE * bool(across))
    except (re.error, OverflowError, RecursionError) as exc:
        raise OpError(
            "invalid",
            f"the pattern is no regular expression of Python's re: {exc}. Escape characters that "
            "are meant literally with a backslash",
        ) from exc


class MatchOutput:
    """Matching lines, with the lines around them, up to a limit of matches."""

    def __init__(self, limit: int, context: int) -> None:
        self.matches = 0
        self.files = 0
        self.truncated = False
        self._limit = limit
        self._context = context
        self._lines: list[str] = []
        self._size = 0
        self._kept = 0
        self._path, self._last_line, self._last_match = "", 0, 0
        self._before_file = (0, 0, 0)

    def add(self, path: str, number: int, text: str, column: int) -> bool:
        """Take the next line, a match if `column` is above 0, or its rest; False: no more fit."""
        if (column > 0 and self.matches >= self._limit) or self._size > MAX_BYTES:
            self.truncated = True
            return False
        self._separate(path, number)
        sign = ":" if column else "-"
        line = f"{path}{sign}{number}{sign}{_window(text.rstrip(chr(13)), max(column, 0))}"
        self._lines.append(line)
        self._size += len(line)
        if column:
            self.files += column > 0 and (path != self._path or not self._last_match)
            self.matches += column > 0
            self._last_match = number
        if column or (self._last_match and number <= self._last_match + self._context):
            self._kept = len(self._lines)
        self._path, self._last_line = path, number
        return True

    def _separate(self, path: str, number: int) -> None:
        if path != self._path:
            self._before_file = (len(self._lines), self.matches, self.files)
            self._last_match = 0
        elif number == self._last_line + 1:
            return
        if self._context and self._lines:
            self._lines.append("--")

    def drop(self, path: str) -> None:
        """Drop the results of this file, the last one: it is binary after all."""
        if path == self._path:
            size, self.matches, self.files = self._before_file
            del self._lines[size:]
            self._kept = size
            self._path = ""

    def body(self) -> bytes:
        r"""Return the lines as UTF-8, each with its newline; bytes that are none as `\xe9`.

        A cut result ends with its last match's context.
        """
        lines = self._lines[: self._kept] if self.truncated else self._lines
        raw = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        return raw.decode("utf-8", "backslashreplace").encode()


def _window(text: str, column: int) -> str:
    if len(text) <= MAX_TEXT:
        return text
    start = max(0, min(column - MAX_TEXT // 2, len(text) - MAX_TEXT))
    at, before = f"[column {column}] " if column else "", "[...] " if start else ""
    after = " [...]" if start + MAX_TEXT < len(text) else ""
    return f"{at}{before}{text[start : start + MAX_TEXT]}{after}"


class LeftOut:
    """What a search in `base` passes over unless its glob names it: .gitignore's, and the like."""

    def __init__(self, base: str, glob: str) -> None:
        self.base, self._names = base.rstrip("/"), glob.lstrip("!").split("/")
        # In each folder, those of the folders above it come first.
        self._rules: dict[str, list[Rule]] = {}
        # None: all that is in there is wanted, as the caller names it.
        self._known: dict[str, bool | None] = {"": False}
        # Paths below `base`, without what is in them; whether links were entered.
        self.paths, self.linked = list[str](), False

    def has(self, path: str) -> bool:
        """Return whether this path below `base` is left out."""
        path = f"{self.base}/{path}"
        if path not in self._known:
            self._look_above()
            self._known[path] = self._look(path)
        return bool(self._known[path])

    def enters(self, path: str, entry: os.DirEntry[str]) -> bool:
        """Return whether to look into a folder, or where a link leads that the glob names."""
        wanted = entry.is_dir(follow_symlinks=False)
        if entry.is_symlink():
            ends = (end for end, name in enumerate(self._names[:-1], 1) if name == entry.name)
            globs = ("/" + "/".join(self._names[:end]) for end in ends)
            # What ends within braces is no glob.
            wanted = any(g.count("{") == g.count("}") and compile_glob(g)(path) for g in globs)
            self.linked |= wanted
        return wanted and not self.has(path)

    def tell(self) -> dict[str, list[str]]:
        """Return the uppermost of them as a caller is shown them, folders with a slash."""
        paths = sorted((join(self.base, p) for p in self.paths), key=lambda p: (p.count("/"), p))
        shown = [relativize(path) + "/" * os.path.isdir(path) for path in paths[:20]]
        return {"left_out": shown} if shown else {}

    def _look_above(self) -> None:
        # Not at first: rules of others may take long, and a caller sets a limit.
        if self.base not in self._known:
            for name in re.finditer("/[^/]+", self.base):
                self._known[self.base[: name.end()]] = self._look(self.base[: name.end()])

    def _look(self, path: str) -> bool | None:
        folder, _, name = path.rpartition("/")
        above = self._known.get(folder, False)
        if above is not False or not (name in _LEFT_OUT or self._is_ignored(path, folder)):
            return above
        if name in self._names or f"{self.base}/".startswith(f"{path}/"):
            return None
        self.paths.append(path[len(self.base) + 1 :])
        return True

    def _is_ignored(self, path: str, folder: str) -> bool:
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        for matches, start, keeps, for_folders in reversed(self._rules_in(folder)):
            if (is_folder or not for_folders) and matches(path[start:]):
                return not keeps
        # A virtual environment, or a folder that has git ignore all that is in it.
        own = self._rules_in(path)[len(self._rules_in(folder)) :] if is_folder else []
        whole = [matches("\0\0") and not keeps for matches, _, keeps, _ in own]
        return os.path.lexists(f"{path}/pyvenv.cfg") or (any(whole) and not any(r[2] for r in own))

    def _rules_in(self, folder: str) -> list[Rule]:
        if folder not in self._rules:
            above, text = self._rules_in(folder.rpartition("/")[0]) if folder else [], ""
            own = f"{folder}/.gitignore"
            with suppress(OSError, OpError), closing_fd(open_regular(own)[0]) as file:
                text = os.read(file, 64 * 1024).decode("utf-8", "surrogateescape")
            rules = (self._read(line, len(folder) + 1) for line in text.split("\n"))
            self._rules[folder] = [*above, *filter(None, rules)] if text else above
        return self._rules[folder]

    def _read(self, line: str, start: int) -> Rule | None:
        text = line.removeprefix("!").rstrip()
        # Braces are plain characters there.
        glob = re.sub(r"\\.|[{}]", lambda char: char[0].rjust(2, "\\"), text.rstrip("/"))
        if glob and not line.startswith("#") and len(glob) <= 200:
            with suppress(OpError):
                return compile_glob(glob), start, line.startswith("!"), text.endswith("/")
        return None


def is_no_draft(path: str) -> bool:
    """Return whether this is not an unfinished file of ours."""
    return not path.rpartition("/")[2].startswith(TEMPORARY)


def _placed(pattern: str, base: str) -> tuple[str, str]:
    """Return the directory of a glob and the glob below it: `~/*.py` is below the home."""
    folder = re.split(r"[*?\[{\\]", pattern)[0].rpartition("/")[0]
    if folder in ("", ".") or ".." in folder.split("/"):
        return base, pattern
    place = os.path.normpath(f"{base}/{folder}")
    if not os.path.isdir(place) and folder.startswith(("/", "~")):
        place = resolve(folder)
    rest = pattern[len(folder) :]
    return (place, rest if rest != "/" else "/**") if os.path.isdir(place) else (base, pattern)


def normalize(pattern: str, base: str) -> str:
    """Return the glob relative to `base`; raise OpError if it cannot be, or is too costly."""
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
    return escape_brackets(glob) if os.path.lexists(join(base, glob.lstrip("/"))) else glob


def escape_brackets(glob: str) -> str:
    """Return the glob with `[`, `]`, `{` and `}` as plain characters."""
    return re.sub(r"(?s)\\.|[\[\]{}]", lambda char: char[0].rjust(2, "\\"), glob)


def compile_glob(glob: str) -> Callable[[str], bool]:
    """Return a test for paths relative to a normalized glob's base; OpError if malformed."""
    turned = glob.startswith("!")
    body = glob[1:] if turned else glob
    body = body.lstrip("/") if "/" in body else f"**/{body}"
    expressions = map(_translated, dict.fromkeys((body, escape_brackets(body))))
    try:
        matches = re.compile("|".join(expressions), re.DOTALL).fullmatch
    except (re.error, OverflowError, RecursionError) as exc:
        raise _bad(glob, str(exc)) from exc
    return lambda path: (matches(path) is None) == turned


def _bad(glob: str, why: str) -> OpError:
    return OpError("invalid", f"the glob {show(glob[:200])!r} cannot be used: {why}")


def _translated(glob: str) -> str:
    out, nesting = [], 0
    for token in re.finditer(_TOKEN, glob, re.DOTALL):
        kind, text = token.lastgroup or "", token[0]
        if kind in _MEANING:
            out.append(_MEANING[kind])
        elif kind == "set":
            inner = re.sub(r"([\\\[\]^&~|])", r"\\\1", token["set"]).replace("--", r"-\-")
            out.append(f"(?!/)[{'^' if token['other'] else ''}{inner}]")
        elif text == "[":
            raise _bad(glob, "a '[' has no ']': write \\[ for the character itself")
        elif text in ("{", "}"):
            nesting += 1 if text == "{" else -1
            if nesting > _MAX_NESTING:
                raise _bad(glob, f"'{{' is nested more than {_MAX_NESTING} deep")
            if nesting < 0:
                raise _bad(glob, "a '}' has no '{': write \\} for the character itself")
            out.append("(?:" if text == "{" else ")")
        else:
            out.append("|" if text == "," and nesting else re.escape(token["char"]))
    if nesting:
        raise _bad(glob, "a '{' has no '}': write \\{ for the character itself")
    return "".join(out)


def search(query: Query, found: MatchOutput) -> MatchOutput:
    """Add matches to `found`, by ripgrep where there is one that can do this query."""
    program, pattern = _program(), query.pattern
    literal = f"/{query.only}" if query.only else query.glob
    unlike = pattern.flags & re.MULTILINE or _UNLIKE_RIPGREP.search(pattern.pattern)
    same = not literal or (_SAME_IN_RIPGREP.fullmatch(literal) and "*" not in query.only)
    command = [program, *_arguments(query)] if program and same and not unlike else []
    if command and not query.left.linked:
        with closing_fd(os.memfd_create("complaints")) as complaints:
            _run(command, query, found, complaints)
            if found.matches or os.fstat(complaints).st_size == 0:
                return found
    by_python(query, found)
    return found


def _program() -> str | None:
    programs = (os.path.join(folder, "rg") for folder in FOLDERS)
    return next((program for program in programs if os.access(program, os.X_OK)), None)


def _arguments(query: Query) -> list[str]:
    flags = [*_FLAGS, f"--context={query.context}"]
    if query.pattern.flags & re.IGNORECASE:
        flags.append("--ignore-case")
    if query.only:
        flags += ["--max-depth=1", f"--glob=/{query.only}"]
    elif query.glob:
        flags += [f"--glob={each}" for each in {query.glob, escape_brackets(query.glob)}]
    if not query.only:
        top = open_directory(query.base)
        deque(walk(top, 100_000, Budget(), is_no_draft, query.left.enters), 0)
        # `_collect` leaves out the rest.
        left = [re.sub(r"([][*?{}!\\])", r"\\\1", p) for p in query.left.paths if p.isprintable()]
        flags += [f"--glob=!{TEMPORARY}*", *(f"--glob=!/{path}" for path in left[:1000])]
    return [*flags, f"--regexp={query.pattern.pattern}", "--", "./"]


def _run(argv: list[str], query: Query, found: MatchOutput, complaints: int) -> None:
    output, theirs = os.pipe()
    with closing_fd(output):
        with closing_fd(theirs):
            pid = _spawn(argv, query.base, theirs, complaints)
        try:
            _collect(output, query, found)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _spawn(argv: list[str], base: str, output: int, complaints: int) -> int:
    """Start it in `base`, as its globs are relative to its working directory."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, complaints, 2),
    ]
    env = {"PATH": ":".join(FOLDERS), "LANG": "C.UTF-8"}
    how: dict[str, Any] = {"file_actions": actions, "setsigdef": [signal.SIGPIPE]}
    with closing_fd(open_directory(".")) as here:
        os.chdir(base)
        try:
            return os.posix_spawn(argv[0], argv, env, **how)
        finally:
            os.fchdir(here)


def _collect(output: int, query: Query, found: MatchOutput) -> None:
    for path, rest in _records(output):
        below = os.fsdecode(path).removeprefix("./")
        if query.left.has(below):
            continue
        name = query.name(below)
        if rest is None:
            found.drop(name)
            continue
        digits = len(rest) - len(rest.lstrip(b"0123456789"))
        number, column, text = int(rest[:digits]), 0, rest[digits + 1 :]
        if rest[digits : digits + 1] == b":":
            at, _, text = text.partition(b":")
            column = 1 + len(text[: int(at) - 1].decode("utf-8", "surrogateescape"))
        if not found.add(name, number, text.decode("utf-8", "surrogateescape"), column):
            return


def _records(output: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield path and rest of each line; None as rest means that the file is binary after all."""
    start = b""
    for line in _lines(output):
        path, nul, rest = (start + line).partition(b"\0")
        start = b""
        if nul:
            yield path, rest
        elif _BINARY in path:
            yield path[: path.rindex(_BINARY)], None
        elif path.rstrip(b"\r") != b"--":
            # The name of the file holds a line break.
            start = path + b"\n"


def _lines(output: int) -> Iterator[bytes]:
    with open(output, "rb", closefd=False) as pipe:
        while line := pipe.readline(_LONGEST_RECORD):
            yield line.removesuffix(b"\n")
            while line and not line.endswith(b"\n"):
                line = pipe.readline(_LONGEST_RECORD)


def by_python(query: Query, found: MatchOutput) -> None:
    """Add matches to `found`."""
    budget = Budget()
    for path in [query.only] if query.only else _files(query, budget):
        if not _search_file(query, path, found):
            return
    found.truncated = found.truncated or budget.cut


def _files(query: Query, budget: Budget) -> list[str]:
    """Return the files to search, in the order of ripgrep."""
    found = _find(query.left, query.glob, budget)
    paths = [path for path, entry in found if entry.is_file(follow_symlinks=False)]
    return sorted(paths, key=lambda path: os.fsencode(path).split(b"/"))


def _search_file(query: Query, path: str, found: MatchOutput) -> bool:
    """Search a file; return False when no more lines are wanted."""
    try:
        fd = os.open(f"{query.base}/{path}", _OPEN)
    except OSError:
        # As ripgrep does: a file that is gone or may not be read has no lines.
        return True
    with closing_fd(fd):
        if not stat.S_ISREG(os.fstat(fd).st_mode) or b"\0" in os.pread(fd, _HEAD, 0):
            return True
        name, across = query.name(path), bool(query.pattern.flags & re.MULTILINE)
        found.truncated |= across and os.fstat(fd).st_size > MAX_BYTES
        for row in (_rows_across if across else _rows)(fd, query):
            if row is None:
                found.drop(name)
                return True
            if not found.add(name, *row):
                return False
        return True


def _rows(fd: int, query: Query) -> Iterator[tuple[int, str, int] | None]:
    """Yield number, text, column of matches and their `context`; None if the file is binary."""
    before: deque[tuple[int, str, int]] = deque(maxlen=query.context)
    after = 0
    for number, line in enumerate(split(fd, 0, _LONGEST), 1):
        if b"\0" in line.head:
            yield None
            return
        text = line.head.decode("utf-8", "surrogateescape").removesuffix("\r")
        match = query.pattern.search(text)
        row = number, text, match.start() + 1 if match else 0
        if match:
            yield from before
            before.clear()
            after = query.context
            yield row
        elif after:
            after -= 1
            yield row
        else:
            before.append(row)


def _rows_across(fd: int, query: Query) -> Iterator[tuple[int, str, int] | None]:
    """Yield the same for matches across lines, in the first 8 MiB of a file."""
    text = os.pread(fd, MAX_BYTES, 0).decode("utf-8", "surrogateescape")
    if "\0" in text or not query.pattern.search(text):
        yield None
        return
    lines = text.removesuffix("\n").split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]
    columns: dict[int, int] = {}
    for match in query.pattern.finditer(text):
        first = bisect(starts, match.start())
        columns.setdefault(first, match.start() - starts[first - 1] + 1)
        for number in range(first + 1, bisect(starts, match.end() - 1) + 1):
            columns.setdefault(number, -1)
    near = {at for n in columns for at in range(n - query.context, n + query.context + 1)}
    for number in sorted(near & {*range(1, len(starts))}):
        yield number, lines[number - 1].removesuffix("\r"), columns.get(number, 0)
