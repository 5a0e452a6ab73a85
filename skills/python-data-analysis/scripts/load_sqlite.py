#!/usr/bin/env python3
"""Load CSV, TSV or JSON lines files into a SQLite database, one table a file.

Columns whose every value is a number become INTEGER or REAL, all others TEXT; empty cells become
NULL. All files are loaded, or none.

Exit codes: 0 = loaded, 1 = a table is there already, 2 = a file cannot be read, or the call is
wrong.
"""

from __future__ import annotations

import argparse
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tables import BadTable, Table, as_number, fail, opened

LARGEST_INTEGER = 2**63


def kinds(table: Table) -> list[str]:
    """The type of each column, after a look at every row."""
    found = [""] * len(table.columns)
    for row in table:
        for n, cell in enumerate(row):
            if cell and found[n] != "TEXT":
                found[n] = wider(found[n], cell)
    return [kind or "TEXT" for kind in found]


def wider(kind: str, cell: str) -> str:
    number = as_number(cell)
    if number is None or (isinstance(number, int) and abs(number) >= LARGEST_INTEGER):
        return "TEXT"
    return "REAL" if kind == "REAL" or isinstance(number, float) else "INTEGER"


def values(table: Table, types: list[str]) -> Iterator[list[object]]:
    for row in table:
        yield [
            None if not cell else cell if kind == "TEXT" else as_number(cell)
            for cell, kind in zip(row, types)
        ]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def table_name(path: Path) -> str:
    """A name that SQL takes without quotes."""
    name = re.sub(r"\W+", "_", path.stem).strip("_") or "data"
    return f"t_{name}" if name[0].isdigit() else name


def load(connection: sqlite3.Connection, path: Path, given: argparse.Namespace) -> str:
    """Make the table of a file and fill it; returns a line that describes it."""
    name = table_name(path)
    if given.replace:
        connection.execute(f"DROP TABLE IF EXISTS {quoted(name)}")
    with opened(path, given.delimiter, given.encoding) as table:
        if not table.columns:
            raise BadTable(f"{path}: it is empty")
        columns = table.columns
        types = kinds(table)
    with opened(path, given.delimiter, given.encoding) as table:
        described = ", ".join(f"{quoted(c)} {t}" for c, t in zip(columns, types))
        connection.execute(f"CREATE TABLE {quoted(name)} ({described})")
        marks = ", ".join("?" * len(columns))
        insert = f"INSERT INTO {quoted(name)} VALUES ({marks})"
        count = connection.executemany(insert, values(table, types)).rowcount
    shown = ", ".join(f"{c} {t}" for c, t in zip(columns, types))
    return f"{name}: {max(count, 0)} rows ({shown})"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="load_sqlite.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("database", metavar="DATABASE", type=Path)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--replace", action="store_true", help="load tables that are there again")
    parser.add_argument("--delimiter", help="default: guessed from the first line")
    parser.add_argument("--encoding", default="utf-8-sig", help="default: UTF-8")
    given = parser.parse_args()
    with closing(sqlite3.connect(given.database, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
            lines = [load(connection, path, given) for path in given.files]
            connection.execute("COMMIT")
        except sqlite3.OperationalError as exc:
            if "already exists" not in str(exc):
                return fail(parser.prog, exc)
            print(f"{parser.prog}: {exc}; --replace loads it again", file=sys.stderr)
            return 1
        except (BadTable, sqlite3.DatabaseError) as exc:
            return fail(parser.prog, exc)
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
