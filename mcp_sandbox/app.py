"""Composition root: turns a configuration into a running application.

The only file that names concrete backends. They are imported late, so that nobody pays for the
libraries of a backend that is not used.
"""

import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup, TaskStatus

from mcp_sandbox.backends.base import Backend
from mcp_sandbox.config import Config, load_config, own_folders
from mcp_sandbox.errors import BackendUnavailable, ImageMissing, OperatorError
from mcp_sandbox.models import BackendName, ChatId

if TYPE_CHECKING:
    from mcp_sandbox.server.identity import ChatOf
    from mcp_sandbox.server.skills.visible import Visible
    from mcp_sandbox.sessions.clock import Clock
    from mcp_sandbox.sessions.manager import SessionManager
    from mcp_sandbox.sessions.session import Session
    from mcp_sandbox.sessions.settings import SessionSettings
    from mcp_sandbox.sessions.skills import Skills
    from mcp_sandbox.workspace.projects import ClientFolders, Projects
    from mcp_sandbox.workspace.view import Showing

logger = logging.getLogger(__name__)

_SANDBOX_ID = 10001
_HOMES: Mapping[BackendName, str] = {
    "docker": "mcp_sandbox.backends.docker.backend",
    "bubblewrap": "mcp_sandbox.backends.bubblewrap.backend",
    "unsafe-local": "mcp_sandbox.backends.unsafe_local",
}
_AUTOMATIC: tuple[BackendName, ...] = ("docker", "bubblewrap")


@dataclass(frozen=True)
class Choice:
    """A backend, and one sentence that says why it was chosen."""

    backend: Backend
    reason: str


@asynccontextmanager
async def open_backend(name: BackendName, config: Config) -> AsyncGenerator[Backend]:
    """Open the backend of that name, without asking whether it works.

    Its sandboxes do not end with the block; its connections do.
    """
    # An import reads many files; in a thread it does not hold up whoever else is served.
    await to_thread.run_sync(import_module, _HOMES[name])
    if name == "docker":
        from mcp_sandbox.backends.docker.backend import DockerBackend

        async with aclosing(DockerBackend(config.docker, config.data_dir)) as docker:
            yield docker
    elif name == "bubblewrap":
        from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend

        yield BubblewrapBackend(config.data_dir)
    else:
        from mcp_sandbox.backends.unsafe_local import UnsafeLocalBackend

        yield UnsafeLocalBackend(config.data_dir)


@asynccontextmanager
async def choose_backend(config: Config) -> AsyncGenerator[Choice]:
    """Open the configured backend, or with `auto` the first that isolates here.

    Raises:
        BackendUnavailable: `auto` found none that works; the message says what to install.
    """
    async with AsyncExitStack() as stack:
        if config.backend != "auto":
            backend = await stack.enter_async_context(open_backend(config.backend, config))
            yield Choice(backend, "the configuration names it")
        else:
            yield await _first_that_isolates(config, stack)


async def _first_that_isolates(config: Config, stack: AsyncExitStack) -> Choice:
    failures: list[str] = []
    for name in _AUTOMATIC:
        backend = await stack.enter_async_context(open_backend(name, config))
        try:
            found = await backend.probe()
        except (BackendUnavailable, ImageMissing) as exc:
            failures.append(f"{name} cannot be used: {exc}")
        else:
            return Choice(backend, "; ".join((found, *failures)))
    raise BackendUnavailable(
        "no backend isolates on this machine. Install and start Docker and run `mcp-sandbox "
        "images build`, or install bubblewrap. " + " ".join(failures)
    )


