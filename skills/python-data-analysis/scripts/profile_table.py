#!/usr/bin/env python3
"""Describe every column of CSV, TSV or JSON lines files: type, gaps, range, frequent values.

Exit codes: 0 = described, 2 = a file cannot be read or the call is wrong.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from array import array
from collections import Counter
from pathlib import Path

from tables import BadTable, Table, as_number, fail, opened

DAY = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?(Z|[+-]\d{2}:?\d{2})?)?")
# Beyond this many different values they are no longer counted one by one.
DISTINCT_KEPT = 100_000
TOP = 3


class Column:
    """What is known of a column, from its cells one by one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.missing = 0
        self.filled = 0
        self.days = 0
        self.numbers = array("d")
        self.whole = True
        self.first_text = ""
        self.least = self.greatest = ""
        self.counts: Counter[str] = Counter()
        self.many = False

    def add(self, cell: str) -> None:
        if not cell:
            self.missing += 1
            return
        self.least = min(self.least, cell) if self.filled else cell
        self.greatest = max(self.greatest, cell)
        self.filled += 1
        number = as_number(cell)
        if number is None:
            self.first_text = self.first_text or cell
            self.days += bool(DAY.fullmatch(cell))
        else:
            self.numbers.append(number)
            self.whole = self.whole and isinstance(number, int)
        self._count(cell)

    def _count(self, cell: str) -> None:
        if cell in self.counts or len(self.counts) < DISTINCT_KEPT:
            self.counts[cell] += 1
        else:
            self.many = True

    def kind(self) -> str:
        if not self.filled:
            return "empty"
        if len(self.numbers) == self.filled:
            return "integer" if self.whole else "number"
        return "date" if self.days == self.filled else "text"

    def facts(self) -> dict[str, object]:
        kind = self.kind()
        facts: dict[str, object] = {"column": self.name, "type": kind, "missing": self.missing}
        facts["distinct"] = f"over {DISTINCT_KEPT}" if self.many else len(self.counts)
        if kind in ("integer", "number"):
            facts["min"], facts["max"] = (
                self._shown(min(self.numbers)),
                self._shown(max(self.numbers)),
            )
            facts["mean"] = round(statistics.fmean(self.numbers), 4)
            facts["median"] = self._shown(statistics.median(self.numbers))
        elif kind != "empty":
            facts["min"], facts["max"] = self.least, self.greatest
        if kind == "text" and self.numbers:
            facts["note"] = f"{len(self.numbers)} are numbers, but not {self.first_text!r}"
        facts["top"] = [f"{value} ({times})" for value, times in self.counts.most_common(TOP)]
        return facts

    def _shown(self, number: float) -> float:
        return int(number) if self.whole and number == int(number) else number


def profile(table: Table) -> dict[str, object]:
    columns = [Column(name) for name in table.columns]
    rows = replaced = 0
    for row in table:
        rows += 1
        for column, cell in zip(columns, row):
            column.add(cell)
        replaced += any("\ufffd" in cell for cell in row)
    facts: dict[str, object] = {"file": str(table.path), "rows": rows}
    facts["rows_with_other_width"] = table.ragged
    facts["rows_with_replaced_bytes"] = replaced
    facts["columns"] = [column.facts() for column in columns]
    return facts


def show(facts: dict[str, object]) -> None:
    columns: list[dict[str, object]] = facts["columns"]  # type: ignore[assignment]
    print(f"{facts['file']}: {facts['rows']} rows, {len(columns)} columns")
    if facts["rows_with_other_width"]:
        print(
            f"  {facts['rows_with_other_width']} rows have more or fewer cells than the first line"
        )
    if facts["rows_with_replaced_bytes"]:
        print(f"  encoding: {facts['rows_with_replaced_bytes']} rows hold bytes that it lacks")
    heads = ("column", "type", "missing", "distinct", "min", "max", "mean", "median")
    lines = [heads, *(tuple(clip(c.get(head, "")) for head in heads) for c in columns)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    for column in columns:
        frequent = ", ".join(map(clip, column["top"]))  # type: ignore[call-overload]
        print(f"  {column['column']}: {frequent or 'no values'}")
        if "note" in column:
            print(f"    {column['note']}")


def clip(value: object) -> str:
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 28 else f"{text[:27]}…"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="profile_table.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--delimiter", help="default: guessed from the first line")
    parser.add_argument("--encoding", default="utf-8-sig", help="default: UTF-8")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a file")
    given = parser.parse_args()
    for path in given.files:
        try:
            with opened(path, given.delimiter, given.encoding) as table:
                facts = profile(table)
        except BadTable as exc:
            return fail(parser.prog, exc)
        if given.json:
            print(json.dumps(facts, ensure_ascii=False))
        else:
            show(facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
