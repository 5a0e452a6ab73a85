"""Locks: one daemon per data root, one listener per socket. Blocks.

Locks end with their process. The file of a lock says which process holds it; it is never deleted:
a lock on a deleted file guards nothing. Only this user can write to a socket's folder.
"""

import json
import os
import shlex
import socket
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.durable import check_trusted, lock, make_folder, unlock
from mcp_sandbox.errors import AlreadyServed, StorageUnavailable
from mcp_sandbox.relay.place import LONGEST_PATH

# A daemon that ends waits for its running calls and ends its sandboxes.
_LEAVING_S = 60.0


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock. `started` is an ISO time; `leaving`: it is about to end."""

    pid: int
    version: str
    socket: str
    started: str
    leaving: bool = False


class DaemonLock:
    """The locks of a data root and of a socket, taken and released together."""

    def __init__(self, data_root: Path, path: Path, holder: LockHolder) -> None:
        self.holder = holder
        self._places = {
            lock_file(data_root): f"serves {data_root}",
            path.with_name(f"{path.name}.lock"): f"listens on {path}",
        }
        self._files = list[int]()

    def take(self) -> LockHolder | None:
        """Take both locks, or neither; return None, or the ending process that still holds one.

        Raises:
            StorageUnavailable: a lock file cannot be made.
            AlreadyServed: a daemon that is not ending holds one of them.
        """
        for place, does in self._places.items():
            try:
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                file = lock(place, wait=False)
            except OSError as exc:
                self.release()
                raise StorageUnavailable(
                    f"the lock {place} cannot be made: {exc.strerror}; make its folder writable"
                ) from exc
            if file is None:
                self.release()
                return _find_leaving(place, does)
            self._files.append(file)
            _write_holder(file, self.holder)
        return None

    def announce_leaving(self) -> None:
        """Tell daemons that start now to wait for the locks instead of giving up."""
        for file in self._files:
            _write_holder(file, replace(self.holder, leaving=True))

    def release(self) -> None:
        while self._files:
            unlock(self._files.pop())


def lock_file(data_root: Path) -> Path:
    """Return the file that the daemon of a data root locks."""
    return data_root / "sandbox" / "daemon.lock"


def _write_holder(file: int, holder: LockHolder) -> None:
    text = json.dumps(asdict(holder)).encode()
    # Padding overwrites the old text in one step, so that readers never see an empty file.
    os.pwrite(file, text.ljust(os.fstat(file).st_size), 0)


def _find_leaving(place: Path, does: str) -> LockHolder:
    """Return the holder of a lock if it is ending; else raise AlreadyServed."""
    try:
        with place.open("rb") as file:
            found = LockHolder(**json.loads(file.read(8192)))
    except (OSError, ValueError, TypeError, RecursionError):
        raise AlreadyServed(f"another daemon {does}: stop it with `mcp-sandbox shutdown`") from None
    if found.leaving:
        return found
    raise AlreadyServed(
        f"a daemon {does} already (pid {found.pid}, version {found.version}, since "
        f"{found.started}): use it through {found.socket}, or stop it with "
        f"`mcp-sandbox shutdown --socket {shlex.quote(found.socket)}`; with `--data` a second one "
        "has a socket of its own"
    )


@asynccontextmanager
async def claim_daemon(data_root: Path, path: Path, version: str) -> AsyncGenerator[DaemonLock]:
    """Be the only daemon of a data root and of the socket at `path`; wait for one that is ending.

    Raises AlreadyServed: another daemon runs and is not ending.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    claim = DaemonLock(data_root, path, LockHolder(os.getpid(), version, str(path), started))
    deadline = anyio.current_time() + _LEAVING_S
    while (other := await to_thread.run_sync(claim.take)) is not None:
        if anyio.current_time() > deadline:
            raise AlreadyServed(
                f"the daemon with pid {other.pid} has been ending for {_LEAVING_S:g} s: end it "
                f"with `kill -9 {other.pid}`; no file is lost"
            )
        await anyio.sleep(0.05)
    try:
        yield claim
    finally:
        claim.release()


class SocketListener:
    """Listens from the beginning until `close`. Make it only while the claim is held.

    Raises:
        StorageUnavailable: the folder is not safe or cannot be written.
        AlreadyServed: a program listens on the socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listen()

    def listen(self) -> None:
        """Make a socket that appears at the path ready for use; an earlier one stays open."""
        _check_folder(self.path)
        _check_place(self.path)
        new = self.path.with_name(f"{self.path.name}.new")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            new.unlink(missing_ok=True)
            listener.bind(str(new))
            new.chmod(0o600)
            listener.listen(1024)
            inode = new.lstat().st_ino
            new.rename(self.path)
        except OSError as exc:
            listener.close()
            raise StorageUnavailable(
                f"the socket {self.path} cannot be made: {exc.strerror}; name another with --socket"
            ) from exc
        self.socket, self._inode = listener, inode

    def is_in_place(self) -> bool:
        """Return whether clients that connect to the path reach this socket."""
        try:
            return self.path.lstat().st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Stop listening, and remove the socket's file."""
        if self.socket.fileno() >= 0 and self.is_in_place():
            self.path.unlink(missing_ok=True)
        self.socket.close()


@asynccontextmanager
async def listen_at(path: Path) -> AsyncGenerator[SocketListener]:
    """Listen at the path until the block is left, or the listener is closed."""
    listener = await to_thread.run_sync(SocketListener, path)
    try:
        yield listener
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(listener.close)


def _check_folder(path: Path) -> None:
    """Raise StorageUnavailable if other users could replace a socket at the path."""
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise StorageUnavailable(
            f"the socket's path {path} has more than {LONGEST_PATH} bytes: name a shorter one "
            "with --socket"
        )
    folder = path.parent
    try:
        make_folder(folder)
        check_trusted(folder)
    except OSError as exc:
        raise StorageUnavailable(
            f"the socket's folder {folder} cannot be used: {exc.strerror}; name another with "
            "--socket"
        ) from exc


def _check_place(path: Path) -> None:
    """Raise unless the path is free or is a socket on which no program listens."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise StorageUnavailable(
            f"{path} is there and is no socket: remove it, or name another place with --socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as knock:
        try:
            knock.connect(str(path))
        except BlockingIOError:
            pass
        except OSError:
            return
    raise AlreadyServed(
        f"another program listens on {path}: end it, or name another place with --socket"
    )
