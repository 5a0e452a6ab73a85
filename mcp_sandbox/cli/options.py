"""What several commands share: options, the configuration behind them, where results are shown."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcp_sandbox.cli.words import printable
from mcp_sandbox.config import Loaded, load_config
from mcp_sandbox.config.environment import default_config_file, default_socket, setting_variables
from mcp_sandbox.daemon.client import ask
from mcp_sandbox.errors import OperatorError

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration file (YAML).", show_default=False),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Where workspaces are kept.", show_default=False),
]
BackendOption = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="auto, docker, bubblewrap or unsafe-local.",
        show_default=False,
    ),
]
Socket = Annotated[
    Path | None,
    typer.Option("--socket", metavar="PATH", help="Where the daemon listens.", show_default=False),
]
ProjectAccessOption = Annotated[
    str | None,
    typer.Option(
        "--project-dir",
        metavar="ACCESS",
        help="Show the client's folder at /project: none, ro, rw or copy.",
        show_default=False,
    ),
]
SkillFolders = Annotated[
    list[Path] | None,
    typer.Option(
        "--skills",
        metavar="DIR",
        help="Offer the skills in this folder; may be given several times.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]
LogFormatOption = Annotated[
    str | None,
    typer.Option(
        "--log-format",
        metavar="FORMAT",
        help="Log each call and event to stderr, as text or json.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load(
    config: Path | None,
    data: Path | None = None,
    backend: str | None = None,
    *,
    idle_exit: str | None = None,
    log_format: str | None = None,
    project_dir: str | None = None,
    http: str | None = None,
    skills: list[Path] | None = None,
) -> Loaded:
    """Load the configuration that the command line's options lead to."""
    flags = {
        "data_dir": data and str(data),
        "backend": backend,
        "serve.idle_exit": idle_exit,
        "serve.log_format": log_format,
        "project.access": project_dir,
        "serve.http": http,
        "skills.folders": [str(folder) for folder in skills] if skills else None,
    }
    return load_config(config, flags)


def socket_path(given: Path | None, data: Path | None = None) -> Path:
    """Return where the daemon listens, as `connect` also finds it."""
    return (given or default_socket(data)).absolute()


def tell_differences(data: Path | None, config: Path | None) -> None:
    """Say on stderr which settings a running daemon keeps that are others now."""
    variables, file = dict(setting_variables()), config or default_config_file()
    if config or ("MCP_SANDBOX_CONFIG" not in variables and file.exists()):
        variables["MCP_SANDBOX_CONFIG"] = str(file.absolute())
    try:
        found = ask(socket_path(None, data), "status", variables=variables)
    except OperatorError:
        return
    if notice := found.get("notice"):
        print(printable(notice), file=sys.stderr)


def console() -> Console:
    """Return where results are shown: coloured and fitted on a terminal, plain and wide else."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
