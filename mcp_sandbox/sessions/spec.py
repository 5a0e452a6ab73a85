"""A digest of what a sandbox is made from, which tells whether one is as it should be. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from mcp_sandbox.models import SandboxSpec
from mcp_sandbox.workspace.directory import ChatDirectories

SPEC = "spec"
"""The label that holds it."""
STARTED = "started"
"""The label that holds when it was started, in seconds since the machine was."""


def started_s(labels: Mapping[str, str], now_s: float) -> float:
    """When a sandbox with these labels was started; now, where they do not tell."""
    try:
        return min(float(labels[STARTED]), now_s)
    except (KeyError, ValueError):
        return now_s


def marked(spec: SandboxSpec, origin: str, directories: ChatDirectories) -> SandboxSpec:
    """The spec with its digest among the labels; `origin` is what the backend makes it from.

    The digest is the same for chats whose sandboxes differ in nothing but whose files they show.
    """
    own = {directories.workspace: "workspace", directories.home: "home"}
    own |= {mount.source: mount.target for mount in directories.skills}
    shape = {
        "origin": origin,
        "limits": asdict(spec.limits),
        "network": spec.network,
        "env": dict(spec.env),
        "mounts": [[_shown(each.source, own), each.target, each.read_only] for each in spec.mounts],
    }
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
    return replace(spec, labels={**spec.labels, SPEC: digest})


def _shown(source: Path, own: Mapping[Path, str]) -> str:
    for tree, name in own.items():
        if source.is_relative_to(tree):
            return f"{name}/{source.relative_to(tree)}"
    return str(source)
