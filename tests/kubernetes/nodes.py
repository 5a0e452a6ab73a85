"""The node of a fake cluster: pods are containers of the local engine, volumes are folders."""

import math
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import docker
from anyio import to_thread
from anyio.abc import TaskGroup
from docker.errors import APIError, ImageNotFound
from docker.models.containers import Container
from starlette.exceptions import HTTPException

from tests.kubernetes.store import Change, Json, Store

_CLAIMS = "persistentvolumeclaims"


class Node:
    """Runs the pods of a store."""

    def __init__(self, store: Store, folder: Path, tasks: TaskGroup) -> None:
        self._store = store
        self._folder = folder
        self._volumes = folder / "volumes"
        self._tasks = tasks
        self._engine = docker.from_env(timeout=60)
        # By the uid of a pod: what it does until it is deleted, and its containers by their names.
        self._lives: dict[str, TaskGroup] = {}
        self._containers: dict[str, dict[str, Container]] = {}
        self._waits = anyio.CapacityLimiter(60)
        store.listeners.append(self._notice)
        self.behave()

    def behave(self) -> None:
        self.enforces_policies = self.binds_claims = self.has_users = True
        # Classes of volumes that there are; which pods are placed even if it is full; how often it
        # looks how large the volumes of pods are.
        self.classes, self.placed, self.looks_s = {""}, "", 10.0
        # It is out of reach: pods go on there, and none that is deleted is seen to end.
        self.is_lost = False
        # Its agent takes what is asked, and answers nothing.
        self.hangs = False
        # How late it sees that a container has ended.
        self.sees_after_s = 0.0
        # Why no pod can be placed, if so.
        self.full = ""
        # Pods begin and go on without any process.
        self.is_hollow = False

    def close(self) -> None:
        for containers in self._containers.values():
            for container in containers.values():
                _remove(container)
        self._engine.close()

    def lose(self, away_s: float) -> None:
        """Report no more for so long, by which the cluster's own clocks go."""
        self.is_lost = True
        for name, pod in list(self._store.objects["pods"].items()):
            conditions = [{"type": "Ready", "status": "False"}]
            self._store.set("pods", name, {"status": {"conditions": conditions}})
            stays = [
                each.get("tolerationSeconds", math.inf)
                for each in pod["spec"]["tolerations"]
                if each["key"] == "node.kubernetes.io/unreachable"
            ]
            if max(stays, default=0) < away_s:
                reason = {"status": "True", "reason": "DeletionByTaintManager"}
                conditions.append({"type": "DisruptionTarget", **reason})
                self._store.set("pods", name, {"status": {"conditions": conditions}})
                self._store.delete("pods", name)

    def come_back(self) -> None:
        self.is_lost = self.hangs = False
        for name, pod in list(self._store.objects["pods"].items()):
            if "deletionTimestamp" not in pod["metadata"]:
                ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
                self._store.set("pods", name, {"status": {"conditions": ready}})
        self._store.tell()

    def container(self, name: str, of: str = "sandbox") -> str:
        """Return a container of a pod."""
        if self.is_lost:
            raise HTTPException(500, "error dialing backend: dial tcp 10.0.0.9:10250: i/o timeout")
        uid = self._store.get("pods", name)["metadata"]["uid"]
        if of not in self._containers.get(uid, {}):
            raise HTTPException(500, f'container "{of}" of pod "{name}" is not running')
        return str(self._containers[uid][of].id)

    def _notice(self, change: Change) -> None:
        begin, found = self._tasks.start_soon, change.found
        uid, added = found["metadata"]["uid"], found.get("spec", {}).get("ephemeralContainers")
        match change.plural, change.step:
            case "pods", "ADDED":
                self._lives[uid] = anyio.create_task_group()
                begin(self._live, found)
            case "pods", "ENDING":
                self._lives[uid].cancel_scope.cancel()
            case "pods", "MODIFIED" if added != change.before["spec"].get("ephemeralContainers"):
                self._lives[uid].start_soon(self._add, found, *added)
            case "configmaps", "ADDED" | "MODIFIED":
                self._show(found)
            case "persistentvolumeclaims", "ADDED" if not self._has_class(found):
                named = found["spec"]["storageClassName"]
                why = f'storageclass.storage.k8s.io "{named}" not found'
                self._store.warn(found, "ProvisioningFailed", why)
            case "persistentvolumeclaims", "ENDING":
                begin(self._free_claims)
            case "pods", "DELETED":
                del self._lives[uid]
                begin(self._free_claims)

    # Volumes.

    def _show(self, configs: Json) -> None:
        folder = self._volumes / configs["metadata"]["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in configs["data"].items():
            (folder / file).write_text(text)

    async def _free_claims(self) -> None:
        used = {claim for pod in self._store.objects["pods"].values() for claim in _claims(pod)}
        for name, claim in list(self._store.objects[_CLAIMS].items()):
            if "deletionTimestamp" in claim["metadata"] and name not in used:
                self._store.drop(_CLAIMS, name)
                folder = self._volumes / claim["metadata"]["uid"]
                await to_thread.run_sync(shutil.rmtree, folder, True)

    def _folder_of(self, volume: Json, uid: str, part: str) -> Path:
        name = f"{uid}-{volume['name']}"
        if claim := volume.get("persistentVolumeClaim"):
            name = self._store.get(_CLAIMS, claim["claimName"])["metadata"]["uid"]
        elif shown := volume.get("configMap"):
            name = shown["name"]
        folder = self._volumes / name / part
        folder.mkdir(parents=True, exist_ok=True)
        # As of fsGroup.
        os.chown(folder, 0, 10001)
        folder.chmod(0o2775)
        return folder

    # Pods.

    async def _live(self, pod: Json) -> None:
        """Run a pod until it is deleted; one that is deleted by force goes on."""
        uid = pod["metadata"]["uid"]
        async with self._lives[uid]:
            await self._run(pod)
            await anyio.sleep_forever()
        while self.is_lost:
            await self._store.changed.wait()
        if await self._stop(uid, pod["spec"]["terminationGracePeriodSeconds"]):
            told = _ended(137)
            # Why it was deleted stays noted.
            self._tell(pod, **{key: told[key] for key in ("phase", "containerStatuses")})
        if uid in self._lives:
            self._store.drop("pods", pod["metadata"]["name"])
        await to_thread.run_sync(shutil.rmtree, self._volumes / f"{uid}-files", True)

    async def _run(self, pod: Json) -> None:
        uid, found = pod["metadata"]["uid"], pod["spec"]["containers"][0]
        while why := self._find_obstacle(pod):
            unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            self._tell(pod, conditions=[{**unplaced, "message": why}])
            await self._store.changed.wait()
        if pod["spec"].get("hostUsers") is False and not self.has_users:
            why = "can't set `spec.hostUsers: false`, runtime does not support user namespaces"
            self._tell(pod, containerStatuses=[_waiting("ContainerCreating")])
            self._store.warn(pod, "FailedCreatePodSandBox", f"Failed to create pod sandbox: {why}")
            return
        try:
            made = None if self.is_hollow else await to_thread.run_sync(self._create, pod, found)
        except APIError as exc:
            reason = "ErrImagePull" if isinstance(exc, ImageNotFound) else "RunContainerError"
            self._tell(pod, containerStatuses=[_waiting(reason, str(exc.explanation))])
            return
        except FileNotFoundError as exc:
            path = f'"/var/lib/kubelet/seccomp/{Path(exc.filename).name}"'
            why = f"failed to create containerd container: cannot load seccomp profile {path}: no"
            self._tell(
                pod, containerStatuses=[_waiting("CreateContainerError", f"{why} such file")]
            )
            return
        self._store.set("pods", pod["metadata"]["name"], {"spec": {"nodeName": "node"}})
        self._tell(
            pod,
            phase="Running",
            podIP=(made and made.attrs["NetworkSettings"]["IPAddress"]) or "10.9.9.9",
            conditions=[{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")],
            containerStatuses=[{"name": "sandbox", "state": self._running()}],
        )
        if not made:
            return
        self._lives[uid].start_soon(self._watch_sizes, pod)
        ended = await to_thread.run_sync(_wait, made, abandon_on_cancel=True, limiter=self._waits)
        await anyio.sleep(self.sees_after_s)
        # Else the node has ended it, and told why.
        if uid in self._containers:
            code = ended["ExitCode"]
            reason = "OOMKilled" if ended["OOMKilled"] and code else ""
            self._tell(pod, **_ended(code, reason))

    async def _watch_sizes(self, pod: Json) -> None:
        """Evict a pod whose files have grown over the limit of their volume."""
        volumes = {each["name"]: each.get("emptyDir", {}) for each in pod["spec"]["volumes"]}
        if not (limit := volumes.get("files", {}).get("sizeLimit")):
            return
        folder = self._volumes / f"{pod['metadata']['uid']}-files"
        while await to_thread.run_sync(_measure, folder) <= int(limit):
            await anyio.sleep(self.looks_s)
        await self.end_pod(pod["metadata"]["name"], "Evicted")

    async def _add(self, pod: Json, asked: Json) -> None:
        """Run the container that was put beside a pod's own."""
        # The image may be missing.
        with suppress(APIError):
            await to_thread.run_sync(self._create, pod, asked)
            told = {"name": asked["name"], "state": self._running()}
            self._tell(pod, ephemeralContainerStatuses=[told])

    def _running(self) -> Json:
        return {"running": {"startedAt": self._store.now()}}

    def _find_obstacle(self, pod: Json) -> str:
        """Return why a pod cannot be placed."""
        rows, claims = self._store.objects[_CLAIMS], _claims(pod)
        bound = self.binds_claims and all(each in rows for each in claims)
        if not (bound and all(self._has_class(rows[each]) for each in claims)):
            return "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
        return "" if self.placed and self.placed in pod["metadata"]["name"] else self.full

    def _has_class(self, claim: Json) -> bool:
        return claim["spec"].get("storageClassName", "") in self.classes

    def _tell(self, pod: Json, **status: Any) -> None:
        # After a deletion by force another may have its name.
        if pod["metadata"]["uid"] in self._lives:
            self._store.set("pods", pod["metadata"]["name"], {"status": status})

    async def end_pod(self, name: str, reason: str) -> None:
        """End a pod as a node does that is low on memory, or its kernel."""
        pod = self._store.get("pods", name)
        told = _ended(137, reason)
        if reason != "OOMKilled":
            told |= {"reason": reason, "message": "low on memory", "containerStatuses": []}
        self._tell(pod, **told)
        await self._stop(pod["metadata"]["uid"])

    async def _stop(self, uid: str, grace_s: int = 0) -> bool:
        """Remove the containers of a pod; return whether there were any."""
        found = self._containers.pop(uid, {})
        with anyio.CancelScope(shield=True):
            for container in reversed(found.values()):
                await to_thread.run_sync(_remove, container, grace_s)
        return bool(found)

    # Containers.

    def _create(self, pod: Json, asked: Json) -> Container:
        """Start a container of a pod. Blocks."""
        spec, known = pod["spec"], self._containers.setdefault(pod["metadata"]["uid"], {})
        user, own = spec["securityContext"], asked["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        # One that is added has no limits of its own.
        limits = spec["containers"][0]["resources"]["limits"]
        cpus = float(limits["cpu"].rstrip("m")) / (1000 if "m" in limits["cpu"] else 1)
        main, profile = known.get("sandbox"), user["seccompProfile"].get("localhostProfile")
        seccomp = [f"seccomp={(self._folder / profile).read_text()}"] if profile else []
        known[asked["name"]] = made = self._engine.containers.create(
            asked["image"],
            entrypoint=[_expand(word) for word in asked["command"]],
            command=[],
            labels={"app": "mcp-sandbox", "mcp-sandbox.test": "kubernetes"},
            environment={
                each["name"]: _expand(each.get("value", "")) for each in asked.get("env", ())
            },
            user=f"{user['runAsUser']}:{user['runAsGroup']}",
            working_dir=asked.get("workingDir"),
            hostname=None if main else spec["hostname"],
            read_only=own["readOnlyRootFilesystem"],
            cap_drop=own["capabilities"]["drop"],
            security_opt=["no-new-privileges:true", *seccomp],
            mem_limit=limits["memory"].rstrip("i"),
            memswap_limit=limits["memory"].rstrip("i"),
            nano_cpus=int(min(cpus, os.cpu_count() or 1) * 1e9),
            # A node's own limit.
            pids_limit=1024,
            network_mode=f"container:{main.id}" if main else self._network(pod),
            **self._mounts(pod, asked),
        )
        made.start()
        made.reload()
        return made

    def _mounts(self, pod: Json, container: Json) -> Json:
        tmpfs, binds = dict[str, str](), list[str]()
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        for mount in container.get("volumeMounts", []):
            path, volume = mount["mountPath"], volumes[mount["name"]]
            if "medium" in (places := volume.get("emptyDir", {})):
                size = places["sizeLimit"]
                # The engine takes the mode of the image's folder; the cluster, fsGroup.
                own = "" if path.startswith(("/tmp", "/dev")) else ",uid=10001"
                flags = "rw,exec,nosuid,nodev,nr_inodes=64k,mode=1777,gid=10001"
                tmpfs[path] = f"{flags}{own},size={size.rstrip('i')}"
            else:
                part = mount.get("subPath", "")
                source = self._folder_of(volume, pod["metadata"]["uid"], part)
                binds.append(f"{source}:{path}:{'ro' if mount.get('readOnly') else 'rw'}")
        return {"tmpfs": tmpfs, "volumes": binds}

    def _network(self, pod: Json) -> str:
        """Return the engine's network: none for a pod that policies cut off."""
        labels = pod["metadata"].get("labels", {}).items()
        policies = self._store.objects["networkpolicies"].values()
        chosen = (each["spec"]["podSelector"].get("matchLabels", {}) for each in policies)
        is_apart = self.enforces_policies and any(each.items() <= labels for each in chosen)
        return "none" if is_apart else "bridge"


def _claims(pod: Json) -> list[str]:
    volumes = [each.get("persistentVolumeClaim") for each in pod["spec"].get("volumes", [])]
    return [each["claimName"] for each in volumes if each]


def _waiting(reason: str, message: str | None = None) -> Json:
    told = {"reason": reason, **({"message": message} if message else {})}
    return {"name": "sandbox", "state": {"waiting": told}}


def _measure(folder: Path) -> int:
    """Return the bytes of the files in a folder. Blocks."""
    found = subprocess.run(["du", "-sB1", folder], stdout=subprocess.PIPE, check=False)
    return int(found.stdout.split()[0])


def _expand(text: str) -> str:
    assert "$(" not in text.replace("$$", "")
    return text.replace("$$", "$")


def _ended(code: int, reason: str = "") -> Json:
    """Return the status of a pod whose container has ended."""
    told = {"exitCode": code, "reason": reason or ("Error" if code else "Completed")}
    return {
        "phase": "Failed" if code else "Succeeded",
        "conditions": [{"type": "Ready", "status": "False", "reason": "PodFailed"}],
        "containerStatuses": [{"name": "sandbox", "state": {"terminated": told}}],
    }


def _wait(container: Container) -> Json:
    """Return how a container ended. Blocks."""
    with suppress(APIError):
        container.wait(timeout=100_000)
        container.reload()
    state: Json = container.attrs["State"]
    return state


def _remove(container: Container, grace_s: int = 0) -> None:
    with suppress(APIError):
        # By the image's own signal first.
        container.stop(timeout=grace_s)
    with suppress(APIError):
        container.remove(force=True)
