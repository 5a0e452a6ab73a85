"""Locks that die with their process: one daemon per data root, one listener per socket.

The file of a lock says who holds it. It is never deleted: a lock on a deleted file guards nothing.
"""

import fcntl
import json
import os
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.errors import AlreadyServed, StorageUnavailable

_MAX_BYTES = 8192
# A daemon that leaves waits for its running calls and ends its sandboxes.
_LEAVING_S = 60.0
_LOOK_AGAIN_S = 0.05


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. `started` is an ISO time; `leaving`: it will let go soon."""

    pid: int
    version: str
    socket: str
    started: str
    leaving: bool = False


class Lock:
    """One lock file. All methods block for a moment: call them in a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, holder: Holder) -> bool:
        """Take the lock unless another process has it.

        Raises:
            StorageUnavailable: the file cannot be made.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise StorageUnavailable(
                f"the lock {self._path} cannot be made: {exc.strerror}; make its folder writable"
            ) from exc
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._file = file
        self.describe(holder)
        return True

    def describe(self, holder: Holder) -> None:
        """Write down who holds it, for those who are refused."""
        if self._file is not None:
            text = json.dumps(asdict(holder)).encode()
            # Blanks wipe out what was there, so that a reader never meets an empty file.
            os.pwrite(self._file, text.ljust(os.fstat(self._file).st_size), 0)

    def release(self) -> None:
        """Let go; does nothing when it is not held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def holder(self) -> Holder | None:
        """Who holds it, as far as its file tells."""
        try:
            with self._path.open("rb") as file:
                return Holder(**json.loads(file.read(_MAX_BYTES)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None


class Claim:
    """The right to serve a data root on a socket: two locks, taken and given back together."""

    def __init__(self, data_root: Path, socket: Path, holder: Holder) -> None:
        self._data_root = data_root
        self._socket = socket
        self.holder = holder
        self._root_lock = Lock(data_root / "sandbox" / "daemon.lock")
        self._socket_lock = Lock(socket.with_name(f"{socket.name}.lock"))

    def take(self) -> Holder | None:
        """Take both, or neither; who is in the way, None = nobody.

        Raises:
            StorageUnavailable: a lock file cannot be made.
            AlreadyServed: a daemon that stays holds one of them.
        """
        if not self._root_lock.acquire(self.holder):
            return _leaving(self._root_lock, f"serves {self._data_root}")
        try:
            if self._socket_lock.acquire(self.holder):
                return None
            found = _leaving(self._socket_lock, f"listens on {self._socket}")
        except BaseException:
            self.release()
            raise
        self.release()
        return found

    def announce_leaving(self) -> None:
        """Let who comes now wait instead of giving up."""
        leaving = replace(self.holder, leaving=True)
        self._root_lock.describe(leaving)
        self._socket_lock.describe(leaving)

    def release(self) -> None:
        self._socket_lock.release()
        self._root_lock.release()


def _leaving(lock: Lock, does: str) -> Holder:
    """The holder, when it is about to let go."""
    found = lock.holder()
    if found is None:
        raise AlreadyServed(f"another daemon {does}: stop it with `mcp-sandbox shutdown`")
    if found.leaving:
        return found
    raise AlreadyServed(
        f"a daemon {does} already (pid {found.pid}, version {found.version}, since "
        f"{found.started}): use it through {found.socket}, or stop it with "
        f"`mcp-sandbox shutdown --socket {shlex.quote(found.socket)}`"
    )


@asynccontextmanager
async def claimed(data_root: Path, socket: Path, version: str) -> AsyncGenerator[Claim]:
    """Be the only daemon of a data root and of a socket; waits for one that is leaving.

    Raises:
        AlreadyServed: another daemon is there and stays.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    claim = Claim(data_root, socket, Holder(os.getpid(), version, str(socket), started))
    deadline = anyio.current_time() + _LEAVING_S
    while (other := await to_thread.run_sync(claim.take)) is not None:
        if anyio.current_time() > deadline:
            raise AlreadyServed(
                f"the daemon with pid {other.pid} has been ending for {_LEAVING_S:g} s: end it "
                f"with `kill -9 {other.pid}`; no file is lost"
            )
        await anyio.sleep(_LOOK_AGAIN_S)
    try:
        yield claim
    finally:
        claim.release()
