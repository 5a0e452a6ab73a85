"""What a worker may say of its job: anything else is not a worker of ours any more."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

# The kernel's own bound of process numbers.
_MOST_PID = 2**22


def is_pid(value: object) -> bool:
    """Whether it can be the number of a process below us."""
    return isinstance(value, int) and 1 < value <= _MOST_PID and value != os.getpid()


def makes_sense(said: dict[str, Any]) -> bool:
    """Whether a worker's word on its job has the form that its listener counts on."""
    event = said.get("e")
    if event == "begin":
        return True
    if event == "pid":
        return is_pid(said.get("pid"))
    if event == "exit":
        known = _is_number(said.get("status"), 0xFFFF) and isinstance(said.get("stays"), bool)
        named = _is_list(said.get("changed"), range(21), lambda name: _is_short(name, 500))
        return known and named and _is_list(said.get("counts"), (3,), _is_number)
    if event == "done":
        return isinstance(said.get("result"), dict)
    return event == "fail" and all(_is_short(said.get(key), 8000) for key in ("code", "message"))


def _is_number(value: object, most: int = 2**31) -> bool:
    return isinstance(value, int) and 0 <= value <= most


def _is_list(value: object, sizes: Collection[int], of: Callable[[object], bool]) -> bool:
    """Whether it is None, or a list of such a size and such members."""
    return value is None or (
        isinstance(value, list) and len(value) in sizes and all(map(of, value))
    )


def _is_short(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most
