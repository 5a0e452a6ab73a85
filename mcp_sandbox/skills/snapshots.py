"""Copies of skills that never change, each named after its digest. Blocking.

    {data root}/sandbox/snapshots/{user}/sha256-{hex}/{the skill's files}
                                         new-{random}/                  one that is being made

Each user has copies of its own: what links to one file can be told by it, and locked by another.
A copy gets its name only when it is whole, and is looked through before this process uses it for
the first time. Chats have hard links to its files: as long as one has, the copy is kept.

Files are 0444; those that begin with "#!" are 0555, whatever their source was: most skills come
without such bits. The same bytes so always make the same copy.
"""

import errno
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from mcp_sandbox.errors import TooLarge
from mcp_sandbox.skills.contents import gather
from mcp_sandbox.skills.uris import DOCUMENT
from mcp_sandbox.workspace import layout, trash

KEPT_S = 24 * 3600.0
_KIND = "snapshots"
_NEW = "new-"
_NO_LINK = frozenset({errno.EMLINK, errno.EXDEV, errno.EPERM, errno.ENOTSUP})


class Snapshots:
    """The copies of one data root. Several processes may use it at once."""

    def __init__(self, data_root: Path, *, kept_s: float = KEPT_S) -> None:
        """`kept_s` is how long a copy is kept that no chat has."""
        self._data_root = data_root
        self._kept_s = kept_s
        self._store = data_root / "sandbox" / _KIND
        self._seen: set[Path] = set()

    def has(self, user: str, digest: str) -> bool:
        """Whether there is a copy; one that has been damaged is thrown away.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        folder = self._folder(user, digest)
        if not folder.is_dir():
            self._seen.discard(folder)
            return False
        if folder not in self._seen:
            if not is_whole(folder, digest):
                self._destroy(folder)
                return False
            self._seen.add(folder)
        return True

    def add(self, user: str, digest: str, files: Mapping[str, bytes]) -> None:
        """Make a copy, from the bytes of all files; one that is there already stays.

        Raises:
            StorageUnavailable: it cannot be written.
        """
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            layout.enter(stack, sandbox, _KIND, user)
            folder = self._folder(user, digest)
            new = folder.with_name(f"{_NEW}{secrets.token_hex(8)}")
            try:
                _write(new, files)
                new.rename(folder)
            except OSError as exc:
                self._destroy(new)
                if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
        self._seen.add(folder)

    def clone(self, user: str, digest: str, target: Path, *, link: bool) -> None:
        """Make an empty folder of ours the same, with links to the same files or with copies.

        Raises:
            FileNotFoundError: there is no such copy any more.
            OSError: it cannot be written.
        """
        source = self._folder(user, digest)
        for folder, _, names in os.walk(source, onerror=_fail):
            inside = target / Path(folder).relative_to(source)
            inside.mkdir(mode=0o755, exist_ok=True)
            for name in names:
                _put(Path(folder) / name, inside / name, link=link)
        _close_folders(target)

    def release(self, user: str, digest: str) -> None:
        """Delete a copy, now that one chat has it no more, unless another has.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        folder = self._folder(user, digest)
        if _unused_bytes(folder, math.inf) is not None:
            self._destroy(folder)

    def sweep(self, *, dry_run: bool = False) -> Iterator[tuple[str, int]]:
        """Delete the copies that no chat has had for long; yields their names and bytes.

        Raises:
            StorageUnavailable: the data root cannot be used.
        """
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            layout.enter(stack, sandbox, _KIND)
            for folder in sorted(self._store.glob("*/*")):
                size = _unused_bytes(folder, time.time() - self._kept_s)
                if size is None:
                    continue
                if not dry_run:
                    self._destroy(folder)
                yield f"{folder.parent.name}/{folder.name}", size

    def _folder(self, user: str, digest: str) -> Path:
        return self._store / user / digest.replace(":", "-", 1)

    def _destroy(self, folder: Path) -> None:
        with layout.sandbox_directory(self._data_root) as sandbox, ExitStack() as stack:
            store = layout.enter(stack, sandbox, _KIND, folder.parent.name)
            bin_ = layout.enter(stack, sandbox, "trash")
            trash.destroy(bin_, store, folder.name.encode(), time.time())


def is_whole(folder: Path, digest: str, *, anchor: Path | None = None) -> bool:
    """Whether a copy holds exactly what its digest says."""
    try:
        return gather(folder, DOCUMENT, anchor=anchor).contents.digest == digest
    except (OSError, TooLarge):
        return False


def _write(new: Path, files: Mapping[str, bytes]) -> None:
    new.mkdir(mode=0o755)
    for path, data in files.items():
        place = new / path
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with place.open("xb") as file:
            file.write(data)
            os.fchmod(file.fileno(), 0o555 if data.startswith(b"#!") else 0o444)
    _close_folders(new)


def _close_folders(top: Path) -> None:
    """Make all folders read-only but the topmost, which has to be moved yet."""
    for folder, _, _ in os.walk(top, topdown=False, onerror=_fail):
        Path(folder).chmod(0o755 if Path(folder) == top else 0o555)


def _put(source: Path, target: Path, *, link: bool) -> None:
    if link:
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError as exc:
            if exc.errno not in _NO_LINK:
                raise
        else:
            return
    shutil.copyfile(source, target, follow_symlinks=False)
    target.chmod(stat.S_IMODE(source.stat().st_mode))


def _unused_bytes(folder: Path, since: float) -> int | None:
    """The bytes of a copy whose files nobody else has, and nobody had since; else None."""
    size = 0
    try:
        if folder.stat().st_ctime > since:
            return None
        for place, _, names in os.walk(folder, onerror=_fail):
            for name in names:
                found = (Path(place) / name).lstat()
                # A link that is made or removed shows in the time.
                if found.st_nlink > 1 or found.st_ctime > since:
                    return None
                size += found.st_blocks * 512
    except FileNotFoundError:
        return None
    return size


def _fail(exc: OSError) -> None:
    raise exc
