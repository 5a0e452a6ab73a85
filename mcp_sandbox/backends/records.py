"""The directory that a sandbox of processes has under the data root while it lives.

    run/{sandbox id}/token        the channel's secret, for this user only
                     sock/        where the runner makes its socket; the sandbox writes here
                     state.json   which process it is, what holds for it, its labels
                     log          what the runner or its launcher said on stderr

State is replaced by rename, never rewritten. What cannot be read is a dead sandbox, not an error.
"""

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mcp_sandbox.backends.process import ProcessId, is_alive, ourselves
from mcp_sandbox.backends.removal import remove_tree
from mcp_sandbox.errors import SandboxGone, StorageUnavailable
from mcp_sandbox.models import BackendName, SandboxFacts, SandboxId

_STATE = "state.json"
_ID = re.compile(r"mcs-[0-9a-f]{16}")


@dataclass(frozen=True)
class Record:
    """What is remembered of a sandbox. `process` is None until it has one.

    `maker` is the server that creates it; `launcher` the process that started `process`, if any;
    `cgroups` are directories to remove after it.
    """

    backend: BackendName
    maker: ProcessId
    facts: SandboxFacts
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    process: ProcessId | None = None
    launcher: ProcessId | None = None
    cgroups: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        return self.process is not None and is_alive(self.process)

    @property
    def abandoned(self) -> bool:
        """True when nothing of it runs and nobody is creating it any more."""
        return not self.alive and (self.process is not None or not is_alive(self.maker))


_RECORD = TypeAdapter(Record)


class Records:
    """The run directories of one backend under one data root. Every call blocks on the disk."""

    def __init__(self, data_root: Path, backend: BackendName) -> None:
        self._root = data_root / "sandbox" / "run"
        self._backend = backend

    def directory(self, sandbox_id: SandboxId) -> Path:
        return self._root / sandbox_id

    def socket_directory(self, sandbox_id: SandboxId) -> Path:
        return self._root / sandbox_id / "sock"

    def open(
        self,
        facts: SandboxFacts,
        labels: Mapping[str, str],
        user: int | None,
        *,
        cgroups: Callable[[SandboxId], tuple[str, ...]] = lambda _: (),
    ) -> tuple[SandboxId, Record, bytes]:
        """Make the directory of a new sandbox; returns its id, record and token.

        `user` owns the socket directory; None leaves it to the server's own user. `cgroups` are
        those that a sandbox of that id will have.

        Raises:
            StorageUnavailable: the data root cannot be written.
        """
        sandbox_id = SandboxId(f"mcs-{secrets.token_hex(8)}")
        token = secrets.token_bytes(32)
        groups = cgroups(sandbox_id)
        record = Record(self._backend, ourselves(), facts, dict(labels), cgroups=groups)
        directory = self.directory(sandbox_id)
        try:
            make_private(self._root)
            directory.mkdir(mode=0o700)
            self.save(sandbox_id, record)
            _write_private(directory / "token", token.hex())
            sockets = self.socket_directory(sandbox_id)
            sockets.mkdir(mode=0o700)
            if user is not None:
                os.chown(sockets, user, user)
        except OSError as exc:
            raise StorageUnavailable(
                f"cannot write to {self._root} ({exc.strerror}): free space there or set data_dir"
            ) from exc
        return sandbox_id, record, token

    def save(self, sandbox_id: SandboxId, record: Record) -> None:
        """Replace the record of a sandbox."""
        path = self.directory(sandbox_id) / _STATE
        _write_private(path.with_suffix(".new"), json.dumps(asdict(record)))
        path.with_suffix(".new").rename(path)

    def relabel(self, sandbox_id: SandboxId, labels: Mapping[str, str]) -> None:
        """Replace the labels of a sandbox.

        Raises:
            SandboxGone: there is no record of it.
            StorageUnavailable: the record cannot be written.
        """
        record = self.find(sandbox_id)
        if record is None:
            raise SandboxGone(
                f"sandbox {sandbox_id} is not there; the next call starts one on the same files"
            )
        try:
            self.save(sandbox_id, replace(record, labels=dict(labels)))
        except OSError as exc:
            raise StorageUnavailable(
                f"cannot write to {self._root} ({exc.strerror}): free space there or set data_dir"
            ) from exc

    def find(self, sandbox_id: SandboxId) -> Record | None:
        """The record of a sandbox of this backend, or None."""
        if not _ID.fullmatch(sandbox_id):
            return None
        try:
            record = _RECORD.validate_json((self.directory(sandbox_id) / _STATE).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None
        return record if record.backend == self._backend else None

    def all(self) -> dict[SandboxId, Record]:
        """Every record of this backend, of running sandboxes and of dead ones."""
        try:
            names = sorted(path.name for path in self._root.iterdir())
        except FileNotFoundError:
            return {}
        found = {SandboxId(name): self.find(SandboxId(name)) for name in names}
        return {name: record for name, record in found.items() if record is not None}

    def living(self, sandbox_id: SandboxId) -> tuple[Record, bytes]:
        """Record and token of a running sandbox.

        Raises:
            SandboxGone: it is not running.
        """
        record = self.find(sandbox_id)
        if record is not None and record.alive:
            try:
                token = (self.directory(sandbox_id) / "token").read_text()
            except FileNotFoundError:
                record = None
            else:
                return record, bytes.fromhex(token)
        raise SandboxGone(
            f"sandbox {sandbox_id} is not running; the next call starts a new one on the same files"
        )

    def forget(self, sandbox_id: SandboxId) -> None:
        """Remove the directory of a sandbox in which nothing runs; gone already is fine."""
        directory = self.directory(sandbox_id)
        with suppress(FileNotFoundError):
            remove_tree(self.socket_directory(sandbox_id))
        # The state goes last: a directory without it belongs to nobody.
        for name in ("token", "log", "state.new", _STATE):
            (directory / name).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            directory.rmdir()

    def log(self, sandbox_id: SandboxId) -> str:
        """The end of what was said on stderr while it started."""
        path = self.directory(sandbox_id) / "log"
        return path.read_bytes()[-2000:].decode(errors="replace") if path.exists() else ""


def make_private(directory: Path) -> None:
    """Make a directory and what is missing above it, for this user only."""
    if directory.is_dir():
        return
    for path in (*reversed(directory.parents), directory):
        if not path.is_dir():
            path.mkdir(mode=0o700, exist_ok=True)


def _write_private(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
