"""Holds what is sent to the published fields of Kubernetes, and of agents.x-k8s.io/v1beta1."""

import functools
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
from kubernetes_validate.utils import (  # type: ignore[import-untyped]
    SchemaNotFoundError,
    ValidationError,
)

VERSION = "1.36"
_SANDBOX = {"podTemplate", "volumeClaimTemplates", "service", "shutdownTime", "shutdownPolicy"}
_PER_MODE = {"operatingMode": {"Running", "Suspended"}, "shutdownPolicy": {"Retain", "Delete"}}
Json = dict[str, Any]


class Invalid(Exception):
    """An object has a field that is not published, or lacks one."""


def check(body: Json) -> None:
    """Raise Invalid for an object that an API server would not take."""
    if body["apiVersion"].startswith("agents.x-k8s.io/"):
        _check_sandbox(body)
        return
    try:
        kubernetes_validate.validate(body, VERSION, strict=True)
    except (ValidationError, SchemaNotFoundError) as exc:
        raise Invalid(str(getattr(exc, "message", exc))) from exc


def _check_sandbox(body: Json) -> None:
    spec = body["spec"]
    if unknown := spec.keys() - _SANDBOX - {"operatingMode"}:
        raise Invalid(f"unknown field spec.{min(unknown)}")
    for name, allowed in _PER_MODE.items():
        if spec.get(name, min(allowed)) not in allowed:
            raise Invalid(f"spec.{name}: {spec[name]}")
    template = spec["podTemplate"]
    if unknown := (template.keys() - {"metadata", "spec"}) | (
        template.get("metadata", {}).keys() - {"labels", "annotations"}
    ):
        raise Invalid(f"unknown field spec.podTemplate.{min(unknown)}")
    # The controller adds the volume of each claim.
    check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]})
    for claim in spec.get("volumeClaimTemplates", []):
        check({"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim})


@functools.cache
def warm_up() -> None:
    """Read the schemas once."""
    check({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x"}})
