"""Creates, finds and removes sandboxes that are containers of a Docker engine.

Where the engine shares this kernel's sockets, a runner connects at its start to one of the server,
in a directory mounted read-only, and gets the one that it listens on. Else (tcp, ssh, a virtual
machine, gVisor) it is reached through a relay that the engine starts for each channel.
Workspaces are bind mounts: a remote engine must see the data directory under the same path.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import ByteStream

from mcp_sandbox import models
from mcp_sandbox.backends import local_socket
from mcp_sandbox.backends.docker import client
from mcp_sandbox.backends.docker.engine import (
    build_again,
    facts_of,
    refuse_unusable,
    shares_sockets,
)
from mcp_sandbox.backends.docker.exec_stream import open_exec
from mcp_sandbox.backends.docker.images import find_place, run_once
from mcp_sandbox.backends.docker.spec import (
    APP,
    IMAGE_LABEL,
    INSTANCE_LABEL,
    LABEL_PREFIX,
    PYTHON,
    RUNNER_LABEL,
    SOCKET,
    STARTER,
    Placement,
    container_body,
    find_weaker_fields,
    first_process_problems,
    instance_of,
)
from mcp_sandbox.backends.runner_copy import name_user, runner_digest
from mcp_sandbox.backends.sandbox_records import (
    SandboxRecord,
    SandboxRecords,
    make_gone_error,
    new_id,
    sandbox_user,
)
from mcp_sandbox.config import DockerConfig
from mcp_sandbox.errors import BackendUnavailable, ImageMissing, InsecureSandbox, SandboxGone
from mcp_sandbox.runner.workers.fork_server import is_steered

_START_S = 60.0
_LOOK_S = 2.0
_CONNECT_S = 8.0
_IMAGE_FRESH_S = 10.0
# Longer than a creation can take.
_GRACE_S = 180.0
# The engine starts about five containers a second; more at once only wait longer for each other.
_STARTS_AT_ONCE = 4
_PRESENT = ("created", "running", "paused", "restarting")
_SHOWN = {"hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n"}


@dataclass(frozen=True)
class DockerSandbox:
    """A running container."""

    id: models.SandboxId
    token: bytes
    facts: models.SandboxFacts
    labels: Mapping[str, str]
    backend: "DockerBackend"

    async def open_channel(self) -> ByteStream:
        return await self.backend.connect(self.id, deadline_s=_CONNECT_S)

    async def pause(self) -> bool:
        await self.backend.connection.call(client.set_paused, self.id, paused=True)
        return True

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        return await client.read_ending(self.backend.connection, self.id, within_s)


class DockerBackend:
    """Sandboxes of one data root on one engine."""

    name: models.BackendName = "docker"
    holds_files, keeps_paused_files, takes_images = False, False, True

    def __init__(self, config: DockerConfig, data_root: Path) -> None:
        self._config = config
        self._records = SandboxRecords(data_root, "docker")
        self._instance = instance_of(data_root)
        self.connection = client.connection_of(config)
        # Sandboxes go on.
        self.aclose = self.connection.aclose
        self._starts = CapacityLimiter(_STARTS_AT_ONCE)
        self._images: dict[str, tuple[float, client.Image]] = {}
        self._swept = False

    async def probe(self) -> str:
        info = await self.connection.info()
        refuse_unusable(info)
        place = find_place(await self._current_image(), self._instance, self._config.runtime, info)
        code, said = await run_once(self.connection, place, "print(6 * 7)")
        if code != 0 or said.strip() != "42":
            raise BackendUnavailable(
                f"a test container of {self._config.image} ended with {code} and said "
                f"{said[-300:]!r}: {build_again(self._config.image)}"
            )
        runtime = self._config.runtime or info.get("DefaultRuntime", "default runtime")
        return f"Docker {info.get('ServerVersion')} with {runtime} runs {self._config.image}"

    async def origin(self, image: str = "") -> str:
        runtime = self._config.runtime or (await self.connection.info()).get("DefaultRuntime", "")
        return f"{(await self._current_image(image)).id} {runtime}"

    async def create(self, spec: models.SandboxSpec) -> DockerSandbox:
        sandbox_id = new_id()
        try:
            info = await self.connection.info()
            refuse_unusable(info)
            image, shared = await self._current_image(spec.image), await self._shares_sockets()
            user, folder = sandbox_user(spec), self._records.shown_directory(sandbox_id)
            # In the image the name has another number.
            names = {} if user == sandbox_user() else name_user(*user)
            named = (models.Mount(folder / each, f"/etc/{each}", read_only=True) for each in names)
            spec = replace(spec, mounts=(*spec.mounts, *named))
            with ExitStack() as opened:

                def note() -> tuple[bytes, socket.socket | None]:
                    # In a thread: it reads /proc to record which process creates the sandbox.
                    record = SandboxRecord("docker", labels=dict(spec.labels), network=spec.network)
                    token = self._records.open(sandbox_id, record, shown=_SHOWN | names)
                    if not shared:
                        return token, None
                    starter = opened.enter_context(local_socket.listen(folder, STARTER))
                    # No other than the container's first process will connect to it.
                    os.chown(folder / STARTER, *user)
                    return token, starter

                token, starter = await to_thread.run_sync(note)
                place = replace(
                    find_place(image, self._instance, self._config.runtime, info),
                    name=sandbox_id,
                    token=token.hex(),
                    user=f"{user[0]}:{user[1]}",
                    # Unless a variable changes how Python starts.
                    plain=shared and not is_steered([*spec.env, *image.env]),
                    shown=folder if shared else None,
                    network="none" if spec.network == "none" else sandbox_id,
                )
                facts = self._facts(await self._start(spec, place, starter), info)
        except BaseException:
            await self.destroy(sandbox_id)
            raise
        return DockerSandbox(sandbox_id, token, facts, spec.labels, self)

    async def attach(self, sandbox_id: models.SandboxId) -> DockerSandbox:
        record, token = await to_thread.run_sync(self._records.known, sandbox_id)
        inspected = await self.connection.call(client.inspect, sandbox_id)
        status = inspected["State"]["Status"]
        if status == "paused":
            await self.connection.call(client.set_paused, sandbox_id, paused=False)
        elif status != "running":
            raise make_gone_error(sandbox_id)
        facts = self._facts(inspected, await self.connection.info())
        labels = record.labels or _labels(inspected["Config"])
        return DockerSandbox(sandbox_id, token, facts, labels, self)

    async def running(self) -> Sequence[models.SandboxInfo]:
        present = [row for row in await self._sweep() if row["State"] in _PRESENT]

        def info(row: dict[str, Any]) -> models.SandboxInfo:
            name = _name(row)
            record = self._records.find(name)
            labels = (record and record.labels) or _labels(row)
            return models.SandboxInfo(
                name, labels, "paused" if row["State"] == "paused" else "running"
            )

        return await to_thread.run_sync(lambda: list(map(info, present)))

    async def relabel(self, sandbox_id: models.SandboxId, labels: Mapping[str, str]) -> None:
        await to_thread.run_sync(self._records.relabel, sandbox_id, labels)

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        # Removal is never cancelled halfway; each call to the engine has its own time limit.
        with anyio.CancelScope(shield=True):
            found = await self._inspect_if_ours(sandbox_id)
            if found is not None:
                if found["State"]["Status"] == "paused":
                    # gVisor does not kill paused processes.
                    with suppress(SandboxGone):
                        await self.connection.call(client.set_paused, sandbox_id, paused=False)
                await self.connection.call(client.remove, sandbox_id)
            await self._clear(sandbox_id)

    async def connect(self, sandbox_id: models.SandboxId, *, deadline_s: float) -> ByteStream:
        """Open a byte stream to the runner; raise SandboxGone if it does not listen in time."""
        if await self._shares_sockets():
            return await local_socket.connect(
                self._records.socket_directory(sandbox_id), deadline_s=deadline_s
            )
        command = [PYTHON, "-I", "-S", models.RELAY, "--announce", SOCKET, f"{deadline_s:g}"]
        # The container's environment holds the token, and another process of the sandbox could
        # read it from the relay's environment before the relay makes itself unreadable.
        path = await self.connection.call(
            client.prepare_exec, sandbox_id, command, forget="MCP_SANDBOX_TOKEN"
        )

        async def alive() -> bool:
            found = await self._inspect_if_ours(sandbox_id)
            return found is not None and bool(found["State"]["Running"])

        engine = await self.connection.engine()
        return await open_exec(engine, path, deadline_s=deadline_s + _LOOK_S, alive=alive)

    async def _shares_sockets(self) -> bool:
        engine, info = await self.connection.engine(), await self.connection.info()
        return shares_sockets(engine, info, self._config.runtime)

    async def _start(
        self, spec: models.SandboxSpec, placement: Placement, starter: socket.socket | None
    ) -> dict[str, Any]:
        sandbox_id = placement.name
        if spec.network == "open":
            # An engine has few networks: first remove those of sandboxes that have ended.
            await self._sweep()
            labels = {"app": APP, INSTANCE_LABEL: self._instance}
            await self.connection.call(client.create_network, sandbox_id, labels)
        body = container_body(spec, placement)
        async with self._starts:
            inspected = await self.connection.call(client.launch, sandbox_id, body)
        _refuse(find_weaker_fields(body, inspected))
        line = await self._wait_until_it_listens(sandbox_id, starter)
        if line is not None:
            with line:
                await to_thread.run_sync(self._hand_over, placement, line, inspected)
        if not self._swept:
            await self._sweep()
        return inspected

    def _hand_over(
        self, placement: Placement, line: socket.socket, inspected: dict[str, Any]
    ) -> None:
        """Check the first process from outside, and give it what it serves with."""
        _refuse(first_process_problems(inspected))
        (self._records.shown_directory(placement.name) / STARTER).unlink()
        sockets = self._records.socket_directory(placement.name)
        local_socket.hand_over(line, sockets, bytes.fromhex(placement.token))

    def _facts(self, inspected: dict[str, Any], info: dict[str, Any]) -> models.SandboxFacts:
        own = inspected["Config"]["Labels"].get(IMAGE_LABEL)
        return facts_of(own or self._config.image, inspected, info)

    async def _current_image(self, name: str = "") -> client.Image:
        name, now = name or self._config.image, anyio.current_time()
        looked_at, image = self._images.get(name, (0.0, None))
        if image is None or now - looked_at > _IMAGE_FRESH_S:
            image = await self.connection.call(client.find_image, name)
            if image.labels.get(RUNNER_LABEL) != await to_thread.run_sync(runner_digest):
                raise ImageMissing(
                    f"the image {name} holds another version of the runner; {build_again(name)}"
                )
            self._images[name] = (now, image)
        return image

    async def _wait_until_it_listens(
        self, sandbox_id: models.SandboxId, starter: socket.socket | None
    ) -> socket.socket | None:
        """Wait until the runner listens, or has connected to `starter`: return that connection."""
        with anyio.move_on_after(_START_S):
            while True:
                try:
                    if starter is not None:
                        return await local_socket.accept_runner(starter, within_s=_LOOK_S)
                    stream = await self.connect(sandbox_id, deadline_s=_LOOK_S)
                except SandboxGone as exc:
                    # It is slow, unless the engine no longer has the container.
                    if await self._inspect_if_ours(sandbox_id) is None:
                        raise SandboxGone(
                            "the sandbox ended while it was started: call again; if it happens "
                            "again, run `mcp-sandbox images check` to see what is wrong"
                        ) from exc
                else:
                    await stream.aclose()
                    return None
        raise BackendUnavailable(
            f"the runner in {sandbox_id} did not listen within {_START_S:g} s: check the "
            "machine's load, then run `mcp-sandbox images check`"
        )

    async def _inspect_if_ours(self, sandbox_id: models.SandboxId) -> dict[str, Any] | None:
        try:
            found = await self.connection.call(client.inspect, sandbox_id)
        except SandboxGone:
            return None
        return found if found["Config"]["Labels"].get(INSTANCE_LABEL) == self._instance else None

    async def _sweep(self) -> list[dict[str, Any]]:
        """Clean up after killed servers and ended sandboxes; return the containers that stay."""
        stays = []
        labels = [f"app={APP}", f"{INSTANCE_LABEL}={self._instance}"]
        for row in await self.connection.call(client.list_labelled, labels):
            # Its server was killed before it could start it, and no other server will.
            if row["State"] == "created" and await to_thread.run_sync(self._abandoned, row):
                await self.connection.call(client.remove, row["Id"])
            else:
                stays.append(row)
        present = {_name(row) for row in stays}

        def stale() -> list[models.SandboxId]:
            """Return recorded sandboxes whose containers are gone or were never created."""
            known = self._records.all().items()
            return [name for name, each in known if name not in present and each.given_up(_GRACE_S)]

        for sandbox_id in await to_thread.run_sync(stale):
            await self._clear(sandbox_id)
        self._swept = True
        return stays

    def _abandoned(self, row: dict[str, Any]) -> bool:
        record = self._records.find(_name(row))
        return record is None or record.given_up()

    async def _clear(self, sandbox_id: models.SandboxId) -> None:
        record = await to_thread.run_sync(self._records.find, sandbox_id)
        if record is None:
            return
        if record.network == "open":
            await self.connection.call(client.remove_network, sandbox_id)
        # Last, because a later sweep finds leftovers by the record.
        await to_thread.run_sync(self._records.forget, sandbox_id)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise InsecureSandbox(
            f"the container is weaker than requested and was destroyed: "
            f"{'; '.join(problems)}. Update the engine, or run `mcp-sandbox doctor`"
        )


def _name(row: dict[str, Any]) -> models.SandboxId:
    return models.SandboxId(str(row["Names"][0]).lstrip("/") if row["Names"] else "")


def _labels(row: dict[str, Any]) -> dict[str, str]:
    return {
        name.removeprefix(LABEL_PREFIX): value
        for name, value in row["Labels"].items()
        if name.startswith(LABEL_PREFIX)
    }
