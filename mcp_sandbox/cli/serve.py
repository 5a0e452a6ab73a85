"""Commands that work in this process alone: serve, stdio, connect, config, doctor, demo."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import anyio
import typer
from rich.console import Console

from mcp_sandbox import __version__
from mcp_sandbox.cli.options import (
    AsJson,
    BackendOption,
    chat_id,
    console,
    flag,
    given,
    load,
    socket_path,
    table,
    tell,
    tell_differences,
    told,
)
from mcp_sandbox.config import Config, set_value
from mcp_sandbox.config.environment import default_config_file, setting_variables, state_folder
from mcp_sandbox.relay.connect import run
from mcp_sandbox.relay.place import DaemonAddress, note_variables
from mcp_sandbox.telemetry import logs

ProjectAccessOption = Annotated[
    str | None,
    given("--project-dir", "ACCESS", "Show the client's folder at /project: none, ro, rw or copy."),
]
_SOCKET, _USUAL = "The server's socket.", "MCP_SANDBOX_SOCKET, or XDG"
_IDLE_EXIT = "End when for so long no client is connected and nothing runs; 0 and --http = never."
_ANONYMOUS = "Over HTTP on a loopback address, let every program of this machine in."
_SKILLS = "Offer the skills in this folder; may be given several times."
SkillFolders = Annotated[
    list[Path] | None, given("--skills", "DIR", _SKILLS, exists=True, file_okay=False)
]
LogFormatOption = Annotated[
    str | None,
    given("--log-format", "FORMAT", "Log each call and event to stderr, as text or json."),
]

_NAMES = "Or path, example, or set NAME VALUE."
_SET = "write `config set NAME VALUE`; without a line in the file a setting has its default"
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME", help=_NAMES)]


def _flags(
    log_format: str | None, project_dir: str | None, skills: list[Path] | None
) -> dict[str, object]:
    return {
        "serve.log_format": log_format,
        "project.access": project_dir,
        "skills.folders": [str(folder) for folder in skills] if skills else None,
    }


def serve(
    *,
    idle_exit: Annotated[str | None, given("--idle-exit", "TIME", _IDLE_EXIT)] = None,
    project_dir: ProjectAccessOption = None,
    skills: SkillFolders = None,
    http: Annotated[
        str | None, given("--http", "HOST:PORT", "Serve MCP over HTTP too, to users with a token.")
    ] = None,
    allow_anonymous_loopback: Annotated[
        bool, flag(_ANONYMOUS, "--allow-anonymous-loopback")
    ] = False,
    log_format: LogFormatOption = None,
    backend: BackendOption = None,
) -> None:
    """Serve the chats of all clients of this user; `connect` starts it when it is needed."""
    from mcp_sandbox.app import chats, daemon

    own = {"serve.idle_exit": idle_exit, "serve.http": http}
    loaded = load(backend, {**own, **_flags(log_format, project_dir, skills)})
    logs.configure(loaded.config.serve.log_format, state_folder() / "daemon.log")
    note_variables(str(socket_path()), loaded.variables())
    chats.check(loaded.config)
    work = partial(daemon.serve, anonymous_http=allow_anonymous_loopback)
    anyio.run(work, loaded, socket_path())


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
    backend: BackendOption = None,
) -> None:
    """Serve one chat to an MCP client on stdin and stdout."""
    from mcp_sandbox.app.chats import check, serve_stdio

    served = chat_id(user, chat)
    loaded = load(backend, _flags(log_format, project_dir, skills))
    if log_format is not None:
        logs.configure(loaded.config.serve.log_format)
    check(loaded.config)
    anyio.run(serve_stdio, loaded.config, served, (project or Path()).absolute())


def connect(
    user: Annotated[str, given("--user", "USER", "Whose chat it is.", show_default="local")] = "",
    chat: Annotated[
        str, given("--chat", "CHAT", "Which chat; else the agent's session, else the project's.")
    ] = "",
    project: Annotated[
        str, given("--project", "DIR", "The project's folder, which stands for a chat.")
    ] = "",
    socket: Annotated[str, given("--socket", "PATH", _SOCKET, show_default=_USUAL)] = "",
    no_start: Annotated[bool, flag("Fail when no server runs.", "--no-start")] = False,
) -> None:
    """Join an MCP client on stdin and stdout to the sandbox server, starting one if need be."""
    named = {"user": user, "chat": chat, "project": project, "socket": socket}
    raise typer.Exit(run(DaemonAddress(named, __version__, may_start=not no_start)))


def config(names: Names = None, as_json: AsJson = False, backend: BackendOption = None) -> None:
    """Print settings with their values, where these came from, and their help, or set one."""
    file = Path(setting_variables().get("MCP_SANDBOX_CONFIG") or default_config_file())
    match names or []:
        case ["path"]:
            print(file)
            return
        case ["example"]:
            for key, value, _, about in load(backend).rows():
                print(f"# {key}: {json.dumps(value)}  # {about}")
            return
        case ["set", name, text]:
            from mcp_sandbox.app.chats import check

            set_value(file, name, text, check)
            names = [name]
        case ["set", *_]:
            raise typer.BadParameter(_SET)
    rows = list(load(backend).rows(*(names or [])))
    tell_differences()
    columns = ("value", "source", "help")
    found = {key: dict(zip(columns, rest, strict=True)) for key, *rest in rows}
    cells = (
        (key, value if isinstance(value, str) else json.dumps(value), source, text)
        for key, value, source, text in rows
    )
    tell(found, table("setting", *columns, rows=cells), as_json=as_json)


def doctor(
    *,
    attack: Annotated[
        bool, flag("Try to get out of a sandbox, in some 40 ways; fails if one works.", "--attack")
    ] = False,
    as_json: AsJson = False,
    backend: Annotated[
        str | None, given("--backend", "NAME", "With --attack: the backend to attack.")
    ] = None,
) -> None:
    """Check this machine, and run print(6*7) in a sandbox of each usable backend."""
    if attack:
        _attack(load(backend).config, as_json=as_json)
    if backend:
        raise typer.BadParameter("--backend belongs to --attack: without it, each one is tried")
    from mcp_sandbox.doctor.machine import examine, render

    loaded, place = load(), socket_path()
    note_variables(str(place), loaded.variables())
    report = anyio.run(examine, loaded.config, place)
    if as_json:
        print(json.dumps(asdict(report)))
    else:
        render(report, console())
    tell_differences()
    raise typer.Exit(0 if report.usable else 1)


def _attack(config: Config, *, as_json: bool) -> NoReturn:
    from mcp_sandbox.doctor.attack import attack, render

    with Console(stderr=True).status("two sandboxes are started") as status:
        found = anyio.run(attack, config, status.update)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        render(found, console())
    raise typer.Exit(1 if found.count("BROKEN") else 0)


def demo(backend: BackendOption = None) -> None:
    """Start the server, connect an MCP client, and show a chat's computer at work."""
    from mcp_sandbox.app.demo import show

    anyio.run(show, load(backend).config, console(), told.get().get("config"), "data" in told.get())
