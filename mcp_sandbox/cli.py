"""The command line: argv -> configuration -> one call. Knows no rooms, only what to start.

stdout carries results only; everything else goes to stderr. Exit codes: 0 done, 1 failed,
2 wrong usage.
"""

import json
import logging
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.table import Table

from mcp_sandbox import app
from mcp_sandbox.config import Loaded, load_config
from mcp_sandbox.errors import ImageMissing, InvalidArgument, SandboxError
from mcp_sandbox.models import ChatId

logger = logging.getLogger("mcp_sandbox")

cli = typer.Typer(
    help="Gives each chat of a coding agent its own Linux computer that remembers its files.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
images = typer.Typer(help="Build, list and check sandbox images.", no_args_is_help=True)
cli.add_typer(images, name="images")

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


def main() -> None:
    """Run the command line; every failure of ours is one readable line on stderr."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        cli()
    except Exception as exc:  # noqa: BLE001  the last door: nothing below may end in a bare traceback
        sys.exit(_fail(exc))


def _fail(exc: BaseException) -> int:
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    if isinstance(exc, SandboxError):
        print(f"error: {exc}", file=sys.stderr)
    else:
        logger.error("this should not have happened; please report it", exc_info=exc)
    return 1


def _load(config: Path | None, data: Path | None = None, backend: str | None = None) -> Loaded:
    return load_config(config, {"data_dir": data and str(data), "backend": backend})


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"mcp-sandbox {version('mcp-sandbox')}")
        raise typer.Exit


@cli.callback()
def options(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Gives each chat of a coding agent its own Linux computer that remembers its files."""


@cli.command()
def stdio(
    user: Annotated[str, typer.Option(metavar="USER", help="Whose chat it is.")] = "local",
    chat: Annotated[str, typer.Option(metavar="CHAT", help="Which chat to serve.")] = "default",
    data: Data = None,
    backend: BackendOption = None,
    config: ConfigFile = None,
) -> None:
    """Serve one chat to an MCP client on stdin and stdout."""
    # A client may interrupt us at any moment; until the server listens there is nothing to undo,
    # and a traceback out of an import helps nobody.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        chat_id = ChatId(user, chat)
    except InvalidArgument as exc:
        raise typer.BadParameter(str(exc)) from exc
    loaded = _load(config, data, backend)
    anyio.run(app.serve_stdio, loaded.config, chat_id)


@cli.command(name="config")
def show_config(
    as_json: AsJson = False,
    data: Data = None,
    backend: BackendOption = None,
    config: ConfigFile = None,
) -> None:
    """Print every setting with its value, where the value came from, and its help."""
    rows = list(_load(config, data, backend).rows())
    if as_json:
        names = ("value", "source", "help")
        print(json.dumps({key: dict(zip(names, rest, strict=True)) for key, *rest in rows}))
        return
    table = Table("setting", "value", "source", "help", box=None)
    for key, value, source, text in rows:
        shown = value if isinstance(value, str) else json.dumps(value)
        table.add_row(key, shown, source, text)
    console().print(table)


def console() -> Console:
    """Return where results are shown: coloured and fitted on a terminal, plain and wide else."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)


@cli.command()
def doctor(
    as_json: AsJson = False,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Check this machine, and run print(6*7) in a sandbox of each usable backend."""
    from mcp_sandbox.doctor import examine, render

    report = anyio.run(examine, _load(config, data).config)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        render(report, console())
    raise typer.Exit(0 if report.usable else 1)


@cli.command()
def demo(
    data: Data = None,
    backend: BackendOption = None,
    config: ConfigFile = None,
) -> None:
    """Start the server, connect an MCP client, and show a chat's computer at work."""
    from mcp_sandbox.demo import show, show_in_temporary_data

    run = show if data else show_in_temporary_data
    anyio.run(run, _load(config, data, backend).config, console(), config)


@images.command()
def build(
    name: Annotated[str, typer.Argument(help="Which image to build.")] = "base",
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the result, not mcp-sandbox/base.", show_default=False
        ),
    ] = None,
    ca_bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Certificates to trust while building.", show_default=False
        ),
    ] = None,
    from_packages: Annotated[
        bool,
        typer.Option("--from-packages", help="Make the Debian base here; needs root, mmdebstrap."),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Build a sandbox image; it must be built again after an update of mcp-sandbox."""
    from mcp_sandbox.backends.docker import images as room

    work = partial(
        room.build,
        name,
        tag=tag,
        ca_bundle=ca_bundle,
        from_packages=from_packages,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        config=_load(config).config.docker,
    )
    print(f"built {anyio.run(work)}")


@images.command(name="list")
def list_images(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """List the sandbox images of the engine."""
    from mcp_sandbox.backends.docker import images as room
    from mcp_sandbox.backends.docker.complaints import build_again

    rows = anyio.run(room.list_images, _load(config).config.docker)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("image", "id", "size", "runner", box=None)
    for row in rows:
        state = "current" if row.current else f"outdated; {build_again(row.name)}"
        table.add_row(row.name, row.id.removeprefix("sha256:")[:12], f"{row.size_mb} MB", state)
    console().print(table)


@images.command()
def check(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """Run the image once, and print the version of each tool that it should have."""
    from mcp_sandbox.backends.docker import images as room
    from mcp_sandbox.backends.docker.complaints import build_again

    settings = _load(config).config.docker
    tools = anyio.run(room.check, settings)
    current = [row.name for row in anyio.run(room.list_images, settings) if row.current]
    if as_json:
        print(json.dumps({tool.name: tool.version for tool in tools}))
    else:
        table = Table("tool", "version", box=None)
        for tool in tools:
            table.add_row(tool.name, tool.version or ("missing" if tool.required else "not there"))
        console().print(table)
    if settings.image not in current:
        raise ImageMissing(
            f"{settings.image} has the runner of another version; {build_again(settings.image)}"
        )
    missing = [tool.name for tool in tools if tool.required and not tool.version]
    if missing:
        raise ImageMissing(
            f"{settings.image} lacks {', '.join(missing)}; {build_again(settings.image)}"
        )


if __name__ == "__main__":
    main()
