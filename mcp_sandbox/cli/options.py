"""What several commands share: groups, options, the configuration behind them, how results look."""

import difflib
import inspect
import json
import os
import pwd
import re
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperGroup

from mcp_sandbox import __version__
from mcp_sandbox.config import Config, LoadedConfig, load_config
from mcp_sandbox.config.environment import (
    default_config_file,
    default_socket,
    having_variables,
    setting_variables,
)
from mcp_sandbox.config.values import DAY_S, is_bare, parse_duration
from mcp_sandbox.daemon.control_client import ask_daemon, shut_down
from mcp_sandbox.errors import InvalidArgument, NoDaemon, OperatorError
from mcp_sandbox.models import ChatId
from mcp_sandbox.relay.connect import reach_daemon
from mcp_sandbox.relay.place import DaemonAddress, DaemonUnavailable

_DIFF = {"+": "green", "-": "red", "@": "cyan"}
_WIDEST = 10_000
_LINE_SHOWN = 300


def given(name: str, metavar: str, about: str, **more: Any) -> Any:  # noqa: ANN401 - as Option
    """Return an option without a default that help could show."""
    return typer.Option(name, metavar=metavar, help=about, **{"show_default": False, **more})


def flag(about: str, *names: str) -> Any:  # noqa: ANN401 - as Option
    """Return an option without a value."""
    return typer.Option(*names, help=about)


_BACKENDS = ", ".join(get_args(Config.model_fields["backend"].annotation))
BackendOption = Annotated[str | None, given("--backend", "NAME", f"One of {_BACKENDS}.")]
AsJson = Annotated[bool, flag("Print JSON.", "--json")]
Yes = Annotated[bool, flag("Do not ask.", "--yes", "-y")]
# The options by which every command is told which server is meant, as variables tell it.
LEADS = {
    "socket": ("MCP_SANDBOX_SOCKET", "PATH", "Where the daemon listens."),
    "data": ("MCP_SANDBOX_DATA_DIR", "DIR", "Where workspaces are kept."),
    "config": ("MCP_SANDBOX_CONFIG", "FILE", "Configuration file (YAML)."),
}
told: ContextVar[Mapping[str, Path]] = ContextVar("told")
# Words that people know from other programs, and what is written here.
_MEANT = {"help": "--help", "version": "--version", "exec": "shell", "run": "shell", "ps": "ls"}
_MEANT |= {"delete": "rm", "remove": "rm", "kill": "stop", "start": "serve", "ssh": "shell"}
# Commands and options of the version before, and what to use instead, for one version.
_GONE = {
    "images recipe": "it printed a Dockerfile; docs/sandboxes.md (Your own image) has one",
    "skills fix": "it mended front matter; `mcp-sandbox skills validate` says for each line how",
    "skills validate --format": "`--json` prints what `--format json` did; nothing prints SARIF",
    "skills test": "it ran a skill's tests; copy its folder into a chat by `mcp-sandbox cp`, and "
    "run them there by `mcp-sandbox shell`",
    "skills update --undo": "it brought the former version back; remove the skill, and "
    "add the older one (owner/repo/path@REF)",
    "skills add --no-sandbox": "no sandbox is asked any more what it lacks; leave it out",
    "skills doctor --no-sandbox": "no sandbox is asked any more what it lacks; leave it out",
    "skills doctor --backend": "no sandbox is asked any more what it lacks; leave it out",
}


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - typer's own click
        for each in args:
            _refuse_gone(ctx, each.partition("=")[0])
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:  # noqa: ANN401 - as above
        return _without_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:  # noqa: ANN401 - as above
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]


class _Commands(TyperGroup):
    def get_params(self, ctx: Any) -> Any:  # noqa: ANN401 - as above
        return _without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - as above
        name, path, known = args[0], ctx.command_path, {*self.commands, "--help", "--version"}
        near = [_MEANT.get(name, ""), *difflib.get_close_matches(name, self.commands, 1)]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        _refuse_gone(ctx, name)
        fit = next((f"Did you mean `{path} {each}`?" for each in near if each in known), "")
        more = self.epilog or f"`{path} --help` lists what there is."
        return ctx.fail(f"There is no `{path} {name}`. {fit or more}")


def _refuse_gone(ctx: Any, word: str) -> None:  # noqa: ANN401 - as above
    """End where a command or an option was there in the version before."""
    path = f"{ctx.command_path} {word}"
    if instead := _GONE.get(path.partition(" ")[2]):
        ctx.fail(f"`{path}` is gone: {instead}.")


def _without_types(params: Any) -> Any:  # noqa: ANN401 - as above
    """Have help show no type of Python where there is no value, or its name says enough."""
    for each in params:
        if isinstance(each, TyperArgument):
            each.metavar = (each.metavar or each.name).upper()
        if isinstance(each, TyperArgument) or each.is_flag:
            vars(each)["display_type_rich"] = lambda ctx: ""  # noqa: ARG005 - typer names it
    return params


class Group(typer.Typer):
    """Commands of one kind. All of them are told in the same way which server is meant."""

    def __init__(self, about: str, *leads: str, **more: Any) -> None:  # noqa: ANN401 - as there
        super().__init__(help=about, no_args_is_help=True, cls=_Commands, **more)
        self._leads = leads

    def command(self, name: str | None = None, **more: Any) -> Callable[[Any], Any]:  # noqa: ANN401 - as there
        leads = more.pop("leads", self._leads)
        add = super().command(name, cls=_Command, **more)
        return lambda function: add(_led(function, leads))


