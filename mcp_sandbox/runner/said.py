"""What a worker may say of its job: anything else is not a worker of ours any more."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
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
        known = _is_status(said.get("status")) and isinstance(said.get("stays"), bool)
        return known and _are_names(said.get("changed"))
    if event == "done":
        return isinstance(said.get("result"), dict)
    return event == "fail" and all(_is_short(said.get(key), 8000) for key in ("code", "message"))


def _is_status(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= 0xFFFF


def _are_names(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, list) and len(value) <= 20 and all(_is_short(n, 500) for n in value)


def _is_short(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most
