"""The layout of the data root, the life of a chat's trees in it, and the trash.

An item of the trash is a directory `{UTC time}-{random}` with trees of a chat, named after their
kinds (`workspace`, `home` …), and a file `chat` that says whose they were.

Deleting may stop at any point; the item keeps its name and the next time goes on.

    {data root}/sandbox/
        workspace/{user}/chat-{chat}/   0700, the sandbox user's
        home/{user}/chat-{chat}/        0700, the sandbox user's
        project/{user}/chat-{chat}/     0700, the sandbox user's, see projects
        skills/{user}/chat-{chat}/      0700, the server's own; see sessions.skill_pins
        alias/{digest}/                 read-only links, see layout
        trash/{time}-{random}/
        pool/                           trees that wait for a chat, see pool
        restoring/{user}/chat-{chat}/   trees that are to take the place of a chat's
        server                          what this root is called on this machine, see name_server

Everything above a chat's trees is 0700 and the server's own.
"""

import errno
import functools
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
from anyio import from_thread, to_thread

from mcp_sandbox.config import WorkspaceConfig
from mcp_sandbox.durable import closing_fd, read_note, write_note
from mcp_sandbox.errors import InvalidArgument, StorageUnavailable
from mcp_sandbox.models import HOME, SKILLS, ChatId, Mount
from mcp_sandbox.workspace import layout, meter
from mcp_sandbox.workspace.beneath import (
    create_file,
    make_directory,
    open_directory,
    open_file,
    rename_new,
)
from mcp_sandbox.workspace.users import Owner, SandboxUsers, unite

_STAMP = "%Y%m%dT%H%M%SZ"
_ITEM = re.compile(r"(\d{8}T\d{6}Z)-[0-9a-f]{16}")
_PREFIX = "chat-"
_GOOD_FOR_S = 30.0
_GOOD_FOR_PER_COST = 20
TRASH_KEPT_S = 24 * 3600.0
# What a chat has on disk and may fill; `projects` makes the third.
_FILLED = ("workspace", "home", "project")
_KINDS = (*_FILLED, "skills")
_STAGED, RESTORED = "restoring", b"restored"
# What is gone when a chat begins with an empty workspace.
_DISCARDED = ("workspace", "skills")
# Another process may discard a tree between our mkdir and our open, again and again.
_ATTEMPTS = 20


def item_name(now: float) -> str:
    """Return a new item name that contains the time (seconds since the epoch), and sorts by it."""
    parts = f"{int(now % 1 * (1 << 20)):05x}{secrets.token_hex(8)[5:]}"
    return f"{datetime.fromtimestamp(now, UTC).strftime(_STAMP)}-{parts}"


def discarded_at(name: str) -> float | None:
    """Return when an item was discarded (epoch); None if the name is not that of an item."""
    match = _ITEM.fullmatch(name)
    with suppress(ValueError):
        return match and datetime.strptime(match[1], _STAMP).replace(tzinfo=UTC).timestamp()
    return None


def throw_away(trash: int, trees: Mapping[str, tuple[int, bytes]], chat: ChatId, now: float) -> str:
    """Move trees, given as kind -> (parent, name), into a new item; returns its name."""
    name = item_name(now)
    item, _ = make_directory(trash, name.encode())
    with closing_fd(item):
        create_file(item, b"chat", f"{chat}\n".encode(), owner=(os.geteuid(), os.getegid()))
        for kind, (parent, tree) in trees.items():
            with suppress(FileNotFoundError):
                os.rename(tree, kind, src_dir_fd=parent, dst_dir_fd=item)
    return name


def destroy(trash: int, parent: int, name: bytes, now: float) -> None:
    """Delete a directory, if it is there; what is left when we are killed is in the trash."""
    item = item_name(now).encode()
    try:
        os.rename(name, item, src_dir_fd=parent, dst_dir_fd=trash)
    except FileNotFoundError:
        return
    _delete_item(trash, item, lambda: None)


