"""Where the daemon is, who is asking, and a connection to it: dialled, its owner checked."""

import os
import sys

# What `socket` is made of. Its enumerations would double the time that the relay takes to start.
from _socket import AF_UNIX, MSG_PEEK, SO_PEERCRED, SOCK_STREAM, SOL_SOCKET, socket

STATE = "mcp-sandbox"
CHUNK_BYTES = 256 << 10
LONGEST_PATH = 103
"""A socket's address has 108 bytes, and its temporary name is four bytes longer."""
ANSWER_S = 15.0
_ELSEWHERE = "give another path with --socket or MCP_SANDBOX_SOCKET"
_LONGEST_ANSWER = 64 << 10
_OURS = ("MCP_SANDBOX_", "SANDBOX_TOKEN")


class DaemonUnavailable(Exception):
    """No daemon can be used; the message says why and what to do."""


class NotRunning(DaemonUnavailable):
    """No daemon listens."""


def parse_options(arguments: list[str]) -> tuple[dict[str, str], bool] | None:
    """Read the options, and whether a daemon may be started.

    None when they ask for help or are wrong, which others explain.
    """
    given: dict[str, str] = {}
    start = True
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument == "--no-start":
            start = False
        elif name.startswith("--") and name[2:] in ("user", "chat", "project", "socket"):
            following = value if equals else next(rest, None)
            if following is None:
                return None
            given[name[2:]] = following
        else:
            return None
    return given, start


class DaemonAddress:
    """One daemon's socket, and what is said to it first.

    `given` are options of the command line; an empty one counts as not given.
    """

    def __init__(self, given: dict[str, str], version: str, *, may_start: bool = True) -> None:
        self.socket = os.path.abspath(given.get("socket") or default_socket())
        self.version = version
        self.may_start = may_start
        project = given.get("project") or os.environ.get("CLAUDE_PROJECT_DIR")
        self.greeting = self.line(
            {
                "role": "chat",
                "user": given.get("user") or None,
                "chat": given.get("chat") or None,
                "session": os.environ.get("CLAUDE_CODE_SESSION_ID") or None,
                "project": os.path.abspath(project) if project else None,
                "fresh": os.urandom(16).hex(),
                **{k: v for k, v in os.environ.items() if k.startswith("MCP_SANDBOX_")},
            }
        )

    def line(self, values: dict[str, str | None]) -> bytes:
        pairs = [f'"mcp-sandbox": 1, "version": "{self.version}"']
        pairs += [f"{_json(name)}: {_json(value)}" for name, value in values.items()]
        return f"{{{', '.join(pairs)}}}\n".encode()


class DaemonLink(socket):
    """A connection whose other side has accepted us. `version` is the daemon's."""

    version = ""

    def send_all(self, data: bytes) -> None:
        self.settimeout(ANSWER_S)
        self.sendall(data)
        self.setblocking(False)

    def receive_line(self) -> bytes:
        """Return the next short line, within ANSWER_S; what follows it stays in the socket.

        Raises EOFError: the other side ended before the end of the line, or the line is too long.
        """
        self.settimeout(ANSWER_S)
        line = bytearray()
        # Byte by byte would be slow; so look first, then take only the line.
        while len(line) <= _LONGEST_ANSWER:
            seen = self.recv(4096, MSG_PEEK)
            end = seen.find(b"\n") + 1
            line += self.recv(end or len(seen))
            if end or not seen:
                break
        self.setblocking(False)
        if not line.endswith(b"\n"):
            raise EOFError
        return bytes(line)


def dial(place: DaemonAddress, greeting: bytes | None = None) -> DaemonLink:
    """Connect and greet.

    Raises:
        NotRunning: no daemon listens there, or ended just now.
        DaemonUnavailable: it cannot be reached, is not ours, or refuses us.
    """
    link = DaemonLink(AF_UNIX, SOCK_STREAM)
    try:
        link.version = _greeted(link, place, greeting or place.greeting)
    except BaseException:
        link.close()
        raise
    return link


def _greeted(link: DaemonLink, place: DaemonAddress, greeting: bytes) -> str:
    link.settimeout(ANSWER_S)
    try:
        link.connect(place.socket)
        # A stranger who listens there would read everything that we send.
        credentials = link.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)
        uid = int.from_bytes(credentials[4:8], sys.byteorder)
        if uid not in (0, os.geteuid()):
            raise DaemonUnavailable(
                f"{place.socket} belongs to another user (uid {uid}); {_ELSEWHERE}"
            )
        link.send_all(greeting)
        return _accepted(link.receive_line(), place)
    except (FileNotFoundError, ConnectionError, EOFError) as exc:
        raise NotRunning(f"no sandbox server is running at {place.socket}") from exc
    except TimeoutError as exc:
        raise DaemonUnavailable(
            f"the sandbox server at {place.socket} does not answer; end it with `mcp-sandbox "
            "shutdown` or kill it, and try again"
        ) from exc
    except OSError as exc:
        problem = f"cannot connect to {place.socket}: {exc.strerror or exc}"
        raise DaemonUnavailable(f"{problem}; {_ELSEWHERE}") from exc


def _accepted(line: bytes, place: DaemonAddress) -> str:
    # The usual answer is known by its beginning: json would take longer to load than it to come.
    usual = line.startswith(f'{{"ok": true, "version": "{place.version}",'.encode())
    if usual and b'"notice"' not in line:
        return place.version
    import json

    try:
        answer = json.loads(line)
        if answer["ok"] is True:
            if "notice" in answer:
                say(str(answer["notice"]))
            return str(answer["version"])
        problem = f"the sandbox server refused: {answer['error']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        problem = f"what listens at {place.socket} is not a sandbox server; {_ELSEWHERE}"
    raise DaemonUnavailable(problem)


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


def default_socket() -> str:
    """Return where the daemon listens; a data root that is named has a socket of its own."""
    if named := os.environ.get("MCP_SANDBOX_SOCKET"):
        return named
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = os.path.join(runtime, STATE) if runtime.startswith("/") else state_folder()
    root = os.path.normpath(os.path.expanduser(os.environ.get("MCP_SANDBOX_DATA_DIR", "")))
    is_usual = root in (".", base_folder("XDG_DATA_HOME", ".local/share"))
    path = os.path.join(folder, "mcp.sock" if is_usual else _name_socket(root))
    if len(os.fsencode(path)) <= LONGEST_PATH:
        return path
    return f"/tmp/{STATE}-{os.geteuid()}/{_name_socket(root + folder)}"


def _name_socket(place: str) -> str:
    from binascii import crc32

    return f"mcp-{crc32(os.fsencode(place)):08x}.sock"


def _variables_file(socket: str) -> str:
    return os.path.join(state_folder(), f"variables{socket.replace('/', '-')}")


def note_variables(socket: str, names: list[str]) -> None:
    """Note which variables the settings of a server at this socket name."""
    file = _variables_file(socket)
    try:
        os.makedirs(state_folder(), mode=0o700, exist_ok=True)
        if names:
            with open(file, "w", encoding="utf-8") as noted:
                noted.write("\n".join(names))
        elif os.path.exists(file):
            os.remove(file)
    except OSError:
        pass  # Then a server that lacks one says so.


def noted_variables(socket: str) -> dict[str, str]:
    """Return those of them that are set here; none of them is a token of ours."""
    try:
        with open(_variables_file(socket), encoding="utf-8") as file:
            names = [name for name in file.read().split() if not name.startswith(_OURS)]
    except (OSError, UnicodeError):
        return {}
    return {name: os.environ[name] for name in names if name in os.environ}


def _json(value: str | None) -> str:
    if value is None:
        return "null"
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
