"""Frames: the protocol of the host and the runner. The same file serves both ends.

A frame is a prefix (header length, payload length: two big-endian 32-bit numbers), a JSON object,
raw bytes, and, once both sides have proved the token, a 16-byte seal over all of it and the
frame's number. User code that gets between the two ends (a replaced socket, a hijacked relay) can
cut the connection; it cannot add, change, repeat or reorder a frame unnoticed.

Host to runner, by "t":
    call {id, op, args, more}   payload: first bytes of the body; `more`: data frames follow;
                                `release`: as if that followed at once
    data {id, more}             further body bytes, within the credit the runner gave
    credit {id, n}              the host took n bytes of this call's data
    cancel {id}                 stop it and everything it started; it still answers
    release {id}                answer now; what it started goes on
A connection whose hello says `"for": "doors"`, and proves the token for that, is not sealed, and
takes the calls `listen {at, shared}` and `door {at}` alone (runner/calls/doors.py).
Runner to host:
    open {id, most, port}       it listens, for so many doors; or a client is at this door
    data {id, s}                "body": reliable, within credit; "stdout"/"stderr": live, may skip;
                                "end": one byte that says that no more of the body follows
    credit {id, n}              the runner took n bytes of this call's body
    done {id, result}           payload: captured output
    fail {id, code, message}
    background {background, background_total}   unasked, when what commands left running changes
    ended {processes}           unasked: ends of processes that no call waited for
"""

from __future__ import annotations

import struct

from mcp_sandbox.runner.kernel.native import dumps, loads

try:  # The built-in module alone: hashlib would load OpenSSL into every idle sandbox.
    from _blake2 import blake2b
except ImportError:  # pragma: no cover - interpreters built without their own BLAKE2
    from hashlib import blake2b
from _operator import _compare_digest as compare_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

VERSION = "5"
UNWATCHED = {"GIT_EDITOR": "true", "PAGER": "cat", "TERM": "dumb"}
"""Variables of commands, which no person watches; what runs on a terminal goes without them."""
COLUMNS, ROWS = 100, 30  # Of the terminal of a command.
PREFIX = struct.Struct(">II")
SEAL_BYTES = 16
# A header travels on to a worker in one datagram, whose default limit is about 200 KiB.
MAX_HEADER = 128 * 1024
MAX_PAYLOAD = 1024 * 1024
CHUNK = 256 * 1024
WINDOW = 1024 * 1024
STREAM_WINDOW = WINDOW // 4  # Of connections, of which many are open at once.
MAX_CALLS = 1024
MOST_PLACES = 16  # With doors.
NONCE_BYTES = 16


class ProtocolError(Exception):
    """The other side broke the protocol; the connection is useless."""


class OpError(Exception):
    """A failed call, with a message for its caller. `code` is one word of the protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def prove(token: bytes, role: str, mine: bytes, theirs: bytes) -> str:
    """Return a proof for the other side that `role` knows the token, bound to both nonces."""
    return blake2b(mine + theirs, key=token, person=role.encode(), digest_size=32).hexdigest()


def equals_secret(left: str, right: object) -> bool:
    """Compare secrets in constant time; return False for anything but text."""
    return isinstance(right, str) and compare_digest(
        left.encode(), right.encode("utf-8", "replace")
    )


class Seal:
    """Key and frame counter of one direction of one connection."""

    def __init__(self, token: bytes, direction: str, nonces: bytes) -> None:
        self._key = blake2b(nonces, key=token, person=direction.encode(), digest_size=32).digest()
        self._count = 0

    def next(self, *parts: bytes | memoryview) -> bytes:
        mac = blake2b(struct.pack(">Q", self._count), key=self._key, digest_size=SEAL_BYTES)
        for part in parts:
            mac.update(part)
        self._count += 1
        return mac.digest()


def encode(
    header: dict[str, Any], payload: bytes | memoryview = b"", seal: Seal | None = None
) -> bytes:
    """Return one frame as bytes; raise ProtocolError if header or payload is over its limit."""
    return b"".join(encode_parts(header, payload, seal))


def encode_parts(
    header: dict[str, Any], payload: bytes | memoryview, seal: Seal | None
) -> tuple[bytes | memoryview, ...]:
    """Return a frame in parts, so that a large payload is not copied."""
    head = dumps(header)
    if len(head) > MAX_HEADER or len(payload) > MAX_PAYLOAD:
        raise ProtocolError(f"frame too large: header {len(head)}, payload {len(payload)} bytes")
    prefix = PREFIX.pack(len(head), len(payload))
    tag = seal.next(prefix, head, payload) if seal else b""
    return prefix, head, payload, tag


def _parse_header(raw: bytes) -> dict[str, Any]:
    try:
        header = loads(raw)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError("frame header is not JSON") from exc
    if not isinstance(header, dict) or not isinstance(header.get("t"), str):
        raise ProtocolError("frame header is not an object with a type")
    return header


class Decoder:
    """Turns received bytes into frames, holding at most one frame more than was fed."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.seal: Seal | None = None

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the frames that `data` completes; ProtocolError if one is malformed or forged.

        The seal may be set between two frames.
        """
        self._buffer += data
        while len(self._buffer) >= PREFIX.size:
            head_size, payload_size = PREFIX.unpack_from(self._buffer)
            if head_size > MAX_HEADER or payload_size > MAX_PAYLOAD:
                raise ProtocolError("frame over the size limit")
            head_end = PREFIX.size + head_size
            body_end = head_end + payload_size
            end = body_end + (SEAL_BYTES if self.seal else 0)
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as frame, frame[:body_end] as body:
                if self.seal and not compare_digest(self.seal.next(body), frame[body_end:end]):
                    raise ProtocolError("frame seal is wrong")
                head, payload = bytes(body[PREFIX.size : head_end]), bytes(body[head_end:])
            del self._buffer[:end]
            yield _parse_header(head), payload
