"""Makes and checks the directories that `directory.Workspaces` is made of. Blocking.

An alias is a further path under which a chat finds the same files. It is written "/path" (the
workspace) or "/path=name" (the directory `name` in it), with {user} and {chat} replaced. How it is
made differs:

- The workspace elsewhere is a mount of the workspace: only the server can change its host path.
- A directory of the workspace elsewhere is a link in a small read-only mounted folder.
  It must not be a mount: user code can swap that directory for a link to anywhere, and an engine
  that mounts by path would follow it on the host.
- Anything beneath /workspace is a relative link in the workspace. A mount there would leave
  mount points, owned by root, in the user's tree and show every file twice.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from mcp_sandbox.durable import check_trusted, make_folder
from mcp_sandbox.errors import ConfigError, StorageUnavailable
from mcp_sandbox.models import ChatId, Mount
from mcp_sandbox.workspace import beneath

WORKSPACE = "/workspace"
_COMPONENT = re.compile(r"[A-Za-z0-9._-]{1,255}")
_SYSTEM = re.compile(
    r"bin|boot|dev|etc|home|lib|lib32|lib64|libx32|lost\+found|opt|proc|root|run|sbin|sys|tmp|usr|var"
)
SHOWN = "view"
"""The folder in the tree of a chat's skills that its sandbox sees."""
SUBDIRECTORIES = ("code", "data", "output", "artifacts", "temp", ".memory")
MEMORY_FILES = {
    "task_plan.md": "# Task plan\n",
    "findings.md": "# Findings\n",
    "progress.md": "# Progress\n",
}
# What the chat itself may have put in the way of an alias. Its own files win.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EXDEV})
_REMEDIES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your disk quota",
    errno.EROFS: "mount it writable, or name another data directory",
    errno.EACCES: "let this user own it, or name another data directory",
    errno.EPERM: "let this user own it, or name another data directory",
    errno.ELOOP: "replace the link below it by a directory: links are not followed there",
    errno.EXDEV: "mount the whole data directory instead of a part of it",
    errno.ENOTDIR: "remove the file that is where a directory belongs",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


@dataclass(frozen=True)
class Alias:
    """`target` is a path in the sandbox, `directory` a name in the workspace, "" for all of it."""

    target: str
    directory: str = ""


@dataclass(frozen=True)
class LinkFolder:
    """A read-only folder of links, mounted at `target`: (name, link text) each.

    `mount_points` are the names in it where other mounts go.
    """

    target: str
    links: tuple[tuple[str, str], ...]
    mount_points: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name on the host that stands for exactly this content, so that it never changes."""
        return hashlib.sha256(repr((self.links, self.mount_points)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class AliasPlan:
    """What to make for the aliases of one chat."""

    directories: tuple[str, ...]
    """Names in the workspace that must be there."""
    inner_links: tuple[tuple[str, str], ...]
    """(path beneath the workspace, link text)."""
    folders: tuple[LinkFolder, ...]
    mounts: tuple[str, ...]
    """Where the workspace is mounted again."""


def parse_aliases(templates: Iterable[str]) -> tuple[Alias, ...]:
    """Parse aliases, keeping placeholders; ConfigError says which cannot be used and why."""
    aliases = tuple(_parse(template) for template in templates)
    sample = ChatId("user", "chat")
    targets = [PurePosixPath(_fill(alias.target, sample)) for alias in aliases]
    for index, target in enumerate(targets):
        for other in targets[:index]:
            if target.is_relative_to(other) or other.is_relative_to(target):
                raise ConfigError(
                    f"aliases {str(other)!r} and {str(target)!r} lie in one another: drop one"
                )
    return aliases


def plan(chat: ChatId, templates: Iterable[str]) -> AliasPlan:
    """Return what to make for this chat's aliases."""
    inner_links: list[tuple[str, str]] = []
    mounts: list[str] = []
    links: dict[str, list[tuple[str, str]]] = {}
    aliases = parse_aliases(templates)
    for alias in aliases:
        target = _fill(alias.target, chat)
        parent, _, name = target.rpartition("/")
        if target.startswith(WORKSPACE + "/"):
            path = target.removeprefix(WORKSPACE + "/")
            up = [".."] * path.count("/")
            inner_links.append(
                (path, "/".join([*up, alias.directory] if alias.directory else up or ["."]))
            )
        elif alias.directory:
            links.setdefault(parent, []).append((name, f"{WORKSPACE}/{alias.directory}"))
        else:
            mounts.append(target)
    return AliasPlan(
        directories=tuple(sorted({alias.directory for alias in aliases if alias.directory})),
        inner_links=tuple(inner_links),
        folders=tuple(
            LinkFolder(parent, tuple(sorted(found)), _children(parent, mounts))
            for parent, found in sorted(links.items())
        ),
        mounts=tuple(mounts),
    )


