"""A server killed at any step leaves one sandbox with its files, and touches no other's."""

import os
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config
from tests import forked, rclone
from tests.conftest import in_cluster
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.killed import CHAT
from tests.kubernetes.store import Change

OWNERS = {"pods": "persistentvolumeclaims", "sandboxes": "sandboxes"}
STEPS = [
    ("pods", "create", "persistentvolumeclaims added"),
    ("pods", "create", "pods added"),
    ("pods", "create", "pods ready"),
    ("pods", "suspend", "pods ending"),
    ("pods", "suspend", "pods deleted"),
    ("pods", "save", "stored"),
    ("pods", "delete", "pods ending"),
    ("pods", "delete", "persistentvolumeclaims ending"),
    ("sandboxes", "create", "sandboxes added"),
    ("sandboxes", "create", "pods ready"),
    ("sandboxes", "suspend", "sandboxes suspended"),
    ("sandboxes", "suspend", "pods deleted"),
    ("sandboxes", "delete", "sandboxes deleted"),
]
USUAL = (1, 5, 6, 10)


def step_of(change: Change) -> str:
    found, kind = change.found, change.kind.lower()
    if kind == "modified" and "deletionTimestamp" in found["metadata"]:
        kind = "ending"
    if kind == "modified" and found.get("status", {}).get("phase") == "Running":
        kind = "ready"
    if kind == "modified" and found["spec"].get("operatingMode") == "Suspended":
        kind = "suspended"
    return f"{change.plural} {kind}"


async def kill_at(fake: Cluster, config: Config, what: str, step: str) -> None:
    """Run a server until its step has been done, and it has not been told."""
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": os.environ["KUBECONFIG"]}
    arguments = [config.model_dump_json(), what]
    module = "tests.kubernetes.killed"
    async with forked.start(
        arguments, env=environment, cwd="/", stdin=None, module=module
    ) as server:
        if what != "create":
            assert await server.stdout.receive() == b"written\n"

        def strike(change: Change) -> None:
            if step_of(change) == step:
                server.kill()

        fake.store.listeners.append(strike)
        await server.stdin.send(b"\n")
        stored = rclone.shared().folder / rclone.BUCKET / str(config.storage.prefix)
        while step == "stored" and not any(path.is_file() for path in stored.rglob("*")):
            await anyio.sleep(0.002)
        if step == "stored":
            server.kill()
        with anyio.fail_after(30):
            await server.wait()
        fake.store.listeners.remove(strike)


@pytest.mark.parametrize(
    ("kind", "what", "step"),
    [
        pytest.param(*each, marks=() if number in USUAL else pytest.mark.whole)
        for number, each in enumerate(STEPS)
    ],
)
async def test_a_server_killed_at_any_step_leaves_one_sandbox_with_its_files(
    fake: Cluster, data_root: Path, kind: str, what: str, step: str
) -> None:
    fake.has_sandboxes = ["v1beta1"] if kind == "sandboxes" else []
    config = in_cluster(data_root)
    async with open_backend("kubernetes", config) as backend:
        # The network has been tried: the pods that follow are the chat's.
        await backend.probe()
    await anyio.to_thread.run_sync(fake.wait_until_empty)
    await kill_at(fake, config, what, step)
    # Another data root's chat of the same namespace.
    other = {"name": "mcs-other", "labels": {"app": "mcp-sandbox", "mcp-sandbox.instance": "x"}}
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": other, "spec": spec}
    fake.do(fake.store.add, "persistentvolumeclaims", claim)
    async with open_manager(config) as manager:
        if what != "delete":
            session = await manager.session(CHAT)
            kept = "" if what == "create" else "kept\n"
            assert (await session.exec("cat file 2>/dev/null; true")).stdout == kept
            assert len(fake.names("pods")) == 1
            assert len(fake.names("persistentvolumeclaims")) == 2
        await manager.remove(CHAT)
        await anyio.to_thread.run_sync(fake.do, empty, fake)
        assert fake.names("persistentvolumeclaims") == ["mcs-other"]


async def empty(fake: Cluster) -> None:
    """Return once nothing is left of our data root."""
    with anyio.fail_after(20):
        while fake.names("pods") or len(fake.names("persistentvolumeclaims")) > 1:
            await fake.store.changed.wait()
