"""What `mcp-sandbox serve` is made of: one MCP server, and the daemon that lets clients in to it.

Imports late, as the composition root does, so that the socket is there before the MCP stack is.
"""

import logging
import resource
import shlex
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
from anyio import to_thread

from mcp_sandbox import __version__
from mcp_sandbox.app.chats import (
    LazyManager,
    make_server,
    on_signals,
    open_manager,
    open_skills,
    server_folder,
)
from mcp_sandbox.config import Config, LoadedConfig, own_folders
from mcp_sandbox.errors import ConfigError, Draining
from mcp_sandbox.models import ChatId

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from mcp_sandbox.agents.run import Agent
    from mcp_sandbox.config import HttpConfig
    from mcp_sandbox.daemon.acceptor import ChatHello, TimedStream
    from mcp_sandbox.daemon.daemon import Shutdown
    from mcp_sandbox.server.server import SandboxServer
    from mcp_sandbox.sessions.session import Session
    from mcp_sandbox.sessions.skills import Skills
    from mcp_sandbox.storage.leases import Leases
    from mcp_sandbox.telemetry.metrics import Metrics
    from mcp_sandbox.web.passing_on import Passing
    from mcp_sandbox.web.tokens import Tokens
    from mcp_sandbox.web.uvicorn_server import TcpListener
    from mcp_sandbox.workspace.projects import ClientFolders

    _Web = tuple[TcpListener, Tokens]
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _ChatServer:
    """One MCP server for all connections to the daemon, each with its own chat."""

    config: Config
    manager: LazyManager
    folders: "ClientFolders"
    skills: "Skills"
    metrics: "Metrics"
    ending: "Shutdown"
    building: anyio.Lock = field(default_factory=anyio.Lock)
    server: "SandboxServer | None" = None

    async def built(self) -> "SandboxServer":
        """Import and build it beside the event loop, once: that takes about a second."""
        async with self.building:
            if self.server is None:
                given = self.config, self.skills, self._session, self.metrics.count
                self.server = await to_thread.run_sync(make_server, *given)
                self.metrics.watch_loop()
        return self.server

    def figures(self) -> dict[str, float]:
        """Return what the sessions hold now, for `/metrics`."""
        if self.manager.opened is None:
            return {}
        held = self.manager.opened.statistics()
        pool = held.pool
        return {
            "sandboxes/busy": held.busy,
            "sandboxes/idle": held.open - held.busy,
            "sandboxes_max": held.max_open,
            "calls_queued": held.queued,
            **{f"pool/{state}": pool[state] for state in ("busy", "idle") if state in pool},
            **{f"pool_{name}_total": pool[name] for name in ("hits", "misses") if name in pool},
            **{f"connections_total/{verdict}": n for verdict, n in held.connections.items()},
            **({} if held.unsaved is None else {"chats_unsaved": held.unsaved}),
            **({} if held.leases is None else {"leases": held.leases}),
        }

    async def _session(self, chat: ChatId) -> "Session":
        if self.ending.begun.is_set():
            raise Draining("the sandbox server is being stopped or replaced: call again shortly")
        return await self.manager.session(chat)

    async def serve(self, connection: "TimedStream", greeting: "ChatHello") -> None:
        """Serve a client until it goes, or until the daemon ends."""
        server = await self.built()
        from mcp_sandbox.server.identity import bind_connection
        from mcp_sandbox.server.transports import serve_lines

        with bind_connection(greeting.chat), self.folders.bring(greeting.chat, greeting.project):
            await serve_lines(server.core, connection, connection, leaving=self.ending.begun)

    @asynccontextmanager
    async def agent(self, **given: Any) -> "AsyncGenerator[Agent]":  # noqa: ANN401 - as open_agent
        """Open an agent of one of the chats."""
        await to_thread.run_sync(import_module, "mcp_sandbox.app.agents")
        from mcp_sandbox.app.agents import open_agent

        opened = self.manager.opened
        ways_out = opened and opened.ways_out
        given |= {"config": self.config, "manager": self.manager.open, "ways_out": ways_out}
        async with open_agent(**given) as agent:
            yield agent

    async def serve_http(self, listener: "TcpListener", tokens: "Tokens", anonymous: bool) -> None:
        """Serve HTTP clients until the daemon ends, and their calls for the time that is left."""
        server = await self.built()
        from mcp_sandbox.web.uvicorn_server import open_http

        async with (
            self._passing() as passing,
            self._control(passing) as control,
            open_http(
                server,
                listener,
                _with_own_name(self.config),
                tokens=tokens,
                anonymous=anonymous,
                metrics=self.metrics.text,
                control=control,
                passing=passing,
            ) as door,
        ):
            logger.info("MCP over HTTP at %s", door.url)
            await self.ending.begun.wait()
            await self.ending.in_time(door.drain, self.config.serve.grace)

    @asynccontextmanager
    async def _passing(self) -> "AsyncGenerator[Passing | None]":
        """Open the hop to other servers, if chats are shared with some."""
        if not self.config.fleet.name:
            yield None
            return
        await to_thread.run_sync(import_module, "mcp_sandbox.web.passing_on")
        from mcp_sandbox.web.passing_on import open_passing

        async def leases() -> "Leases":
            found = (await self.manager.open()).leases
            assert found  # noqa: S101 - the configuration names the server
            return found

        async with open_passing(leases) as passing:
            yield passing

    @asynccontextmanager
    async def _control(self, passing: "Passing | None") -> "AsyncGenerator[ASGIApp | None]":
        """Open the API of the control plane, if it is to be served."""
        if not self.config.control.enabled:
            yield None
            return
        try:
            await to_thread.run_sync(import_module, "mcp_sandbox.app.control")
        except ModuleNotFoundError as exc:
            raise ConfigError(
                "control.enabled needs one more package: run `pip install 'mcp-sandbox[control]'`"
            ) from exc
        from mcp_sandbox.app.control import open_control

        given = self.config, self.manager.open, self.agent, passing
        async with open_control(*given) as control:
            yield control


