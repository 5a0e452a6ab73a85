"""What the operator sets about sessions, in the words of this room."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcp_sandbox.models import Limits, Network


@dataclass(frozen=True)
class SessionSettings:
    """How sandboxes of chats are made and how many are open.

    `queue_wait_s`: how long a call waits when so many are open and in use.

    `keep_bytes`: how much output of one call is kept in a file. `may_move`: the operator named
    the backend, so that a chat may change to it; otherwise it stays where it is.
    """

    limits: Limits = field(default_factory=Limits)
    network: Network = "none"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    idle_s: float = 60.0
    max_open: int = 16
    max_per_user: int = 8
    queue_wait_s: float = 30.0
    keep_bytes: int = 64 * 1024 * 1024
    may_move: bool = True
