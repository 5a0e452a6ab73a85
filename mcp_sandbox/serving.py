"""What `mcp-sandbox serve` is made of: one MCP server, and the daemon that lets clients in to it.

Imports late, as the composition root does, so that the socket is there before the MCP stack is.
"""

import logging
import shlex
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio import to_thread

from mcp_sandbox import __version__
from mcp_sandbox.app import LateManager, open_skills, visible_skills
from mcp_sandbox.config import Config, Loaded, own_folders
from mcp_sandbox.errors import ConfigError, Draining
from mcp_sandbox.models import ChatId

if TYPE_CHECKING:
    from mcp_sandbox.daemon.connection import Connection
    from mcp_sandbox.daemon.control import Command, Control
    from mcp_sandbox.daemon.door import Door
    from mcp_sandbox.daemon.ending import Ending
    from mcp_sandbox.daemon.greeting import ChatGreeting
    from mcp_sandbox.daemon.lock import Claim
    from mcp_sandbox.daemon.tokens import Tokens
    from mcp_sandbox.server.http import Listener
    from mcp_sandbox.server.server import SandboxServer
    from mcp_sandbox.sessions.session import Session
    from mcp_sandbox.sessions.skills import Skills
    from mcp_sandbox.telemetry.metrics import Metrics
    from mcp_sandbox.workspace.projects import ClientFolders

logger = logging.getLogger(__name__)


class _ChatServer:
    """One MCP server for all connections to the daemon, each with its own chat."""

    def __init__(
        self,
        config: Config,
        manager: LateManager,
        folders: "ClientFolders",
        skills: "Skills",
        ending: "Ending",
    ) -> None:
        self._config = config
        self._skills = skills
        self._manager = manager
        self._folders = folders
        self._ending = ending
        self._built = anyio.Event()
        self._server: SandboxServer | None = None
        self.metrics: Metrics | None = None

    async def build(self) -> None:
        """Import and build it beside the event loop: that takes about a second."""
        self._server = await to_thread.run_sync(self._build)
        self._built.set()

    def _build(self) -> "SandboxServer":
        from mcp_sandbox.server.identity import chat_of_connection, http_or, sessions_by
        from mcp_sandbox.server.server import build_server
        from mcp_sandbox.telemetry.metrics import Metrics

        self.metrics = Metrics()
        self.metrics.watch(self._figures)
        chat_of = http_or(chat_of_connection)
        return build_server(
            sessions_by(chat_of, self._session),
            network=self._config.network,
            project=self._config.project.access,
            isolated=self._config.backend != "unsafe-local",
            counter=self.metrics,
            skills=visible_skills(self._config, self._skills, chat_of),
        )

    def calls(self) -> list[dict[str, object]]:
        """The calls by tool since the start, for `status`."""
        return [asdict(each) for each in self.metrics.snapshot()] if self.metrics else []

    def _figures(self) -> dict[str, float]:
        """What the sessions hold now, for `/metrics`."""
        if self._manager.opened is None:
            return {}
        held = self._manager.opened.statistics()
        pool = held.pool
        return {
            "sandboxes/busy": held.busy,
            "sandboxes/idle": held.open - held.busy,
            "sandboxes_max": held.max_open,
            "calls_queued": held.queued,
            **{f"pool/{state}": pool[state] for state in ("busy", "idle") if state in pool},
            **{f"pool_{name}_total": pool[name] for name in ("hits", "misses") if name in pool},
        }

    async def _session(self, chat: ChatId) -> "Session":
        if self._ending.begun.is_set():
            raise Draining("the sandbox server is being stopped or replaced: call again shortly")
        return await self._manager.session(chat)

    async def serve(self, connection: "Connection", greeting: "ChatGreeting") -> None:
        """Serve a client until it goes, or until the daemon ends."""
        await self._built.wait()
        assert self._server  # noqa: S101
        from mcp_sandbox.server.identity import connected_as
        from mcp_sandbox.server.transports import serve_lines

        project = self._folders.brought(greeting.chat, greeting.project)
        with connected_as(greeting.chat), project:
            await serve_lines(self._server, connection, connection, leaving=self._ending.begun)

    async def serve_http(self, web: "_Web") -> None:
        """Serve HTTP clients until the daemon ends, and their calls for the time that is left."""
        await self._built.wait()
        assert self._server  # noqa: S101
        assert self.metrics  # noqa: S101
        from mcp_sandbox.server.http import open_http
        from mcp_sandbox.telemetry.metrics import metrics_text

        async with open_http(
            self._server,
            web.listener,
            self._config.http,
            tokens=web.tokens,
            anonymous=web.anonymous,
            metrics=partial(metrics_text, self.metrics.registry),
        ) as door:
            logger.info("MCP over HTTP at %s", door.url)
            await self._ending.begun.wait()
            await self._ending.in_time(door.drain, self._config.serve.grace)


@dataclass(frozen=True)
class _Web:
    """Where HTTP is served, and to whom."""

    listener: "Listener"
    tokens: "Tokens"
    anonymous: bool


