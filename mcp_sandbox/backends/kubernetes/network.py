"""Keeps pods from the network by NetworkPolicies, and tries whether a cluster enforces them.

Not every cluster does, and none says so: a pod that may reach nothing tries to reach another.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
from anyio import to_thread

from mcp_sandbox.backends.kubernetes.client import POD, Json, Kind, Refused
from mcp_sandbox.backends.kubernetes.objects import (
    APP,
    INSTANCE,
    NETWORK,
    PYTHON,
    TRIAL,
    Renderer,
)
from mcp_sandbox.backends.kubernetes.verify import find_weaker
from mcp_sandbox.backends.kubernetes.watch import Found, Namespace, Row
from mcp_sandbox.errors import BackendUnavailable, ImageMissing, InsecureSandbox
from mcp_sandbox.models import INTERNET, RESERVED

POLICY = Kind("networking.k8s.io", "networkpolicies", "NetworkPolicy")
CONFIG_MAP = Kind("", "configmaps", "ConfigMap")
# How long it holds that a cluster enforces policies.
_TRIED_S = 86_400.0
_LOOK_AGAIN_S = 60.0
_POLL_S = 0.2
_TRIED = "mcp-sandbox.enforced"
_NAME = "mcp-sandbox-"
_PORT, _REACHED = 8080, 7
_LISTEN = [*PYTHON, "-m", "http.server", str(_PORT)]
# A refusal may be that of a policy, or come from one that does not listen yet.
_REACH = f"""
import socket, sys, time
deadline = time.monotonic() + 3
while time.monotonic() < deadline:
    try:
        socket.create_connection((sys.argv[1], {_PORT}), timeout=3).close()
    except ConnectionRefusedError:
        time.sleep(0.05)
    except OSError:
        break
    else:
        raise SystemExit({_REACHED})
