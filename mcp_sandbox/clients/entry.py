"""What a client shall start, and in which file it looks for that."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = "sandbox"
"""How the server is called in every client; its tools are then `mcp__sandbox__exec` and so on."""

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
