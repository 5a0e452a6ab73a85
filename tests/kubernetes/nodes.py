"""The node of a fake cluster: pods are containers of the local engine, claims are folders."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import docker
from anyio import to_thread
from anyio.abc import TaskGroup
from docker.errors import APIError, ImageNotFound
from docker.models.containers import Container
from docker.types import Mount

from tests.kubernetes.store import Change, Json, Store

_UNITS = {"": 1, "m": 1e-3, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
_CLAIMS = "persistentvolumeclaims"


def quantity(text: str) -> float:
    found = re.fullmatch(r"([\d.]+)(\D*)", text)
    assert found
    return float(found[1]) * _UNITS[found[2]]


class Node:
    """Runs the pods of a store."""

    def __init__(self, store: Store, folder: Path, tasks: TaskGroup) -> None:
        self._store = store
        self._folder = folder
        self._tasks = tasks
        self._engine = docker.from_env(timeout=60)
        # By the uid of a pod: its own, and the ephemeral one beside it.
        self._containers: dict[str, Container] = {}
        self._beside: dict[str, Container] = {}
        self._limit = anyio.CapacityLimiter(60)
        store.listeners.append(self._notice)
        self.behave()

    def behave(self) -> None:
        self.enforces_policies = self.binds_claims = True
        # It is out of reach: pods go on there, and none that is deleted is seen to end.
        self.is_lost = False
        # Why no pod can be placed, if so.
        self.full = ""
        # Pods begin and go on without any process.
        self.is_hollow = False

    def close(self) -> None:
        for container in (*self._beside.values(), *self._containers.values()):
            _remove(container)
        self._engine.close()

    def container(self, name: str, of: str = "sandbox") -> str:
        """Return a container of a pod."""
        uid = self._store.get("pods", name)["metadata"]["uid"]
        return str((self._containers if of == "sandbox" else self._beside)[uid].id)

    def _notice(self, change: Change) -> None:
        begin, name = self._tasks.start_soon, change.found["metadata"]["name"]
        is_ending = change.kind == "MODIFIED" and "deletionTimestamp" in change.found["metadata"]
        match change.plural, "ENDING" if is_ending else change.kind:
            case "pods", "ADDED":
                begin(self._run, name, change.found)
            case "pods", "ENDING":
                begin(self._end, name, change.found)
            case "pods", "MODIFIED" if "ephemeralContainers" in change.found["spec"]:
                begin(self._add, name, change.found)
            case "configmaps", "ADDED" | "MODIFIED":
                self._show(name, change.found)
            case "persistentvolumeclaims", "ADDED":
                begin(self._bind, name)
            case ("pods", "DELETED") | ("persistentvolumeclaims", "ENDING"):
                begin(self._free_claims)

    def _show(self, name: str, found: Json) -> None:
        """Write the files of a ConfigMap where pods see them."""
        folder = self._folder / "configs" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in found["data"].items():
            (folder / file).write_text(text)

    # Claims.

    def _claim_folder(self, name: str) -> Path:
        return self._folder / "claims" / name

    async def _bind(self, name: str) -> None:
        # As a driver makes it that honours fsGroup.
        folder = self._claim_folder(name)
        for place in (folder, *(folder / sub for sub in ("workspace", "home"))):
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, 0, 10001)
            place.chmod(0o2775)
        if self.binds_claims:
            self._store.set(_CLAIMS, name, {"status": {"phase": "Bound"}})

    async def _free_claims(self) -> None:
        pods = self._store.objects["pods"].values()
        used = {claim for pod in pods for claim in _claims(pod)}
        for name, claim in list(self._store.objects[_CLAIMS].items()):
            if "deletionTimestamp" in claim["metadata"] and name not in used:
                # At once, for a claim of the same name may follow. One never bound has none.
                gone = self._folder / claim["metadata"]["uid"]
                with suppress(FileNotFoundError):
                    self._claim_folder(name).rename(gone)
                self._store.drop(_CLAIMS, name)
                await to_thread.run_sync(shutil.rmtree, gone, True)

    # Pods.

    async def _run(self, name: str, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        while why := self._find_obstacle(pod):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            self._tell(name, conditions=[{**condition, "message": why}])
            if self._is_ending(name, uid):
                return
            await self._store.changed.wait()
        address = ""
        if not self.is_hollow:
            try:
                made = await to_thread.run_sync(
                    self._create, name, pod, pod["spec"]["containers"][0], limiter=self._limit
                )
            except APIError as exc:
                reason = "ErrImagePull" if isinstance(exc, ImageNotFound) else "RunContainerError"
                state = {"waiting": {"reason": reason, "message": str(exc.explanation)}}
                self._tell(name, containerStatuses=[{"name": "sandbox", "state": state}])
                return
            self._containers[uid], address = made, made.attrs["NetworkSettings"]["IPAddress"]
        if self._is_ending(name, uid):
            await self._end(name, pod)
            return
        self._store.set("pods", name, {"spec": {"nodeName": "node"}})
        conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
        state = {"running": {"startedAt": self._store.now()}}
        told = {"conditions": conditions, "podIP": address or "10.9.9.9", "phase": "Running"}
        self._tell(name, **told, containerStatuses=[{"name": "sandbox", "state": state}])
        if not self.is_hollow:
            await self._wait(name, uid, made)

    async def _add(self, name: str, pod: Json) -> None:
        """Run the container that was put beside a pod's own."""
        uid, (asked,) = pod["metadata"]["uid"], pod["spec"]["ephemeralContainers"]
        known = self._store.objects["pods"].get(name, pod)["status"]
        if uid not in self._containers or "ephemeralContainerStatuses" in known:
            return
        told: Json = {"name": asked["name"], "state": {"waiting": {"reason": "ContainerCreating"}}}
        self._tell(name, ephemeralContainerStatuses=[told])
        # The pod may end meanwhile.
        with suppress(APIError):
            self._beside[uid] = await to_thread.run_sync(self._create, name, pod, asked)
        if uid not in self._containers:
            await self._stop(uid)
            return
        state = {"running": {"startedAt": self._store.now()}}
        self._tell(name, ephemeralContainerStatuses=[{**told, "state": state}])

    def _find_obstacle(self, pod: Json) -> str:
        """Return why a pod cannot be placed."""
        rows = self._store.objects[_CLAIMS]
        phases = [rows.get(each, {}).get("status", {}).get("phase") for each in _claims(pod)]
        shown = [each["configMap"]["name"] for each in _volumes(pod) if "configMap" in each]
        if missing := set(shown) - self._store.objects["configmaps"].keys():
            return f"configmap {missing} not found"
        unbound = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
        return self.full if all(phase == "Bound" for phase in phases) else unbound

    def _is_ending(self, name: str, uid: str) -> bool:
        metadata = self._store.objects["pods"].get(name, {}).get("metadata", {})
        return metadata.get("uid") != uid or "deletionTimestamp" in metadata

    def _tell(self, name: str, **status: Any) -> None:
        self._store.set("pods", name, {"status": status})

    async def _wait(self, name: str, uid: str, container: Container) -> None:
        def wait() -> Json:
            with suppress(APIError):
                container.wait(timeout=100_000)
                container.reload()
            state: Json = container.attrs["State"]
            return state

        state = await to_thread.run_sync(wait, abandon_on_cancel=True, limiter=self._limit)
        if not self._is_ending(name, uid) and uid in self._containers:
            killed = "OOMKilled" if state["OOMKilled"] and state["ExitCode"] else "Error"
            self._tell_end(name, state["ExitCode"], killed if state["ExitCode"] else "Completed")

    def _tell_end(self, name: str, code: int, reason: str) -> None:
        state = {"terminated": {"exitCode": code, "reason": reason}}
        ready = {"type": "Ready", "status": "False", "reason": "PodFailed"}
        told = {"conditions": [ready], "containerStatuses": [{"name": "sandbox", "state": state}]}
        self._tell(name, phase="Failed" if code else "Succeeded", **told)

    async def _end(self, name: str, pod: Json) -> None:
        while self.is_lost:
            await self._store.changed.wait()
        uid = pod["metadata"]["uid"]
        container = await self._stop(uid, pod["spec"]["terminationGracePeriodSeconds"])
        known = self._store.objects["pods"].get(name)
        if known is None or known["metadata"]["uid"] != uid:
            return
        if container:
            ended = {"name": "sandbox", "state": {"terminated": {"exitCode": 137}}}
            self._tell(name, phase="Failed", containerStatuses=[ended])
        # Else `_run` is making its container, and comes back.
        if container or "containerStatuses" in known["status"] or self._find_obstacle(pod):
            self._store.drop("pods", name)

    async def end_pod(self, name: str, reason: str) -> None:
        """End a pod as a node does that is low on memory, or its kernel."""
        uid = self._store.get("pods", name)["metadata"]["uid"]
        if reason == "OOMKilled":
            self._tell_end(name, 137, reason)
        else:
            told = {"phase": "Failed", "reason": reason, "message": "low on memory"}
            ready = [{"type": "Ready", "status": "False"}]
            self._tell(name, **told, containerStatuses=[], conditions=ready)
        await self._stop(uid)

    async def _stop(self, uid: str, grace_s: int = 0) -> bool:
        """Remove the containers of a pod; return whether there were any."""
        found = [rows.pop(uid) for rows in (self._beside, self._containers) if uid in rows]
        for container in found:
            await to_thread.run_sync(_remove, container, grace_s)
        for folder in (self._folder / "claims").glob(f"{uid}-*"):
            await to_thread.run_sync(shutil.rmtree, folder, True)
        return bool(found)

    # Containers. All of these block.

    def _create(self, name: str, pod: Json, asked: Json) -> Container:
        spec, uid = pod["spec"], pod["metadata"]["uid"]
        user, own = spec["securityContext"], asked["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        # One that is added has no limits of its own.
        limits = (asked["resources"] or spec["containers"][0]["resources"])["limits"]
        memory, cpus = int(quantity(limits["memory"])), quantity(limits["cpu"])
        mounts, tmpfs = self._mounts(pod, asked)
        main = self._containers.get(uid)
        made = self._engine.containers.create(
            asked["image"],
            entrypoint=[_expand(word) for word in asked["command"]],
            command=[],
            name=f"k8s-{asked['name']}-{name[:50]}-{uid[:8]}",
            labels={"app": "mcp-sandbox", "mcp-sandbox.test": "kubernetes"},
            environment={
                each["name"]: _expand(each.get("value", "")) for each in asked.get("env", ())
            },
            user=f"{user['runAsUser']}:{user['runAsGroup']}",
            working_dir=asked.get("workingDir"),
            hostname=None if main else spec.get("hostname", name),
            read_only=own["readOnlyRootFilesystem"],
            cap_drop=own["capabilities"]["drop"],
            security_opt=["no-new-privileges:true", *self._seccomp(user["seccompProfile"])],
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=int(min(cpus, os.cpu_count() or 1) * 1e9),
            # A node's own limit.
            pids_limit=1024,
            tmpfs=tmpfs,
            mounts=mounts,
            network_mode=f"container:{main.id}" if main else self._network(pod),
        )
        try:
            made.start()
            made.reload()
        except BaseException:
            made.remove(force=True)
            raise
        return made

    def _mounts(self, pod: Json, container: Json) -> tuple[list[Mount], dict[str, str]]:
        mounts, tmpfs = list[Mount](), dict[str, str]()
        volumes = {each["name"]: each for each in _volumes(pod)}
        for mount in container.get("volumeMounts", []):
            path, volume = mount["mountPath"], volumes[mount["name"]]
            if volume.get("emptyDir"):
                size = int(quantity(volume["emptyDir"]["sizeLimit"]))
                # The engine takes the mode of the image's folder; the cluster, fsGroup.
                own = "" if path.startswith(("/tmp", "/dev")) else ",uid=10001"
                flags = f"rw,exec,nosuid,nodev,size={size},nr_inodes=64k,mode=1777"
                tmpfs[path] = f"{flags},gid=10001{own}"
            elif shown := volume.get("configMap"):
                source = self._folder / "configs" / shown["name"]
                mounts.append(Mount(path, str(source), "bind", read_only=True))
            else:
                shared = f"{pod['metadata']['uid']}-{mount['name']}"
                claim = volume.get("persistentVolumeClaim", {"claimName": shared})["claimName"]
                source = self._claim_folder(claim) / mount.get("subPath", "")
                if claim == shared and not source.exists():
                    source.mkdir(parents=True)
                    source.chmod(0o777)
                is_fixed = mount.get("readOnly", False)
                mounts.append(Mount(path, str(source), "bind", read_only=is_fixed))
        return mounts, tmpfs

    def _seccomp(self, profile: Json) -> list[str]:
        if profile["type"] == "RuntimeDefault":
            return []
        return [f"seccomp={(self._folder / profile['localhostProfile']).read_text()}"]

    def _network(self, pod: Json) -> str:
        """Return the engine's network: none for a pod that policies cut off."""
        policies = self._store.objects["networkpolicies"].values()
        chosen = [each["spec"]["podSelector"]["matchLabels"] for each in policies]
        labels = pod["metadata"].get("labels", {})
        is_apart = any(wanted.items() <= labels.items() for wanted in chosen)
        return "none" if self.enforces_policies and is_apart else "bridge"


def _volumes(pod: Json) -> list[Json]:
    found: list[Json] = pod["spec"].get("volumes", [])
    return found


def _claims(pod: Json) -> list[str]:
    volumes = [each.get("persistentVolumeClaim", {}) for each in _volumes(pod)]
    return [each["claimName"] for each in volumes if each]


def _expand(text: str) -> str:
    assert "$(" not in text.replace("$$", "")
    return text.replace("$$", "$")


def _remove(container: Container, grace_s: int = 0) -> None:
    with suppress(APIError):
        # By the image's own signal first.
        container.stop(timeout=grace_s)
    with suppress(APIError):
        container.remove(force=True)
