"""`images …`: the sandbox images of the engine."""

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.table import Table

from mcp_sandbox.cli.options import AsJson, ConfigFile, console, load
from mcp_sandbox.errors import ImageMissing

group = typer.Typer(help="Build, list and check sandbox images.", no_args_is_help=True)


@group.command()
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
        config=load(config).config.docker,
    )
    print(f"built {anyio.run(work)}")


@group.command(name="list")
def list_images(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """List the sandbox images of the engine."""
    from mcp_sandbox.backends.docker import images as room
    from mcp_sandbox.backends.docker.complaints import build_again

    rows = anyio.run(room.list_images, load(config).config.docker)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("image", "id", "size", "runner", box=None)
    for row in rows:
        state = "current" if row.current else f"outdated; {build_again(row.name)}"
        table.add_row(row.name, row.id.removeprefix("sha256:")[:12], f"{row.size_mb} MB", state)
    console().print(table)


@group.command()
def recipe(
    layers: Annotated[
        list[str], typer.Argument(help="What to add: documents, data, browser, web or build.")
    ],
) -> None:
    """Print a Dockerfile that adds packages to the sandbox image, for skills that need them.

    Build it with `docker build -t NAME - <Dockerfile` and set docker.image to NAME.
    """
    from mcp_sandbox.skills.layers import recipe as dockerfile

    print(dockerfile(layers), end="")


@group.command()
def check(as_json: AsJson = False, config: ConfigFile = None) -> None:
    """Run the image once, and print the version of each tool that it should have."""
    from mcp_sandbox.backends.docker import images as room
    from mcp_sandbox.backends.docker.complaints import build_again

    settings = load(config).config.docker
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
