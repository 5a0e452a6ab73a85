"""What the operator sets about sessions, in the words of this room."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcp_sandbox.models import Limits, Mount, Network, SandboxSpec
from mcp_sandbox.workspace.directory import ChatDirectories


@dataclass(frozen=True)
class Lifetimes:
    """How long a sandbox, and a chat's files, stay after their last use.

    A sandbox is paused, and removed, so long after; `lifetime_s` after its start it is replaced,
    whatever runs in it. `retention_s` is for files, looked at by the cron schedule `cleanup`;
    with 0 they stay for ever.
    """

    pause_after_s: float = 900.0
    remove_after_s: float = 3600.0
    lifetime_s: float = 86_400.0
    retention_s: float = 7 * 86_400.0
    cleanup: str = "0 3 * * *"


@dataclass(frozen=True)
class SessionSettings:
    """How sandboxes of chats are made, how many are open and how long.

    `idle_s`: how long one that no server is connected to, and in which nothing runs, waits for a
    server before it ends itself. `queue_wait_s`: how long a call waits when so many are open and
    in use.

    `keep_bytes`: how much output of one call is kept in a file. `may_move`: the operator named
    the backend, so that a chat may change to it; otherwise it stays where it is. `pool_size`: how
    many sandboxes wait, warm, for new chats, each for `pool_max_age_s` at the most.
    `keep_background`: those in which something runs in the background are left running at the end,
    and what runs at the beginning is taken over.
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
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    keep_background: bool = False
    pool_size: int = 0
    pool_max_age_s: float = 3600.0

    def spec(
        self,
        directories: ChatDirectories,
        labels: Mapping[str, str],
        further: tuple[Mount, ...] = (),
    ) -> SandboxSpec:
        """What to ask a backend for; `further` mounts are the chat's own."""
        return SandboxSpec(
            mounts=(
                Mount(directories.workspace, "/workspace"),
                Mount(directories.home, "/home/sandbox"),
                *directories.aliases,
                *directories.skills,
                *further,
            ),
            limits=self.limits,
            network=self.network,
            env=self.env,
            labels=labels,
            idle_s=self.idle_s,
        )
