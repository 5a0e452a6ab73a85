"""Holds what is sent to the published fields of Kubernetes, and of agents.x-k8s.io/v1beta1."""

import functools
import re
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents  # type: ignore[import-untyped]
from referencing import Registry, Resource

Json = dict[str, Any]
VERSION = "1.36"
_FOLDER = f"kubernetes-json-schema/v{VERSION}.0-local-strict"
_TEXT: Json = {"type": "string"}


def _fields(**properties: Json) -> Json:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _core(name: str) -> Json:
    return {"$ref": f"{_published('_definitions')['$id']}#/$defs/io.k8s.api.core.v1.{name}"}


@functools.cache
def _published(name: str) -> Json:
    found: Json = schema_contents(f"{_FOLDER}/{name}.json", VERSION)
    return found


def _specs() -> dict[str, Json]:
    """Return the fields of the kinds of agent-sandbox, of those that are used."""
    texts = {"type": "object", "additionalProperties": _TEXT}
    labelled = _fields(labels=texts, annotations=texts)
    named = _fields(metadata=_fields(name=_TEXT), spec=_core("PersistentVolumeClaimSpec"))
    shared = {
        "podTemplate": _fields(metadata=labelled, spec=_core("PodSpec")),
        "volumeClaimTemplates": {"type": "array", "items": named},
        "service": {"type": "boolean"},
    }
    return {
        "Sandbox": _fields(
            **shared,
            operatingMode={"enum": ["Running", "Suspended"]},
            shutdownPolicy={"enum": ["Retain", "Delete"]},
            shutdownTime=_TEXT,
        ),
        "SandboxTemplate": _fields(
            **shared, networkPolicyManagement={"enum": ["Managed", "Unmanaged"]}
        ),
        "SandboxWarmPool": _fields(
            replicas={"type": "integer", "minimum": 0},
            sandboxTemplateRef=_fields(name=_TEXT),
            updateStrategy=_fields(type={"enum": ["Recreate", "OnReplenish"]}),
        ),
        "SandboxClaim": _fields(warmPoolRef=_fields(name=_TEXT), additionalPodMetadata=labelled),
    }


@functools.cache
def _validator(kind: str, version: str) -> Draft202012Validator:
    if "agents.x-k8s.io/" in version:
        found = _fields(apiVersion=_TEXT, kind=_TEXT, metadata={}, spec=_specs()[kind])
    else:
        found = _published(f"{kind.lower()}-{re.sub('[.].*/|/', '-', version)}")
    definitions = Resource.from_contents(_published("_definitions"))
    return Draft202012Validator(found, registry=definitions @ Registry())


def find_error(body: Json) -> str:
    """Return what an API server would refuse an object for; nothing if it takes it."""
    errors = _validator(body["kind"], body["apiVersion"]).iter_errors(body)
    return next((f"{each.json_path}: {each.message}" for each in errors), "")
