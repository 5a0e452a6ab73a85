"""The e2b backend: a sandbox is a virtual machine of E2B with our runner in it."""

import hashlib
import io
import shlex
import socket
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.abc import ByteStream

from mcp_sandbox import models
from mcp_sandbox.backends.e2b.client import ID, Box, Client
from mcp_sandbox.backends.runner_copy import (
    GITCONFIG,
    MAIN,
    PACKAGE,
    beside_pid_1,
    environment,
    runner_digest,
    runner_sources,
)
from mcp_sandbox.backends.sandbox_records import (
    SandboxRecord,
    SandboxRecords,
    make_gone_error,
    new_id,
)
from mcp_sandbox.config import E2BConfig
from mcp_sandbox.durable import write_file
from mcp_sandbox.errors import BackendUnavailable, SandboxGone

_ARCHIVE, _PLACE = f"{models.OURS}/runner.tgz", "/run/mcp-sandbox"
_SOCKET, _TOKEN = f"{_PLACE}/runner.sock", f"{_PLACE}/token"
_RELAY = f"exec python3 -I -S {models.RELAY} --lines --announce {_SOCKET} 5"
_HOME = "/home/sandbox"
_PATH = f"{_HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin"
# Files of its record.
_NAME, _START_FILE = "e2b", "start"
# A user without rights, as everywhere: E2B's own may become root.
_SETUP = f"""set -e
tar -xzf {_ARCHIVE} -C {models.OURS}
mkdir -p /workspace {_HOME} /opt/skills
grep -q '^sandbox:' /etc/passwd || {{
  echo 'sandbox:x:10001:10001::{_HOME}:/bin/bash' >>/etc/passwd
  echo 'sandbox:x:10001:' >>/etc/group
}}
chown 10001:10001 /workspace {_HOME} /opt/skills
"""
# The number may be another program's by now.
_RUNS = f"grep -qx unshare /proc/$(cat {_PLACE}/pid)/comm"
# The runner is pid 1 of a namespace of its own: code can neither end it nor look into it. When
# it has made its socket, the folder of that is closed.
_START = f"""set -e
rm -f {_SOCKET}; chown 10001:10001 {_PLACE} {_TOKEN}; chmod 700 {_PLACE}; cd /workspace
setsid unshare --pid --fork --kill-child --mount-proc setpriv --reuid=10001 --regid=10001 \\
  --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \\
  env -i %s python3 {models.OURS}/{MAIN} </dev/null >{models.OURS}/log 2>&1 &
echo $! >{_PLACE}/pid
for _ in $(seq 200); do [ ! -S {_SOCKET} ] || break; sleep 0.05; done
[ -S {_SOCKET} ] || {{ cat {models.OURS}/log >&2; exit 1; }}
chown root:root {_PLACE}; chmod 711 {_PLACE}
"""


@dataclass(frozen=True)
class E2BSandbox:
    """A running sandbox of E2B."""

    id: models.SandboxId
    token: bytes
    facts: models.SandboxFacts
    labels: Mapping[str, str]
    box: Box
    client: Client

    async def open_channel(self) -> ByteStream:
        try:
            return await self.box.open(_RELAY)
        except BackendUnavailable as exc:
            raise SandboxGone(str(exc)) from exc

    async def pause(self) -> bool:
        await self.client.pause(self.box.name)
        return True

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:  # noqa: ARG002
        """Return "lost" if E2B does not know it any more, "ended" if only its runner has ended."""
        try:
            await (await self.client.connect(self.box.name)).run(_RUNS)
        except SandboxGone:
            return "lost"
        except BackendUnavailable:
            return "ended"
        return None


