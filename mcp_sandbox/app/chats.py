"""Composition root: turns a configuration into a running application.

The only file that names concrete backends. They are imported late, so that no start pays for the
libraries of a backend that is not used.
"""

import logging
import os
import secrets
import signal
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup, TaskStatus

from mcp_sandbox import errors
from mcp_sandbox.backends.base import Backend, NoopBackend, Pooled
from mcp_sandbox.backends.sandbox_records import boot_id, sandbox_user
from mcp_sandbox.config import Config, FleetConfig, StorageConfig, load_config, own_folders
from mcp_sandbox.durable import is_locked
from mcp_sandbox.models import PROGRAMS, BackendName, ChatId, Mount
from mcp_sandbox.telemetry import logs

if TYPE_CHECKING:
    from mcp_sandbox.audit import Audit
    from mcp_sandbox.egress.rules import EgressRules as Hosts
    from mcp_sandbox.egress.ways_out import WaysOut
    from mcp_sandbox.server.server import SandboxServer
    from mcp_sandbox.sessions.chat_records import ChatRecords, Clock, UseTimes
    from mcp_sandbox.sessions.doors import Egress
    from mcp_sandbox.sessions.manager import SessionManager
    from mcp_sandbox.sessions.sandbox.context import SessionContext
    from mcp_sandbox.sessions.session import Session
    from mcp_sandbox.sessions.skills import Skills
    from mcp_sandbox.storage.leases import Leases
    from mcp_sandbox.storage.redis import FleetStore
    from mcp_sandbox.telemetry.calls import Count
    from mcp_sandbox.workspace.directory import Workspaces
    from mcp_sandbox.workspace.projects import ClientFolders

logger = logging.getLogger(__name__)

ISOLATING: tuple[BackendName, ...] = ("docker", "bubblewrap")


def server_folder(config: Config) -> Path:
    """Return the folder of what only this server may touch, such as the notes of its sandboxes."""
    fleet, data_dir = config.fleet, config.data_dir
    return data_dir / "servers" / fleet.name if fleet.shared_data_dir else data_dir


@asynccontextmanager
async def open_backend(name: BackendName, config: Config) -> AsyncGenerator[Backend]:
    """Open the backend of that name, without asking whether it works.

    Its sandboxes do not end with the block; its connections do.
    """
    if name == "noop":
        yield NoopBackend()
        return
    # An import reads many files; in a thread it does not hold up other calls.
    room = name if name in ("docker", "kubernetes", "e2b") else "bubblewrap"
    await to_thread.run_sync(import_module, f"mcp_sandbox.backends.{room}.backend")
    if name == "docker":
        from mcp_sandbox.backends.docker.backend import DockerBackend

        async with aclosing(DockerBackend(config.docker, server_folder(config))) as docker:
            yield docker
    elif name == "e2b":
        from mcp_sandbox.backends.e2b.backend import E2BBackend
        from mcp_sandbox.storage.objects import KeySource

        key = KeySource("e2b.api_key", config.e2b.api_key, errors.BackendUnavailable)
        yield E2BBackend(config.e2b, server_folder(config), key.value)
    elif name == "kubernetes":
        from mcp_sandbox.backends.kubernetes.backend import open_kubernetes

        if config.fleet.name and not config.kubernetes.key:
            raise errors.ConfigError(
                "kubernetes.key is not set: servers that share chats know each other's sandboxes "
                "by it; write file:PATH or env:NAME, the same at each"
            )
        own = config.kubernetes, server_folder(config), config.workspace.size_limit
        async with open_kubernetes(*own, await _shared_key(config)) as kubernetes:
            yield kubernetes
    else:
        from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend

        yield BubblewrapBackend(server_folder(config), walls=name == "bubblewrap")


async def _shared_key(config: Config) -> str:
    """Return what the servers of a cluster share, if they do."""
    if config.backend != "kubernetes" or not (source := config.kubernetes.key):
        return ""
    from mcp_sandbox.storage.objects import KeySource

    return await KeySource("kubernetes.key", source, errors.BackendUnavailable).value()


