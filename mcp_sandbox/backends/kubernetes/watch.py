"""Knows the sandboxes and pods of one data root, by one watch of each kind; no call lists them.

Rows are small, for there may be many.
"""

import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.backends.kubernetes.client import POD, WAIT_S, ApiServer, Json, Kind, Refused
from mcp_sandbox.backends.kubernetes.objects import (
    APP,
    CLAIM,
    INSTANCE,
    KEPT,
    NAME,
    SANDBOX,
    SHAPE,
    VOLUME,
    Made,
    Renderer,
)
from mcp_sandbox.backends.kubernetes.verify import find_weaker
from mcp_sandbox.backends.sandbox_records import make_gone_error
from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.errors import BackendUnavailable, CapacityReached, OperatorError, Unreachable
from mcp_sandbox.models import SandboxId

logger = logging.getLogger(__name__)
Found = TypeVar("Found")
EVENT = Kind("", "events", "Event")
WARM = "mcw"
_GONE = 410
_SEEN_S = 5.0
_AGAIN_S, _MOST_AGAIN_S = 1.0, 5.0


@dataclass(frozen=True, slots=True)
class Row:
    """What is kept of an object, and the `reason` that it waits or has ended.

    `weaker` is how it is not what was asked for; `made`: of a sandbox, None if that was changed;
    `free_shape`: of a pod of the warm pool that nobody has claimed, how it was made.
    """

    name: str
    uid: str
    ending: bool
    phase: str = "Pending"
    ready: bool = False
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    shows_skills: bool = False
    weaker: tuple[str, ...] = ()
    made: Made | None = None
    free_shape: str = ""

    @classmethod
    def of(cls, found: Json, weaker: tuple[str, ...] = (), made: Made | None = None) -> "Row":
        """Return the row of an object."""
        metadata, status = found["metadata"], found.get("status", {})
        (own, *_) = status.get("containerStatuses") or [{}]
        (added, *_) = status.get("ephemeralContainerStatuses") or [{}]
        state = own.get("state", {})
        ended, waits = state.get("terminated", {}), state.get("waiting", {})
        conditions = {each["type"]: each for each in status.get("conditions", [])}
        failed = {name: each for name, each in conditions.items() if each.get("status") == "False"}
        ready = conditions.get("Ready", {})
        # What ended the whole pod, such as an eviction, comes before what its program said.
        whole: Json = status if status.get("reason") else conditions.get("DisruptionTarget", {})
        # That of a Sandbox whose pod or volume could not be made comes before the scheduler's.
        causes = (whole, ended, waits, *map(failed.get, ("Ready", "PodScheduled")))
        says: Json = next(filter(None, causes), {})
        return cls(
            metadata["name"],
            metadata["uid"],
            "deletionTimestamp" in metadata,
            sys.intern(status.get("phase", "Pending")),
            ready.get("status") == "True",
            says.get("reason") or "",
            says.get("message") or "",
            ended.get("exitCode"),
            "running" in added.get("state", {}),
            weaker,
            made,
        )

    @property
    def said(self) -> str:
        return f"{self.reason}: {self.message}".strip(": ")

    @property
    def runs(self) -> bool:
        return self.phase == "Running" and not self.ending

    @property
    def has_ended(self) -> bool:
        """Whether its node said so: one that is only to end may go on where that is away."""
        return self.phase in ("Succeeded", "Failed") or self.exit_code is not None


def _name_sandbox(kind: Kind, metadata: Json) -> str:
    """Return the sandbox of an object; only a pod of a warm pool was named before that was."""
    noted: str = metadata.get("annotations", {}).get(NAME, "")
    return noted if kind is POD and noted.startswith(f"{WARM}-") else str(metadata["name"])