def alias_mounts(planned: AliasPlan, workspace: Path, folders: Path) -> tuple[Mount, ...]:
    """Return the mounts, parents first; `folders` is the host directory of the link folders."""
    mounts = [Mount(folders / each.name, each.target, read_only=True) for each in planned.folders]
    mounts += [Mount(workspace, target) for target in planned.mounts]
    return tuple(sorted(mounts, key=lambda mount: mount.target.count("/")))


def _parse(template: str) -> Alias:
    target, _, directory = template.partition("=")
    parts, why = target.split("/"), ""
    if parts[0] or len(parts) < 2 or not all(_is_plain(part) for part in parts[1:]):
        why = (
            'a path begins with "/" and has no empty, "." or ".." parts, only letters, '
            'digits, ".", "_", "-", {user} and {chat}'
        )
    elif _SYSTEM.fullmatch(parts[1]) or "{" in parts[1] or target == WORKSPACE:
        why = "it would cover a part of the system: try one beneath /mnt"
    elif "=" in template and not (_COMPONENT.fullmatch(directory) and directory not in (".", "..")):
        why = 'after "=" comes the name of one directory in the workspace'
    elif directory and len(parts) < 3:
        why = "an alias of a directory needs a parent: try one beneath /mnt"
    if why:
        raise ConfigError(f"workspace alias {template!r} cannot be used: {why}")
    return Alias(target, directory)


def _is_plain(part: str) -> bool:
    filled = part.replace("{user}", "u").replace("{chat}", "c")
    return bool(_COMPONENT.fullmatch(filled)) and filled not in (".", "..")


def _fill(target: str, chat: ChatId) -> str:
    return target.replace("{user}", chat.user).replace("{chat}", chat.chat)


def _children(parent: str, targets: Iterable[str]) -> tuple[str, ...]:
    """Return the first component beneath `parent` of each target that lies there."""
    inside = (each for each in targets if each.startswith(parent + "/"))
    return tuple(sorted({each.removeprefix(parent + "/").partition("/")[0] for each in inside}))


@contextmanager
def storage_errors(data_root: Path) -> Generator[None]:
    """Turn OSError into StorageUnavailable with a remedy."""
    try:
        yield
    except OSError as exc:
        remedy = _REMEDIES.get(exc.errno or 0, "check the disk, or name another data directory")
        raise StorageUnavailable(
            f"the data directory {data_root} cannot be used ({exc}): {remedy}"
        ) from exc


def open_data_root(path: Path) -> int:
    """Open the data root, made when absent; StorageUnavailable unless it is ours alone to write."""
    try:
        make_folder(path)
        _check_trusted(path, path.stat().st_ctime_ns)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError) as exc:
        raise StorageUnavailable(
            f"the data directory {path} is not a directory: name another one"
        ) from exc


@lru_cache
def _check_trusted(path: Path, _changed: int) -> None:
    """Check it when it has changed: sandboxes are started by it."""
    check_trusted(path)


