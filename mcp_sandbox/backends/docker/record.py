"""What the backend keeps on disk for each container: a directory with its token and its socket.

It is made before the container and removed after it, so what a killed server leaves is found by
it. All functions block.
"""

import os
import shutil
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.errors import SandboxGone, StorageUnavailable
from mcp_sandbox.models import Network, SandboxId

# Longer than a creation can take: the container of a younger record may be about to appear.
_GRACE_S = 180.0
# Other backends keep their records beside ours; this file tells them apart.
_MARK = "container"
_SANDBOX_UID = 10001


@dataclass(frozen=True)
class Record:
    """The directory of one container."""

    path: Path

    @property
    def id(self) -> SandboxId:
        return SandboxId(self.path.name)

    @property
    def sockets(self) -> Path:
        return self.path / "sock"

    def network(self) -> Network:
        """Which network the container was asked to have; "none" also when nothing tells."""
        try:
            return "open" if (self.path / _MARK).read_text() == "open" else "none"
        except FileNotFoundError:
            return "none"

    def token(self) -> bytes:
        """The secret shared with the runner.

        Raises:
            SandboxGone: there is no record.
        """
        try:
            return bytes.fromhex((self.path / "token").read_text())
        except (FileNotFoundError, ValueError) as exc:
            raise SandboxGone(
                f"nothing is known of sandbox {self.id}; "
                "the next call starts a new one on the same files"
            ) from exc

    def write(self, token: bytes, network: Network) -> None:
        """Make the directory; the socket's place belongs to the sandbox for now.

        Raises:
            StorageUnavailable: it cannot be written.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            (self.path / _MARK).write_text(network)
            secret = os.open(self.path / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(secret, "w") as file:
                file.write(token.hex())
            self.sockets.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(self.sockets, *sandbox_user())
        except OSError as exc:
            raise StorageUnavailable(
                f"cannot write {self.path} ({exc.strerror}): free space, or set another data_dir"
            ) from exc

    def close_sockets(self) -> None:
        """Take the socket's place from the sandbox, so that nothing can be put there any more."""
        if os.geteuid() != 0:
            # The sandbox runs as our own user: the token alone tells its runner from a fake.
            return
        folder = os.open(self.sockets, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchown(folder, 0, 0)
            os.fchmod(folder, 0o711)
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Remove the directory; absent is fine, and another backend's is left alone."""
        if not (self.path / _MARK).exists():
            return
        with suppress(FileNotFoundError):
            shutil.rmtree(self.path)


def sandbox_user() -> tuple[int, int]:
    """The uid and gid of sandboxes: the server's own, but never root's."""
    return (os.geteuid(), os.getegid()) if os.geteuid() != 0 else (_SANDBOX_UID, _SANDBOX_UID)


def stale_records(folder: Path, alive: Collection[str]) -> list[Record]:
    """Records whose containers have gone by themselves."""
    if not folder.is_dir():
        return []
    youngest = time.time() - _GRACE_S
    return [
        Record(path)
        for path in folder.iterdir()
        if path.name not in alive and (path / _MARK).exists() and path.stat().st_mtime < youngest
    ]
