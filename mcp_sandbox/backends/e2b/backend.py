"""The e2b backend: a sandbox is a virtual machine of E2B with our runner in it.

What is known of one is in its metadata and in files of its root: any server with the account's key
can find it. One without a start file is what a server that was killed while it made it has left.
"""

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
from mcp_sandbox.backends.e2b.client import Box, Client
from mcp_sandbox.backends.runner_copy import (
    GITCONFIG,
    MAIN,
    PACKAGE,
    beside_pid_1,
    environment,
    runner_digest,
    runner_sources,
)
from mcp_sandbox.backends.sandbox_records import make_gone_error
from mcp_sandbox.backends.skill_copy import pack, put_command
from mcp_sandbox.config import E2BConfig
from mcp_sandbox.errors import BackendUnavailable, SandboxGone

# Keys of its metadata, beside those of its labels.
_INSTANCE, _MADE_FROM, _NETWORK = "mcp-sandbox", "mcp-sandbox-template", "mcp-sandbox-network"
_ARCHIVE, _PLACE = f"{models.OURS}/runner.tgz", "/run/mcp-sandbox"
_SOCKET, _TOKEN = f"{_PLACE}/runner.sock", f"{_PLACE}/token"
_START, _SECRET = f"{models.OURS}/start", f"{models.OURS}/secret"
_SKILL = f"{models.OURS}/skill"
_RELAY = f"exec python3 -I -S {models.RELAY} --lines --announce {_SOCKET} 5"
_PATH = f"{models.HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin"
# A user without rights, as everywhere: E2B's own may become root.
_SETUP = f"""set -e
tar -xzf {_ARCHIVE} -C {models.OURS}
mkdir -p /workspace {models.HOME} {models.SKILLS}
grep -q '^sandbox:' /etc/passwd || {{
  echo 'sandbox:x:10001:10001::{models.HOME}:/bin/bash' >>/etc/passwd
  echo 'sandbox:x:10001:' >>/etc/group
}}
chown 10001:10001 /workspace {models.HOME}
(umask 077; od -An -vtx1 -N32 /dev/urandom | tr -d ' \\n' >{_SECRET})
"""
_CONNECT = f"import socket; socket.socket(socket.AF_UNIX).connect('{_SOCKET}')"
_LISTENS = f'python3 -I -S -c "{_CONNECT}"'
_LOOK_S = 0.1
# The runner is pid 1 of a namespace of its own: code can neither end it nor look into it. When
# it has made its socket, the folder of that is closed. It takes the token away before it runs
# anything.
_PROGRAM = f"""set -e
mkdir -p {_PLACE}
# One that ends just now; the number may be another program's already.
if grep -qsx unshare /proc/$(cat {_PLACE}/pid)/comm; then kill -9 $(cat {_PLACE}/pid); fi
rm -f {_SOCKET}; cp {_SECRET} {_TOKEN}
chown 10001:10001 {_PLACE} {_TOKEN}; chmod 700 {_PLACE}; cd /workspace
setsid unshare --pid --fork --kill-child --mount-proc setpriv --reuid=10001 --regid=10001 \\
  --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all \\
  env -i %s "$(command -v python3)" {models.OURS}/{MAIN} </dev/null >{models.OURS}/log 2>&1 &
echo $! >{_PLACE}/pid
for _ in $(seq 200); do [ ! -S {_SOCKET} ] || break; sleep 0.05; done
[ -S {_SOCKET} ] || {{ cat {models.OURS}/log >&2; exit 1; }}
chown root:root {_PLACE}; chmod 711 {_PLACE}
"""
_BEGIN = f"""[ -e {_START} ] || exit 0
{_LISTENS} || sh {_START} || exit 1
cat {_SECRET}
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
        return await self.box.open(_RELAY)

    async def pause(self) -> bool:
        await self.client.pause(self.id)
        return True

    async def show_skill(self, name: str, files: Mapping[str, bytes]) -> None:
        # As its root: the folder is not the sandbox user's.
        await self.box.write(_SKILL, pack(files))
        await self.box.run(f"{shlex.join(put_command(name))} <{_SKILL}")

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        """Return "lost" if E2B does not know it any more, "ended" if only its runner has ended."""
        look = f"{_LISTENS} || {{ echo ended; break; }}; [ $left = 0 ] || sleep {_LOOK_S}"
        looks = f"for left in $(seq {int(within_s / _LOOK_S)} -1 0); do {look}; done"
        try:
            said = await (await self.client.connect(self.id)).run(looks)
        except SandboxGone:
            return "lost"
        return "ended" if said else None


class E2BBackend:
    """Makes sandboxes by E2B; those of one data root have the same metadata."""

    name: models.BackendName = "e2b"
    holds_files, keeps_paused_files, takes_images = True, False, True

    def __init__(
        self, settings: E2BConfig, data_root: Path, key: Callable[[], Awaitable[str]]
    ) -> None:
        """`key` returns the key of the account; it may raise BackendUnavailable."""
        self._template = settings.template or "base"
        self._client = Client(settings.domain, settings.timeout, key)
        place = f"{socket.gethostname()}:{data_root}".encode()
        self._own = {_INSTANCE: hashlib.sha256(place).hexdigest()[:16]}

    async def probe(self) -> str:
        found = await self._client.list(self._own)
        return f"E2B answers; {len(found)} sandboxes of this server are there"

    async def origin(self, image: str = "") -> str:
        return f"{image or self._template} {await to_thread.run_sync(runner_digest)}"

    async def create(self, spec: models.SandboxSpec) -> E2BSandbox:
        if spec.mounts:
            raise BackendUnavailable("a sandbox of E2B cannot show folders of this machine")
        template = spec.image or self._template
        noted = {**spec.labels, **self._own, _MADE_FROM: template, _NETWORK: spec.network}
        box = await self._client.create(template, noted, online=spec.network == "open")
        try:
            await box.write(_ARCHIVE, await to_thread.run_sync(_pack_runner))
            await box.run(_SETUP)
            await box.write(_START, (_PROGRAM % shlex.join(_variables(spec))).encode())
            return await self._begin(box)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.destroy(box.id)
            raise

    async def attach(self, sandbox_id: models.SandboxId) -> E2BSandbox:
        return await self._begin(await self._client.connect(sandbox_id))

    async def _begin(self, box: Box) -> E2BSandbox:
        """Start the runner unless it runs."""
        if not (secret := await box.run(_BEGIN)):
            raise make_gone_error(box.id)
        token, facts = bytes.fromhex(secret), _facts(box.metadata)
        return E2BSandbox(box.id, token, facts, _labels(box.metadata), box, self._client)

    async def running(self) -> Sequence[models.SandboxInfo]:
        return [
            models.SandboxInfo(sandbox_id, _labels(metadata), state)
            for sandbox_id, metadata, state in await self._client.list(self._own)
        ]

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        await self._client.kill(sandbox_id)


def _labels(metadata: Mapping[str, str]) -> Mapping[str, str]:
    return {key: each for key, each in metadata.items() if not key.startswith(_INSTANCE)}


def _variables(spec: models.SandboxSpec) -> list[str]:
    own = {
        "MCP_SANDBOX_TOKEN_FILE": _TOKEN,
        "MCP_SANDBOX_SOCKET": _SOCKET,
        # E2B pauses the whole when nobody holds it: an end of the runner would save nothing.
        "MCP_SANDBOX_IDLE_S": "1e6",
        "GIT_CONFIG_SYSTEM": f"{models.OURS}/gitconfig",
    }
    values = beside_pid_1(environment(spec, _PATH)) | own
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


def _facts(metadata: Mapping[str, str]) -> models.SandboxFacts:
    limits = {"memory": "the template's", "cpus": "the template's", "disk": "the template's"}
    is_open = metadata.get(_NETWORK) == "open"
    return models.SandboxFacts(
        "e2b",
        metadata.get(_MADE_FROM, ""),
        "E2B's: a virtual machine, as E2B says; nothing of it was verified from here",
        "open: what E2B lets it reach" if is_open else "none: E2B lets it reach nothing",
        limits,
    )
