#!/usr/bin/env python3
"""Check folders of skills against the Agent Skills format, as the strictest clients do.

Prints FOLDER/FILE:LINE: LEVEL: what is wrong and what to do. `error`: some clients refuse the
skill. `warning`: all accept it, but it will work less well.

Exit codes: 0 = all are valid (there may be warnings), 1 = at least one is not, 2 = called wrongly.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import unicodedata
from dataclasses import asdict, dataclass
from pathlib import Path

from simple_yaml import BadYaml, Reader, Value

FIELDS = ("name", "description", "license", "compatibility", "metadata", "allowed-tools")
LARGEST = 1024 * 1024
LONG_BODY = 500
SHORT_DESCRIPTION = 40
FILES, BYTES = 512, 16 * 1024 * 1024
# What YAML may not hold as it is.
UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
HIDDEN = re.compile(
    "[\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\U000e0000-\U000e007f]"
)
REFERENCE = re.compile(r"(?<![\w/.-])((?:scripts|references|assets)/[\w./-]*\w)")
LINK = re.compile(r"\]\(<?([^)#>\s]+)[^)]*\)")
PIPED = re.compile(r"\b(curl|wget)\b[^\n|`]*\|\s*(sudo\s+)?(ba|z|da)?sh\b")


@dataclass
class Problem:
    level: str
    text: str
    line: int = 1
    file: str = "SKILL.md"


class Invalid(Exception):
    """The file cannot be judged any further."""

    def __init__(self, text: str, line: int = 1, file: str = "SKILL.md") -> None:
        super().__init__(text)
        self.problem = Problem("error", text, line, file)


class Skill:
    """One folder, and what was found in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.document = "SKILL.md"
        self.lines: dict[str, int] = {}

    def error(self, text: str, field: str = "") -> None:
        self.problems.append(Problem("error", text, self._line_of(field), self.document))

    def warn(self, text: str, line: int = 1, file: str = "") -> None:
        self.problems.append(Problem("warning", text, line, file or self.document))

    def _line_of(self, field: str) -> int:
        """The line in which a field begins."""
        return self.lines.get(field, 1)

    def check(self) -> list[Problem]:
        try:
            content = self._read()
            front, body, body_line = split(content, self.document)
            if not front.endswith("\n") or not re.match(r"[ \t]*(\n|$)", body):
                self.warn("`---` within the front matter ends it for some: write `-`", body_line)
            for number, line in enumerate(front.split("\n"), 1):
                self.lines.setdefault(line.partition(":")[0], number)
            self._judge(fields(front, self.document))
            self._judge_body(body, body_line)
            self._judge_files()
        except Invalid as exc:
            self.problems.append(exc.problem)
        return self.problems

    def _read(self) -> str:
        if not self.folder.is_dir():
            raise Invalid("there is no such folder", file="")
        spellings = [s for s in ("SKILL.md", "skill.md") if (self.folder / s).is_file()]
        if not spellings:
            raise Invalid("there is no SKILL.md in this folder", file="")
        self.document = spellings[0]
        if self.document != "SKILL.md":
            self.warn("call it SKILL.md: not every client looks for this spelling")
        with (self.folder / self.document).open("rb") as file:
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise Invalid("it is over 1 MiB", file=self.document)
        try:
            # One kind of line ending, as reading it as text gives.
            return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as exc:
            line = data[: exc.start].count(b"\n") + 1
            raise Invalid("it is not UTF-8: save it as such", line, self.document) from None

    def _judge(self, given: dict[str, Value]) -> None:
        for field in given:
            if field not in FIELDS:
                self.error(f"{field} is no field of the format: move it under metadata", field)
        if "name" in given:
            self._judge_name(given["name"])
        else:
            self.error("there is no name: add `name: " + self.folder.resolve().name + "`")
        if "description" in given:
            self._judge_description(given["description"])
        else:
            self.error("there is no description: say what it does and when to use it")
        compatibility = given.get("compatibility", "")
        if not isinstance(compatibility, str):
            self.error("compatibility must be text", "compatibility")
        elif len(compatibility) > 500:
            self.error(
                f"compatibility has {len(compatibility)} characters; 500 are allowed",
                "compatibility",
            )

    def _judge_name(self, value: Value) -> None:
        if not isinstance(value, str) or not value.strip():
            self.error("name must be text", "name")
            return
        name = unicodedata.normalize("NFKC", value.strip())
        folder = self.folder.resolve().name
        for wrong, text in (
            (len(name) > 64, f"the name has {len(name)} characters; 64 are allowed"),
            (name != name.lower(), "the name must be in lower case"),
            (name[:1] == "-" or name[-1:] == "-", "the name begins or ends with a hyphen"),
            ("--" in name, "the name has two hyphens in a row"),
            (
                not all(c.isalnum() or c == "-" for c in name),
                "the name may hold letters, digits and hyphens only",
            ),
            (
                unicodedata.normalize("NFKC", folder) != name,
                f"the folder is called {folder} and the skill {name}: make them the same",
            ),
        ):
            if wrong:
                self.error(text, "name")

    def _judge_description(self, value: Value) -> None:
        if not isinstance(value, str) or not value.strip():
            self.error("description must be text", "description")
            return
        line = self._line_of("description")
        if len(value) > 1024:
            self.error(
                f"the description has {len(value)} characters; 1,024 are allowed", "description"
            )
        if len(value.strip()) < SHORT_DESCRIPTION:
            self.warn("the description is short: say what it does, then when to use it", line)
        elif not re.search(r"(?i)\b(use|when|whenever|before|after|if)\b", value):
            self.warn("the description does not say when to use it: add `Use when …`", line)
        if HIDDEN.search(value):
            self.warn("the description holds invisible characters", line)

    def _judge_body(self, body: str, first_line: int) -> None:
        lines = body.split("\n")
        if not body.strip():
            self.warn("there is no text after the front matter", first_line)
        if len(lines) > LONG_BODY:
            self.warn(f"the body has {len(lines)} lines: move detail into references/", first_line)
        for number, line in enumerate(lines, first_line):
            if HIDDEN.search(line):
                self.warn("invisible characters", number)
            if PIPED.search(line):
                self.warn("a download is run unseen: bundle the script instead", number)
            for target in dict.fromkeys((*REFERENCE.findall(line), *LINK.findall(line))):
                self._judge_reference(target, number)

    def _judge_reference(self, target: str, line: int) -> None:
        if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.startswith("#"):
            return
        path = (self.folder / target).resolve()
        if self.folder.resolve() not in path.parents:
            self.warn(f"{target} lies outside of the skill's folder", line)
        elif not path.exists():
            self.warn(f"{target} is not there", line)

    def _judge_files(self) -> None:
        count = size = 0
        for path in sorted(self.folder.rglob("*")):
            if path.is_symlink():
                self.warn(
                    "a link: many ways of copying lose it", file=str(path.relative_to(self.folder))
                )
            elif path.is_file():
                count, size = count + 1, size + path.stat().st_size
        if count > FILES or size > BYTES:
            self.warn(f"{count} files, {size:,} bytes: servers may refuse over {FILES} and 16 MiB")


