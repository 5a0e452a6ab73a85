"""What is sent for a sandbox: a Sandbox of agents.x-k8s.io, or a Pod and its claim.

Both are made from one pod template. What a sandbox was made from is noted in an annotation, under
a seal that only servers of the same data root can make.
"""

import hashlib
import hmac
import json
import re
import resource
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mcp_sandbox.backends.kubernetes.inside import BOOT, PLACE, SOCKET, program
from mcp_sandbox.backends.runner_copy import beside_pid_1, environment
from mcp_sandbox.backends.sandbox_records import new_id
from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.models import Limits, Network, SandboxFacts, SandboxId, SandboxSpec

Json = dict[str, Any]
SANDBOXES = "/apis/agents.x-k8s.io/v1beta1"
APP = {"app": "mcp-sandbox"}
INSTANCE, NETWORK = "mcp-sandbox.instance", "mcp-sandbox.network"
RECORD, SEAL, LABELS = "mcp-sandbox.record", "mcp-sandbox.seal", "mcp-sandbox.labels"
FILES = "files"
HOME = "/home/sandbox"
PATH = f"{HOME}/.local/bin:/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
USER = 10001
_MEMLOCK = 64 * 1024
_NOT_READABLE = re.compile(r"[^a-z0-9]+")
# Below the claim; a claim's own root may hold a folder of its file system.
_KEPT = {"workspace": "/workspace", "home": HOME, "skills": "/opt/skills"}


