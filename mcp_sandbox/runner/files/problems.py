"""Turns the kernel's refusals into answers that say what happened and what to do next.

This is the only place that does so: operations let OSError pass.
"""

from __future__ import annotations

import errno
import os
import os.path
from typing import TYPE_CHECKING, Any

from mcp_sandbox.runner.files.call import Call
from mcp_sandbox.runner.files.paths import show, workspace
from mcp_sandbox.runner.protocol import OpError

if TYPE_CHECKING:
    from collections.abc import Callable

    Op = Callable[..., dict[str, Any]]
    Operation = Callable[[Call], dict[str, Any]]

# How many names of a directory are compared with a missing one.
_LOOKED_AT = 2000
_FULL = ("no_space", "no space is left there: delete files that are no longer needed, then retry")
_DENIED = (
    "permission",
    "the sandbox user may not do this: check owner and mode with 'ls -la', or use another place",
)
_ANSWERS: dict[int, tuple[str, str]] = {
    errno.ENOENT: ("not_found", "no such file or directory: look with list_files or glob"),
    errno.EEXIST: ("exists", "it exists already: choose another name or delete it first"),
    errno.ENOTDIR: ("wrong_kind", "a file is where a directory is needed: check the path"),
    errno.EISDIR: ("wrong_kind", "it is a directory: name a file"),
    errno.ENOTEMPTY: ("wrong_kind", "the directory is not empty: delete its content first"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: (
        "permission",
        "that place is read-only: use the workspace, the home directory or /tmp",
    ),
    errno.ETXTBSY: ("permission", "the program is running: stop it first"),
    errno.EBUSY: ("permission", "it is in use or a mount point: choose another path"),
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: ("too_large", "the file would pass the size limit: write less or split it"),
    errno.ELOOP: ("invalid", "its symbolic links form a loop: name the real file"),
    errno.ENAMETOOLONG: ("invalid", "the name is too long: use at most 255 bytes for each part"),
    errno.EINVAL: ("invalid", "the system does not accept this: check the arguments"),
    errno.ENXIO: ("wrong_kind", "it is not a regular file: use exec to talk to it"),
    errno.EOPNOTSUPP: ("unsupported", "the file system there cannot do this: use the workspace"),
}


def explain(error: OSError, path: str) -> OpError:
    """The answer for a refusal; `path` is used when the error names no path of its own."""
    own = error.filename
    name = own if isinstance(own, str) and own.startswith("/") else path
    if isinstance(error, FileNotFoundError) and name.startswith("/"):
        return OpError("not_found", f"{show(name)}: no such file or directory: {_nearby(name)}")
    reason = os.strerror(error.errno) if error.errno else str(error)
    code, sentence = _ANSWERS.get(
        error.errno or 0, ("invalid", f"{reason}: check the path and try again")
    )
    return OpError(code, f"{show(name)}: {sentence}")


def _nearby(path: str) -> str:
    parent, name = os.path.split(path)
    if os.path.lexists(path):
        return "it is a link whose target does not exist"
    if "*" in path or "?" in path:
        return "a path is one name, no pattern: find names with glob, or use exec (rm, mv, cat)"
    ends = (path.split("/", at)[at] for at in range(1, path.count("/") + 1))
    known = [end for end in ends if os.path.exists(os.path.join(workspace(), end))]
    if likely := known[:1] or _similar(parent, name):
        return f"did you mean {' or '.join(map(show, likely))}?"
    if os.path.isdir(parent):
        return "look with list_files or glob"
    while parent != "/" and not os.path.lexists(parent):
        name = os.path.basename(parent)
        parent = os.path.dirname(parent)
    return f"{show(parent)} is there, but has no {show(name)}. Look with list_files or glob"


def _similar(directory: str, name: str) -> list[str]:
    # Only a missing file needs it, and it takes some milliseconds to import.
    from difflib import get_close_matches  # noqa: PLC0415

    try:
        with os.scandir(directory) as found:
            names = [entry.name for entry, _ in zip(found, range(_LOOKED_AT))]
    except OSError:
        return []
    same = [other for other in names if other.lower() == name.lower()]
    return same or get_close_matches(name, names, 3, 0.7)


def explained(operation: Operation) -> Op:
    """The operation, with refusals of the kernel as OpError."""

    def run(args: dict[str, Any], stdin: int, stdout: int, end: bytes = b"") -> dict[str, Any]:
        try:
            return operation(Call(args, stdin, stdout, end))
        except BrokenPipeError:
            # Nobody takes the body any more: nothing about the file.
            raise
        except OSError as exc:
            named = args.get("path", args.get("source"))
            raise explain(exc, named if isinstance(named, str) else "?") from exc

    return run
