"""A cluster that is there, for tests that do to it what somebody with kubectl may do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import anyio
import pytest
from anyio import to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from mcp_sandbox.backends.kubernetes.client import POD, ApiServer, Json, Kind, Refused
from mcp_sandbox.backends.kubernetes.network import CONFIG_MAP, POLICY
from mcp_sandbox.backends.kubernetes.objects import (
    APP,
    CLAIM,
    SANDBOX,
    TEMPLATE,
    VOLUME,
    WARM_POOL,
)
from mcp_sandbox.config import KubernetesConfig

Found = TypeVar("Found")
_KINDS = (CLAIM, SANDBOX, POD, VOLUME, CONFIG_MAP, POLICY, TEMPLATE, WARM_POOL)
_BY_PLURAL = {kind.plural: kind for kind in _KINDS}
_LABELLED = "=".join(*APP.items())
_LOOK_S, _WITHIN_S = 0.5, 60.0


class _Objects:
    """The objects of each kind as they are now."""

    def __init__(self, cluster: "RealCluster") -> None:
        self._find = cluster.find

    def __getitem__(self, plural: str) -> dict[str, Json]:
        return {each["metadata"]["name"]: each for each in self._find(plural)}


class _Own:
    """Has what it is made with; a test that needs more is skipped."""

    _names: tuple[str, ...]

    def __getattr__(self, name: str) -> NoReturn:
        pytest.skip(f"only a fake cluster has {name}")

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self._names:
            self.__getattr__(name)
        super().__setattr__(name, value)


class _Store(_Own):
    _names = ("objects",)

    def __init__(self, cluster: "RealCluster") -> None:
        self.objects = _Objects(cluster)


class RealCluster(_Own):
    """Has of a fake cluster what can be done to any."""

    _names = ("_config", "_portal", "_api", "_has", "store", "has_sandboxes")

    def __init__(self, config: KubernetesConfig, portal: BlockingPortal) -> None:
        self._config, self._portal, self._api = config, portal, ApiServer(config)
        self._has: list[str] = []
        self.store = _Store(self)

    @property
    def has_sandboxes(self) -> list[str]:
        return self._has

    @has_sandboxes.setter
    def has_sandboxes(self, wanted: list[str]) -> None:
        if wanted not in (["v1beta1"], []) or bool(wanted) != self._serves_sandboxes():
            pytest.skip(f"this cluster is none that serves Sandboxes of {wanted or 'no version'}")
        self._has = wanted

    def _serves_sandboxes(self) -> bool:
        if self._config.objects != "auto":
            return self._config.objects == "sandbox"
        try:
            self._portal.call(self._api.call, "GET", f"/apis/{SANDBOX.group}")
        except Refused:
            return False
        return True

    def find(self, plural: str) -> list[Json]:
        return self._portal.call(_list, self._api, _BY_PLURAL[plural])

    def names(self, plural: str) -> list[str]:
        return sorted(each["metadata"]["name"] for each in self.find(plural))

    def delete(self, plural: str, name: str) -> None:
        self._portal.call(self._api.delete, _BY_PLURAL[plural], name)

    def change(self, plural: str, name: str, news: Json) -> None:
        self._portal.call(self._api.patch, _BY_PLURAL[plural], name, news)

    def wait(self, look: Callable[[], Found]) -> Found:
        """Return what `look` returns as soon as that is something."""

        async def wait() -> Found:
            with anyio.fail_after(_WITHIN_S):
                while not (found := await to_thread.run_sync(look)):
                    await anyio.sleep(_LOOK_S)
                return found

        return self._portal.call(wait)

    async def until(self, look: Callable[[], Found]) -> Found:
        return await to_thread.run_sync(self.wait, look)

    def is_empty(self) -> bool:
        return not (self.names("pods") or self.names("persistentvolumeclaims"))

    def forget_trials(self) -> None:
        for name in self.names(POLICY.plural):
            self.delete(POLICY.plural, name)

    def reset(self) -> None:
        """Delete all but policies."""
        for kind in _KINDS:
            for name in self.names(kind.plural) if kind is not POLICY else ():
                self.delete(kind.plural, name)
        self.wait(self.is_empty)

    def close(self) -> None:
        self._portal.call(self._api.aclose)


async def _list(api: ApiServer, kind: Kind) -> list[Json]:
    try:
        pages = api.pages(kind, labelSelector=_LABELLED)
        return [each async for page, _ in pages for each in page]
    except Refused:
        # It has no objects of that kind.
        return []


@contextmanager
def reached(config: KubernetesConfig) -> Iterator[RealCluster]:
    with start_blocking_portal() as portal:
        cluster = RealCluster(config, portal)
        try:
            yield cluster
        finally:
            cluster.close()