@dataclass(frozen=True)
class Made:
    """What a sandbox is made from: all that its pod depends on, beside the configuration."""

    image: str
    runner: str
    limits: Limits
    network: Network
    env: Mapping[str, str]
    idle_s: float

    @classmethod
    def of(cls, spec: SandboxSpec, image: str, runner: str) -> "Made":
        """Return what a spec asks for."""
        network: Network = "open" if spec.network == "open" else "none"
        return cls(spec.image or image, runner, spec.limits, network, dict(spec.env), spec.idle_s)


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

    def name(self, labels: Mapping[str, str]) -> SandboxId:
        """Return a name that no sandbox of another chat has; a new one where labels name none."""
        if not {"user", "chat"} <= labels.keys():
            return new_id()
        whose = "\0".join((self.instance, labels["user"], labels["chat"]))
        readable = _NOT_READABLE.sub("-", f"{labels['user']}-{labels['chat']}".lower())
        digest = hashlib.sha256(whose.encode()).hexdigest()[:32]
        return SandboxId(f"mcs-{readable[:25].strip('-')}-{digest}")

    def token(self, pod_uid: str) -> bytes:
        """Return the secret of the channels to one pod."""
        return hmac.digest(self._key, b"channel " + pod_uid.encode(), "sha256")

    def read(self, name: str, annotations: Mapping[str, str]) -> Made | None:
        """Return what a sandbox was made from; None if somebody changed that."""
        text = annotations.get(RECORD, "")
        if not hmac.compare_digest(annotations.get(SEAL, ""), self._seal(name, text)):
            return None
        note = json.loads(text)
        return Made(**{**note, "limits": Limits(**note["limits"])})

    def _seal(self, name: str, text: str) -> str:
        return hmac.digest(self._key, f"record {name} {text}".encode(), "sha256").hex()

    def _metadata(self, name: str, made: Made) -> Json:
        text = json.dumps(asdict(made), sort_keys=True)
        return {
            "labels": {**APP, INSTANCE: self.instance, NETWORK: made.network},
            "annotations": {RECORD: text, SEAL: self._seal(name, text)},
        }

    def _owner_metadata(self, name: str, made: Made, labels: Mapping[str, str]) -> Json:
        found = self._metadata(name, made)
        note = {**found["annotations"], LABELS: json.dumps(dict(labels))}
        return {"name": name, "labels": found["labels"], "annotations": note}

    def claim(self, name: str, made: Made, labels: Mapping[str, str]) -> Json:
        """Return the claim that is a sandbox where there are only pods."""
        metadata = self._owner_metadata(name, made, labels)
        kind = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
        return {**kind, "metadata": metadata, "spec": self._claim_spec()}

    def pod(self, name: str, made: Made) -> Json:
        """Return the pod beside a claim of the same name."""
        template = self.template(name, made, claim=name)
        metadata = {"name": name, **template["metadata"]}
        return {"apiVersion": "v1", "kind": "Pod", **template, "metadata": metadata}

    def sandbox(self, name: str, made: Made, labels: Mapping[str, str]) -> Json:
        """Return the Sandbox that has the same pod and claim."""
        claim = {"metadata": {"name": FILES}, "spec": self._claim_spec()}
        return {
            "apiVersion": SANDBOXES.removeprefix("/apis/"),
            "kind": "Sandbox",
            "metadata": self._owner_metadata(name, made, labels),
            "spec": {
                "podTemplate": self.template(name, made),
                "volumeClaimTemplates": [claim],
                "service": False,
                "operatingMode": "Running",
                "shutdownPolicy": "Retain",
            },
        }

    def _claim_spec(self) -> Json:
        chosen = {"storageClassName": self._config.storage_class}
        return {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": str(self._size)}},
            **(chosen if self._config.storage_class else {}),
        }

    def template(self, name: str, made: Made, claim: str = "") -> Json:
        """Return metadata and spec of the pod; a Sandbox's controller adds its claim's volume."""
        own, given = self._metadata(name, made), self._template.get("metadata", {})
        metadata = {kind: {**given.get(kind, {}), **own[kind]} for kind in own}
        return {"metadata": metadata, "spec": self._pod_spec(made, claim)}

    def _pod_spec(self, made: Made, claim: str) -> Json:
        volumes = [
            _memory("tmp", made.limits.tmp_mb),
            _memory("shm", made.limits.shm_mb),
            _memory("run", 1),
        ]
        if claim:
            volumes.append({"name": FILES, "persistentVolumeClaim": {"claimName": claim}})
        return {
            **self._template.get("spec", {}),
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "hostname": "sandbox",
            "terminationGracePeriodSeconds": 1,
            "dnsPolicy": "ClusterFirst" if made.network == "open" else "Default",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": self._seccomp(),
            },
            "containers": [self._container(made)],
            "volumes": volumes,
        }

    def _seccomp(self) -> Json:
        file = self._config.seccomp_profile
        local = {"type": "Localhost", "localhostProfile": file}
        return local if file else {"type": "RuntimeDefault"}

    def _container(self, made: Made) -> Json:
        memory = f"{made.limits.memory_mb}Mi"
        usage = {"memory": memory, "cpu": f"{round(made.limits.cpus * 1000)}m"}
        kept = [{"name": FILES, "mountPath": path, "subPath": name} for name, path in _KEPT.items()]
        places = {"tmp": "/tmp", "shm": "/dev/shm", "run": PLACE}  # noqa: S108 - the sandbox's
        own = [{"name": name, "mountPath": path} for name, path in places.items()]
        return {
            "name": "sandbox",
            "image": made.image,
            "imagePullPolicy": "IfNotPresent",
            "command": program(BOOT),
            "workingDir": "/workspace",
            "env": [{"name": key, "value": _plain(each)} for key, each in _environment(made)],
            "resources": {"limits": usage, "requests": {"memory": memory, "cpu": "50m"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [*kept, *own],
        }

    def trial(self, name: str, command: list[str], network: str) -> Json:
        """Return a pod that runs a program of ours once, with nothing of a chat."""
        made = Made(self._config.image, "", Limits(), "none", {}, 0)
        pod = self.pod(name, replace(made, limits=replace(made.limits, memory_mb=128)))
        pod["metadata"]["labels"] = {**APP, NETWORK: network}
        del pod["metadata"]["annotations"]
        (container,) = pod["spec"]["containers"]
        own = [each for each in container["volumeMounts"] if each["name"] != FILES]
        container |= {"command": command, "volumeMounts": own, "workingDir": "/"}
        pod["spec"]["volumes"] = [each for each in pod["spec"]["volumes"] if each["name"] != FILES]
        pod["spec"]["activeDeadlineSeconds"] = 120
        return pod

    def facts(self, made: Made) -> SandboxFacts:
        """Return what holds in such a pod, once `verify` found nothing weaker."""
        limits, runtime = made.limits, self._template.get("spec", {}).get("runtimeClassName")
        own = self._config.seccomp_profile
        seccomp = f"seccomp profile {own}" if own else "the runtime's default seccomp profile only"
        words = {
            "none": "none, by a NetworkPolicy that the cluster enforces",
            "open": "open, but for addresses of the cluster and of its machines",
        }
        return SandboxFacts(
            backend="kubernetes",
            image=made.image,
            isolation=f"pod ({runtime or 'default runtime'}), uid {USER}, no capabilities, "
            f"{seccomp}, read-only root",
            network=words.get(made.network, made.network),
            limits={
                "memory": f"{limits.memory_mb} MiB (cgroup)",
                "cpus": f"{limits.cpus:g} (cgroup)",
                "pids": f"{limits.pids} (by the runner; the node's own limit a pod above it)",
                "shm": f"{limits.shm_mb} MiB",
                "tmp": f"{limits.tmp_mb} MiB, counted as memory",
                "open_files": f"{limits.open_files} a process",
                "file_size": f"{limits.file_mb} MiB a file",
            },
        )


def _memory(name: str, size_mb: int) -> Json:
    return {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size_mb}Mi"}}


def _plain(value: str) -> str:
    """Return a value that the cluster leaves as it is: it expands $(NAME)."""
    return value.replace("$", "$$")


def _environment(made: Made) -> list[tuple[str, str]]:
    spec = SandboxSpec((), made.limits, made.network, made.env)
    values = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: _MEMLOCK,
        resource.RLIMIT_NOFILE: made.limits.open_files,
        resource.RLIMIT_FSIZE: made.limits.file_mb << 20,
    }
    found = {
        **beside_pid_1(environment(spec, PATH, HOME)),
        "MCP_SANDBOX_TOKEN_FILE": f"{PLACE}/token",
        "MCP_SANDBOX_SOCKET": SOCKET,
        "MCP_SANDBOX_IDLE_S": f"{made.idle_s:g}",
        "MCP_SANDBOX_PIDS": str(made.limits.pids),
        "MCP_SANDBOX_LIMITS": " ".join(f"{kind}:{most}" for kind, most in values.items()),
        "MCP_SANDBOX_WORKSPACE": "/workspace",
        "MCP_SANDBOX_HOME": HOME,
    }
    return sorted(found.items())
