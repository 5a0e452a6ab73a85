"""The trees of warm sandboxes, until a chat adopts them.

    {data root}/sandbox/pool/{process}/lock              locked while the process lives
                                      /{key}/new/        the trees while their sandbox starts
                                      /{key}/workspace   the trees while they wait for a chat
                                      /{key}/home, and skills where chats have them

{process} and {key} are random. A new chat adopts the trees by renaming them to its own, last the
workspace, which makes it the chat's. A mount follows the directory, so that the
sandbox that was born on them has them still. Where mounts do not, that shows when the trees are
moved out of `new`, long before a chat depends on it.

The lock of a killed process is free: the next server removes its folder, after the sandboxes that
use it.
"""

import os
import re
import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.durable import closing_fd, lock, unlock
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace import directory, layout
from mcp_sandbox.workspace.beneath import open_directory, rename_new
from mcp_sandbox.workspace.directory import ChatDirectories, chat_directories, tree_name
from mcp_sandbox.workspace.users import Owner, SandboxUsers

_PROCESS = re.compile(r"[0-9a-f]{16}")
_LABEL = re.compile(r"[0-9a-f]{16}/[0-9a-f]{16}")
_ATTEMPTS = 20
# Stands for the chat that is not known yet: where a pool can be used, no alias names one.
_NO_CHAT = ChatId("nobody", "nobody")


@dataclass(frozen=True)
class WarmTrees:
    """The trees of one warm sandbox; `label` is "{process}/{key}"."""

    label: str
    directories: ChatDirectories


