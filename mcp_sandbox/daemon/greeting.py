"""The first line of a connection: who is there, and what for. Pure; trusts nothing of it."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId

PROTOCOL = 1
MAX_BYTES = 64 << 10
_DEFAULT_USER = "local"
_FRESH = re.compile(r"[0-9a-f]{16,64}")
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class ChatGreeting:
    """A client that wants to work in a chat's computer, in its folder `project` of this host."""

    chat: ChatId
    project: Path | None
    said: Mapping[str, Any]  # All of it, with the settings of the client's environment.


@dataclass(frozen=True)
class ControlGreeting:
    """A person's command to the daemon."""

    command: str
    arguments: Mapping[str, Any]


def parse_greeting(line: bytes) -> ChatGreeting | ControlGreeting:
    """What a first line says.

    Raises:
        InvalidArgument: it is not such a line, or names a chat that cannot be.
    """
    try:
        said = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("the first line is not JSON: connect with `mcp-sandbox`") from exc
    if not isinstance(said, dict) or said.get("mcp-sandbox") != PROTOCOL:
        raise InvalidArgument(
            f'the first line must hold "mcp-sandbox": {PROTOCOL}: connect with the `mcp-sandbox` '
            "of this daemon's version"
        )
    if said.get("role") == "chat":
        return ChatGreeting(_chat(said), _project(said), said)
    if said.get("role") == "control":
        arguments = said.get("arguments", {})
        if not isinstance(arguments, dict):
            raise InvalidArgument('"arguments" must be an object')
        return ControlGreeting(_text(said, "command") or "", arguments)
    raise InvalidArgument('"role" must be "chat" or "control"')


def _chat(said: Mapping[str, Any]) -> ChatId:
    user = _text(said, "user")
    named = _text(said, "chat")
    if named is None:
        named = _text(said, "session")
    if named is None:
        project = _project(said)
        named = chat_of_project(project) if project else _fresh(said)
    return ChatId(_DEFAULT_USER if user is None else user, named)


def chat_of_project(project: Path) -> str:
    """Name a chat of a folder's own: the hash keeps folders apart, the name is for people."""
    shown = _UNUSUAL.sub("-", project.name)[:_SHOWN_CHARS]
    digest = hashlib.sha256(str(project).encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"dir-{shown}-{digest}"


def _fresh(said: Mapping[str, Any]) -> str:
    fresh = _text(said, "fresh") or ""
    if not _FRESH.fullmatch(fresh):
        raise InvalidArgument(
            'nothing says which chat this is: give "chat", "session", "project", or "fresh" with '
            "16 to 64 hexadecimal digits"
        )
    return f"fresh-{fresh}"


def _project(said: Mapping[str, Any]) -> Path | None:
    project = _text(said, "project")
    if project is None:
        return None
    try:
        absolute = os.fsencode(project).startswith(b"/") and "\0" not in project
    except UnicodeEncodeError:
        absolute = False
    if not absolute:
        raise InvalidArgument(f"project {project[:200]!r} is not an absolute path")
    return Path(project)


def _text(said: Mapping[str, Any], name: str) -> str | None:
    value = said.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f'"{name}" must be text or null')
    return value
