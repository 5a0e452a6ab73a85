"""A change of one client's file: first as a diff, then written as a whole, later taken back."""

import contextlib
import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mcp_sandbox.clients import document, files, record
from mcp_sandbox.clients.entry import NAME, Entry, Target
from mcp_sandbox.errors import ConfigError

# What of an entry is ours to set; what the user has added to our entry is the user's.
_OURS = frozenset({"type", "command", "args", "url", "headers"})
_LINE_SHOWN = 300


@dataclass(frozen=True)
class Change:
    """What a file holds and what it shall hold; None: no file. `kept` is for taking it back."""

    path: Path
    before: str | None
    after: str | None
    kept: record.Record | None
    private: bool = False

    @property
    def is_none(self) -> bool:
        return self.before == self.after

    def diff(self) -> Iterator[str]:
        """Yield the lines that show the change, safe to print on a terminal."""
        old, new = (
            text.removesuffix("\n").split("\n") if text else []
            for text in (self.before, self.after)
        )
        source, result = (
            str(self.path) if text is not None else "/dev/null"
            for text in (self.before, self.after)
        )
        for line in difflib.unified_diff(old, new, source, result, lineterm=""):
            shown = "".join(c if c.isprintable() or c == "\t" else "?" for c in line)
            yield shown if len(shown) <= _LINE_SHOWN else f"{shown[:_LINE_SHOWN]}…"

    def apply(self) -> None:
        """Write it.

        Raises:
            ConfigError: it cannot be written; then the file is as before.
        """
        if self.is_none and self.kept is not None:
            return
        if self.after is None:
            files.remove(self.path, expected=self.before)
            self._remove_folders()
        else:
            made = files.make_folders(self.path.parent)
            self._remember(made=tuple(map(str, made)))
            files.replace(self.path, self.after, expected=self.before, private=self.private)
        if self.kept is None:
            record.forget(self.path)

    def _remember(self, made: tuple[str, ...]) -> None:
        # Before the file is written: a record too many is harmless, one too few is not.
        if self.kept is not None:
            record.save(self.path, replace(self.kept, made=self.kept.made or made))

    def _remove_folders(self) -> None:
        kept = record.load(self.path)
        for folder in kept.made if kept else ():
            # Others may have put something there meanwhile.
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def connecting(target: Target) -> Change:
    """Return the change that adds our entry, or brings it up to date.

    Raises:
        ConfigError: the file cannot be changed without harm; the message says why.
    """
    path = files.resolve(target.path)
    before = files.read(path)
    old = record.load(path)
    after = _with_entry(path, before, target, ours=old is not None)
    original = _undone(path, before, old, target.section) if old else before
    kept = record.Record(str(path), original, record.digest(after), old.made if old else ())
    return Change(path, before, after, kept, target.private)


def undoing(target: Target) -> Change:
    """Return the change that takes our entry away again: exactly, if nobody else wrote since.

    Raises:
        ConfigError: this program has not written that file.
    """
    path = files.resolve(target.path)
    before, kept = files.read(path), record.load(path)
    if kept is None:
        raise ConfigError(f"there is nothing to undo: {path} was not written by `init`")
    after = _undone(path, before, kept, target.section)
    return Change(path, before, after, None, target.private)


def _with_entry(path: Path, text: str | None, target: Target, *, ours: bool) -> str:
    """The text with our entry; of one that is not ours nothing is kept.

    A stranger's could have set the environment in which our program starts.
    """
    text = "{}\n" if text is None or not text.strip() else text
    mark, body = _parsed(path, text)
    names = (target.section, NAME)
    with _named(path):
        old = document.get(body, names)
        entry = _merged(old, target.entry) if ours else target.entry
        return text if entry == old else mark + document.put(body, names, entry)


def _merged(old: object, ours: Entry) -> Entry:
    if not isinstance(old, dict):
        return ours
    others = {name: value for name, value in old.items() if name not in _OURS}
    return {**ours, **others}


def _undone(path: Path, now: str | None, kept: record.Record, section: str) -> str | None:
    """What the file would be without us."""
    if now is None or record.digest(now) == kept.after:
        return None if now is None else kept.before
    mark, body = _parsed(path, now)
    names = (section, NAME)
    with _named(path):
        if document.get(body, names) is None:
            return now
        first = (kept.before or "").removeprefix("\ufeff")
        old = document.get(first, names) if first.strip() else None
        if old is not None:
            return mark + document.put(body, names, old)
        body = document.drop(body, names)
        if kept.before is None and document.get(body, (section,)) == {}:
            body = document.drop(body, (section,))
    return None if kept.before is None and body.split() in (["{}"], ["{", "}"]) else mark + body


def _parsed(path: Path, text: str) -> tuple[str, str]:
    """The mark that some editors begin a file with, and the JSON after it."""
    mark, body = ("\ufeff", text[1:]) if text.startswith("\ufeff") else ("", text)
    with _named(path):
        document.check(body)
    return mark, body


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as exc:
        raise ConfigError(
            f"{path} cannot be changed without harm: {exc}. It is as it was; add the lines that "
            "--print shows yourself, or make it plain JSON and try again"
        ) from exc
