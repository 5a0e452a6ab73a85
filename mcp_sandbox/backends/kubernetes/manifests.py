"""What a cluster gets once, by somebody who may: a Role, a server, a quota and NetworkPolicies.

Nothing of it holds for the whole cluster. `RIGHTS` is also what `doctor` asks for, one by one.
"""

from typing import Any

from mcp_sandbox.backends.kubernetes.client import ApiServer
from mcp_sandbox.backends.kubernetes.network import policies
from mcp_sandbox.backends.kubernetes.objects import APP, USER
from mcp_sandbox.config import KubernetesConfig

Json = dict[str, Any]
NAME = "mcp-sandbox-server"
_PORT = 8080
_DATA = "/srv/mcp-sandbox"
_EACH = ("create", "get", "list", "watch", "patch", "delete")
# By group and resource.
RIGHTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("agents.x-k8s.io", "sandboxes"): _EACH,
    ("", "pods"): ("create", "get", "list", "watch", "delete"),
    # A WebSocket begins with GET; newer clusters ask for create all the same.
    ("", "pods/exec"): ("create", "get"),
    ("", "persistentvolumeclaims"): _EACH,
    ("", "events"): ("list",),
    ("networking.k8s.io", "networkpolicies"): ("create", "get", "patch"),
}


async def missing_rights(api: ApiServer, namespace: str, *, sandboxes: bool) -> list[str]:
    """Return the rights that this user lacks, such as "create pods". Raises OperatorError."""
    missing: list[str] = []
    for (group, resource), verbs in RIGHTS.items():
        if group.startswith("agents") and not sandboxes:
            continue
        kind, _, sub = resource.partition("/")
        for verb in verbs:
            asked = {"namespace": namespace, "group": group, "resource": kind, "verb": verb}
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {**asked, **({"subresource": sub} if sub else {})}},
            }
            path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            if not (await api.call("POST", path, body))["status"]["allowed"]:
                missing.append(f"{verb} {resource}")
    return missing


def manifests(config: KubernetesConfig, settings: str, *, chats: int, image: str) -> list[Json]:
    """Return all objects: a server of that `image` with `settings` (YAML), for so many chats."""
    own = {**APP, "app": NAME}
    return [
        _object("v1", "ServiceAccount", config),
        {
            **_object("rbac.authorization.k8s.io/v1", "Role", config),
            "rules": [
                {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
                for (group, resource), verbs in RIGHTS.items()
            ],
        },
        {
            **_object("rbac.authorization.k8s.io/v1", "RoleBinding", config),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": config.namespace}],
        },
        {**_object("v1", "ConfigMap", config), "data": {"config.yaml": settings}},
        _claim(config),
        _deployment(config, own, image),
        {
            **_object("v1", "Service", config),
            "spec": {"selector": own, "ports": [{"port": _PORT, "targetPort": _PORT}]},
        },
        {
            **_object("v1", "ResourceQuota", config),
            # Those that try the network, and the server itself, come beside.
            "spec": {"hard": {"pods": str(chats + 10), "persistentvolumeclaims": str(chats + 1)}},
        },
        *({**each, "metadata": _in(config, each["metadata"])} for each in policies()),
    ]


def _in(config: KubernetesConfig, metadata: Json) -> Json:
    return {**metadata, "namespace": config.namespace}


def _object(version: str, kind: str, config: KubernetesConfig) -> Json:
    return {"apiVersion": version, "kind": kind, "metadata": _in(config, {"name": NAME})}


def _claim(config: KubernetesConfig) -> Json:
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "10Gi"}},
    }
    if config.storage_class:
        spec["storageClassName"] = config.storage_class
    return {**_object("v1", "PersistentVolumeClaim", config), "spec": spec}


def _deployment(config: KubernetesConfig, labels: Json, image: str) -> Json:
    health = {"httpGet": {"path": "/health", "port": _PORT}, "periodSeconds": 15}
    mounts = {"data": _DATA, "config": "/etc/mcp-sandbox", "tmp": "/tmp"}  # noqa: S108 - its own
    container = {
        "name": "server",
        "image": image,
        "args": ["serve", "--config", "/etc/mcp-sandbox/config.yaml", "--http", f"0.0.0.0:{_PORT}"],
        "env": [
            {"name": "HOME", "value": _DATA},
            {"name": "MCP_SANDBOX_DATA_DIR", "value": _DATA},
        ],
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": health,
        "livenessProbe": {**health, "failureThreshold": 8},
        "resources": {
            "limits": {"memory": "2Gi"},
            "requests": {"memory": "512Mi", "cpu": "100m"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    pod = {
        "serviceAccountName": NAME,
        # It answers its calls and saves its chats first.
        "terminationGracePeriodSeconds": 90,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": NAME}},
            {"name": "config", "configMap": {"name": NAME}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return {
        **_object("apps/v1", "Deployment", config),
        "spec": {
            # Its data root is for one at a time.
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
