"""Frozen models of every setting, one section per room. The help of a setting stands here."""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, model_validator

from mcp_sandbox.config.environment import default_data_dir, variable
from mcp_sandbox.config.values import (
    GIB,
    KIB,
    MIB,
    AbsolutePath,
    Duration,
    DurationOrZero,
    Endpoint,
    Environment,
    KeySource,
    OptionalPath,
    OptionalSource,
    Proxy,
    Schedule,
    ServiceUrl,
    Size,
    Source,
    UidRange,
    Variable,
)
from mcp_sandbox.models import Limits, Network, ProjectAccess


class Section(BaseModel):
    """Base of every section: frozen, and an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def setting(default: object, about: str, **bounds: Any) -> Any:  # noqa: ANN401 - as Field
    """Return a field with its help."""
    return Field(default=default, description=about, **bounds)


class DockerConfig(Section):
    """The docker backend."""

    image: str = setting("mcp-sandbox/base:latest", "image of new sandboxes", min_length=1)
    runtime: str = setting("", "engine runtime, such as runsc; empty = engine's default")
    host: str | None = setting(None, "engine address; empty = DOCKER_HOST, else the docker context")


class KubernetesConfig(Section):
    """The kubernetes backend."""

    context: str = setting("", "context of KUBECONFIG; empty = its current one, or in the cluster")
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = setting(
        "sandboxes", "namespace of all sandboxes, which must exist"
    )
    image: str = setting(
        "mcp-sandbox/base:latest", "image of new sandboxes, as nodes pull it", min_length=1
    )
    objects: Literal["auto", "sandbox", "pod"] = setting(
        "auto", "sandbox (agents.x-k8s.io/v1beta1), pod (with a claim), or what the cluster has"
    )
    storage: Literal["volume", "backups"] = setting(
        "volume",
        "volume: files on a claim, kept while paused; backups: in the pod, saved before it ends",
    )
    storage_class: str = setting("", "class of the claims for files; empty = the cluster's default")
    warm_pool: str = setting(
        "", "SandboxWarmPool of `mcp-sandbox kubernetes manifests`; only with storage: backups"
    )
    template: OptionalPath = setting(
        None, "file with metadata and spec to add to pods, such as runtimeClassName"
    )
    seccomp_profile: str = setting(
        "", "file of `kubernetes seccomp` on the nodes; empty = the runtime's own seccomp profile"
    )
    start_timeout: Duration = setting(45.0, "a pod that does not run by then is given up")
    cpu_request: float = setting(0.05, "processors that a node keeps for a pod", ge=0.001, le=64)
    key: KeySource = setting(
        "", "what servers of a fleet know each other's sandboxes by: file:PATH or env:NAME"
    )

    @model_validator(mode="after")
    def _pools_hold_no_volumes(self) -> "KubernetesConfig":
        if self.warm_pool and (self.storage != "backups" or self.objects == "pod"):
            raise ValueError(
                "write kubernetes.storage: backups, and objects: sandbox or auto, beside "
                "kubernetes.warm_pool: with a volume no sandbox is warm"
            )
        return self


class LimitsConfig(Section):
    """What one sandbox may use."""

    memory: Size = setting(2 * GIB, "memory, swap included", ge=64 * MIB)
    cpus: float = setting(2.0, "processor cores", gt=0, le=1024, allow_inf_nan=False)
    pids: int = setting(512, "processes and threads", ge=16)
    shm: Size = setting(64 * MIB, "shared memory", ge=MIB)
    tmp: Size = setting(256 * MIB, "temporary files (kept in memory)", ge=MIB)
    open_files: int = setting(4096, "open files of one process", ge=128)
    file_size: Size = setting(5 * GIB, "largest single file", ge=MIB)

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


class SandboxConfig(Section):
    """Who sandboxes run as."""

    uid_range: UidRange = setting(
        "", "user ids, START-END, one for each chat of a root's server; empty = 65,536 picked once"
    )


class WorkspaceConfig(Section):
    """The files that outlive every sandbox."""

    size_limit: Size = setting(5 * GIB, "a chat's files and home, allocated", ge=MIB)
    max_files: int = setting(1_000_000, "files and folders of one chat", ge=100)
    min_free: Size = setting(GIB, "free space that is kept on the data directory's disk")
    user_quota: Size = setting(
        0, "files and homes of all chats of one user, allocated; 0 = no limit"
    )
    retention: DurationOrZero = setting(
        7 * 86_400.0, "a chat not used for so long goes to the trash; 0 = never"
    )
    cleanup: Schedule = setting("0 3 * * *", "when such chats are looked for, as cron writes it")
    subdirectories: bool = setting(
        False, "create code, data, output, artifacts, temp and .memory in a new one"
    )
    aliases: tuple[str, ...] = setting(
        (),
        "further paths of the same files: /path for the workspace, /path=name for one "
        "of its folders; {user} and {chat} are replaced",
    )


class ProjectConfig(Section):
    """The folder that a client works in, shown to its chat's sandbox at /project."""

    access: ProjectAccess = setting(
        "none",
        "the client's own folder at /project: none, ro (read-only), rw, or copy (taken "
        "at the first call, without what .gitignore names)",
    )
    max_size: Size = setting(256 * MIB, "largest project to copy", ge=MIB)
    max_files: int = setting(20_000, "most files and folders to copy", ge=1)


