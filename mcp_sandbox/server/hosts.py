"""By which names a server may be asked for, so that no web page reaches it under its own name.

Pure functions on the Host and Origin headers of a request.
"""

import re
from collections.abc import Iterable

from mcp_sandbox.errors import ConfigError

Name = tuple[str, int | None]

_HOST = re.compile(r"([a-z0-9_](?:[a-z0-9._-]{0,252})|\[[0-9a-f:.]{2,45}\])(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(r"https?://([^/?#@]{1,300})")
_LOOPBACK: frozenset[Name] = frozenset({("localhost", None), ("127.0.0.1", None), ("[::1]", None)})


def parse_host(text: str) -> Name | None:
    """Return host and port (None when not named); None for what is no such thing."""
    match = _HOST.fullmatch(text.lower())
    if match is None:
        return None
    return match[1], None if match[2] is None else int(match[2])


class AllowedHosts:
    """The names of a server: those of loopback, where it listens, and what the operator allows.

    A name without a port is allowed with every port.

    Raises:
        ConfigError: an allowed name is no host name.
    """

    def __init__(self, listens_on: str, allowed: Iterable[str]) -> None:
        own = parse_host(listens_on)
        self._names = set(_LOOPBACK) if own is None else {*_LOOPBACK, own}
        for text in allowed:
            name = parse_host(text)
            if name is None:
                raise ConfigError(
                    f"http.allowed_hosts: {text!r} is no host name: "
                    "write them like sandbox.example.org or sandbox.example.org:8443"
                )
            self._names.add(name)

    def allows_host(self, header: str) -> bool:
        """Say whether a request with this Host may be answered."""
        name = parse_host(header)
        return name is not None and (name in self._names or (name[0], None) in self._names)

    def allows_origin(self, header: str) -> bool:
        """Say whether a page of this origin may ask: one that has a name of the server itself."""
        match = _ORIGIN.fullmatch(header.lower())
        return match is not None and self.allows_host(match[1])
