"""Reads the operator's additions to pods, and compares live pods with what was asked for."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mcp_sandbox.backends.kubernetes.client import Json
from mcp_sandbox.errors import ConfigError

# Where pods run and what they are called, not what they may do: a cluster adds to these of its own
# accord, and the operator may.
_PLACED = (
    *("affinity", "hostUsers", "imagePullSecrets", "nodeSelector", "priorityClassName"),
    *("schedulerName", "tolerations", "topologySpreadConstraints"),
)
_SPEC = (*_PLACED, "runtimeClassName")
_ALLOWED = re.compile(
    r"apiVersion|kind|metadata\.(labels|annotations)\.(?!app$|mcp-sandbox\.|agents\.x-k8s\.io/).+"
    rf"|spec\.({'|'.join(_SPEC)})\b.*"
)
# What else a cluster adds; anything else is a change.
_ADDED = re.compile(
    rf"spec\.({'|'.join(_PLACED)}|nodeName|serviceAccount(Name)?|priority|preemptionPolicy|overhead"
    r"|schedulingG(roup|ates)|resources|os)\b.*"
    # OpenShift keeps namespaces apart by these.
    r"|spec\.(containers\[sandbox\]\.)?securityContext\.seLinuxOptions\.level"
    r"|spec\.(containers\[sandbox\]|ephemeralContainers\[skills\])\.(terminationMessage(Path|Policy)"
    r"|resizePolicy\b.*|resources\.(requests|limits)\.ephemeral-storage|volumeMounts\[.*\]\.recursiveReadOnly)"
)
# Lists without an order of their own: a cluster adds to them anywhere.
_UNORDERED = ("tolerations", "topologySpreadConstraints")
_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_MOST_NAMED = 5
_UNSET = "not set"


def read_template(path: Path | None) -> Json:
    """Return the operator's template. Blocks; raises ConfigError."""
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text()) or {}
    except (OSError, ValueError, yaml.YAMLError) as exc:
        raise ConfigError(f"kubernetes.template: {path} cannot be read: {exc}") from exc
    refused = ["no mapping"] if not isinstance(found, dict) else []
    for name, value in _flatten("", found):
        if value in ({}, []):
            continue
        if not _ALLOWED.fullmatch(name) or (name == "spec.hostUsers" and value):
            refused.append(f"{name}: {str(value).lower() if isinstance(value, bool) else value}")
    if refused:
        raise ConfigError(
            f"kubernetes.template: {path} sets {', '.join(refused[:_MOST_NAMED])}: pods are the "
            "server's own, and a template may add metadata.labels and annotations, and of spec "
            f"{', '.join(_SPEC)}"
        )
    return {part: value or {} for part, value in found.items() if part in ("metadata", "spec")}


def find_weaker(wanted: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Return how the spec of a live pod differs from the wanted one, field by field."""
    own, found = _read_fields(wanted), _read_fields(live)
    return [
        f"{name} should be {_shorten(own.get(name, _UNSET))} and is "
        f"{_shorten(found.get(name, _UNSET))}"
        for name in {**own, **found}
        if not _is_same(own.get(name), found.get(name))
        and not (name not in own and _ADDED.fullmatch(name))
    ]


def _read_fields(spec: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of a spec by their paths; one that stands twice is there twice."""
    fields: dict[str, object] = {}
    for path, value in _flatten("spec", spec):
        fields[f"{path} (again)" if path in fields else path] = value
    return fields


def _flatten(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield what is set in a tree, with its path; entries of lists go by their names."""
    if isinstance(value, Mapping) and value:
        for name, each in value.items():
            yield from _flatten(f"{path}.{name}".removeprefix("."), each)
    elif isinstance(value, list) and value:
        for number, each in enumerate(value):
            yield from _flatten(f"{path}[{_name_entry(path, number, each)}]", each)
    elif value is not None and value != "":
        yield path, value


def _name_entry(path: str, number: int, entry: object) -> str:
    if path.endswith(_UNORDERED):
        return json.dumps(entry, sort_keys=True)
    if isinstance(entry, Mapping) and "name" in entry:
        return " ".join(filter(None, (str(entry["name"]), entry.get("mountPath"))))
    return str(number)


def _is_same(wanted: object, live: object) -> bool:
    return wanted == live or _quantity(wanted) == _quantity(live) is not None


def _quantity(value: object) -> float | None:
    """Return a quantity as a number: a cluster writes some of them in another way."""
    text = str(value)
    number = text.rstrip("mkKMGi")
    unit = text[len(number) :]
    return float(number) * _UNITS[unit] if number.isdecimal() and unit in _UNITS else None


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
