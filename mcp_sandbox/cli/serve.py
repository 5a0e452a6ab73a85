"""`serve`: be the daemon."""

from functools import partial
from typing import Annotated

import anyio
import typer

from mcp_sandbox import serving
from mcp_sandbox.cli.options import (
    BackendOption,
    ConfigFile,
    Data,
    LogFormatOption,
    ProjectAccessOption,
    SkillFolders,
    Socket,
    load,
    socket_path,
)
from mcp_sandbox.telemetry import logs


def serve(
    *,
    socket: Socket = None,
    idle_exit: Annotated[
        str | None,
        typer.Option(
            "--idle-exit",
            metavar="TIME",
            help="End when for so long nobody is connected and nothing runs; 0 and --http = never.",
            show_default=False,
        ),
    ] = None,
    project_dir: ProjectAccessOption = None,
    skills: SkillFolders = None,
    http: Annotated[
        str | None,
        typer.Option(
            "--http",
            metavar="HOST:PORT",
            help="Serve MCP over HTTP too, to users with a token.",
            show_default=False,
        ),
    ] = None,
    allow_anonymous_loopback: Annotated[
        bool,
        typer.Option(
            "--allow-anonymous-loopback",
            help="Over HTTP on a loopback address, let every program of this machine in.",
        ),
    ] = False,
    log_format: LogFormatOption = None,
    data: Data = None,
    backend: BackendOption = None,
    config: ConfigFile = None,
) -> None:
    """Serve the chats of all clients of this user; `connect` starts it when it is needed."""
    loaded = load(
        config,
        data,
        backend,
        idle_exit=idle_exit,
        log_format=log_format,
        project_dir=project_dir,
        http=http,
        skills=skills,
    )
    logs.configure(loaded.config.serve.log_format)
    work = partial(serving.serve, anonymous_http=allow_anonymous_loopback)
    anyio.run(work, loaded, socket_path(socket, data))
