"""`secrets`: which there are, where they may go, and whether their sources answer."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import typer

from mcp_sandbox.cli.options import AsJson, ConfigFile, load, table, tell

if TYPE_CHECKING:
    from mcp_sandbox.egress.secrets import Secrets, SecretState

group = typer.Typer(
    no_args_is_help=True, help="See the secrets that hosts get, and sandboxes do not."
)


@group.command(name="list")
def list_(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """List the secrets: the hosts that get them, in which header, for whose chats."""
    _tell(_secrets(config).states(), as_json=as_json)


@group.command()
def check(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """Ask each source as a running server would, and tell how long the value is, never the value.

    Ends with 1 if one of them does not give a value that can be used.
    """
    states = anyio.run(_secrets(config).check)
    _tell(states, as_json=as_json)
    raise typer.Exit(1 if any(state.problem for state in states) else 0)


def _secrets(config: Path | None) -> "Secrets":
    from mcp_sandbox.egress.secrets import Secrets

    return Secrets(load(config).config.secrets, seed=b"")


def _tell(states: "Sequence[SecretState]", *, as_json: bool) -> None:
    rows = (
        (state.name, ", ".join(state.hosts), state.header, ", ".join(state.users), said)
        for state in states
        for said in [state.problem or (f"{state.length} bytes" if state.length else "not asked")]
    )
    shown = table("secret", "hosts", "header", "users", "value", rows=rows)
    found = [asdict(state) for state in states]
    tell(found, shown if states else "there are no secrets in the configuration", as_json=as_json)
