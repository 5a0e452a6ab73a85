"""What the backend keeps on disk for each container: a directory with its token and its socket.

It is made before the container and removed after it, so what a killed server leaves is found by
it. All functions block.
"""

import json
import math
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcp_sandbox.backends.process import ProcessId, is_alive, ourselves
from mcp_sandbox.backends.removal import remove_tree
from mcp_sandbox.errors import SandboxGone, StorageUnavailable
from mcp_sandbox.models import Network, SandboxId

# Longer than a creation can take.
_GRACE_S = 180.0
# Other backends keep their records beside ours; this file tells them apart.
_MARK = "container"
_LABELS = "labels"
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
        return "open" if self._note().get("network") == "open" else "none"

    def abandoned(self, after_s: float = math.inf) -> bool:
        """Whether the server that makes the container is dead, or has been at it for too long.

        So it is also when no record tells of one.
        """
        note = self._note()
        maker, made_s = note.get("maker"), note.get("made_s")
        # Not by the time of a file: a clock on the wall that jumps would make it old.
        if not isinstance(made_s, (int, float)) or _steady_s() - made_s > after_s:
            return True
        return not (isinstance(maker, dict) and is_alive(ProcessId(**maker)))

    def _note(self) -> dict[str, Any]:
        try:
            found = json.loads((self.path / _MARK).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def token(self) -> bytes:
        """The secret shared with the runner.

        Raises:
            SandboxGone: there is no record.
        """
        try:
            return bytes.fromhex((self.path / "token").read_text())
        except (FileNotFoundError, ValueError) as exc:
            raise self._unknown() from exc

    def _unknown(self) -> SandboxGone:
        return SandboxGone(
            f"nothing is known of sandbox {self.id}; "
            "the next call starts a new one on the same files"
        )

    def labels(self) -> dict[str, str] | None:
        """The labels that were given after the container was made; None when none were."""
        try:
            found = json.loads((self.path / _LABELS).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return {str(name): str(found[name]) for name in found} if isinstance(found, dict) else None

    def relabel(self, labels: Mapping[str, str]) -> None:
        """Remember other labels than the container's own, which an engine never changes.

        Raises:
            SandboxGone: there is no record.
            StorageUnavailable: it cannot be written.
        """
        new = self.path / f"{_LABELS}.new"
        try:
            new.write_text(json.dumps(dict(labels)))
            new.rename(self.path / _LABELS)
        except FileNotFoundError as exc:
            raise self._unknown() from exc
        except OSError as exc:
            raise StorageUnavailable(
                f"cannot write {self.path} ({exc.strerror}): free space, or set another data_dir"
            ) from exc

    def write(self, token: bytes, network: Network, *, hand_over: bool = False) -> None:
        """Make the directory; the socket's place belongs to the sandbox for now.

        With `hand_over` the token is there too: the runner takes it away before it runs anything.

        Raises:
            StorageUnavailable: it cannot be written.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            note = {"network": network, "maker": asdict(ourselves()), "made_s": _steady_s()}
            (self.path / _MARK).write_text(json.dumps(note))
            places = [self.path, self.sockets] if hand_over else [self.path]
            self.sockets.mkdir(mode=0o700)
            for place in places:
                secret = os.open(place / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(secret, "w") as file:
                    file.write(token.hex())
            if os.geteuid() == 0:
                for path in (self.sockets, *self.sockets.iterdir()):
                    os.chown(path, *sandbox_user())
            # After that: code inside must not be able to write to it.
            (self.sockets / "hosts").write_text("127.0.0.1 localhost sandbox\n::1 localhost\n")
            (self.sockets / "hosts").chmod(0o644)
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
            remove_tree(self.sockets)
        # The mark goes last: without it nobody would know whose directory this is.
        for name in ("token", _LABELS, f"{_LABELS}.new", _MARK):
            (self.path / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self.path.rmdir()


def sandbox_user() -> tuple[int, int]:
    """The uid and gid of sandboxes: the server's own, but never root's."""
    return (os.geteuid(), os.getegid()) if os.geteuid() != 0 else (_SANDBOX_UID, _SANDBOX_UID)


def stale_records(folder: Path, present: Collection[str]) -> list[Record]:
    """Records whose containers have gone by themselves, or never came."""
    if not folder.is_dir():
        return []
    marked = [
        Record(path)
        for path in folder.iterdir()
        if path.name not in present and (path / _MARK).exists()
    ]
    return [record for record in marked if record.abandoned(_GRACE_S)]


def _steady_s() -> float:
    """Seconds since the machine started, asleep or not."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
