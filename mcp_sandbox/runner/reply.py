"""The way back: what a call says to the connection it came from."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from mcp_sandbox.runner.connection import Connection


class Reply:
    """Frames of one call; silent once the call has ended."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection: Connection | None = connection
        self._number = number

    def data(self, name: str, data: bytes) -> None:
        if self._connection:
            self._connection.send({"t": "data", "id": self._number, "s": name}, data)

    def credit(self, size: int) -> None:
        if self._connection:
            self._connection.send({"t": "credit", "id": self._number, "n": size})

    def done(self, result: dict[str, Any], payload: bytes = b"") -> None:
        self._end({"t": "done", "id": self._number, "result": result}, payload)

    def fail(self, code: str, message: str) -> None:
        self._end({"t": "fail", "id": self._number, "code": code, "message": message}, b"")

    def _end(self, header: dict[str, Any], payload: bytes) -> None:
        if self._connection:
            self._connection.send(header, payload)
            self._connection.ended(self._number)
            self._connection = None
