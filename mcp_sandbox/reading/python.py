"""The statements of a Python script, of any version of the language. Pure, linear, never fails."""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mcp_sandbox.reading.commands import DYNAMIC, names

Kind = Literal["name", "string", "other"]

_MOST_TOKENS = 70_000
_TOKEN = re.compile(
    r"""
    (?P<blank>(?:[ \t\f]|\\\r?\n)+|\#[^\n]*+)
  | (?P<newline>\r?\n|\r)
  | (?P<string>[rRbBuUfFtT]{0,3}(?:
        \"{3}[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*(?:\"{3}|\Z|(?=\\\Z))
      | '{3}[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*(?:'{3}|\Z|(?=\\\Z))
      | "[^"\\\n]*(?:\\.[^"\\\n]*)*"?
      | '[^'\\\n]*(?:\\.[^'\\\n]*)*'?
    ))
  | (?P<name>[^\W\d]\w*+)
  | (?P<other>\d[\w.]*+|.)
    """,
    re.VERBOSE | re.DOTALL,
)
_FIELD = re.compile(r"\{[^{}]*\}")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_COMPOUND = names("if elif else try except finally for while with def class async match case")


class Token(NamedTuple):
    """A piece of a statement.

    Of a string `text` is what is between its quotes, and `code` what an f-string puts in.
    """

    kind: Kind
    text: str
    code: str = ""


@dataclass(frozen=True)
class Statement:
    """The tokens of a statement, and the column at which its line begins.

    `follows` says that it stands behind another one, or its colon, on the same line.
    """

    indent: int
    tokens: tuple[Token, ...]
    follows: bool = False


def statements(text: str) -> Iterator[Statement]:
    """Every statement, of any version of the language; linear, and never fails."""
    reader = _Lines()
    for found in _TOKEN.finditer(text):
        yield from reader.take(found.lastgroup or "other", found.group())
    yield from reader.end_line()


class _Lines:
    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._depth = 0
        self._indent = 0
        self._begins = True
        self._follows = False

    def take(self, kind: str, piece: str) -> Iterator[Statement]:
        if kind == "blank":
            if self._begins and piece[0] != "#":
                self._indent = len(piece.expandtabs(8).rsplit("\n", 1)[-1])
        elif kind == "newline":
            if self._depth == 0:
                yield from self.end_line()
        elif piece == ";" and self._depth == 0:
            yield from self._end()
        else:
            self._begins = False
            token = Token("name" if kind == "name" else "other", piece)
            if kind == "string":
                token = _string(piece)
            else:
                self._depth += (piece in _OPENING) - (piece in _CLOSING and self._depth > 0)
            if len(self._tokens) < _MOST_TOKENS:
                self._tokens.append(token)
            at_its_end = kind != "string" and piece == ":" and self._depth == 0
            if at_its_end and self._tokens[0].text in _COMPOUND:
                yield from self._end()

    def _end(self) -> Iterator[Statement]:
        if self._tokens:
            yield Statement(self._indent, tuple(self._tokens), self._follows)
            self._follows = True
        self._tokens = []

    def end_line(self) -> Iterator[Statement]:
        yield from self._end()
        self._indent, self._begins, self._follows, self._depth = 0, True, False, 0


def _string(literal: str) -> Token:
    body = literal.lstrip(string.ascii_letters)
    head = literal[: len(literal) - len(body)].lower()
    quote = body[:3] if body[:3] in ('"""', "'''") else body[:1]
    inner = body[len(quote) :].removesuffix(quote)
    if "f" not in head and "t" not in head:
        return Token("string", inner)
    fields = (found[0][1:-1] for found in _FIELD.finditer(inner))
    return Token("string", _FIELD.sub(DYNAMIC, inner), "\n".join(fields))