class E2BBackend:
    """Makes sandboxes by E2B; their tokens and labels are kept in the data root."""

    name: models.BackendName = "e2b"
    holds_files, keeps_paused_files = True, False

    def __init__(
        self, settings: E2BConfig, data_root: Path, key: Callable[[], Awaitable[str]]
    ) -> None:
        """`key` returns the key of the account; it may raise BackendUnavailable."""
        self._settings = settings
        self._client = Client(settings.domain, settings.timeout, key)
        self._records = SandboxRecords(data_root, self.name)
        place = f"{socket.gethostname()}:{data_root}".encode()
        self._metadata = {"mcp-sandbox": hashlib.sha256(place).hexdigest()[:16]}

    async def probe(self) -> str:
        found = await self._client.list(self._metadata)
        return f"E2B answers; {len(found)} sandboxes of this server are there"

    async def origin(self, image: str = "") -> str:
        digest = await to_thread.run_sync(runner_digest)
        return f"{image or self._settings.template or 'base'} {digest}"

    async def create(self, spec: models.SandboxSpec) -> E2BSandbox:
        if spec.mounts:
            raise BackendUnavailable("a sandbox of E2B cannot show folders of this machine")
        sandbox_id, template = new_id(), spec.image or self._settings.template
        try:
            record, token = await to_thread.run_sync(self._remember, sandbox_id, spec, template)
            told = self._metadata | {ID: sandbox_id}
            told |= {name: spec.labels[name] for name in ("user", "chat") if name in spec.labels}
            box = await self._client.create(template, told, online=spec.network == "open")
            noted = self._records.directory(sandbox_id) / _NAME
            await to_thread.run_sync(write_file, noted, box.name.encode())
            await box.write(_ARCHIVE, await to_thread.run_sync(_pack_runner))
            await box.run(_SETUP)
            return await self._begin(sandbox_id, record, token, box)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.destroy(sandbox_id)
            raise

    async def attach(self, sandbox_id: models.SandboxId) -> E2BSandbox:
        record, token = await to_thread.run_sync(self._records.known, sandbox_id)
        name = await to_thread.run_sync(self._name, sandbox_id)
        if not name:
            raise make_gone_error(sandbox_id)
        box = await self._client.connect(name)
        try:
            return await self._begin(sandbox_id, record, token, box)
        except SandboxGone as exc:
            # E2B has it: its proxy may be late in knowing that. It holds files, and must not go.
            raise BackendUnavailable(f"{exc}; call again in a moment") from exc

    async def _begin(
        self, sandbox_id: models.SandboxId, record: SandboxRecord, token: bytes, box: Box
    ) -> E2BSandbox:
        """Start the runner unless it runs."""
        if record.facts is None:
            raise make_gone_error(sandbox_id)
        try:
            await box.run(_RUNS)
        except BackendUnavailable:
            # The runner takes the file away before it runs anything.
            await box.write(_TOKEN, token.hex().encode())
            start = self._records.directory(sandbox_id) / _START_FILE
            await box.run(await to_thread.run_sync(start.read_text))
        return E2BSandbox(sandbox_id, token, record.facts, record.labels, box, self._client)

    async def relabel(self, sandbox_id: models.SandboxId, labels: Mapping[str, str]) -> None:
        await to_thread.run_sync(self._records.relabel, sandbox_id, labels)

    async def running(self) -> Sequence[models.SandboxInfo]:
        found: list[models.SandboxInfo] = []
        listed = await self._client.list(self._metadata)
        # In this order: what is made meanwhile has its record first, and is not listed.
        records = await to_thread.run_sync(self._records.all)
        for name, (sandbox_id, state) in listed.items():
            if sandbox_id in records:
                found.append(models.SandboxInfo(sandbox_id, records[sandbox_id].labels, state))
            else:
                # A server was killed while it made or ended this one.
                await self._client.kill(name)
        return found

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        if await to_thread.run_sync(self._records.find, sandbox_id):
            if name := await to_thread.run_sync(self._name, sandbox_id):
                await self._client.kill(name)
            await to_thread.run_sync(self._records.forget, sandbox_id)

    def _remember(
        self, sandbox_id: models.SandboxId, spec: models.SandboxSpec, template: str
    ) -> tuple[SandboxRecord, bytes]:
        facts = _facts(template, online=spec.network == "open")
        record = SandboxRecord(self.name, labels=dict(spec.labels), facts=facts)
        token = self._records.open(sandbox_id, record)
        start = _START % shlex.join(_variables(spec))
        write_file(self._records.directory(sandbox_id) / _START_FILE, start.encode())
        return record, token

    def _name(self, sandbox_id: models.SandboxId) -> str:
        """Return what E2B calls it; "" if that is not known."""
        file = self._records.directory(sandbox_id) / _NAME
        return file.read_text() if file.exists() else ""


def _variables(spec: models.SandboxSpec) -> list[str]:
    own = {
        "MCP_SANDBOX_TOKEN_FILE": _TOKEN,
        "MCP_SANDBOX_SOCKET": _SOCKET,
        # E2B pauses the whole when nobody holds it: an end of the runner would save nothing.
        "MCP_SANDBOX_IDLE_S": "1e6",
        "GIT_CONFIG_SYSTEM": f"{models.OURS}/gitconfig",
    }
    values = beside_pid_1(environment(spec, _PATH, _HOME)) | own
    return [f"{name}={value}" for name, value in values.items()]


def _pack_runner() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for source in runner_sources():
            tar.add(source, Path("mcp_sandbox") / source.relative_to(PACKAGE))
        info = tarfile.TarInfo("gitconfig")
        info.size = len(GITCONFIG)
        tar.addfile(info, io.BytesIO(GITCONFIG))
    return packed.getvalue()


def _facts(template: str, *, online: bool) -> models.SandboxFacts:
    limits = {"memory": "the template's", "cpus": "the template's", "disk": "the template's"}
    return models.SandboxFacts(
        "e2b",
        template or "base",
        "E2B's: a virtual machine, as E2B says; nothing of it was verified from here",
        "open: what E2B lets it reach" if online else "none: E2B lets it reach nothing",
        limits,
    )