class StorageConfig(Section):
    """An object store (S3) that keeps backups of chats: their workspace and home."""

    endpoint: Endpoint = setting(
        "", "address of the object store; empty = S3_ENDPOINT, or no backups if nothing is set here"
    )
    bucket: str = setting("", "its bucket, which must exist")
    region: str = setting("us-east-1", "its region")
    access_key: KeySource = setting(
        "", "where the key's name comes from: file:PATH, env:NAME or command: PROGRAM ARGS"
    )
    secret_key: KeySource = setting("", "and the key itself")
    prefix: Annotated[str, Field(pattern=r"^([\w-][\w.-]*(/[\w-][\w.-]*)*)?$")] = setting(
        "mcp-sandbox", "what the names of all objects begin with"
    )
    keep: int = setting(5, "backups of a chat that are kept", ge=1, le=1000)
    max_size: Size = setting(4 * GIB, "largest backup, before it is compressed", ge=MIB)
    every: Duration = setting(300.0, "a chat in use is saved this often")
    after: Duration = setting(60.0, "and this long after its last call")
    leave_out: tuple[str, ...] = setting((".cache",), "folders of the home that are not saved")

    @model_validator(mode="before")
    @classmethod
    def _find_endpoint(cls, given: Any) -> Any:  # noqa: ANN401 - what was written
        if isinstance(given, dict) and given and not given.get("endpoint"):
            return {**given, "endpoint": variable("S3_ENDPOINT")}  # pyright: ignore[reportUnknownVariableType]
        return given

    @model_validator(mode="after")
    def _complete(self) -> "StorageConfig":
        needed = (self.endpoint, self.bucket, self.access_key, self.secret_key)
        if any(needed) and not all(needed):
            raise ValueError(
                "write all of storage.endpoint (or S3_ENDPOINT), bucket, access_key and secret_key"
            )
        return self


class E2BConfig(Section):
    """Sandboxes of the service E2B, for backend: e2b."""

    domain: str = setting("", "where it is; empty = E2B's own cloud")
    api_key: KeySource = setting(
        "env:E2B_API_KEY", "where the key comes from: file:PATH, env:NAME or command: PROGRAM ARGS"
    )
    template: str = setting("", "what sandboxes are made from; empty = E2B's own base")
    timeout: Duration = setting(3600.0, "one that no server holds is paused after so long", ge=60)


class FleetConfig(Section):
    """What a platform and its servers share; with a name the server is one of several."""

    redis: Annotated[
        str,
        Field(pattern="^(rediss?|unix)://.+$|^$"),
        # A password may stand there.
        PlainSerializer(
            lambda value: re.sub(r"\A([^/]*+//).*@", r"\1(hidden)@", value), when_used="json"
        ),
    ] = setting("", "Redis in which a platform reads what was prepared, as redis://HOST:PORT/DB")
    name: Annotated[str, Field(pattern=r"^([A-Za-z0-9][\w.-]{0,63})?$")] = setting(
        "", "this server's name among those that share chats; empty = it shares none"
    )
    url: Annotated[str, Field(pattern=r"^(https?://[^/]+/?)?$")] = setting(
        "", "where the other servers reach its HTTP, such as http://10.0.0.5:8080"
    )
    lease: Duration = setting(30.0, "how long a server that is not heard of keeps its chats", ge=1)
    shared_data_dir: bool = setting(
        False, "all servers have one data_dir, on a file system whose locks hold between machines"
    )

    @model_validator(mode="after")
    def _complete(self) -> "FleetConfig":
        needs_all = self.name or self.url or self.shared_data_dir
        if needs_all and not (self.name and self.url and self.redis):
            raise ValueError("write all of fleet.redis, name and url, or no name and no url")
        return self


