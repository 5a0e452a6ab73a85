"""The store in one SQLite file of the data root. Every call of the library runs in a thread."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import anyio
from anyio import to_thread
from pydantic import TypeAdapter

from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.sqlite_file import NotOurs, SqliteFile, transaction
from mcp_sandbox.sessions.store import SessionRecord

# Never change a script that was released: append one.
_MIGRATIONS = (
    """
    CREATE TABLE session (
        user TEXT NOT NULL,
        chat TEXT NOT NULL,
        id TEXT NOT NULL,
        backend TEXT NOT NULL,
        sandbox_id TEXT,
        state TEXT NOT NULL,
        created_at REAL NOT NULL,
        last_used_at REAL NOT NULL,
        image TEXT,
        spec TEXT NOT NULL,
        PRIMARY KEY (user, chat)
    ) STRICT, WITHOUT ROWID
    """,
)
_ALL = "SELECT * FROM session ORDER BY last_used_at DESC"
_PUT = """
    INSERT INTO session VALUES (:user, :chat, :id, :backend, :sandbox_id, :state,
    :created_at, :last_used_at, :image, :spec)
    ON CONFLICT (user, chat) DO UPDATE SET
    id = excluded.id, backend = excluded.backend, sandbox_id = excluded.sandbox_id,
    state = excluded.state, image = excluded.image, spec = excluded.spec,
    created_at = min(created_at, excluded.created_at),
    last_used_at = max(last_used_at, excluded.last_used_at)
"""
_TOUCH = """
    UPDATE session SET last_used_at = max(last_used_at, :when)
    WHERE user = :user AND chat = :chat
"""
_REMOVE = "DELETE FROM session WHERE user = :user AND chat = :chat"
_RECORD = TypeAdapter(SessionRecord)


class SqliteStore:
    """Records in a file that is made when it is missing. Close it when done."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, _MIGRATIONS)
        self._turn = anyio.CapacityLimiter(1)

    async def all(self) -> Sequence[SessionRecord]:
        def read(connection: sqlite3.Connection) -> list[SessionRecord]:
            with closing(connection.execute(_ALL)) as rows:
                return [_record(row) for row in rows]

        return await to_thread.run_sync(self._file.use, read, limiter=self._turn)

    async def put(self, record: SessionRecord) -> None:
        await self._write(_PUT, [_row(record)])

    async def touch(self, used: Mapping[ChatId, datetime]) -> None:
        rows = [{**_key(chat), "when": when.timestamp()} for chat, when in used.items()]
        await self._write(_TOUCH, rows)

    async def remove(self, chat: ChatId) -> None:
        await self._write(_REMOVE, [_key(chat)])

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._file.close, limiter=self._turn)

    async def _write(self, statement: str, rows: Sequence[Mapping[str, object]]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                connection.executemany(statement, rows)

        await to_thread.run_sync(self._file.use, write, limiter=self._turn)


def _key(chat: ChatId) -> dict[str, object]:
    return {"user": chat.user, "chat": chat.chat}


def _row(record: SessionRecord) -> dict[str, object]:
    return {
        **_key(record.chat),
        "id": record.id,
        "backend": record.backend,
        "sandbox_id": record.sandbox_id,
        "state": record.state,
        "created_at": record.created_at.timestamp(),
        "last_used_at": record.last_used_at.timestamp(),
        "image": record.image,
        "spec": record.spec,
    }


def _record(row: sqlite3.Row) -> SessionRecord:
    found = dict(zip(row.keys(), row, strict=True))
    try:
        found["chat"] = ChatId(found.pop("user"), found["chat"])
        for name in ("created_at", "last_used_at"):
            found[name] = datetime.fromtimestamp(found[name], UTC)
        return _RECORD.validate_python(found)
    except (ValueError, OverflowError, KeyError, TypeError) as exc:
        raise NotOurs(f"it holds what we never wrote: {exc}") from exc
