"""Frozen models of every setting, one section per room. The help of a setting stands here."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from cronsim import CronSim, CronSimError
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
)

from mcp_sandbox.config.environment import PREFIX, default_data_dir, home
from mcp_sandbox.config.units import (
    GIB,
    KIB,
    MIB,
    parse_duration,
    parse_size,
    show_duration,
    show_size,
)
from mcp_sandbox.models import Limits, Narrow, Network, ProjectAccess

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def _environment_names(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _NAME.fullmatch(name) or name.startswith(PREFIX) or name == "HOME":
            raise ValueError(f"{name!r} cannot be given to a sandbox: use another name")
        if "\0" in text:
            raise ValueError(f"the value of {name} holds a NUL byte: remove it")
    return value


def _absolute(value: Path) -> Path:
    if value.parts[:1] == ("~",):
        value = home().joinpath(*value.parts[1:])
    if not value.is_absolute():
        raise ValueError("write an absolute path; only in a file may it be relative, to the file")
    return value


def _schedule(value: str) -> str:
    try:
        next(CronSim(value, datetime.now(UTC)))
    except (CronSimError, StopIteration):
        raise ValueError("write when as cron does, such as 0 3 * * * for daily at 3") from None
    return value


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Size = Annotated[
    int, BeforeValidator(parse_size), PlainSerializer(show_size, return_type=str), Field(ge=0)
]
_Time = Annotated[
    float, BeforeValidator(parse_duration), PlainSerializer(show_duration, return_type=str)
]
Duration = Annotated[_Time, Field(gt=0, allow_inf_nan=False)]
DurationOrZero = Annotated[_Time, Field(ge=0, allow_inf_nan=False)]
Schedule = Annotated[str, AfterValidator(_schedule)]
# Values may be secrets: what is printed or logged shows names only.
Environment = Annotated[
    dict[str, str],
    AfterValidator(_environment_names),
    PlainSerializer(lambda value: dict.fromkeys(value, "(hidden)"), when_used="json"),
]


class Section(BaseModel):
    """Base of every section: frozen, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class DockerConfig(Section):
    """The docker backend."""

    image: str = Field(default="mcp-sandbox/base:latest", description="image of new sandboxes")
    runtime: str = Field(
        default="", description="engine runtime, such as runsc; empty = engine's default"
    )
    host: str | None = Field(
        default=None, description="engine address; empty = DOCKER_HOST, else the docker context"
    )


class LimitsConfig(Section):
    """What one sandbox may use."""

    memory: Size = Field(default=2 * GIB, ge=64 * MIB, description="memory, swap included")
    cpus: float = Field(
        default=2.0, gt=0, le=1024, allow_inf_nan=False, description="processor cores"
    )
    pids: int = Field(default=512, ge=16, description="processes and threads")
    shm: Size = Field(default=64 * MIB, ge=MIB, description="shared memory")
    tmp: Size = Field(default=256 * MIB, ge=MIB, description="temporary files (kept in memory)")
    open_files: int = Field(default=4096, ge=128, description="open files of one process")
    file_size: Size = Field(default=5 * GIB, ge=MIB, description="largest single file")

    def values(self) -> Limits:
        """Return the limits in the units that backends take."""
        return Limits(
            memory_mb=self.memory // MIB,
            cpus=self.cpus,
            pids=self.pids,
            shm_mb=self.shm // MIB,
            tmp_mb=self.tmp // MIB,
            open_files=self.open_files,
            file_mb=self.file_size // MIB,
        )


class WorkspaceConfig(Section):
    """The files that outlive every sandbox."""

    size_limit: Size = Field(
        default=5 * GIB, ge=MIB, description="a chat's files and home, allocated"
    )
    max_files: int = Field(default=1_000_000, ge=100, description="files and folders of one chat")
    min_free: Size = Field(
        default=GIB, description="free space that is kept on the data directory's disk"
    )
    user_quota: Size = Field(
        default=0, description="files and homes of all chats of one user, allocated; 0 = no limit"
    )
    retention: DurationOrZero = Field(
        default=7 * 86_400.0,
        description="a chat that nobody used for so long goes to the trash; 0 = never",
    )
    cleanup: Schedule = Field(
        default="0 3 * * *", description="when such chats are looked for, as cron writes it"
    )
    subdirectories: bool = Field(
        default=False,
        description="create code, data, output, artifacts, temp and .memory in a new one",
    )
    aliases: tuple[str, ...] = Field(
        default=(),
        description="further paths of the same files: /path for the workspace, /path=name for one "
        "of its folders; {user} and {chat} are replaced",
    )


class ProjectConfig(Section):
    """The folder that a client works in, shown to its chat's sandbox at /project."""

    access: ProjectAccess = Field(
        default="none",
        description="the client's own folder at /project: none, ro (read-only), rw, or copy (taken "
        "at the first call, without what .gitignore names)",
    )
    max_size: Size = Field(default=256 * MIB, ge=MIB, description="largest project to copy")
    max_files: int = Field(default=20_000, ge=1, description="most files and folders to copy")


