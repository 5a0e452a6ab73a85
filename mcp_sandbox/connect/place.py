"""Where the daemon is and who is asking: the command line and the environment."""

import os

STATE = "mcp-sandbox"
_NAMES = ("user", "chat", "project", "socket")


class Options:
    """What the command line said; an empty value is one that was not given."""

    def __init__(self, given: dict[str, str], *, start: bool = True) -> None:
        self.user = given.get("user") or None
        self.chat = given.get("chat") or None
        self.project = given.get("project") or None
        self.socket = given.get("socket") or None
        self.start = start


def parsed(arguments: list[str]) -> Options | None:
    """Read the arguments; None when they ask for help or are wrong, which others explain."""
    given: dict[str, str] = {}
    start = True
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument == "--no-start":
            start = False
        elif name.startswith("--") and name[2:] in _NAMES:
            following = value if equals else next(rest, None)
            if following is None:
                return None
            given[name[2:]] = following
        else:
            return None
    return Options(given, start=start)


class Place:
    """One daemon's socket, and what is said to it first."""

    def __init__(self, options: Options, version: str) -> None:
        self.socket = options.socket or default_socket()
        self.socket = os.path.abspath(self.socket)
        self.version = version
        self.may_start = options.start
        self.greeting = _line(
            {
                "mcp-sandbox": 1,
                "version": version,
                "role": "chat",
                "user": options.user,
                "chat": options.chat,
                "session": os.environ.get("CLAUDE_CODE_SESSION_ID") or None,
                "project": _project(options),
                "fresh": os.urandom(16).hex(),
                **{k: v for k, v in os.environ.items() if k.startswith("MCP_SANDBOX_")},
            }
        )

    def control(self, command: str) -> bytes:
        """The first line of a connection that gives the daemon a command."""
        return _line(
            {"mcp-sandbox": 1, "version": self.version, "role": "control", "command": command}
        )


def state_folder() -> str:
    """Return where logs are kept, and sockets where there is no better place."""
    return base_folder("XDG_STATE_HOME", ".local/state")


def base_folder(variable: str, below_home: str) -> str:
    """Return our folder below one of the XDG base folders."""
    base = os.environ.get(variable, "")
    # The XDG specification says that a relative path is to be ignored.
    if not base.startswith("/"):
        base = os.path.join(home(), below_home)
    return os.path.join(base, STATE)


def home() -> str:
    """Return the user's home folder; HOME may be missing or empty under a service manager."""
    if named := os.environ.get("HOME"):
        return named
    import pwd

    return pwd.getpwuid(os.getuid()).pw_dir


def default_socket(data: str = "") -> str:
    """Return where the daemon listens; a data root that is named has a socket of its own."""
    named = os.environ.get("MCP_SANDBOX_SOCKET")
    if named:
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = os.path.join(runtime, STATE) if runtime.startswith("/") else state_folder()
    root = os.path.normpath(os.path.expanduser(data or os.environ.get("MCP_SANDBOX_DATA_DIR", "")))
    if root in (".", base_folder("XDG_DATA_HOME", ".local/share")):
        return os.path.join(folder, "mcp.sock")
    from binascii import crc32

    digest = crc32(os.fsencode(root))
    return os.path.join(folder, f"mcp-{digest:08x}.sock")


def _project(options: Options) -> str | None:
    project = options.project or os.environ.get("CLAUDE_PROJECT_DIR")
    return os.path.abspath(project) if project else None


def _line(values: dict[str, str | int | None]) -> bytes:
    pairs = (f"{_json(name)}: {_json(value)}" for name, value in values.items())
    return f"{{{', '.join(pairs)}}}\n".encode()


def _json(value: str | int | None) -> str:
    if value is None:
        return "null"
    if isinstance(value, int):
        return str(value)
    if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return f'"{value}"'
    # Imported only for text that needs it: json takes longer to load than the daemon to answer.
    import json

    return json.dumps(value)


def say(text: str) -> None:
    """Write a line for a person to standard error, which may be closed."""
    try:
        os.write(2, f"mcp-sandbox connect: {text}\n".encode(errors="replace"))
    except OSError:
        return
