"""What is sent for a sandbox: one of four kinds of objects, all made from one pod template.

What a sandbox was made from is noted in an annotation, under a seal that only servers of the same
data root can make.
"""

import hashlib
import hmac
import json
import re
import resource
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

from mcp_sandbox.backends.kubernetes.client import POD, Json, Kind
from mcp_sandbox.backends.kubernetes.verify import find_weaker
from mcp_sandbox.backends.runner_copy import (
    MAIN,
    beside_pid_1,
    environment,
    list_process_limits,
)
from mcp_sandbox.backends.sandbox_records import new_id
from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.models import (
    CERTIFICATES,
    HOME,
    OURS,
    RELAY,
    SKILLS,
    Limits,
    Network,
    SandboxFacts,
    SandboxId,
    SandboxSpec,
)

VOLUME = Kind("", "persistentvolumeclaims", "PersistentVolumeClaim")
SANDBOX = Kind("agents.x-k8s.io", "sandboxes", "Sandbox", "v1beta1")
_POOLS = "extensions.agents.x-k8s.io"
CLAIM = Kind(_POOLS, "sandboxclaims", "SandboxClaim", "v1beta1")
WARM_POOL = Kind(_POOLS, "sandboxwarmpools", "SandboxWarmPool", "v1beta1")
TEMPLATE = Kind(_POOLS, "sandboxtemplates", "SandboxTemplate", "v1beta1")
APP = {"app": "mcp-sandbox"}
# Labels; a pod from a warm pool has the first one as an annotation.
INSTANCE, NETWORK = "mcp-sandbox.instance", "mcp-sandbox.network"
TRIAL = {"mcp-sandbox.trial": "yes"}
# Annotations: the sandbox, what it is made from, its labels, and a seal on these.
NAME, RECORD, LABELS, SEAL = (
    f"mcp-sandbox.{each}" for each in ("name", "record", "labels", "seal")
)
SHAPE = "mcp-sandbox.template"
# Of a Sandbox: else its controller would delete it at some time, and its files.
KEPT = {"shutdownPolicy": "Retain", "shutdownTime": None}
FILES = "files"
PATH = f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
PYTHON = ["/usr/bin/python3", "-I", "-S"]
USER = 10001
_PLACE = "/run/mcp-sandbox"
_SOCKET, PIPE = f"{_PLACE}/runner.sock", f"{_PLACE}/secret"
# How long a runner waits for its secret, but in a warm pool.
_START_S = 300
# Where files are in the pod alone, it waits at least so long for a server that may save them.
_UNSAVED_S = 86_400.0
_NOT_READABLE = re.compile(r"[^a-z0-9]+")
# What may be written until that is seen and stopped.
_BEYOND = 4 * 2**30
# Below the volume; its own root may hold a folder of its file system.
_KEPT = {"workspace": "/workspace", "home": HOME}
# The containers of a pod: the second one begins with its first skill, which it alone can write.
OWN, WRITER = "sandbox", "skills"
_SKILLS_MOUNT = {"name": WRITER, "mountPath": SKILLS}
_TRUST = "certificates"
RESTRICTED: Json = {
    "allowPrivilegeEscalation": False,
    "privileged": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# What holds for all of a pod, but for its filter of system calls.
AS_USER = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
}
# Where files are in the pod alone: by default it would be ended when its node was away for 300 s.
_STAYS = [
    {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute"}
    for why in ("not-ready", "unreachable")
]
_MOST_ALIKE = 100


@dataclass(frozen=True, slots=True)
class Made:
    """What a sandbox is made from: all that its pod depends on, beside the configuration.

    Its pod does not depend on its `labels`.
    """

    image: str
    runner: str
    limits: Limits
    network: Network
    env: Mapping[str, str]
    idle_s: float
    # By which rules, as `Renderer.shape` says.
    shape: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, spec: SandboxSpec, image: str, runner: str) -> "Made":
        """Return what a spec asks for."""
        # Where doors are to be, a backend is asked for their certificates alone.
        trusts = any(mount.target == CERTIFICATES for mount in spec.mounts)
        network: Network = "allowlist" if trusts else spec.network
        env, labels = dict(spec.env), dict(spec.labels)
        image = spec.image or image
        return cls(image, runner, spec.limits, network, env, spec.idle_s, labels=labels)


