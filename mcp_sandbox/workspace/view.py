"""Where the sandbox of a chat shows its skills, and what keeps the chat's code from hiding them.

    {data root}/sandbox/claude/{user}/chat-{chat}/        the sandbox user's, at /workspace/.claude
                        skills/{user}/chat-{chat}/view/   ours, at /workspace/.claude/skills

A mount point can neither be renamed nor replaced, but the directory that holds it can. So `.claude`
is a mount point too. What is mounted there lies beside the workspace and not in it: user code could
swap a directory of the workspace for a link, and an engine that mounts by path would follow that on
the host. Whatever a chat has put where a mount point belongs is moved aside and never followed.

Where nothing is mounted, the view is a folder of the workspace itself, and what is in it are copies
that the chat's code can change.

Blocking.
"""

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcp_sandbox.models import Mount
from mcp_sandbox.workspace.beneath import (
    give,
    grant_owner,
    make_directory,
    make_link,
    open_directory,
    rename_new,
)

KINDS = ("claude", "skills")
"""The trees of a chat that it needs: what the sandbox's user owns, and what is ours."""
Showing = Literal["mounted", "copied"]
_VIEW = "view"
_CLAUDE, _SKILLS, _AGENTS = b".claude", b"skills", b".agents"
_PLACE = "/workspace/.claude"
_SHOWN = {_CLAUDE: _PLACE, _SKILLS: f"{_PLACE}/skills"}
_MOVED = "{} is where skills are shown: what was there before is called {} now, beside it"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 20
_MOST_ASIDE = 1000


@dataclass(frozen=True)
class View:
    """The view of one chat. `tree` is ours, `workspace` the chat's; `owner` is (uid, gid)."""

    tree: Path
    workspace: Path
    owner: tuple[int, int]
    copied: bool

    @property
    def folder(self) -> Path:
        """Where the skills' folders are on the host; in a workspace any part may be a link."""
        return self.workspace / ".claude" / "skills" if self.copied else self.tree / _VIEW

    @property
    def anchor(self) -> Path:
        """The part of `folder` in which nobody but us makes links."""
        return self.workspace if self.copied else self.tree

    @property
    def shown(self) -> str:
        """Where the sandbox sees it."""
        return str(self.folder) if self.copied else f"{_PLACE}/skills"


def open_folder(view: View) -> int:
    """Open the folder of a view; in a workspace it is made, and what is in its way set aside."""
    if not view.copied:
        return os.open(view.folder, _DIRECTORY)
    with ExitStack() as stack:
        directory = os.open(view.workspace, _DIRECTORY)
        for name in (_CLAUDE, _SKILLS):
            stack.callback(os.close, directory)
            if not _is_directory(directory, name):
                _make_point(directory, name, view.owner)
            directory = open_directory(directory, name)
        return directory


def make_agents_link(view: View) -> None:
    """Make `.agents/skills` lead to the skills, unless the chat has something there."""
    with suppress(OSError), ExitStack() as stack:
        workspace = os.open(view.workspace, _DIRECTORY)
        stack.callback(os.close, workspace)
        agents, _ = make_directory(workspace, _AGENTS, owner=view.owner, mode=0o755)
        stack.callback(os.close, agents)
        make_link(agents, _SKILLS, b"../.claude/skills", owner=view.owner)


def mounts(trees: Mapping[str, Path]) -> tuple[Mount, ...]:
    """What a sandbox shows of the trees, given by their kinds."""
    view = trees["skills"] / _VIEW
    return Mount(trees["claude"], _PLACE), Mount(view, f"{_PLACE}/skills", read_only=True)


def make_view(tree: int) -> None:
    """Make the folder that a sandbox sees, in the chat's tree of the kind "skills"."""
    view, _ = make_directory(tree, _VIEW.encode(), mode=0o755)
    try:
        # Its parents are closed to others; through the mount the sandbox user must get in.
        os.fchmod(view, 0o755)
    finally:
        os.close(view)


def clear_way(workspace: int, claude: tuple[int, bytes], owner: tuple[int, int]) -> list[str]:
    """Make the mount points; returns what of the chat's lies elsewhere now, in words.

    `claude` is the parent and the name of the chat's tree of that kind. No sandbox of the chat may
    be running: it would not see what was moved.
    """
    _take_over(workspace, claude, owner)
    said = _make_point(workspace, _CLAUDE, owner)
    with ExitStack() as stack:
        tree = open_directory(*claude)
        stack.callback(os.close, tree)
        said += _make_point(tree, _SKILLS, owner)
    return said


def give_back(workspace: int, claude: tuple[int, bytes]) -> None:
    """Put the tree at its place in the workspace, where nothing is mounted there any more.

    If the chat has files there by now, it stays where it is.
    """
    parent, name = claude
    with suppress(OSError):
        os.rmdir(_CLAUDE, dir_fd=workspace)
    with suppress(FileExistsError, FileNotFoundError):
        rename_new(parent, name, workspace, _CLAUDE)
        with ExitStack() as stack:
            directory = open_directory(workspace, _CLAUDE)
            stack.callback(os.close, directory)
            with suppress(OSError):
                os.rmdir(_SKILLS, dir_fd=directory)


def _take_over(workspace: int, claude: tuple[int, bytes], owner: tuple[int, int]) -> None:
    """Make a `.claude` with files in it the tree, as long as that has none."""
    parent, name = claude
    if not _holds_files(workspace, _CLAUDE):
        return
    try:
        with ExitStack() as stack:
            tree = open_directory(parent, name)
            stack.callback(os.close, tree)
            with suppress(FileNotFoundError):
                os.rmdir(_SKILLS, dir_fd=tree)
        os.rmdir(name, dir_fd=parent)
    except OSError as exc:
        if exc.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return
        raise
    rename_new(workspace, _CLAUDE, parent, name)
    _give(parent, name, owner)


def _make_point(parent: int, name: bytes, owner: tuple[int, int]) -> list[str]:
    """Make an empty directory; what else has the name gets another."""
    said: list[str] = []
    for _ in range(_ATTEMPTS):
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            if _is_directory(parent, name) and not _holds_files(parent, name):
                return said
            said += _set_aside(parent, name)
        else:
            _give(parent, name, owner)
            return said
    raise OSError(errno.EBUSY, "it is replaced as often as it is made", os.fsdecode(name))


def _give(parent: int, name: bytes, owner: tuple[int, int]) -> None:
    directory = open_directory(parent, name)
    try:
        give(directory, owner)
    finally:
        os.close(directory)


def _set_aside(parent: int, name: bytes) -> list[str]:
    for number in range(1, _MOST_ASIDE):
        aside = name + b".set-aside-%d" % number
        try:
            rename_new(parent, name, parent, aside)
        except FileExistsError:
            continue
        except FileNotFoundError:
            return []
        return [_MOVED.format(_SHOWN[name], aside.decode())]
    raise OSError(errno.EEXIST, "too much was set aside before", os.fsdecode(name))


def _is_directory(parent: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _holds_files(parent: int, name: bytes) -> bool:
    """Whether that is a directory, no link to one, and not empty."""
    if not _is_directory(parent, name):
        return False
    # To look into it, and maybe to move it: that writes its "..".
    grant_owner(parent, name)
    directory = open_directory(parent, name)
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    finally:
        os.close(directory)
