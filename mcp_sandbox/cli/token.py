"""`token …`: who may come over HTTP."""

import json
import sys
import time
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.table import Table

from mcp_sandbox.cli.options import AsJson, ConfigFile, Data, console, load
from mcp_sandbox.config.units import parse_duration

group = typer.Typer(help="Make, list and revoke the tokens of HTTP users.", no_args_is_help=True)


def _lifetime(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if not isinstance(seconds, float) or not 0 < seconds < 1e11:
        raise typer.BadParameter("give a time from now on, such as 12h or 30d")
    return seconds


@group.command()
def add(
    user: Annotated[str, typer.Argument(help="Whose chats the token opens.")],
    expires: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=_lifetime,
            help="How long it is valid, such as 12h or 30d; without it, until it is revoked.",
            show_default=False,
        ),
    ] = None,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Make a token for a user and print it: this once, as only its hash is kept."""
    from mcp_sandbox.daemon.tokens import TokenFile

    token, secret = TokenFile(load(config, data).config.data_dir).add(user, expires)
    until = "it is revoked" if token.expires is None else _when(token.expires)
    print(
        f"token {token.id} of {user}, valid until {until}; it is not shown again:", file=sys.stderr
    )
    print(secret)


@group.command(name="list")
def list_tokens(as_json: AsJson = False, data: Data = None, config: ConfigFile = None) -> None:
    """List the tokens: whose they are and how long they are valid, never the tokens."""
    from mcp_sandbox.daemon.tokens import TokenFile

    now = time.time()
    rows = [
        {
            "id": token.id,
            "user": token.user,
            "created": _when(token.created),
            "expires": None if token.expires is None else _when(token.expires),
            "expired": token.expired(now),
        }
        for token in TokenFile(load(config, data).config.data_dir).read()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table("token", "user", "created", "expires", box=None)
    for row in rows:
        note = " (expired)" if row["expired"] else ""
        table.add_row(
            str(row["id"]), str(row["user"]), str(row["created"]), f"{row['expires'] or '-'}{note}"
        )
    console().print(table)


@group.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Its id, or how it begins.")],
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Revoke a token: it is refused from now on, by a running server too."""
    from mcp_sandbox.daemon.tokens import TokenFile

    revoked = TokenFile(load(config, data).config.data_dir).revoke(token)
    print(f"revoked {revoked.id} of {revoked.user}")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