"""


def _outside(network: str) -> Json:
    reserved = [each for each in RESERVED if (":" in each) == (":" in network)]
    return {"ipBlock": {"cidr": network, "except": reserved}}


def policies() -> list[Json]:
    """Return the NetworkPolicies of all sandboxes of a namespace, by their network."""
    dns = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    outside = [_outside(each) for each in INTERNET]
    rules: dict[str, list[Json]] = {
        "none": [],
        # What doors let out leaves by the channel.
        "allowlist": [],
        "open": [{"to": outside}, {"to": [dns], "ports": ports}],
    }
    return [
        POLICY.body(
            f"{_NAME}{network}",
            {"labels": APP},
            {
                "podSelector": {"matchLabels": {**APP, NETWORK: network}},
                "policyTypes": ["Ingress", "Egress"],
                **({"egress": egress} if egress else {}),
            },
        )
        for network, egress in rules.items()
    ]


class Network:
    """The networks of the sandboxes of one data root."""

    def __init__(self, namespace: Namespace, renderer: Renderer, certificates: Path) -> None:
        """`certificates`: the folder of what sandboxes with allowed hosts trust."""
        self._certificates = certificates
        self._namespace = namespace
        self._api = namespace.api
        self._image = namespace.config.image
        self._renderer = renderer
        self._look_at_s = 0.0
        self._trying = anyio.Lock()
        # The pod of a trial, until it is seen to begin.
        self.waits_for: Row | None = None
        # Whether policies keep pods of a network from others, as far as that was tried.
        self.enforced: dict[str, bool] = {}
        # What policies that are not ours, and allow something, are for.
        self._others: dict[str, Json] = {}
        self._shown: dict[str, str] = {}

    async def prepare(self, network: str) -> None:
        """Raise InsecureSandbox if pods that must have no network reach another pod."""
        if network == "allowlist":
            await self.show()
        async with self._trying:
            await self._check_policies(network)
            await self._try("open" if network == "open" else "none")

    async def _check_policies(self, network: str) -> None:
        # Somebody may have deleted them since, or added others.
        if time.monotonic() > self._look_at_s:
            pages = self._api.pages(POLICY)
            found = {p["metadata"]["name"]: p["spec"] async for page, _ in pages for p in page}
            for policy in policies():
                await self._put(policy, found.pop(policy["metadata"]["name"], None))
            self._others = {
                name: spec["podSelector"]
                for name, spec in found.items()
                if spec.get("egress") or spec.get("ingress")
            }
            self._look_at_s = time.monotonic() + _LOOK_AGAIN_S
        if network == "open":
            return
        for name, selector in self._others.items():
            if _selects(selector, self._renderer.trial("", [], network)["metadata"]["labels"]):
                self._look_at_s = 0.0
                ((app, value),) = APP.items()
                raise InsecureSandbox(
                    f"NetworkPolicy {name} lets sandboxes in or out too, which network: {network} "
                    f"keeps in: write podSelector: {{matchExpressions: [{{key: {app}, operator: "
                    f"NotIn, values: [{value}]}}]}} into it, or set network: open"
                )

    async def _try(self, network: str) -> None:
        """Try whether a policy is enforced, unless a server has seen that today."""
        if network in self.enforced:
            return
        policy = f"{_NAME}{network}"
        noted = (await self._api.get(POLICY, policy))["metadata"].get("annotations", {})
        tried = noted.get(_TRIED, "0")
        if not tried.isdecimal() or time.time() - int(tried) > _TRIED_S:
            if await self._reach_canary(network):
                self.enforced["open"] = False
                if network == "open":
                    return
                raise InsecureSandbox(
                    "this cluster does not enforce NetworkPolicies: a pod that should have no "
                    "network reached another pod. Install a network plugin that enforces them, or "
                    "set network: open if sandboxes may reach everything"
                )
            note = {"metadata": {"annotations": {_TRIED: f"{time.time():.0f}"}}}
            await self._api.patch(POLICY, policy, note)
        self.enforced[network] = True

    async def _put(self, policy: Json, found: Json | None) -> None:
        if found is None:
            await self._api.post(POLICY, policy)
        elif find_weaker(policy["spec"], found):
            reset = {"spec": {"egress": None, "ingress": None, **policy["spec"]}}
            await self._api.patch(POLICY, policy["metadata"]["name"], reset)

    async def show(self) -> None:
        """Have pods see the certificates as they are now; a cluster shows a change to those too."""
        files = await to_thread.run_sync(_read_files, self._certificates)
        name, own = self._renderer.certificates, {**APP, INSTANCE: self._renderer.instance}
        if not files or (files == self._shown and time.monotonic() <= self._look_at_s):
            return
        try:
            found = await self._api.get(CONFIG_MAP, name)
        except Refused:
            head = {"apiVersion": "v1", "kind": "ConfigMap"}
            await self._api.post(
                CONFIG_MAP, {**head, "metadata": {"name": name, "labels": own}, "data": files}
            )
        else:
            if found["metadata"].get("labels") != own:
                raise BackendUnavailable(
                    f"ConfigMap {name} has the certificates of another data root: set another "
                    "kubernetes.warm_pool, or delete it with kubectl if nothing uses it"
                )
            # A server with the same key may have put its own, which are as good.
            if files not in (self._shown, found.get("data")):
                await self._api.patch(CONFIG_MAP, name, {"data": files})
        self._shown = files

    async def _reach_canary(self, network: str) -> bool:
        """Return whether a pod of a network reaches another pod."""
        await self._sweep()
        number = secrets.token_hex(4)
        canary, prober = f"mcs-canary-{number}", f"mcs-probe-{number}"
        try:
            address = await self._run_trial(canary, _LISTEN, "canary", _read_address)
            command = [*PYTHON, "-c", _REACH, address]
            code = await self._run_trial(prober, command, network, lambda p: Row.of(p).exit_code)
        finally:
            with anyio.CancelScope(shield=True):
                for name in (canary, prober):
                    await self._api.delete(POD, name)
        if code not in (0, _REACHED):
            raise ImageMissing(
                f"the image {self._image} cannot run a program (exit code {code}): is it an image "
                "of `mcp-sandbox images build`?"
            )
        return code == _REACHED

    async def _sweep(self) -> None:
        """Delete what servers that were killed in their trial have left, once it has ended."""
        ((name, value),) = TRIAL.items()
        async for page, _ in self._api.pages(POD, labelSelector=f"{name}={value}"):
            for pod in page:
                if Row.of(pod).phase in ("Succeeded", "Failed"):
                    await self._api.delete(POD, pod["metadata"]["name"])

    async def _run_trial(
        self, name: str, command: list[str], network: str, read: Callable[[Json], Found | None]
    ) -> Found:
        """Start a pod of ours; return what `read` finds in its status."""
        await self._api.post(POD, self._renderer.trial(name, command, network))
        while (found := read(pod := await self._api.get(POD, name))) is None:
            self.waits_for = Row.of(pod)
            if cause := self._api.explain([self.waits_for.said], self._image):
                raise cause
            await anyio.sleep(_POLL_S)
        self.waits_for = None
        return found


def _selects(selector: Json, labels: Mapping[str, str]) -> bool:
    """Return whether a selector of Kubernetes takes what has these labels."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for each in selector.get("matchExpressions", ()):
        value = labels.get(each["key"])
        among = value in each.get("values", ())
        if not {
            "In": among,
            "NotIn": not among,
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }[each["operator"]]:
            return False
    return True


def _read_files(folder: Path) -> dict[str, str]:
    # Drafts of them begin with a dot.
    return {file.name: file.read_text() for file in folder.glob("[!.]*")}


def _read_address(pod: Json) -> str | None:
    return pod["status"].get("podIP") if Row.of(pod).phase == "Running" else None
