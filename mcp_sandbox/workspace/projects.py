"""The user's project folder in a chat's sandbox, at /project, where the operator allows it.

The folder is named by the client that connects, over a socket that only the same user reaches, or
by the command line; never by the model. What of the host must stay out of every sandbox is
refused, however it is named.

    {data root}/sandbox/project/{user}/chat-{chat}/{digest of the folder's path}    a copy
"""

import hashlib
import json
import logging
import os
import re
import stat
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from mcp_sandbox import durable
from mcp_sandbox.backends.sandbox_records import boot_id
from mcp_sandbox.config import ProjectConfig, home
from mcp_sandbox.errors import ConfigError, InvalidArgument
from mcp_sandbox.models import ChatId, FolderIdentity, Mount, ProjectAccess
from mcp_sandbox.workspace import layout
from mcp_sandbox.workspace.directory import RESTORED, Workspaces, find_user, tree_name
from mcp_sandbox.workspace.users import Owner

logger = logging.getLogger(__name__)

# Which directory each path led to: "known" as a chat had it, "asked" where it became another.
Noted = Mapping[str, Mapping[str, Any]]
Steps = Sequence[tuple[Path, os.stat_result]]
TARGET, PROJECT = "/project", "project"
_COPY_S, _LOOKED_AT, _IN_PATH = 120.0, 65_536, r"""[^\s'"`;|&<>()]*"""
_SAID: Mapping[ProjectAccess, str] = {
    "ro": "the user's folder, read-only",
    "rw": "the user's folder; changes are the user's own",
    "copy": "a copy of the user's folder, without .git and what .gitignore names; what is changed "
    "stays here, and the user gets it by `mcp-sandbox cp {}:/project FOLDER`",
}
_SYSTEM = ("/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/usr", "/var/run", "/var/lib")


@dataclass(frozen=True)
class ProjectView:
    """What a sandbox shows of `folder`; `said` tells it to the agent, without paths of the host.

    `identity` is the directory that was checked; what came to lie at its path later is another.
    `noted` is what the chat's record keeps of its folders; `question`, if a person has to be asked.
    """

    folder: Path | None
    mounts: tuple[Mount, ...] = ()
    notice: str = ""
    identity: FolderIdentity | None = None
    noted: Noted = field(default_factory=dict[str, Any])
    question: str = ""

    def explain(self, given: Iterable[object]) -> str:
        """Return where the folder is, if texts name it as on the host, or though it is not here."""
        text = "\n".join(each[:_LOOKED_AT] for each in given if isinstance(each, str))
        folder = re.escape(str(self.folder or TARGET)) + ("" if self.mounts else f"|{TARGET}")
        found = re.search(rf"(?<![\w./-])(?:{folder})(?![\w.-])((?:/{_IN_PATH})?)", text)
        if found and self.mounts:
            return f"{found[0]} of the user's machine is {TARGET}{found[1]} here"
        return f"there is no {TARGET} here: {self.notice.removeprefix('none: ')}" if found else ""


class ClientFolders:
    """The folder that each chat's client works in, for as long as the client is connected.

    `private` are the server's own folders, which no sandbox may show.
    """

    def __init__(self, private: Sequence[Path] = ()) -> None:
        self.private = private
        self._brought: dict[ChatId, list[Path]] = {}

    @contextmanager
    def bring(self, chat: ChatId, folder: Path | None) -> Generator[None]:
        """Give the chat this folder during the block; of several clients the last one counts."""
        if folder is None:
            yield
            return
        folders = self._brought.setdefault(chat, [])
        folders.append(folder)
        try:
            yield
        finally:
            folders.remove(folder)
            if not folders:
                self._brought.pop(chat, None)

    def of(self, chat: ChatId) -> Path | None:
        """Return the chat's folder; None if no client named one."""
        folders = self._brought.get(chat)
        return folders[-1] if folders else None


