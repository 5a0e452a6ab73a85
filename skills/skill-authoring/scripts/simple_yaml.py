"""Reads the YAML that front matter may hold: block style, and nothing that not everybody reads.

Every value is text, a mapping or a list. Flow style, anchors, tags, keys that come twice and tabs
are refused. Used by validate_skill.py.
"""

from __future__ import annotations

import re
from typing import Union

Value = Union[str, "dict[str, Value]", "list[Value]"]

KEY = re.compile(
    r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'"""
    r"""|[^ '"\[\]{}&*!|>%@`#,?:-][^#]*?|[?:-][^ #][^#]*?)[ ]*:(?=[ ]|$)"""
)
BLOCK = re.compile(r"([|>])(?:([+-])([1-9])?|([1-9])([+-])?)? *(?:#.*)?")
ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "\t": "\t", "n": "\n", "v": "\v", "f": "\f",
    "r": "\r", "e": "\x1b", " ": " ", '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0",
    "L": "\u2028", "P": "\u2029",
}  # fmt: skip
REFUSED = {
    "[": "lists in brackets are not read by all: write one `- item` a line",
    "{": "mappings in braces are not read by all: write one `key: value` a line",
    "&": "anchors are not allowed; put the text into quotes",
    "*": "aliases are not allowed; put the text into quotes",
    "!": "tags are not allowed; put the text into quotes",
    "%": "text cannot begin with %; put it into quotes",
    "@": "text cannot begin with @; put it into quotes",
    "`": "text cannot begin with `; put it into quotes",
    ",": "text cannot begin with a comma; put it into quotes",
    "]": "text cannot begin with ]; put it into quotes",
    "}": "text cannot begin with }; put it into quotes",
    "|": "this is no block of text: write | or >- and nothing else on the line",
    ">": "this is no block of text: write | or >- and nothing else on the line",
    "#": "there must be a value before a comment",
}


class BadYaml(Exception):
    """What is wrong, and in which line, from 1."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class Reader:
    """Goes through the lines once."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")
        # Three dots end a document, whatever follows.
        ends = (n for n, line in enumerate(lines) if re.match(r"\.\.\.([ \t]|$)", line))
        end = next(ends, len(lines))
        self.lines = lines[:end]
        self.after = "".join(lines[end:])
        self.at = 0

    def read(self) -> Value:
        """The whole text."""
        found = self._skip()
        if found is None:
            return ""
        value = self._node(found, -1)
        if self._skip() is not None or self.after[3:].strip():
            raise self._bad("this line fits to nothing above: look at its indentation")
        return value

    def _bad(self, text: str, line: int | None = None) -> BadYaml:
        return BadYaml((self.at if line is None else line) + 1, text)

    def _skip(self) -> int | None:
        """Go to the next line that says something; its indentation, or None at the end."""
        while self.at < len(self.lines):
            line = self.lines[self.at]
            indent = len(line) - len(line.lstrip(" "))
            if line[indent : indent + 1] == "\t":
                raise self._bad("indented with a tab: use spaces")
            if line[indent:] and line[indent] != "#":
                return indent
            self.at += 1
        return None

    def _node(self, indent: int, above: int) -> Value:
        """What begins in this line, in something that is indented by `above`."""
        text = self.lines[self.at][indent:]
        if text == "-" or text.startswith("- "):
            return self._sequence(indent)
        if KEY.match(text):
            return self._mapping(indent)
        if text.startswith("? "):
            raise self._bad("write `key: value`")
        return self._scalar(text, above)

    def _mapping(self, indent: int) -> dict[str, Value]:
        result: dict[str, Value] = {}
        column: int | None = None
        while self._skip() == indent:
            text = self.lines[self.at][indent:]
            match = KEY.match(text)
            if match is None:
                raise self._bad("expected `key: value`; if it belongs to the line above, indent it")
            key = self._unquoted(match[1], self.at)
            if key == "<<":
                raise self._bad("merging with << is not allowed")
            if key in result:
                raise self._bad(f"{key} is there twice")
            begins = self.at
            result[key] = self._value(text[match.end() :].strip(" "), indent)
            if isinstance(result[key], dict):
                own = self._column(begins)
                if column not in (None, own):
                    raise self._bad("the mappings here must be indented by the same", begins)
                column = own
        self._end_of_block(indent)
        return result

    def _column(self, begins: int) -> int:
        """The indentation of the first line that says something after this one."""
        following = (line for line in self.lines[begins + 1 :] if line.strip())
        return next(len(x) - len(x.lstrip()) for x in following if not x.lstrip().startswith("#"))

    def _sequence(self, indent: int) -> list[Value]:
        result: list[Value] = []
        while self._skip() == indent:
            text = self.lines[self.at][indent:]
            if not (text == "-" or text.startswith("- ")):
                break
            rest = text[1:].strip(" ")
            if KEY.match(rest) or rest.startswith("- "):
                inner = indent + len(text) - len(text[1:].lstrip(" "))
                self.lines[self.at] = " " * inner + rest
                result.append(self._node(inner, indent))
            else:
                result.append(self._value(rest, indent, in_list=True))
        self._end_of_block(indent)
        return result

    def _end_of_block(self, indent: int) -> None:
        found = self._skip()
        if found is not None and found > indent:
            raise self._bad("this line is indented more than those beside it")

    def _value(self, text: str, indent: int, *, in_list: bool = False) -> Value:
        """What stands after `key:` or `-`."""
        if text and not text.startswith("#"):
            return self._scalar(text, indent)
        self.at += 1
        found = self._skip()
        if found is None or found < indent:
            return ""
        dashed = re.match(r"-( |$)", self.lines[self.at][found:])
        if found == indent and (in_list or not dashed):
            return ""
        return self._node(found, indent)

    def _scalar(self, text: str, indent: int) -> str:
        """Text; the lines that belong to it are indented more than `indent`."""
        block = BLOCK.fullmatch(text)
        if block:
            return self._block(block, indent)
        if text[0] in "'\"":
            return self._quoted(text)
        if text[0] in REFUSED:
            raise self._bad(REFUSED[text[0]])
        if re.match(r"[-?]( |$)", text):
            raise self._bad("put this text into quotes, or begin a new line for a list")
        return self._plain(text, indent)

    def _plain(self, text: str, indent: int) -> str:
        parts = [self._plain_line(text)]
        ended = parts[0] != text.rstrip(" ")
        self.at += 1
        blank = 0
        while self.at < len(self.lines):
            line = self.lines[self.at]
            own = len(line) - len(line.lstrip(" "))
            if not line.strip(" "):
                blank += 1
            elif own <= indent or line[own] == "#" or ended:
                break
            else:
                new = self._plain_line(line[own:])
                ended = new != line[own:].rstrip(" ")
                parts.append("\n" * blank + new if blank else f" {new}")
                blank = 0
            self.at += 1
        found = self._skip()
        if found is not None and found > indent:
            raise self._bad("text goes on after a comment: put it into quotes")
        return "".join(parts)

    def _plain_line(self, text: str) -> str:
        said = re.split(" #", text, maxsplit=1)[0].rstrip(" ")
        if "\t" in said:
            raise self._bad("there is a tab in this text: use spaces, or quotes")
        if re.search(":( |$)", said):
            raise self._bad("a colon with a space after it: put the whole text into quotes")
        return said

    def _quoted(self, text: str) -> str:
        mark, begins, whole = text[0], self.at, text
        pattern = r'"(?:[^"\\]|\\.)*"' if mark == '"' else r"'(?:[^']|'')*'"
        while not re.match(pattern, whole, re.DOTALL):
            self.at += 1
            if self.at == len(self.lines):
                raise self._bad(f"the text that begins with {mark} never ends", begins)
            whole += "\n" + self.lines[self.at]
        match = re.match(pattern, whole, re.DOTALL)
        assert match is not None
        rest = whole[match.end() :]
        if rest.strip() and not re.match(r"[ \t]*#", rest):
            raise self._bad("there is more after the closing quote")
        self.at += 1
        return self._unquoted(match[0], begins)

    def _unquoted(self, text: str, line: int) -> str:
        try:
            return unquoted(text)
        except ValueError as exc:
            raise self._bad(str(exc), line) from None

    def _block(self, head: re.Match[str], indent: int) -> str:
        """Text after | or >, as long as it is indented."""
        given = head[3] or head[4]
        self.at += 1
        lines: list[str] = []
        own = max(indent, 0) + int(given) if given else 0
        while self.at < len(self.lines):
            line = self.lines[self.at]
            depth = len(line) - len(line.lstrip(" "))
            if line.strip(" "):
                own = own or depth
                if depth < own or own <= indent:
                    break
            lines.append(line[own:] if own else "")
            self.at += 1
        return chomped(lines, fold=head[1] == ">", keep=head[2] or head[5] or "")


