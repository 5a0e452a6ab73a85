"""Knows all objects of one kind of this server, by one watch; nothing is asked for a call.

Rows are small, for there may be many. What an own request answered is known at once, and an older
event does not undo it.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import anyio
import httpx

from mcp_sandbox.backends.kubernetes.client import ApiServer, Refused
from mcp_sandbox.errors import BackendUnavailable, OperatorError

logger = logging.getLogger(__name__)
Json = dict[str, Any]
_GONE = 410
_AGAIN_S = 1.0
_MOST_AGAIN_S = 15.0
_FORGOTTEN = 10_000


class Row(Protocol):
    """What is kept of an object."""

    @property
    def uid(self) -> str: ...


RowT = TypeVar("RowT", bound=Row)


@dataclass(frozen=True, slots=True)
class Owner:
    """A sandbox: its Sandbox, or its claim. `mode` is that of a Sandbox."""

    uid: str
    annotations: Mapping[str, str]
    mode: str = ""
    ending: bool = False

    @classmethod
    def of(cls, found: Json) -> "Owner":
        """Return the row of an object."""
        metadata, spec = found["metadata"], found.get("spec", {})
        annotations = {
            key: value
            for key, value in metadata.get("annotations", {}).items()
            if key.startswith("mcp-sandbox.")
        }
        ending = "deletionTimestamp" in metadata
        return cls(metadata["uid"], annotations, spec.get("operatingMode", ""), ending)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. `why` it waits or has ended, `exit_code` of its runner; `weaker` than asked for."""

    uid: str
    phase: str
    ready: bool
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    ending: bool = False
    weaker: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Json, weaker: Callable[[Json], list[str]]) -> "Pod":
        """Return the row of a pod."""
        metadata, status = found["metadata"], found.get("status", {})
        (own, *_) = status.get("containerStatuses") or [{}]
        state = own.get("state", {})
        ended, waits = state.get("terminated", {}), state.get("waiting", {})
        conditions = {each["type"]: each for each in status.get("conditions", [])}
        scheduled = conditions.get("PodScheduled", {})
        unplaced = scheduled if scheduled.get("status") == "False" else {}
        # What ended the whole pod, such as an eviction, comes before what its program said.
        whole: Json = status if status.get("reason") else conditions.get("DisruptionTarget", {})
        says: Json = next(filter(None, (whole, ended, waits, unplaced)), {})
        return cls(
            metadata["uid"],
            status.get("phase", "Pending"),
            conditions.get("Ready", {}).get("status") == "True",
            says.get("reason") or "",
            says.get("message") or "",
            ended.get("exitCode"),
            "deletionTimestamp" in metadata,
            tuple(weaker(found)),
        )

    @property
    def runs(self) -> bool:
        return self.phase == "Running" and self.ready and not self.ending

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed") or self.ending


class Watched(Generic[RowT]):
    """The rows of one kind, by name."""

    def __init__(
        self, api: ApiServer, path: str, selector: str, read: Callable[[Json], RowT]
    ) -> None:
        self._api = api
        self._path = path
        self._selector = selector
        self._read = read
        self.rows: dict[str, RowT] = {}
        self._versions: dict[str, int] = {}
        # By uid: what we have deleted, and an event may still show.
        self._deleted: dict[str, None] = {}
        self._changed = anyio.Event()
        self._failed: OperatorError | None = None
        self._known = False

    async def run(self) -> None:
        """Keep the rows as they are in the cluster, until cancelled."""
        wait_s = _AGAIN_S
        version = ""
        while True:
            try:
                version = version or await self._list()
                async for event in self._api.watch(
                    self._path, version, labelSelector=self._selector
                ):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._take(event["type"], event["object"])
                    wait_s = _AGAIN_S
            except Refused as exc:
                # The version is too old, or something is wrong with it: list anew.
                logger.info("the watch of %s begins anew: %s", self._path, exc)
                version = ""
                if exc.status == _GONE:
                    continue
            except (httpx.HTTPError, OSError) as exc:
                logger.warning("the watch of %s was cut off: %r", self._path, exc)
            except OperatorError as exc:
                self._failed = exc
                self._tell()
            await anyio.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_AGAIN_S)

    async def _list(self) -> str:
        names, version = set[str](), ""
        # One chunk at a time is in memory: an object is ten times its row.
        async for page, as_of in self._api.pages(self._path, labelSelector=self._selector):
            version = as_of
            names.update(each["metadata"]["name"] for each in page)
            for each in page:
                self._take("MODIFIED", each)
        for name in self.rows.keys() - names:
            del self.rows[name]
        self._known, self._failed = True, None
        self._tell()
        return version

    def _take(self, kind: str, found: Json) -> None:
        metadata = found["metadata"]
        name, uid, version = metadata["name"], metadata["uid"], _number(metadata)
        known = self.rows.get(name)
        if kind == "DELETED":
            if known is None or known.uid == uid:
                self.rows.pop(name, None)
                self._versions.pop(name, None)
        elif uid not in self._deleted and version >= self._versions.get(name, 0):
            self.rows[name] = self._read(found)
            self._versions[name] = version
        self._tell()

    def learn(self, found: Json) -> RowT:
        """Take what a request of our own answered."""
        self._take("MODIFIED", found)
        return self.rows.get(found["metadata"]["name"]) or self._read(found)

    def forget(self, name: str) -> None:
        """Take away what a request of our own deleted."""
        row = self.rows.pop(name, None)
        self._versions.pop(name, None)
        if row:
            self._deleted[row.uid] = None
            while len(self._deleted) > _FORGOTTEN:
                del self._deleted[next(iter(self._deleted))]
        self._tell()

    async def all(self) -> Mapping[str, RowT]:
        """Return all rows, as soon as they are known. Raises BackendUnavailable."""
        while not self._known:
            if self._failed:
                raise BackendUnavailable(str(self._failed)) from self._failed
            await self._changed.wait()
        return self.rows

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def change(self) -> None:
        """Wait until anything has changed."""
        await self._changed.wait()


def _number(metadata: Json) -> int:
    text = str(metadata.get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0
