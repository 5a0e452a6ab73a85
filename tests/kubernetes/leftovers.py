"""Removes from a real cluster what tests have made there, and finds what they left running."""

import hashlib
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path

import anyio

from mcp_sandbox.backends.kubernetes.client import POD, ApiServer, Kind, Refused
from mcp_sandbox.backends.kubernetes.network import CONFIG_MAP
from mcp_sandbox.backends.kubernetes.objects import APP, CLAIM, INSTANCE, SANDBOX, VOLUME
from mcp_sandbox.config import KubernetesConfig

# What is deleted of a claim or Sandbox goes with it.
_KINDS = (CLAIM, SANDBOX, POD, VOLUME, CONFIG_MAP)


def remove(config: KubernetesConfig, roots: Iterable[Path], *, grace_s: float = 30.0) -> list[str]:
    """Remove the objects of these data roots; return a line for each pod that goes on running.

    A paused chat has a volume as it has a folder elsewhere: that is nothing that was left.
    """
    files = (root / "sandbox" / "kubernetes.key" for root in roots)
    keys = [file.read_bytes() for file in files if file.exists()]
    instances = {hashlib.sha256(b"instance" + key).hexdigest()[:16] for key in keys}
    return anyio.run(_remove, config, instances, grace_s) if instances else []


async def _remove(config: KubernetesConfig, instances: set[str], grace_s: float) -> list[str]:
    async with aclosing(ApiServer(config)) as api:
        # Those that a manager has paused or ended at last are on their way.
        running = await _wait_for_none(api, instances, (POD,), grace_s)
        for kind, name in await _find(api, instances, _KINDS):
            await api.delete(kind, name)
        stuck = await _wait_for_none(api, instances, _KINDS, grace_s)
        return [f"{kind.name} {name}" for kind, name in {*running, *stuck}]


Found = list[tuple[Kind, str]]


async def _wait_for_none(
    api: ApiServer, instances: set[str], kinds: tuple[Kind, ...], within_s: float
) -> Found:
    """Return what there still is after a while."""
    found: Found = []
    with anyio.move_on_after(within_s):
        while found := await _find(api, instances, kinds):
            await anyio.sleep(0.5)
    return found


async def _find(api: ApiServer, instances: set[str], kinds: tuple[Kind, ...]) -> Found:
    ((app, value),) = APP.items()
    found: Found = []
    for kind in kinds:
        try:
            async for page, _ in api.pages(kind, labelSelector=f"{app}={value}"):
                for each in page:
                    metadata = each["metadata"]
                    # Claims of a warm pool label no pods.
                    noted = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
                    if noted.get(INSTANCE) in instances:
                        found.append((kind, metadata["name"]))
        except Refused:
            # The cluster has no objects of that kind.
            continue
    return found
