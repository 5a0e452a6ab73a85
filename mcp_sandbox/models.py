"""Values that cross rooms. No behaviour beyond validation, no I/O."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, NewType

from mcp_sandbox.errors import InvalidArgument

SandboxId = NewType("SandboxId", str)
BackendName = Literal["docker", "bubblewrap", "unsafe-local", "e2b", "kubernetes", "noop"]
TokenScope = Literal["mcp", "control", "platform"]
"""What a token is for: the tools, one's own chats in the control API, everybody's chats in it."""
Network = Literal["none", "allowlist", "open"]
ProjectAccess = Literal["none", "ro", "rw", "copy"]
Language = Literal["python", "bash", "javascript"]
SandboxState = Literal["running", "paused"]
SessionState = Literal["warm", "starting", "running", "paused", "terminated"]
# What a sandbox died of. "lost": the place where it ran knows nothing of it any more. Of a cluster:
# it was "evicted", "deleted" by somebody, or ended because it was "changed".
Ending = Literal["memory", "killed", "failed", "ended", "lost", "evicted", "deleted", "changed"]
EntryKind = Literal["file", "directory", "link", "fifo", "socket", "device"]

# What lines say that should not be missed, as a regular expression of any kind.
TROUBLE = "error|fail|exception|traceback"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
INTERNET = ("0.0.0.0/0", "2000::/3")
# By the IANA registries of special-purpose addresses, and metadata of clouds.
RESERVED = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32"),
    *("169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24"),
    *("192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
    *("224.0.0.0/4", "240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
)
"""Networks within INTERNET that belong to a machine, a cluster or nobody, or lead to others."""


@dataclass(frozen=True)
class ChatId:
    """What a sandbox belongs to. Both parts come from outside.

    Raises InvalidArgument: a part is not 1 to 128 characters of A-Z a-z 0-9 . _ - that begin with
    a letter or digit.
    """

    user: str
    chat: str

    def __post_init__(self) -> None:
        for part, value in (("user", self.user), ("chat", self.chat)):
            if not _ID.fullmatch(value):
                raise InvalidArgument(
                    f"{part} id {value[:140]!r} is not usable: give 1 to 128 letters, digits, "
                    "'.', '_' or '-', beginning with a letter or digit"
                )

    def __str__(self) -> str:
        return f"{self.user}/{self.chat}"


@dataclass(frozen=True)
class TokenGrant:
    """Whom a token lets in, and to what; `token_id` names the token and does not open anything."""

    user: str
    token_id: str
    scope: TokenScope = "mcp"


OURS = "/opt/mcp-sandbox"
"""Where a sandbox has the runner and the relay."""
RELAY = f"{OURS}/mcp_sandbox/relay/inside.py"
HOME = "/home/sandbox"
"""Where a sandbox has the files that a chat keeps beside those of its workspace."""
SKILLS = "/opt/skills"
"""Where a sandbox has the skills of its chat: a place of the system that no code can change."""
CERTIFICATES = "/etc/ssl/certs"
"""Where a sandbox with allowed hosts has the certificates to trust."""
PROGRAMS = "/opt/agents"
"""Where a sandbox has the operator's programs for agents; what is in its `bin` goes before all."""


PENDING_SIGNALS = 4096
"""How many signals may wait for processes of a sandbox that has a user of its own."""


