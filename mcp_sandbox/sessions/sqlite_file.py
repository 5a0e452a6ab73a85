"""A SQLite file that may be lost at any time without harm. Blocking; for one thread at a time.

The file is written ahead (WAL), so a process that is killed at any point leaves it whole. What
cannot serve as our database is set aside as `{name}.corrupt-{time}`, and a new one is begun.
Several processes may use the file; each notices when another one set it aside.
"""

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from mcp_sandbox.errors import StorageUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BUSY_S = 5.0
_WHILE_OPEN = ("-wal", "-shm")
# A person may look at what was set aside; a disk that corrupts files must not fill up with it.
_SET_ASIDE_KEPT = 3
# What another try on the same file cannot help. SQLITE_ERROR: a table or column is missing.
_HOPELESS = ("SQLITE_NOTADB", "SQLITE_CORRUPT", "SQLITE_READONLY", "SQLITE_ERROR")


class NotOurs(Exception):
    """The file cannot serve as our database, now or later."""


class SqliteFile:
    """A database with our tables in it, made when it is missing.

    Script n of `migrations` brings a file of version n to version n + 1.
    """

    def __init__(self, path: Path, migrations: Sequence[str]) -> None:
        self._path = path
        self._migrations = migrations
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None

    def use(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do `work`, and once more with a new file when this one is none of ours.

        Raises:
            StorageUnavailable: no file can be read or written here now.
        """
        try:
            try:
                return self._attempt(work)
            except NotOurs as exc:
                self._set_aside(exc)
                return self._attempt(work)
        except (NotOurs, OSError, sqlite3.Error) as exc:
            self.close()
            raise StorageUnavailable(
                f"the list of chats cannot be used ({exc}): check the disk and the rights of "
                f"{self._path}; the chats' files are not concerned"
            ) from exc

    def close(self) -> None:
        if self._connection is not None:
            # Whoever wanted to write what could not be written was told so.
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def _attempt(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._told_apart():
            if self._connection is None or _identity(self._path) != self._identity:
                self.close()
                self._connection = self._open()
            return work(self._connection)

    def _open(self) -> sqlite3.Connection:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            if not self._path.exists():
                # A log without its database would be read into the next one.
                for suffix in _WHILE_OPEN:
                    _beside(self._path, suffix).unlink(missing_ok=True)
                self._path.touch(mode=0o600)
            self._identity = _identity(self._path)
            connection = sqlite3.connect(
                self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
            try:
                connection.row_factory = sqlite3.Row
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                self._migrate(connection)
            except BaseException:
                connection.close()
                raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        version = _version(connection)
        if version == len(self._migrations):
            return
        if version > len(self._migrations):
            raise NotOurs(f"it is of the newer version {version}")
        with transaction(connection):
            for script in self._migrations[version:]:
                for statement in script.split(";"):
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(self._migrations)}")

    def _set_aside(self, reason: NotOurs) -> None:
        self.close()
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%fZ")
        aside = self._path.with_name(f"{self._path.name}.corrupt-{stamp}")
        with self._locked():
            if _identity(self._path) not in (None, self._identity):
                # Another process was quicker.
                return
            # Before the file itself: at no time may a log lie beside a database not its own.
            for suffix in _WHILE_OPEN:
                with suppress(FileNotFoundError):
                    _beside(self._path, suffix).rename(_beside(aside, suffix))
            with suppress(FileNotFoundError):
                self._path.rename(aside)
            logger.warning("%s is unusable (%s): set aside as %s", self._path, reason, aside.name)
            self._drop_older()

    def _drop_older(self) -> None:
        prefix = f"{self._path.name}.corrupt-"
        named = (path.name for path in self._path.parent.glob(f"{prefix}*"))
        stamps = sorted({name.removeprefix(prefix).partition("-")[0] for name in named})
        for stamp in stamps[:-_SET_ASIDE_KEPT]:
            for path in self._path.parent.glob(f"{prefix}{stamp}*"):
                if not path.is_dir():
                    path.unlink(missing_ok=True)

    @contextmanager
    def _told_apart(self) -> Generator[None]:
        """Raise NotOurs for what another try on the same file cannot help."""
        try:
            yield
        except sqlite3.DatabaseError as exc:
            # Text that is no UTF-8 is found by the Python module, which gives no name.
            name = getattr(exc, "sqlite_errorname", "SQLITE_CORRUPT")
            hopeless = name.startswith(_HOPELESS) or (
                name.startswith("SQLITE_CANTOPEN") and self._is_barred()
            )
            if hopeless and type(exc) in (sqlite3.DatabaseError, sqlite3.OperationalError):
                raise NotOurs(str(exc)) from exc
            raise

    def _is_barred(self) -> bool:
        """Whether it is a file itself that cannot be opened, and no lack of descriptors or space.

        Asked without opening any.
        """
        files = (self._path, *(_beside(self._path, suffix) for suffix in _WHILE_OPEN))
        return any(
            path.exists() and not (path.is_file() and os.access(path, os.R_OK | os.W_OK))
            for path in files
        )

    @contextmanager
    def _locked(self) -> Generator[None]:
        """One process at a time opens the file or sets it aside; the lock dies with it."""
        lock = os.open(_beside(self._path, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Generator[None]:
    """All of it or nothing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # A full disk may have undone it already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return int(version)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
