"""The layout of the data root, and the life of a chat's trees in it.

    {data root}/sandbox/workspace/{user}/chat-{chat}/   0700, the sandbox user's
                        home/{user}/chat-{chat}/        0700, the sandbox user's
                        project/{user}/chat-{chat}/     0700, the sandbox user's, see projects
                        claude/{user}/chat-{chat}/      0700, the sandbox user's, see view
                        skills/{user}/chat-{chat}/      0700, the server's own, see view
                        alias/{digest}/                 read-only links, see aliases
                        trash/{time}-{random}/
                        pool/                           trees that wait for a chat, see pool

Everything above a chat's trees is 0700 and the server's own.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from anyio import from_thread, to_thread

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId, Mount
from mcp_sandbox.workspace import aliases, census, layout, trash, view
from mcp_sandbox.workspace.beneath import open_directory
from mcp_sandbox.workspace.meter import Meter
from mcp_sandbox.workspace.usage import Checkpoint, FreeSpace, Usage, free_space, measure

TRASH_KEPT_S = 24 * 3600.0
# What a chat has on disk and may fill; `projects` makes the third.
_FILLED = ("workspace", "home", "project", "claude")
_KINDS = (*_FILLED, "skills")
# What is gone when a chat begins with an empty workspace.
_DISCARDED = ("workspace", *view.KINDS)
# Another process may discard a tree between our mkdir and our open, again and again.
_ATTEMPTS = 20


@dataclass(frozen=True)
class ChatDirectories:
    """A chat's trees on the host. `aliases` are the further mounts that the settings ask for.

    `skills` are the mounts by which its sandbox sees skills, `cleared` whether the workspace is
    surely ready for a sandbox with them, or without.
    """

    workspace: Path
    home: Path
    workspace_inode: int
    aliases: tuple[Mount, ...] = ()
    skills: tuple[Mount, ...] = ()
    cleared: bool = False


@dataclass(frozen=True)
class TrashItem:
    """Something discarded; whose it was, where that is known, and when, since the epoch."""

    name: str
    chat: ChatId | None
    discarded_at: float
    allocated_bytes: int


class Workspaces:
    """The trees of all chats of one data root. Several processes may use it at once."""

    def __init__(
        self,
        data_root: Path,
        *,
        owner: tuple[int, int],
        settings: WorkspaceConfig | None = None,
        skills: view.Showing | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`owner` is the (uid, gid) that sandboxes run as; `now` gives seconds since the epoch.

        `skills` is how sandboxes see skills, if they do.
        """
        self.data_root = data_root
        aliases.parse_aliases(settings.aliases if settings else ())
        self._owner = owner
        self._settings = settings or WorkspaceConfig()
        self._skills = skills
        self._now = now
        self._totals = census.UserTotals()
        self._layout_limiter = anyio.CapacityLimiter(4)
        # Few at a time: measuring and deleting must leave the machine to the sandboxes.
        self._walk_limiter = anyio.CapacityLimiter(2)
        self._trash_limiter = anyio.CapacityLimiter(1)

    async def open(self, chat: ChatId) -> ChatDirectories:
        """The chat's trees, made when they are not there yet.

        Raises:
            StorageUnavailable: the data root cannot be used; the message says what to change.
        """
        return await to_thread.run_sync(self._open, chat, limiter=self._layout_limiter)

    async def clear_way(self, chat: ChatId) -> Sequence[str]:
        """Make a workspace ready for the mounts of a new sandbox; what is set aside, in words.

        No sandbox of the chat may be running: it would not see what is moved.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        return await to_thread.run_sync(self._clear_way, chat, limiter=self._layout_limiter)

    async def discard(self, chat: ChatId) -> ChatDirectories:
        """Throw the chat's workspace away and begin with an empty one.

        What the chat had discarded before is deleted.

        No sandbox of the chat may be running: it would go on in the discarded tree.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        return await to_thread.run_sync(self._discard, chat, limiter=self._layout_limiter)

    async def remove(self, chat: ChatId) -> None:
        """Throw all files of the chat into the trash; a chat without files is fine.

        No sandbox of the chat may be running: it would go on in the discarded trees.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        await to_thread.run_sync(self._remove, chat, limiter=self._layout_limiter)

    async def chats(self) -> Sequence[ChatId]:
        """Every chat that has a workspace.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        return await to_thread.run_sync(self._chats, limiter=self._layout_limiter)

    async def trashed(self, *, measured: bool = True) -> Sequence[TrashItem]:
        """What the trash holds; unless `measured`, without how much it is.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        return await to_thread.run_sync(self._trashed, measured, limiter=self._trash_limiter)

    async def empty_trash(self, *, is_due: Callable[[str], bool]) -> trash.TrashReport:
        """Delete the items that are due, by their names; cancelling stops it midway.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        return await to_thread.run_sync(self._empty_trash, is_due, limiter=self._trash_limiter)

    def view_of(self, chat: ChatId) -> view.View | None:
        """Where the chat's sandbox sees skills, if it does; `open` makes it."""
        if self._skills is None:
            return None
        trees = self._path("skills", chat), self._path("workspace", chat)
        return view.View(*trees, self._owner, copied=self._skills == "copied")

    def meter(self, chat: ChatId) -> Meter:
        """A new meter for all files of the chat together; keep one per open chat."""

        def measure_chat(checkpoint: Checkpoint) -> tuple[Usage, FreeSpace]:
            return self._measure(chat, checkpoint)

        return Meter(measure_chat, self._settings, limiter=self._walk_limiter)

    def _open(self, chat: ChatId) -> ChatDirectories:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            workspace, created = self._tree(stack, sandbox, "workspace", chat)
            self._tree(stack, sandbox, "home", chat)
            if created and self._settings.subdirectories:
                layout.seed(workspace, self._owner)
            planned = aliases.plan(chat, self._settings.aliases)
            layout.make_aliases(sandbox, workspace, planned, self._owner)
            source, links = self._path("workspace", chat), self.data_root / "sandbox" / "alias"
            skills = self._make_view(stack, sandbox, chat) if self._skills else ()
            claude = f"claude/{chat.user}/".encode() + tree_name(chat)
            if skills and created:
                self._clear(stack, sandbox, workspace, chat)
            return ChatDirectories(
                workspace=source,
                home=self._path("home", chat),
                workspace_inode=os.fstat(workspace).st_ino,
                aliases=aliases.alias_mounts(planned, source, links),
                skills=skills,
                cleared=created or not layout.exists(sandbox, claude),
            )

    def _make_view(self, stack: ExitStack, sandbox: int, chat: ChatId) -> tuple[Mount, ...]:
        view.make_view(self._tree(stack, sandbox, "skills", chat)[0])
        if self._skills == "copied":
            return ()
        self._tree(stack, sandbox, "claude", chat)
        return view.mounts({kind: self._path(kind, chat) for kind in view.KINDS})

    def _clear_way(self, chat: ChatId) -> Sequence[str]:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            workspace, _ = self._tree(stack, sandbox, "workspace", chat)
            self._tree(stack, sandbox, "claude", chat)
            if self._skills == "mounted":
                return self._clear(stack, sandbox, workspace, chat)
            user = layout.enter(stack, sandbox, "claude", chat.user)
            view.give_back(workspace, (user, tree_name(chat)))
            return []

    def _clear(self, stack: ExitStack, sandbox: int, workspace: int, chat: ChatId) -> Sequence[str]:
        user = layout.enter(stack, sandbox, "claude", chat.user)
        return view.clear_way(workspace, (user, tree_name(chat)), self._owner)

    def _discard(self, chat: ChatId) -> ChatDirectories:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            trees = self._present(stack, sandbox, chat, _DISCARDED)
            bin_ = layout.enter(stack, sandbox, "trash")
            thrown = trash.throw_away(bin_, trees, chat, self._now())
            trash.drop_earlier(bin_, chat, thrown, from_thread.check_cancelled)
        return self._open(chat)

    def _remove(self, chat: ChatId) -> None:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            trees = self._present(stack, sandbox, chat, _KINDS)
            if trees:
                bin_ = layout.enter(stack, sandbox, "trash")
                trash.throw_away(bin_, trees, chat, self._now())

    def _present(
        self, stack: ExitStack, sandbox: int, chat: ChatId, kinds: Sequence[str]
    ) -> dict[str, tuple[int, bytes]]:
        """Parent and name of each of the chat's trees that is there, ready to be moved."""
        trees: dict[str, tuple[int, bytes]] = {}
        for kind in kinds:
            user = layout.enter(stack, sandbox, kind, chat.user)
            if layout.exists(user, tree_name(chat)):
                # Opening gives us back the rights that moving the tree needs.
                self._tree(stack, sandbox, kind, chat)
                trees[kind] = (user, tree_name(chat))
        return trees

    def _chats(self) -> Sequence[ChatId]:
        with layout.sandbox_directory(self.data_root) as sandbox:
            return census.chats(sandbox)

    def _trashed(self, measured: bool) -> Sequence[TrashItem]:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            bin_ = layout.enter(stack, sandbox, "trash")
            return [
                TrashItem(
                    name,
                    trash.owner(bin_, name),
                    discarded_at,
                    _allocated_bytes(bin_, name) if measured else 0,
                )
                for name, discarded_at in trash.items(bin_).items()
            ]

    def _empty_trash(self, is_due: Callable[[str], bool]) -> trash.TrashReport:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            return trash.empty(
                layout.enter(stack, sandbox, "trash"),
                is_due=is_due,
                checkpoint=from_thread.check_cancelled,
            )

    def _measure(self, chat: ChatId, checkpoint: Checkpoint) -> tuple[Usage, FreeSpace]:
        with layout.sandbox_directory(self.data_root) as sandbox:
            if not self._settings.user_quota:
                return self._usage(sandbox, chat, checkpoint), free_space(sandbox)
            own, others = self._totals.measure(
                chat,
                census.chats(sandbox, chat.user),
                lambda one: self._usage(sandbox, one, checkpoint),
            )
            free = free_space(sandbox)
            return own, replace(free, allowed_bytes=self._settings.user_quota - others)

    def _usage(self, sandbox: int, chat: ChatId, checkpoint: Checkpoint) -> Usage:
        with ExitStack() as stack:
            roots = [
                self._tree(stack, sandbox, kind, chat)[0]
                for kind in _FILLED
                if layout.exists(layout.enter(stack, sandbox, kind, chat.user), tree_name(chat))
            ]
            # Twice the limit: a chat that is over it still sees a figure it can work down from.
            most = 2 * self._settings.max_files
            return measure(roots, checkpoint=checkpoint, max_entries=most)

    def _tree(self, stack: ExitStack, sandbox: int, kind: str, chat: ChatId) -> tuple[int, bool]:
        """Open one of the chat's trees; the flag says whether it is new."""
        owner = (os.geteuid(), os.getegid()) if kind == "skills" else self._owner
        for _ in range(_ATTEMPTS):
            user = layout.enter(stack, sandbox, kind, chat.user)
            try:
                tree, created = layout.make_tree(user, tree_name(chat), owner)
            except FileNotFoundError:
                continue
            stack.callback(os.close, tree)
            layout.check_owner(tree, owner, self._path(kind, chat))
            return tree, created
        raise StorageUnavailable(
            f"{self._path(kind, chat)} disappears as often as it is made: end the program that "
            "deletes it, then try again"
        )

    def _path(self, kind: str, chat: ChatId) -> Path:
        return self.data_root / "sandbox" / kind / chat.user / f"chat-{chat.chat}"


def _allocated_bytes(bin_: int, name: str) -> int:
    with suppress(OSError), ExitStack() as stack:
        item = open_directory(bin_, name.encode())
        stack.callback(os.close, item)
        return measure([item], checkpoint=from_thread.check_cancelled).allocated_bytes
    return 0


def tree_name(chat: ChatId) -> bytes:
    """The name of a chat's tree in its user's directory."""
    return f"chat-{chat.chat}".encode()
