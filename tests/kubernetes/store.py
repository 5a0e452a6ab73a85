"""The objects of a fake cluster: versions, watches, chunks, and the rules of what is taken."""

import copy
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import anyio

from tests.kubernetes import schema

Json = dict[str, Any]
# plural: kind, apiVersion
KINDS = {
    "pods": ("Pod", "v1"),
    "persistentvolumeclaims": ("PersistentVolumeClaim", "v1"),
    "events": ("Event", "v1"),
    "networkpolicies": ("NetworkPolicy", "networking.k8s.io/v1"),
    "sandboxes": ("Sandbox", "agents.x-k8s.io/v1beta1"),
}
_IMMUTABLE = {"pods": ("containers", "volumes", "securityContext"), "sandboxes": ("volumeClaim",)}


class Failure(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """All objects of one namespace; whatever changes tells those that watch."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Json]] = {plural: {} for plural in KINDS}
        self.version = 1000
        # The oldest version that a watch may begin at.
        self.oldest = 0
        self.history: list[tuple[int, str, str, Json]] = []
        self.changed = anyio.Event()
        # Called with (type, plural, object) after every change.
        self.listeners: list[Callable[[str, str, Json], None]] = []
        # How long a watch lasts at most, and what a list has in one chunk.
        self.watch_s = 3000.0
        self.chunk = 500
        self.bookmarks = True
        self.quota: int | None = None

    def note(self, kind: str, plural: str, found: Json) -> None:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)
        self.history.append((self.version, kind, plural, copy.deepcopy(found)))
        self.changed.set()
        self.changed = anyio.Event()
        for listener in self.listeners:
            listener(kind, plural, found)

    def get(self, plural: str, name: str) -> Json:
        try:
            return self.objects[plural][name]
        except KeyError:
            raise Failure(404, f'{plural} "{name}" not found', "NotFound") from None

    def add(self, plural: str, body: Json) -> Json:
        kind, version = KINDS[plural]
        name = body["metadata"]["name"]
        if (body.get("kind"), body.get("apiVersion")) != (kind, version):
            raise Failure(400, f"the object is no {kind} of {version}", "BadRequest")
        try:
            schema.check(body)
        except schema.Invalid as exc:
            raise Failure(422, f'{kind} "{name}" is invalid: {exc}', "Invalid") from exc
        if name in self.objects[plural]:
            raise Failure(409, f'{plural} "{name}" already exists', "AlreadyExists")
        if plural == "pods" and self.quota is not None and len(self.objects[plural]) >= self.quota:
            what = f"exceeded quota: q, limited: pods={self.quota}"
            raise Failure(403, f'pods "{name}" is forbidden: {what}', "Forbidden")
        found = copy.deepcopy(body)
        found["metadata"] |= {
            "uid": str(uuid.uuid4()),
            "namespace": "sandboxes",
            "creationTimestamp": now(),
        }
        if plural == "pods":
            default_pod(found)
        self.objects[plural][name] = found
        self.note("ADDED", plural, found)
        return found

    def patch(self, plural: str, name: str, news: Json, *, status: bool = False) -> Json:
        found = self.get(plural, name)
        merged = merge(found, news)
        if not status:
            for field in _IMMUTABLE.get(plural, ()):
                for key in found["spec"].keys() | merged["spec"].keys():
                    is_held = key.startswith(field) and merged["spec"].get(key) != found[
                        "spec"
                    ].get(key)
                    if is_held and not (plural == "pods" and field == "containers"):
                        raise Failure(422, f"spec.{key} is immutable", "Invalid")
            bare = {key: merged[key] for key in ("apiVersion", "kind", "spec")}
            try:
                schema.check({**bare, "metadata": {"name": name}})
            except schema.Invalid as exc:
                raise Failure(422, f'"{name}" is invalid: {exc}', "Invalid") from exc
        if merged != found:
            self.objects[plural][name] = merged
            self.note("MODIFIED", plural, merged)
        return self.objects[plural][name]

    def mark_deleted(self, plural: str, name: str) -> Json:
        """Begin to delete; who has a finalizer, and the kubelet, finish it by `drop`."""
        found = self.get(plural, name)
        if "deletionTimestamp" not in found["metadata"]:
            self.patch(plural, name, {"metadata": {"deletionTimestamp": now()}}, status=True)
        return self.get(plural, name)

    def drop(self, plural: str, name: str) -> None:
        found = self.objects[plural].pop(name, None)
        if found:
            self.note("DELETED", plural, found)

    def list(self, plural: str, query: Mapping[str, str]) -> Json:
        rows = sorted(self.objects[plural].items())
        chosen = [each for _, each in rows if selects(query, each)]
        start, limit = int(query.get("continue", "0")), int(query.get("limit", "500"))
        limit = min(limit, self.chunk)
        page, rest = chosen[start : start + limit], chosen[start + limit :]
        metadata = {"resourceVersion": str(self.version)}
        if rest:
            metadata["continue"] = str(start + limit)
        kind, version = KINDS[plural]
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": page}

    async def watch(self, plural: str, query: Mapping[str, str]) -> AsyncGenerator[Json]:
        seen = int(query.get("resourceVersion") or 0)
        if seen < self.oldest:
            status = {"kind": "Status", "code": 410, "message": "too old resource version"}
            yield {"type": "ERROR", "object": status}
            return
        wanted = float(query.get("timeoutSeconds", "3000"))
        with anyio.move_on_after(min(wanted, self.watch_s)):
            while True:
                changed = self.changed
                news = [row for row in self.history if row[0] > seen]
                for version, kind, of, found in news:
                    seen = version
                    if of == plural and selects(query, found):
                        yield {"type": kind, "object": found}
                await changed.wait()
        if self.bookmarks and query.get("allowWatchBookmarks") == "true":
            metadata = {"resourceVersion": str(self.version)}
            yield {"type": "BOOKMARK", "object": {"kind": KINDS[plural][0], "metadata": metadata}}

    def compact(self) -> None:
        """Forget old versions: watches that begin at them are told so."""
        self.oldest = self.version
        self.history.clear()


def merge(found: Any, news: Any) -> Any:
    """Return an object after a merge patch."""
    if not isinstance(news, dict):
        return copy.deepcopy(news)
    merged = dict(found) if isinstance(found, dict) else {}
    for key, value in news.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def selects(query: Mapping[str, str], found: Json) -> bool:
    labels = found["metadata"].get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        key, _, value = term.partition("=")
        if labels.get(key) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        path, _, value = term.partition("=")
        at: Any = found
        for part in path.split("."):
            at = at.get(part, {})
        if at != value:
            return False
    return True


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
        }
        for each in container.get("env", []):
            if each.get("value") == "":
                del each["value"]
    pod["status"] = {"phase": "Pending", "qosClass": "Burstable"}
