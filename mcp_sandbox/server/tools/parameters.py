"""The types of the tools' parameters: what is allowed, checked before a tool runs."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from mcp_sandbox.models import Language

MAX_CODE_CHARS = 1 << 20
MAX_CONTENT_CHARS = 8 << 20

_ALIASES = {
    "shell": "bash",
    "sh": "bash",
    "js": "javascript",
    "node": "javascript",
    "nodejs": "javascript",
    "py": "python",
    "python3": "python",
}
_FENCED = re.compile(r"\s*(`{3,}|~{3,})[ \w+#.-]*\r?\n(.*\n) *\1\s*", re.DOTALL)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
# The kernel refuses longer single strings.
_MAX_ENV_VALUE_BYTES = 128 * 1024 - 512


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL character: leave it out, or write an escape")
    return text


def _without_fence(text: str) -> str:
    """Return the code inside, when all of it is in one pair of Markdown fences."""
    whole = _FENCED.fullmatch(text)
    return whole[2] if whole else text


def _known_language(value: object) -> object:
    return _ALIASES.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _settable(env: Mapping[str, str] | None) -> Mapping[str, str] | None:
    for name, value in (env or {}).items():
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"{name[:60]!r} cannot be a variable's name; use letters, digits, '_'")
        if "\0" in value or len(value.encode()) > _MAX_ENV_VALUE_BYTES:
            raise ValueError(f"the value of {name} must be shorter than 128 KiB, without NUL")
    return env


Path = Annotated[
    str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_without_nul)
]
Pattern = Path
Text = Annotated[str, StringConstraints(max_length=MAX_CONTENT_CHARS)]
Code = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_CODE_CHARS),
    AfterValidator(_without_nul),
    AfterValidator(_without_fence),
]
EnvValue = Annotated[str, StringConstraints(max_length=_MAX_ENV_VALUE_BYTES)]
Env = Annotated[dict[str, EnvValue] | None, AfterValidator(_settable)]
LanguageName = Annotated[Language, BeforeValidator(_known_language)]
Limit = Annotated[int, Field(ge=1, le=10_000)]
Line = Annotated[int, Field(ge=1, le=2**31)]
