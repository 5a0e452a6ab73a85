"""Replaces a file as a whole: whenever a machine stops, the old or the new is there. Blocking."""

import os
from pathlib import Path


def replace(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Write a file beside it and let that take its place. Only one may do so at a time.

    Raises:
        OSError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(descriptor)
    draft.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Let the names in a folder outlive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
