"""The tokens of JavaScript and TypeScript. Pure, linear, and never fails."""

import re

from mcp_sandbox.reading.commands import DYNAMIC

_TOKEN = re.compile(
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
_FIELD = re.compile(r"\$\{[^{}]*\}")


Tokens = list[tuple[str, str]]


def read_tokens(text: str) -> Tokens:
    """Return kind (string, name or other) and text of each; what is no code is left out."""
    found = ((each.lastgroup or "other", each.group()) for each in _TOKEN.finditer(text))
    return [each for each in found if each[0] in ("string", "name", "other")]


def fields(literal: str) -> str:
    """The code that a template puts in, one field a line."""
    found = _FIELD.finditer(literal) if literal[:1] == "`" else ()
    return "\n".join(each[0][2:-1] for each in found)


def value(literal: str) -> str:
    """What is between the quotes; what a template puts in is DYNAMIC."""
    inner = literal[1:].removesuffix(literal[0])
    return _FIELD.sub(DYNAMIC, inner) if literal[0] == "`" else inner
