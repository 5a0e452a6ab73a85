"""Creates, finds, pauses and removes sandboxes that are objects of a Kubernetes cluster.

A sandbox is a claim with a pod of the same name, or a Sandbox whose controller makes both. It is
paused when its pod is gone; to attach to it starts a new pod on its files.
"""

import json
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import ByteStream

from mcp_sandbox import models
from mcp_sandbox.backends.kubernetes.client import ApiServer, Refused
from mcp_sandbox.backends.kubernetes.exec_stream import ExecFailed, ExecStream, open_exec
from mcp_sandbox.backends.kubernetes.inside import OTHER_RUNNER, START, program, relay_command
from mcp_sandbox.backends.kubernetes.namespace import NEVER, Namespace
from mcp_sandbox.backends.kubernetes.network import Network, explain_runner
from mcp_sandbox.backends.kubernetes.objects import LABELS, Made, Renderer
from mcp_sandbox.backends.kubernetes.verify import find_weaker, read_template
from mcp_sandbox.backends.kubernetes.watch import Json, Owner, Pod
from mcp_sandbox.backends.runner_copy import runner_digest
from mcp_sandbox.backends.sandbox_records import make_gone_error
from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.durable import locked, make_folder, write_file
from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    ImageMissing,
    InsecureSandbox,
    OperatorError,
    SandboxGone,
    StorageUnavailable,
)

logger = logging.getLogger(__name__)
Found = TypeVar("Found")

_CONNECT_S = 20.0
# One that runs already does so at once, unless its server was killed before it had its secret.
_LISTENS_S = 3.0
_CREATES_AT_ONCE = 8
_GONE_S = 30.0
_MOST_ENDED = 10_000
# Reasons of pods, and of their condition DisruptionTarget.
_EVICTIONS = {
    *("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated", "NodeAffinity"),
    *("DeletionByTaintManager", "EvictionByEvictionAPI", "PreemptionByScheduler"),
    *("TerminationByKubelet", "DeletionByPodGC"),
}


@dataclass
class KubernetesSandbox:
    """A pod that runs."""

    id: models.SandboxId
    uid: str
    token: bytes
    facts: models.SandboxFacts
    labels: Mapping[str, str]
    backend: "KubernetesBackend" = field(repr=False)

    async def open_channel(self) -> ByteStream:
        return await self.backend.connect(self.id, self.uid)

    async def pause(self) -> bool:
        await self.backend.pause(self.id)
        return True

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        return await self.backend.ending(self.id, self.uid, within_s)


