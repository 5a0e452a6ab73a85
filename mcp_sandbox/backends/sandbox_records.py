"""What a backend keeps on disk of each sandbox, and its processes that outlive the server.

One is known by its number, its start time and the boot, so no other can be taken for it.

run/{sandbox id}/token        the channel's secret, for this user only
                     sock/        the socket that the runner listens on
                     shown/       what a container sees, read-only
                     state.json   which process it is, what holds for it, its labels
                     container    the same of a container
                     log          what the runner or its launcher said on stderr

It is made before the sandbox and removed after it, so what a killed server leaves is found by it.
What cannot be read is a dead sandbox, not an error. No sandbox outlives a run of the machine, so
nothing is synced. Every call blocks on the disk.
"""

import logging
import math
import os
import re
import secrets
import signal
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread
from pydantic import TypeAdapter

from mcp_sandbox.durable import closing_fd, make_folder, read_note, write_file, write_note
from mcp_sandbox.errors import SandboxGone, StorageUnavailable
from mcp_sandbox.models import BackendName, Network, SandboxFacts, SandboxId, SandboxSpec
from mcp_sandbox.runner.files.moving import remove_tree

_GONE_LIMIT_S = 10.0
_CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
logger = logging.getLogger(__name__)

_ID = re.compile(r"mcs-[0-9a-f]{16}")
_SANDBOX_USER = 10001


@dataclass(frozen=True)
class ProcessId:
    """A process of this machine; `started` is in clock ticks since the boot."""

    pid: int
    started: int
    boot: str


@cache
def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a running process, or None if it has ended or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The program's name stands in parentheses and may hold anything, parentheses too.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]), boot_id())


def is_alive(process: ProcessId) -> bool:
    """Return whether this very process runs; a zombie does not."""
    return identify(process.pid) == process


def reap(pid: int) -> bool:
    """Collect an ended child process; return True if nothing is left to collect."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def hold(process: ProcessId) -> int | None:
    """Return a descriptor that becomes readable when the process ends; None if it has ended.

    The caller closes it.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    # Only now is the number held; before, it may have gone to another process.
    if is_alive(process):
        return descriptor
    os.close(descriptor)
    return None


async def end(process: ProcessId, number: signal.Signals | None, *, limit_s: float) -> bool:
    """Send a signal, if one is given, and wait for the end; False when it does not come in time."""
    descriptor = await anyio.to_thread.run_sync(hold, process)
    if descriptor is None:
        return True
    with closing_fd(descriptor):
        if number is not None:
            # It may have ended, and been collected, since it was looked at.
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
        with anyio.move_on_after(limit_s, shield=True) as limit:
            await anyio.wait_readable(descriptor)
        return not limit.cancelled_caught


async def kill(process: ProcessId) -> bool:
    """End a process; False when the kernel does not let go of it in time."""
    return await end(process, signal.SIGKILL, limit_s=_GONE_LIMIT_S)


def find_weak_status(status: str, user: str) -> list[str]:
    """Return how /proc/PID/status is weaker than a first process must be; `user`: UID:GID."""
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    user_id, _, group_id = user.partition(":")
    wanted = {
        "NoNewPrivs": "1",
        "Seccomp": "2",
        **dict.fromkeys(_CAPABILITIES, "0" * 16),
        "Uid": "\t".join([user_id] * 4),
        "Gid": "\t".join([group_id] * 4),
    }
    return [
        f"{name} should be {value!r} and is {fields.get(name, 'not shown')!r}"
        for name, value in wanted.items()
        if fields.get(name) != value
    ]


def find_missing_mounts(mountinfo: str, wanted: Mapping[str, bool]) -> list[str]:
    """Return what /proc/PID/mountinfo lacks; `wanted` maps each mount point to: is read-only.

    A mount that went through a link lies elsewhere than it should.
    """
    lines = (line.split(" ") for line in mountinfo.splitlines())
    # Of several at one place the last one is seen.
    found = {fields[4]: fields[5].split(",") for fields in lines if len(fields) > 5}
    return [
        f"nothing is mounted at {target}"
        if target not in found
        else f"{target} can be written to and should be read-only"
        for target, read_only in wanted.items()
        if target not in found or (read_only and "ro" not in found[target])
    ]


