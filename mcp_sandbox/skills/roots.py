"""Where skills are looked for, and which of two with the same name goes before the other.

assistant, assistant-2 …  the folders of the settings, in their order
workspace                 /workspace/skills of the chat, if the settings allow it; untrusted
user                      {data}/skills/{user}/
shipped                   what comes with this program
"""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.models import Skill
from mcp_sandbox.workspace.beneath import open_directory
from mcp_sandbox.workspace.directory import tree_name

_UNTRUSTED = "workspace"
_PACKAGE = Path(__file__).parents[1]
_SHIPPED = (_PACKAGE / "_skills", _PACKAGE.parent / "skills")

Whose = ChatId | str
"""A chat, or a user of whom no chat is known."""


@dataclass(frozen=True)
class Root:
    """A folder of skills with a name.

    What is in an untrusted one may have been written by a sandbox. `anchor` is the folder above it
    that the operator named; from there on no link is followed. An optional root may be absent.
    """

    name: str
    folder: Path
    trusted: bool = True
    anchor: Path | None = None
    optional: bool = False


def roots(settings: SkillsConfig, data_dir: Path, whose: Whose) -> tuple[Root, ...]:
    """The roots of a chat or user; earlier ones go before later ones.

    Raises:
        InvalidArgument: no user can have that id.
    """
    if not settings.enabled:
        return ()
    shared = shared_roots(settings)
    assistants = [root for root in shared if root.name != "shipped"]
    own = [_user(data_dir, whose if isinstance(whose, ChatId) else ChatId(whose, "none"))]
    if settings.workspace and isinstance(whose, ChatId):
        own.insert(0, _workspace(data_dir, whose))
    return (*assistants, *own, *shared[len(assistants) :])


def shared_roots(settings: SkillsConfig) -> tuple[Root, ...]:
    """The roots that everybody has; links in other roots may lead into these."""
    folders = dict.fromkeys(settings.folders)
    names = ("assistant", *(f"assistant-{number}" for number in range(2, len(folders) + 1)))
    assistants = [Root(name, folder) for name, folder in zip(names, folders, strict=False)]
    return (*assistants, Root("shipped", shipped_folder())) if settings.shipped else (*assistants,)


@functools.cache
def shipped_folder() -> Path:
    """Inside the package in an installed wheel, beside it in a checkout."""
    return next((folder for folder in _SHIPPED if folder.is_dir()), _SHIPPED[-1])


def _user(data_dir: Path, chat: ChatId) -> Root:
    folder = data_dir / "skills" / chat.user
    return Root("user", folder, anchor=data_dir, optional=True)


def _workspace(data_dir: Path, chat: ChatId) -> Root:
    # As `workspace.directory` lays a chat's files out.
    tree = data_dir / "sandbox" / "workspace" / chat.user / os.fsdecode(tree_name(chat))
    return Root(_UNTRUSTED, tree / "skills", trusted=False, anchor=data_dir, optional=True)


def is_trusted(skill: Skill) -> bool:
    """Whether it lies where a chat's code cannot put anything."""
    return skill.root != _UNTRUSTED


@contextmanager
def opened(folder: Path, anchor: Path | None) -> Iterator[int]:
    """A descriptor of a folder; below the anchor no link is followed. Raises OSError."""
    top = os.open(anchor or folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if anchor is None or anchor == folder:
            yield top
            return
        inner = open_directory(top, os.fsencode(folder.relative_to(anchor)))
        try:
            yield inner
        finally:
            os.close(inner)
    finally:
        os.close(top)
