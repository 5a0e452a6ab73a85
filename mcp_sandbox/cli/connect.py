"""Explains `mcp-sandbox connect`, which the program's entry runs without loading this."""

from typing import Annotated

import typer

from mcp_sandbox import __version__
from mcp_sandbox.connect.command import Options, run


def connect(
    user: Annotated[
        str, typer.Option(metavar="USER", help="Whose chat it is.", show_default="local")
    ] = "",
    chat: Annotated[
        str,
        typer.Option(
            metavar="CHAT", help="Which chat; else the agent's session, else the project's."
        ),
    ] = "",
    project: Annotated[
        str, typer.Option(metavar="DIR", help="The project's folder, which stands for a chat.")
    ] = "",
    socket: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="The server's socket.", show_default="MCP_SANDBOX_SOCKET, or XDG"
        ),
    ] = "",
    no_start: Annotated[
        bool, typer.Option("--no-start", help="Fail when no server runs; else one is started.")
    ] = False,
) -> None:
    """Join an MCP client on stdin and stdout to the sandbox server, starting one if need be."""
    given = {"user": user, "chat": chat, "project": project, "socket": socket}
    raise typer.Exit(run(Options(given, start=not no_start), __version__))
