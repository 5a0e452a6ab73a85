"""The only user of Docker's library: in threads, with time limits, its errors translated here.

Each function says what it does if an object is absent; other failures become errors with a remedy.
"""

import math
import shutil
import socket
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Concatenate, ParamSpec, TypeVar, cast

import anyio
import docker
import requests
from anyio import CapacityLimiter, to_thread
from docker import errors as docker_errors
from docker.tls import TLSConfig

from mcp_sandbox.backends.docker.engine import (
    Engine,
    EngineHangs,
    Tls,
    build_again,
    explain_build,
    explain_refusal,
    explain_silence,
    find_engine,
)
from mcp_sandbox.backends.docker.exec_stream import hangs
from mcp_sandbox.backends.sandbox_records import make_gone_error
from mcp_sandbox.config import DockerConfig, docker_variables, home, search_path
from mcp_sandbox.errors import BackendUnavailable, ImageMissing, SandboxGone
from mcp_sandbox.models import Ending, SandboxId

T = TypeVar("T")
P = ParamSpec("P")
_TIMEOUT_S = 60
# The first version with everything that a sandbox's container requests.
_OLDEST_API = "1.41"
_BUILD_TIMEOUT_S = 1800
_CHUNK = 1024 * 1024
# The builder's own numbers of layers and containers.
_TELLS_NOTHING = ("--->", "Removing intermediate")
_CALLS_AT_ONCE = 16
# A call that lasts so long has the engine asked whether it hangs; others are told so at once.
_SLOW_S, _KNOWN_S = 3.0, 5.0
# The engine reports an end a moment after the connection has broken.
_TOLD_S = 2.0
_ASK_AGAIN_S = 0.05
_KILLED = 128 + 9
# A process that the kernel kills for lack of memory may take long to end.
_SHORTLY_NS = 10 * 10**9


class EngineConnection:
    """A connection to one engine, which is found and connected at the first call."""

    def __init__(self, find: Callable[[], Engine]) -> None:
        self._find = find
        self._engine: Engine | None = None
        self._limiter = CapacityLimiter(_CALLS_AT_ONCE)
        self._connecting = anyio.Lock()
        self._api: docker.APIClient | None = None
        self._info: dict[str, Any] | None = None
        self._hangs_until = 0.0

    async def aclose(self) -> None:
        """Close what is open; a later call connects again."""
        api, self._api = self._api, None
        if api is not None:
            await to_thread.run_sync(api.close)

    async def engine(self) -> Engine:
        """Return the engine's address; raise ConfigError."""
        if self._engine is None:
            self._engine = await to_thread.run_sync(self._find, limiter=self._limiter)
        return self._engine

    async def info(self) -> dict[str, Any]:
        """Return what the engine reports of itself and its machine; it is asked once."""
        if self._info is None:
            self._info = await self.call(lambda api: api.info())
        return self._info

    async def call(
        self,
        work: Callable[Concatenate[docker.APIClient, P], T],
        *args: P.args,
        **named: P.kwargs,
    ) -> T:
        """Run a function that takes the library's client in a thread.

        Raises Unreachable, or BackendUnavailable if no other error is more exact.
        """
        engine = await self.engine()
        try:
            # What the engine was asked is not left halfway, unless it hangs.
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._watch, engine)
                    result = await self._run(engine, lambda api: work(api, *args, **named))
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return result

    async def _run(self, engine: Engine, work: Callable[[docker.APIClient], T]) -> T:
        wait = partial(to_thread.run_sync, limiter=self._limiter, abandon_on_cancel=True)
        async with self._connecting:
            if self._api is None:
                self._api = await wait(_connect, engine)
            api = self._api
        return await wait(_translated(engine)(lambda: work(api)))

    async def _watch(self, engine: Engine) -> None:
        """Raise EngineHangs when the engine does: one that is only slow answers a ping."""
        if anyio.current_time() >= self._hangs_until:
            while True:
                await anyio.sleep(_SLOW_S)
                if await hangs(engine) and await hangs(engine):
                    break
            # The threads that wait for it keep their places, and take no further step later.
            if self._api:
                self._api.close()
                self._api.adapters.clear()
            self._api, self._limiter = None, CapacityLimiter(_CALLS_AT_ONCE)
            self._hangs_until = anyio.current_time() + _KNOWN_S
        raise EngineHangs(str(explain_silence(engine.url, "timed out")))


def connection_of(config: DockerConfig) -> EngineConnection:
    """Return a connection to the engine that the configuration or the environment names."""
    return EngineConnection(lambda: find_engine(config.host, docker_variables(), home()))