def _led(function: Callable[..., None], leads: Iterable[str]) -> Callable[..., None]:
    """Return a command with more options, whose values it and what it starts read as variables."""
    own = inspect.signature(function)
    names = [name for name in leads if name not in own.parameters]

    @wraps(function, assigned=("__name__", "__doc__"))
    def command(**options: Any) -> None:  # noqa: ANN401 - of any command
        paths = {name: path.absolute() for name in names if (path := options.pop(name, None))}
        told.set(paths)
        with having_variables({LEADS[name][0]: str(path) for name, path in paths.items()}):
            function(**options)

    new = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY, default=None)
    more = [
        new(n, annotation=Annotated[Path | None, given(f"--{n}", *LEADS[n][1:])]) for n in names
    ]
    vars(command)["__signature__"] = own.replace(parameters=[*own.parameters.values(), *more])
    return command


def load(backend: str | None = None, more: Mapping[str, object] | None = None) -> LoadedConfig:
    """Load the configuration that the command line's options lead to; `more` by dotted key."""
    data = told.get().get("data")
    given = {"data_dir": data and str(data), "backend": backend, **(more or {})}
    return load_config(told.get().get("config"), given)


def chat_id(user: str, chat: str = "any") -> ChatId:
    """Return the chat, or end with a word about how it is named."""
    try:
        return ChatId(user, chat)
    except InvalidArgument as exc:
        raise typer.BadParameter(str(exc)) from exc


def socket_path() -> Path:
    """Return where the daemon listens, as `connect` also finds it."""
    return default_socket().absolute()


@contextmanager
def started() -> Generator[Path]:
    """Yield where the daemon listens; one that is started for a block that fails ends again."""
    path = socket_path()
    new, place = not path.exists(), DaemonAddress({"socket": str(path)}, __version__)
    place.greeting = place.line({"role": "control", "command": "status"})
    try:
        reach_daemon(place).close()
    except DaemonUnavailable as exc:
        raise NoDaemon(str(exc)) from exc
    try:
        yield path
    except OperatorError:
        with suppress(OperatorError):
            if new and not ask_daemon(path, "status")["clients"]:
                shut_down(path, timeout_s=30)
        raise


def tell_differences() -> None:
    """Say on stderr which settings a running daemon keeps that are others now."""
    file = default_config_file()
    usual = {"MCP_SANDBOX_CONFIG": str(file)} if file.exists() else {}
    try:
        found = ask_daemon(socket_path(), "status", variables={**usual, **setting_variables()})
    except OperatorError:
        return
    if notice := found.get("notice"):
        print(printable(notice), file=sys.stderr)


def console() -> Console:
    """Return where results are shown: coloured and fitted on a terminal, plain and wide else."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)


def table(*columns: str, rows: Iterable[Iterable[RenderableType]]) -> Table:
    """Return a table of rows; without columns it has no head."""
    made = Table(*columns, box=None, show_header=bool(columns))
    for row in rows:
        made.add_row(*row)
    return made


def narrowed(made: Table) -> Table:
    """Leave out columns from the right until each row has one line; the first is never cut."""
    target = console()
    wide = target.options.update(max_width=_WIDEST)
    while (needed := Measurement.get(target, wide, made).maximum) > target.width:
        if len(made.columns) == 1:
            break
        made.columns.pop()
    made.width = needed
    return made


def tell(found: object, output: Table | str, *, as_json: bool, none: str = "") -> None:
    """Print what was found: for a program, or as it is shown to a person; `none` of no rows."""
    if as_json:
        print(json.dumps(found))
    elif isinstance(output, str) or not output.row_count:
        print(output if isinstance(output, str) else none)
    else:
        console().print(output, crop=False)


def print_diff(lines: Iterable[str]) -> None:
    """Print the lines of a diff in colours; nothing in them moves the cursor."""
    terminal = console()
    for line in lines:
        text = printable(line, "\t")
        text = text if len(line) <= _LINE_SHOWN else f"{text[:_LINE_SHOWN]}…"
        terminal.print(Text(text, style=_DIFF.get(line[:1], "")), soft_wrap=True)


def agreed(yes: bool, question: str, nothing: str) -> None:
    """Ask, unless `yes`; without consent end, and say that nothing was done."""
    try:
        if yes or typer.confirm(question, err=True):
            return
    except typer.Abort:
        print(file=sys.stderr)  # The question is still on its line.
    print(nothing, file=sys.stderr)
    raise typer.Exit(1)


def by_person(yes: bool) -> str:
    """Return who types this, on a terminal or with `yes`; end where a program may."""
    if not (yes or sys.stdin.isatty()):
        print("this is for a person: type it on a terminal, or give --yes", file=sys.stderr)
        raise typer.Exit(1)
    return pwd.getpwuid(os.geteuid()).pw_name


def lifetime(text: str) -> float:
    """Return the seconds that something is valid, which people mean in days, as `span` does."""
    seconds = span(text)
    if is_bare(text) and seconds < DAY_S:
        raise typer.BadParameter(f"{text} has no unit: write {text}d or {text}s")
    return seconds


def span(text: str) -> float:
    """Return the seconds of a time from now on, or end with a word about how it is written."""
    try:
        seconds = parse_duration(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if not isinstance(seconds, float) or not 0 < seconds < 1e11:
        raise typer.BadParameter("give a time from now on, such as 12h or 30d")
    return seconds


def utc(seconds: float) -> str:
    """Format a moment, given in seconds since the epoch."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def show_bytes(size: int) -> str:
    """Format a size in the largest unit that fits."""
    number = float(size)
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def printable(text: str, allowed: str = "\n") -> str:
    """Return text as a terminal can show it: but for what is `kept`, nothing moves the cursor."""
    return "".join(c if c.isprintable() or c in allowed else "\ufffd" for c in text)
