"""The answer to a request that is not served: an HTTP status and one readable sentence."""

import json
from http import HTTPStatus

from mcp.types import INVALID_REQUEST
from starlette.types import Send


class Refused(Exception):
    """A request is not served; `text` says why and what to do next."""

    def __init__(
        self,
        status: HTTPStatus,
        text: str,
        *,
        retry_after_s: int | None = None,
        challenge: str = "",
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self._extra: list[tuple[bytes, bytes]] = []
        if retry_after_s is not None:
            self._extra.append((b"retry-after", str(retry_after_s).encode()))
        if challenge:
            self._extra.append((b"www-authenticate", challenge.encode()))

    async def answer(self, send: Send) -> None:
        """Send it as a JSON-RPC error, and close: nobody reads the rest of the request."""
        error = {"code": INVALID_REQUEST, "message": self.text}
        body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *self._extra,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def too_many(what: str, wait_s: int) -> Refused:
    """Return the refusal of a user over a limit, who may try again after so many seconds."""
    text = f"too much at once ({what}): wait and try again"
    return Refused(HTTPStatus.TOO_MANY_REQUESTS, text, retry_after_s=wait_s)
