"""Knows the sandboxes and pods of one data root, by one watch of each kind; no call lists them.

Rows are small, for there may be many.
"""

import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.backends.kubernetes.client import POD, ApiServer, Json, Kind, Refused
from mcp_sandbox.backends.kubernetes.objects import (
    APP,
    CLAIM,
    INSTANCE,
    LABELS,
    NAME,
    RECORD,
    SANDBOX,
    SEAL,
    VOLUME,
)
from mcp_sandbox.backends.sandbox_records import make_gone_error
from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.errors import BackendUnavailable, CapacityReached, ImageMissing, OperatorError
from mcp_sandbox.models import SandboxId

logger = logging.getLogger(__name__)
Found = TypeVar("Found")
# What never becomes a running pod by waiting.
NEVER = {
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerError", "CreateContainerConfigError", "RunContainerError", "StartError"),
}
EVENT = Kind("", "events", "Event")
WARM = "mcw"
_GONE = 410
_SEEN_S = 5.0
_AGAIN_S, _MOST_AGAIN_S = 1.0, 5.0
_NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Row:
    """What is kept of an object. Of a pod: `reason` it waits or has ended.

    `weaker` is how it is not what was asked for.
    """

    name: str
    uid: str
    annotations: Mapping[str, str]
    ending: bool
    phase: str = "Pending"
    ready: bool = False
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    shows_skills: bool = False
    weaker: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Json) -> "Row":
        """Return the row of an object."""
        metadata, status = found["metadata"], found.get("status", {})
        notes = metadata.get("annotations", {})
        (own, *_) = status.get("containerStatuses") or [{}]
        (added, *_) = status.get("ephemeralContainerStatuses") or [{}]
        state = own.get("state", {})
        ended, waits = state.get("terminated", {}), state.get("waiting", {})
        conditions = {each["type"]: each for each in status.get("conditions", [])}
        scheduled = conditions.get("PodScheduled", {})
        unplaced = scheduled if scheduled.get("status") == "False" else {}
        # What ended the whole pod, such as an eviction, comes before what its program said.
        whole: Json = status if status.get("reason") else conditions.get("DisruptionTarget", {})
        says: Json = next(filter(None, (whole, ended, waits, unplaced)), {})
        return cls(
            metadata["name"],
            metadata["uid"],
            # Most sandboxes are made from the same.
            {
                key: sys.intern(notes[key]) if key == RECORD else notes[key]
                for key in (RECORD, SEAL, LABELS)
                if key in notes
            },
            "deletionTimestamp" in metadata,
            sys.intern(status.get("phase", "Pending")),
            conditions.get("Ready", {}).get("status") == "True",
            says.get("reason") or "",
            says.get("message") or "",
            ended.get("exitCode"),
            "running" in added.get("state", {}),
        )

    @property
    def runs(self) -> bool:
        return self.phase == "Running" and self.ready and not self.ending

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed") or self.ending


Examine = Callable[[Kind, str, Json], Row]


def _name_sandbox(kind: Kind, metadata: Json) -> str:
    """Return the sandbox of an object; only a pod of a warm pool was named before that was."""
    noted: str = metadata.get("annotations", {}).get(NAME, "")
    return noted if kind is POD and noted.startswith(f"{WARM}-") else str(metadata["name"])


