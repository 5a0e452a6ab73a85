#!/usr/bin/env python3
"""Make the folder of a new skill, with a SKILL.md to fill in.

Exit codes: 0 = made, 1 = the folder is there already, 2 = a wrong name, or a wrong call.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

SKELETON = Path(__file__).resolve().parent.parent / "assets" / "skeleton.md"
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def as_yaml(text: str) -> str:
    """One line of YAML that means this text, whatever is in it."""
    line = " ".join(text.split())
    safe = re.fullmatch(r"[A-Za-z][^\\]*", line) and not re.search(r": |:$| #", line)
    return line if safe else "'" + line.replace("'", "''") + "'"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="new_skill.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="lower-case letters, digits and hyphens")
    parser.add_argument(
        "--description",
        default="Say what it does. Use when the user asks for it in these words.",
        help="what it does, then when to use it",
    )
    parser.add_argument("--into", type=Path, default=Path(), help="default: the current folder")
    given = parser.parse_args()
    if not NAME.fullmatch(given.name) or len(given.name) > 64:
        parser.error(
            f"{given.name!r} is no name: lower-case letters, digits, single hyphens, at most 64"
        )
    if "---" in given.description or not 0 < len(given.description.strip()) <= 1024:
        parser.error("a description has 1 to 1,024 characters, and no ---")
    folder: Path = given.into / given.name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        print(f"new_skill.py: {folder} is there already", file=sys.stderr)
        return 1
    text = SKELETON.read_text(encoding="utf-8")
    for word, value in (
        ("NAME", given.name),
        ("DESCRIPTION", as_yaml(given.description)),
        ("TITLE", given.name.replace("-", " ").capitalize()),
    ):
        text = text.replace(word, value, 1)
    (folder / "SKILL.md").write_text(text, encoding="utf-8")
    print(f"made {folder / 'SKILL.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
