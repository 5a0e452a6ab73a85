"""Creates, finds, pauses and removes sandboxes that are objects of a Kubernetes cluster.

A sandbox is a Sandbox or a claim of a warm pool, whose controllers make its pod; else a volume with
a pod of the same name, or a pod alone. It is paused when its pod is gone and its volume is not: to
attach to it starts a new pod on its files.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import ByteStream, TaskGroup, TaskStatus

from mcp_sandbox import models
from mcp_sandbox.backends.kubernetes.client import POD, WAIT_S, ApiServer, Kind, Refused
from mcp_sandbox.backends.kubernetes.exec_stream import (
    CUT,
    MISSED,
    ExecFailed,
    ExecStream,
    NotListening,
    open_exec,
)
from mcp_sandbox.backends.kubernetes.network import Network
from mcp_sandbox.backends.kubernetes.objects import (
    KEPT,
    OWN,
    PIPE,
    SANDBOX,
    VOLUME,
    WRITER,
    Made,
    Renderer,
    relay_command,
    skill_writer,
)
from mcp_sandbox.backends.kubernetes.verify import read_template
from mcp_sandbox.backends.kubernetes.watch import WARM, Namespace, Row
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
    Unreachable,
)

logger = logging.getLogger(__name__)

_CONNECT_S = 20.0
# One that runs already does so at once, unless its server was killed before it had its secret.
_LISTENS_S = 3.0
# Pods of the warm pool in which an exec has begun ahead, and how many begin at once.
_MOST_AHEAD, _AHEAD_AT_ONCE = 32, 2
_AHEAD_AGAIN_S = 5.0
_GONE_S = 12.0
# When events are asked for why a pod does not begin, and how long its removal is waited for.
_LOOK_S, _REMOVE_S = 2.0, 8.0
# One exec to a pod that runs: its node answers at once, or is away; others are told so at once.
_REACH_S, _KNOWN_S = 5.0, 5.0
# A node looks at its containers each second, and then tells of them.
_TOLD_S = 3.0
_MOST_ENDED = 10_000
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
    backend: "KubernetesBackend" = field(repr=False)
    uid: str = ""
    first: ExecStream | None = field(default=None, repr=False)

    @property
    def token(self) -> bytes:
        return self.backend.renderer.token(self.uid)

    @property
    def facts(self) -> models.SandboxFacts:
        return self.backend.renderer.facts(self.made, self.backend.network.enforced.get("open"))

    @property
    def labels(self) -> Mapping[str, str]:
        return self.made.labels

    async def open_channel(self) -> ByteStream:
        first, self.first = self.first, None
        return first or await self.backend.reach(self.backend.space.pod(self.id, self.uid))

    async def pause(self) -> bool:
        return await self.backend.pause(self.id)

    async def show_skill(self, name: str, files: Mapping[str, bytes]) -> None:
        """Put a skill into a pod, by a container that begins with its first one."""
        space = self.backend.space
        find, within_s = partial(space.pod, self.id, self.uid), WAIT_S
        pod = find()
        try:
            if not pod.shows_skills:
                news = {"spec": {"ephemeralContainers": [skill_writer(self.made)]}}
                await space.api.patch(POD, f"{pod.name}/ephemeralcontainers", news)
                await space.until(lambda: find().shows_skills, within_s)
            at, command, given = (pod.name, WRITER), put_command(name), pack(files)
            put = await open_exec(space.api, space.tasks, at, command, within_s)
            await put.connect(given, within_s)
        except (Refused, ExecFailed, NotListening) as exc:
            raise BackendUnavailable(
                f"the skill {name} cannot be put into the sandbox ({exc}): sandbox_reset gives it "
                "another pod; if it goes on, see `kubectl describe pod`"
            ) from exc
        await put.aclose()

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        look, space = partial(self.backend.why_ended, self.id, self.uid), self.backend.space
        if (pod := space.pods.get(self.id)) and pod.ending:
            await self.backend.await_end(self.id, self.uid)
        return await space.until(look, within_s and max(within_s, _TOLD_S))


class KubernetesBackend:
    """The sandboxes of one data root in one namespace."""

    name: models.BackendName = "kubernetes"
    holds_files = takes_images = True

    def __init__(self, renderer: Renderer, namespace: Namespace, certificates: Path) -> None:
        self._config = namespace.config
        self.renderer = renderer
        self.keeps_paused_files = not renderer.in_pod
        self.space = namespace
        self._api = namespace.api
        self.network = Network(namespace, renderer, certificates)
        # What leads to each pod, by its uid: a lost node does not cut it off.
        self._streams: dict[str, set[ExecStream]] = {}
        # Of a free pod: a stream that has not connected, and what waits for its end.
        self._ahead: dict[str, tuple[ExecStream, anyio.CancelScope]] = {}
        self._aheads = CapacityLimiter(_AHEAD_AT_ONCE)
        # Why pods have ended, by uid.
        self._ended: dict[str, models.Ending] = {}
        # Until when pods are not tried, by uid, as they did not answer.
        self._silent: dict[str, float] = {}
        namespace.notice = self._notice

    async def probe(self) -> str:
        version = (await self._api.call("GET", "/version")).get("gitVersion", "")
        await self.space.open()
        kinds = " and ".join(kind.name for kind in self.space.owners)
        return f"Kubernetes {version} runs {self._config.image} as {kinds} objects"

    async def origin(self, image: str = "") -> str:
        made = Made(image or self._config.image, "", models.Limits(), "none", {}, 0)
        # A pod on a volume is made anew by other rules; files in a pod must be saved first.
        rules = self.renderer.shape(made) if self.renderer.in_pod else ""
        return f"{made.image} {rules} {await to_thread.run_sync(runner_digest)}"

    async def create(self, spec: models.SandboxSpec) -> KubernetesSandbox:
        await self.space.open()
        made = Made.of(spec, self._config.image, await to_thread.run_sync(runner_digest))
        made = replace(made, shape=self.renderer.shape(made))
        pods = self.space.pods.values()
        warm = any(pod.runs and pod.ready and pod.free_shape == made.shape for pod in pods)
        name = self.renderer.name(spec.labels, WARM) if warm else self.renderer.name(spec.labels)
        kind, sandbox = self.space.kind_of(name), KubernetesSandbox(name, made, self)
        make = partial(self._api.post, kind, self.renderer.owner(kind, name, made))
        if await self._begin_in_time(sandbox, make, self.destroy):
            return sandbox
        # A server was killed before it could note that it made one.
        try:
            return await self.attach(name)
        except SandboxGone:
            await self.destroy(name)
            return await self.create(spec)

    async def attach(self, sandbox_id: models.SandboxId) -> KubernetesSandbox:
        await self.space.open()
        rows = self.space.pods
        if self.renderer.in_pod:
            # Another server may have made it just now.
            pod = await self.space.until(lambda: rows.get(sandbox_id), _TOLD_S)
            if pod and pod.ending:
                await self.await_end(sandbox_id, pod.uid)
        made = (await self.space.sandbox(sandbox_id)).made
        if made is None:
            raise BackendUnavailable(
                f"somebody changed what is noted of sandbox {sandbox_id}, so it is kept apart with "
                "its files: put its annotations back, or remove it with `kubectl delete`"
            )
        pod, sandbox = rows.get(sandbox_id), KubernetesSandbox(sandbox_id, made, self)
        # Whether it is ready or not: its node may only be out of the cluster's sight.
        if pod and pod.runs and not pod.weaker:
            try:
                sandbox.first, sandbox.uid = await self.reach(pod), pod.uid
            except NotListening as exc:
                if self.renderer.in_pod and not await self._awaits_secret(pod):
                    raise Unreachable(f"{exc}, or `mcp-sandbox stop --force` ends it") from exc
            else:
                return sandbox
        if not self.renderer.in_pod:
            # A new pod starts on the volume.
            await self._begin_in_time(sandbox, partial(self._ask_for_pod, sandbox), self.pause)
            return sandbox
        # Its files were nowhere else.
        raise make_gone_error(sandbox_id)

    async def _awaits_secret(self, pod: Row) -> bool:
        """Return whether nothing ran in a pod yet, as its server was killed before that."""
        looks = ["/bin/sh", "-c", f"test -p {PIPE} && echo connected >&2"]
        with suppress(ExecFailed, NotListening):
            await (await self._begin(pod, looks)).connect(b"", _REACH_S)
            return True
        return False

    async def _ask_for_pod(self, sandbox: KubernetesSandbox) -> bool:
        name, space = sandbox.id, self.space
        if self._api.explain(space.told(name)):
            # Its controller looks again only after a change.
            await self.pause(name)
            await space.until(lambda: not self._api.explain(space.told(name)), _REMOVE_S)
        await self._end_pod(name)
        if space.kind_of(name) is SANDBOX:
            template = self.renderer.template(sandbox.made, name)
            # In whole: what somebody has added must go.
            news = {"podTemplate": template, "operatingMode": "Running"}.items()
            reset = [{"op": "add", "path": f"/spec/{key}", "value": each} for key, each in news]
            await self._api.patch(SANDBOX, name, reset)
        return True

    async def _begin_in_time(
        self,
        sandbox: KubernetesSandbox,
        begin: Callable[[], Awaitable[bool]],
        undo: Callable[[models.SandboxId], Awaitable[object]],
    ) -> bool:
        """Begin and start a sandbox, or undo that; return whether there was one to begin."""
        is_begun = False
        try:
            with anyio.move_on_after(self._config.start_timeout):
                await self.network.prepare(sandbox.made.network)
                if is_begun := await begin():
                    await self._start(sandbox)
                return is_begun
            await self.space.give_up(sandbox.id, sandbox.made.image, self.network.waits_for)
        except BaseException:
            if is_begun:
                with anyio.move_on_after(_REMOVE_S, shield=True), suppress(OperatorError):
                    await undo(sandbox.id)
            raise

    async def running(self) -> Sequence[models.SandboxInfo]:
        await self.space.open()
        pods = self.space.pods
        found = [(owner, pods.get(owner.name)) for owner in self.space.sandboxes]
        return [
            models.SandboxInfo(
                models.SandboxId(owner.name),
                owner.made.labels if owner.made else {},
                "running" if pod and not pod.has_ended else "paused",
            )
            for owner, pod in found
            # A server that is killed while it deletes both may leave the pod.
            if not owner.ending or (pod and not pod.ending)
        ]

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        await self.space.open()
        with anyio.CancelScope(shield=True):
            kind, pod = self.space.kind_of(sandbox_id), self.space.pods.get(sandbox_id)
            with suppress(SandboxGone):
                await self.space.sandbox(sandbox_id)
            if pod:
                self._note_end(pod.uid, "killed")
            await self._api.delete(kind, sandbox_id)
            # A volume stays while a pod has it, and may have been deleted alone.
            await self._api.delete(POD, pod.name if pod else sandbox_id)
            await self.space.until_ending(sandbox_id)

    async def pause(self, sandbox_id: models.SandboxId) -> bool:
        """End the pod of a sandbox, and keep its files; False if they are in the pod alone."""
        if self.renderer.in_pod:
            return False
        await self.space.sandbox(sandbox_id)
        if self.space.kind_of(sandbox_id) is SANDBOX:
            news = {"operatingMode": "Suspended", **KEPT}
            await self._api.patch(SANDBOX, sandbox_id, {"spec": news})
        await self._end_pod(sandbox_id)
        return True

    def why_ended(self, name: str, uid: str) -> models.Ending | None:
        """Return why a pod ended; None if it goes on."""
        # What was ended here may go on for a while: a controller ends it.
        if noted := self._ended.get(uid):
            return noted
        pod = self.space.pods.get(name)
        if pod is None or pod.uid != uid:
            return "deleted"
        return _name_ending(pod) if pod.has_ended else None

    def _notice(self, kind: Kind, name: str, before: Row | None, now: Row | None) -> None:
        """Hang up on a pod that has ended, and end what somebody has changed."""
        same = before if before and now and before.uid == now.uid else None
        if before and (not same or (now and now.has_ended)):
            for stream in self._streams.pop(before.uid, ()):
                stream.closed.set()
            if kind is POD and not same:
                self._note_end(before.uid, _name_ending(before))
        if kind is POD and before and not (now and not now.ready):
            self._silent.pop(before.uid, None)
        if now and not same and not now.free_shape and (begun := self._ahead.get(now.uid)):
            # Where it was claimed here it is taken at once; else a server with the same key did.
            begun[1].deadline = anyio.current_time() + _LISTENS_S
        if now and now.free_shape and not (same and same.runs):
            self.space.tasks.start_soon(self._open_ahead, now)
        if now and now.weaker and not now.has_ended and not (same and same.weaker):
            self._end_weaker(kind, name, now)

    def _end_weaker(self, kind: Kind, name: str, row: Row) -> None:
        logger.error("%s %s is not as it was made: %s", kind.name, name, "; ".join(row.weaker))
        # Its pod is as it was, and has files that nothing else holds; another would have none.
        stays = kind is SANDBOX and self.renderer.in_pod
        if not stays and (pod := row if kind is POD else self.space.pods.get(name)):
            self._note_end(pod.uid, "changed")
        self.space.tasks.start_soon(self._end, models.SandboxId(name), stays)

    def _note_end(self, uid: str, ending: models.Ending) -> None:
        self._ended.setdefault(uid, ending)
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _end(self, name: models.SandboxId, stays: bool) -> None:
        is_paused = False
        try:
            if stays:
                await self._api.patch(SANDBOX, name, {"spec": KEPT})
                return
            with suppress(SandboxGone):
                is_paused = await self.pause(name)
            if not is_paused:
                # Else its controller makes another one from the same.
                await self.destroy(name)
        except OperatorError as exc:
            logger.error("%s could not be ended: %s", name, exc)  # noqa: TRY400 - it says all

    async def _start(self, sandbox: KubernetesSandbox) -> KubernetesSandbox:
        """Start the runner in a new pod; is the one of its controller, or ours."""
        name, made, rows = sandbox.id, sandbox.made, self.space.pods
        if self.space.kind_of(name) is VOLUME:
            await self._api.post(POD, self.renderer.pod(name, made))
        pod = await self._wait_until_it_runs(name, made.image)
        try:
            sandbox.first, sandbox.uid = await self.relay(pod, first=True), pod.uid
        except (ExecFailed, NotListening) as exc:
            ended = await self.space.until(
                lambda: row.exit_code if (row := rows.get(name)) else None, _LISTENS_S
            )
            if ended in _NOT_OURS:
                raise ImageMissing(
                    f"the image {made.image} holds another version of the runner, or none: build "
                    "it again with `mcp-sandbox images build`, push it, and set kubernetes.image"
                ) from exc
            raise Unreachable(str(exc)) from exc
        return sandbox

    async def reach(self, pod: Row) -> ExecStream:
        """Open a byte stream to a pod that runs already. Raises ExecFailed, NotListening."""
        if anyio.current_time() < self._silent.get(pod.uid, 0.0):
            raise ExecFailed(f"{MISSED} (it was tried just now)")
        try:
            with anyio.fail_after(_REACH_S):
                return await self.relay(pod, _LISTENS_S)
        except TimeoutError as exc:
            self._silent[pod.uid] = anyio.current_time() + _KNOWN_S
            raise ExecFailed(f"{MISSED} (not within {_REACH_S:g} s)") from exc

    async def relay(
        self, pod: Row, listens_s: float = _CONNECT_S, *, first: bool = False
    ) -> ExecStream:
        """Open a byte stream to the runner of a pod. Raises ExecFailed, NotListening."""
        secret = self.renderer.token(pod.uid).hex().encode() + b"\n" if first else b""
        if first and (begun := self._ahead.pop(pod.uid, None)):
            stream, waiting = begun
            waiting.cancel()
        else:
            stream = await self._begin(pod, relay_command(listens_s, hands_over=first))
        await stream.connect(secret, _CONNECT_S + listens_s)
        return stream

    async def _begin(self, pod: Row, command: list[str]) -> ExecStream:
        tasks, at = self.space.tasks, (pod.name, OWN)
        stream = await open_exec(self._api, tasks, at, command, _CONNECT_S)
        open_ones = {each for each in self._streams.get(pod.uid, ()) if not each.closed.is_set()}
        self._streams[pod.uid] = open_ones | {stream}
        return stream

    async def _open_ahead(self, pod: Row) -> None:
        """Begin an exec in a free pod, for that lasts longer than to claim it."""
        # Where it fails, who claims the pod begins another and is told.
        with suppress(OperatorError, ExecFailed, *CUT), anyio.CancelScope() as waiting:
            async with self._aheads:
                # It may wait for these to begin.
                await self.network.show()
                if not pod.runs or pod.uid in self._ahead or len(self._ahead) >= _MOST_AHEAD:
                    return
                stream = await self._begin(pod, relay_command(_CONNECT_S, hands_over=True))
            self._ahead[pod.uid] = stream, waiting
            try:
                # It has no secret to say so: this lasts until it is claimed, cut, or ends.
                if pod.name in self.space.pods:
                    await stream.wait_connected()
            finally:
                if self._ahead.pop(pod.uid, None):
                    stream.closed.set()
        # Kubelets cut what is idle for hours, and a server that is replaced cuts all.
        await anyio.sleep(_AHEAD_AGAIN_S)
        if (now := self.space.pods.get(pod.name)) and now.uid == pod.uid:
            self.space.tasks.start_soon(self._open_ahead, now)

    async def _wait_until_it_runs(self, name: str, image: str) -> Row:
        space, look_s = self.space, _LOOK_S

        def settled() -> Row | OperatorError | None:
            pod = space.pods.get(name)
            if pod and (pod.weaker or (pod.ready and not pod.ending)):
                return pod
            has_ended = pod and pod.has_ended and not pod.ending
            cause = self._api.explain(space.told(name), image)
            return cause or (pod if has_ended else None)

        while not (found := await space.until(settled, look_s)):
            if found := self._api.explain(await space.ask(name), image):
                break
            look_s *= 2
        if isinstance(found, OperatorError):
            raise found
        if found.weaker:
            raise InsecureSandbox(
                f"the pod is weaker than requested and was ended: {'; '.join(found.weaker)}. Look "
                "for what changes pods in this namespace, such as an admission webhook"
            )
        return found

    async def _end_pod(self, name: str) -> None:
        """End the pod of a sandbox, if it has one, and wait until nothing runs in it."""
        rows = self.space.pods
        pod = rows.get(name)
        if pod is None:
            return
        self._note_end(pod.uid, "killed")
        await self._api.delete(POD, pod.name)
        await self.await_end(name, pod.uid)

    async def await_end(self, name: str, uid: str) -> None:
        """Wait until nothing runs in a pod that is ending. Raises Unreachable: it is not told."""
        rows = self.space.pods

        def has_ended() -> bool:
            now = rows.get(name)
            return not now or now.uid != uid or now.has_ended

        if not await self.space.until(has_ended, _GONE_S):
            raise Unreachable(
                f"the pod of sandbox {name} does not end, so its node may be away, and it may go "
                f"on there: look at it with `kubectl get pod {rows[name].name} -o wide`"
            )


def _name_ending(pod: Row) -> models.Ending:
    if pod.reason == "OOMKilled":
        return "memory"
    if pod.reason in _EVICTIONS:
        return "evicted"
    if pod.ending or pod.exit_code is None:
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
                    space = Namespace(config, api, renderer, tasks)
                    trusted = data_root / "sandbox" / "authority" / "bundle"
                    yield KubernetesBackend(renderer, space, trusted)
                finally:
                    closed.set()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