class SessionsConfig(Section):
    """How long chats hold sandboxes."""

    max_open: int = setting(16, "open sandboxes; the least recent one is closed", ge=1)
    max_per_user: int = setting(8, "open sandboxes of one user", ge=1)
    queue_wait: DurationOrZero = setting(
        30.0, "how long a call waits while all open sandboxes are in use"
    )
    remove_after: Duration = setting(
        3600.0, "a sandbox not used for so long is removed; files stay"
    )
    lifetime: Duration = setting(
        86_400.0, "a sandbox is replaced after this, with all that runs in it; files stay"
    )
    orphaned: Duration = setting(
        60.0, "a sandbox without a server and with nothing running ends itself after this", ge=1
    )


class PoolConfig(Section):
    """Sandboxes started in advance, each for one new chat."""

    size: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = setting(
        "auto", "sandboxes that wait for new chats; auto = 1 in the daemon with docker, else 0"
    )
    max_age: Duration = setting(3600.0, "one that waited so long is replaced by a new one", ge=10)


class CallsConfig(Section):
    """How long commands and code may take, and how long a call waits for them."""

    timeout: Duration = setting(3600.0, "a command that names no limit is killed after this")
    code_timeout: Duration = setting(120.0, "code that names no limit is killed after this")
    longest_wait: Duration = setting(
        55.0, "the longest time that a call may wait; clients give up after a minute", le=3600
    )


class OutputConfig(Section):
    """What becomes of long output."""

    kept: Size = setting(64 * MIB, "output of one call kept in a file for read_file", ge=MIB)


class SkillsConfig(Section):
    """What the agent can be taught (folders with a SKILL.md)."""

    enabled: bool = setting(True, "offer skills to agents")
    folders: tuple[AbsolutePath, ...] = setting(
        (), "folders of skills; the first that has a name goes before the rest"
    )
    shipped: bool = setting(True, "offer the skills that come with this program")
    workspace: bool = setting(
        False, "offer skills that lie in a chat's own files too, which come from any source"
    )
    catalogue: int = setting(
        8000, "characters of the server's instructions that may name skills", ge=0, le=64_000
    )


class AllowConfig(Section):
    """A host that sandboxes may reach."""

    host: str = Field(description="a host, or *. and a name for its subdomains")
    port: int | None = setting(None, "its only port; empty = 80 and 443", ge=1, le=65535)
    read: bool = setting(False, "only requests that read")
    private: bool = setting(False, "its addresses may be private ones; host and port are required")


class EgressConfig(Section):
    """What sandboxes reach with `network: allowlist`."""

    allow: tuple[str | AllowConfig, ...] = setting(
        (),
        "hosts: HOST, HOST:PORT, *.HOST for subdomains, the presets packages and git, or "
        "{host, port, read, private}; without a port 80 and 443",
    )
    deny: tuple[str, ...] = setting((), "hosts that nothing else can allow")
    ca_bundle: OptionalPath = setting(
        None, "file of further certificate authorities to trust, such as a company's"
    )
    upstream_proxy: Proxy = setting(
        "", "http://HOST:PORT of a proxy by which this machine reaches the network"
    )


class SecretConfig(Section):
    """A value that stays outside; inside is a placeholder."""

    source: Source = Field(alias="from", description="file:PATH or command: PROGRAM ARGS")
    hosts: tuple[str, ...] = Field(description="hosts that get the value", min_length=1)
    header: str = setting(
        "authorization", "the header of requests in which it goes", pattern=r"^[A-Za-z0-9-]+$"
    )
    users: tuple[str, ...] = setting(("local",), "users for whose chats it is")


