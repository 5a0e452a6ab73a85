"""Which addresses a target may be dialled at: every one of its name must be public."""

from ipaddress import IPv4Address, IPv6Address

from mcp_sandbox.egress.targets import Target

HERE = "host.internal"
"""In a rule with `private: true`: this machine's loopback."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether it is one of the internet, and leads to no other by translation."""
    raise NotImplementedError


async def addresses_of(target: Target, *, private: bool) -> list[str]:
    """Return the addresses of a name, looked up once; `private` ones only where they may be.

    Raises:
        RefusedError: one of them is not public, or there is none.
    """
    raise NotImplementedError
