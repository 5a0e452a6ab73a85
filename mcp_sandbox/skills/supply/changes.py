"""What differs between two versions of a skill, the parts that can do harm first. Pure."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from mcp_sandbox.skills.contents import digest_of, kind_of
from mcp_sandbox.skills.supply.tree import File, Tree
from mcp_sandbox.skills.uris import DOCUMENT

Kind = Literal["added", "removed", "changed", "now a program", "no program any more"]
_SCRIPT_ENDINGS = frozenset(
    {".bash", ".bat", ".cjs", ".cmd", ".go", ".js", ".lua", ".mjs", ".php", ".pl", ".ps1", ".py"}
    | {".r", ".rb", ".sh", ".ts", ".zsh"}
)
_BYTES_COMPARED = 256 << 10
_LINE_SHOWN = 300
_LINES_SHOWN = 400


@dataclass(frozen=True)
class FileChange:
    """A file that differs; `is_script`: before or now.

    `lines` are a unified diff, or digests where it is long or no text.
    """

    path: str
    kind: Kind
    is_script: bool
    lines: tuple[str, ...] = ()


def changes(old: Tree, new: Tree) -> Sequence[FileChange]:
    """Return what differs: scripts first, then the document, then the rest by name."""
    found = [_change(path, old.get(path), new.get(path)) for path in {*old, *new}]
    differing = (change for change in found if change is not None)
    return sorted(differing, key=_rank)


def is_script(path: str, file: File) -> bool:
    """Say whether a file is meant to be run."""
    ending = PurePosixPath(path).suffix.lower()
    return file.executable or ending in _SCRIPT_ENDINGS or file.data.startswith(b"#!")


def unified(path: str, old: bytes, new: bytes) -> Iterator[str]:
    """Yield the lines of a diff of two texts, safe to print on a terminal."""
    before, after = (data.decode("utf-8", "replace").splitlines() for data in (old, new))
    for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm=""):
        shown = "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line)
        yield shown if len(shown) <= _LINE_SHOWN else f"{shown[:_LINE_SHOWN]}…"


def _rank(change: FileChange) -> tuple[bool, bool, str]:
    return not change.is_script, change.path != DOCUMENT, change.path


def _change(path: str, old: File | None, new: File | None) -> FileChange | None:
    script = any(file is not None and is_script(path, file) for file in (old, new))
    if old is not None and new is not None and old.data == new.data:
        if old.executable == new.executable:
            return None
        kind: Kind = "now a program" if new.executable else "no program any more"
        return FileChange(path, kind, script)
    kind = "added" if old is None else "removed" if new is None else "changed"
    return FileChange(path, kind, script, tuple(_lines(path, _bytes(old), _bytes(new))))


def _lines(path: str, old: bytes, new: bytes) -> Iterator[str]:
    # Comparing lines takes the square of their number.
    long = len(old) + len(new) > _BYTES_COMPARED
    if long or "binary" in (kind_of(old), kind_of(new)):
        yield from (f"- {digest_of(old)}",) if old else ()
        yield from (f"+ {digest_of(new)}",) if new else ()
        return
    lines = list(unified(path, old, new))
    yield from lines[:_LINES_SHOWN]
    if len(lines) > _LINES_SHOWN:
        yield f"… {len(lines) - _LINES_SHOWN} more lines"


def _bytes(file: File | None) -> bytes:
    return b"" if file is None else file.data