class Namespace:
    """The objects of one data root; `owners` are the kinds of its sandboxes, once it is open."""

    def __init__(
        self, config: KubernetesConfig, api: ApiServer, instance: str, tasks: TaskGroup
    ) -> None:
        self.config = config
        self.api = api
        self.tasks = tasks
        self.owners: tuple[Kind, ...] = ()
        self._instance = instance
        self._rows: dict[Kind, dict[str, Row]] = {}
        self._listed: set[Kind] = set()
        self._examine: Examine
        self._end_weaker: Callable[[Kind, str, Row], None]
        self._hang_up: Callable[[str], None]
        self._failed: tuple[Kind, OperatorError] | None = None
        self._changed = anyio.Event()
        self._opening = anyio.Lock()

    async def open(
        self,
        examine: Examine,
        end_weaker: Callable[[Kind, str, Row], None],
        hang_up: Callable[[str], None],
    ) -> None:
        """Return when all is known; watch from the first call on.

        `examine` reads objects, `end_weaker` is told once of each that became weaker, `hang_up` the
        uids of pods that have ended or are gone. Raises BackendUnavailable.
        """
        async with self._opening:
            if not self._rows:
                self.owners = await self._choose_owners()
                self._examine, self._end_weaker, self._hang_up = examine, end_weaker, hang_up
                for kind in {*self.owners, POD}:
                    self._rows[kind] = {}
                    self.tasks.start_soon(self._follow, kind)
        while self._listed != self._rows.keys():
            if self._failed and self._failed[0] not in self._listed:
                raise BackendUnavailable(str(self._failed[1])) from self._failed[1]
            await self._changed.wait()

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
        of_all, of_ours = f"app={APP['app']}", f"{INSTANCE}={self._instance}"
        selector = of_all if self._has_instance_in_notes(kind) else of_ours
        while True:
            try:
                version = version or await self._list(kind, selector)
                async for event in self.api.watch(kind, version, labelSelector=selector):
                    version = event["object"]["metadata"]["resourceVersion"]
                    self._failed = None
                    if event["type"] != "BOOKMARK":
                        self._take(kind, event["type"], event["object"])
                    wait_s = _AGAIN_S
            except Refused as exc:
                # The version is too old, or something is wrong with it: list anew.
                logger.info("the watch of %s begins anew: %s", kind.plural, exc)
                version = ""
                if exc.status == _GONE:
                    continue
            except OperatorError as exc:
                logger.warning("the watch of %s goes on later: %s", kind.plural, exc)
                self._failed = kind, exc
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
            self._hang_up(rows.pop(name).uid)
        self._listed.add(kind)
        self._failed = None
        self._tell()
        return version

    def _take(self, kind: Kind, event: str, found: Json) -> None:
        rows, metadata = self._rows[kind], found["metadata"]
        name = _name_sandbox(kind, metadata)
        known = rows.get(name)
        if event != "DELETED":
            if row := self._read(kind, found):
                rows[name] = row
                if row.weaker and not (known and known.uid == row.uid and known.weaker):
                    self._end_weaker(kind, name, row)
                if row.has_ended:
                    self._hang_up(row.uid)
        elif known and known.uid == metadata["uid"]:
            # It may be there, with a label that is not ours any more.
            del rows[name]
            self._hang_up(known.uid)
        self._tell()

    def _read(self, kind: Kind, found: Json) -> Row | None:
        """Return the row of an object; None for one of another data root."""
        place = "annotations" if self._has_instance_in_notes(kind) else "labels"
        if found["metadata"].get(place, {}).get(INSTANCE) != self._instance:
            return None
        row = self._examine(kind, _name_sandbox(kind, found["metadata"]), found)
        is_owner = kind is not POD or POD in self.owners
        return row if is_owner else replace(row, annotations=_NOTHING)

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
                raise make_gone_error(SandboxId(name)) from exc
        if row is None:
            raise BackendUnavailable(
                f"sandbox {name} is labelled as that of another data root, so it is kept apart "
                f"with its files: set its label {INSTANCE} to {self._instance}, or remove it with "
                "`kubectl delete`"
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

    async def until(self, look: Callable[[], Found | None], within_s: float) -> Found | None:
        """Return what `look` returns as soon as that is not None; None after the time."""
        with anyio.move_on_after(within_s):
            while (found := look()) is None:
                await self._changed.wait()
            return found
        return look()

    async def wait_for(self, name: str, settled: Callable[[Row], bool]) -> None:
        """Wait a while until the watch has told of our own change of a sandbox, or of its end."""
        rows = self._rows.get(self.kind_of(name), {})
        await self.until(lambda: name not in rows or settled(rows[name]) or None, _SEEN_S)

    async def explain_wait(self, name: str, pod: Row | None, image: str) -> OperatorError:
        """Return the error for a pod that does not begin to run."""
        if pod and pod.reason in NEVER:
            return ImageMissing(
                f"the image {image} cannot be run ({pod.reason}: {pod.message.strip()}): push it "
                "where the cluster finds it, set kubernetes.image, or add imagePullSecrets to "
                "kubernetes.template"
            )
        if self._failed:
            return BackendUnavailable(str(self._failed[1]))
        # Without a message it is a step, such as ContainerCreating; why it lasts is in an event.
        why = [f"{pod.reason}: {pod.message}"] if pod and pod.message else []
        with suppress(OperatorError):
            if self.kind_of(name) not in (POD, VOLUME):
                # Its controller could not make the pod or its volume, and says why.
                found = await self.api.get(self.kind_of(name), name)
                told = found.get("status", {}).get("conditions", [])
                said = [each["message"] for each in told if each["type"] == "Ready"]
                if not pod or "Error seen" in str(said):
                    why = said
            async for page, _ in self.api.pages(EVENT, fieldSelector=f"involvedObject.name={name}"):
                said = [str(each["message"]) for each in page if each.get("type") == "Warning"]
                why = why or said[-1:]
        why = why or [pod.reason if pod and pod.reason else "it gave no reason"]
        return CapacityReached(
            f"the cluster started no pod within {self.config.start_timeout:g} s "
            f"({'; '.join(why)}): make room, or call again later"
        )
