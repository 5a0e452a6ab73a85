"""Keeps pods from the network by NetworkPolicies, and tries whether a cluster enforces them.

Not every cluster does, and none says so: a pod that may reach nothing tries to reach another.
"""

import secrets
import time
from collections.abc import Callable

import anyio

from mcp_sandbox.backends.kubernetes.client import Refused
from mcp_sandbox.backends.kubernetes.inside import LISTEN, OTHER_RUNNER, REACH, REACHED, program
from mcp_sandbox.backends.kubernetes.namespace import NEVER, Found, Namespace
from mcp_sandbox.backends.kubernetes.objects import APP, NETWORK, Renderer
from mcp_sandbox.backends.kubernetes.verify import find_weaker
from mcp_sandbox.backends.kubernetes.watch import Json, Pod
from mcp_sandbox.errors import CapacityReached, ImageMissing, InsecureSandbox

_POLICIES = "/apis/networking.k8s.io/v1"
# How long it holds that a cluster enforces policies.
_TRIED_S = 86_400.0
_LOOK_AGAIN_S = 60.0
_TRIED = "mcp-sandbox.enforced"
# Networks that belong to a cluster or a machine, or to nobody.
_INNER = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4"),
)
_INNER_6 = ("::1/128", "64:ff9b::/96", "fc00::/7", "fe80::/10", "ff00::/8")


def policies() -> list[Json]:
    """Return the NetworkPolicies of all sandboxes of a namespace, by their network."""
    dns = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
    ports = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    outside = [
        {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(_INNER)}},
        {"ipBlock": {"cidr": "::/0", "except": list(_INNER_6)}},
    ]
    rules: dict[str, list[Json]] = {
        "none": [],
        "open": [{"to": outside}, {"to": [dns], "ports": ports}],
    }
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": f"mcp-sandbox-{network}", "labels": APP},
            "spec": {
                "podSelector": {"matchLabels": {**APP, NETWORK: network}},
                "policyTypes": ["Ingress", "Egress"],
                **({"egress": egress} if egress else {}),
            },
        }
        for network, egress in rules.items()
    ]


class Network:
    """The networks of the sandboxes of one data root."""

    def __init__(self, namespace: Namespace, renderer: Renderer, runner: str) -> None:
        self._namespace = namespace
        self._api = namespace.api
        self._config = namespace.config
        self._renderer = renderer
        self._runner = runner
        self._look_at_s = 0.0
        self._is_tried = False

    async def prepare(self, network: str) -> None:
        """Raise InsecureSandbox if pods that must have no network reach another pod."""
        # Somebody may have deleted them since.
        if time.monotonic() > self._look_at_s:
            for policy in policies():
                await self._put(policy)
            self._look_at_s = time.monotonic() + _LOOK_AGAIN_S
        if network == "open" or self._is_tried:
            return
        path = self._api.path("networkpolicies", "mcp-sandbox-none", _POLICIES)
        noted = (await self._api.call("GET", path))["metadata"].get("annotations", {})
        tried = noted.get(_TRIED, "0")
        if not tried.isdecimal() or time.time() - int(tried) > _TRIED_S:
            await self._reach_canary()
            note = {"metadata": {"annotations": {_TRIED: f"{time.time():.0f}"}}}
            await self._api.call("PATCH", path, note)
        self._is_tried = True

    async def _put(self, policy: Json) -> None:
        path, name = self._api.path("networkpolicies", base=_POLICIES), policy["metadata"]["name"]
        try:
            found = await self._api.call("GET", f"{path}/{name}")
        except Refused:
            await self._namespace.post(path, policy)
            return
        if find_weaker(policy["spec"], found["spec"]):
            reset = {"spec": {"egress": None, "ingress": None, **policy["spec"]}}
            await self._api.call("PATCH", f"{path}/{name}", reset)

    async def _reach_canary(self) -> None:
        number = secrets.token_hex(4)
        canary, prober = f"mcs-canary-{number}", f"mcs-probe-{number}"
        try:
            address = await self._run_trial(canary, program(LISTEN), "canary", _address)
            command = program(REACH, self._runner, address)
            code = await self._run_trial(prober, command, "none", _exit_code)
        finally:
            with anyio.CancelScope(shield=True):
                for name in (canary, prober):
                    await self._namespace.delete(self._api.path("pods", name))
        if code == OTHER_RUNNER:
            raise explain_runner(self._config.image)
        if code == REACHED:
            raise InsecureSandbox(
                "this cluster does not enforce NetworkPolicies: a pod that should have no network "
                "reached another pod. Install a network plugin that enforces them, or set "
                "network: open if sandboxes may reach everything"
            )
        if code != 0:
            raise ImageMissing(
                f"the image {self._config.image} cannot run a program (exit code {code}): is it "
                "an image of `mcp-sandbox images build`?"
            )

    async def _run_trial(
        self, name: str, command: list[str], network: str, read: Callable[[Json], Found | None]
    ) -> Found:
        """Start a pod of ours; return what `read` finds in its status."""
        body = self._renderer.trial(name, command, network)
        path = self._api.path("pods", name)
        await self._namespace.post(self._api.path("pods"), body)
        with anyio.move_on_after(self._config.start_timeout):
            while True:
                pod = await self._api.call("GET", path)
                row = Pod.of(pod, lambda _: [])
                if (found := read(pod)) is not None:
                    return found
                if row.reason in NEVER:
                    raise ImageMissing(
                        f"the image {self._config.image} cannot be run ({row.reason}: "
                        f"{row.message.strip()}): push it where the cluster finds it, or set "
                        "kubernetes.image"
                    )
                await anyio.sleep(0.1)
        raise CapacityReached(await self._namespace.explain_wait(name, row))


def _address(pod: Json) -> str | None:
    return pod["status"].get("podIP") if pod.get("status", {}).get("phase") == "Running" else None


def _exit_code(pod: Json) -> int | None:
    return Pod.of(pod, lambda _: []).exit_code


def explain_runner(image: str) -> ImageMissing:
    """Return the error for an image that must be built anew."""
    return ImageMissing(
        f"the image {image} holds another version of the runner, or none: build it again with "
        "`mcp-sandbox images build`, push it, and set kubernetes.image"
    )