@asynccontextmanager
async def choose_backend(config: Config) -> AsyncGenerator[tuple[Backend, str]]:
    """Open the configured backend, or with `auto` the first that isolates here; and say why it.

    Raises BackendUnavailable: `auto` found none that works; the message says what to install.
    """
    if config.backend != "auto":
        async with open_backend(config.backend, config) as backend:
            yield backend, "the configuration names it"
        return
    failures: list[str] = []
    for name in ISOLATING:
        async with open_backend(name, config) as backend:
            try:
                found = await backend.probe()
            except (errors.BackendUnavailable, errors.ImageMissing) as exc:
                failures.append(f"{name} cannot be used: {exc}")
            else:
                yield backend, "; ".join((found, *failures))
                return
    raise errors.BackendUnavailable(
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
    count: "Count | None" = None,
) -> AsyncGenerator["SessionManager"]:
    """Open the manager of all chats of a data root; what it opened ends with the block.

    `folders` says in which folders the clients of the chats work. `for_many` new chats it is
    worth to start sandboxes early, unless the configuration says how many. Without `clock`, the
    time is the machine's. `skills` are those that others use too. `count` gets the record of every
    call that has ended.

    Raises OperatorError: no backend works here, or the data root cannot be used.
    """
    await to_thread.run_sync(import_module, "mcp_sandbox.sessions.manager")
    from mcp_sandbox.audit import open_audit
    from mcp_sandbox.policy import choose_profile, load_rules
    from mcp_sandbox.sessions.approvals import Approvals
    from mcp_sandbox.sessions.chat_records import UseTimes, system_clock
    from mcp_sandbox.sessions.gate import PolicyCheck
    from mcp_sandbox.sessions.manager import SessionManager
    from mcp_sandbox.sessions.previews import open_listener
    from mcp_sandbox.sessions.sandbox.context import SessionContext
    from mcp_sandbox.sessions.settings import SessionSettings
    from mcp_sandbox.workspace.pool import PoolFolder
    from mcp_sandbox.workspace.projects import ClientFolders, Projects

    now, folder = clock or system_clock, config.data_dir / "sandbox" / "audit"
    listens = for_many and config.previews.enabled and config.previews.listen
    rules = await to_thread.run_sync(read_allowed_hosts, config)
    async with (
        choose_backend(config) as (backend, why),
        open_audit(folder, config.audit) as audit,
        _open_records(config, now, for_many=for_many) as (records, leases),
        open_ways_out(config, rules) as ways_out,
        open_listener(ways_out, config.previews) if listens else nullcontext("") as previews_at,
        _open_egress(config, rules, ways_out, ledger := UseTimes(records, now), audit) as egress,
    ):
        logger.info("backend %s: %s", backend.name, why)
        programs = await to_thread.run_sync(find_programs, config)
        files = await to_thread.run_sync(_open_workspaces, backend, config, ledger.records)
        data_dir, users = config.data_dir, files.users
        size = _pool_size(backend, config, for_many)
        space, shown = config.workspace, config.skills.enabled
        pool = PoolFolder(data_dir, users=users, settings=space, skills=shown) if size else None
        context = SessionContext(
            backend,
            files,
            Projects(config.project, files, folders or ClientFolders()),
            ledger,
            audit,
            SessionSettings(
                limits=config.limits.values(),
                network=config.network,
                env=config.env,
                sessions=config.sessions,
                workspace=space,
                calls=config.calls,
                keep_bytes=config.output.kept,
                previews=config.previews.enabled,
                may_move=config.backend != "auto",
                keep_background=for_many,
                mounts=((egress.mount,) if egress else ()) + programs,
                pool_size=size,
                pool_max_age_s=config.pool.max_age,
            ),
            ways_out,
            previews_at=previews_at,
            egress=egress,
            leases=leases,
        )
        await to_thread.run_sync(_add_saving, context, config)
        skills = skills or open_skills(config)
        judge = PolicyCheck(
            await to_thread.run_sync(load_rules, config.policy.rules),
            choose_profile(config.policy.profile, backend.name),
            config.network,
            Approvals(ledger, audit, config.sessions.lifetime),
            audit.mask,
        )
        async with SessionManager(context, skills, judge, count=count, pool=pool) as manager:
            yield manager


@asynccontextmanager
async def open_fleet(config: Config, *, serves: bool = True) -> "AsyncGenerator[FleetStore]":
    """Open what this server shares with others, in Redis. Raises ConfigError.

    A program that `serves` nobody has a name of its own: it takes no chat from the server.
    """
    await to_thread.run_sync(import_module, "mcp_sandbox.storage.leases")
    from mcp_sandbox.storage.redis import FleetStore, Server

    fleet, place = config.fleet, f"{await to_thread.run_sync(boot_id)} {config.data_dir}"
    run = secrets.token_hex(8)
    name = fleet.name if serves else f"{fleet.name}/{run}"
    server = Server(name, fleet.url.rstrip("/"), run, place)
    async with aclosing(FleetStore(fleet.redis, server, fleet.lease, serves=serves)) as store:
        yield store


