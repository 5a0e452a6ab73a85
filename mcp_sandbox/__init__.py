"""mcp-sandbox gives each chat of a coding agent its own computer that remembers its files.

    async with mcp_sandbox.open_session(chat="demo") as session:
        result = await session.exec("echo hello > note.txt; ls")

A session may be used by any number of tasks of its event loop at once, not by other threads: its
calls run side by side, in one sandbox with the same files and processes. Each `open_session` has
limits, connections and warm sandboxes of its own; in one process or in several, those of one chat
and data directory share its sandbox, which ends with the last of them. Different chats share
neither sandbox nor files. No state is kept in global variables. After its block a session refuses
every call; the files stay.

The names below are the public interface. They are imported when they are first used, so that
`import mcp_sandbox` costs nothing.
"""

# `typing` alone would take as long to import as the relay takes to connect.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from mcp_sandbox.app.agents import open_agent
    from mcp_sandbox.app.chats import open_session
    from mcp_sandbox.config import Config, load_config
    from mcp_sandbox.errors import (
        CallerError,
        CommandFailed,
        OperatorError,
        SandboxError,
        SandboxGone,
    )
    from mcp_sandbox.models import ChatId, ExecResult
    from mcp_sandbox.remote import RemoteSandbox
    from mcp_sandbox.sessions.session import Session

__version__ = "0.2.0"

__all__ = [
    "CallerError",
    "ChatId",
    "CommandFailed",
    "Config",
    "ExecResult",
    "OperatorError",
    "RemoteSandbox",
    "SandboxError",
    "SandboxGone",
    "Session",
    "load_config",
    "open_agent",
    "open_session",
]

_HOMES = {
    "errors": ("CallerError", "CommandFailed", "OperatorError", "SandboxError", "SandboxGone"),
    "models": ("ChatId", "ExecResult"),
    "config": ("Config", "load_config"),
    "sessions.session": ("Session",),
    "remote": ("RemoteSandbox",),
    "app.chats": ("open_session",),
    "app.agents": ("open_agent",),
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(f"mcp_sandbox.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