@contextmanager
def sandbox_directory(data_root: Path) -> Generator[int]:
    """Open the directory `sandbox` of a data root; an OSError in the block: StorageUnavailable."""
    with storage_errors(data_root), ExitStack() as stack:
        root = open_data_root(data_root)
        stack.callback(os.close, root)
        sandbox = enter(stack, root, "sandbox")
        enter(stack, sandbox, "workspace")
        # Where "A" and "a" are one name, two chats could share a tree.
        if exists(sandbox, b"WORKSPACE"):
            raise StorageUnavailable(
                f"the file system of the data directory {data_root} does not tell upper from lower "
                "case, so that chats could share files: name a data directory on another file "
                "system"
            )
        yield sandbox


def enter(stack: ExitStack, parent: int, *names: str) -> int:
    """Open nested private directories, made if absent; `stack` closes them."""
    for name in names:
        parent, _ = beneath.make_directory(parent, name.encode())
        stack.callback(os.close, parent)
    return parent


def exists(parent: int, name: bytes) -> bool:
    """Return whether the name exists, also as a broken link."""
    try:
        os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def make_tree(parent: int, name: bytes, owner: tuple[int, int]) -> tuple[int, bool]:
    """Open a chat's tree, made for `owner` when absent; the flag says whether it was made."""
    try:
        tree, created = beneath.make_directory(parent, name, owner=owner)
    except PermissionError:
        beneath.grant_owner(parent, name)
        return beneath.open_directory(parent, name), False
    status = os.fstat(tree)
    if status.st_uid == os.geteuid():
        # The process that made it was killed before it gave it to the sandbox user.
        beneath.give(tree, owner)
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(tree, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
    return tree, created


def enter_shown(stack: ExitStack, parent: int, *names: str) -> int:
    """Open directories as `enter` does, of which a sandbox sees the last one."""
    place = enter(stack, parent, *names)
    # Its parents are closed to others; through the mount the sandbox user must get in.
    os.fchmod(place, 0o755)
    return place


def seed(workspace: int, owner: tuple[int, int]) -> None:
    """Give a new workspace its usual directories and the three files of the agent's memory."""
    for name in SUBDIRECTORIES:
        directory, _ = beneath.make_directory(workspace, name.encode(), owner=owner)
        os.close(directory)
    for name, text in MEMORY_FILES.items():
        beneath.create_file(
            workspace, f".memory/{name}".encode(), text.encode(), owner=owner, mode=0o644
        )


def make_aliases(sandbox: int, workspace: int, planned: AliasPlan, owner: tuple[int, int]) -> None:
    """Make what the aliases of a workspace need, in it and beside it."""
    for name in planned.directories:
        _make_inside(workspace, [name], None, owner)
    for path, text in planned.inner_links:
        *parents, name = path.split("/")
        _make_inside(workspace, parents, (name, text), owner)
    with ExitStack() as stack:
        # Every sandbox may read such a folder; a complete one is left as it is.
        for folder in planned.folders:
            directory = enter_shown(stack, sandbox, "alias", folder.name)
            for name, text in folder.links:
                ours = (os.geteuid(), os.getegid())
                beneath.make_link(directory, name.encode(), text.encode(), owner=ours)
            for name in folder.mount_points:
                point, _ = beneath.make_directory(directory, name.encode(), mode=0o755)
                os.close(point)


def _make_inside(
    workspace: int, names: Sequence[str], link: tuple[str, str] | None, owner: tuple[int, int]
) -> None:
    with ExitStack() as stack:
        directory = workspace
        try:
            for name in names:
                directory, _ = beneath.make_directory(directory, name.encode(), owner=owner)
                stack.callback(os.close, directory)
            if link is not None:
                beneath.make_link(directory, link[0].encode(), link[1].encode(), owner=owner)
        except OSError as exc:
            if exc.errno not in _TAKEN:
                raise
