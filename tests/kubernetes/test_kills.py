"""A server killed at any step leaves one sandbox with its files, and touches no other's."""

import os
import subprocess
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from itertools import product
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config, FleetConfig
from mcp_sandbox.errors import ChatElsewhere
from mcp_sandbox.sessions.session import Session
from tests import forked, rclone, redis_server
from tests.conftest import in_cluster
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import SetUp
from tests.kubernetes.killed import CHAT
from tests.kubernetes.store import Change, Json

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
USUAL = (1, 5, 7, 10)
WARM_STEPS = ("sandboxclaims added", "pods claimed", "sandboxclaims ready", "listening", "filled")
# The next one of the data root, another one of it that runs already, or one of its fleet.
NEXT = ("next", "other", "fleet")
USUAL_ONES = {("pods claimed", "next"), ("listening", "other")}


def step_of(change: Change) -> str:
    found, kind = change.found, change.step.lower()
    if kind == "modified" and found.get("status", {}).get("phase") == "Running":
        kind = "ready"
    if kind == "modified" and found["spec"].get("operatingMode") == "Suspended":
        kind = "suspended"
    conditions = found.get("status", {}).get("conditions", [])
    if change.plural == "sandboxclaims" and any(each["status"] == "True" for each in conditions):
        kind = "ready"
    if change.before and is_claimed(found) and not is_claimed(change.before):
        kind = "claimed"
    return f"{change.plural} {kind}"


def is_claimed(pod: Json) -> bool:
    return "mcp-sandbox.name" in pod["metadata"].get("annotations", {})


def has(fake: Cluster, path: str) -> bool:
    """Return whether a file is in the pod that was claimed."""
    rows = [*fake.store.objects["pods"].values()]
    claimed = [pod["metadata"] for pod in rows if is_claimed(pod)]
    pods = [each["name"] for each in claimed if "deletionTimestamp" not in each]
    command = ["docker", "exec", *map(fake.node.container, pods), "test", "-e", path]
    return bool(pods) and subprocess.run(command, check=False).returncode == 0


async def kill_at(fake: Cluster, config: Config, what: str, step: str) -> None:
    """Run a server until its step has been done, and it has not been told."""
    environment = {
        key: os.environ[key] for key in ("PATH", "KUBECONFIG", "SHARED") if key in os.environ
    }
    arguments = [config.model_dump_json(), what]
    module = "tests.kubernetes.killed"
    async with forked.start(
        arguments, env=environment, cwd="/", stdin=None, module=module
    ) as server:
        if what != "create":
            assert await server.stdout.receive() == b"written\n"

        def strike(change: Change) -> None:
            nonlocal step
            # Once: the server may be gone when the cluster tells the same of it again.
            if step_of(change) == step:
                step = ""
                server.kill()

        fake.store.listeners.append(strike)
        await server.stdin.send(b"\n")
        stored = rclone.shared().folder / rclone.BUCKET / str(config.storage.prefix)
        looks: dict[str, Callable[[], bool]] = {
            "stored": lambda: any(path.is_file() for path in stored.rglob("*")),
            "listening": lambda: has(fake, "/run/mcp-sandbox/runner.sock"),
            "filled": lambda: has(fake, "/workspace/big"),
        }
        if look := looks.get(step):
            while not await anyio.to_thread.run_sync(look):
                assert server.returncode is None, (await server.stderr.receive()).decode()
                await anyio.sleep(0.002)
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
    await fake.until(fake.is_empty)
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
        await fake.until(lambda: len(fake.names("persistentvolumeclaims")) == 1)
        assert not fake.names("pods")
        assert fake.names("persistentvolumeclaims") == ["mcs-other"]


def of_fleet(config: Config, redis: str, name: str) -> Config:
    fleet = FleetConfig(redis=redis, name=name, url=f"http://{name}.invalid", lease=4)
    return config.model_copy(update={"fleet": fleet, "data_dir": config.data_dir / name})


@pytest.mark.redis
@pytest.mark.parametrize(
    ("step", "who"),
    [
        pytest.param(*each, marks=() if each in USUAL_ONES else pytest.mark.whole)
        for each in product(WARM_STEPS, NEXT)
    ],
)
async def test_a_server_killed_while_it_adopts_a_warm_sandbox_leaves_one(
    fake: Cluster,
    data_root: Path,
    set_up: SetUp,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    who: str,
) -> None:
    monkeypatch.setenv("SHARED", "a key of tests")
    one = other = in_cluster(data_root, storage="backups", warm_pool="warm", key="env:SHARED")
    await set_up(one, 2)
    async with AsyncExitStack() as stack:
        if who == "fleet":
            redis = redis_server.RedisServer()
            stack.callback(redis.close)
            one, other = (of_fleet(one, redis.url, name) for name in "ab")
        async with open_backend("kubernetes", one) as backend:
            await backend.probe()
        if who != "next":
            opened = open_manager(other, for_many=who == "fleet")
            manager = await stack.enter_async_context(opened)
        await kill_at(fake, one, "adopt", step)
        if who == "next":
            manager = await stack.enter_async_context(open_manager(other))
        session = await manager.session(CHAT)
        with anyio.fail_after(20):
            while who == "fleet" and not await is_here(session):
                await anyio.sleep(0.1)
        assert (await session.exec("cat file")).stdout == "kept\n"
        (claim,) = fake.store.objects["sandboxclaims"].values()
        assert len(fake.store.owned_by(claim)) == 1
        await manager.remove(CHAT)
        # Nothing is left but what waits in the pool.
        await fake.until(lambda: len(fake.names("pods")) == 2 and not fake.names("sandboxclaims"))
        assert len(fake.names("sandboxes")) == 2


async def is_here(session: Session) -> bool:
    with suppress(ChatElsewhere):
        return (await session.exec("true")).success
    return False
