"""Python text -> its statements, of any version of the language. Linear, and never fails."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mcp_sandbox.skills.scripts.uses import names

Kind = Literal["name", "string", "other"]

_TAB = 8
_MOST_TOKENS = 20_000
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
_PREFIX = re.compile(r"[A-Za-z]*")
_FIELD = re.compile(r"\{[^{}]*\}")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")


class Token(NamedTuple):
    """A piece of a statement; of a string `text` is what is between its quotes."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Statement:
    """The tokens of a statement, and the column at which its line begins.

    `follows` says that it stands behind another one, or its colon, on the same line.
    """

    indent: int
    tokens: tuple[Token, ...]
    follows: bool = False


def statements(text: str, dynamic: str) -> Iterator[Statement]:
    """Every statement; what an f-string puts in is replaced with `dynamic`."""
    reader = _Reader(dynamic)
    for found in _TOKEN.finditer(text):
        kind, piece = found.lastgroup or "other", found.group()
        yield from reader.take(kind, piece)
    yield from reader.end_line()


class _Reader:
    def __init__(self, dynamic: str) -> None:
        self._dynamic = dynamic
        self._tokens: list[Token] = []
        self._depth = 0
        self._indent = 0
        self._begins = True
        self._follows = False

    def take(self, kind: str, piece: str) -> Iterator[Statement]:
        if kind == "blank":
            if self._begins and piece[0] != "#":
                self._indent = len(piece.expandtabs(_TAB).rsplit("\n", 1)[-1])
        elif kind == "newline":
            if self._depth == 0:
                yield from self.end_line()
        elif piece == ";" and self._depth == 0:
            yield from self._end()
        else:
            self._begins = False
            yield from self._keep(kind, piece)

    def _keep(self, kind: str, piece: str) -> Iterator[Statement]:
        if kind == "string":
            self._add(Token("string", _value(piece, self._dynamic)))
            return
        self._depth += (piece in _OPENING) - (piece in _CLOSING and self._depth > 0)
        self._add(Token("name" if kind == "name" else "other", piece))
        if piece == ":" and self._depth == 0 and self._tokens[0].text in _COMPOUND:
            yield from self._end()

    def _add(self, token: Token) -> None:
        if len(self._tokens) < _MOST_TOKENS:
            self._tokens.append(token)

    def _end(self) -> Iterator[Statement]:
        if self._tokens:
            yield Statement(self._indent, tuple(self._tokens), self._follows)
            self._follows = True
        self._tokens = []

    def end_line(self) -> Iterator[Statement]:
        yield from self._end()
        self._indent, self._begins, self._follows, self._depth = 0, True, False, 0


_COMPOUND = names("if elif else try except finally for while with def class async match case")


def _value(literal: str, dynamic: str) -> str:
    prefix = _PREFIX.match(literal)
    head = prefix[0].lower() if prefix else ""
    body = literal[len(head) :]
    quote = body[:3] if body[:3] in ('"""', "'''") else body[:1]
    inner = body[len(quote) :].removesuffix(quote)
    return _FIELD.sub(dynamic, inner) if "f" in head or "t" in head else inner