class KubernetesBackend:
    """The sandboxes of one data root in one namespace."""

    name: models.BackendName = "kubernetes"
    holds_files, keeps_paused_files = True, False

    def __init__(self, renderer: Renderer, namespace: Namespace) -> None:
        self._config = namespace.config
        self.renderer = renderer
        self._space = namespace
        self._network: Network | None = None
        self._creates = CapacityLimiter(_CREATES_AT_ONCE)
        # Channels that were opened when a pod was started, by the pod's uid.
        self._first: dict[str, ExecStream] = {}
        # What leads to each pod, by its uid: a lost node does not cut it off.
        self._streams: dict[str, set[ExecStream]] = {}
        # Why pods were ended here, by uid.
        self._ended: dict[str, models.Ending] = {}

    async def probe(self) -> str:
        version = (await self._space.api.call("GET", "/version")).get("gitVersion", "")
        await self._watched()
        await (await self._networks()).prepare("none")
        kind = "Sandbox objects" if self._space.are_sandboxes else "pods and claims"
        return f"Kubernetes {version} runs {self._config.image} as {kind}"

    async def origin(self, image: str = "") -> str:
        made = Made(image or self._config.image, "", models.Limits(), "none", {}, 0)
        spec = self.renderer.template("", made)["spec"]
        parts = image or self._config.image, spec.get("runtimeClassName"), await self._runner()
        return " ".join(str(each) for each in parts)

    async def create(self, spec: models.SandboxSpec) -> KubernetesSandbox:
        await self._watched()
        made = Made.of(spec, self._config.image, await self._runner())
        name = self.renderer.name(spec.labels)
        async with self._creates:
            await (await self._networks()).prepare(made.network)
            render = self.renderer.sandbox if self._space.are_sandboxes else self.renderer.claim
            found = await self._space.post(
                self._space.owner_path(), render(name, made, spec.labels)
            )
            try:
                if found:
                    self._space.owners.learn(found)
                    return await self._start(name, made)
            except BaseException:
                with anyio.CancelScope(shield=True), suppress(OperatorError):
                    await self.destroy(name)
                raise
        # A server was killed before it could note that it made one.
        return await self.attach(name)

    async def attach(self, sandbox_id: models.SandboxId) -> KubernetesSandbox:
        _, pods = await self._watched()
        owner = await self._space.owner(sandbox_id)
        made = self._made(sandbox_id, owner)
        pod = pods.get(sandbox_id)
        if pod and pod.runs and not pod.weaker:
            if pod.uid in self._first:
                return self._sandbox(sandbox_id, pod.uid, made, owner)
            with suppress(SandboxGone):
                self._first[pod.uid] = await self._relay(sandbox_id, _LISTENS_S)
                return self._sandbox(sandbox_id, pod.uid, made, owner)
        async with self._creates:
            await self._end_pod(sandbox_id)
            return await self._start(sandbox_id, made, is_new=False)

    async def running(self) -> Sequence[models.SandboxInfo]:
        known, live = await self._watched()
        return [
            models.SandboxInfo(
                models.SandboxId(name),
                _labels(owner),
                "running" if (pod := live.get(name)) and not pod.has_ended else "paused",
            )
            for name, owner in known.items()
            if not owner.ending
        ]

    async def relabel(self, sandbox_id: models.SandboxId, labels: Mapping[str, str]) -> None:
        await self._watched()
        await self._space.owner(sandbox_id)
        note = {"metadata": {"annotations": {LABELS: json.dumps(dict(labels))}}}
        await self._space.patch(sandbox_id, note)

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        _, pods = await self._watched()
        with anyio.CancelScope(shield=True):
            try:
                await self._space.owner(sandbox_id)
            except SandboxGone:
                return
            if not self._space.are_sandboxes:
                # First: a claim stays while a pod has it.
                await self._end_pod(sandbox_id, wait=False)
            elif pod := pods.get(sandbox_id):
                self._note_end(pod.uid, "killed")
            self._space.owners.forget(sandbox_id)
            await self._space.delete(self._space.owner_path(sandbox_id))

    async def pause(self, sandbox_id: models.SandboxId) -> None:
        """End the pod of a sandbox, and keep its files."""
        if self._space.are_sandboxes:
            await self._space.patch(sandbox_id, _mode("Suspended"))
        await self._end_pod(sandbox_id)

    async def connect(self, sandbox_id: models.SandboxId, uid: str) -> ByteStream:
        """Open a byte stream to the runner; raises SandboxGone."""
        stream = self._first.pop(uid, None)
        if stream is None:
            pod = (await self._watched())[1].get(sandbox_id)
            if pod is None or pod.uid != uid or pod.has_ended:
                raise make_gone_error(sandbox_id)
            stream = await self._relay(sandbox_id)
        open_ones = {each for each in self._streams.get(uid, ()) if not each.closed.is_set()}
        self._streams[uid] = open_ones | {stream}
        return stream

    async def ending(
        self, sandbox_id: models.SandboxId, uid: str, within_s: float
    ) -> models.Ending | None:
        """Return why a pod ended; None if it goes on."""
        _, rows = await self._watched()

        def ended() -> models.Ending | None:
            pod = rows.get(sandbox_id)
            if pod and pod.uid == uid and not pod.has_ended:
                return None
            why = _ending(pod) if pod and pod.uid == uid else "deleted"
            return self._ended.get(uid, why)

        return await self._space.until(ended, within_s)

    async def _watched(self) -> tuple[Mapping[str, Owner], Mapping[str, Pod]]:
        """Return all sandboxes and all pods."""
        await self._space.open(self._read_pod)
        return await self._space.owners.all(), await self._space.pods.all()

    async def _networks(self) -> Network:
        if self._network is None:
            self._network = Network(self._space, self.renderer, await self._runner())
        return self._network

    async def _runner(self) -> str:
        return await to_thread.run_sync(runner_digest)

    def _made(self, name: str, owner: Owner) -> Made:
        made = self.renderer.read(name, owner.annotations)
        if made is None:
            raise BackendUnavailable(
                f"somebody changed what is noted of sandbox {name}, so it is kept apart with its "
                "files: put its annotations back, or remove it with `kubectl delete`"
            )
        return made

    def _read_pod(self, found: Json) -> Pod:
        """Return the row of a pod; end one that is weaker than was asked for."""
        row = Pod.of(found, self._find_weaker)
        if row.has_ended:
            for stream in self._streams.pop(row.uid, ()):
                stream.closed.set()
        if row.weaker and not row.has_ended and row.uid not in self._ended:
            logger.error("pod %s is ended: %s", found["metadata"]["name"], "; ".join(row.weaker))
            self._note_end(row.uid, "changed")
            self._space.tasks.start_soon(self._end_weaker, found["metadata"]["name"])
        return row

    def _find_weaker(self, found: Json) -> list[str]:
        metadata, name = found["metadata"], found["metadata"]["name"]
        made = self.renderer.read(name, metadata.get("annotations", {}))
        if made is None:
            return ["what it was made from is not noted"]
        claim = f"files-{name}" if self._space.are_sandboxes else name
        wanted = self.renderer.template(name, made, claim=claim)
        labels = metadata.get("labels", {})
        other = {key for key, own in wanted["metadata"]["labels"].items() if labels.get(key) != own}
        return [f"label {key} is changed" for key in other] + find_weaker(
            wanted["spec"], _ordered(found["spec"], wanted["spec"])
        )

    def _note_end(self, uid: str, ending: models.Ending) -> None:
        self._ended.setdefault(uid, ending)
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _end_weaker(self, name: str) -> None:
        try:
            await self.pause(models.SandboxId(name))
        except (OperatorError, Refused) as exc:
            logger.error("pod %s could not be ended: %s", name, exc)  # noqa: TRY400 - it says all

    async def _start(
        self, name: models.SandboxId, made: Made, *, is_new: bool = True
    ) -> KubernetesSandbox:
        """Start the runner in a new pod; is the one of its controller, or ours."""
        if not self._space.are_sandboxes:
            path = self._space.api.path("pods")
            if found := await self._space.post(path, self.renderer.pod(name, made)):
                self._space.pods.learn(found)
        elif not is_new:
            news = _mode("Running", self.renderer.template(name, made))
            await self._space.patch(name, news)
        pod = await self._wait_until_it_runs(name, made)
        command = program(START, made.runner, f"{_CONNECT_S:g}")
        try:
            self._first[pod.uid] = await open_exec(
                *(self._space.api, self._space.tasks, name, command),
                deadline_s=_CONNECT_S,
                secret=self.renderer.token(pod.uid).hex().encode(),
            )
        except ExecFailed as exc:
            if f'"message":"{OTHER_RUNNER}"'.encode() in exc.status.replace(b" ", b""):
                raise explain_runner(made.image) from exc
            raise
        return self._sandbox(name, pod.uid, made, await self._space.owner(name))

    async def _relay(self, name: str, listens_s: float = _CONNECT_S) -> ExecStream:
        command, most_s = relay_command(listens_s), _CONNECT_S + listens_s
        return await open_exec(self._space.api, self._space.tasks, name, command, deadline_s=most_s)

    def _sandbox(
        self, name: models.SandboxId, uid: str, made: Made, owner: Owner
    ) -> KubernetesSandbox:
        facts, token = self.renderer.facts(made), self.renderer.token(uid)
        return KubernetesSandbox(name, uid, token, facts, _labels(owner), self)

    async def _wait_until_it_runs(self, name: str, made: Made) -> Pod:
        rows = await self._space.pods.all()

        def settled() -> Pod | None:
            pod = rows.get(name)
            done = pod and not pod.ending and (pod.ready or pod.reason in NEVER or pod.has_ended)
            return pod if done or (pod and pod.weaker) else None

        pod = await self._space.until(settled, self._config.start_timeout)
        if pod is None:
            raise CapacityReached(await self._space.explain_wait(name, rows.get(name)))
        if pod.weaker:
            raise InsecureSandbox(
                f"the pod is weaker than requested and was ended: {'; '.join(pod.weaker)}. Look "
                "for what changes pods in this namespace, such as an admission webhook"
            )
        if not pod.ready:
            raise ImageMissing(
                f"the image {made.image} cannot be run ({pod.reason}: {pod.message.strip()}): "
                "push it where the cluster finds it, set kubernetes.image, or add "
                "imagePullSecrets to kubernetes.template"
            )
        return pod

    async def _end_pod(self, name: str, *, wait: bool = True) -> None:
        rows = await self._space.pods.all()
        pod = rows.get(name)
        if pod is None:
            return
        self._note_end(pod.uid, "killed")
        if stream := self._first.pop(pod.uid, None):
            await stream.aclose()
        await self._space.delete(self._space.api.path("pods", name))
        uid = pod.uid

        def gone() -> bool | None:
            now = rows.get(name)
            return True if now is None or now.uid != uid else None

        if wait and not await self._space.until(gone, _GONE_S):
            raise BackendUnavailable(
                f"the pod of sandbox {name} does not end: its node may be lost; look at it with "
                f"`kubectl get pod {name} -o wide`"
            )