@dataclass(frozen=True)
class Mount:
    """A host directory that appears in the sandbox."""

    source: Path
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. Sizes in MiB unless the name says otherwise."""

    memory_mb: int = 2048
    cpus: float = 2.0
    pids: int = 512
    shm_mb: int = 64
    tmp_mb: int = 256
    open_files: int = 4096
    file_mb: int = 5120


@dataclass(frozen=True)
class SandboxSpec:
    """What a backend needs to know to make a sandbox; it gives back the `labels` in `running()`.

    `mounts` hold one for /workspace and one for /home/sandbox, unless the backend holds files.
    `idle_s`: the runner ends itself after this long without connection and processes.
    `image`, for backends that have some, is their own where it is empty. `user` are the uid and gid
    that it runs as; None: those of all that have none of their own.
    """

    mounts: tuple[Mount, ...]
    limits: Limits = field(default_factory=Limits)
    network: Network = "none"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    idle_s: float = 900.0
    image: str = ""
    user: tuple[int, int] | None = None


@dataclass(frozen=True)
class SandboxFacts:
    """What holds for a running sandbox.

    `limits` maps a limit's name to what is enforced, in words ("memory": "2048 MiB (cgroup)",
    "pids": "not limited: no writable cgroup").
    """

    backend: BackendName
    image: str | None
    isolation: str
    network: str
    limits: Mapping[str, str]


@dataclass(frozen=True)
class SandboxInfo:
    """A row of `Backend.running()`."""

    id: SandboxId
    labels: Mapping[str, str]
    state: SandboxState = "running"


@dataclass(frozen=True)
class FolderIdentity:
    """Which directory it is. gVisor passes on only `changed_ns`, its ctime."""

    device: int
    inode: int
    changed_ns: int

    def is_same(self, other: "FolderIdentity") -> bool:
        """Return whether both are one directory; its ctime may have moved on in between."""
        if (self.device, self.inode) == (other.device, other.inode):
            return True
        return self.changed_ns == other.changed_ns


@dataclass(frozen=True)
class RunnerHello:
    """What the runner says of itself when a connection opens; `project` is /project, if there.

    `workspace_inode` and `workspace_changed_ns` (its ctime) tell which directory /workspace is;
    gVisor passes on only the second. `life` is another one each time a runner starts; "" if it is
    an older version, which has none.
    """

    python: str
    workspace_inode: int
    workspace_changed_ns: int
    project: FolderIdentity | None = None
    life: str = ""


@dataclass(frozen=True)
class BackgroundProcess:
    """What runs on in a sandbox though its call was answered; `command` may be cut or empty.

    `id` names a process; what a command has left running has none.
    """

    pid: int
    command: str
    id: str = ""


@dataclass(frozen=True)
class Background:
    """The first of the processes in the background, and how many there are."""

    processes: tuple[BackgroundProcess, ...] = ()
    total: int = 0


@dataclass(frozen=True)
class RunnerStatus:
    """What a runner says of its use. `connections` counts the servers, the asking one included.

    `stopped`: it has killed the background after that.
    """

    connections: int
    calls: int
    background: Background
    idle_s: float
    stopped: bool = False


@dataclass(frozen=True)
class SessionStatus:
    """One chat as the operator sees it. Times are in UTC.

    state: "warm" has files and no sandbox. `busy` counts its calls under way in this server,
    `background` the processes that commands left running. `spec` is a digest of what its sandbox
    was made from; it and `image` are empty where there is none. `assistant`: whose chat it is.
    `unsaved`: its files have changed since they were saved to the object store, if there is one.
    `preview`: the newest address of a port inside. `server`: which other one has the chat.
    `folder`: the user's project that it shows, or showed last.
    """

    id: str
    chat: ChatId
    state: SessionState
    backend: BackendName
    sandbox_id: SandboxId | None
    created_at: datetime
    last_used_at: datetime
    image: str
    spec: str
    busy: int
    background: int
    assistant: str = ""
    saved_at: datetime | None = None
    unsaved: bool = False
    preview: str = ""
    server: str = ""
    folder: str = ""


@dataclass(frozen=True)
class Statistics:
    """What a server holds now; `queued` calls wait for one of `max_open` places.

    `connections` counts those that sandboxes began, by what became of them. `unsaved` counts the
    chats that are not saved yet; None without an object store. `leases`: how many chats this server
    has of those that servers share; None if it shares none.
    """

    open: int
    busy: int
    queued: int
    max_open: int
    background: int = 0
    pool: Mapping[str, int] = field(default_factory=dict[str, int])
    connections: Mapping[str, int] = field(default_factory=dict[str, int])
    unsaved: int | None = None
    leases: int | None = None


@dataclass(frozen=True)
class TerminalEnd:
    """How a person's shell ended: its exit code or signal, or neither when the person hung up."""

    exit_code: int | None
    signal: int | None


@dataclass(frozen=True)
class ProcessRow:
    """A process as a list shows it: a command that outlives its call, or has.

    `why` it was ended by us: "timeout", "stopped", "cancelled", or "". `memory_bytes` are those of
    its whole tree while it is running. `of` says what it belongs to, such as "terminal".
    """

    id: str
    command: str
    running: bool
    seconds: float
    exit_code: int | None = None
    signal: str | None = None
    why: str = ""
    out_of_memory: bool = False
    memory_bytes: int = 0
    of: str = ""


