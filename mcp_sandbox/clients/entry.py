"""What a client shall start, and in which file it looks for that."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from mcp_sandbox.daemon.greeting import chat_of_project
from mcp_sandbox.errors import ConfigError

NAME = "sandbox"
"""How the server is called in every client; its tools are then `mcp__sandbox__exec` and so on."""

TOKEN_VARIABLE = "SANDBOX_TOKEN"  # noqa: S105 - its name
"""Where clients find the token of `mcp-sandbox token add`: files of a project must not hold it."""

CHAT_HEADER = "Mcp-Sandbox-Chat"

Entry = Mapping[str, object]


@dataclass(frozen=True)
class Target:
    """The place of our entry: object `section` of the JSON file `path`, under NAME.

    `private`: a new file is readable by its owner only. `next_step` is one line for the user.
    """

    path: Path
    section: str
    entry: Entry
    next_step: str
    private: bool = False


def relay_command() -> Sequence[str]:
    """Return the command that connects a client, by paths that hold in any folder.

    Agents with windows do not see the PATH of a shell, so the program is named in full.
    """
    program = Path(sys.executable).with_name("mcp-sandbox")
    if program.is_file():
        return (str(program), "connect")
    return (sys.executable, "-m", "mcp_sandbox", "connect")


def stdio_entry(*options: str) -> Entry:
    """Return the entry of a server that the client starts and speaks to on stdin and stdout."""
    program, *arguments = relay_command()
    return {"type": "stdio", "command": program, "args": [*arguments, *options]}


def http_entry(address: str, *, chat: str, token: str | None) -> Entry:
    """Return the entry of a server at an address; `token` is how the client fills the token in.

    Raises:
        ConfigError: it is not an address of a server, or holds a secret.
    """
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address!r} is no address: give one like http://127.0.0.1:8080/mcp")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("give the address alone: the token belongs into " + TOKEN_VARIABLE)
    url = urlunsplit(parts._replace(path=parts.path if parts.path not in ("", "/") else "/mcp"))
    sent = {"Authorization": f"Bearer {token}"} if token else {}
    return {"type": "http", "url": url, "headers": {**sent, CHAT_HEADER: chat}}


def folder_entry(project: Path, address: str | None) -> Entry:
    """Return the entry for an editor that fills in its folder and its environment.

    Such an editor tells a server nothing of the conversation, so a folder is a chat.

    Raises:
        ConfigError: the address cannot be used.
    """
    if not address:
        return stdio_entry("--project", "${workspaceFolder}")
    token = f"${{env:{TOKEN_VARIABLE}}}"
    return http_entry(address, chat=chat_of_project(project), token=token)
