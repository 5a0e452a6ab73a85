"""Finds the host that a TLS client asks for: a bounded parser of its first message. Pure.

The layout is that of RFC 8446 section 4.1.2 and, for the name, RFC 6066 section 3.
"""

from mcp_sandbox.egress.targets import RefusedError, host_of

LARGEST = 16 << 10
"""The longest message that is read, in bytes."""
_RECORDS = 64  # Clients send one to three.
_HANDSHAKE, _MAJOR_VERSION, _CLIENT_HELLO = b"\x16", b"\x03", 1


def named_host(data: bytes) -> str | None:
    """Return the host that a ClientHello names (SNI), or None while it is incomplete.

    `data` is everything received so far.

    Raises:
        RefusedError: it names no host or several, is no ClientHello, or is larger than 16 KiB.
    """
    message = _message(data)
    if message is None:
        return None
    names = [value for kind, value in _extensions(message) if kind == 0]
    if len(names) != 1:
        raise _refused("names no host (SNI)" if not names else "names several hosts (SNI)")
    entries, end = _vector(names[0], 2)
    name, further = _vector(entries[1:], 2)
    if end or further or entries[0] != 0:
        raise _refused("names several hosts (SNI)")
    try:
        return host_of(name)
    except RefusedError as exc:
        raise _refused(f"names a host (SNI) that cannot be one: {exc}") from exc


def _message(data: bytes) -> bytes | None:
    """Return the body of the ClientHello, joined from its records; None while incomplete."""
    joined, at = b"", 0
    for _ in range(_RECORDS):
        head = data[at : at + 5]
        if head[:1] not in (b"", _HANDSHAKE) or head[1:2] not in (b"", _MAJOR_VERSION):
            raise _refused("is none")
        size = int.from_bytes(head[3:])
        if len(head) == 5 and not 0 < size <= LARGEST:
            raise _refused("is malformed")
        joined += data[at + 5 : at + 5 + size]
        if joined and joined[0] != _CLIENT_HELLO:
            raise _refused("is none")
        end = 4 + int.from_bytes(joined[1:4])
        if len(joined) >= 4 and end > LARGEST:
            raise _refused("is larger than 16 KiB")
        if len(joined) >= max(4, end):
            return joined[4:end]
        at += 5 + size
        if len(data) < at:
            return None
    raise _refused("comes in too many records")


def _extensions(message: bytes) -> list[tuple[int, bytes]]:
    rest = message[34:]  # After version and random.
    for size in (1, 2, 1):  # Session, cipher suites, compression.
        _, rest = _vector(rest, size)
    extensions, end = _vector(rest, 2) if rest else (b"", b"")
    if end:
        raise _refused("is malformed")
    found = list[tuple[int, bytes]]()
    while extensions:
        kind = int.from_bytes(extensions[:2])
        value, extensions = _vector(extensions[2:], 2)
        found.append((kind, value))
    return found


def _vector(data: bytes, size: int) -> tuple[bytes, bytes]:
    """Return the bytes whose length is in the first `size` bytes, and what follows them."""
    end = size + int.from_bytes(data[:size])
    if len(data) < max(size, end):
        raise _refused("is malformed")
    return data[size:end], data[end:]


def _refused(how: str) -> RefusedError:
    return RefusedError(f"its TLS hello {how}", "name")
