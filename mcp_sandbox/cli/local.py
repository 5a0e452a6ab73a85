"""Commands that work in this process alone: stdio, config, doctor, demo."""

import json
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.table import Table

from mcp_sandbox import app
from mcp_sandbox.cli.options import (
    AsJson,
    BackendOption,
    ConfigFile,
    Data,
    LogFormatOption,
    ProjectAccessOption,
    SkillFolders,
    console,
    load,
    tell_differences,
)
from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId
from mcp_sandbox.telemetry import logs


def stdio(
    *,
    user: Annotated[str, typer.Option(metavar="USER", help="Whose chat it is.")] = "local",
    chat: Annotated[str, typer.Option(metavar="CHAT", help="Which chat to serve.")] = "default",
    project: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder for --project-dir.", show_default="here"),
    ] = None,
    project_dir: ProjectAccessOption = None,
    skills: SkillFolders = None,
    log_format: LogFormatOption = None,
    data: Data = None,
    backend: BackendOption = None,
    config: ConfigFile = None,
) -> None:
    """Serve one chat to an MCP client on stdin and stdout."""
    try:
        chat_id = ChatId(user, chat)
    except InvalidArgument as exc:
        raise typer.BadParameter(str(exc)) from exc
    loaded = load(
        config, data, backend, log_format=log_format, project_dir=project_dir, skills=skills
    )
    if log_format is not None:
        logs.configure(loaded.config.serve.log_format)
    anyio.run(app.serve_stdio, loaded.config, chat_id, (project or Path()).absolute())


def show_config(
    as_json: AsJson = False,
    data: Data = None,
    backend: BackendOption = None,
    config: ConfigFile = None,
) -> None:
    """Print every setting with its value, where the value came from, and its help."""
    rows = list(load(config, data, backend).rows())
    tell_differences(data, config)
    if as_json:
        names = ("value", "source", "help")
        print(json.dumps({key: dict(zip(names, rest, strict=True)) for key, *rest in rows}))
        return
    table = Table("setting", "value", "source", "help", box=None)
    for key, value, source, text in rows:
        shown = value if isinstance(value, str) else json.dumps(value)
        table.add_row(key, shown, source, text)
    console().print(table)


def doctor(
    as_json: AsJson = False,
    data: Data = None,
    config: ConfigFile = None,
) -> None:
    """Check this machine, and run print(6*7) in a sandbox of each usable backend."""
    from mcp_sandbox.doctor import examine, render

    report = anyio.run(examine, load(config, data).config)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        render(report, console())
    tell_differences(data, config)
    raise typer.Exit(0 if report.usable else 1)


def demo(
    data: Data = None,
    backend: BackendOption = None,
    config: ConfigFile = None,
) -> None:
    """Start the server, connect an MCP client, and show a chat's computer at work."""
    from mcp_sandbox.demo import show, show_in_temporary_data

    run = show if data else show_in_temporary_data
    anyio.run(run, load(config, data, backend).config, console(), config)
