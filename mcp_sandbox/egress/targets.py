"""Which host and port a program inside asks for, and at which addresses it may be dialled.

The only parser of targets: it accepts only names, in one spelling, so rules match exactly the
bytes that are resolved. Every address of a name must be public.
"""

import re
import socket
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Literal

from anyio import CapacityLimiter, to_thread

from mcp_sandbox.models import INTERNET, RESERVED

Refusal = Literal[
    "target", "rule", "address", "name", "length", "limit", "request", "secret", "failed"
]
"""How a refused connection is counted in the metrics."""

_LABEL = re.compile(rb"[a-z0-9_-]{1,63}")
_PORT = re.compile(rb"[0-9]{1,5}")
# The C library parses 127.1, 2130706433 and 0x7f.1 as addresses.
_LAST_OF_ADDRESS = re.compile(rb"[0-9]+|0x.*")
_ADDRESS = "a host is reached by its name, not by an address"
_URL = re.compile(rb"http://([^/?]*+)([\x21\x22\x24-\x7e]*+)", re.IGNORECASE)
HERE = "host.internal"
"""In a rule with `private: true`: this machine's loopback."""

_INTERNET, _RESERVED = (tuple(map(ip_network, each)) for each in (INTERNET, RESERVED))


class RefusedError(Exception):
    """A connection or request was refused or failed; the message is a clause that says why."""

    def __init__(self, reason: str, verdict: Refusal) -> None:
        super().__init__(reason)
        self.verdict: Refusal = verdict


@dataclass(frozen=True)
class Target:
    """A host in lower case without a trailing dot, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def normalize_host(name: bytes) -> str:
    """Return a host name in the one spelling that is matched and resolved.

    Raises RefusedError: it is an address, or not a valid name.
    """
    host = name.lower().removesuffix(b".")
    labels = host.split(b".")
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise _no_target("it is no host name" if host[:1] != b"[" else _ADDRESS)
    if _LAST_OF_ADDRESS.fullmatch(labels[-1]):
        raise _no_target(_ADDRESS)
    return host.decode("ascii")


def parse_target(authority: bytes, default_port: int | None = None) -> Target:
    """Return the target that `HOST:PORT` names; without a default the port is required.

    Raises RefusedError: it names no target.
    """
    name, colon, digits = authority.rpartition(b":")
    if not colon and default_port is not None:
        return Target(normalize_host(authority), default_port)
    if not _PORT.fullmatch(digits) or not 0 < (port := int(digits)) < 1 << 16:
        raise _no_target("it needs a port of 1 to 65535 after the host")
    return Target(normalize_host(name), port)


def split_url(url: bytes) -> tuple[Target, bytes]:
    """Return the target of `http://HOST[:PORT]/PATH?QUERY`, and /PATH?QUERY.

    Raises RefusedError: it is not such a URL.
    """
    if not (match := _URL.fullmatch(url)):
        raise _no_target("it is no http:// URL in plain ASCII; other schemes go by CONNECT")
    authority, path = match[1], match[2]
    return parse_target(authority, 80), path if path.startswith(b"/") else b"/" + path


def _no_target(reason: str) -> RefusedError:
    return RefusedError(reason, "target")


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is on the public internet and is not translated to another."""
    return any(address in each for each in _INTERNET) and not any(
        address in each for each in _RESERVED
    )


async def resolve_addresses(
    target: Target, *, private: bool, limiter: CapacityLimiter | None = None
) -> list[str]:
    """Return the addresses of a name, looked up once; private ones only if `private`.

    Raises RefusedError: one of them is not public, or there is none.
    """
    if private and target.host == HERE:
        return ["127.0.0.1", "::1"]
    # Given as text, the name would be encoded again.
    host, kind = target.host.encode("ascii"), socket.SOCK_STREAM
    look_up = partial(socket.getaddrinfo, host, target.port, type=kind)
    try:
        answer = await to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=limiter)
    except OSError as exc:
        raise RefusedError(f"its name has no address ({exc.strerror})", "failed") from exc
    found = [str(where[0]) for *_, where in answer]
    if not private and not all(is_public(ip_address(each)) for each in found):
        # To name the address would reveal a network that the sandbox cannot see.
        raise RefusedError("its name leads to an address that is not public", "address")
    return found
