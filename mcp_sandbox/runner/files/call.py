"""One file operation's call: its checked arguments and the pipes for what goes in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files import pipes
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

BIGGEST = 2**62


class Call:
    """What an operation is given. A body comes in from `stdin`; one goes out to `stdout`.

    `end` are the bytes that follow a body that came whole.
    """

    def __init__(self, args: dict[str, Any], stdin: int, stdout: int, end: bytes = b"") -> None:
        self._args = args
        self._stdin = stdin
        self._end = end
        self.stdout = stdout

    def body(self) -> Iterator[bytes]:
        """The body that comes in, piece by piece.

        Raises:
            OpError: it did not come whole; nothing may be done with what came.
        """
        return pipes.until(self._stdin, self._end)

    def text(self, name: str, default: str | None = None) -> str:
        """A string argument; without a default it must be given."""
        value = self._args.get(name)
        if value is None and default is not None:
            return default
        return value if isinstance(value, str) else _refuse(name, "text")

    def number(self, name: str, default: int, *, low: int = 0, high: int = BIGGEST) -> int:
        """A whole number between `low` and `high`; true and false are not numbers."""
        value = self._args.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            upper = "" if high == BIGGEST else f" and at most {high}"
            _refuse(name, f"a whole number of at least {low}{upper}")
        return value

    def optional_number(self, name: str, *, high: int = BIGGEST) -> int | None:
        """A whole number from 0 to `high`, or None when it is absent or null."""
        return None if self._args.get(name) is None else self.number(name, 0, high=high)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A true or false argument."""
        value = self._args.get(name)
        if value is None:
            return default
        return value if isinstance(value, bool) else _refuse(name, "true or false")


def _refuse(name: str, wanted: str) -> NoReturn:
    raise OpError("invalid", f"argument {name!r} must be {wanted}: correct it and call again")