@asynccontextmanager
async def open_manager(
    config: Config,
    folders: "ClientFolders | None" = None,
    *,
    for_many: bool = False,
    clock: "Clock | None" = None,
    skills: "Skills | None" = None,
) -> AsyncGenerator["SessionManager"]:
    """Open the manager of all chats of a data root; what it opened ends with the block.

    `folders` says in which folders the clients of the chats work. `for_many` new chats it is
    worth to start sandboxes early, unless the configuration says how many. Without `clock`, the
    time is the machine's. `skills` are those that others use too.

    Raises:
        OperatorError: no backend works here, or the data root cannot be used.
    """
    for room in ("mcp_sandbox.sessions.manager", "mcp_sandbox.sessions.store_sqlite"):
        await to_thread.run_sync(import_module, room)
    from mcp_sandbox.sessions.clock import system_clock
    from mcp_sandbox.sessions.extras import Extras
    from mcp_sandbox.sessions.ledger import Ledger
    from mcp_sandbox.sessions.manager import SessionManager
    from mcp_sandbox.sessions.store_sqlite import SqliteStore
    from mcp_sandbox.workspace.directory import Workspaces
    from mcp_sandbox.workspace.pool import PoolFolder

    store = SqliteStore(config.data_dir / "sandbox" / "sessions.sqlite")
    async with choose_backend(config) as choice, aclosing(store):
        name = choice.backend.name
        logger.info("backend %s: %s", name, choice.reason)
        owner, size = _sandbox_user(name), _pool_size(config, name, for_many)
        shown = _skills_shown(config, name)
        folder = PoolFolder(
            config.data_dir,
            owner=owner,
            settings=config.workspace,
            skills=shown == "mounted",
        )
        async with SessionManager(
            choice.backend,
            Workspaces(config.data_dir, owner=owner, settings=config.workspace, skills=shown),
            ledger=Ledger(store, name, clock or system_clock),
            settings=replace(_session_settings(config), pool_size=size, keep_background=for_many),
            extras=Extras(_projects(config, name, folders), skills or open_skills(config)),
            pool=folder if size else None,
        ) as manager:
            yield manager


def _skills_shown(config: Config, backend: BackendName) -> "Showing | None":
    if not config.skills.enabled:
        return None
    # Where nothing is mounted, skills are copied.
    return "copied" if backend == "unsafe-local" else "mounted"


def open_skills(config: Config) -> "Skills":
    """What agents can be taught; nothing is read before somebody asks."""
    from mcp_sandbox.sessions.skills import Skills
    from mcp_sandbox.skills.library import Library

    return Skills(Library(config.skills, config.data_dir), config.skills.narrow)


def visible_skills(config: Config, skills: "Skills", chat_of: "ChatOf") -> "Visible | None":
    """What each caller sees of them; None if they are switched off."""
    from mcp_sandbox.server.identity import callers_by
    from mcp_sandbox.server.skills.visible import Visible

    if not config.skills.enabled:
        return None
    return Visible(skills, callers_by(chat_of), config.skills)


def _projects(config: Config, backend: BackendName, folders: "ClientFolders | None") -> "Projects":
    from mcp_sandbox.workspace.projects import Projects, no_projects

    # Where nothing is mounted, nothing is shown.
    if folders is None or backend == "unsafe-local":
        return no_projects(config.data_dir)
    return Projects(
        config.project,
        config.data_dir,
        owner=_sandbox_user(backend),
        folders=folders,
    )


def _pool_size(config: Config, backend: BackendName, for_many: bool) -> int:
    if backend == "unsafe-local":
        # Its runner knows its directories by their paths, so no chat can adopt them.
        return 0
    if config.pool.size == "auto":
        return 1 if for_many and backend == "docker" else 0
    return config.pool.size


def _session_settings(config: Config) -> "SessionSettings":
    from mcp_sandbox.sessions.settings import Lifetimes, SessionSettings

    return SessionSettings(
        limits=config.limits.values(),
        network=config.network,
        env=config.env,
        idle_s=config.sessions.orphaned,
        max_open=config.sessions.max_open,
        max_per_user=config.sessions.max_per_user,
        queue_wait_s=config.sessions.queue_wait,
        keep_bytes=config.output.kept,
        may_move=config.backend != "auto",
        lifetimes=Lifetimes(
            pause_after_s=config.sessions.idle,
            remove_after_s=config.sessions.remove_after,
            lifetime_s=config.sessions.lifetime,
            retention_s=config.workspace.retention,
            cleanup=config.workspace.cleanup,
        ),
        pool_max_age_s=config.pool.max_age,
    )


