"""Moves files and trees, over mounts too, and never onto something by accident."""

from __future__ import annotations

import errno
import os
import os.path
import stat
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner import libc
from mcp_sandbox.runner.files.copying import copy_tree
from mcp_sandbox.runner.files.paths import TEMPORARY, protect, relative, resolve, show
from mcp_sandbox.runner.files.removal import remove_tree
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from mcp_sandbox.runner.files.call import Call

_NOREPLACE = 1
_AT_FDCWD = -100
_NOT_OFFERED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def move(call: Call) -> dict[str, Any]:
    """Give a file, link or directory another name. `destination` is that name in full."""
    source = resolve(call.text("source"))
    destination = resolve(call.text("destination"))
    overwrite = call.flag("overwrite")
    os.lstat(source)
    protect(source, "moved")
    protect(destination, "replaced")
    _refuse_nonsense(source, destination)
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    replaced = os.path.lexists(destination)
    if replaced and not overwrite:
        raise _taken(destination)
    _rename(source, destination, overwrite=overwrite)
    return {
        "source": relative(source),
        "destination": relative(destination),
        "replaced": replaced,
    }


def _refuse_nonsense(source: str, destination: str) -> None:
    if source == destination:
        raise OpError("invalid", "source and destination are the same: give a new name")
    real = os.path.realpath(source)
    inside = os.path.realpath(os.path.dirname(destination)) + "/"
    if not os.path.islink(source) and os.path.isdir(source) and inside.startswith(real + "/"):
        raise OpError(
            "invalid", f"{show(destination)} is inside {show(source)}: choose a place outside it"
        )


def _taken(destination: str) -> OpError:
    if os.path.isdir(destination):
        return OpError(
            "exists",
            f"{show(destination)} is an existing directory: give the full new name, such as "
            f"{show(destination)}/name",
        )
    return OpError(
        "exists", f"{show(destination)} exists: choose another name or pass overwrite=true"
    )


def _rename(source: str, destination: str, *, overwrite: bool) -> None:
    try:
        _rename_here(source, destination, overwrite=overwrite)
    except FileExistsError as exc:
        raise _taken(destination) from exc
    except OSError as exc:
        if exc.errno == errno.ENOTEMPTY:
            raise OpError(
                "exists", f"{show(destination)} is a directory with content: delete it first"
            ) from exc
        if exc.errno != errno.EXDEV:
            raise
        _move_across(source, destination, overwrite=overwrite)


def _rename_here(source: str, destination: str, *, overwrite: bool) -> None:
    if not overwrite:
        _rename_new(source, destination)
        return
    os.rename(source, destination)
    # The kernel does nothing when both names are hard links of one file.
    if os.path.lexists(source) and os.path.samestat(os.lstat(source), os.lstat(destination)):
        os.unlink(source)


def _rename_new(source: str, destination: str) -> None:
    """Rename, failing when the destination exists by then."""
    try:
        failed = _renameat2(os.fsencode(source), os.fsencode(destination))
    except AttributeError:
        failed = errno.ENOSYS
    if failed in _NOT_OFFERED:
        if os.path.lexists(destination):
            raise FileExistsError(errno.EEXIST, "it exists", destination)
        os.rename(source, destination)
    elif failed:
        raise OSError(failed, os.strerror(failed))


def _renameat2(source: bytes, destination: bytes) -> int:
    """The kernel's rename that refuses to replace; returns 0 or its error number."""
    rename = libc.function("renameat2")
    done = rename(_AT_FDCWD, source, _AT_FDCWD, destination, _NOREPLACE)
    return 0 if done == 0 else libc.last_error()


def _move_across(source: str, destination: str, *, overwrite: bool) -> None:
    """Copy beside the destination, put the copy in place in one step, then delete the source."""
    name = TEMPORARY + os.urandom(8).hex()
    draft = os.path.join(os.path.dirname(destination), name)
    try:
        copy_tree(source, draft)
        _rename_here(draft, destination, overwrite=overwrite)
    except BaseException:
        _remove(draft)
        raise
    _remove(source)


def _remove(path: str) -> None:
    if not os.path.lexists(path):
        return
    if stat.S_ISDIR(os.lstat(path).st_mode):
        remove_tree(path)
    else:
        os.unlink(path)
