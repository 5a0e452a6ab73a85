"""The controllers of agent-sandbox in a fake cluster: pods of Sandboxes, pools, and claims."""

import secrets

import anyio
from anyio.abc import TaskGroup
from starlette.exceptions import HTTPException

from tests.kubernetes.store import KINDS, Change, Json, Store, merge

_POOLED = "agents.x-k8s.io/warm-pool-sandbox"
_CLAIMED = "agents.x-k8s.io/claim-uid"
_PLURALS = {kind: plural for plural, (kind, _) in KINDS.items()}
# Who claims may set labels of these alone.
_FREE_LABELS = "sandbox.users.io/"


class _Missing(Exception):
    """What a claim needs is not there: its kind, and what is said."""


class Controllers:
    """Do what follows of a change of a Sandbox, its pod, a pool or a claim."""

    def __init__(self, store: Store, tasks: TaskGroup) -> None:
        self._store = store
        self._rows = store.objects
        self._tasks = tasks
        self._work = {
            "sandboxes": self._run,
            "sandboxwarmpools": self._fill,
            "sandboxclaims": self._assign,
            "sandboxtemplates": self._renew,
        }
        store.listeners.append(self._notice)

    def _notice(self, change: Change) -> None:
        begin, metadata = self._tasks.start_soon, change.found["metadata"]
        if change.plural in self._work:
            begin(self._reconcile, change.plural, metadata["name"])
            if change.step in ("ENDING", "DELETED"):
                begin(self._collect, change)
        # Volumes are made and never looked at again.
        if change.plural != "persistentvolumeclaims":
            for ref in metadata.get("ownerReferences", []):
                begin(self._reconcile, _PLURALS[ref["kind"]], ref["name"])

    async def _collect(self, change: Change) -> None:
        """Delete what an object owned, a little later, and then one that waits for that."""
        await anyio.sleep(self._store.collected_s)
        for plural, each in self._store.owned_by(change.found):
            self._store.delete(plural, each["metadata"]["name"], last=True)
        while self._store.owned_by(change.found):
            await self._store.changed.wait()
        if change.step == "ENDING":
            self._store.drop(change.plural, change.found["metadata"]["name"])

    async def _reconcile(self, plural: str, name: str) -> None:
        found = self._rows[plural].get(name)
        if found is None or "deletionTimestamp" in found["metadata"]:
            return
        try:
            self._work[plural](name, found)
        except _Missing as exc:
            told = {"reason": f"{exc.args[0]}NotFound", "message": exc.args[1]}
            self._tell(plural, found, {"type": "Ready", "status": "False", **told})
        except HTTPException as exc:
            told = {"reason": "ReconcilerError", "message": f"Error seen: {exc.detail}"}
            self._tell(plural, found, {"type": "Ready", "status": "False", **told})

    def _tell(self, plural: str, found: Json, ready: Json, **more: Json) -> None:
        name, seen = found["metadata"]["name"], found["metadata"]["generation"]
        conditions = [{"reason": "DependenciesNotReady", "message": "Pod exists", **ready}]
        if plural == "sandboxes" and (pod := self._rows["pods"].get(name)):
            # It says what the scheduler says, too.
            said = pod["status"].get("conditions", [])
            conditions += [each for each in said if each["type"] == "PodScheduled"]
        conditions = [{**each, "observedGeneration": seen} for each in conditions]
        self._store.set(plural, name, {"status": {"conditions": conditions, **more}})

    def _make(self, plural: str, name: str, body: Json, owner: Json) -> None:
        kind, version = KINDS[plural]
        metadata = {**body.get("metadata", {}), "name": name, "ownerReferences": [_ref(owner)]}
        self._store.add(plural, {"apiVersion": version, "kind": kind, **body, "metadata": metadata})

    def _run(self, name: str, sandbox: Json) -> None:
        """Make the pod and the claims of a Sandbox, or end the pod of a suspended one."""
        spec, pod = sandbox["spec"], self._rows["pods"].get(name)
        volumes = spec["podTemplate"]["spec"].get("volumes", [])
        refused: HTTPException | None = None
        for claim in spec.get("volumeClaimTemplates", []):
            of, made = claim["metadata"]["name"], f"{claim['metadata']['name']}-{name}"
            volumes = [{"name": of, "persistentVolumeClaim": {"claimName": made}}, *volumes]
            if made not in self._rows["persistentvolumeclaims"]:
                try:
                    self._make("persistentvolumeclaims", made, {"spec": claim["spec"]}, sandbox)
                except HTTPException as exc:
                    # It makes the pod all the same.
                    refused = exc
        if spec.get("operatingMode") == "Suspended":
            if pod:
                self._store.delete("pods", name)
        elif pod is None:
            labels = {"agents.x-k8s.io/sandbox-name-hash": "h"}
            added = {"metadata": {"labels": labels}, "spec": {"volumes": volumes}}
            self._make("pods", name, merge(spec["podTemplate"], added), sandbox)
        if refused:
            raise refused
        is_ready = pod and pod["status"].get("podIP") and "deletionTimestamp" not in pod["metadata"]
        reason = "DependenciesReady" if is_ready else "DependenciesNotReady"
        ready = {"type": "Ready", "status": str(bool(is_ready)), "reason": reason}
        self._tell("sandboxes", sandbox, ready)

    def _fill(self, name: str, pool: Json) -> None:
        owned = [each for _, each in self._store.owned_by(pool)]
        ready = {"readyReplicas": sum(map(_is_ready, owned))}
        self._store.set("sandboxwarmpools", name, {"status": ready})
        if name not in self._rows["sandboxtemplates"]:
            return
        for _ in range(pool["spec"]["replicas"] - len(owned)):
            self._make_sandbox(f"{name}-{secrets.token_hex(3)}", pool, pool, {_POOLED: "a-hash"})

    def _renew(self, _: str, template: Json) -> None:
        """Replace what waits in pools with an older template; another strategy leaves it."""
        for pool in list(self._rows["sandboxwarmpools"].values()):
            if pool["spec"].get("updateStrategy") == {"type": "Recreate"}:
                for plural, each in self._store.owned_by(pool):
                    if each["spec"]["podTemplate"] != template["spec"]["podTemplate"]:
                        self._store.delete(plural, each["metadata"]["name"])

    def _make_sandbox(self, name: str, pool: Json, owner: Json, labels: Json) -> None:
        of = self._find("SandboxTemplate", pool["spec"]["sandboxTemplateRef"]["name"])
        shared = ("podTemplate", "volumeClaimTemplates", "service")
        spec = {key: of["spec"][key] for key in shared if key in of["spec"]}
        extra = {"podTemplate": {"metadata": owner["spec"].get("additionalPodMetadata", {})}}
        body = {"metadata": {"labels": labels}, "spec": merge(spec, extra)}
        self._make("sandboxes", name, body, owner)

    def _find(self, kind: str, name: str) -> Json:
        found = self._rows[f"{kind.lower()}s"].get(name)
        if found is None:
            raise _Missing(kind.removeprefix("Sandbox"), f'{kind} "{name}" not found')
        return found

    def _assign(self, name: str, claim: Json) -> None:
        """Give a claim a ready Sandbox of its pool, or make it one."""
        extra = claim["spec"].get("additionalPodMetadata", {})
        if foreign := [key for key in extra.get("labels", {}) if not key.startswith(_FREE_LABELS)]:
            raise HTTPException(422, f'label "{foreign[0]}" is not in the allowlist')
        if owned := self._store.owned_by(claim):
            ((_, sandbox),) = owned
            (ready, *_) = sandbox.get("status", {}).get("conditions", [{"type": "Ready"}])
            told = {"name": sandbox["metadata"]["name"]}
            self._tell("sandboxclaims", claim, {"status": "False", **ready}, sandbox=told)
            return
        pool = self._find("SandboxWarmPool", claim["spec"]["warmPoolRef"]["name"])
        labels = {_CLAIMED: claim["metadata"]["uid"]}
        warm = next((each for _, each in self._store.owned_by(pool) if _is_ready(each)), None)
        if warm is None:
            self._make_sandbox(name, pool, claim, labels)
            return
        own, pod = warm["metadata"]["name"], {"metadata": merge(extra, {"labels": labels})}
        metadata = {
            "ownerReferences": [_ref(claim)],
            "labels": {**labels, _POOLED: None},
            "annotations": {"agents.x-k8s.io/pod-name": own},
        }
        self._store.set("pods", own, pod)
        self._store.set("sandboxes", own, {"metadata": metadata, "spec": {"podTemplate": pod}})
        self._fill(pool["metadata"]["name"], pool)


def _ref(owner: Json) -> Json:
    kept = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
    return {**kept, "name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}


def _is_ready(sandbox: Json) -> bool:
    conditions = sandbox.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
