"""The objects of a fake cluster: versions, watches, chunks, and the rules of what is taken.

An object is never changed in place: each change puts a new one in its stead.
"""

import json
import operator
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, reduce
from itertools import islice
from typing import Any, NoReturn

import anyio
from jsonpath.patch import patched
from starlette.exceptions import HTTPException

from tests.kubernetes import schema

Json = dict[str, Any]
_AGENTS, _POOLS = "agents.x-k8s.io/v1beta1", "extensions.agents.x-k8s.io/v1beta1"
# plural: kind, apiVersion
KINDS = {
    "pods": ("Pod", "v1"),
    "persistentvolumeclaims": ("PersistentVolumeClaim", "v1"),
    "events": ("Event", "v1"),
    "configmaps": ("ConfigMap", "v1"),
    "networkpolicies": ("NetworkPolicy", "networking.k8s.io/v1"),
    "sandboxes": ("Sandbox", _AGENTS),
    "sandboxtemplates": ("SandboxTemplate", _POOLS),
    "sandboxwarmpools": ("SandboxWarmPool", _POOLS),
    "sandboxclaims": ("SandboxClaim", _POOLS),
}
# What else of a spec is there once cannot be changed.
_MUTABLE = {
    "pods": {"containers", "tolerations", "activeDeadlineSeconds", "nodeName"},
    "pods/ephemeralcontainers": {"ephemeralContainers"},
    "persistentvolumeclaims": {"resources"},
    "sandboxes": {"podTemplate", "operatingMode", "service", "shutdownPolicy", "shutdownTime"},
}
# Others are gone at once; these as soon as nothing runs in them, or uses them.
_GRACEFUL = ("pods", "persistentvolumeclaims")


@dataclass(frozen=True)
class Change:
    """What happened to an object, and what it was like before."""

    kind: str
    plural: str
    found: Json
    before: Json

    @property
    def step(self) -> str:
        """Return the kind, or ENDING where its deletion has begun."""
        was_ending = "deletionTimestamp" in self.before.get("metadata", {})
        is_ending = "deletionTimestamp" in self.found["metadata"]
        return "ENDING" if is_ending and not was_ending else self.kind

    def seen_by(self, query: Mapping[str, str]) -> str:
        """Return the type of the event for who selects by `query`; nothing if there is none."""
        if selects(query, self.found):
            return self.kind
        return "DELETED" if self.before and selects(query, self.before) else ""