def _steady_s() -> float:
    """Return seconds since the machine started, sleep included; this clock never jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class SandboxRecord:
    """What is remembered of a sandbox; `maker` is the server that creates it, None if unknown.

    Of processes: `process` is None until it has one, `launcher` started it, `cgroups` are
    directories to remove after it. Of a container: `network` is what it was asked to have.
    """

    backend: BackendName
    maker: ProcessId | None = field(default_factory=lambda: identify(os.getpid()))
    made_s: float = field(default_factory=_steady_s)
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    network: Network = "none"
    facts: SandboxFacts | None = None
    process: ProcessId | None = None
    launcher: ProcessId | None = None
    cgroups: tuple[str, ...] = ()

    @property
    def alive(self) -> bool:
        return self.process is not None and is_alive(self.process)

    def given_up(self, after_s: float = math.inf) -> bool:
        """Return whether its maker is dead or has taken longer than `after_s` seconds."""
        late = _steady_s() - self.made_s > after_s
        return late or self.maker is None or not is_alive(self.maker)

    @property
    def abandoned(self) -> bool:
        """True when nothing of it runs and it is not being created any more."""
        return not self.alive and (self.process is not None or self.given_up())


_RECORD = TypeAdapter(SandboxRecord)


def new_id() -> SandboxId:
    """Return an id that no other sandbox has."""
    return SandboxId(f"mcs-{secrets.token_hex(8)}")


def sandbox_user(spec: SandboxSpec | None = None) -> tuple[int, int]:
    """Return the uid and gid of a sandbox: of its own, or the server's, but never root's."""
    if spec and spec.user:
        return spec.user
    return (os.geteuid(), os.getegid()) if os.geteuid() != 0 else (_SANDBOX_USER, _SANDBOX_USER)


class SandboxRecords:
    """The run directories of one backend under one data root."""

    def __init__(self, data_root: Path, backend: BackendName) -> None:
        self._root = data_root / "sandbox" / "run"
        self._backend = backend
        # All keep their records side by side.
        self._state = "container" if backend == "docker" else "state.json"

    def directory(self, sandbox_id: SandboxId) -> Path:
        return self._root / sandbox_id

    def socket_directory(self, sandbox_id: SandboxId) -> Path:
        return self._root / sandbox_id / "sock"

    def shown_directory(self, sandbox_id: SandboxId) -> Path:
        return self._root / sandbox_id / "shown"

    def open(
        self,
        sandbox_id: SandboxId,
        record: SandboxRecord,
        shown: Mapping[str, str] | None = None,
    ) -> bytes:
        """Make the directory of a new sandbox; returns its token, raises StorageUnavailable.

        The files `shown` are readable to all.
        """
        token = secrets.token_bytes(32)
        directory, visible = self.directory(sandbox_id), self.shown_directory(sandbox_id)
        with self._writing():
            make_folder(self._root)
            directory.mkdir(mode=0o700)
            self.save(sandbox_id, record)
            self.socket_directory(sandbox_id).mkdir(mode=0o700)
            write_file(directory / "token", token.hex().encode(), synced=False)
            visible.mkdir()
            visible.chmod(0o711)
            for name, text in (shown or {}).items():
                write_file(visible / name, text.encode(), synced=False)
                (visible / name).chmod(0o644)
        return token

    def save(self, sandbox_id: SandboxId, record: SandboxRecord) -> None:
        """Replace the record of a sandbox; raises StorageUnavailable."""
        with self._writing():
            note = _RECORD.dump_python(record, mode="json")
            write_note(self.directory(sandbox_id) / self._state, note, synced=False)

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as exc:
            raise StorageUnavailable(
                f"cannot write to {self._root} ({exc.strerror}): free space there or set data_dir"
            ) from exc

    def relabel(self, sandbox_id: SandboxId, labels: Mapping[str, str]) -> None:
        """Replace the labels of a sandbox; raises SandboxGone, StorageUnavailable."""
        record = self.find(sandbox_id)
        if record is None:
            raise make_gone_error(sandbox_id)
        self.save(sandbox_id, replace(record, labels=dict(labels)))

    def find(self, sandbox_id: SandboxId) -> SandboxRecord | None:
        if not _ID.fullmatch(sandbox_id):
            return None
        path = self.directory(sandbox_id) / self._state
        try:
            note = read_note(path)
            if note is None:
                return None
            record = _RECORD.validate_python(note)
        except NotADirectoryError:
            return None
        except ValueError as exc:
            logger.warning("%s is damaged, and its sandbox given up: %s", path, exc)
            return SandboxRecord(self._backend, maker=None)
        return record if record.backend == self._backend else None

    def all(self) -> dict[SandboxId, SandboxRecord]:
        """Return every record of this backend, of running sandboxes and of dead ones."""
        try:
            names = sorted(SandboxId(path.name) for path in self._root.iterdir())
        except FileNotFoundError:
            return {}
        return {name: record for name in names if (record := self.find(name)) is not None}

    def known(self, sandbox_id: SandboxId) -> tuple[SandboxRecord, bytes]:
        """Return record and token of a sandbox; raises SandboxGone if nothing is known of it."""
        record = self.find(sandbox_id)
        if record is None:
            raise make_gone_error(sandbox_id)
        try:
            return record, bytes.fromhex((self.directory(sandbox_id) / "token").read_text())
        except (OSError, ValueError) as exc:
            logger.warning("sandbox %s is given up, its token is damaged: %s", sandbox_id, exc)
            raise make_gone_error(sandbox_id) from exc

    def forget(self, sandbox_id: SandboxId) -> None:
        """Remove the directory of a sandbox in which nothing runs; gone already is fine."""
        directory = self.directory(sandbox_id)
        with suppress(FileNotFoundError):
            # The state goes last: a directory without it belongs to no sandbox.
            for path in sorted(directory.iterdir(), key=lambda path: path.name == self._state):
                if path.is_dir() and not path.is_symlink():
                    # Code of a sandbox without walls could make it deep, and close it.
                    remove_tree(str(path), force=True)
                else:
                    path.unlink(missing_ok=True)
            directory.rmdir()


def make_gone_error(sandbox_id: SandboxId) -> SandboxGone:
    """Return the error for a sandbox that does not run."""
    return SandboxGone(f"sandbox {sandbox_id} is not running; the next call starts a new one")