def _mode(mode: str, template: Json | None = None) -> Json:
    return {"spec": {"operatingMode": mode, **({"podTemplate": template} if template else {})}}


def _labels(owner: Owner) -> Mapping[str, str]:
    try:
        found = json.loads(owner.annotations.get(LABELS, "{}"))
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()}


def _ordered(live: Json, wanted: Json) -> Json:
    """Return a spec with its volumes and mounts in the wanted order: a controller has its own."""
    order = [each["name"] for each in wanted["volumes"]]
    volumes = sorted(
        live.get("volumes", []),
        key=lambda each: order.index(each["name"]) if each["name"] in order else len(order),
    )
    return {**live, "volumes": volumes}


def _ending(pod: Pod) -> models.Ending:
    if pod.reason == "OOMKilled":
        return "memory"
    if pod.reason in _EVICTIONS:
        return "evicted"
    if pod.ending:
        return "deleted"
    return "ended" if pod.exit_code == 0 else "killed" if pod.exit_code == 137 else "failed"


def _read_key(data_root: Path) -> bytes:
    """Return the key of a data root, making it if there is none. Blocks; raises OSError."""
    place = data_root / "sandbox" / "kubernetes.key"
    make_folder(place.parent)
    with locked(place.parent / "kubernetes.lock"):
        if not place.exists():
            write_file(place, secrets.token_bytes(32))
        return place.read_bytes()


@asynccontextmanager
async def open_kubernetes(
    config: KubernetesConfig, data_root: Path, size_bytes: int
) -> AsyncGenerator[KubernetesBackend]:
    """Open the backend; its watches and channels end with the block, its sandboxes go on."""
    template = await to_thread.run_sync(read_template, config.template)
    try:
        key = await to_thread.run_sync(_read_key, data_root)
    except OSError as exc:
        raise StorageUnavailable(
            f"cannot write to {data_root} ({exc.strerror}): free space there or set data_dir"
        ) from exc
    renderer = Renderer(config, template, key, size_bytes)
    async with aclosing(ApiServer(config)) as api:
        try:
            async with anyio.create_task_group() as tasks:
                yield KubernetesBackend(renderer, Namespace(config, api, renderer.instance, tasks))
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
