"""Removes directories that code in a sandbox could write to."""

import os
import secrets
from pathlib import Path


def remove_tree(directory: Path) -> None:
    """Remove a directory that nothing changes any more, however deep code has made it.

    Directories are moved up to the first level before they are emptied, so no path grows long.
    """
    moved = 0
    directory.chmod(0o700)
    while inner := _unlink_files(directory):
        for child in inner:
            child.chmod(0o700)
            for grandchild in _unlink_files(child):
                moved += 1
                # Only who may write to a directory may move it elsewhere.
                grandchild.chmod(0o700)
                grandchild.rename(directory / f"{secrets.token_hex(8)}-{moved}")
            child.rmdir()
    directory.rmdir()


def _unlink_files(directory: Path) -> list[Path]:
    """Unlink everything but directories; returns these."""
    inner: list[Path] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                inner.append(Path(entry.path))
            else:
                Path(entry.path).unlink()
    return inner
