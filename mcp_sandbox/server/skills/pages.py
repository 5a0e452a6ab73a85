"""Long lists in pages. A cursor says after what to go on, so changes between do not shift it."""

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS

T = TypeVar("T")

_MOST_CURSOR = 16_000


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some of a list; with `next_cursor` there is more."""

    items: list[T]
    next_cursor: str | None = None


def page(items: Iterable[T], key: Callable[[T], str], cursor: str | None, most: int) -> Page[T]:
    """The items after a cursor, in the order of their keys.

    Raises:
        MCPError: the cursor is none of ours.
    """
    begun_after = _key_at(cursor) if cursor is not None else ""
    rest = sorted((item for item in items if key(item) > begun_after), key=key)
    more = len(rest) > most
    return Page(rest[:most], cursor_after(key(rest[most - 1])) if more else None)


def cursor_after(key: str) -> str:
    """What leads to the items after this one."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def _key_at(cursor: str) -> str:
    try:
        return base64.b64decode(cursor[:_MOST_CURSOR], altchars=b"-_", validate=True).decode()
    except ValueError as exc:
        problem = "that is no cursor of this list: begin again without one"
        raise MCPError(code=INVALID_PARAMS, message=problem) from exc