def chomped(lines: list[str], *, fold: bool, keep: str) -> str:
    content = list(lines)
    while content and not content[-1]:
        content.pop()
    text = folded(content) if fold else "\n".join(content)
    if keep == "-" or not content:
        return text
    return text + "\n" * (1 + (len(lines) - len(content) if keep == "+" else 0))


def folded(lines: list[str]) -> str:
    """Lines joined by spaces; empty lines and more indented ones stay lines."""
    text = ""
    blank = 0
    before_literal = True
    for line in lines:
        if not line:
            blank += 1
            continue
        literal = line[0] in " \t"
        if not text and not blank:
            text = line
        elif blank:
            extra = 1 if text and (before_literal or literal) else 0
            text += "\n" * (blank + extra) + line
        else:
            text += ("\n" if before_literal or literal else " ") + line
        blank = 0
        before_literal = literal
    return text


def unquoted(text: str) -> str:
    """The text that stands between quotes; lines inside are joined by spaces."""
    if text[:1] not in ("'", '"'):
        return text
    inner = re.sub(
        r"[ \t]*\n((?:[ \t]*\n)*)[ \t]*",
        lambda m: "\n" * m[1].count("\n") or " ",
        text[1:-1] if text[0] == "'" else re.sub(r"\\\n[ \t]*", "", text[1:-1]),
    )
    if text[0] == "'":
        return inner.replace("''", "'")
    return re.sub(r"\\(x..|u.{4}|U.{8}|.)", lambda m: unescaped(m[1]), inner, flags=re.DOTALL)


def unescaped(code: str) -> str:
    if len(code) > 1:
        try:
            return chr(int(code[1:], 16))
        except (ValueError, OverflowError):
            raise ValueError(f"\\{code} is no character") from None
    if code not in ESCAPES:
        raise ValueError(f"\\{code} means nothing in double quotes; use single quotes")
    return ESCAPES[code]
