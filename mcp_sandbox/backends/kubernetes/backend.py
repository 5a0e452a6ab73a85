"""Creates, finds, pauses and removes sandboxes that are objects of a Kubernetes cluster.

A sandbox is a Sandbox or a claim of a warm pool, whose controllers make its pod; else a volume with
a pod of the same name, or a pod alone. It is paused when its pod is gone and its volume is not: to
attach to it starts a new pod on its files.
"""

import json
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import ByteStream, TaskGroup, TaskStatus

from mcp_sandbox import models
from mcp_sandbox.backends.kubernetes.client import POD, ApiServer, Kind, Refused
from mcp_sandbox.backends.kubernetes.exec_stream import (
    ExecFailed,
    ExecStream,
    NotListening,
    open_exec,
)
from mcp_sandbox.backends.kubernetes.network import Network
from mcp_sandbox.backends.kubernetes.objects import (
    APP,
    CLAIM,
    LABELS,
    NETWORK,
    OWN,
    RECORD,
    SANDBOX,
    VOLUME,
    WARM_POOL,
    WRITER,
    Json,
    Made,
    Renderer,
    relay_command,
    skill_writer,
)
from mcp_sandbox.backends.kubernetes.verify import find_weaker, read_template
from mcp_sandbox.backends.kubernetes.watch import NEVER, WARM, Namespace, Row
from mcp_sandbox.backends.runner_copy import runner_digest
from mcp_sandbox.backends.sandbox_records import make_gone_error
from mcp_sandbox.backends.skill_copy import pack, put_command
from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.durable import locked, make_folder, write_file
from mcp_sandbox.errors import (
    BackendUnavailable,
    ImageMissing,
    InsecureSandbox,
    OperatorError,
    SandboxGone,
    StorageUnavailable,
)

logger = logging.getLogger(__name__)

_CONNECT_S = 20.0
# One that runs already does so at once, unless its server was killed before it had its secret.
_LISTENS_S = 3.0
_CREATES_AT_ONCE = 8
_GONE_S = 30.0
_MOST_ENDED = 10_000
# Pods are nearly all alike but for their names.
_MOST_ALIKE = 100
# How a program ends that is not our runner, or one of another version.
_NOT_OURS = (1, 2)
# Reasons of pods, and of their condition DisruptionTarget.
_EVICTIONS = {
    *("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated", "NodeAffinity"),
    *("DeletionByTaintManager", "EvictionByEvictionAPI", "PreemptionByScheduler"),
    *("TerminationByKubelet", "DeletionByPodGC"),
}


@dataclass
class KubernetesSandbox:
    """A pod that runs. `first`: its start, or the look whether it listens, opened a channel."""

    id: models.SandboxId
    made: Made
    labels: Mapping[str, str]
    backend: "KubernetesBackend" = field(repr=False)
    uid: str = ""
    first: ExecStream | None = field(default=None, repr=False)

    @property
    def token(self) -> bytes:
        return self.backend.renderer.token(self.uid)

    @property
    def facts(self) -> models.SandboxFacts:
        return self.backend.renderer.facts(self.made)

    async def open_channel(self) -> ByteStream:
        first, self.first = self.first, None
        return first or await self.backend.connect(self.id, self.uid)

    async def pause(self) -> bool:
        return await self.backend.pause(self.id)

    async def show_skill(self, name: str, files: Mapping[str, bytes]) -> None:
        await self.backend.show_skill(self, name, pack(files))

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        return await self.backend.ending(self.id, self.uid, within_s)


