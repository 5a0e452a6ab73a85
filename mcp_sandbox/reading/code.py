"""The tokens of JavaScript, and the statements of Python, of any version. Pure, linear.

The readers never fail, and leave out comments and blanks.
"""

import re
import string
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mcp_sandbox.reading.commands import DYNAMIC, names

Kind = Literal["name", "string", "other"]

_MOST_TOKENS = 70_000
_JAVASCRIPT = re.compile(
    r"""
    (?P<comment>//[^\n]*+|/\*[^*]*(?:\*(?!/)[^*]*)*(?:\*/)?)
  | (?P<regex>(?:(?<=[(,=:\[!&|?{};])|(?<![\s\S]))\s*+/(?![*/])
        (?:[^/\\\n\[]|\\.|\[[^\]\\\n]*(?:\\.[^\]\\\n]*)*\]?)+/?)
  | (?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|'[^'\\\n]*(?:\\.[^'\\\n]*)*'?
      | `[^`\\]*(?:\\.[^`\\]*)*`?)
  | (?P<name>[^\W\d][\w$]*+)
  | (?P<other>\S)
  | (?P<blank>\s++)
    """,
    re.VERBOSE | re.DOTALL,
)
_PYTHON = re.compile(
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
_JAVASCRIPT_FIELD, _PYTHON_FIELD = re.compile(r"\$\{([^{}]*)\}"), re.compile(r"\{([^{}]*)\}")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_COMPOUND = names("if elif else try except finally for while with def class async match case")


class Token(NamedTuple):
    """A piece of code.

    For a string, `text` is what is between its quotes, `code` its interpolated fields, one a line.
    """

    kind: Kind
    text: str
    code: str = ""


def mark(tokens: Sequence[Token], at: int) -> str:
    """Return the name or sign at `at`; empty for a string, and beyond the ends."""
    return tokens[at].text if 0 <= at < len(tokens) and tokens[at].kind != "string" else ""


def javascript_tokens(text: str) -> list[Token]:
    """Return the tokens of JavaScript or TypeScript."""
    found = list[Token]()
    for each in _JAVASCRIPT.finditer(text):
        kind, piece = each.lastgroup, each.group()
        if kind == "string":
            inner = piece[1:].removesuffix(piece[0])
            found.append(_string(inner, _JAVASCRIPT_FIELD if piece[0] == "`" else None))
        elif kind in ("name", "other"):
            found.append(Token("name" if kind == "name" else "other", piece))
    return found


def python_statements(text: str) -> Iterator[tuple[Token, ...]]:
    """Yield the tokens of each statement of Python; several on one line are yielded one by one."""
    tokens, depth = list[Token](), 0
    for found in _PYTHON.finditer(text):
        kind, piece = found.lastgroup, found.group()
        if kind == "blank":
            continue
        ends = depth == 0 and (kind == "newline" or piece == ";")
        if kind != "newline" and not ends:
            if len(tokens) < _MOST_TOKENS:
                tokens.append(_python_token(kind, piece))
            depth += (piece in _OPENING) - (piece in _CLOSING and depth > 0)
            ends = piece == ":" and depth == 0 and tokens[0].text in _COMPOUND
        if ends and tokens:
            yield tuple(tokens)
            tokens = []
    if tokens:
        yield tuple(tokens)


def _python_token(kind: str | None, literal: str) -> Token:
    if kind != "string":
        return Token("name" if kind == "name" else "other", literal)
    body = literal.lstrip(string.ascii_letters)
    head = literal[: len(literal) - len(body)].lower()
    quote = body[:3] if body[:3] in ('"""', "'''") else body[:1]
    has_fields = "f" in head or "t" in head
    return _string(body[len(quote) :].removesuffix(quote), _PYTHON_FIELD if has_fields else None)


def _string(inner: str, field: re.Pattern[str] | None) -> Token:
    if not field:
        return Token("string", inner)
    code = "\n".join(found[1] for found in field.finditer(inner))
    return Token("string", field.sub(DYNAMIC, inner), code)


def read_imports(tokens: Sequence[Token]) -> Iterator[tuple[str, str, str]]:
    """Yield the module, its member or "", and the name after `as` or "", of an import statement."""
    if tokens[0].text not in ("import", "from"):
        return
    text = "".join(f" {t.text} " if t.text in ("as", "import") else t.text for t in tokens[1:])
    package = ""
    if tokens[0].text == "from":
        package, _, text = text.partition(" import ")
    for each in text.strip("()").split(","):
        name, _, called = (part.strip() for part in each.partition(" as "))
        yield (package, name, called) if package else (name, "", called)


def read_arguments(tokens: Sequence[Token], at: int, most: int) -> list[list[Token]]:
    """Return the arguments of a call, or elements of a list, in the first `most` tokens."""
    found, depth = list[list[Token]]([[]]), 0
    for token in tokens[at : at + most]:
        sign = token.text if token.kind == "other" else ""
        depth += (sign in _OPENING) - (sign in _CLOSING)
        if depth < 0:
            break
        if sign == "," and depth == 0:
            found.append([])
        else:
            found[-1].append(token)
    return [each for each in found if each]


def read_literal(argument: Sequence[Token]) -> str:
    """Return NAME= if it is a named argument, and the text of its literal; else DYNAMIC."""
    named = mark(argument, 1) == "="
    name, value = (f"{argument[0].text}=", argument[2:]) if named else ("", argument)
    known = len(value) == 1 and value[0].kind == "string"
    return name + (value[0].text if known else DYNAMIC)
