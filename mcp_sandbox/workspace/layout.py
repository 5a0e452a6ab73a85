"""Makes and checks the directories that `directory.Workspaces` is made of. Blocking."""

import errno
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.workspace.aliases import AliasPlan
from mcp_sandbox.workspace.beneath import (
    create_file,
    give,
    grant_owner,
    make_directory,
    make_link,
    open_directory,
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
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, NotADirectoryError) as exc:
        raise StorageUnavailable(
            f"the data directory {path} is not a directory: name another one"
        ) from exc
    status = os.fstat(root)
    if status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return root
    os.close(root)
    if status.st_uid != os.geteuid():
        raise StorageUnavailable(
            f"the data directory {path} belongs to uid {status.st_uid}, and this is uid "
            f"{os.geteuid()}: run as its owner, or name another data directory"
        )
    raise StorageUnavailable(
        f"others may write to the data directory {path}: run `chmod go-w {path}`, "
        "or name another data directory"
    )


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
        parent, _ = make_directory(parent, name.encode())
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
        tree, created = make_directory(parent, name, owner=owner)
    except PermissionError:
        grant_owner(parent, name)
        return open_directory(parent, name), False
    status = os.fstat(tree)
    if status.st_uid == os.geteuid():
        # The process that made it was killed before it gave it to the sandbox user.
        give(tree, owner)
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(tree, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
    return tree, created


def enter_shown(stack: ExitStack, parent: int, *names: str) -> int:
    """Open directories as `enter` does, of which a sandbox sees the last one."""
    shown = enter(stack, parent, *names)
    # Its parents are closed to others; through the mount the sandbox user must get in.
    os.fchmod(shown, 0o755)
    return shown


def seed(workspace: int, owner: tuple[int, int]) -> None:
    """Give a new workspace its usual directories and the three files of the agent's memory."""
    for name in SUBDIRECTORIES:
        directory, _ = make_directory(workspace, name.encode(), owner=owner)
        os.close(directory)
    for name, text in MEMORY_FILES.items():
        create_file(workspace, f".memory/{name}".encode(), text.encode(), owner=owner, mode=0o644)


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
                make_link(directory, name.encode(), text.encode(), owner=ours)
            for name in folder.mount_points:
                point, _ = make_directory(directory, name.encode(), mode=0o755)
                os.close(point)


def _make_inside(
    workspace: int, names: Sequence[str], link: tuple[str, str] | None, owner: tuple[int, int]
) -> None:
    with ExitStack() as stack:
        directory = workspace
        try:
            for name in names:
                directory, _ = make_directory(directory, name.encode(), owner=owner)
                stack.callback(os.close, directory)
            if link is not None:
                make_link(directory, link[0].encode(), link[1].encode(), owner=owner)
        except OSError as exc:
            if exc.errno not in _TAKEN:
                raise