class KubernetesBackend:
    """The sandboxes of one data root in one namespace."""

    name: models.BackendName = "kubernetes"
    holds_files = True

    def __init__(self, renderer: Renderer, namespace: Namespace) -> None:
        self._config = namespace.config
        self.renderer = renderer
        self.keeps_paused_files = not renderer.in_pod
        self._space = namespace
        self._api = namespace.api
        self._network = Network(namespace, renderer)
        self._creates = CapacityLimiter(_CREATES_AT_ONCE)
        # What leads to each pod, by its uid: a lost node does not cut it off.
        self._streams: dict[str, set[ExecStream]] = {}
        # Why pods were ended here, by uid.
        self._ended: dict[str, models.Ending] = {}
        # Pods that were found to be as asked for, without their names, and their labels.
        self._alike: dict[str, Json] = {}

    async def probe(self) -> str:
        version = (await self._api.call("GET", "/version")).get("gitVersion", "")
        await self._open()
        await self._network.prepare("none")
        kinds = " and ".join(kind.name for kind in self._space.owners)
        return f"Kubernetes {version} runs {self._config.image} as {kinds} objects"

    async def origin(self, image: str = "") -> str:
        made = Made(image or self._config.image, "", models.Limits(), "none", {}, 0)
        runtime = self.renderer.template(made)["spec"].get("runtimeClassName")
        # A pod on a volume is made anew by other rules; files in a pod must be saved first.
        rules = self.renderer.shape(made) if self.renderer.in_pod else runtime
        return f"{made.image} {rules} {await to_thread.run_sync(runner_digest)}"

    async def create(self, spec: models.SandboxSpec) -> KubernetesSandbox:
        await self._open()
        made = Made.of(spec, self._config.image, await to_thread.run_sync(runner_digest))
        made = replace(made, shape=self.renderer.shape(made))
        pooled = await self._is_pooled(made)
        name = self.renderer.name(spec.labels, WARM) if pooled else self.renderer.name(spec.labels)
        kind = self._space.kind_of(name)
        async with self._creates:
            await self._network.prepare(made.network, spec.mounts)
            if await self._api.post(kind, self.renderer.owner(kind, name, made, spec.labels)):
                try:
                    return await self._start(KubernetesSandbox(name, made, spec.labels, self))
                except BaseException:
                    with anyio.CancelScope(shield=True), suppress(OperatorError):
                        await self.destroy(name)
                    raise
        # A server was killed before it could note that it made one.
        try:
            return await self.attach(name)
        except SandboxGone:
            await self.destroy(name)
            return await self.create(spec)

    async def attach(self, sandbox_id: models.SandboxId) -> KubernetesSandbox:
        await self._open()
        owner = await self._space.sandbox(sandbox_id)
        made = self.renderer.read(sandbox_id, owner.annotations)
        if made is None or not owner.annotations[LABELS]:
            raise BackendUnavailable(
                f"somebody changed what is noted of sandbox {sandbox_id}, so it is kept apart with "
                "its files: put its annotations back, or remove it with `kubectl delete`"
            )
        pod = self._space.pods.get(sandbox_id)
        sandbox = KubernetesSandbox(sandbox_id, made, _read_labels(owner), self)
        try:
            if pod and pod.runs and not pod.weaker:
                with suppress(NotListening):
                    sandbox.first, sandbox.uid = await self._relay(pod, _LISTENS_S), pod.uid
                    return sandbox
            if not self.renderer.in_pod:
                return await self._start_again(sandbox)
        except ExecFailed as exc:
            # What runs in it, and files that nothing else holds, must not go for that.
            raise BackendUnavailable(f"{exc}; call again in a moment") from exc
        # Its files were nowhere else.
        raise make_gone_error(sandbox_id)

    async def _start_again(self, sandbox: KubernetesSandbox) -> KubernetesSandbox:
        """Start a new pod on the volume of a sandbox."""
        async with self._creates:
            await self._network.prepare(sandbox.made.network)
            await self._end_pod(sandbox.id)
            if self._space.kind_of(sandbox.id) is SANDBOX:
                template = self.renderer.template(sandbox.made, sandbox.id)
                # In whole: what somebody has added must go.
                news = {"podTemplate": template, "operatingMode": "Running"}.items()
                reset = [{"op": "add", "path": f"/spec/{key}", "value": each} for key, each in news]
                await self._api.patch(SANDBOX, sandbox.id, reset)
            return await self._start(sandbox)

    async def running(self) -> Sequence[models.SandboxInfo]:
        await self._open()
        pods = self._space.pods
        return [
            models.SandboxInfo(
                models.SandboxId(owner.name),
                _read_labels(owner),
                "running" if (pod := pods.get(owner.name)) and not pod.has_ended else "paused",
            )
            for owner in self._space.sandboxes
            if not owner.ending
        ]

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        await self._open()
        with anyio.CancelScope(shield=True):
            kind, pod = self._space.kind_of(sandbox_id), self._space.pods.get(sandbox_id)
            is_gone = False
            try:
                await self._space.sandbox(sandbox_id)
            except SandboxGone:
                is_gone = True
            if pod:
                self._note_end(pod.uid, "killed")
            # First: a volume stays while a pod has it; it may have been deleted alone.
            if pod if is_gone else kind is VOLUME:
                await self._api.delete(POD, pod.name if pod else sandbox_id)
            if not is_gone:
                await self._api.delete(kind, sandbox_id)
                await self._space.wait_for(sandbox_id, lambda row: row.ending)

    async def pause(self, sandbox_id: models.SandboxId) -> bool:
        """End the pod of a sandbox, and keep its files; False if they are in the pod alone."""
        if self.renderer.in_pod:
            return False
        await self._space.sandbox(sandbox_id)
        if self._space.kind_of(sandbox_id) is SANDBOX:
            await self._api.patch(SANDBOX, sandbox_id, {"spec": {"operatingMode": "Suspended"}})
        await self._end_pod(sandbox_id, until_gone=False)
        return True

    async def connect(self, sandbox_id: models.SandboxId, uid: str) -> ByteStream:
        """Open a byte stream to the runner; raises SandboxGone."""
        return await self._relay(self._space.pod(sandbox_id, uid))

    async def show_skill(self, sandbox: KubernetesSandbox, name: str, packed: bytes) -> None:
        """Put a skill into a pod, by a container that begins with its first one."""
        find = partial(self._space.pod, sandbox.id, sandbox.uid)
        pod, tasks, within_s = find(), self._space.tasks, self._config.start_timeout
        try:
            if not pod.shows_skills:
                news = {"spec": {"ephemeralContainers": [skill_writer(sandbox.made)]}}
                await self._api.patch(POD, f"{pod.name}/ephemeralcontainers", news)
                await self._space.until(lambda: find().shows_skills or None, within_s)
            at, command = (pod.name, WRITER), put_command(name)
            put = await open_exec(self._api, tasks, at, command, packed, within_s)
        except (Refused, ExecFailed) as exc:
            raise BackendUnavailable(
                f"the skill {name} cannot be put into the sandbox ({exc}): sandbox_reset gives it "
                "another pod; if it goes on, see `kubectl describe pod`"
            ) from exc
        await put.aclose()

    async def ending(
        self, sandbox_id: models.SandboxId, uid: str, within_s: float
    ) -> models.Ending | None:
        """Return why a pod ended; None if it goes on."""
        await self._open()

        def ended() -> models.Ending | None:
            # What was ended here may go on for a while: a controller ends it.
            if noted := self._ended.get(uid):
                return noted
            pod = self._space.pods.get(sandbox_id)
            if pod is None or pod.uid != uid:
                return "deleted"
            return _name_ending(pod) if pod.has_ended else None

        return await self._space.until(ended, within_s)

    async def _open(self) -> None:
        await self._space.open(self._examine, self._end_weaker, self._hang_up)

    async def _is_pooled(self, made: Made) -> bool:
        """Return whether the warm pool has sandboxes that are made so."""
        if CLAIM not in self._space.owners:
            return False
        try:
            pool = await self._api.get(WARM_POOL, self._config.warm_pool)
        except Refused as exc:
            logger.warning("sandboxes begin cold: %s", exc)
            return False
        return self.renderer.fits(pool, made)

    def _examine(self, kind: Kind, name: str, found: Json) -> Row:
        """Return the row of an object, and whether it is weaker than was asked for."""
        row, weaker = Row.of(found), list[str]()
        if kind is not POD or POD in self._space.owners:
            labels = self.renderer.read_labels(name, row.annotations)
            row = replace(row, annotations={**row.annotations, LABELS: labels})
        files = self.renderer.files(self._space.kind_of(name), name)
        if kind is POD:
            weaker = self._compare(name, found, files)
        elif kind is SANDBOX and found["spec"].get("operatingMode") != "Suspended":
            # Its controller adds the volume.
            files_of_template = files if self.renderer.in_pod else None
            weaker = self._compare(name, found["spec"]["podTemplate"], files_of_template)
        return replace(row, weaker=tuple(weaker))

    def _end_weaker(self, kind: Kind, name: str, row: Row) -> None:
        if row.has_ended:
            return
        logger.error("%s %s is not as it was made: %s", kind.name, name, "; ".join(row.weaker))
        if kind is SANDBOX and self.renderer.in_pod:
            # Its pod is as it was, and has files that nothing else holds; another would have none.
            return
        if pod := row if kind is POD else self._space.pods.get(name):
            self._note_end(pod.uid, "changed")
        self._space.tasks.start_soon(self._end, models.SandboxId(name))

    def _note_end(self, uid: str, ending: models.Ending) -> None:
        self._ended.setdefault(uid, ending)
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def _hang_up(self, uid: str) -> None:
        for stream in self._streams.pop(uid, ()):
            stream.closed.set()

    def _compare(self, name: str, found: Json, files: Json | None) -> list[str]:
        """Return how a pod, or the template of one, is not as it should be."""
        metadata, kind = found.get("metadata", {}), self._space.kind_of(name)
        notes, labels = (metadata.get(part, {}) for part in ("annotations", "labels"))
        made = self.renderer.read(name, notes)
        if made is None:
            return ["what it was made from is not noted"]
        spec, weaker = {**found["spec"], "nodeName": ""}, list[str]()
        # No text of JSON has this sign, so that nothing else can stand for the name.
        text = json.dumps([kind.plural, notes[RECORD], files, spec]).replace(name, "\0")
        own: Json | None = self._alike.get(text)
        if own is None:
            wanted = self.renderer.template(made, "" if kind is CLAIM else name, files)
            if spec.get("ephemeralContainers"):
                wanted["spec"]["ephemeralContainers"] = [skill_writer(made)]
            own, weaker = dict(wanted["metadata"]["labels"]), find_weaker(wanted["spec"], spec)
            if self.renderer.in_pod and made.shape != self.renderer.shape(made):
                # Made by other rules: its next use saves its files and replaces it.
                own, weaker = {**APP, NETWORK: made.network}, []
            if not weaker:
                while len(self._alike) >= _MOST_ALIKE:
                    del self._alike[next(iter(self._alike))]
                self._alike[text] = own
        return weaker + [f"label {key} is changed" for key in own if labels.get(key) != own[key]]

    async def _end(self, name: models.SandboxId) -> None:
        is_paused = False
        try:
            with suppress(SandboxGone):
                is_paused = await self.pause(name)
            if not is_paused:
                # Else its controller makes another one from the same.
                await self.destroy(name)
        except OperatorError as exc:
            logger.error("%s could not be ended: %s", name, exc)  # noqa: TRY400 - it says all

    async def _start(self, sandbox: KubernetesSandbox) -> KubernetesSandbox:
        """Start the runner in a new pod; is the one of its controller, or ours."""
        name, made, rows = sandbox.id, sandbox.made, self._space.pods
        if self._space.kind_of(name) is VOLUME:
            await self._api.post(POD, self.renderer.pod(name, made))
        pod = await self._wait_until_it_runs(name, made)
        try:
            sandbox.first, sandbox.uid = await self._relay(pod, first=True), pod.uid
        except ExecFailed as exc:
            ended = await self._space.until(
                lambda: row.exit_code if (row := rows.get(name)) else None, _LISTENS_S
            )
            if ended in _NOT_OURS:
                raise ImageMissing(
                    f"the image {made.image} holds another version of the runner, or none: build "
                    "it again with `mcp-sandbox images build`, push it, and set kubernetes.image"
                ) from exc
            raise
        return sandbox

    async def _relay(
        self, pod: Row, listens_s: float = _CONNECT_S, *, first: bool = False
    ) -> ExecStream:
        command = relay_command(listens_s, hands_over=first)
        secret = self.renderer.token(pod.uid).hex().encode() + b"\n" if first else b""
        most_s, tasks = _CONNECT_S + listens_s, self._space.tasks
        stream = await open_exec(self._api, tasks, (pod.name, OWN), command, secret, most_s)
        open_ones = {each for each in self._streams.get(pod.uid, ()) if not each.closed.is_set()}
        self._streams[pod.uid] = open_ones | {stream}
        return stream

    async def _wait_until_it_runs(self, name: str, made: Made) -> Row:
        rows = self._space.pods

        def settled() -> Row | None:
            pod = rows.get(name)
            done = pod and not pod.ending and (pod.ready or pod.reason in NEVER or pod.has_ended)
            return pod if done or (pod and pod.weaker) else None

        pod = await self._space.until(settled, self._config.start_timeout)
        if pod and pod.weaker:
            raise InsecureSandbox(
                f"the pod is weaker than requested and was ended: {'; '.join(pod.weaker)}. Look "
                "for what changes pods in this namespace, such as an admission webhook"
            )
        if pod is None or pod.reason in NEVER:
            raise await self._space.explain_wait(name, rows.get(name), made.image)
        return pod

    async def _end_pod(self, name: str, *, until_gone: bool = True) -> None:
        """End the pod of a sandbox, if it has one, and wait until nothing runs in it, or longer."""
        rows = self._space.pods
        pod = rows.get(name)
        if pod is None:
            return
        self._note_end(pod.uid, "killed")
        await self._api.delete(POD, pod.name)
        uid = pod.uid

        def is_gone() -> bool | None:
            now = rows.get(name)
            if now is None or now.uid != uid or not (until_gone or now.exit_code is None):
                return True
            return None

        if not await self._space.until(is_gone, _GONE_S):
            raise BackendUnavailable(
                f"the pod of sandbox {name} does not end: its node may be lost; look at it with "
                f"`kubectl get pod {pod.name} -o wide`"
            )


