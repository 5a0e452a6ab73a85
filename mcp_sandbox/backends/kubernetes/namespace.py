"""What is asked of the objects of one namespace, and what is known of them by watching."""

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox.backends.kubernetes.client import ApiServer, Refused
from mcp_sandbox.backends.kubernetes.objects import INSTANCE, SANDBOXES
from mcp_sandbox.backends.kubernetes.watch import Json, Owner, Pod, Watched
from mcp_sandbox.backends.sandbox_records import make_gone_error
from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.errors import BackendUnavailable, OperatorError
from mcp_sandbox.models import SandboxId

Found = TypeVar("Found")
_LOOK_AGAIN_S = 1.0
_ATTEMPT = "mcp-sandbox.attempt"
# What never becomes a running pod by waiting.
NEVER = {
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerError", "CreateContainerConfigError", "RunContainerError", "StartError"),
}


class Namespace:
    """The objects of one data root; `are_sandboxes` is known once it is open."""

    owners: Watched[Owner]
    pods: Watched[Pod]

    def __init__(
        self, config: KubernetesConfig, api: ApiServer, instance: str, tasks: TaskGroup
    ) -> None:
        self.config = config
        self.api = api
        self.instance = instance
        self.tasks = tasks
        self.are_sandboxes = False
        self._opening = anyio.Lock()
        self._is_open = False

    async def open(self, read_pod: Callable[[Json], Pod]) -> None:
        """Begin to watch at the first call. Raises OperatorError."""
        async with self._opening:
            if self._is_open:
                return
            self.are_sandboxes = await self._has_sandboxes()
            ours = f"{INSTANCE}={self.instance}"
            self.pods = Watched(self.api, self.api.path("pods"), ours, read_pod)
            self.owners = Watched(self.api, self.owner_path(), ours, Owner.of)
            for run in (self.owners.run, self.pods.run):
                self.tasks.start_soon(run)
            self._is_open = True

    async def _has_sandboxes(self) -> bool:
        if self.config.objects == "pod":
            return False
        try:
            group = await self.api.call("GET", SANDBOXES.rpartition("/")[0])
        except Refused as exc:
            if exc.status != 404:
                raise BackendUnavailable(exc.message) from exc
            served: set[str] = set()
        else:
            served = {each["version"] for each in group.get("versions", [])}
        if "v1beta1" in served:
            return True
        if served or self.config.objects == "sandbox":
            found = f"serves agents.x-k8s.io {', '.join(sorted(served))}" if served else "lacks it"
            raise BackendUnavailable(
                f"Sandbox objects need agents.x-k8s.io/v1beta1, and this cluster {found}: install "
                "agent-sandbox 0.5 or newer, or set kubernetes.objects to pod"
            )
        return False

    def owner_path(self, name: str = "") -> str:
        """Return the path of a sandbox, or of all."""
        if self.are_sandboxes:
            return self.api.path("sandboxes", name, SANDBOXES)
        return self.api.path("persistentvolumeclaims", name)

    async def owner(self, name: str) -> Owner:
        """Return a sandbox of ours. Raises SandboxGone."""
        owner = (await self.owners.all()).get(name)
        if owner is None:
            try:
                found = await self.api.call("GET", self.owner_path(name))
            except Refused as exc:
                raise make_gone_error(SandboxId(name)) from exc
            if found["metadata"].get("labels", {}).get(INSTANCE) != self.instance:
                raise BackendUnavailable(
                    f"sandbox {name} is labelled as that of another data root, so it is kept apart "
                    f"with its files: set its label {INSTANCE} to {self.instance}, or remove it "
                    "with `kubectl delete`"
                )
            owner = self.owners.learn(found)
        if owner.ending:
            raise make_gone_error(SandboxId(name))
        return owner

    async def explain_wait(self, name: str, pod: Pod | None) -> str:
        """Return a sentence about a pod that does not begin to run."""
        # Without a message it is a step, such as ContainerCreating; why it lasts is in an event.
        why = f"{pod.reason}: {pod.message}" if pod and pod.message else ""
        with suppress(Refused, OperatorError):
            if self.are_sandboxes and not pod:
                # Its controller could not make the pod, and says why.
                found = await self.api.call("GET", self.owner_path(name))
                told = found.get("status", {}).get("conditions", [])
                why = "; ".join(filter(None, (each.get("message") for each in told)))
            fields = f"involvedObject.name={name}"
            said = [
                str(each.get("message"))
                async for page, _ in self.api.pages(self.api.path("events"), fieldSelector=fields)
                for each in page
                if each.get("type") == "Warning"
            ]
            why = why or (said[-1] if said else "") or (pod.reason if pod else "")
        return (
            f"the cluster started no pod within {self.config.start_timeout:g} s "
            f"({why or 'it gave no reason'}): make room, or call again later"
        )

    async def until(self, look: Callable[[], Found | None], within_s: float) -> Found | None:
        """Return what `look` returns as soon as that is not None; None after the time."""
        with anyio.move_on_after(within_s):
            while (found := look()) is None:
                await self.pods.change()
            return found
        return look()

    async def post(self, path: str, body: Json) -> Json | None:
        """Create an object; wait for an older one of its name that ends. None: it does not."""
        attempt = secrets.token_hex(8)
        body["metadata"].setdefault("annotations", {})[_ATTEMPT] = attempt
        name, deadline = body["metadata"]["name"], time.monotonic() + self.config.start_timeout
        while True:
            try:
                return await self.api.call("POST", path, body)
            except Refused as exc:
                if exc.status != 409:
                    raise BackendUnavailable(f"the cluster refused {name}: {exc.message}") from exc
            with suppress(Refused):
                found = await self.api.call("GET", f"{path}/{name}")
                metadata = found["metadata"]
                if metadata.get("annotations", {}).get(_ATTEMPT) == attempt:
                    return found
                if "deletionTimestamp" not in metadata:
                    return None
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"an older {name} does not end: look at it with kubectl")
            await self.until(lambda: None, _LOOK_AGAIN_S)

    async def patch(self, name: str, body: Json) -> None:
        """Change a sandbox. Raises SandboxGone."""
        try:
            self.owners.learn(await self.api.call("PATCH", self.owner_path(name), body))
        except Refused as exc:
            if exc.status == 404:
                raise make_gone_error(SandboxId(name)) from exc
            raise BackendUnavailable(f"the cluster refused a change: {exc.message}") from exc

    async def delete(self, path: str) -> None:
        """Delete an object; gone already is fine."""
        try:
            await self.api.call("DELETE", path, {"propagationPolicy": "Background"})
        except Refused as exc:
            if exc.status != 404:
                raise BackendUnavailable(f"the cluster refused to delete: {exc.message}") from exc