@asynccontextmanager
async def _open_records(
    config: Config, clock: "Clock", *, for_many: bool
) -> "AsyncGenerator[tuple[ChatRecords, Leases | None]]":
    """Open the records of chats, and the leases of those that servers share."""
    from mcp_sandbox.sessions.chat_records import ChatRecords, SharedRecords

    await to_thread.run_sync(_check_sharing, config, for_many)
    if not config.fleet.name:
        yield ChatRecords(config.data_dir), None
        return
    async with open_fleet(config, serves=for_many) as store:
        from mcp_sandbox.storage.leases import Leases

        try:
            await store.check()
        except errors.StorageUnavailable as exc:
            logger.warning("chats that servers share are refused until it answers: %s", exc)
        if not (config.storage.endpoint or config.fleet.shared_data_dir):
            logger.warning("no files follow a chat to another server: storage is not set")
        wait_s = config.sessions.queue_wait
        leases = Leases(store, lambda: clock().steady_s, config.fleet, wait_s=wait_s)
        yield SharedRecords(config.data_dir, store, leases), leases


def _check_sharing(config: Config, for_many: bool) -> None:
    """Raise ConfigError where servers have one data directory, and not all who use it agree."""
    data_dir, others = config.data_dir, config.data_dir / "servers"
    if not (for_many and config.fleet.shared_data_dir):
        if config.fleet.shared_data_dir or others.exists():
            raise errors.ConfigError(
                f"servers share {data_dir} (fleet.shared_data_dir), and only they agree who has a "
                f"chat: start one with `mcp-sandbox serve`, or delete {others} when none runs"
            )
    elif is_locked(data_dir / "sandbox" / "daemon.lock"):
        raise errors.ConfigError(
            f"a server that shares nothing serves {data_dir}: set fleet.shared_data_dir there too"
        )


def _pool_size(backend: Backend, config: Config, for_many: bool) -> int:
    """Return how many sandboxes wait for new chats."""
    if not isinstance(backend, Pooled):
        return 0
    if config.pool.size == "auto":
        return 1 if for_many and backend.name == "docker" else 0
    return config.pool.size


def _open_workspaces(backend: Backend, config: Config, records: "ChatRecords") -> "Workspaces":
    """Return the files of all chats. Blocks on the disk."""
    from mcp_sandbox.workspace.directory import Workspaces
    from mcp_sandbox.workspace.users import SandboxUsers, open_users

    kind: Callable[..., Workspaces] = Workspaces
    if backend.holds_files:
        from mcp_sandbox.sessions.sandbox.sandbox_files import RecordedWorkspaces

        check_holding(config)
        kind = partial(RecordedWorkspaces, records=records)
    users, shown = SandboxUsers(one=sandbox_user()), config.skills.enabled
    # What chats write into a folder of the user all of them may change there.
    if os.geteuid() == 0 and not (backend.holds_files or config.project.access == "rw"):
        users = open_users(config.data_dir, config.sandbox.uid_range)
    return kind(config.data_dir, users=users, settings=config.workspace, skills=shown)


def check_holding(config: Config) -> None:
    """Raise ConfigError for what sandboxes that hold their files themselves cannot have."""
    if not config.storage.endpoint:
        raise errors.ConfigError(
            f"backend {config.backend}: its sandboxes hold the files of chats, and lose them when "
            "they end: set storage.endpoint, bucket, access_key and secret_key"
        )
    shown = {
        "project.access": config.project.access != "none",
        "workspace.aliases": config.workspace.aliases,
        "workspace.subdirectories": config.workspace.subdirectories,
        "agents.programs": config.agents.programs,
        "network: allowlist": config.network == "allowlist" and config.backend == "e2b",
        "fleet.shared_data_dir": config.fleet.shared_data_dir,
    }
    if refused := [name for name, is_set in shown.items() if is_set]:
        raise errors.ConfigError(
            f"backend {config.backend}: its sandboxes show no folders of this host, so that it "
            f"cannot have {', '.join(refused)}: leave it out, or name another backend"
        )


