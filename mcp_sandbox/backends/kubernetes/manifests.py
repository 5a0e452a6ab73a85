"""What a cluster gets once, by somebody who may: a Role, a server, a quota and NetworkPolicies.

Nothing of it holds for the whole cluster. `RIGHTS` is also what `doctor` asks for, one by one.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from anyio import to_thread

from mcp_sandbox.backends.kubernetes.client import ApiServer, Json, Refused
from mcp_sandbox.backends.kubernetes.network import policies
from mcp_sandbox.backends.kubernetes.objects import (
    AS_USER,
    RESTRICTED,
    SHAPE,
    WARM_POOL,
    Made,
    Renderer,
    claim_spec,
)
from mcp_sandbox.backends.kubernetes.verify import read_template
from mcp_sandbox.backends.runner_copy import runner_digest
from mcp_sandbox.config import Config, KubernetesConfig
from mcp_sandbox.models import SandboxSpec

NAME, _RBAC = "mcp-sandbox-server", "rbac.authorization.k8s.io"
_PORT = 8080
_DATA, _FILES = "/srv/mcp-sandbox", "/etc/mcp-sandbox"
_SETTINGS, _TEMPLATE = "config.yaml", "pod.yaml"
_EACH = ("create", "get", "list", "watch", "patch", "delete")
_POOLS = "extensions.agents.x-k8s.io"
# By group and resource.
RIGHTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("agents.x-k8s.io", "sandboxes"): _EACH,
    (_POOLS, "sandboxclaims"): _EACH,
    (_POOLS, "sandboxwarmpools"): ("get",),
    ("", "pods"): _EACH,
    # A WebSocket begins with GET; newer clusters ask for create all the same.
    ("", "pods/exec"): ("create", "get"),
    # Skills are put into a pod by a second container.
    ("", "pods/ephemeralcontainers"): ("patch",),
    ("", "persistentvolumeclaims"): _EACH,
    ("", "events"): ("list",),
    # The certificates of sandboxes with allowed hosts.
    ("", "configmaps"): ("create", "get", "patch"),
    ("networking.k8s.io", "networkpolicies"): ("create", "get", "list", "patch"),
}


def usual(config: Config) -> tuple[Renderer, Made]:
    """Return what sandboxes are made by and from, unless their chat asks for more. Blocks."""
    template = read_template(config.kubernetes.template)
    renderer = Renderer(config.kubernetes, template, b"", config.workspace.size_limit)
    own = (), config.limits.values(), config.network, config.env
    spec = SandboxSpec(*own, idle_s=config.sessions.orphaned)
    return renderer, Made.of(spec, config.kubernetes.image, runner_digest())


async def examine_pool(api: ApiServer, config: Config) -> tuple[Literal["ok", "warn"], str, str]:
    """Return how the warm pool is, what is found, and what to do. Raises OperatorError."""
    name, remedy = config.kubernetes.warm_pool, "apply `mcp-sandbox kubernetes manifests` again"
    renderer, made = await to_thread.run_sync(usual, config)
    try:
        pool = await api.get(WARM_POOL, name)
    except Refused as exc:
        return "warn", f"{name}: sandboxes begin cold ({exc})", remedy
    if pool["metadata"].get("annotations", {}).get(SHAPE) != renderer.shape(made):
        return "warn", f"{name} is made from other settings: sandboxes begin cold", remedy
    ready = pool.get("status", {}).get("readyReplicas", 0)
    return "ok", f"{name}: {ready} sandboxes are ready", ""


@dataclass(frozen=True)
class Values:
    """What differs between installations. `pods` is the quota, `warm` the size of the pool."""

    namespace: str
    image: str
    settings: str
    pods: str
    volumes: str
    warm: int | str
    replicas: int | str


# What stands in their place until a chart is written.
_CHART = Values(
    "<<.Release.Namespace>>",
    "<<.Values.image | quote>>",
    "<<.Values.settings | quote>>",
    "<<add .Values.chats .Values.warm 10 | quote>>",
    "<<add .Values.chats 1 | quote>>",
    "<<.Values.warm>>",
    "<<.Values.replicas>>",
)


async def missing_rights(api: ApiServer, config: KubernetesConfig) -> list[str]:
    """Return the rights that this user lacks, such as "create pods". Raises OperatorError."""
    unused = {"agents.x-k8s.io": config.objects == "pod", _POOLS: not config.warm_pool}
    head = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    path = f"/apis/{head['apiVersion']}/selfsubjectaccessreviews"
    missing: list[str] = []
    for group, resource, verb in ((*key, verb) for key, verbs in RIGHTS.items() for verb in verbs):
        if unused.get(group):
            continue
        named = dict(zip(("resource", "subresource"), resource.split("/"), strict=False))
        asked = {"namespace": config.namespace, "group": group, "verb": verb, **named}
        answer = await api.call("POST", path, {**head, "spec": {"resourceAttributes": asked}})
        if not answer["status"]["allowed"]:
            missing.append(f"{verb} {resource}")
    return missing


def manifests(config: Config, values: Values) -> list[Json]:
    """Return all objects. Blocks; raises ConfigError."""
    own, files, shares = {"app": NAME}, {_SETTINGS: values.settings}, bool(config.fleet.redis)
    if config.kubernetes.template:
        files[_TEMPLATE] = yaml.safe_dump(read_template(config.kubernetes.template))
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for (group, resource), verbs in RIGHTS.items()
    ]
    role = {"apiGroup": _RBAC, "kind": "Role", "name": NAME}
    user = {"kind": "ServiceAccount", "name": NAME, "namespace": values.namespace}
    claim = claim_spec("10Gi", config.kubernetes.storage_class)
    quota = {"pods": values.pods, "persistentvolumeclaims": values.volumes}
    found: list[Json] = [
        _object("v1", "ServiceAccount"),
        _object(f"{_RBAC}/v1", "Role", rules=rules),
        _object(f"{_RBAC}/v1", "RoleBinding", roleRef=role, subjects=[user]),
        _object("v1", "ConfigMap", data=files),
        *([] if shares else [_object("v1", "PersistentVolumeClaim", spec=claim)]),
        _deployment(own, values, [*files], shares=shares),
        _object("v1", "Service", spec={"selector": own, "ports": [{"port": _PORT}]}),
        _object("v1", "ResourceQuota", spec={"hard": quota}),
        *policies(),
    ]
    if config.kubernetes.warm_pool:
        renderer, made = usual(config)
        found += renderer.pool(made, values.warm)
    for each in found:
        each["metadata"] = {**each["metadata"], "namespace": values.namespace}
    return found


def write_chart(config: Config, folder: Path, version: str, values: Json) -> None:
    """Write a Helm chart that has these values unless it is given others. Blocks; OSError."""
    about = {"apiVersion": "v2", "name": "mcp-sandbox", "version": version}
    text = yaml.safe_dump_all(manifests(config, _CHART), sort_keys=False)
    # What looks like a template in the operator's settings is none.
    text = re.sub("'?<<([^<>]*)>>'?", r"{{ \1 }}", text.replace("{{", '{{ "{{" }}'))
    (folder / "templates").mkdir(parents=True, exist_ok=True)
    for name, body in (("Chart", about), ("values", values)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(body, sort_keys=False))
    (folder / "templates" / "all.yaml").write_text(text)


def _object(version: str, kind: str, **parts: object) -> Json:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": NAME}, **parts}


def _deployment(labels: Json, values: Values, files: list[str], *, shares: bool) -> Json:
    """Return the server; those that share chats have each a name, an address and files."""
    # A probe names the pod's address otherwise, by which the server is not known.
    known = [{"name": "Host", "value": "localhost"}]
    health = {"httpGet": {"path": "/health", "port": _PORT, "httpHeaders": known}}
    mounts = {"data": _DATA, "config": _FILES, "tmp": "/tmp"}  # noqa: S108 - its own
    own = {"MCP_SANDBOX_FLEET__NAME": "metadata.name", "POD_IP": "status.podIP"} if shares else {}
    settings = {
        "CONFIG": f"{_FILES}/{_SETTINGS}",
        # A volume's own folder is root's.
        "DATA_DIR": f"{_DATA}/data",
        "BACKEND": "kubernetes",
        "KUBERNETES__NAMESPACE": values.namespace,
        "KUBERNETES__CONTEXT": "",
        **({"KUBERNETES__TEMPLATE": f"{_FILES}/{_TEMPLATE}"} if _TEMPLATE in files else {}),
        **({"FLEET__URL": f"http://$(POD_IP):{_PORT}"} if shares else {}),
    }
    variables = {"HOME": _DATA, **{f"MCP_SANDBOX_{name}": each for name, each in settings.items()}}
    container = {
        "name": "server",
        "image": values.image,
        "args": ["serve", "--http", f"0.0.0.0:{_PORT}"],
        "env": [
            *({"name": k, "valueFrom": {"fieldRef": {"fieldPath": v}}} for k, v in own.items()),
            *({"name": name, "value": value} for name, value in variables.items()),
        ],
        # Keys that the settings name as env:NAME.
        "envFrom": [{"secretRef": {"name": NAME, "optional": True}}],
        "readinessProbe": health,
        "livenessProbe": {**health, "periodSeconds": 15, "failureThreshold": 8},
        "resources": {
            "limits": {"memory": "2Gi"},
            "requests": {"memory": "512Mi", "cpu": "100m"},
        },
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    claim = {"persistentVolumeClaim": {"claimName": NAME}}
    pod = {
        "serviceAccountName": NAME,
        # Its own Service's address would be read as a setting.
        "enableServiceLinks": False,
        # It answers its calls and saves its chats first.
        "terminationGracePeriodSeconds": 90,
        "securityContext": {**AS_USER, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [
            {"name": "data", **({"emptyDir": {}} if shares else claim)},
            {"name": "config", "configMap": {"name": NAME}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    spec = {
        "replicas": values.replicas if shares else 1,
        # A data root is for one at a time.
        "strategy": {"type": "RollingUpdate" if shares else "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return _object("apps/v1", "Deployment", spec=spec)