def launch(api: docker.APIClient, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Create, start and inspect a container; raise ImageMissing, SandboxGone."""
    container = _create(api, body, name)
    api.start(container)
    return inspect(api, container)


def inspect(api: docker.APIClient, name: str) -> dict[str, Any]:
    """Return the inspection of a container; raise SandboxGone if there is none of this name."""
    try:
        return cast("dict[str, Any]", api.inspect_container(name))
    except docker_errors.NotFound as exc:
        raise make_gone_error(SandboxId(name)) from exc


def list_labelled(api: docker.APIClient, labels: Sequence[str]) -> list[dict[str, Any]]:
    """Return summaries of the containers, running or not, that carry all of `labels`."""
    filters: dict[str, Any] = {"label": list(labels)}
    return cast("list[dict[str, Any]]", cast("Any", api).containers(all=True, filters=filters))


def remove(api: docker.APIClient, name: str) -> None:
    """Kill and remove a container; return when it is gone, also if it was before."""
    with suppress(docker_errors.NotFound):
        try:
            api.remove_container(name, force=True, v=True)
        except docker_errors.APIError as exc:
            if exc.status_code != requests.codes.conflict:
                raise
            # It is being removed already.
            api.wait(name, timeout=_TIMEOUT_S, condition="removed")


def run(api: docker.APIClient, body: dict[str, Any], *, timeout_s: int) -> tuple[int, str]:
    """Run a container to its end and remove it; return its exit code and what it printed."""
    container = _create(api, body, None)
    try:
        api.start(container)
        code = api.wait(container, timeout=timeout_s)["StatusCode"]
        return code, api.logs(container).decode(errors="replace")
    finally:
        api.remove_container(container, force=True)


def prepare_exec(api: docker.APIClient, name: str, command: list[str], *, forget: str) -> str:
    """Prepare a program in a container; return the API path that starts it.

    It sees the environment except the variable `forget`. Raises SandboxGone.
    """
    with _gone_unless_running(name):
        prepared = api.exec_create(name, command, stdin=True, environment=[forget], workdir="/")
    return f"/v{api.api_version}/exec/{prepared['Id']}/start"


def create_network(api: docker.APIClient, name: str, labels: dict[str, str]) -> None:
    """Create a bridge network whose members do not reach each other; raise CapacityReached."""
    api.create_network(
        name,
        driver="bridge",
        options={"com.docker.network.bridge.enable_icc": "false"},
        check_duplicate=True,
        internal=False,
        labels=labels,
        enable_ipv6=False,
    )


def remove_network(api: docker.APIClient, name: str) -> None:
    """Remove a network; absent is fine."""
    with suppress(docker_errors.NotFound):
        api.remove_network(name)


def set_paused(api: docker.APIClient, name: str, *, paused: bool) -> None:
    """Pause all processes of a container, or let them go on; raise SandboxGone."""
    with _gone_unless_running(name):
        if bool(inspect(api, name)["State"]["Paused"]) != paused:
            (api.pause if paused else api.unpause)(name)


async def read_ending(connection: EngineConnection, name: str, within_s: float) -> Ending | None:
    """Return why a container ended; None if it still runs after `within_s` seconds."""
    runs_until, told_until = anyio.current_time() + within_s, math.inf
    while True:
        running, found, likely = await connection.call(_look, name)
        now = anyio.current_time()
        if not running:
            told_until = min(told_until, now + _TOLD_S)
        if found or (running and now >= runs_until):
            return found
        if now >= told_until:
            return likely
        await anyio.sleep(_ASK_AGAIN_S)


@dataclass(frozen=True)
class Image:
    """An image: its content address, labels, names, size in bytes, environment if known."""

    id: str
    labels: dict[str, str]
    names: tuple[str, ...]
    size: int
    env: tuple[str, ...] = ()


def find_image(api: docker.APIClient, name: str) -> Image:
    """Return the image of that name; raise ImageMissing."""
    try:
        found = cast("Any", api).inspect_image(name)
    except docker_errors.ImageNotFound as exc:
        raise ImageMissing(f"the Docker engine has no image {name}; {build_again(name)}") from exc
    names, env = tuple(found["RepoTags"] or ()), tuple(found["Config"].get("Env") or ())
    return Image(found["Id"], found["Config"].get("Labels") or {}, names, found["Size"], env)


def labelled_images(api: docker.APIClient, label: str, *, dangling: bool = False) -> list[Image]:
    """Return the images that carry a label; with `dangling` only those without a name."""
    filters: dict[str, Any] = {"label": label, "dangling": dangling}
    return [
        Image(row["Id"], row["Labels"] or {}, tuple(row["RepoTags"] or ()), row["Size"])
        for row in api.images(filters=filters)
    ]


def build_image(
    api: docker.APIClient,
    context: IO[bytes],
    tag: str,
    arguments: dict[str, str],
    say: Callable[[str], None],
) -> None:
    """Build from a tar file; `say` gets each line, in another thread. Raises OperatorError."""
    for event in api.build(
        fileobj=context,
        custom_context=True,
        tag=tag,
        buildargs=arguments,
        network_mode="host",
        rm=True,
        forcerm=True,
        decode=True,
        timeout=_BUILD_TIMEOUT_S,
    ):
        if "error" in event:
            raise explain_build(event["error"])
        for line in event.get("stream", event.get("status", "")).splitlines():
            if line.strip() and not line.strip().startswith(_TELLS_NOTHING):
                say(line.rstrip())


def load_image(
    api: docker.APIClient, tar: Path, repository: str, tag: str, changes: list[str]
) -> None:
    """Make an image of one layer from a tar file of a root directory."""
    with tar.open("rb") as file:
        # An iterator: with a file the library announces chunks and sends none.
        chunks = iter(lambda: file.read(_CHUNK), b"")
        api.import_image_from_stream(chunks, repository, tag, changes)


def remove_image(api: docker.APIClient, image: str) -> None:
    """Remove an image unless a container or another image needs it; absent is fine."""
    try:
        api.remove_image(image)
    except docker_errors.APIError as exc:
        if exc.status_code not in (requests.codes.not_found, requests.codes.conflict):
            raise


def _connect(engine: Engine) -> docker.APIClient:
    with _translated(engine):
        if engine.is_local:
            # Tried first, because the library leaks a socket that it cannot connect.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(_TIMEOUT_S)
                probe.connect(engine.url.removeprefix("unix://"))
        with closing(_client(engine, _OLDEST_API)) as first:
            version = str(first.version(api_version=False)["ApiVersion"])
        if tuple(map(int, version.split("."))) < tuple(map(int, _OLDEST_API.split("."))):
            raise BackendUnavailable(
                f"the Docker engine at {engine.url} is too old (API {version}): "
                f"install one with API {_OLDEST_API} (Docker 20.10) or newer"
            )
        return _client(engine, version)


def _client(engine: Engine, version: str) -> docker.APIClient:
    api = docker.APIClient(
        base_url=engine.url,
        version=version,
        timeout=_TIMEOUT_S,
        tls=_tls(engine.tls) if engine.tls else False,
        # The user's own ssh program knows the user's keys, agents and hosts.
        use_ssh_client=shutil.which("ssh", path=search_path()) is not None,
        max_pool_size=_CALLS_AT_ONCE,
    )
    # Else REQUESTS_CA_BUNDLE, meant for other servers, replaces the engine's own CA.
    api.trust_env = False
    return api


def _tls(tls: Tls) -> TLSConfig:
    certificate = (str(tls.certificate), str(tls.key)) if tls.certificate else None
    ca = str(tls.ca) if tls.ca else None
    return TLSConfig(client_cert=certificate, ca_cert=ca, verify=tls.verify)


def _create(api: docker.APIClient, body: dict[str, Any], name: str | None) -> str:
    return cast("str", cast("Any", api).create_container_from_config(body, name)["Id"])


def _look(api: docker.APIClient, name: str) -> tuple[bool, Ending | None, Ending]:
    """Return whether it runs, why it ended if the engine reports that, and else what is likely."""
    with suppress(SandboxGone):
        state = inspect(api, name)["State"]
        if state["Paused"]:
            # By what was asked of an engine that hung, or by somebody else.
            api.unpause(name)
        if state["Running"]:
            return True, None, "lost"
    filters = {"type": "container", "container": name, "event": ["oom", "kill", "die"]}
    # Only past events, without a wait. The library's types know whole seconds only.
    until = cast("int", f"{time.time():.9f}")
    with closing(api.events(since=1, until=until, filters=filters, decode=True)) as events:
        return False, *_ending(events)


def _ending(events: Iterable[dict[str, Any]]) -> tuple[Ending | None, Ending]:
    """Return why a container ended, from its events; if they do not say it yet, what is likely."""
    out_of_memory_at, killed, died_at, code = 0, False, 0, -1
    for event in events:
        if event["Action"] == "oom":
            out_of_memory_at = event["timeNano"]
        elif event["Action"] == "kill":
            killed = killed or not died_at
        elif not died_at:
            died_at = event["timeNano"]
            code = int(event["Actor"]["Attributes"].get("exitCode", -1))
    if not died_at:
        return None, "lost"
    if code == _KILLED and not killed:
        # The engine may tell of the lack of memory after the end.
        return "memory" if abs(died_at - out_of_memory_at) < _SHORTLY_NS else None, "killed"
    return "killed" if killed and code == _KILLED else "failed" if code else "ended", "lost"


@contextmanager
def _gone_unless_running(name: str) -> Generator[None]:
    try:
        yield
    except docker_errors.APIError as exc:
        if exc.status_code in (requests.codes.not_found, requests.codes.conflict):
            raise make_gone_error(SandboxId(name)) from exc
        raise


@contextmanager
def _translated(engine: Engine) -> Generator[None]:
    try:
        yield
    except docker_errors.APIError as exc:
        raise explain_refusal(exc.status_code or 0, str(exc.explanation or exc)) from exc
    except (docker_errors.DockerException, requests.RequestException, OSError) as exc:
        raise explain_silence(engine.url, str(exc)) from exc