class Namespace:
    """The objects of one data root; `owners` are the kinds of its sandboxes, once it is open."""

    # Is told the kind and sandbox of each object that changes, and its row before and after.
    notice: Callable[[Kind, str, Row | None, Row | None], None]

    def __init__(
        self, config: KubernetesConfig, api: ApiServer, renderer: Renderer, tasks: TaskGroup
    ) -> None:
        self.config = config
        self.api = api
        self.tasks = tasks
        self.owners: tuple[Kind, ...] = ()
        self._renderer = renderer
        self._rows: dict[Kind, dict[str, Row]] = {}
        self._listed: set[Kind] = set()
        self._failed: dict[Kind, OperatorError] = {}
        self._changed = anyio.Event()
        self._opening = anyio.Lock()

    async def open(self) -> None:
        """Return when all is known; watch from the first call on. Raises BackendUnavailable."""
        async with self._opening:
            if not self._rows:
                self.owners = await self._choose_owners()
                for kind in {*self.owners, POD}:
                    self._rows[kind] = {}
                    self.tasks.start_soon(self._follow, kind)
        # Not for ever: a fault of this server may have ended its watches.
        with anyio.move_on_after(WAIT_S):
            while self._listed != self._rows.keys():
                if unlisted := self._failed.keys() - self._listed:
                    raise self._failed[unlisted.pop()].with_traceback(None)
                await self._changed.wait()
            return
        raise BackendUnavailable("the cluster does not list what is there: call again later")

    @property
    def pods(self) -> Mapping[str, Row]:
        """All pods, by the names of their sandboxes."""
        return self._rows[POD]

    @property
    def sandboxes(self) -> Iterator[Row]:
        return (row for kind in self.owners for row in list(self._rows[kind].values()))

    def kind_of(self, name: str) -> Kind:
        """Return of which kind the sandbox of that name is."""
        return CLAIM if name.startswith(f"{WARM}-") else self.owners[0]

    async def _choose_owners(self) -> tuple[Kind, ...]:
        if self.config.objects != "pod" and await self._serves(SANDBOX):
            pooled = self.config.warm_pool and await self._serves(CLAIM)
            if self._renderer.in_pod and not pooled:
                # There may be some of a pool that is set no more.
                ours = {"labelSelector": f"{INSTANCE}={self._renderer.instance}", "limit": "1"}
                with suppress(BackendUnavailable):
                    found = await self.api.call("GET", self.api.path(CLAIM), params=ours)
                    pooled = bool(found["items"])
            return (SANDBOX, CLAIM) if pooled else (SANDBOX,)
        return (VOLUME if self.config.storage == "volume" else POD,)

    async def _serves(self, kind: Kind) -> bool:
        try:
            group = await self.api.call("GET", f"/apis/{kind.group}")
        except Refused as exc:
            if exc.status != 404:
                raise
            group = {}
        served = sorted(each["version"] for each in group.get("versions", []))
        if kind.version in served:
            return True
        if served or self.config.objects == "sandbox" or kind is CLAIM:
            found = f"serves {kind.group} {', '.join(served)}" if served else "lacks it"
            raise BackendUnavailable(
                f"{kind.name} objects need {kind.api_version}, and this cluster {found}: install "
                "agent-sandbox 0.5 or newer with its extensions, or set kubernetes.objects to pod"
            )
        return False

    async def _follow(self, kind: Kind) -> None:
        """Keep the rows of a kind as they are in the cluster, until cancelled."""
        wait_s, version = _AGAIN_S, ""
        of_all, of_ours = f"app={APP['app']}", f"{INSTANCE}={self._renderer.instance}"
        selector = of_all if self._has_instance_in_notes(kind) else of_ours
        while True:
            try:
                version = version or await self._list(kind, selector)
                async for event in self.api.watch(kind, version, labelSelector=selector):
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._failed.pop(kind, None)
                    if event["type"] != "BOOKMARK":
                        self._take(kind, event["type"], event["object"])
                    wait_s = _AGAIN_S
            except OperatorError as exc:
                logger.warning("the watch of %s goes on later: %s", kind.plural, exc)
                if isinstance(exc, Refused):
                    # The version is too old, or something is wrong with it: list anew.
                    version = ""
                    if exc.status == _GONE:
                        continue
                self._failed[kind] = exc
                self._tell()
            await anyio.sleep(wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            wait_s = min(2 * wait_s, _MOST_AGAIN_S)

    async def _list(self, kind: Kind, selector: str) -> str:
        rows, uids, version = self._rows[kind], set[str](), ""
        # One chunk at a time is in memory: an object is ten times its row.
        async for page, as_of in self.api.pages(kind, labelSelector=selector):
            version = as_of
            for each in page:
                uids.add(each["metadata"]["uid"])
                self._take(kind, "MODIFIED", each)
        for name in [name for name, row in rows.items() if row.uid not in uids]:
            self._put(kind, name, None)
        self._listed.add(kind)
        self._failed.pop(kind, None)
        self._tell()
        return version

    def _take(self, kind: Kind, event: str, found: Json) -> None:
        metadata, rows, is_gone = found["metadata"], self._rows[kind], event == "DELETED"
        name, own = _name_sandbox(kind, metadata), metadata["name"]
        if not is_gone and (row := self._read(kind, found)):
            if name != own:
                # What leads to it from before its claim goes on.
                rows.pop(own, None)
            self._put(kind, name, row)
            return
        for each in (name, own):
            known = rows.get(each)
            if known and known.uid == metadata["uid"] and (is_gone or known.free_shape):
                # It may be there, with a label that is not ours, or claimed by another.
                self._put(kind, each, None)

    def _put(self, kind: Kind, name: str, row: Row | None) -> None:
        before = self._rows[kind].pop(name, None)
        if row:
            self._rows[kind][name] = row
        self.notice(kind, name, before, row)
        self._tell()

    def _read(self, kind: Kind, found: Json) -> Row | None:
        """Return the row of an object; None for one of another data root."""
        notes, render = found["metadata"].get("annotations", {}), self._renderer
        whose = notes if self._has_instance_in_notes(kind) else found["metadata"].get("labels", {})
        name, weaker = _name_sandbox(kind, found["metadata"]), list[str]()
        if whose.get(INSTANCE) != render.instance:
            is_free = NAME not in notes and name.startswith(f"{self.config.warm_pool}-")
            shape = notes.get(SHAPE) if kind is POD and is_free else None
            return replace(Row.of(found), free_shape=shape) if shape else None
        owner = self.kind_of(name)
        if kind is POD:
            weaker = render.find_changes(owner, name, found, render.files(owner, name))
        elif kind is SANDBOX:
            spec, files = found["spec"], render.template_files(name)
            weaker = find_weaker(KEPT, {key: spec.get(key) for key in KEPT})
            if spec.get("operatingMode") != "Suspended":
                weaker += render.find_changes(owner, name, spec["podTemplate"], files)
        made = render.read(name, notes) if kind is owner else None
        return Row.of(found, tuple(weaker), made)

    def _has_instance_in_notes(self, kind: Kind) -> bool:
        """Return whether an annotation says of which data root it is: claims label no pods."""
        return kind is POD and CLAIM in self.owners

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def sandbox(self, name: str) -> Row:
        """Return a sandbox of ours. Raises SandboxGone, and BackendUnavailable for another's."""
        kind = self.kind_of(name)
        row = self._rows.get(kind, {}).get(name)
        if row is None:
            # Another server may have made it just now; or there is no warm pool any more.
            try:
                row = self._read(kind, await self.api.get(kind, name))
            except Refused as exc:
                if exc.status != 404:
                    raise
                raise make_gone_error(SandboxId(name)) from exc
        if row is None:
            raise BackendUnavailable(
                f"sandbox {name} is labelled as that of another data root, so it is kept apart "
                f"with its files: set its label {INSTANCE} to {self._renderer.instance}, or remove "
                "it with `kubectl delete`"
            )
        if row.ending:
            raise make_gone_error(SandboxId(name))
        return row

    def pod(self, name: str, uid: str) -> Row:
        """Return a pod of a sandbox, while it goes on; raises SandboxGone."""
        pod = self.pods.get(name)
        if pod is None or pod.uid != uid or pod.has_ended:
            raise make_gone_error(SandboxId(name))
        return pod

    async def until(self, look: Callable[[], Found], within_s: float) -> Found:
        """Return what `look` returns as soon as that is true, or after the time."""
        with anyio.move_on_after(within_s):
            while not (found := look()):
                await self._changed.wait()
            return found
        return look()

    async def until_ending(self, name: str) -> None:
        """Wait a while until the watches have told that a sandbox ends, and its pod."""
        rows = self._rows.get(self.kind_of(name), {}), self.pods
        await self.until(
            lambda: all(name not in each or each[name].ending for each in rows), _SEEN_S
        )

    def told(self, name: str) -> list[str]:
        """Return what is said of a sandbox that does not begin, of its pod first."""
        rows = self.pods.get(name), self._rows.get(self.kind_of(name), {}).get(name)
        return [row.said for row in rows if row and row.said and not row.ending]

    async def ask(self, name: str, trial: Row | None = None) -> list[str]:
        """Return the same with what only events tell, the nearest cause first."""
        pod, told = trial or self.pods.get(name), [trial.said] if trial else self.told(name)
        # Without a message it is a step, such as ContainerCreating.
        if pod and pod.message and "PersistentVolumeClaim" not in pod.message:
            return told
        files = {} if trial else self._renderer.files(self.kind_of(name), name)
        with anyio.move_on_after(_SEEN_S), suppress(OperatorError):
            uids = [pod.uid] if pod else []
            if claim := files.get("persistentVolumeClaim"):
                uids.append((await self.api.get(VOLUME, claim["claimName"]))["metadata"]["uid"])
            for uid in uids:
                about = f"involvedObject.uid={uid},type=Warning"
                async for page, _ in self.api.pages(EVENT, fieldSelector=about):
                    told[:0] = [f"{each['reason']}: {each['message']}" for each in page[::-1]]
        return told

    async def give_up(self, name: str, image: str, trial: Row | None) -> NoReturn:
        """Raise why a pod does not run in time, or that of a `trial` before it."""
        if self._failed:
            raise next(iter(self._failed.values())).with_traceback(None)
        if (pod := self.pods.get(name)) and pod.ready:
            raise Unreachable(f"the pod of {name} runs, and does not answer")
        told = await self.ask(name, None if pod else trial)
        raise self.api.explain(told, image) or CapacityReached(
            f"the cluster started no pod within {self.config.start_timeout:g} s "
            f"({(*told, 'it gave no reason')[0]}): make room, or call again later"
        )
