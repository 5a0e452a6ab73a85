"""Looks up the addresses of a target: every address of its name must be public."""

import socket
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from anyio import CapacityLimiter, to_thread

from mcp_sandbox.egress.targets import RefusedError, Target

HERE = "host.internal"
"""In a rule with `private: true`: this machine's loopback."""

_INTERNET = IPv6Network("2000::/3")
# Special addresses that `is_global` accepts: metadata of clouds, protocol assignments, 6to4,
# Teredo, documentation (from the IANA registries of special-purpose addresses).
_OTHERS = tuple(
    ip_network(each)
    for each in (
        *("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address is on the public internet and is not translated to another."""
    if isinstance(address, IPv6Address):
        public = address in _INTERNET
    else:
        public = address.is_global and not address.is_multicast
    return public and not any(address in each for each in _OTHERS)


async def addresses_of(
    target: Target, *, private: bool, limiter: CapacityLimiter | None = None
) -> list[str]:
    """Return the addresses of a name, looked up once; private ones only if `private`.

    Raises:
        RefusedError: one of them is not public, or there is none.
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