class Renderer:
    """Makes the objects of one data root."""

    def __init__(
        self, config: KubernetesConfig, template: Mapping[str, Any], key: bytes, size_bytes: int
    ) -> None:
        """Use the operator's `template` as `verify.read_template` returns it."""
        self._config = config
        self._template = template
        self._key = key
        self._size = size_bytes
        self.instance = hashlib.sha256(b"instance" + key).hexdigest()[:16]
        self.in_pod = config.storage == "backups"
        self._has_own_users = template.get("spec", {}).get("hostUsers") is False
        # A warm pool is printed where the instance is not known.
        self.certificates = f"mcp-sandbox-{config.warm_pool or self.instance}-certificates"
        # The labels of pods that are as they should be, by what these are without their names.
        self._alike: dict[str, Json] = {}

    def name(self, labels: Mapping[str, str], prefix: str = "mcs") -> SandboxId:
        """Return a name that no sandbox of another chat has; a new one where labels name none."""
        if not {"user", "chat"} <= labels.keys():
            return new_id()
        whose = "\0".join((self.instance, labels["user"], labels["chat"]))
        readable = _NOT_READABLE.sub("-", f"{labels['user']}-{labels['chat']}".lower())
        digest = hashlib.sha256(whose.encode()).hexdigest()[:32]
        return SandboxId(f"{prefix}-{readable[:25].strip('-')}-{digest}")

    def token(self, pod_uid: str) -> bytes:
        """Return the secret of the channels to one pod."""
        return hmac.digest(self._key, b"channel " + pod_uid.encode(), "sha256")

    def read(self, name: str, annotations: Mapping[str, str]) -> Made | None:
        """Return what a sandbox was made from; None if somebody changed that."""
        record, labels, seal = (annotations.get(each, "") for each in (RECORD, LABELS, SEAL))
        if not hmac.compare_digest(seal.encode(), self._seal(name, record, labels).encode()):
            return None
        # Many are kept, and all have the same keys.
        own = {sys.intern(key): each for key, each in json.loads(labels).items()}
        return replace(_read_record(record), labels=own)

    def _notes(self, name: str, made: Made) -> dict[str, str]:
        note = asdict(made)
        labels = json.dumps(note.pop("labels"))
        record = json.dumps(note, sort_keys=True)
        own = {INSTANCE: self.instance, NAME: name, RECORD: record, LABELS: labels}
        return {**own, SEAL: self._seal(name, record, labels)}

    def _seal(self, *sealed: str) -> str:
        return hmac.digest(self._key, json.dumps(sealed).encode(), "sha256").hex()

    def owner(self, kind: Kind, name: str, made: Made) -> Json:
        """Return the object that is a sandbox: what is deleted with it, and noted of it, is its."""
        if kind is POD:
            return self.pod(name, made)
        specs: dict[Kind, Callable[[str, Made], Json]]
        specs = {VOLUME: self._volume_spec, SANDBOX: self._sandbox_spec, CLAIM: self._claim_spec}
        return kind.body(name, self.template(made, name)["metadata"], specs[kind](name, made))

    def pod(self, name: str, made: Made) -> Json:
        """Return a pod that is a sandbox, or is beside a volume of the same name."""
        return POD.body(name, **self.template(made, name, self.files(VOLUME, name)))

    def files(self, kind: Kind, name: str) -> Json:
        """Return the volume with the files of a sandbox of this kind."""
        if self.in_pod:
            # The server stops a chat at its limit; the cluster would end the pod above this one.
            return {"emptyDir": {"sizeLimit": str(self._size + max(self._size, _BEYOND))}}
        claim = f"{FILES}-{name}" if kind is SANDBOX else name
        return {"persistentVolumeClaim": {"claimName": claim}}

    def template_files(self, name: str) -> Json | None:
        """Return the same of a Sandbox: its controller adds the volume of its claim to the pod."""
        return self.files(SANDBOX, name) if self.in_pod else None

    def _sandbox_spec(self, name: str, made: Made) -> Json:
        claim = {"metadata": {"name": FILES}, "spec": self._volume_spec()}
        return {
            "podTemplate": self.template(made, name, self.template_files(name)),
            **({} if self.in_pod else {"volumeClaimTemplates": [claim]}),
            "service": False,
            "operatingMode": "Running",
            "shutdownPolicy": "Retain",
        }

    def _claim_spec(self, name: str, made: Made) -> Json:
        """Ask for a sandbox of the warm pool: variables and volumes would make it a cold one."""
        notes = {"annotations": self._notes(name, made)}
        return {"warmPoolRef": {"name": self._config.warm_pool}, "additionalPodMetadata": notes}

    def _volume_spec(self, *_: object) -> Json:
        return claim_spec(str(self._size), self._config.storage_class)

    def pool(self, made: Made, replicas: int | str) -> list[Json]:
        """Return the warm pool and its template."""
        name = self._config.warm_pool
        template = self.template(made, files=self.files(CLAIM, name))
        shape = {"annotations": {SHAPE: self.shape(made)}}
        template["metadata"]["annotations"] |= shape["annotations"]
        # The policies are ours: the controller's own would allow the internet.
        spec = {"podTemplate": template, "networkPolicyManagement": "Unmanaged", "service": False}
        # Else those that wait from before an update would be taken, and ended as changed.
        update = {"updateStrategy": {"type": "Recreate"}}
        size = {"replicas": replicas, "sandboxTemplateRef": {"name": name}, **update}
        return [
            TEMPLATE.body(name, {"labels": APP}, spec),
            WARM_POOL.body(name, {"labels": APP, **shape}, size),
        ]

    def shape(self, made: Made) -> str:
        """Return a digest of how a pod is made now: a change of settings or of a version shows."""
        template = self.template(made, files=self.files(CLAIM, ""))
        return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]

    def find_changes(self, kind: Kind, name: str, pod: Json, files: Json | None) -> list[str]:
        """Return how a pod, or the template of one, is not as a sandbox of this kind has it."""
        metadata = pod.get("metadata", {})
        notes, labels = (metadata.get(part, {}) for part in ("annotations", "labels"))
        made = self.read(name, notes)
        if made is None:
            return ["what it was made from is not noted"]
        spec = {**pod["spec"], "nodeName": ""}
        # Pods are nearly all alike but for their names, for which no text of JSON has this sign.
        text = json.dumps([kind.plural, notes[RECORD], files, spec]).replace(name, "\0")
        if text not in self._alike:
            wanted = self.template(made, "" if kind is CLAIM else name, files)
            weaker, own = self._compare(made, spec, wanted)
            if weaker:
                return weaker
            if len(self._alike) >= _MOST_ALIKE:
                self._alike.clear()
            self._alike[text] = own
        own = self._alike[text]
        return [f"label {key} is changed" for key in own if labels.get(key) != own[key]]

    def _compare(self, made: Made, spec: Json, wanted: Json) -> tuple[list[str], Json]:
        """Return how the spec of a pod differs, and the labels that it needs."""
        if self.in_pod and made.shape != self.shape(made):
            # Made by other rules: its next use saves its files and replaces it.
            return [], {**APP, NETWORK: made.network}
        if spec.get("ephemeralContainers"):
            wanted["spec"]["ephemeralContainers"] = [skill_writer(made)]
        return find_weaker(wanted["spec"], spec), wanted["metadata"]["labels"]

    def template(self, made: Made, name: str = "", files: Json | None = None) -> Json:
        """Return metadata and spec of a pod; one for a warm pool has no name yet."""
        own: Json = {"labels": {**APP, NETWORK: made.network}, "annotations": {}}
        if name:
            own["labels"][INSTANCE] = self.instance
            own["annotations"] = self._notes(name, made)
        given = self._template.get("metadata", {})
        metadata = {part: {**(given.get(part) or {}), **own[part]} for part in own}
        return {"metadata": metadata, "spec": self._pod_spec(made, files, is_pooled=not name)}

    def _pod_spec(self, made: Made, files: Json | None, *, is_pooled: bool) -> Json:
        sizes = {"tmp": made.limits.tmp_mb, "shm": made.limits.shm_mb, "run": 1}
        volumes: list[Json] = [
            {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}
            for name, size in sizes.items()
        ]
        volumes.append({"name": WRITER, "emptyDir": {}})
        if made.network == "allowlist":
            shown = {"name": self.certificates, "defaultMode": 0o444}
            volumes.append({"name": _TRUST, "configMap": shown})
        file = self._config.seccomp_profile
        local = {"type": "Localhost", "localhostProfile": file}
        given = self._template.get("spec", {})
        stays = {"tolerations": [*given.get("tolerations", ()), *_STAYS]} if self.in_pod else {}
        return {
            **given,
            **stays,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            "terminationGracePeriodSeconds": 1,
            "dnsPolicy": "ClusterFirst" if made.network == "open" else "Default",
            "securityContext": {
                **AS_USER,
                "seccompProfile": local if file else {"type": "RuntimeDefault"},
            },
            "containers": [self._container(made, is_pooled=is_pooled)],
            "volumes": [*volumes, *([{"name": FILES, **files}] if files else [])],
        }

    def _container(self, made: Made, *, is_pooled: bool) -> Json:
        memory = f"{made.limits.memory_mb}Mi"
        usage = {"memory": memory, "cpu": f"{round(made.limits.cpus * 1000)}m"}
        least = round(min(self._config.cpu_request, made.limits.cpus) * 1000)
        kept = [{"name": FILES, "mountPath": path, "subPath": name} for name, path in _KEPT.items()]
        places = {"tmp": "/tmp", "shm": "/dev/shm", "run": _PLACE}  # noqa: S108 - the sandbox's
        own = [{"name": name, "mountPath": path} for name, path in places.items()]
        trusted = {_TRUST: CERTIFICATES} if made.network == "allowlist" else {}
        fixed = [
            {"name": name, "mountPath": path, "readOnly": True}
            for name, path in {WRITER: SKILLS, **trusted}.items()
        ]
        variables = self._variables(made, is_pooled=is_pooled)
        return {
            "name": OWN,
            "image": made.image,
            "imagePullPolicy": "IfNotPresent",
            "command": [*PYTHON, f"{OURS}/{MAIN}"],
            "workingDir": "/workspace",
            # The cluster expands $(NAME), unless it is told not to.
            "env": [{"name": k, "value": v.replace("$", "$$")} for k, v in variables.items()],
            "resources": {"limits": usage, "requests": {"memory": memory, "cpu": f"{least}m"}},
            "securityContext": RESTRICTED,
            "volumeMounts": [*kept, *own, *fixed],
        }

    def _variables(self, made: Made, *, is_pooled: bool) -> dict[str, str]:
        spec = SandboxSpec((), made.limits, made.network, made.env)
        limits = list_process_limits(spec)
        most = {getattr(resource, f"RLIMIT_{name.upper()}"): limits[name] for name in limits}
        if self._has_own_users:
            # Else it would count those of all pods of a node.
            most[resource.RLIMIT_NPROC] = made.limits.pids
        found = {
            **beside_pid_1(environment(spec, PATH)),
            "MCP_SANDBOX_TOKEN_PIPE": PIPE,
            "MCP_SANDBOX_RUNNER": made.runner,
            "MCP_SANDBOX_SOCKET": _SOCKET,
            "MCP_SANDBOX_IDLE_S": f"{max(made.idle_s, _UNSAVED_S if self.in_pod else 0):g}",
            "MCP_SANDBOX_PIDS": str(made.limits.pids),
            "MCP_SANDBOX_LIMITS": " ".join(f"{kind}:{each}" for kind, each in most.items()),
            "MCP_SANDBOX_WORKSPACE": "/workspace",
            "MCP_SANDBOX_HOME": HOME,
            **({} if is_pooled else {"MCP_SANDBOX_START_S": str(_START_S)}),
        }
        return dict(sorted(found.items()))

    def trial(self, name: str, command: list[str], network: str) -> Json:
        """Return a pod that runs a program of ours once, with nothing of a chat."""
        made = Made(self._config.image, "", Limits(memory_mb=128), "none", {}, 0)
        pod = self.template(made)
        labels, spec = pod["metadata"]["labels"], pod["spec"]
        (container,) = spec["containers"]
        own = [each for each in container["volumeMounts"] if each["name"] != FILES]
        container |= {"command": command, "volumeMounts": own, "workingDir": "/"}
        spec["activeDeadlineSeconds"] = 120
        return POD.body(name, {"labels": {**labels, **TRIAL, NETWORK: network}}, spec)

    def facts(self, made: Made, keeps_open: bool | None) -> SandboxFacts:
        """Return what holds in a pod that is not weaker; `keeps_open`: as `open` was tried."""
        limits, runtime = made.limits, self._template.get("spec", {}).get("runtimeClassName")
        own = self._config.seccomp_profile
        seccomp = f"seccomp profile {own}" if own else "the runtime's default seccomp profile only"
        none = "none, by a NetworkPolicy that the cluster enforces"
        reached = {
            True: "open, but for addresses of the cluster and of its machines",
            False: "open, also to the cluster's own addresses: it does not enforce NetworkPolicies",
            None: "open; whether to the cluster's own addresses too was not tried",
        }[keeps_open]
        return SandboxFacts(
            backend="kubernetes",
            image=made.image,
            isolation=f"pod ({runtime or 'default runtime'}), uid {USER}, no capabilities, "
            f"{seccomp}, read-only root",
            network=reached if made.network == "open" else none,
            limits={
                "memory": f"{limits.memory_mb} MiB (cgroup); `free` shows the node's",
                "cpus": f"{limits.cpus:g} (cgroup)",
                "pids": f"{limits.pids} (by the kernel, for the users of the pod)"
                if self._has_own_users
                else f"{limits.pids} left when a call begins (by the runner); the node's limit "
                "a pod, if it has one, for what a call starts",
                "shm": f"{limits.shm_mb} MiB",
                "tmp": f"{limits.tmp_mb} MiB, counted as memory",
                "open_files": f"{limits.open_files} a process",
                "file_size": f"{limits.file_mb} MiB a file",
            },
        )