def _add_saving(context: "SessionContext", config: Config) -> None:
    """Have chats saved, if an object store is configured. Blocks on the disk."""
    if config.storage.endpoint:
        from mcp_sandbox.sessions.saving import Saving
        from mcp_sandbox.storage.backups import Backups

        kept = Backups(config.storage), config.storage, context
        if context.backend.holds_files:
            from mcp_sandbox.sessions.sandbox.sandbox_files import SandboxFiles

            context.saving = context.files = SandboxFiles(*kept)
        else:
            context.saving = Saving(*kept)


def read_allowed_hosts(config: Config) -> "Hosts | None":
    """Return the rules of allowed hosts, where the network is theirs. Blocks on the disk.

    Raises ConfigError: what the configuration says of them cannot be used.
    """
    if config.network != "allowlist":
        return None
    if config.backend == "unsafe-local":
        raise errors.ConfigError(
            "network: allowlist needs a wall, and unsafe-local has none: name another backend, or "
            "set network to open"
        )
    from mcp_sandbox.egress.secrets import Secrets
    from mcp_sandbox.egress.settings import load_trusted, read_egress_rules

    Secrets(config.secrets, b"")
    load_trusted(config.egress.ca_bundle)
    return read_egress_rules(config.egress)


def check(config: Config) -> None:
    """Raise ConfigError now for what opening the manager would raise it for. Blocks on the disk."""
    from mcp_sandbox.policy import load_rules

    if config.backend == "e2b":
        check_holding(config)
    read_allowed_hosts(config)
    find_programs(config)
    load_rules(config.policy.rules)
    if config.storage.endpoint:
        from mcp_sandbox.storage.objects import check_keys

        anyio.run(check_keys, config.storage)


def find_programs(config: Config) -> tuple[Mount, ...]:
    """Return the mount of the programs for agents, if the operator has some. Blocks on the disk.

    Raises ConfigError: a sandbox may not show that folder.
    """
    if not config.agents.programs:
        return ()
    from mcp_sandbox.workspace.projects import check_folder

    try:
        private = (config.data_dir, *own_folders())
        (folder, _) = check_folder(config.agents.programs, private, or_root=True)[-1]
    except errors.InvalidArgument as exc:
        raise errors.ConfigError(f"agents.programs: {exc}") from exc
    return (Mount(folder, PROGRAMS, read_only=True),)


def open_ways_out(
    config: Config, rules: "Hosts | None" = None
) -> "AbstractAsyncContextManager[WaysOut]":
    """Open the ways out of this server's chats."""
    from mcp_sandbox.egress import ways_out
    from mcp_sandbox.egress.settings import load_trusted

    trusted = partial(load_trusted, config.egress.ca_bundle)
    return ways_out.open_ways_out(trusted, rules, config.egress.upstream_proxy)


@asynccontextmanager
async def _open_egress(
    config: Config,
    rules: "Hosts | None",
    ways_out: "WaysOut",
    ledger: "UseTimes",
    audit: "Audit",
) -> "AsyncGenerator[Egress | None]":
    if rules is None:
        if config.secrets:
            logger.warning("secrets do nothing with network: %s", config.network)
        yield None
        return
    await to_thread.run_sync(import_module, "mcp_sandbox.sessions.doors")
    from mcp_sandbox.egress.authority import CertificateAuthority
    from mcp_sandbox.egress.secrets import Keys, Secrets
    from mcp_sandbox.sessions.doors import Egress

    folder = config.data_dir / "sandbox" / "authority"
    authority = await CertificateAuthority.open(
        folder, config.egress.ca_bundle, await _shared_key(config)
    )
    secrets = Secrets(config.secrets, authority.seed)
    audit.mask = secrets.masked
    with logs.masked(secrets.masked):
        keys = Keys(rules, authority.leaf, secrets)
        yield Egress(ways_out, authority.bundle, keys, ledger, audit)


def open_skills(config: Config) -> "Skills":
    """Return the skills that agents can use; nothing is read before the first request."""
    from mcp_sandbox.sessions.skills import Skills
    from mcp_sandbox.skills.library import SkillLibrary

    return Skills(SkillLibrary(config.skills, config.data_dir))


def make_server(
    config: Config,
    skills: "Skills",
    session: "Callable[[ChatId], Awaitable[Session]]",
    count: "Count | None" = None,
) -> "SandboxServer":
    """Return the MCP server as configured, whose connections say which chat is theirs."""
    from mcp_sandbox.server.identity import (
        chat_of_connection,
        make_caller_finder,
        make_session_finder,
    )
    from mcp_sandbox.server.server import build_server
    from mcp_sandbox.server.skills.visible import VisibleSkills

    callers = make_caller_finder(chat_of_connection)
    seen = VisibleSkills(skills, callers, config.skills) if config.skills.enabled else None
    return build_server(
        make_session_finder(chat_of_connection, session),
        network=config.network,
        project=config.project.access,
        isolated=config.backend != "unsafe-local",
        count=count,
        skills=seen,
        calls=config.calls,
    )


