"""Reads the operator's additions to pods, and compares live pods with what was asked for."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mcp_sandbox.errors import ConfigError

Json = dict[str, Any]
# What the operator may add: where pods run and what they are called, not what they may do.
_SPEC = {
    *("runtimeClassName", "nodeSelector", "tolerations", "affinity", "imagePullSecrets"),
    *("priorityClassName", "schedulerName", "topologySpreadConstraints", "hostUsers"),
}
_METADATA = {"labels", "annotations"}
_OURS = ("mcp-sandbox.", "agents.x-k8s.io/")
_MOST_NAMED = 5

# What a cluster adds to a pod of its own accord; anything else is a change.
_ADDED = {
    "spec": {
        *("nodeName", "schedulerName", "serviceAccountName", "serviceAccount", "priority"),
        *("priorityClassName", "preemptionPolicy", "tolerations", "overhead", "nodeSelector"),
        *("affinity", "topologySpreadConstraints", "imagePullSecrets", "securityContext"),
        *("hostUsers", "schedulingGates", "resources", "os", "schedulingGroup"),
    },
    "containers": {"terminationMessagePath", "terminationMessagePolicy", "resizePolicy"},
    "volumeMounts": {"recursiveReadOnly"},
    "requests": {"ephemeral-storage"},
    "limits": {"ephemeral-storage"},
}
# Where a pod runs, which a runtime class narrows further.
_PLACING = ("nodeSelector", "affinity")


def read_template(path: Path | None) -> Json:
    """Return the operator's template. Blocks; raises ConfigError."""
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise ConfigError(f"kubernetes.template: {path} cannot be read: {exc}") from exc
    if refused := list(_refused(found))[:_MOST_NAMED]:
        raise ConfigError(
            f"kubernetes.template: {path} sets {', '.join(refused)}: pods are the server's own, "
            f"and a template may add metadata.labels and annotations, and of spec "
            f"{', '.join(sorted(_SPEC))}"
        )
    return {part: value for part, value in dict(found).items() if part in ("metadata", "spec")}


def _refused(found: object) -> Iterator[str]:
    """Yield what a template may not set, by name."""
    if not isinstance(found, dict):
        yield "no mapping"
        return
    allowed = {"metadata": _METADATA, "spec": _SPEC}
    for part, value in found.items():
        if part in ("apiVersion", "kind"):
            continue
        if part not in allowed or not isinstance(value, dict):
            yield from _leaves(str(part), value)
            continue
        for name, each in value.items():
            if name not in allowed[part]:
                yield from _leaves(f"{part}.{name}", each)
            elif part == "metadata":
                ours = (key for key in dict(each or {}) if key == "app" or key.startswith(_OURS))
                yield from (f"metadata.{name}.{key}" for key in ours)
    if dict(found.get("spec") or {}).get("hostUsers"):
        yield "spec.hostUsers: true"


def _leaves(path: str, value: object) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _leaves(f"{path}.{name}", each)
    elif isinstance(value, list) and value:
        for number, each in enumerate(value):
            yield from _leaves(f"{path}[{number}]", each)
    else:
        yield f"{path}: {str(value).lower() if isinstance(value, bool) else value}"


def find_weaker(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Return how the spec of a live pod differs from the wanted one, field by field.

    Where the wanted one names no tolerations and the like, those of the cluster are no change.
    """
    return list(_differences("spec", "spec", wanted, live))


def _differences(path: str, kind: str, wanted: object, live: object) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        for name in wanted:
            yield from _differences(f"{path}.{name}", name, wanted[name], live.get(name))
        added = _ADDED.get(kind, set())
        for name in live.keys() - wanted.keys() - added if kind not in _PLACING else ():
            if live[name]:
                yield f"{path}.{name} should not be set and is {_short(live[name])}"
    elif isinstance(wanted, list) and isinstance(live, list):
        yield from _list_differences(path, kind, wanted, live)
    elif (wanted or live) and not _is_same(wanted, live):
        yield f"{path} should be {_short(wanted)} and is {_short(live)}"


def _list_differences(path: str, kind: str, wanted: list[Any], live: list[Any]) -> Iterator[str]:
    if kind == "tolerations":
        # A cluster adds its own to every pod.
        live = [each for each in live if each in wanted]
    if len(wanted) != len(live):
        yield f"{path} should have {len(wanted)} entries and has {len(live)}"
        return
    for number, (own, other) in enumerate(zip(wanted, live, strict=True)):
        yield from _differences(f"{path}[{number}]", kind, own, other)


def _is_same(wanted: object, live: object) -> bool:
    return wanted == live or _quantity(wanted) == _quantity(live) is not None


def _quantity(value: object) -> float | None:
    """Return a quantity as a number: a cluster writes some of them in another way."""
    units = {"m": 1e-3, "": 1.0, "k": 1e3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
    text = str(value)
    number = text.rstrip("mkKMGi")
    unit = text[len(number) :]
    return float(number) * units[unit] if number.isdecimal() and unit in units else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
