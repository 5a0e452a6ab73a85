"""Reading tables as rows of text: CSV, TSV and JSON lines. Used by the scripts beside it."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SNIFFED = 64 * 1024
JSON_LINES = (".jsonl", ".ndjson")


class BadTable(Exception):
    """The message says which file cannot be read, and why."""


class Table:
    """The columns of a file, and its rows as text, read one by one; missing cells are empty."""

    def __init__(self, path: Path, columns: list[str], rows: Iterator[list[str]]) -> None:
        self.path = path
        self.columns = columns
        self.rows = rows
        self.ragged = 0

    def __iter__(self) -> Iterator[list[str]]:
        width = len(self.columns)
        for row in self.rows:
            if not row:
                continue
            self.ragged += len(row) != width
            yield [cell.strip() for cell in (row + [""] * width)[:width]]


@contextmanager
def opened(
    path: Path, delimiter: str | None = None, encoding: str = "utf-8-sig"
) -> Iterator[Table]:
    """The table in a file; bytes that are not of the encoding show as U+FFFD."""
    csv.field_size_limit(16 * 1024 * 1024)
    try:
        with path.open(encoding=encoding, errors="replace", newline="") as file:
            if path.suffix in JSON_LINES:
                yield json_lines(path, file)
            else:
                sample = file.read(SNIFFED)
                file.seek(0)
                rows = csv.reader(file, delimiter=delimiter or guessed_delimiter(path, sample))
                yield Table(path, unique(next(rows, [])), rows)
    except (OSError, LookupError, csv.Error, ValueError) as exc:
        raise BadTable(f"{path}: {getattr(exc, 'strerror', None) or exc}") from exc


def guessed_delimiter(path: Path, sample: str) -> str:
    if path.suffix == ".tsv":
        return "\t"
    head = sample.split("\n", 1)[0]
    return max(",;\t|", key=head.count)


def json_lines(path: Path, lines: Iterator[str]) -> Table:
    """Objects, one a line; the first decides the columns."""
    objects = (json.loads(line) for line in lines if line.strip())
    first: object = next(objects, {})
    if not isinstance(first, dict):
        raise BadTable(f"{path}: each line must be a JSON object")
    columns = list(first)

    def rows() -> Iterator[list[str]]:
        yield [as_text(first.get(name)) for name in columns]
        for item in objects:
            yield [as_text(item.get(name)) for name in columns]

    return Table(path, unique(columns), rows() if first else iter(()))


def as_text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def unique(names: list[str]) -> list[str]:
    """Column names, none empty and none twice."""
    seen: dict[str, int] = {}
    result = []
    for number, raw in enumerate(names, 1):
        name = raw.strip() or f"column_{number}"
        seen[name.lower()] = seen.get(name.lower(), 0) + 1
        again = seen[name.lower()]
        result.append(name if again == 1 else f"{name}_{again}")
    return result


def as_number(text: str) -> int | float | None:
    """The number that a cell is, or None. 00123 and 1_000 are text: a code, and a typo."""
    if "_" in text or (
        len(text.lstrip("+-")) > 1 and text.lstrip("+-").isdigit() and text.lstrip("+-")[0] == "0"
    ):
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


def fail(program: str, problem: object) -> int:
    """Say on stderr what is wrong; returns the exit code for wrong input."""
    print(f"{program}: {problem}", file=sys.stderr)
    return 2