def _sandbox_user(backend: BackendName) -> tuple[int, int]:
    """Return who owns the files of sandboxes: never root where the backend isolates."""
    if os.geteuid() == 0 and backend != "unsafe-local":
        return _SANDBOX_ID, _SANDBOX_ID
    return os.geteuid(), os.getegid()


@asynccontextmanager
async def temporary_data() -> AsyncGenerator[Path]:
    """Make a data root that goes away with the block, for a trial that leaves no files."""
    folder = await to_thread.run_sync(
        lambda: tempfile.TemporaryDirectory(prefix="mcp-sandbox-", ignore_cleanup_errors=True)
    )
    try:
        yield Path(folder.name)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(folder.cleanup)


class LateManager:
    """Opens the manager at the first call, so that a client gets its first answer at once."""

    def __init__(
        self,
        config: Config,
        tasks: TaskGroup,
        folders: "ClientFolders | None" = None,
        *,
        for_many: bool = False,
        skills: "Skills | None" = None,
    ) -> None:
        self._config = config
        self._skills = skills
        self._for_many = for_many
        self._tasks = tasks
        self._folders = folders
        self._lock = anyio.Lock()
        self._manager: SessionManager | None = None

    @property
    def opened(self) -> "SessionManager | None":
        """The manager, if it is open already."""
        return self._manager

    def is_in_use(self) -> bool:
        """Whether a call is under way or something runs in the background."""
        now = self._manager and self._manager.statistics()
        return bool(now and (now.busy or now.queued or now.background))

    async def open(self) -> "SessionManager":
        """Return the manager; after a failure to open it, the next call tries again."""
        async with self._lock:
            if self._manager is None:
                open_it = partial(
                    _hold_open, self._config, self._folders, self._for_many, self._skills
                )
                self._manager = await self._tasks.start(open_it)
        return self._manager

    async def open_early(self) -> None:
        """Open it before anybody asks; a failure is reported to who asks."""
        try:
            await self.open()
        except OperatorError as exc:
            logger.warning("no sandbox can be made now: %s", exc)

    async def session(self, chat: ChatId) -> "Session":
        """Return the session of a chat."""
        return await (await self.open()).session(chat)


async def _hold_open(
    config: Config,
    folders: "ClientFolders | None",
    for_many: bool,
    skills: "Skills | None",
    *,
    task_status: "TaskStatus[SessionManager]",
) -> None:
    async with open_manager(config, folders, for_many=for_many, skills=skills) as manager:
        task_status.started(manager)
        await anyio.sleep_forever()


async def serve_stdio(config: Config, chat: ChatId, project: Path | None = None) -> None:
    """Serve one chat on stdin and stdout until the client goes or a signal comes.

    `project` is the folder that the client works in.
    """
    from mcp_sandbox.server import transports
    from mcp_sandbox.server.identity import one_chat, sessions_by
    from mcp_sandbox.server.server import build_server
    from mcp_sandbox.workspace.projects import ClientFolders

    folders = ClientFolders(own_folders())
    async with transports.stopped_by_signals(), anyio.create_task_group() as tasks:
        skills, chat_of = open_skills(config), one_chat(chat)
        manager = LateManager(config, tasks, folders, skills=skills)
        server = build_server(
            sessions_by(chat_of, manager.session),
            network=config.network,
            project=config.project.access,
            isolated=config.backend != "unsafe-local",
            skills=visible_skills(config, skills, chat_of),
        )
        with folders.brought(chat, project):
            await transports.serve_stdio(server)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_session(
    chat: str = "demo", *, user: str = "local", config: Config | None = None
) -> AsyncGenerator["Session"]:
    """Open the computer of a chat; its files stay, its sandbox ends with the block.

    Without `config` the configuration file and the environment count, as on the command line.

    Raises:
        InvalidArgument: the chat or the user is not a usable id.
        OperatorError: no sandbox can be made here; the message says what to do.
    """
    chat_id = ChatId(user, chat)
    if config is None:
        config = (await to_thread.run_sync(load_config)).config
    async with open_manager(config) as manager:
        yield await manager.session(chat_id)
