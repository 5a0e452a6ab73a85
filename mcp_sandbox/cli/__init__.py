"""The command line: argv -> configuration -> one call. Knows no rooms, only what to start.

    serve, control           servers, and what is asked of the daemon about itself, chats, backups
    setup                    `init`, `images`, `token`, `kubernetes`
    shell, cp                a terminal in a sandbox, files in and out
    agent, approvals, audit, egress, policy, skills/    the groups of these names
    options                  what several commands share

stdout carries results only; everything else goes to stderr. Exit codes: 0 done, 1 failed,
2 wrong usage, 3 no daemon runs.
"""

import logging
import signal
import sys
from typing import Annotated

import typer

from mcp_sandbox import __version__
from mcp_sandbox.cli import (
    agent,
    approvals,
    audit,
    control,
    cp,
    egress,
    policy,
    serve,
    setup,
    shell,
    skills,
)
from mcp_sandbox.cli.options import LEADS, Group, printable
from mcp_sandbox.errors import NoDaemon, SandboxError

logger = logging.getLogger("mcp_sandbox")

cli = Group(
    "Give each chat of a coding agent its own Linux computer that remembers its files.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _leads, *_commands in (
    ("Chats", LEADS, control.ls, shell.shell, cp.cp, control.stop, control.pause, control.resume),
    ("Chats", LEADS, control.rm, control.gc),
    ("The server", LEADS, control.status, control.logs, control.shutdown, serve.serve),
    ("The server", ("data", "config"), serve.connect, serve.stdio, serve.config, serve.doctor),
    ("The server", ("data", "config"), serve.demo),
):
    for _command in _commands:
        _settings = shell.SETTINGS if _command is shell.shell else None
        cli.command(leads=_leads, rich_help_panel=_panel, context_settings=_settings)(_command)
for _panel, _groups in (
    ("Chats", {"agent": agent.group, "backup": control.backup, "project": control.project}),
    ("Chats", {"trash": control.trash}),
    ("What they may do", {"approvals": approvals.group, "egress": egress.egress_commands}),
    ("What they may do", {"secrets": egress.secret_commands, "policy": policy.group}),
    ("What they may do", {"skills": skills.group, "audit": audit.group}),
    ("Set up", {"init": setup.init, "images": setup.images, "token": setup.tokens}),
    ("Set up", {"kubernetes": setup.cluster}),
):
    for _name, _group in _groups.items():
        cli.add_typer(_group, name=_name, rich_help_panel=_panel)


def main() -> None:
    """Run the command line; every error of this package is one readable line on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        cli(prog_name="mcp-sandbox")
    except Exception as exc:  # The last door: nothing below may end in a bare traceback.
        cause: BaseException = exc
        while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
            cause = cause.exceptions[0]
        if isinstance(cause, SandboxError):
            print(f"error: {printable(str(cause))}", file=sys.stderr)
        else:
            logger.exception("this should not have happened; please report it", exc_info=cause)
        sys.exit(3 if isinstance(cause, NoDaemon) else 1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"mcp-sandbox {__version__}")
        raise typer.Exit


@cli.callback()
def options(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Give each chat of a coding agent its own Linux computer that remembers its files."""
    servers = ("stdio", "serve")  # They have their own way to leave, once there is something to.
    if context.invoked_subcommand not in servers:
        signal.signal(signal.SIGINT, signal.default_int_handler)