@lru_cache(_MOST_ALIKE)
def _read_record(text: str) -> Made:
    """Return what is noted in an annotation; most sandboxes are made from the same."""
    note = json.loads(text)
    return Made(**{**note, "limits": Limits(**note["limits"])})


def claim_spec(size: str, storage_class: str) -> Json:
    """Return a claim for a volume."""
    return {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": size}},
        **({"storageClassName": storage_class} if storage_class else {}),
    }


def skill_writer(made: Made) -> Json:
    """Return the ephemeral container beside a sandbox's own that sees its skills, and no more."""
    return {
        "name": WRITER,
        "image": made.image,
        "imagePullPolicy": "IfNotPresent",
        # A first process ends at a signal only if it says so.
        "command": ["/bin/sh", "-c", "trap exit TERM; sleep infinity & wait"],
        # It may have no limits of its own: those of the pod hold for it.
        "resources": {},
        "securityContext": RESTRICTED,
        "volumeMounts": [_SKILLS_MOUNT],
    }


def relay_command(within_s: float, *, hands_over: bool = False) -> list[str]:
    """Return the command that joins an exec's streams to the runner."""
    first = ["--secret", PIPE] if hands_over else []
    return [*PYTHON, RELAY, *first, "--announce", _SOCKET, f"{within_s:g}"]