class ConnectorConfig(Section):
    """How a model service is reached; its key stays outside of sandboxes."""

    url: ServiceUrl = Field(
        description="address as programs take it: https://api.anthropic.com, with openai …/v1"
    )
    key: OptionalSource = setting(
        "", "where the key comes from: file:PATH, of mode 600, or command: PROGRAM ARGS"
    )
    protocol: Literal["anthropic", "openai"] = setting("anthropic", "what the service speaks")
    auth: Literal["x-api-key", "bearer"] | None = setting(
        None, "how the key is sent; empty = x-api-key with anthropic, bearer with openai"
    )
    model: str = setting("", "model of runs that name none")
    models: tuple[str, ...] = setting((), "models that may be asked for; empty = any")
    server_tools: bool = setting(
        False, "let the service search, fetch and run for a sandbox, which reaches a network so"
    )


class RunConfig(Section):
    """What one run of an agent may use."""

    max_requests: int = setting(1000, "requests to the model", ge=1)
    max_output_tokens: int = setting(
        2_000_000, "tokens that the model may write; once they are, no further request", ge=1
    )
    timeout: Duration = setting(3600.0, "a run is ended after this")


class AgentsConfig(Section):
    """Coding agents that work inside a chat's sandbox."""

    connector: str = setting("", "connector of runs that name none; empty = the only one")
    command: str = setting("claude", "program of runs that name none")
    folders: tuple[AbsolutePath, ...] = setting((), "folders of assistants")
    usage_log: OptionalPath = setting(
        None, "file that gets one line of JSON for each run: tokens, cost, turns, time"
    )
    run: RunConfig = RunConfig()
    programs: OptionalPath = setting(
        None, "folder of programs for every sandbox, read-only; its bin comes first there"
    )


class BridgeProcessConfig(Section):
    """A program of this machine that reads its arguments as JSON and writes JSON."""

    command: tuple[str, ...] = Field(description="program and arguments", min_length=1)
    about: str = setting("", "what it is for, as an agent reads it")
    timeout: Duration = setting(60.0, "an answer must have come within this time")


class BridgeServerConfig(Section):
    """An MCP server, started for each run, or reached by HTTP."""

    command: tuple[str, ...] = setting((), "program and arguments, of one that speaks on stdio")
    env: Environment = Field(default_factory=dict[str, str], description="its variables")
    url: str = setting("", "address of one that speaks streamable HTTP")

    @model_validator(mode="after")
    def _one_way(self) -> "BridgeServerConfig":
        if bool(self.command) == bool(self.url):
            raise ValueError("give either command or url")
        return self


class BridgeConfig(Section):
    """Tools of this machine for agents inside; each assistant names those that it gets."""

    path: str = setting(
        "/tmp/mcp-sandbox.sock",  # noqa: S108 - inside
        "its socket inside",
        pattern=r"^/[!-~]+$",
    )
    python: tuple[str, ...] = setting((), "functions as MODULE:FUNCTION")
    processes: dict[str, BridgeProcessConfig] = Field(
        default_factory=dict[str, BridgeProcessConfig],
        description="programs: NAME: {command, about, timeout}",
    )
    servers: dict[str, BridgeServerConfig] = Field(
        default_factory=dict[str, BridgeServerConfig],
        description="MCP servers: NAME: {command, env} or {url}",
    )


class PreviewsConfig(Section):
    """Addresses at which a browser on this machine finds what listens in a sandbox."""

    enabled: bool = setting(True, "let agents open previews")
    listen: str = setting("", "HOST:PORT where a daemon serves all", pattern=r"^([\w.-]+:\d+)?$")
    url: Endpoint = setting("", "how browsers reach `listen`; a name goes before the host of this")


class PolicyConfig(Section):
    """What may be run, and about what a person is asked."""

    profile: Literal["auto", "isolated", "strict", "off"] = setting(
        "auto",
        "isolated = refuse what destroys a chat's files, ask before something leaves; strict = ask "
        "before all that is risky; off = grade and record only; auto = strict on unsafe-local, "
        "else isolated",
    )
    rules: tuple[AbsolutePath, ...] = setting((), "files of further rules, which make stricter")


class AuditConfig(Section):
    """The record of what ran, which shows whether it was changed."""

    enabled: bool = setting(True, "record calls, refusals, grants and what leaves sandboxes")
    sync: Literal["batch", "each"] = setting(
        "batch", "when a line is on the disk: batch = within 100 ms, each = before its call runs"
    )
    on_error: Literal["stop", "go_on"] = setting(
        "stop", "what cannot be recorded: stop = does not run, go_on = runs, with a warning"
    )
    keep: Duration = setting(90 * 86_400.0, "whole files are removed after this")
    max_minute: Size = setting(16 * MIB, "a chat that adds more in a minute waits", ge=64 * KIB)
    max_file: Size = setting(
        64 * MIB, "a file that is larger is followed by a new one", ge=64 * KIB
    )