def list_items(trash: int) -> dict[str, float]:
    """Return when each item was discarded (seconds since the epoch), by its name."""
    with os.scandir(trash) as entries:
        found = {entry.name: discarded_at(entry.name) for entry in entries}
    return {name: when for name, when in sorted(found.items()) if when is not None}


def read_owner(trash: int, name: str) -> ChatId | None:
    """Return the chat that an item belonged to; None if unknown."""
    with suppress(OSError, InvalidArgument):
        with os.fdopen(open_file(trash, f"{name}/chat".encode()), "rb") as stream:
            user, _, chat = stream.read(512).decode(errors="replace").rstrip().partition("/")
        return ChatId(user, chat)
    return None


def empty(
    trash: int, *, is_due: Callable[[str], bool], checkpoint: meter.Checkpoint
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Delete the items that are due; return the deleted names and the failed ones."""
    due = [name for name in list_items(trash) if is_due(name)]
    gone = tuple(name for name in due if _delete_item(trash, name.encode(), checkpoint))
    return gone, tuple(name for name in due if name not in gone)


def _delete_item(trash: int, name: bytes, checkpoint: meter.Checkpoint) -> bool:
    """Delete an item; False when something in it would not go."""
    progress = True

    def visit(directory: int, entry: os.DirEntry[str]) -> bool:
        nonlocal progress
        if entry.is_dir(follow_symlinks=False):
            return True
        progress |= _try_remove(os.unlink, os.fsencode(entry.name), directory)
        return False

    def leave(parent: int, name: bytes) -> None:
        nonlocal progress
        progress |= _try_remove(os.rmdir, name, parent)

    while progress:
        progress = False
        try:
            item = open_directory(trash, name)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        with closing_fd(item):
            meter.walk(item, visit, checkpoint, leave)
        if _try_remove(os.rmdir, name, trash):
            return True
    return False


def _try_remove(remove: Callable[..., None], name: bytes, parent: int) -> bool:
    try:
        remove(name, dir_fd=parent)
    except OSError as exc:
        # A busy name is a mount point, a non-empty one was filled behind our back.
        return exc.errno == errno.ENOENT
    return True


def _list_chats(sandbox: int, user: str | None = None) -> list[ChatId]:
    found = []
    for name in [user] if user else _list_and_close(open_directory(sandbox, b"workspace")):
        try:
            folder = open_directory(sandbox, f"workspace/{name}".encode())
        except OSError:
            continue
        for tree in _list_and_close(folder):
            if tree.startswith(_PREFIX):
                with suppress(InvalidArgument):
                    found.append(ChatId(name, tree.removeprefix(_PREFIX)))
    return found


def _chats(data_root: Path) -> Sequence[ChatId]:
    with layout.sandbox_directory(data_root) as sandbox:
        return _list_chats(sandbox)


def _list_and_close(parent: int) -> list[str]:
    with closing_fd(parent), os.scandir(parent) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


class UserTotals:
    """What each user's chats occupy, from the last measurement of each.

    An open chat is measured all the time, so only the figures of the others get old.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Allocated bytes, and until when the figure is valid.
        self._figures: dict[ChatId, tuple[int, float]] = {}

    def measure(
        self, chat: ChatId, siblings: Iterable[ChatId], measure: Callable[[ChatId], meter.TreeUsage]
    ) -> tuple[meter.TreeUsage, int]:
        """Return the usage of a chat, and the bytes of its user's other chats.

        Of the others, those without a figure are measured, or else the one with the oldest.
        """
        own = self._take(chat, measure)
        others = [sibling for sibling in siblings if sibling != chat]
        for known in list(self._figures):
            if known.user == chat.user and known not in (chat, *others):
                self._figures.pop(known, None)
        # Another thread may forget one meanwhile.
        good_until = {one: found[1] for one in others if (found := self._figures.get(one))}
        stale = [one for one in others if one not in good_until]
        if good_until and not stale:
            oldest = min(good_until, key=good_until.__getitem__)
            stale = [oldest] if good_until[oldest] < self._clock() else []
        for sibling in stale:
            self._take(sibling, measure)
        figures = (self._figures.get(one) for one in others)
        return own, sum(figure[0] for figure in figures if figure)

    def _take(self, chat: ChatId, measure: Callable[[ChatId], meter.TreeUsage]) -> meter.TreeUsage:
        started, known = self._clock(), self._figures.get(chat)
        usage = measure(chat)
        ended = self._clock()
        good_for_s = max(_GOOD_FOR_S, _GOOD_FOR_PER_COST * (ended - started))
        # Where there was too much to count, it is no less than what was counted before.
        least = known[0] if known and not usage.complete else 0
        self._figures[chat] = max(usage.allocated_bytes, least), ended + good_for_s
        return usage


@dataclass(frozen=True)
class ChatDirectories:
    """A chat's trees on the host. `aliases` are the further mounts that the settings ask for.

    `skills` is the mount by which its sandbox sees skills, if it does. Unless they are
    `mounted` there are none, for the sandbox holds the chat's files itself. `user` is the one that
    sandboxes run as; where trees are `astray`, not all are of a user that can be the chat's.
    """

    workspace: Path
    home: Path
    workspace_inode: int
    aliases: tuple[Mount, ...] = ()
    skills: tuple[Mount, ...] = ()
    mounted: bool = True
    user: Owner | None = None
    astray: bool = False

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Return the mounts by which a sandbox sees them."""
        if not self.mounted:
            return ()
        home = Mount(self.home, HOME)
        return Mount(self.workspace, "/workspace"), home, *self.aliases, *self.skills


@dataclass(frozen=True)
class TrashItem:
    """Something discarded; whose it was, where that is known, and when, since the epoch."""

    name: str
    chat: ChatId | None
    discarded_at: float
    allocated_bytes: int


def name_server(data_root: Path) -> str:
    """Return the name of a data root on this machine; a copy draws another. Blocks on the disk."""
    folder, machine, known = data_root / "sandbox", Path("/etc/machine-id"), dict[str, Any]()
    with layout.sandbox_directory(data_root):
        found, note = folder.stat(), folder / "server"
        place = [machine.read_text() if machine.exists() else "", found.st_dev, found.st_ino]
        with suppress(ValueError):
            known = read_note(note) or {}
        if known.get("place") != place:
            host = re.sub(r"[^\w.-]", "-", socket.gethostname(), flags=re.ASCII)[:40]
            known = {"name": f"{host}-{secrets.token_hex(3)}", "place": place}
            write_note(note, known)
    return str(known["name"])


class Workspaces:
    """The trees of all chats of one data root. Several processes may use it at once.

    No sandbox of a chat may be running while its trees are moved, or given to another user: it
    would go on in the old ones. Any call raises StorageUnavailable when the root cannot be used.
    """

    def __init__(
        self,
        data_root: Path,
        *,
        users: SandboxUsers,
        settings: WorkspaceConfig | None = None,
        skills: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        """With `skills`, sandboxes see them; `now` gives seconds since the epoch."""
        self.data_root = data_root
        layout.parse_aliases(settings.aliases if settings else ())
        self.users = users
        self._settings = settings or WorkspaceConfig()
        self._skills = skills
        self._now = now
        self._totals = UserTotals()
        self._layout_limiter = anyio.CapacityLimiter(4)
        # Few at a time: measuring and deleting must leave the machine to the sandboxes.
        self._walk_limiter = anyio.CapacityLimiter(2)
        self._trash_limiter = anyio.CapacityLimiter(1)

    async def open(self, chat: ChatId) -> ChatDirectories:
        """Return the chat's trees, made if absent."""
        return await to_thread.run_sync(self._open, chat, limiter=self._layout_limiter)

    async def unite(self, chat: ChatId) -> int:
        """Give the trees of an open chat to one user of its own; return how many files moved."""
        paths = [f"{kind}/{chat.user}/chat-{chat.chat}".encode() for kind in _FILLED]
        limiter = self._walk_limiter
        return await to_thread.run_sync(unite, self.data_root, paths, self.users, limiter=limiter)

    async def discard(self, chat: ChatId) -> str:
        """Begin an empty workspace; the old one goes to the trash, as an item of this name."""
        limiter = self._layout_limiter
        thrown = await to_thread.run_sync(self._throw, chat, _DISCARDED, limiter=limiter)
        await self.open(chat)
        return thrown

    async def remove(self, chat: ChatId) -> None:
        """Throw all files of the chat into the trash; a chat without files is fine."""
        await to_thread.run_sync(self._throw, chat, _KINDS, limiter=self._layout_limiter)

    async def stage(self, chat: ChatId) -> ChatDirectories:
        """Return empty trees that are not the chat's yet; earlier ones are deleted."""
        return await to_thread.run_sync(self._stage, chat, limiter=self._layout_limiter)

    async def replace(self, chat: ChatId) -> None:
        """Make the staged trees the chat's; those that it has go to the trash."""
        await to_thread.run_sync(self._replace, chat, limiter=self._layout_limiter)

    async def take_back(self, item: TrashItem, chat: ChatId) -> None:
        """Make an item of the trash the chat's files, as `replace` does with staged trees."""
        await to_thread.run_sync(self._take_back, item, chat, limiter=self._layout_limiter)

    async def chats(self) -> Sequence[ChatId]:
        return await to_thread.run_sync(_chats, self.data_root, limiter=self._layout_limiter)

    async def exist(self, chat: ChatId) -> bool:
        return await to_thread.run_sync(self._path("workspace", chat).exists)

    async def trashed(self, *, measured: bool = True) -> Sequence[TrashItem]:
        """Return the items of the trash; their sizes are 0 unless `measured`."""
        return await to_thread.run_sync(self._trashed, measured, limiter=self._trash_limiter)

    async def empty_trash(
        self, *, is_due: Callable[[str], bool]
    ) -> tuple[Sequence[str], Sequence[str]]:
        """Delete items that are due by name, until cancelled; return the deleted and the failed."""
        return await to_thread.run_sync(self._empty_trash, is_due, limiter=self._trash_limiter)

    def skills_of(self, chat: ChatId) -> Path | None:
        """Return the tree of the chat's skills, None if sandboxes see none; `open` makes it."""
        return self._path("skills", chat) if self._skills else None

    def open_disk_usage(self, chat: ChatId) -> meter.DiskUsage:
        """Return a new meter for all files of the chat together; keep one per open chat."""
        measure_chat = functools.partial(self._measure, chat)
        return meter.DiskUsage(measure_chat, self._settings, limiter=self._walk_limiter)

    def _open(self, chat: ChatId) -> ChatDirectories:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            workspace, created = self._tree(stack, sandbox, "workspace", chat)
            self._tree(stack, sandbox, "home", chat)
            user = find_user(stack, sandbox, chat, self.users)
            if created and self._settings.subdirectories:
                layout.seed(workspace, user)
            planned = layout.plan(chat, self._settings.aliases)
            layout.make_aliases(sandbox, workspace, planned, user)
            kinds = ["workspace", "home"]
            if self._skills:
                skills, _ = self._tree(stack, sandbox, "skills", chat)
                layout.enter_shown(stack, skills, layout.SHOWN)
                kinds.append("skills")
            trees = {kind: self._path(kind, chat) for kind in kinds}
            found = chat_directories(trees, os.fstat(workspace).st_ino, planned, self.data_root)
            is_own = self.users.find(user[0]) and len(_owners(sandbox, chat)) < 2
            return replace(found, user=user, astray=not is_own)

    def _stage(self, chat: ChatId) -> ChatDirectories:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            user = layout.enter(stack, sandbox, _STAGED, chat.user)
            destroy(layout.enter(stack, sandbox, "trash"), user, tree_name(chat), self._now())
            place = layout.enter(stack, user, os.fsdecode(tree_name(chat)))
            owner = find_user(stack, sandbox, chat, self.users)
            for kind in _FILLED:
                os.close(layout.make_tree(place, kind.encode(), owner)[0])
            path, inode = self._path(_STAGED, chat), os.stat("workspace", dir_fd=place).st_ino
            return ChatDirectories(path / "workspace", path / "home", inode, user=owner)

    def _replace(self, chat: ChatId) -> None:
        self._throw(chat, _FILLED)
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            place = layout.enter(stack, sandbox, _STAGED, chat.user, os.fsdecode(tree_name(chat)))
            with suppress(OSError):
                os.rmdir("project", dir_fd=place)
            # The workspace goes last: without it the chat's files are not here.
            for kind in ("home", "workspace"):
                user = layout.enter(stack, sandbox, kind, chat.user)
                if kind == "workspace" and layout.exists(place, b"project"):
                    copies, _ = self._tree(stack, sandbox, "project", chat)
                    rename_new(place, b"project", copies, RESTORED)
                rename_new(place, kind.encode(), user, tree_name(chat))
            self._path(_STAGED, chat).rmdir()

    def _take_back(self, item: TrashItem, chat: ChatId) -> None:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            bin_ = layout.enter(stack, sandbox, "trash")
            stack.callback(os.close, place := open_directory(bin_, item.name.encode()))
            if item.chat != chat:
                # The chat that they were of may have others: no two chats have one user.
                with self.users.new(sandbox) as own:
                    os.chown("workspace", *own, dir_fd=place, follow_symlinks=False)
                paths = [f"trash/{item.name}/{kind}".encode() for kind in _FILLED]
                unite(self.data_root, paths, self.users)
            # The workspace goes last: without it the chat's files are not here.
            kinds = [kind for kind in reversed(_KINDS) if layout.exists(place, kind.encode())]
            self._throw(chat, kinds)
            for kind in kinds:
                user = layout.enter(stack, sandbox, kind, chat.user)
                rename_new(place, kind.encode(), user, tree_name(chat))
            _delete_item(bin_, item.name.encode(), lambda: None)

    def _throw(self, chat: ChatId, kinds: Sequence[str]) -> str:
        """Move those of the chat's trees that exist to the trash, as an item of this name."""
        trees: dict[str, tuple[int, bytes]] = {}
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            for kind in kinds:
                user = layout.enter(stack, sandbox, kind, chat.user)
                if layout.exists(user, tree_name(chat)):
                    # Opening restores the rights that moving the tree needs.
                    self._tree(stack, sandbox, kind, chat)
                    trees[kind] = (user, tree_name(chat))
            bin_ = layout.enter(stack, sandbox, "trash")
            return throw_away(bin_, trees, chat, self._now()) if trees else ""

    def _trashed(self, measured: bool) -> Sequence[TrashItem]:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            bin_ = layout.enter(stack, sandbox, "trash")
            found = [(name, read_owner(bin_, name), at) for name, at in list_items(bin_).items()]
            return [
                TrashItem(*each, _allocated_bytes(bin_, each[0]) if measured else 0)
                for each in found
            ]

    def _empty_trash(self, is_due: Callable[[str], bool]) -> tuple[Sequence[str], Sequence[str]]:
        with layout.sandbox_directory(self.data_root) as sandbox, ExitStack() as stack:
            bin_ = layout.enter(stack, sandbox, "trash")
            return empty(bin_, is_due=is_due, checkpoint=from_thread.check_cancelled)

    def _measure(
        self, chat: ChatId, checkpoint: meter.Checkpoint
    ) -> tuple[meter.TreeUsage, meter.FreeSpace]:
        with layout.sandbox_directory(self.data_root) as sandbox:
            if not self._settings.user_quota:
                return self._usage(sandbox, chat, checkpoint), meter.free_space(sandbox)
            own, others = self._totals.measure(
                chat,
                _list_chats(sandbox, chat.user),
                lambda one: self._usage(sandbox, one, checkpoint),
            )
            free = meter.free_space(sandbox)
            return own, replace(free, allowed_bytes=self._settings.user_quota - others)

    def _usage(self, sandbox: int, chat: ChatId, checkpoint: meter.Checkpoint) -> meter.TreeUsage:
        with ExitStack() as stack:
            roots = [
                self._tree(stack, sandbox, kind, chat)[0]
                for kind in _FILLED
                if layout.exists(layout.enter(stack, sandbox, kind, chat.user), tree_name(chat))
            ]
            # Twice the limit: a chat that is over it still sees a figure it can work down from.
            most = 2 * self._settings.max_files
            return meter.measure(roots, checkpoint=checkpoint, max_entries=most)

    def _tree(self, stack: ExitStack, sandbox: int, kind: str, chat: ChatId) -> tuple[int, bool]:
        """Open one of the chat's trees; the flag says whether it is new."""
        owner = (os.geteuid(), os.getegid())
        if kind != "skills":
            owner = find_user(stack, sandbox, chat, self.users)
        for _ in range(_ATTEMPTS):
            user = layout.enter(stack, sandbox, kind, chat.user)
            try:
                tree, created = layout.make_tree(user, tree_name(chat), owner)
            except FileNotFoundError:
                continue
            stack.callback(os.close, tree)
            return tree, created
        raise StorageUnavailable(
            f"{self._path(kind, chat)} disappears as often as it is made: end the program that "
            "deletes it, then try again"
        )

    def _path(self, kind: str, chat: ChatId) -> Path:
        return self.data_root / "sandbox" / kind / chat.user / f"chat-{chat.chat}"


async def drop_earlier(workspaces: Workspaces, chat: ChatId, keep: str) -> None:
    """Delete what else the chat has in the trash; it takes long, and if it fails, goes in a day."""
    with suppress(StorageUnavailable):
        items = await workspaces.trashed(measured=False)
        earlier = {each.name for each in items if each.chat == chat and each.name < keep}
        await workspaces.empty_trash(is_due=earlier.__contains__)


def _allocated_bytes(bin_: int, name: str) -> int:
    with suppress(OSError), closing_fd(open_directory(bin_, name.encode())) as item:
        return meter.measure([item], checkpoint=from_thread.check_cancelled).allocated_bytes
    return 0


def _owners(sandbox: int, chat: ChatId) -> Sequence[Owner]:
    """Return whose the chat's trees are, each once, the workspace's first."""
    found: dict[Owner, None] = {}
    for kind in _FILLED:
        with suppress(FileNotFoundError, NotADirectoryError):
            path = f"{kind}/{chat.user}/chat-{chat.chat}"
            status = os.stat(path, dir_fd=sandbox, follow_symlinks=False)
            if status.st_uid != os.geteuid():
                found[status.st_uid, status.st_gid] = None
    return list(found)


def find_user(stack: ExitStack, sandbox: int, chat: ChatId, users: SandboxUsers) -> Owner:
    """Return whose the chat's trees are; for a new chat a user, of whom `stack` makes the first."""
    found = _owners(sandbox, chat)
    return found[0] if found else stack.enter_context(users.new(sandbox))


def chat_directories(
    trees: Mapping[str, Path], inode: int, planned: layout.AliasPlan, data_root: Path
) -> ChatDirectories:
    """Return what a sandbox on these trees, by kind, is to mount; without skills it sees none."""
    workspace, skills = trees["workspace"], trees.get("skills")
    mounts = layout.alias_mounts(planned, workspace, data_root / "sandbox" / "alias")
    skill_mounts = (Mount(skills / layout.SHOWN, SKILLS, read_only=True),) if skills else ()
    return ChatDirectories(workspace, trees["home"], inode, mounts, skill_mounts)


def tree_name(chat: ChatId) -> bytes:
    """Return the name of a chat's tree in its user's directory."""
    return f"chat-{chat.chat}".encode()