class PoolFolder:
    """This process's part of the pool of a data root, and what killed ones left there.

    Any call raises StorageUnavailable when the data root cannot be used.
    """

    def __init__(
        self,
        data_root: Path,
        *,
        users: SandboxUsers,
        settings: WorkspaceConfig | None = None,
        skills: bool = False,
    ) -> None:
        """With `skills` sandboxes see them."""
        self._data_root = data_root
        self._pool = data_root / "sandbox" / "pool"
        self._users = users
        self._settings = settings or WorkspaceConfig()
        # The workspace goes last: a chat is new as long as it has none.
        self._kinds = ("home", "skills", "workspace") if skills else ("home", "workspace")
        self._limiter = anyio.CapacityLimiter(2)
        self._name = ""
        self._lock: int | None = None

    @property
    def usable(self) -> bool:
        """Whether trees can be made before their chat is known: no alias names it."""
        return not any("{" in alias for alias in self._settings.aliases)

    async def open(self) -> None:
        """Make the folder unless it is open, and lock it until `aclose` or this process's end."""
        if self._lock is None:
            await to_thread.run_sync(self._open, limiter=self._limiter)

    async def aclose(self) -> None:
        """Remove the folder with all that is in it; no sandbox may be running on it."""
        if self._lock is not None:
            await to_thread.run_sync(self._destroy, self._name, limiter=self._limiter)
            unlock(self._lock)
            self._lock = None

    async def prepare(self) -> WarmTrees:
        return await to_thread.run_sync(self._prepare, limiter=self._limiter)

    async def settle(self, warm: WarmTrees) -> WarmTrees:
        """Move the trees, for a trial, now that a sandbox runs on them; returns where they are."""
        return await to_thread.run_sync(self._settle, warm, limiter=self._limiter)

    async def adopt(self, warm: WarmTrees, chat: ChatId) -> None:
        """Make the trees the chat's; StorageUnavailable, too, if it has got others meanwhile."""
        await to_thread.run_sync(self._adopt, warm, chat, limiter=self._limiter)

    async def discard(self, warm: WarmTrees) -> None:
        """Delete the trees, or what is left of them; no sandbox may be running on them."""
        await to_thread.run_sync(self._destroy, warm.label, limiter=self._limiter)

    def abandoned(self) -> frozenset[str]:
        """Return the killed processes whose folders are left. Blocks, as the next two."""
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            pool = layout.enter(stack, sandbox, "pool")
            with os.scandir(pool) as entries:
                names = [entry.name for entry in entries if _PROCESS.fullmatch(entry.name)]
            return frozenset(name for name in names if _is_free(pool, name))

    def keeps(self, label: str) -> bool:
        """Return whether the trees with this label are still in the pool, so no chat has them."""
        if not _LABEL.fullmatch(label):
            return False
        with layout.sandbox_directory(self._data_root) as sandbox:
            places = (f"pool/{label}/workspace", f"pool/{label}/new/workspace")
            return any(layout.exists(sandbox, place.encode()) for place in places)

    def remove(self, process: str) -> None:
        """Remove the folder of a dead process; no sandbox may be running on what is in it."""
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            taken = _lock(layout.enter(stack, sandbox, "pool", process))
            if taken is not None:
                stack.callback(unlock, taken)
                self._destroy(process)

    def _open(self) -> None:
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            pool = layout.enter(stack, sandbox, "pool")
            for _ in range(_ATTEMPTS):
                name = secrets.token_hex(8)
                taken = _lock(layout.enter(stack, pool, name))
                # Before it was locked, another may have taken it for an abandoned one.
                if taken is not None and layout.exists(pool, name.encode()):
                    self._name, self._lock = name, taken
                    return
                if taken is not None:
                    unlock(taken)
        raise StorageUnavailable(
            f"what is made in {self._data_root}/sandbox/pool disappears at once: end the program "
            "that deletes it, then start again"
        )

    def _prepare(self) -> WarmTrees:
        label = f"{self._name}/{secrets.token_hex(8)}"
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            folder = layout.enter(stack, sandbox, "pool", *label.split("/"), "new")
            user = stack.enter_context(self._users.new(sandbox))
            for kind in self._kinds:
                owner = (os.geteuid(), os.getegid()) if kind == "skills" else user
                tree, _ = layout.make_tree(folder, kind.encode(), owner)
                stack.callback(os.close, tree)
                if kind == "skills":
                    layout.enter_shown(stack, tree, layout.SHOWN)
            if self._settings.subdirectories:
                layout.seed(tree, user)
            planned = layout.plan(_NO_CHAT, self._settings.aliases)
            layout.make_aliases(sandbox, tree, planned, user)
            inode = os.fstat(tree).st_ino
        return WarmTrees(label, self._directories(self._pool / label / "new", inode, user))

    def _settle(self, warm: WarmTrees) -> WarmTrees:
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            folder = layout.enter(stack, sandbox, "pool", *warm.label.split("/"))
            new = layout.enter(stack, folder, "new")
            for kind in self._kinds:
                rename_new(new, kind.encode(), folder, kind.encode())
            os.rmdir("new", dir_fd=folder)
        inode, user = warm.directories.workspace_inode, warm.directories.user
        return replace(warm, directories=self._directories(self._pool / warm.label, inode, user))

    def _directories(self, place: Path, inode: int, user: Owner | None) -> ChatDirectories:
        trees = {kind: place / kind for kind in self._kinds}
        planned = layout.plan(_NO_CHAT, self._settings.aliases)
        return replace(chat_directories(trees, inode, planned, self._data_root), user=user)

    def _adopt(self, warm: WarmTrees, chat: ChatId) -> None:
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            folder = layout.enter(stack, sandbox, "pool", *warm.label.split("/"))
            for kind in self._kinds:
                user = layout.enter(stack, sandbox, kind, chat.user)
                rename_new(folder, kind.encode(), user, tree_name(chat))

    def _destroy(self, path: str) -> None:
        above, _, name = path.rpartition("/")
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            parent = layout.enter(stack, sandbox, "pool", *above.split())
            trash = layout.enter(stack, sandbox, "trash")
            directory.destroy(trash, parent, name.encode(), time.time())


def _is_free(pool: int, process: str) -> bool:
    """Return whether a folder's lock is free; without a lock it is being made or removed."""
    with suppress(OSError), closing_fd(open_directory(pool, process.encode())) as folder:
        if (taken := _lock(folder)) is not None:
            unlock(taken)
        return taken is not None
    return False


def _lock(folder: int) -> int | None:
    """Lock a process's folder: a descriptor that holds the lock, None when another one does."""
    with suppress(FileNotFoundError):
        return lock("lock", wait=False, dir_fd=folder)
    return None
