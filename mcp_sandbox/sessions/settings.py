"""The operator's settings of sessions, and the specifications and labels made from them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mcp_sandbox.backends.base import Backend
from mcp_sandbox.config import CallsConfig, SessionsConfig, WorkspaceConfig
from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId, Limits, Mount, Network, SandboxInfo, SandboxSpec
from mcp_sandbox.sessions.chat_records import USUAL, AssistantSpec
from mcp_sandbox.workspace.directory import ChatDirectories

# Labels: the digest of what a sandbox was made from, and when, in seconds since boot.
SPEC, STARTED = "spec", "started"


@dataclass(frozen=True)
class SessionSettings:
    """How sandboxes of chats are made, how many are open and how long.

    `keep_bytes`: how much output of one call is kept in a file. `may_move`: the operator named
    the backend, so chats of another one may change to it. `pool_size`: how many sandboxes wait for
    new chats, each for at most `pool_max_age_s`. `keep_background`: sandboxes with background
    processes are left running at the end, and running ones are taken over at the start. Every
    sandbox has the `mounts`.
    """

    limits: Limits = field(default_factory=Limits)
    network: Network = "none"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    sessions: SessionsConfig = field(default_factory=SessionsConfig)
    workspace: WorkspaceConfig = field(default_factory=WorkspaceConfig)
    calls: CallsConfig = field(default_factory=CallsConfig)
    keep_bytes: int = 64 * 1024 * 1024
    previews: bool = True
    may_move: bool = True
    keep_background: bool = False
    mounts: tuple[Mount, ...] = ()
    pool_size: int = 0
    pool_max_age_s: float = 3600.0

    def spec(
        self,
        directories: ChatDirectories,
        labels: Mapping[str, str],
        origin: str,
        further: tuple[Mount, ...] = (),
        assistant: AssistantSpec = USUAL,
    ) -> SandboxSpec:
        """Return what to ask a backend for; `origin` is its image, `further` are the chat's mounts.

        The digest among its labels is the same for chats whose sandboxes differ only in whose
        files they show.
        """
        mounts = (*directories.mounts, *self.mounts, *further)
        own = {directories.workspace: "workspace", directories.home: "home"}
        own |= {mount.source: mount.target for mount in directories.skills}
        limits = replace(self.limits, **assistant.limits)
        shape = {
            "origin": origin,
            "limits": asdict(limits),
            "network": self.network,
            "env": dict(self.env),
            "mounts": [[_shown(each.source, own), each.target, each.read_only] for each in mounts],
        }
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
        labels = {**labels, SPEC: digest}
        # Backends know only these two; connections to allowed hosts leave by doors.
        network: Network = "open" if self.network == "open" else "none"
        idle_s, image = self.sessions.orphaned, assistant.image
        user = directories.user
        return SandboxSpec(mounts, limits, network, self.env, labels, idle_s, image, user)


def find_chat_label(labels: Mapping[str, str]) -> ChatId | None:
    """Return the chat that a sandbox's labels name; None if they name none."""
    with suppress(KeyError, InvalidArgument):
        return ChatId(labels["user"], labels["chat"])
    return None


async def list_chat_sandboxes(backend: Backend) -> Sequence[tuple[ChatId, SandboxInfo]]:
    """Return the sandboxes of chats, of all servers."""
    found = [(find_chat_label(info.labels), info) for info in await backend.running()]
    return [(chat, info) for chat, info in found if chat]


def started_s(labels: Mapping[str, str], now_s: float) -> float:
    """Return when a sandbox with these labels was started; `now_s` if they do not tell."""
    with suppress(KeyError, ValueError):
        return min(float(labels[STARTED]), now_s)
    return now_s


def _shown(source: Path, own: Mapping[Path, str]) -> str:
    for tree, name in own.items():
        if source.is_relative_to(tree):
            return f"{name}/{source.relative_to(tree)}"
    return str(source)