class Projects:
    """What the sandbox of a chat shows of its client's folder."""

    def __init__(self, settings: ProjectConfig, files: Workspaces, folders: ClientFolders) -> None:
        self.copies = settings.access == "copy"
        self._settings = settings
        self._files = files
        self._folders = folders
        self._private = (files.data_root, *folders.private)

    def folder(self, chat: ChatId) -> Path | None:
        """Return what the chat's sandbox is to show, None if nothing."""
        return None if self._settings.access == "none" else self._folders.of(chat)

    async def show(self, chat: ChatId, noted: Noted) -> ProjectView:
        """Return the mount of the chat's folder; none if it has none, or one that is refused.

        Nor where another is at its path than was `noted`, by the doing of another user.

        Raises:
            ConfigError: the copy cannot be made; the message says what to change.
            StorageUnavailable: the data root cannot be used.
        """
        access, named = self._settings.access, self.folder(chat)
        if access == "none":
            return ProjectView(None, notice="none: the operator allows none (project.access)")
        if named is None:
            return ProjectView(None, notice="none: the client named no folder")
        try:
            steps = await to_thread.run_sync(check_folder, named, self._private)
            noted, question = await to_thread.run_sync(_compare, named, noted, steps)
            if question:
                question += f"`mcp-sandbox project accept {chat}` if it is as it should be"
                return ProjectView(None, (), f"none: {question}", noted=noted, question=question)
            if access == "copy":
                copy = await self._copy(chat, steps[-1][0])
                steps = await to_thread.run_sync(lambda: [*durable.follow(copy)])
        except (InvalidArgument, OSError) as exc:
            logger.warning("chat %s works without its folder: %s", chat, exc)
            notice = "none: the client's folder may not be shown; the server's log says why"
            return ProjectView(named, notice=notice)
        source, found = steps[-1]
        identity = FolderIdentity(found.st_dev, found.st_ino, found.st_ctime_ns)
        mount = Mount(source, TARGET, read_only=access == "ro")
        return ProjectView(
            named, (mount,), f"{TARGET}: {_SAID[access].format(chat)}", identity, noted
        )

    async def _copy(self, chat: ChatId, folder: Path) -> Path:
        """Make the chat's copy at its first call; later ones find it as the chat left it."""
        tree, owner = await to_thread.run_sync(self._tree, chat)
        copy = tree / hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]
        with suppress(OSError):
            # A copy that a backup has brought; never over one that is there and not empty.
            await to_thread.run_sync(os.rename, tree / os.fsdecode(RESTORED), copy)
        if await to_thread.run_sync(copy.is_dir):
            return copy
        order = {
            "source": os.fsdecode(folder),
            "target": str(copy),
            "owner": owner,
            "max_bytes": self._settings.max_size,
            "max_files": self._settings.max_files,
        }
        # In a process of its own: rules of a stranger's .gitignore may take for ever to match.
        command = [sys.executable, "-I", "-m", "mcp_sandbox.workspace.project_copy"]
        with anyio.move_on_after(_COPY_S) as limit:
            done = await anyio.run_process(
                command, input=json.dumps(order).encode(), check=False, env={}, cwd="/"
            )
        if limit.cancelled_caught:
            raise _not_copied(folder, f"it took longer than {_COPY_S:g} s")
        if done.returncode:
            raise _not_copied(folder, done.stderr.decode(errors="replace")[-500:].strip())
        logger.info("chat %s: copied its project, %s", chat, done.stdout.decode().strip())
        return copy

    def _tree(self, chat: ChatId) -> tuple[Path, Owner]:
        root = self._files.data_root
        with layout.sandbox_directory(root) as sandbox, ExitStack() as stack:
            user = layout.enter(stack, sandbox, "project", chat.user)
            owner = find_user(stack, sandbox, chat, self._files.users)
            tree, _ = layout.make_tree(user, tree_name(chat), owner)
            os.close(tree)
        place = root.resolve() / "sandbox" / "project" / chat.user
        return place / os.fsdecode(tree_name(chat)), owner


def check_folder(folder: Path, private: Sequence[Path], *, or_root: bool = False) -> Steps:
    """Return the way to a folder that a sandbox may show, as `follow` does; else InvalidArgument.

    It must belong to this user, or, with `or_root`, to root.
    """
    try:
        steps = [*durable.follow(folder)]
    except OSError as exc:
        raise InvalidArgument(f"the folder {folder} cannot be used: {exc}") from exc
    real, found = steps[-1]
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(real, "it is not a folder")
    if found.st_uid != os.geteuid() and not (or_root and found.st_uid == 0):
        raise _refused(real, f"it belongs to uid {found.st_uid}, and this is uid {os.geteuid()}")
    if home().resolve().is_relative_to(real):
        raise _refused(real, "it holds the whole home of the user")
    if any(real == Path(system) or real.is_relative_to(system) for system in _SYSTEM):
        raise _refused(real, "it is a part of the system")
    for place in (each.resolve() for each in private):
        if real.is_relative_to(place) or place.is_relative_to(real):
            raise _refused(real, f"it holds or lies in {place}, which is the server's own")
    return steps


def _compare(folder: Path, noted: Noted, steps: Steps) -> tuple[Noted, str]:
    """Return what to note of a folder, and what to ask a person, "" if nothing."""
    real, found = steps[-1]
    # By whose doing it is there; root may do anything, and does not count.
    owners = sorted({each.st_uid for _, each in steps} - {0})
    mark = {"path": str(real), "inode": found.st_ino, "device": found.st_dev}
    mark |= {"boot": boot_id(), "owners": owners}
    known = noted.get(str(folder), {}).get("known", mark)
    # The numbers of devices change from boot to boot.
    numbers = ("inode", "device") if known["boot"] == mark["boot"] else ("inode",)
    strangers = ", ".join(f"uid {uid}" for uid in owners if uid not in known["owners"])
    if not strangers or all(known[number] == mark[number] for number in numbers):
        return {**noted, str(folder): {"known": mark}}, ""
    return (
        {**noted, str(folder): {"known": known, "asked": mark}},
        f"another folder than before is at the path of the user's, by the doing of {strangers}: "
        "ask the user to look at it, and to run ",
    )


def _refused(folder: Path, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"the folder {folder} is not shown in a sandbox: {why}; choose another folder"
    )


def _not_copied(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the project folder {folder} cannot be copied into the sandbox: {why}. Add what is not "
        "needed to its .gitignore, raise project.max_size or project.max_files, or choose another "
        "project.access"
    )
