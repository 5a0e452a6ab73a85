"""Values that requests to their hosts get on the way out, and the placeholders that are inside.

A value is known to this process alone: no repr, error or log line shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcp_sandbox.config import SecretConfig
from mcp_sandbox.egress.masking import Mask
from mcp_sandbox.egress.rules import Rule
from mcp_sandbox.egress.targets import Target
from mcp_sandbox.models import ChatId

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class BoundSecret:
    """A secret that may go to some hosts, in one header, for the chats of some users."""

    name: str
    header: bytes
    hosts: tuple[Rule, ...]
    users: frozenset[str]


@dataclass(frozen=True)
class SecretState:
    """What people may know of a secret: `length` in bytes, or what is wrong with its source."""

    name: str
    hosts: tuple[str, ...]
    users: tuple[str, ...]
    header: str
    length: int | None = None
    problem: str = ""


class Secrets:
    """The operator's secrets.

    Raises:
        ConfigError: a host or a source cannot be understood.
    """

    def __init__(self, settings: Mapping[str, SecretConfig], seed: bytes) -> None:
        raise NotImplementedError

    def placeholders(self, chat: ChatId) -> dict[str, str]:
        """Return the variables that a chat's calls get: its secrets' names and placeholders."""
        raise NotImplementedError

    def bound(self, chat: ChatId, target: Target) -> tuple[BoundSecret, ...]:
        """Return the secrets that a chat's requests to this target may carry."""
        raise NotImplementedError

    async def fill(
        self, chat: ChatId, target: Target, headers: Sequence[Header]
    ) -> tuple[list[Header], Mask | None]:
        """Return the headers with values for placeholders, and the mask for the whole answer.

        The mask is None where no secret is bound to the target.

        Raises:
            RefusedError: the source of a value that is needed fails.
        """
        raise NotImplementedError

    async def check(self) -> list[SecretState]:
        """Ask every source."""
        raise NotImplementedError

    def masked(self, line: str) -> str:
        """Return a log line with filler for every value that is known by now."""
        raise NotImplementedError