@asynccontextmanager
async def on_signals(begin: Callable[[], object]) -> AsyncGenerator[None]:
    """Call `begin` when this process is to end, and let no signal cut short what follows the block.

    Clients send one after the other.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    async def watch() -> None:
        async for _ in signals:
            begin()

    try:
        with anyio.open_signal_receiver(*numbers) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch)
                try:
                    yield
                finally:
                    tasks.cancel_scope.cancel()
    finally:
        # The receiver leaves them as they are for any program: they would kill.
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


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


def on_trial(config: Config, data_dir: Path) -> Config:
    """Return the configuration of a trial: its files lie in that data root and are not saved.

    Where sandboxes hold the files of chats, the store must have a place for them.
    """
    storage = StorageConfig()
    if config.backend in ("kubernetes", "e2b") and config.storage.endpoint:
        storage = config.storage.model_copy(update={"prefix": f"{config.storage.prefix}/trial"})
    alone = {"data_dir": data_dir, "storage": storage, "fleet": FleetConfig()}
    return config.model_copy(update=alone)


@dataclass(eq=False)
class LazyManager:
    """Opens the manager at the first call, so that a client gets its first answer at once.

    `opening` is `open_manager` with its arguments; `opened`: the manager, if it is open already.
    """

    tasks: TaskGroup
    opening: "Callable[[], AbstractAsyncContextManager[SessionManager]]"
    opened: "SessionManager | None" = None
    lock: anyio.Lock = field(default_factory=anyio.Lock)

    def is_in_use(self) -> bool:
        """Return whether a call is under way or something runs in the background."""
        now = self.opened and self.opened.statistics()
        return bool(now and (now.busy or now.queued or now.background))

    async def open(self) -> "SessionManager":
        """Return the manager; after a failure to open it, the next call tries again."""
        async with self.lock:
            if self.opened is None:
                self.opened = await self.tasks.start(self._hold_open)
        return self.opened

    def answer_waiting(self) -> None:
        """Answer the calls that wait for processes; these go on."""
        if self.opened:
            self.opened.answer_waiting()

    async def open_early(self) -> None:
        """Open it before the first request; a failure is reported to each request."""
        try:
            await self.open()
        except errors.OperatorError as exc:
            logger.warning("no sandbox can be made now: %s", exc)

    async def session(self, chat: ChatId) -> "Session":
        return await (await self.open()).session(chat, judged=True)

    async def _hold_open(self, *, task_status: "TaskStatus[SessionManager]") -> None:
        async with self.opening() as manager:
            task_status.started(manager)
            await anyio.sleep_forever()


async def serve_stdio(config: Config, chat: ChatId, project: Path | None = None) -> None:
    """Serve one chat, of a client that works in `project`, until it goes or a signal comes."""
    from mcp_sandbox.server import transports
    from mcp_sandbox.server.identity import bind_connection
    from mcp_sandbox.workspace.projects import ClientFolders

    folders = ClientFolders(own_folders())
    async with anyio.create_task_group() as tasks, on_signals(tasks.cancel_scope.cancel):
        skills = open_skills(config)
        manager = LazyManager(tasks, partial(open_manager, config, folders, skills=skills))
        server = make_server(config, skills, manager.session)
        with bind_connection(chat), folders.bring(chat, project):
            await transports.serve_stdio(server.core)
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def open_session(
    chat: str = "demo", *, user: str = "local", config: Config | None = None, judged: bool = False
) -> AsyncGenerator["Session"]:
    """Open the computer of a chat; its files stay, its sandbox ends with the block.

    Without `config` the configuration file and the environment count, as on the command line.
    `judged`: the policy decides about what is run, as for an agent: where a person has to be asked
    the call raises ConsentNeeded, and is right once it was allowed by `mcp-sandbox approvals`.

    Raises:
        InvalidArgument: the chat or the user is not a usable id.
        OperatorError: no sandbox can be made here; the message says what to do.
    """
    chat_id = ChatId(user, chat)
    if config is None:
        config = (await to_thread.run_sync(load_config)).config
    async with open_manager(config) as manager:
        yield await manager.session(chat_id, judged=judged)