@asynccontextmanager
async def _web(config: Config, *, anonymous: bool) -> AsyncGenerator[_Web | None]:
    """Take the address of HTTP when one is configured, before anything else is begun."""
    if config.serve.http is None:
        if anonymous:
            raise ConfigError("--allow-anonymous-loopback is about --http HOST:PORT: give both")
        yield None
        return
    await to_thread.run_sync(import_module, "mcp_sandbox.server.http")
    from mcp_sandbox.daemon.tokens import Tokens
    from mcp_sandbox.server.http import listen

    tokens = Tokens(config.data_dir)
    if not anonymous and not await tokens.exist():
        logger.warning("nobody has a token yet: `mcp-sandbox token add USER` makes one")
    listener = await listen(config.serve.http, anonymous=anonymous)
    with closing(listener.socket):
        yield _Web(listener, tokens, anonymous)


def _status(
    config: Config,
    claim: "Claim",
    door: "Door",
    manager: LateManager,
    server: _ChatServer,
    web: _Web | None,
) -> dict[str, object]:
    """What `mcp-sandbox status` tells; the connection that asks is not a client."""
    return {
        **asdict(claim.holder),
        "data": str(config.data_dir),
        "backend": manager.opened.backend if manager.opened else config.backend,
        "http": web and web.listener.url,
        "clients": door.connected - 1,
        "sandboxes": asdict(manager.opened.statistics()) if manager.opened else None,
        "calls": server.calls(),
    }


@contextmanager
def _control(ending: "Ending", manager: LateManager, status: "Command") -> Generator["Control"]:
    """What people may ask for; the log is kept for them meanwhile."""
    from mcp_sandbox.daemon.chats import Chats
    from mcp_sandbox.daemon.control import Control
    from mcp_sandbox.daemon.recent_log import recent_log
    from mcp_sandbox.daemon.terminal import Shells

    chats = Chats(manager.open)
    shells = {"shell": Shells(chats.session).open}
    with recent_log() as log:
        commands = {"status": status, **chats.commands}
        yield Control(ending, log, more=commands, conversations=shells)


async def _notice(loaded: Loaded, socket: Path, client: Mapping[str, Any]) -> dict[str, str]:
    """What a client is told whose settings, among other things in `client`, are not ours."""
    try:
        found = await to_thread.run_sync(loaded.differences, client)
    except ConfigError as exc:
        return {"notice": f"the running daemon keeps its settings; yours cannot be used: {exc}"}
    text = f"the running daemon keeps other settings: {'; '.join(found)}; the next one has yours: "
    end = f"`mcp-sandbox shutdown --socket {shlex.quote(str(socket))}`"
    return {"notice": text + end} if found else {}


async def serve(loaded: Loaded, socket: Path, *, anonymous_http: bool = False) -> None:
    """Be the daemon of the configured data root, listening on `socket`, until it is to end.

    `anonymous_http`: HTTP clients without a token are served, if they come over loopback.

    Raises:
        AlreadyServed: another daemon serves the data root or the socket.
        StorageUnavailable: the socket cannot be made safely.
        ConfigError: HTTP cannot be served as it is configured.
    """
    from mcp_sandbox.daemon.daemon import Daemon, Patience
    from mcp_sandbox.daemon.door import Door
    from mcp_sandbox.daemon.ending import Ending, begun_by_signals
    from mcp_sandbox.daemon.listener import listening
    from mcp_sandbox.daemon.lock import claimed
    from mcp_sandbox.workspace.projects import ClientFolders

    ending, config = Ending(), loaded.config
    async with (
        begun_by_signals(ending),
        claimed(config.data_dir, socket, __version__) as claim,
        _web(config, anonymous=anonymous_http) as web,
        listening(socket) as listener,
        anyio.create_task_group() as tasks,
    ):
        folders = ClientFolders((*own_folders(), socket.parent))
        skills = await to_thread.run_sync(open_skills, config)
        manager = LateManager(config, tasks, folders, for_many=True, skills=skills)
        server = _ChatServer(config, manager, folders, skills, ending)
        tasks.start_soon(server.build)
        tasks.start_soon(manager.open_early)
        door = Door(listener, most=config.serve.max_connections)
        notice = partial(_notice, loaded, socket)
        patience = Patience(idle_exit_s=config.serve.idle_exit, grace_s=config.serve.grace)
        daemon = Daemon(
            claim,
            door,
            ending,
            patience,
            in_use=lambda: web is not None or manager.is_in_use(),
            notice=notice,
        )

        async def status(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            told = _status(config, claim, door, manager, server, web)
            return told | await notice(arguments.get("variables", {}))

        with _control(ending, manager, status) as control:
            async with anyio.create_task_group() as doors:
                if web is not None:
                    doors.start_soon(server.serve_http, web)
                await daemon.run(server.serve, control)
            if manager.opened:
                # What still ran has had its time.
                await manager.opened.drain(0, hand_over=ending.reason == "hand-over")
        tasks.cancel_scope.cancel()
