"""Makes, finds and removes sandboxes that are containers of a Docker engine.

A local engine (unix socket) with a runtime that shares the kernel's sockets is reached through a
mounted directory. Any other (tcp, ssh, a virtual machine, gVisor) through the relay, which the
engine starts in the container once per channel. Workspaces are always bind mounts: a remote
engine works when it sees the data directory under the same path (loopback, a shared filesystem);
where it does not, creation fails with a sentence that says so.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import ByteStream

from mcp_sandbox.backends.docker.client import Connection, Containers, Image, Images
from mcp_sandbox.backends.docker.complaints import build_again
from mcp_sandbox.backends.docker.engine import find_engine
from mcp_sandbox.backends.docker.exec_stream import open_exec
from mcp_sandbox.backends.docker.facts import facts_of
from mcp_sandbox.backends.docker.life import Life
from mcp_sandbox.backends.docker.live import first_process_problems
from mcp_sandbox.backends.docker.machine import (
    has_apparmor,
    is_gvisor,
    processors,
    refuse_unusable,
    shares_sockets,
)
from mcp_sandbox.backends.docker.record import Record, sandbox_user, stale_records
from mcp_sandbox.backends.docker.sandbox import DockerSandbox
from mcp_sandbox.backends.docker.spec import (
    APP,
    INSTANCE_LABEL,
    LABEL_PREFIX,
    PYTHON,
    RELAY,
    RUNNER_LABEL,
    SOCKET,
    Placement,
    container_body,
    instance_of,
)
from mcp_sandbox.backends.docker.verify import weaker_fields
from mcp_sandbox.backends.local_socket import connect
from mcp_sandbox.backends.runner_sources import runner_digest
from mcp_sandbox.config import DockerConfig, docker_variables, home
from mcp_sandbox.errors import BackendUnavailable, ImageMissing, InsecureSandbox, SandboxGone
from mcp_sandbox.models import (
    BackendName,
    Network,
    SandboxFacts,
    SandboxId,
    SandboxInfo,
    SandboxSpec,
    SandboxState,
)
from mcp_sandbox.runner.interpreter import is_steered

_START_S = 60.0
_LOOK_S = 2.0
_CONNECT_S = 10.0
_IMAGE_FRESH_S = 10.0
_PRESENT = ("created", "running", "paused", "restarting")
_ID = re.compile(r"mcs-[0-9a-f]{16}")


class DockerBackend:
    """Sandboxes of one data root on one engine."""

    def __init__(self, config: DockerConfig, data_root: Path) -> None:
        self._config = config
        self._folder = data_root / "sandbox" / "run"
        self._instance = instance_of(data_root)
        self._connection = Connection(lambda: find_engine(config.host, docker_variables(), home()))
        self._containers = Containers(self._connection)
        self._images = Images(self._connection)
        self._life = Life(self._connection)
        self._image: tuple[float, Image] | None = None
        self._swept = False

    @property
    def name(self) -> BackendName:
        return "docker"

    async def aclose(self) -> None:
        """Close idle connections to the engine; sandboxes go on."""
        await self._connection.aclose()

    async def probe(self) -> str:
        """Start a container as hardened as a sandbox; returns a line about engine and runtime.

        Raises:
            BackendUnavailable: a step fails; the message says which and what to do.
            ImageMissing: the image is absent or outdated.
        """
        info = await self._connection.info()
        placement = await self._placement(SandboxId(f"probe-{secrets.token_hex(4)}"), "", "none")
        body = container_body(SandboxSpec(mounts=()), placement)
        body["Entrypoint"] = [PYTHON, "-I", "-S", "-c", "print(6 * 7)"]
        body["HostConfig"] |= {"AutoRemove": False, "LogConfig": {"Type": "json-file"}}
        code, said = await self._containers.run(body, timeout_s=int(_START_S))
        if code != 0 or said.strip() != "42":
            raise BackendUnavailable(
                f"a test container of {self._config.image} ended with {code} and said "
                f"{said[-300:]!r}: {build_again(self._config.image)}"
            )
        runtime = self._config.runtime or info.get("DefaultRuntime", "default runtime")
        return f"Docker {info.get('ServerVersion')} with {runtime} runs {self._config.image}"

    async def origin(self) -> str:
        """The image, by its content, and the runtime.

        Raises:
            BackendUnavailable: the engine does not answer.
            ImageMissing: the image is absent or outdated.
        """
        info = await self._connection.info()
        runtime = self._config.runtime or info.get("DefaultRuntime", "")
        return f"{(await self._current_image()).id} {runtime}"

    async def create(self, spec: SandboxSpec) -> DockerSandbox:
        """Make and start a container; returns once its runner accepts connections.

        Raises:
            BackendUnavailable: the engine does not answer or refuses.
            ImageMissing: the image is absent or outdated.
            InsecureSandbox: it came out weaker than asked for.
            CapacityReached: the engine has no network left.
            StorageUnavailable: the data root cannot be written.
        """
        record = Record(self._folder / f"mcs-{secrets.token_hex(8)}")
        token = secrets.token_bytes(32)
        try:
            by_file = await self._hands_over(spec)
            write = partial(record.write, token, spec.network, hand_over=by_file)
            await to_thread.run_sync(write)
            placement = await self._placement(record.id, token.hex(), spec.network)
            inspected = await self._start(spec, record, replace(placement, token_file=by_file))
            facts = facts_of(self._config.image, inspected, await self._connection.info())
        except BaseException:
            await self.destroy(record.id)
            raise
        return self._sandbox(record, token, facts, spec.labels)

    async def attach(self, sandbox_id: SandboxId) -> DockerSandbox:
        """Find a running sandbox that this or another process made; a paused one goes on.

        Raises:
            SandboxGone: it is not running.
        """
        record = self._record(sandbox_id)
        token = await to_thread.run_sync(record.token)
        inspected = await self._containers.inspect(sandbox_id)
        state = inspected["State"]
        if state["Status"] == "paused":
            await self._life.resume(sandbox_id)
        elif state["Status"] != "running":
            raise SandboxGone(
                f"sandbox {sandbox_id} is {state['Status']}; "
                "the next call starts a new one on the same files"
            )
        facts = facts_of(self._config.image, inspected, await self._connection.info())
        labels = await to_thread.run_sync(record.labels)
        return self._sandbox(record, token, facts, labels or _labels(inspected["Config"]))

    async def running(self) -> Sequence[SandboxInfo]:
        """The sandboxes of this data root; also clears up after those that ended themselves."""
        present = [row for row in await self._sweep() if row["State"] in _PRESENT]
        return await to_thread.run_sync(lambda: [self._info(row) for row in present])

    async def relabel(self, sandbox_id: SandboxId, labels: Mapping[str, str]) -> None:
        """Give a sandbox other labels than those that it was made with.

        Raises:
            SandboxGone: nothing is known of it.
            StorageUnavailable: the data root cannot be written.
        """
        await to_thread.run_sync(self._record(sandbox_id).relabel, labels)

    async def destroy(self, sandbox_id: SandboxId) -> None:
        """Kill and remove it with everything of it; gone already is not an error."""
        record = self._record(sandbox_id)
        # Half removed would be worse than late; each call to the engine has its own limit.
        with anyio.CancelScope(shield=True):
            state = await self._state_of_ours(sandbox_id)
            if state == "paused":
                # gVisor does not end what is paused.
                with suppress(SandboxGone):
                    await self._life.resume(sandbox_id)
            if state is not None:
                await self._containers.remove(sandbox_id)
            await self._clear(record)

    async def connect(self, record: Record, *, deadline_s: float) -> ByteStream:
        """Open a byte stream to the runner of a container.

        Raises:
            SandboxGone: it does not run or does not listen within `deadline_s`.
        """
        engine = await self._connection.engine()
        if shares_sockets(engine, await self._connection.info(), self._config.runtime):
            return await connect(record.sockets, deadline_s=deadline_s)
        command = [PYTHON, "-I", "-S", RELAY, "--announce", SOCKET, f"{deadline_s:g}"]
        # The token is in the container's environment, and another process of the sandbox could
        # read it from the relay's before the relay has shut itself off.
        path = await self._containers.prepare_exec(record.id, command, forget="MCP_SANDBOX_TOKEN")
        alive = partial(self._runs, record)
        return await open_exec(engine, path, deadline_s=deadline_s + _LOOK_S, alive=alive)

    async def _runs(self, record: Record) -> bool:
        try:
            return bool((await self._containers.inspect(record.id))["State"]["Running"])
        except SandboxGone:
            return False

    async def _start(
        self, spec: SandboxSpec, record: Record, placement: Placement
    ) -> dict[str, Any]:
        if spec.network == "open":
            # Networks are few: those of sandboxes that ended by themselves go first.
            await self._sweep()
            labels = {"app": APP, INSTANCE_LABEL: self._instance}
            await self._containers.create_network(record.id, labels)
        body = container_body(spec, placement)
        inspected = await self._containers.launch(record.id, body)
        _refuse(weaker_fields(body, inspected))
        await self._wait_until_it_listens(record)
        if not self._swept:
            await self._sweep()
        await to_thread.run_sync(record.close_sockets)
        if placement.socket_directory:
            _refuse(await to_thread.run_sync(first_process_problems, inspected))
        return inspected

    async def _placement(self, sandbox_id: SandboxId, token: str, network: Network) -> Placement:
        engine, info = await self._connection.engine(), await self._connection.info()
        refuse_unusable(info)
        image = await self._current_image()
        shared = shares_sockets(engine, info, self._config.runtime)
        record = Record(self._folder / sandbox_id)
        return Placement(
            name=sandbox_id,
            image=image.id,
            instance=self._instance,
            token=token,
            user=":".join(map(str, sandbox_user())),
            socket_directory=record.sockets if shared and token else None,
            network="none" if network == "none" else sandbox_id,
            runtime=self._config.runtime,
            apparmor=has_apparmor(info),
            gvisor=is_gvisor(info, self._config.runtime),
            processors=processors(info),
        )

    async def _hands_over(self, spec: SandboxSpec) -> bool:
        """Whether the token goes by a file: where that is seen, and nothing steers Python."""
        engine, info = await self._connection.engine(), await self._connection.info()
        if not shares_sockets(engine, info, self._config.runtime):
            return False
        return not is_steered([*spec.env, *(await self._current_image()).env])

    async def _current_image(self) -> Image:
        now = anyio.current_time()
        if self._image is None or now - self._image[0] > _IMAGE_FRESH_S:
            image = await self._images.find(self._config.image)
            digest = await to_thread.run_sync(runner_digest)
            if image.labels.get(RUNNER_LABEL) != digest:
                raise ImageMissing(
                    f"the image {self._config.image} holds another version of the runner; "
                    f"{build_again(self._config.image)}"
                )
            self._image = (now, image)
        return self._image[1]

    async def _wait_until_it_listens(self, record: Record) -> None:
        with anyio.move_on_after(_START_S):
            while True:
                try:
                    stream = await self.connect(record, deadline_s=_LOOK_S)
                except SandboxGone:
                    # Either it is slow, or it has ended: then the engine says so.
                    await self._still_there(record)
                else:
                    await stream.aclose()
                    return
        raise BackendUnavailable(
            f"the runner in {record.id} did not listen within {_START_S:g} s: look at the "
            "machine's load, then try `mcp-sandbox images check`"
        )

    async def _still_there(self, record: Record) -> None:
        try:
            await self._containers.inspect(record.id)
        except SandboxGone as exc:
            raise BackendUnavailable(
                f"the runner of {self._config.image} ended as soon as it was started: "
                "try `mcp-sandbox images check`"
            ) from exc

    async def _rows(self) -> list[dict[str, Any]]:
        return await self._containers.labelled([f"app={APP}", f"{INSTANCE_LABEL}={self._instance}"])

    async def _state_of_ours(self, sandbox_id: SandboxId) -> str | None:
        try:
            found = await self._containers.inspect(sandbox_id)
        except SandboxGone:
            return None
        is_ours = found["Config"]["Labels"].get(INSTANCE_LABEL) == self._instance
        return str(found["State"]["Status"]) if is_ours else None

    async def _sweep(self) -> list[dict[str, Any]]:
        """Clear up after killed servers and ended sandboxes; returns the containers that stay."""
        stays = []
        for row in await self._rows():
            # Its server was killed before it could start it, and nobody else ever will.
            if row["State"] == "created" and await to_thread.run_sync(self._abandoned, row):
                await self._containers.remove(row["Id"])
            else:
                stays.append(row)
        present = {_name(row) for row in stays}
        for record in await to_thread.run_sync(stale_records, self._folder, present):
            await self._clear(record)
        self._swept = True
        return stays

    def _abandoned(self, row: dict[str, Any]) -> bool:
        return Record(self._folder / _name(row)).abandoned()

    async def _clear(self, record: Record) -> None:
        if await to_thread.run_sync(record.network) == "open":
            await self._containers.remove_network(record.id)
        # Last: what is left of a container is found by its record.
        await to_thread.run_sync(record.remove)

    def _info(self, row: dict[str, Any]) -> SandboxInfo:
        labels = Record(self._folder / _name(row)).labels()
        state: SandboxState = "paused" if row["State"] == "paused" else "running"
        return SandboxInfo(SandboxId(_name(row)), labels or _labels(row), state)

    def _sandbox(
        self, record: Record, token: bytes, facts: SandboxFacts, labels: Mapping[str, str]
    ) -> DockerSandbox:
        dial = partial(self.connect, record, deadline_s=_CONNECT_S)
        return DockerSandbox(record.id, token, facts, labels, self._life, dial)

    def _record(self, sandbox_id: SandboxId) -> Record:
        if not _ID.fullmatch(sandbox_id):
            raise SandboxGone(f"{sandbox_id!r} is no sandbox of this backend")
        return Record(self._folder / sandbox_id)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise InsecureSandbox(
            f"the container came out weaker than asked for and was destroyed: "
            f"{'; '.join(problems)}. Update the engine, or see `mcp-sandbox doctor`"
        )


def _name(row: dict[str, Any]) -> str:
    return str(row["Names"][0]).lstrip("/") if row["Names"] else ""


def _labels(row: dict[str, Any]) -> dict[str, str]:
    return {
        name.removeprefix(LABEL_PREFIX): value
        for name, value in row["Labels"].items()
        if name.startswith(LABEL_PREFIX)
    }