@dataclass(frozen=True)
class ExecResult:
    """How a command or a piece of code ended; `exit_code` is None when a `signal` ended it.

    `stdout` and `stderr` hold head and tail when `truncated`; the whole is in `output_file`
    (a path inside the sandbox) up to the output limit. `changed_files` are workspace paths,
    at most 20, of which `created_files` are new, and `file_counts` how many were created, changed
    and deleted; None when the workspace was too large to look through. `limit` names the size limit
    that it seems to have met. `trouble_lines` of the kept output match TROUBLE. `offline`: no
    network. `backend`: which ran it. `made_room` was left running by earlier commands, and ended
    so that this one had room for its processes.
    `figures`: what Python code has shown; the first ten have data. The `notebook` that it ran in
    is "new", was "kept", or has "ended".

    `process` names what outlives its first call. While it is `running`, `stdout` and `stderr` are
    what was printed since the last answer about it, from these bytes of each stream on;
    `left_s` is the time until it is killed. `until_met`: the text that was waited for is there.
    `of` is that of its row; of a "screen" `stdout` is always all that is held.
    `shell`: what is to be said of bash, and of what it remembers.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    duration_ms: int
    signal: str | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    killed_because: str | None = None
    limit: str = ""
    trouble_lines: int = 0
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    output_file: str | None = None
    changed_files: tuple[str, ...] | None = ()
    created_files: tuple[str, ...] | None = ()
    file_counts: Mapping[str, int] | None = None
    offline: bool = False
    backend: str = ""
    made_room: Background = Background()
    figures: tuple["FileContent", ...] = ()
    notebook: str = ""
    process: str | None = None
    running: bool = False
    stopped: bool = False
    until_met: bool = False
    left_s: int | None = None
    stdout_from: int = 0
    stderr_from: int = 0
    of: str = ""
    shell: tuple[str, ...] = ()

    @property
    def success(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True)
class FileContent:
    r"""A part of a file.

    kind "text": `data` is UTF-8 of whole lines from `first_line` (1-based), `lines` of them;
    `more` says that lines follow; `long_lines_cut` counts lines cut at the per-line limit.
    kind "image": `data` is the whole image, `mime` its type. kind "binary": `data` is the first
    bytes. `encoding` is empty, or a guess where not all is UTF-8: other bytes are `\xe9` in `data`.
    """

    path: str
    kind: Literal["text", "image", "binary"]
    mime: str
    size: int
    data: bytes
    first_line: int = 1
    lines: int = 0
    total_lines: int | None = None
    more: bool = False
    long_lines_cut: int = 0
    encoding: str = ""


@dataclass(frozen=True)
class WriteResult:
    """`written` bytes went to `path`; `created` tells new from replaced or appended."""

    path: str
    written: int
    created: bool


@dataclass(frozen=True)
class EditResult:
    """A unified diff of what was (or with dry_run would be) changed."""

    path: str
    diff: str
    replacements: int


@dataclass(frozen=True)
class Entry:
    """One name in a listing. `modified` is seconds since the epoch; `target` a link's text."""

    path: str
    kind: EntryKind
    size: int
    modified: float
    target: str | None = None


@dataclass(frozen=True)
class Listing:
    """`total` counts all entries seen; `truncated` says that a limit or budget cut the rest."""

    path: str
    entries: tuple[Entry, ...]
    total: int
    truncated: bool
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class GlobResult:
    """Matching paths, newest first; `hint` says why there may be none."""

    paths: tuple[str, ...]
    total: int
    truncated: bool
    hint: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class GrepResult:
    """`lines` are `file:line:text`, context lines `file-line-text`, groups parted by `--`."""

    lines: tuple[str, ...]
    matches: int
    files: int
    truncated: bool
    hint: str = ""
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeleteResult:
    """`entries` counts everything removed, the directory itself included."""

    path: str
    kind: EntryKind
    entries: int


@dataclass(frozen=True)
class MoveResult:
    """`replaced`: something was at the destination before."""

    source: str
    destination: str
    replaced: bool


@dataclass(frozen=True)
class Mark:
    """Whose files a sandbox holds, as it says itself; `empty`: there are none."""

    mark: str
    empty: bool


@dataclass(frozen=True)
class Measured:
    """What a chat's files occupy, and what is free beside; not `complete`: there are more."""

    bytes: int
    entries: int
    free: int
    complete: bool


@dataclass(frozen=True)
class Packed:
    """An archive of a chat's files: its entries, and its size as a stream.

    `filled`: files that shrank while they were read, so that their ends are zeros. `left_out`:
    what could not be read, or is no file, folder or link.
    """

    entries: int
    bytes: int
    filled: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class WorkspaceUsage:
    """Allocated bytes; `exact` is False when there was too much to count."""

    used_bytes: int
    limit_bytes: int
    files: int
    exact: bool = True