def split(content: str, document: str) -> tuple[str, str, int]:
    """The front matter, the body, and the line in which the body begins."""
    if content.startswith("\ufeff"):
        raise Invalid("it begins with a byte order mark: save it as UTF-8 without one", 1, document)
    if not content.startswith("---"):
        raise Invalid("it must begin with a line `---`, fields, and a line `---`", 1, document)
    parts = content.split("---", 2)
    if len(parts) < 3:
        raise Invalid("the front matter is not closed: add a line `---` after it", 1, document)
    return parts[1], parts[2], parts[1].count("\n") + 1


def fields(front: str, document: str) -> dict[str, Value]:
    for number, line in enumerate(front.split("\n"), 1):
        if UNPRINTABLE.search(line):
            raise Invalid("a control character", number, document)
    try:
        value = Reader(front).read()
    except BadYaml as exc:
        raise Invalid(str(exc), exc.line, document) from None
    except RecursionError:
        raise Invalid("it is nested too deeply", 1, document) from None
    if not isinstance(value, dict):
        raise Invalid("the front matter must be fields, one `name: value` a line", 1, document)
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="validate_skill.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON, one object a folder")
    given = parser.parse_args()
    valid = True
    for path in given.folders:
        folder = path.parent if path.name.lower() == "skill.md" and path.is_file() else path
        problems = Skill(folder).check()
        fine = not any(problem.level == "error" for problem in problems)
        valid = valid and fine
        if given.json:
            report = {
                "folder": str(folder),
                "valid": fine,
                "problems": [asdict(p) for p in problems],
            }
            print(json.dumps(report, ensure_ascii=False))
            continue
        for problem in problems:
            where = f"{folder / problem.file}:{problem.line}" if problem.file else str(folder)
            print(f"{where}: {problem.level}: {problem.text}")
        print(f"{folder}: {'valid' if fine else 'not valid'}")
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main())
