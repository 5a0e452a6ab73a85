"""The body of a request, read as a whole before anything parses it: bounded in size and time."""

from collections.abc import Callable
from http import HTTPStatus

import anyio
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from mcp_sandbox.server.refusal import Refused


class Gone(Exception):
    """The client left before its request had come."""


async def read_body(
    headers: Headers,
    receive: Receive,
    max_bytes: int,
    within_s: float,
    *,
    count: Callable[[int], None],
) -> bytes:
    """The body of a POST. `count` is told of the bytes as they come, and may refuse them.

    Raises:
        Refused: it is no JSON, too large, or too slow.
        Gone: the client left.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the message as application/json")
    # The parser of HTTP lets only digits through.
    if int(headers.get("content-length", "0")) > max_bytes:
        raise _too_large(max_bytes)
    try:
        with anyio.fail_after(within_s):
            return await _collect(receive, max_bytes, count)
    except TimeoutError as exc:
        text = f"the request did not come within {within_s:g} s: send it again, faster"
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, text) from exc


def refuse_body(headers: Headers) -> None:
    """Raise Refused when a request that has no use for a body brings one."""
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise Refused(HTTPStatus.BAD_REQUEST, "this method takes no body: leave it out")


def replayed(body: bytes, receive: Receive) -> Receive:
    """A channel that gives a body that was read already, then what else comes."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


async def _collect(receive: Receive, max_bytes: int, count: Callable[[int], None]) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Gone
        piece = message.get("body", b"")
        count(len(piece))
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(max_bytes: int) -> Refused:
    return Refused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"a message may have {max_bytes:,} bytes: send less at a time (http.max_body)",
    )
