"""What several commands share: options, the configuration behind them, where results are shown."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcp_sandbox.config import Loaded, load_config

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
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def load(config: Path | None, data: Path | None = None, backend: str | None = None) -> Loaded:
    """Load the configuration that the command line's options lead to."""
    return load_config(config, {"data_dir": data and str(data), "backend": backend})


def console() -> Console:
    """Return where results are shown: coloured and fitted on a terminal, plain and wide else."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