class Store:
    """All objects of one namespace; whatever changes tells those that watch."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Json]] = {plural: {} for plural in KINDS}
        self.version = 1000
        # The oldest version that a watch may begin at, and each change since.
        self.oldest = self.version
        self.history: list[Change] = []
        self.changed = anyio.Event()
        # Called after every change.
        self.listeners: list[Callable[[Change], None]] = []
        self.behave()

    def behave(self) -> None:
        # How long a watch lasts at most, what a list has in one chunk, how far the clock is ahead.
        self.watch_s, self.chunk, self.ahead = 3000.0, 500, timedelta()
        # How long what a deleted object owned outlives it.
        self.collected_s = 0.05
        self.bookmarks, self.limited, self.quota = True, "pods", 1 << 30
        # Why objects of a kind are not admitted.
        self.refusals: dict[str, str] = {}

    def _note(self, kind: str, plural: str, found: Json, before: Json) -> Json:
        if kind == "MODIFIED" and found == before:
            return found
        self.version += 1
        generation = before.get("metadata", {}).get("generation", 0)
        generation += found.get("spec") != before.get("spec") or not before
        news = {"resourceVersion": str(self.version), "generation": generation}
        found = merge(found, {"metadata": news})
        name = found["metadata"]["name"]
        if kind == "DELETED":
            del self.objects[plural][name]
        else:
            self.objects[plural][name] = found
        change = Change(kind, plural, found, before)
        self.history.append(change)
        self.tell()
        for listener in self.listeners:
            listener(change)
        return found

    def tell(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def now(self) -> str:
        return (datetime.now(UTC) + self.ahead).strftime("%Y-%m-%dT%H:%M:%SZ")

    def get(self, plural: str, name: str) -> Json:
        if name not in self.objects[plural]:
            raise HTTPException(404, f'{plural} "{name}" not found')
        return self.objects[plural][name]

    def add(self, plural: str, body: Json) -> Json:
        name, rows = body["metadata"]["name"], self.objects[plural]
        if (body.get("kind"), body.get("apiVersion")) != KINDS[plural]:
            raise HTTPException(400, f"the object is none of {KINDS[plural]}")
        _check(body)
        if name in rows:
            raise HTTPException(409, f'{plural} "{name}" already exists')
        if plural == self.limited and len(rows) >= self.quota:
            self._refuse(
                *(plural, name),
                f"exceeded quota: q, requested: {plural}=1, used: {plural}={len(rows)}, limited: "
                f"{plural}={self.quota}",
            )
        if why := self.refusals.get(plural):
            self._refuse(plural, name, why)
        found = deepcopy(body)
        told = {"namespace": "sandboxes", "creationTimestamp": self.now()}
        found["metadata"] |= {"uid": str(uuid.uuid4()), **told}
        if plural == "pods":
            default_pod(found)
        return self._note("ADDED", plural, found, {})

    def _refuse(self, plural: str, name: str, why: str) -> NoReturn:
        raise HTTPException(403, f'{plural} "{name}" is forbidden: {why}')

    def warn(self, about: Json, reason: str, message: str) -> None:
        """Tell of an object what only an event tells."""
        metadata = about["metadata"]
        event = {
            "metadata": {"name": f"{metadata['name']}.{self.version:x}"},
            "involvedObject": {"name": metadata["name"], "uid": metadata["uid"]},
            "type": "Warning",
            "reason": reason,
            "message": message,
        }
        self.add("events", {"apiVersion": "v1", "kind": "Event", **event})

    def patch(self, resource: str, name: str, news: Json | list[Json]) -> Json:
        """Change an object as somebody with kubectl does."""
        plural = resource.partition("/")[0]
        found = self.get(plural, name)
        merged: Any = patched(news, found) if isinstance(news, list) else merge(found, news)
        before, spec = found.get("spec", {}), merged.get("spec", {})
        changed = {key for key in {**before, **spec} if before.get(key) != spec.get(key)}
        if fixed := changed - _MUTABLE.get(resource, changed):
            raise HTTPException(422, f"spec is immutable: {fixed}")
        _check(merged)
        return self._note("MODIFIED", plural, merged, found)

    def set(self, plural: str, name: str, news: Json) -> None:
        """Change whatever of an object, if it is there: a status, or how it was placed."""
        if found := self.objects[plural].get(name):
            self._note("MODIFIED", plural, merge(found, news), found)

    def delete(self, plural: str, name: str, *, last: bool = False) -> Json:
        """Delete an object, or begin to: see `_GRACEFUL`. `last`: what it owns goes before it."""
        found = self.get(plural, name)
        if plural not in _GRACEFUL and not (last and self.owned_by(found)):
            self.drop(plural, name)
        elif "deletionTimestamp" not in found["metadata"]:
            self.set(plural, name, {"metadata": {"deletionTimestamp": self.now()}})
        return found

    def drop(self, plural: str, name: str) -> None:
        if found := self.objects[plural].get(name):
            self._note("DELETED", plural, found, found)

    def owned_by(self, owner: Json) -> list[tuple[str, Json]]:
        uid = owner["metadata"]["uid"]
        return [
            (plural, found)
            for plural, rows in self.objects.items()
            for found in rows.values()
            if any(ref["uid"] == uid for ref in found["metadata"].get("ownerReferences", []))
        ]

    def list(self, plural: str, query: Mapping[str, str]) -> Json:
        rows, after = self.objects[plural], query.get("continue", "")
        names = sorted(name for name in rows if name > after)
        found = (rows[name] for name in names if selects(query, rows[name]))
        chosen = [*islice(found, min(int(query["limit"]), self.chunk))]
        more = {"continue": chosen[-1]["metadata"]["name"]} if next(found, None) else {}
        return {"metadata": {"resourceVersion": str(self.version), **more}, "items": chosen}

    async def watch(self, plural: str, query: Mapping[str, str]) -> AsyncGenerator[str]:
        """Yield events as lines of JSON."""
        if (seen := int(query["resourceVersion"])) < self.oldest:
            yield _line("ERROR", {"code": 410, "message": "too old resource version"})
            return
        with anyio.move_on_after(self.watch_s):
            while True:
                changed, seen = self.changed, max(seen, self.oldest)
                for change in self.history[seen - self.oldest :]:
                    seen += 1
                    if change.plural == plural and (kind := change.seen_by(query)):
                        yield _line(kind, change.found)
                await changed.wait()
        if self.bookmarks and query.get("allowWatchBookmarks") == "true":
            # What came since this client was slow to read is not for it yet.
            yield _line("BOOKMARK", {"metadata": {"resourceVersion": str(seen)}})

    def compact(self) -> None:
        """Forget old versions: watches that begin at them are told so."""
        self.oldest = self.version
        self.history.clear()


def _line(event: str, found: Json) -> str:
    return json.dumps({"type": event, "object": found}) + "\n"


def _check(body: Json) -> None:
    if why := schema.find_error({key: body[key] for key in body.keys() - {"status"}}):
        raise HTTPException(422, f'{body["kind"]} "{body["metadata"]["name"]}" is invalid: {why}')


def merge(found: Any, news: Any) -> Any:
    """Return an object after a merge patch."""
    if not isinstance(news, dict):
        return news
    merged = dict(found) if isinstance(found, dict) else {}
    merged |= {key: merge(merged.get(key), value) for key, value in news.items()}
    return {key: value for key, value in merged.items() if value is not None}


def selects(query: Mapping[str, str], found: Json) -> bool:
    """Return whether an object is what the selectors of a request name."""
    labels, fields = (_terms(query.get(kind, "")) for kind in ("labelSelector", "fieldSelector"))
    own = found["metadata"].get("labels", {})
    values: Json = {path: reduce(operator.getitem, path.split("."), found) for path in fields}
    return labels.items() <= own.items() and values == fields


@cache
def _terms(selector: str) -> dict[str, str]:
    return dict(term.split("=", 1) for term in selector.split(",") if term)


def default_pod(pod: Json) -> None:
    """Fill in what an API server does, and nothing else."""
    spec = pod["spec"]
    spec.update(schedulerName="default-scheduler", serviceAccountName="default", priority=0)
    spec.update(preemptionPolicy="PreemptLowerPriority", serviceAccount="default")
    tolerated = spec.setdefault("tolerations", [])
    for key in {"not-ready", "unreachable"} - {
        each["key"].rpartition("/")[2] for each in tolerated
    }:
        often = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        tolerated.append({"key": f"node.kubernetes.io/{key}", **often})
    for container in spec["containers"]:
        for usage in container.get("resources", {}).values():
            # As it writes quantities itself.
            usage["cpu"] = re.sub(r"000m$", "", usage["cpu"])
            usage["memory"] = usage["memory"].replace("2048Mi", "2Gi")
        container |= {
            "terminationMessagePath": "/dev/termination-log",
            "terminationMessagePolicy": "File",
            "env": [{k: v for k, v in each.items() if v} for each in container.get("env", [])],
        }
    pod["status"] = {"phase": "Pending", "qosClass": "Burstable"}
