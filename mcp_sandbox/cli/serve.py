"""`serve`: be the daemon."""

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
            help="End without client and open sandbox after this; 0 = never.",
            show_default=False,
        ),
    ] = None,
    project_dir: ProjectAccessOption = None,
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
    )
    logs.configure(loaded.config.serve.log_format)
    anyio.run(serving.serve, loaded.config, socket_path(socket))