def _read_labels(owner: Row) -> Mapping[str, str]:
    labels: Mapping[str, str] = json.loads(owner.annotations[LABELS] or "{}")
    return labels


def _name_ending(pod: Row) -> models.Ending:
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
    config: KubernetesConfig, data_root: Path, size_bytes: int, shared_key: str = ""
) -> AsyncGenerator[KubernetesBackend]:
    """Open the backend; its watches and channels end with the block, its sandboxes go on.

    Servers with the same `shared_key` have the same sandboxes.
    """
    template = await to_thread.run_sync(read_template, config.template)
    try:
        key = shared_key.encode() or await to_thread.run_sync(_read_key, data_root)
    except OSError as exc:
        raise StorageUnavailable(
            f"cannot write to {data_root} ({exc.strerror}): free space there or set data_dir"
        ) from exc
    renderer, closed = Renderer(config, template, key, size_bytes), anyio.Event()

    async def host(*, task_status: TaskStatus[TaskGroup]) -> None:
        # A cancelled block still saves its chats, for which it needs watches and channels.
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                task_status.started(tasks)
                await closed.wait()
                tasks.cancel_scope.cancel()

    async with aclosing(ApiServer(config)) as api:
        try:
            async with anyio.create_task_group() as hosts:
                try:
                    tasks = await hosts.start(host)
                    space = Namespace(config, api, renderer.instance, tasks)
                    yield KubernetesBackend(renderer, space)
                finally:
                    closed.set()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
