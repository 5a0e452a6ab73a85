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
from mcp_sandbox.cli.options import printable
from mcp_sandbox.errors import NoDaemon, SandboxError

logger = logging.getLogger("mcp_sandbox")

cli = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    serve.serve,
    serve.connect,
    control.status,
    control.ls,
    control.stop,
    control.pause,
    control.resume,
    control.rm,
    control.gc,
    shell.shell,
    cp.cp,
    control.logs,
    control.shutdown,
    serve.stdio,
):
    cli.command()(_command)
cli.command(name="config")(serve.show_config)
cli.command()(serve.doctor)
cli.command()(serve.demo)
cli.add_typer(setup.init, name="init")
cli.add_typer(setup.images, name="images")
cli.add_typer(skills.group, name="skills")
cli.add_typer(agent.group, name="agent")
cli.add_typer(approvals.group, name="approvals")
cli.add_typer(control.backup, name="backup")
cli.add_typer(control.project, name="project")
cli.add_typer(control.trash, name="trash")
cli.add_typer(egress.egress_commands, name="egress")
cli.add_typer(egress.secret_commands, name="secrets")
cli.add_typer(policy.group, name="policy")
cli.add_typer(audit.group, name="audit")
cli.add_typer(setup.tokens, name="token")
cli.add_typer(setup.cluster, name="kubernetes")


def main() -> None:
    """Run the command line; every error of this package is one readable line on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        cli()
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