class SessionsConfig(Section):
    """How long chats hold sandboxes."""

    max_open: int = Field(
        default=16, ge=1, description="open sandboxes; the least recent one is closed"
    )
    max_per_user: int = Field(default=8, ge=1, description="open sandboxes of one user")
    queue_wait: DurationOrZero = Field(
        default=30.0, description="how long a call waits while all open sandboxes are in use"
    )
    idle: Duration = Field(
        default=900.0,
        description="a sandbox that nobody uses is paused after this, where the backend can",
    )
    remove_after: Duration = Field(
        default=3600.0, description="a sandbox that nobody uses is removed after this; files stay"
    )
    lifetime: Duration = Field(
        default=86_400.0,
        description="a sandbox is replaced after this, with all that runs in it; files stay",
    )
    orphaned: Duration = Field(
        default=60.0,
        ge=1,
        description="a sandbox without a server and with nothing running ends itself after this",
    )


class PoolConfig(Section):
    """Sandboxes that are started before anybody asks, each for one new chat."""

    size: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = Field(
        default="auto",
        description="sandboxes that wait for new chats; auto = 1 in the daemon with docker, else 0",
    )
    max_age: Duration = Field(
        default=3600.0, ge=10, description="one that waited so long is replaced by a new one"
    )


class OutputConfig(Section):
    """What becomes of long output."""

    kept: Size = Field(
        default=64 * MIB,
        ge=MIB,
        description="output of one call that is kept in a file for read_file",
    )


class SkillsConfig(Section):
    """What the agent can be taught (folders with a SKILL.md)."""

    enabled: bool = Field(default=True, description="offer skills to agents")
    folders: tuple[AbsolutePath, ...] = Field(
        default=(), description="folders of skills; the first that has a name goes before the rest"
    )
    shipped: bool = Field(default=True, description="offer the skills that come with this program")
    workspace: bool = Field(
        default=False,
        description="offer skills that lie in a chat's own files too, which anybody may have put "
        "there",
    )
    catalogue: int = Field(
        default=8000,
        ge=0,
        le=64_000,
        description="characters of the server's instructions that may name skills",
    )
    narrow: Narrow = Field(
        default="off",
        description="what happens to calls of tools that an active skill's allowed-tools does not "
        "name: off = nothing, warn = the result says so, deny = they are refused",
    )


class ServeConfig(Section):
    """The daemon, `mcp-sandbox serve`."""

    http: str | None = Field(
        default=None, description="HOST:PORT on which MCP is served over HTTP too; empty = nowhere"
    )
    idle_exit: DurationOrZero = Field(
        default=1800.0,
        description="ends when for so long no client is connected and nothing runs; 0 = never",
    )
    grace: DurationOrZero = Field(
        default=10.0, description="running calls may take this long to finish when it is stopped"
    )
    max_connections: int = Field(
        default=512, ge=2, description="connections to the socket at a time"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="how the daemon logs: text or json, one line an event"
    )


class HttpConfig(Section):
    """Clients that come over HTTP."""

    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="names by which clients ask for the server, such as sandbox.example.org; "
        "those of loopback and the address it listens on are always allowed",
    )
    max_body: Size = Field(default=16 * MIB, ge=64 * KIB, description="largest message")
    request_time: Duration = Field(
        default=30.0, description="a request must have come within this time"
    )
    connections: int = Field(default=512, ge=2, description="connections at the same time")
    rate: int = Field(
        default=100,
        ge=1,
        description="requests a second of one user, over ten seconds; each 64 KiB of a large "
        "message count as one",
    )
    requests_per_user: int = Field(
        default=64, ge=1, description="requests of one user at the same time, with open streams"
    )
    sessions_per_user: int = Field(
        default=64, ge=1, description="sessions of one user's clients of the older protocol"
    )


class Config(Section):
    """Everything an operator can set."""

    data_dir: AbsolutePath = Field(
        default_factory=default_data_dir, description="where workspaces and state are kept"
    )
    backend: Literal["auto", "docker", "bubblewrap", "unsafe-local"] = Field(
        default="auto",
        description="where sandboxes live; auto = docker if it works, else bubblewrap",
    )
    network: Network = Field(default="none", description="what a sandbox reaches: none or open")
    env: Environment = Field(
        default_factory=dict[str, str], description="environment variables given to sandboxes"
    )
    docker: DockerConfig = DockerConfig()
    limits: LimitsConfig = LimitsConfig()
    workspace: WorkspaceConfig = WorkspaceConfig()
    project: ProjectConfig = ProjectConfig()
    sessions: SessionsConfig = SessionsConfig()
    pool: PoolConfig = PoolConfig()
    skills: SkillsConfig = SkillsConfig()
    output: OutputConfig = OutputConfig()
    serve: ServeConfig = ServeConfig()
    http: HttpConfig = HttpConfig()