def _with_own_name(config: Config) -> "HttpConfig":
    """Let in what other servers pass on, under the name that they know."""
    own, http = urlsplit(config.fleet.url).netloc, config.http
    names = (*http.allowed_hosts, *([own] if own else ()))
    return http.model_copy(update={"allowed_hosts": names})


@asynccontextmanager
async def _web(config: Config, *, anonymous: bool) -> "AsyncGenerator[_Web | None]":
    """Take the address of HTTP when one is configured, before anything else is begun."""
    if config.serve.http is None:
        if anonymous:
            raise ConfigError("--allow-anonymous-loopback is about --http HOST:PORT: give both")
        if config.control.enabled:
            logger.warning("control.enabled does nothing without an address: set serve.http")
        yield None
        return
    await to_thread.run_sync(import_module, "mcp_sandbox.web.uvicorn_server")
    from mcp_sandbox.web.tokens import Tokens
    from mcp_sandbox.web.uvicorn_server import listen

    tokens = Tokens(config.data_dir)
    if not anonymous and not await tokens.exist():
        logger.warning("no user has a token yet: `mcp-sandbox token add USER` makes one")
    listener = await listen(config.serve.http, anonymous=anonymous)
    with closing(listener.socket):
        yield listener, tokens


async def _notice(loaded: LoadedConfig, socket: Path, client: Mapping[str, Any]) -> dict[str, str]:
    """Return the note for a client whose settings, part of `client`, differ from ours."""
    try:
        found = await to_thread.run_sync(loaded.differences, client)
    except ConfigError as exc:
        return {"notice": f"the running daemon keeps its settings; yours cannot be used: {exc}"}
    text = f"the running daemon keeps other settings: {'; '.join(found)}; the next one has yours: "
    end = f"`mcp-sandbox shutdown --socket {shlex.quote(str(socket))}`"
    return {"notice": text + end} if found else {}


def _opened(config: Config) -> "tuple[Skills, Metrics]":
    from mcp_sandbox.telemetry.metrics import Metrics

    return open_skills(config), Metrics()


def _most_connections(config: Config) -> int:
    """Allow this process as many open files as it may have; return how many may be of clients."""
    from mcp_sandbox.egress.ways_out import most_connections

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return min(config.serve.max_connections, most_connections())


async def serve(loaded: LoadedConfig, socket: Path, *, anonymous_http: bool = False) -> None:
    """Be the daemon of the configured data root, listening on `socket`, until it is to end.

    `anonymous_http`: HTTP clients without a token are served, if they come over loopback.

    Raises:
        AlreadyServed: another daemon serves the data root or the socket.
        StorageUnavailable: the socket cannot be made safely.
        ConfigError: HTTP cannot be served as it is configured.
    """
    from mcp_sandbox.daemon.acceptor import Acceptor
    from mcp_sandbox.daemon.daemon import ControlCommands, Daemon, Shutdown, recent_log
    from mcp_sandbox.daemon.lock import claim_daemon, listen_at
    from mcp_sandbox.workspace.projects import ClientFolders

    ending, config = Shutdown(), loaded.config
    async with (
        on_signals(partial(ending.begin, "signal")),
        claim_daemon(server_folder(config), socket, __version__) as claim,
        _web(config, anonymous=anonymous_http) as web,
        listen_at(socket) as listener,
        anyio.create_task_group() as tasks,
    ):
        folders = ClientFolders((*own_folders(), socket.parent))
        skills, metrics = await to_thread.run_sync(_opened, config)
        manager = LazyManager(
            tasks,
            partial(
                open_manager, config, folders, for_many=True, skills=skills, count=metrics.count
            ),
        )
        ending.let_go = manager.answer_waiting
        server = _ChatServer(config, manager, folders, skills, metrics, ending)
        metrics.watch(server.figures)
        tasks.start_soon(server.built)
        tasks.start_soon(manager.open_early)
        door = Acceptor(listener, most=_most_connections(config))
        notice = partial(_notice, loaded, socket)

        async def status(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            opened = manager.opened
            return {
                **asdict(claim.holder),
                "data": str(config.data_dir),
                "backend": opened.backend if opened else config.backend,
                "http": web and web[0].url,
                # The connection that asks is not a client.
                "clients": door.connected - 1,
                "sandboxes": asdict(opened.statistics()) if opened else None,
                "loop_blocked": metrics.loop_blocked,
                "calls": [asdict(each) for each in metrics.snapshot()],
                **await notice(arguments.get("variables", {})),
            }

        with recent_log() as log:
            from mcp_sandbox.daemon import chats

            people = chats.ChatControl(manager.open)
            control = ControlCommands(
                ending,
                log,
                more={"status": status, **people.commands},
                conversations={
                    "shell": people.shell,
                    "copy": partial(chats.copy, people),
                    "agent": partial(chats.run_agent, server.agent),
                },
            )
            async with anyio.create_task_group() as doors:
                if web is not None:
                    doors.start_soon(server.serve_http, *web, anonymous_http)
                await Daemon(
                    claim,
                    door,
                    ending,
                    config.serve,
                    lambda: web is not None or manager.is_in_use(),
                    notice,
                ).run(server.serve, control)
            if manager.opened:
                # What still ran has had its time.
                await manager.opened.drain(0, hand_over=ending.reason == "hand-over")
        tasks.cancel_scope.cancel()
