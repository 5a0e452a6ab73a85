"""What happens to objects of a fake cluster: pods are containers of the local engine.

Claims are folders. A controller makes the pod and the claim of a Sandbox.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import anyio
import docker
from anyio import to_thread
from anyio.abc import TaskGroup
from docker.errors import APIError, ImageNotFound, NotFound
from docker.types import Mount

from tests.kubernetes.store import Failure, Json, Store, now

_UNITS = {"": 1, "m": 1e-3, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def quantity(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)(\D*)", text)
    assert found
    return float(found[1]) * _UNITS[found[2]]


class Node:
    """Runs the pods of a store."""

    def __init__(self, store: Store, folder: Path, tasks: TaskGroup) -> None:
        self.store = store
        self.folder = folder
        self._tasks = tasks
        self._engine = docker.from_env(timeout=60)
        self._containers: dict[str, str] = {}
        self._made_network: Any = None
        self._limit = anyio.CapacityLimiter(60)
        self.enforces_policies = True
        # Why no pod can be placed, if so; and whether claims are bound.
        self.full = ""
        store.listeners.append(self._notice)

    def close(self) -> None:
        for identity in self._containers.values():
            self._remove(identity)
        if self._made_network:
            self._made_network.remove()
        self._engine.close()

    def container(self, name: str) -> str:
        """Return the container of a pod."""
        return self._containers[self.store.get("pods", name)["metadata"]["uid"]]

    def claim_folder(self, name: str) -> Path:
        return self.folder / "claims" / name

    def _notice(self, kind: str, plural: str, found: Json) -> None:
        name, ending = found["metadata"]["name"], "deletionTimestamp" in found["metadata"]
        if plural == "pods" and kind == "ADDED":
            self._tasks.start_soon(self._run, name, found)
        elif plural == "pods" and kind == "MODIFIED" and ending:
            self._tasks.start_soon(self._end, name, found)
        elif plural == "pods" and kind == "DELETED":
            self._tasks.start_soon(self._free_claims)
        elif plural == "persistentvolumeclaims" and kind == "ADDED":
            self._tasks.start_soon(self._bind, name)
        elif plural == "persistentvolumeclaims" and ending and kind == "MODIFIED":
            self._tasks.start_soon(self._free_claims)
        if plural in ("sandboxes", "pods") and not (plural == "pods" and kind == "ADDED"):
            self._tasks.start_soon(self._control, plural, kind, found)

    # Claims.

    async def _bind(self, name: str) -> None:
        # As a driver makes it that honours fsGroup.
        folder = self.claim_folder(name)
        for place in (folder, *(folder / sub for sub in ("workspace", "home", "skills"))):
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, 0, 10001)
            place.chmod(0o2775)
        self._set("persistentvolumeclaims", name, {"status": {"phase": "Bound"}})

    async def _free_claims(self) -> None:
        used = {
            volume["persistentVolumeClaim"]["claimName"]
            for pod in self.store.objects["pods"].values()
            for volume in pod["spec"].get("volumes", [])
            if "persistentVolumeClaim" in volume
        }
        for name, claim in list(self.store.objects["persistentvolumeclaims"].items()):
            if "deletionTimestamp" in claim["metadata"] and name not in used:
                await to_thread.run_sync(shutil.rmtree, self.claim_folder(name), True)
                self.store.drop("persistentvolumeclaims", name)

    # Pods.

    async def _run(self, name: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        while why := self._cannot_be_placed(pod):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            self._set("pods", name, {"status": {"conditions": [{**condition, "message": why}]}})
            changed = self.store.changed
            if self._is_gone(name, uid):
                return
            await changed.wait()
        try:
            identity = await to_thread.run_sync(self._create, name, pod, limiter=self._limit)
        except ImageNotFound as exc:
            self._wait_for(name, "ErrImagePull", str(exc.explanation))
            return
        except APIError as exc:
            self._wait_for(name, "RunContainerError", str(exc.explanation))
            return
        if self._is_gone(name, uid):
            await to_thread.run_sync(self._remove, identity)
            self.store.drop("pods", name)
            return
        self._containers[uid] = identity
        address = await to_thread.run_sync(self._address, identity)
        running = {"name": "sandbox", "ready": True, "state": {"running": {"startedAt": now()}}}
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True"},
        ]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        news = {**status, "conditions": conditions, "containerStatuses": [running]}
        self._set("pods", name, {"spec": {"nodeName": "node"}, "status": news})
        ended = await to_thread.run_sync(
            self._wait, identity, abandon_on_cancel=True, limiter=self._limit
        )
        if ended and not self._is_gone(name, uid):
            self._told_end(name, *ended)

    def _cannot_be_placed(self, pod: Json) -> str:
        for volume in pod["spec"].get("volumes", []):
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            known = self.store.objects["persistentvolumeclaims"].get(claim, {})
            if claim and known.get("status", {}).get("phase") != "Bound":
                return f'persistentvolumeclaim "{claim}" not found or not bound'
        return self.full

    def _is_gone(self, name: str, uid: str) -> bool:
        pod = self.store.objects["pods"].get(name)
        return (
            pod is None or pod["metadata"]["uid"] != uid or "deletionTimestamp" in pod["metadata"]
        )

    def _set(self, plural: str, name: str, news: Json) -> None:
        if name in self.store.objects[plural]:
            self.store.patch(plural, name, news, status=True)

    def _wait_for(self, name: str, reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        statuses = [{"name": "sandbox", "ready": False, "state": state}]
        self._set("pods", name, {"status": {"containerStatuses": statuses}})

    def _told_end(self, name: str, code: int, reason: str) -> None:
        state = {"terminated": {"exitCode": code, "reason": reason}}
        status = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed"}],
            "containerStatuses": [{"name": "sandbox", "ready": False, "state": state}],
        }
        self._set("pods", name, {"status": status})

    async def _end(self, name: str, pod: Json) -> None:
        identity = self._containers.pop(pod["metadata"]["uid"], None)
        if identity:
            await to_thread.run_sync(self._remove, identity)
            self.store.drop("pods", name)
        elif "containerStatuses" in pod["status"] or self._cannot_be_placed(pod):
            self.store.drop("pods", name)
        # Else `_run` is making its container, and drops it.

    async def end_pod(self, name: str, reason: str) -> None:
        """End a pod as a node does that is low on memory, or its kernel."""
        uid = self.store.get("pods", name)["metadata"]["uid"]
        if reason == "OOMKilled":
            self._told_end(name, 137, reason)
        else:
            ready = [{"type": "Ready", "status": "False"}]
            news = {"phase": "Failed", "reason": reason, "message": "low on memory"}
            both = {**news, "containerStatuses": [], "conditions": ready}
            self._set("pods", name, {"status": both})
        await to_thread.run_sync(self._remove, self._containers.pop(uid))

    # Containers. All of these block.

    def _create(self, name: str, pod: Json) -> str:
        spec = pod["spec"]
        (container,) = spec["containers"]
        security, limits = spec["securityContext"], container["resources"]["limits"]
        volumes = {each["name"]: each for each in spec.get("volumes", [])}
        hosts = self.folder / "hosts"
        hosts.write_text("127.0.0.1 localhost\n")
        hosts.chmod(0o644)
        mounts = [Mount("/etc/hosts", str(hosts), "bind")]
        tmpfs: dict[str, str] = {}
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if "emptyDir" in volume:
                size = int(quantity(volume["emptyDir"]["sizeLimit"]))
                # The engine takes the mode of the image's folder; the cluster, fsGroup.
                own = "" if mount["mountPath"].startswith(("/tmp", "/dev")) else ",uid=10001"
                tmpfs[mount["mountPath"]] = (
                    f"rw,exec,nosuid,nodev,size={size},nr_inodes=64k,mode=1777,gid=10001{own}"
                )
            else:
                claim = volume["persistentVolumeClaim"]["claimName"]
                source = str(self.claim_folder(claim) / mount["subPath"])
                mounts.append(Mount(mount["mountPath"], source, "bind"))
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        made = self._engine.containers.create(
            container["image"],
            entrypoint=[self._expand(word) for word in container["command"]],
            command=[],
            name=f"k8s-{name[:60]}-{pod['metadata']['uid'][:8]}",
            labels={"app": "mcp-sandbox", "mcp-sandbox.test": "kubernetes"},
            environment={
                e["name"]: self._expand(e.get("value", "")) for e in container.get("env", [])
            },
            user=f"{security['runAsUser']}:{security['runAsGroup']}",
            working_dir=container.get("workingDir"),
            hostname=spec.get("hostname", name),
            read_only=own["readOnlyRootFilesystem"],
            cap_drop=own["capabilities"]["drop"],
            security_opt=["no-new-privileges:true"],
            mem_limit=int(quantity(limits["memory"])),
            memswap_limit=int(quantity(limits["memory"])),
            nano_cpus=int(min(quantity(limits["cpu"]), os.cpu_count() or 1) * 1e9),
            # A node's own limit.
            pids_limit=1024,
            tmpfs=tmpfs,
            mounts=mounts,
            network_mode=self._network(pod),
        )
        try:
            made.start()
        except BaseException:
            made.remove(force=True)
            raise
        return str(made.id)

    def _network(self, pod: Json) -> str:
        """Return the engine's network: none for a pod that policies cut off."""
        # Where policies hold, tests need no pod with a network: a bridge is slow to make.
        labels = pod["metadata"].get("labels", {})
        chosen = (
            each["spec"]["podSelector"]["matchLabels"]
            for each in self.store.objects["networkpolicies"].values()
        )
        is_apart = any(wanted.items() <= labels.items() for wanted in chosen)
        is_canary = labels.get("mcp-sandbox.network") == "canary"
        return "none" if self.enforces_policies and (is_apart or is_canary) else self._bridge()

    def _bridge(self) -> str:
        """Return a network of this cluster's own."""
        if self._made_network is None:
            name = f"k8s-{os.getpid()}-{self.folder.parent.name}"
            self._made_network = self._engine.networks.create(name, internal=True)
        return str(self._made_network.name)

    @staticmethod
    def _expand(text: str) -> str:
        assert "$(" not in text.replace("$$", "")
        return text.replace("$$", "$")

    def _address(self, identity: str) -> str:
        found = self._engine.api.inspect_container(identity)["NetworkSettings"]["Networks"]
        return next((each["IPAddress"] for each in found.values() if each["IPAddress"]), "10.9.9.9")

    def _wait(self, identity: str) -> tuple[int, str] | None:
        try:
            self._engine.api.wait(identity, timeout=100_000)
            state = self._engine.api.inspect_container(identity)["State"]
        except (NotFound, APIError):
            return None
        code = int(state["ExitCode"])
        killed = "OOMKilled" if state["OOMKilled"] and code else "Error"
        return code, "Completed" if code == 0 else killed

    def _remove(self, identity: str) -> None:
        try:
            self._engine.api.remove_container(identity, force=True)
        except (NotFound, APIError):
            return

    # Sandboxes.

    async def _control(self, plural: str, kind: str, found: Json) -> None:
        owner = found["metadata"]["name"]
        if plural == "pods":
            refs = found["metadata"].get("ownerReferences", [])
            owner = refs[0]["name"] if refs else ""
        if plural == "sandboxes" and kind == "DELETED":
            for of, name in (("pods", owner), ("persistentvolumeclaims", f"files-{owner}")):
                if name in self.store.objects[of]:
                    self.store.mark_deleted(of, name)
            return
        sandbox = self.store.objects["sandboxes"].get(owner)
        if sandbox is None:
            return
        if "deletionTimestamp" in sandbox["metadata"]:
            self.store.drop("sandboxes", owner)
            return
        refusal = self._make_parts(owner, sandbox)
        pod = self.store.objects["pods"].get(owner)
        ready: Json = {"type": "Ready", "status": "False"}
        if pod and pod["status"].get("podIP"):
            ready["status"] = "True"
        elif refusal:
            ready |= {"reason": "ReconcilerError", "message": refusal}
        self._set("sandboxes", owner, {"status": {"conditions": [ready]}})

    def _make_parts(self, name: str, sandbox: Json) -> str:
        """Make what is missing; return why that was refused."""
        spec, pods = sandbox["spec"], self.store.objects["pods"]
        ref = {"apiVersion": sandbox["apiVersion"], "kind": "Sandbox", "controller": True}
        refs = [{**ref, "name": name, "uid": sandbox["metadata"]["uid"]}]
        volumes: list[Json] = []
        for claim in spec.get("volumeClaimTemplates", []):
            made = f"{claim['metadata']['name']}-{name}"
            volumes.append(
                {"name": claim["metadata"]["name"], "persistentVolumeClaim": {"claimName": made}}
            )
            if made not in self.store.objects["persistentvolumeclaims"]:
                body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": claim["spec"]}
                metadata = {"name": made, "ownerReferences": refs}
                self.store.add("persistentvolumeclaims", {**body, "metadata": metadata})
        if spec.get("operatingMode") == "Suspended":
            if name in pods:
                self.store.mark_deleted("pods", name)
        elif name not in pods:
            template: Json = spec["podTemplate"]
            labels = {
                **template["metadata"].get("labels", {}),
                "agents.x-k8s.io/sandbox-name-hash": "h",
            }
            told: Json = {
                **template["metadata"],
                "labels": labels,
                "name": name,
                "ownerReferences": refs,
            }
            own = {**template["spec"], "volumes": [*volumes, *template["spec"].get("volumes", [])]}
            body = {"apiVersion": "v1", "kind": "Pod", "metadata": told, "spec": own}
            try:
                self.store.add("pods", body)
            except Failure as exc:
                return exc.message
        return ""