class ServeConfig(Section):
    """The daemon, `mcp-sandbox serve`."""

    http: str | None = setting(
        None, "HOST:PORT on which MCP is served over HTTP too; empty = nowhere"
    )
    idle_exit: DurationOrZero = setting(
        1800.0, "ends when for so long no client is connected and nothing runs; 0 = never"
    )
    grace: DurationOrZero = setting(
        10.0, "running calls may take this long to finish when it is stopped"
    )
    max_connections: int = setting(512, "connections to the socket at a time", ge=2)
    log_format: Literal["text", "json"] = setting(
        "text", "how the daemon logs: text or json, one line an event"
    )


class ControlConfig(Section):
    """The HTTP API by which a platform steers chats, beside MCP on the address of `serve.http`."""

    enabled: bool = setting(False, "serve it, to tokens of the scopes control and platform")
    access_check: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = setting(
        "", "MODULE:FUNCTION of the operator that says who may have a sandbox"
    )


class HttpConfig(Section):
    """Clients that come over HTTP."""

    allowed_hosts: tuple[str, ...] = setting(
        (),
        "names by which clients ask for the server, such as sandbox.example.org; "
        "those of loopback and the address it listens on are always allowed",
    )
    max_body: Size = setting(16 * MIB, "largest message", ge=64 * KIB)
    request_time: Duration = setting(30.0, "a request must have come within this time")
    connections: int = setting(512, "connections at the same time", ge=2)
    rate: int = setting(
        100,
        "requests a second of one user, over ten seconds; each 64 KiB of a large "
        "message count as one",
        ge=1,
    )
    requests_per_user: int = setting(
        64, "requests of one user at the same time, with open streams", ge=1
    )
    sessions_per_user: int = setting(
        64, "sessions of one user's clients of the older protocol", ge=1
    )


class Config(Section):
    """Everything an operator can set."""

    data_dir: AbsolutePath = Field(
        default_factory=default_data_dir, description="where workspaces and state are kept"
    )
    backend: Literal[
        "auto", "docker", "bubblewrap", "unsafe-local", "e2b", "kubernetes", "noop"
    ] = setting(
        "auto",
        "where sandboxes live; auto = docker if it works, else bubblewrap; noop = nowhere",
    )
    network: Network = setting(
        "none", "what a sandbox reaches: none, allowlist (hosts of egress.allow) or open"
    )
    env: Environment = Field(
        default_factory=dict[str, str], description="environment variables given to sandboxes"
    )
    egress: EgressConfig = EgressConfig()
    secrets: dict[Variable, SecretConfig] = Field(
        default_factory=dict[str, SecretConfig],
        description="values that only requests to their hosts get: "
        "NAME: {from, hosts, header, users}",
    )
    docker: DockerConfig = DockerConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    limits: LimitsConfig = LimitsConfig()
    sandbox: SandboxConfig = SandboxConfig()
    workspace: WorkspaceConfig = WorkspaceConfig()
    project: ProjectConfig = ProjectConfig()
    storage: StorageConfig = StorageConfig()
    e2b: E2BConfig = E2BConfig()
    fleet: FleetConfig = FleetConfig()
    sessions: SessionsConfig = SessionsConfig()
    pool: PoolConfig = PoolConfig()
    skills: SkillsConfig = SkillsConfig()
    calls: CallsConfig = CallsConfig()
    output: OutputConfig = OutputConfig()
    previews: PreviewsConfig = PreviewsConfig()
    policy: PolicyConfig = PolicyConfig()
    audit: AuditConfig = AuditConfig()
    connectors: dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], ConnectorConfig] = Field(
        default_factory=dict[str, ConnectorConfig],
        description="model services of agents: "
        "NAME: {url, key, model, protocol, auth, models, server_tools}",
    )
    agents: AgentsConfig = AgentsConfig()
    bridge: BridgeConfig = BridgeConfig()
    serve: ServeConfig = ServeConfig()
    http: HttpConfig = HttpConfig()
    control: ControlConfig = ControlConfig()
