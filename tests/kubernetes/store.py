"""The objects of a fake cluster: versions, watches, chunks, and the rules of what is taken.

An object is never changed in place: each change puts a new one in its stead.
"""

import re
import uuid
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, reduce
from itertools import islice
from typing import Any

import anyio
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
    "persistentvolumeclaims": {"resources"},
    "sandboxes": {"podTemplate", "operatingMode", "service", "shutdownPolicy", "shutdownTime"},
}
# Others are gone at once; these as soon as nothing runs in them, or uses them.
_GRACEFUL = ("pods", "persistentvolumeclaims")


@dataclass(frozen=True)
class Change:
    """What happened to an object, and what it was like before."""

    version: int
    kind: str
    plural: str
    found: Json
    before: Json | None

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
        # The oldest version that a watch may begin at.
        self.oldest = 0
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

    def _note(self, kind: str, plural: str, found: Json, before: Json | None) -> Json:
        self.version += 1
        found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version)}}
        name = found["metadata"]["name"]
        if kind == "DELETED":
            del self.objects[plural][name]
        else:
            self.objects[plural][name] = found
        change = Change(self.version, kind, plural, found, before)
        self.history.append(change)
        self.changed.set()
        self.changed = anyio.Event()
        for listener in self.listeners:
            listener(change)
        return found

    def now(self) -> str:
        return (datetime.now(UTC) + self.ahead).strftime("%Y-%m-%dT%H:%M:%SZ")

    def get(self, plural: str, name: str) -> Json:
        try:
            return self.objects[plural][name]
        except KeyError:
            raise HTTPException(404, f'{plural} "{name}" not found') from None

    def add(self, plural: str, body: Json) -> Json:
        kind, version = KINDS[plural]
        name = body["metadata"]["name"]
        if (body.get("kind"), body.get("apiVersion")) != (kind, version):
            raise HTTPException(400, f"the object is no {kind} of {version}")
        _check(body)
        if name in self.objects[plural]:
            raise HTTPException(409, f'{plural} "{name}" already exists')
        if plural == self.limited and len(self.objects[plural]) >= self.quota:
            what = f"exceeded quota: q, limited: {plural}={self.quota}"
            raise HTTPException(403, f'{plural} "{name}" is forbidden: {what}')
        found = deepcopy(body)
        told = {"namespace": "sandboxes", "creationTimestamp": self.now()}
        found["metadata"] |= {"uid": str(uuid.uuid4()), **told}
        if plural == "pods":
            default_pod(found)
        return self._note("ADDED", plural, found, None)

    def patch(self, plural: str, name: str, news: Json | list[Json], also: str = "") -> Json:
        """Change an object as somebody with kubectl does."""
        found = merged = self.get(plural, name)
        for each in news if isinstance(news, list) else [news]:
            if isinstance(news, list):
                assert each["op"] == "add"
                *keys, last = each["path"].split("/")[1:]
                for value in (None, each["value"]):
                    merged = merge(
                        merged, reduce(lambda told, key: {key: told}, keys[::-1], {last: value})
                    )
            else:
                merged = merge(merged, each)
        before, spec = found.get("spec", {}), merged.get("spec", {})
        for key in before.keys() | spec.keys():
            is_fixed = plural in _MUTABLE and key not in {*_MUTABLE[plural], also}
            if is_fixed and spec.get(key) != before.get(key):
                raise HTTPException(422, f"spec.{key} is immutable")
        bare = {key: merged[key] for key in merged.keys() - {"metadata", "status"}}
        _check({**bare, "metadata": {"name": name}})
        return self._put(plural, found, merged)

    def set(self, plural: str, name: str, news: Json) -> None:
        """Change whatever of an object, if it is there: a status, or how it was placed."""
        if found := self.objects[plural].get(name):
            self._put(plural, found, merge(found, news))

    def _put(self, plural: str, found: Json, merged: Json) -> Json:
        return found if merged == found else self._note("MODIFIED", plural, merged, found)

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
        most = min(int(query.get("limit", "500")), self.chunk)
        *chosen, following = *islice(found, most), next(found, None)
        more = {"continue": chosen[-1]["metadata"]["name"]} if following else {}
        kind, version = KINDS[plural]
        metadata = {"resourceVersion": str(self.version), **more}
        told = {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata}
        return {**told, "items": chosen}

    async def watch(self, plural: str, query: Mapping[str, str]) -> AsyncGenerator[Json]:
        seen = int(query.get("resourceVersion") or 0)
        if seen < self.oldest:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            yield {"type": "ERROR", "object": status}
            return
        with anyio.move_on_after(min(float(query.get("timeoutSeconds", "3000")), self.watch_s)):
            while True:
                changed = self.changed
                start = bisect_right(self.history, seen, key=lambda change: change.version)
                for change in self.history[start:]:
                    seen = change.version
                    if change.plural == plural and (kind := change.seen_by(query)):
                        yield {"type": kind, "object": change.found}
                await changed.wait()
        if self.bookmarks and query.get("allowWatchBookmarks") == "true":
            metadata = {"resourceVersion": str(self.version)}
            yield {"type": "BOOKMARK", "object": {"kind": KINDS[plural][0], "metadata": metadata}}

    def compact(self) -> None:
        """Forget old versions: watches that begin at them are told so."""
        self.oldest = self.version
        self.history.clear()


def _check(body: Json) -> None:
    if why := schema.find_error(body):
        raise HTTPException(422, f'{body["kind"]} "{body["metadata"]["name"]}" is invalid: {why}')


def merge(found: Any, news: Any) -> Any:
    """Return an object after a merge patch."""
    if not isinstance(news, dict):
        return deepcopy(news)
    merged = dict(found) if isinstance(found, dict) else {}
    for key, value in news.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def selects(query: Mapping[str, str], found: Json) -> bool:
    """Return whether an object is what the selectors of a request name."""
    labels, fields = (_terms(query.get(kind, "")) for kind in ("labelSelector", "fieldSelector"))
    own = found["metadata"].get("labels", {})
    values: dict[str, Any] = {path: reduce(_get, path.split("."), found) for path in fields}
    return labels.items() <= own.items() and values == fields


def _get(found: Json, key: str) -> Any:
    return found.get(key, {})


@cache
def _terms(selector: str) -> dict[str, str]:
    return dict(term.split("=", 1) for term in selector.split(",") if term)


def default_pod(pod: Json) -> None:
    """Fill in what an API server does, and nothing else."""
    spec = pod["spec"]
    spec.update(schedulerName="default-scheduler", serviceAccountName="default", priority=0)
    spec.update(preemptionPolicy="PreemptLowerPriority", serviceAccount="default")
    spec.setdefault("dnsPolicy", "ClusterFirst")
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        often = {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}
        spec.setdefault("tolerations", []).append(often)
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
