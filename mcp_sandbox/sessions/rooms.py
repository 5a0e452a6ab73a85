"""What the holds of one manager work with, and what one of them holds."""

from dataclasses import dataclass

from anyio.abc import TaskGroup

from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.models import SandboxFacts
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.chat_lock import ChatLocks
from mcp_sandbox.sessions.drain import Drain
from mcp_sandbox.sessions.growth import GrowthGuard
from mcp_sandbox.sessions.ledger import Ledger
from mcp_sandbox.sessions.news import News
from mcp_sandbox.sessions.residence import Residence
from mcp_sandbox.sessions.settings import SessionSettings
from mcp_sandbox.sessions.slots import Slots
from mcp_sandbox.sessions.warm import WarmPool
from mcp_sandbox.skills.snapshots import Snapshots
from mcp_sandbox.workspace.directory import Workspaces
from mcp_sandbox.workspace.projects import Projects, Shown


@dataclass(frozen=True)
class Rooms:
    """What every hold of one manager shares."""

    backend: Backend
    workspaces: Workspaces
    projects: Projects
    residence: Residence
    locks: ChatLocks
    ledger: Ledger
    news: News
    settings: SessionSettings
    slots: Slots
    tasks: TaskGroup
    drain: Drain
    snapshots: Snapshots
    pool: WarmPool | None = None


@dataclass(frozen=True)
class Opened:
    """A sandbox with the connection to its runner, and what it shows of the client's folder.

    `news` is what the agent should know of the one that was there before.
    """

    sandbox: Sandbox
    runtime: Runtime
    shown: Shown
    news: str = ""


@dataclass(eq=False)
class Held:
    """An open sandbox. `suits` is False while it is unknown whether it is as it should be now.

    `can_pause` is False once it is known that it would save nothing. `epitaph` says what became of
    it, once it has ended under a call.
    """

    sandbox: Sandbox
    runtime: Runtime
    guard: GrowthGuard
    shown: Shown
    started_s: float
    suits: bool = True
    paused: bool = False
    can_pause: bool = True
    epitaph: str | None = None

    @property
    def facts(self) -> SandboxFacts:
        return self.sandbox.facts
