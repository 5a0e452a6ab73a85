"""What an operator or a cluster has set up wrongly is said by name, before anything runs."""

import copy
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.backends.kubernetes.client import ApiServer, Kind
from mcp_sandbox.backends.kubernetes.network import POLICY
from mcp_sandbox.backends.kubernetes.objects import LABELS, RECORD, SEAL, VOLUME, Made, Renderer
from mcp_sandbox.backends.kubernetes.verify import find_weaker, read_template
from mcp_sandbox.config import Config, KubernetesConfig
from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    ConfigError,
    ImageMissing,
    InsecureSandbox,
    InvalidArgument,
    OperatorError,
)
from mcp_sandbox.models import ChatId, Limits, SandboxSpec
from mcp_sandbox.sessions.manager import SessionManager
from tests.conftest import in_cluster
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.store import Change, default_pod

CHAT = ChatId("tester", "refused")
IDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", fullmatch=True)


async def refusal(data_root: Path, **given: object) -> OperatorError:
    """Why the first call of a chat is refused."""
    async with open_manager(in_cluster(data_root, **given)) as manager:
        session = await manager.session(CHAT)
        with pytest.raises(OperatorError) as refused:
            await session.exec("true")
    return refused.value


@asynccontextmanager
async def soon_out_of_time(config: Config) -> AsyncGenerator[SessionManager]:
    """Give a pod two seconds, once the network was tried and one chat has a pod."""
    short = config.kubernetes.model_copy(update={"start_timeout": 2.0})
    async with open_manager(config) as first:
        await (await first.session(ChatId("tester", "first"))).exec("true")
        async with open_manager(config.model_copy(update={"kubernetes": short})) as manager:
            yield manager


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"context": "elsewhere"}, "No such context elsewhere"),
        ({"namespace": "nowhere"}, "kubectl create namespace nowhere"),
    ],
)
async def test_what_names_no_place_is_said(
    fake: Cluster, data_root: Path, given: dict[str, object], words: str
) -> None:
    error = await refusal(data_root, **given)
    assert isinstance(error, BackendUnavailable)
    assert words in str(error)


async def test_without_a_cluster_it_says_what_to_set(
    fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    said = "KUBECONFIG is /nowhere): set it or kubernetes.context"
    assert said in str(await refusal(data_root))


async def test_a_server_that_never_answered_is_named_long_before_a_pod_may_take(
    fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig(server="http://127.0.0.1:9")))
    with anyio.fail_after(20):
        assert "http://127.0.0.1:9" in str(await refusal(data_root, start_timeout="600s"))


async def test_an_expired_token_is_read_again_once_then_told(
    fake: Cluster, data_root: Path
) -> None:
    fake.token = "another"
    assert "its token has expired" in str(await refusal(data_root))
    asked = [path for path in fake.requests if path == "/apis/agents.x-k8s.io"]
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("create", "pods"),
        ("list", "pods"),
        ("watch", "pods"),
        ("create", "persistentvolumeclaims"),
        ("list", "persistentvolumeclaims"),
        ("create", "pods/exec"),
        ("get", "networkpolicies"),
    ],
)
async def test_a_missing_right_is_named(
    fake: Cluster, data_root: Path, verb: str, resource: str
) -> None:
    fake.forbidden.add((verb, resource))
    told = str(await refusal(data_root, start_timeout="2s"))
    assert (
        f"apply the Role of `mcp-sandbox kubernetes manifests`, which allows {resource}: {verb}"
        in told
    )


async def test_a_server_that_has_not_read_its_roles_yet_is_waited_for(
    fake: Cluster, data_root: Path
) -> None:
    async with aclosing(ApiServer(in_cluster(data_root).kubernetes)) as api:
        # What is asked, and its version, each twice.
        fake.answers += [(403, {})] * 4
        assert "gitVersion" in await api.call("GET", "/version")
        assert not fake.answers


async def test_an_image_that_no_node_finds_is_named(fake: Cluster, data_root: Path) -> None:
    error = await refusal(data_root, image="mcp-sandbox/none:none")
    assert isinstance(error, ImageMissing)
    assert "mcp-sandbox/none:none" in str(error)
    await fake.until(fake.is_empty)


async def test_an_image_without_our_runner_runs_nothing(fake: Cluster, data_root: Path) -> None:
    error = await refusal(data_root, image="mcp-sandbox/debian:trixie")
    assert isinstance(error, ImageMissing)
    assert "another version of the runner, or none" in str(error)
    await fake.until(fake.is_empty)


async def test_objects_that_are_too_old_are_refused_in_words(
    fake: Cluster, data_root: Path
) -> None:
    fake.has_sandboxes = ["v1alpha1"]
    assert "v1alpha1: install agent-sandbox 0.5" in str(await refusal(data_root))


async def test_a_quota_and_a_full_cluster_are_told_in_time(fake: Cluster, data_root: Path) -> None:
    async with soon_out_of_time(in_cluster(data_root)) as manager:
        session = await manager.session(CHAT)
        fake.store.quota = 1
        with pytest.raises(CapacityReached, match=r"exceeded quota.*mcp-sandbox stop"):
            await session.exec("true")
        fake.store.quota, fake.node.full = 100, "0/3 nodes are available: insufficient memory"
        with pytest.raises(CapacityReached, match="insufficient memory"):
            await session.exec("true")
        fake.node.full = ""
        # Whatever was begun has been taken back.
        assert (await session.exec("echo now")).stdout == "now\n"
        assert len(fake.names("persistentvolumeclaims")) == len(fake.names("pods")) == 2


async def test_a_claim_that_is_never_bound_is_told_in_time(fake: Cluster, data_root: Path) -> None:
    async with soon_out_of_time(in_cluster(data_root)) as manager:
        fake.node.binds_claims = False
        session = await manager.session(CHAT)
        with anyio.fail_after(10), pytest.raises(CapacityReached, match="unbound immediate"):
            await session.exec("true")
        fake.node.binds_claims = True
        assert (await session.exec("echo now")).stdout == "now\n"


async def test_why_a_container_is_not_made_is_told_from_its_events(
    fake: Cluster, data_root: Path
) -> None:
    async with soon_out_of_time(in_cluster(data_root)) as manager:
        fake.store.listeners.append(partial(fail_to_mount, fake))
        with pytest.raises(CapacityReached, match=r"Multi-Attach error.*make room"):
            await (await manager.session(CHAT)).exec("true")
        fake.store.listeners.pop()


def fail_to_mount(fake: Cluster, change: Change) -> None:
    """Keep a new pod where a node keeps it whose volume is still at another."""
    if (change.plural, change.kind) != ("pods", "ADDED"):
        return
    fake.node.full = "anything"
    metadata = change.found["metadata"]
    creating = {"waiting": {"reason": "ContainerCreating"}}
    status = {"containerStatuses": [{"name": "sandbox", "state": creating}]}
    fake.store.set("pods", metadata["name"], {"status": status})
    fake.store.warn(change.found, "FailedAttachVolume", "Multi-Attach error for volume")


@pytest.mark.parametrize("limited", ["pods", "persistentvolumeclaims"])
async def test_a_quota_that_a_controller_meets_is_told(
    fake: Cluster, data_root: Path, limited: str
) -> None:
    fake.has_sandboxes = ["v1beta1"]
    async with soon_out_of_time(in_cluster(data_root)) as manager:
        fake.store.limited, fake.store.quota = limited, 1
        with pytest.raises(CapacityReached, match="exceeded quota"):
            await (await manager.session(CHAT)).exec("true")


async def test_policies_that_somebody_deleted_are_there_again(
    fake: Cluster, data_root: Path
) -> None:
    fake.forget_trials()
    async with open_manager(in_cluster(data_root)) as manager:
        await (await manager.session(CHAT)).exec("true")
    assert fake.names("networkpolicies") == [
        "mcp-sandbox-allowlist",
        "mcp-sandbox-none",
        "mcp-sandbox-open",
    ]


async def test_what_a_server_left_that_was_killed_in_its_trial_goes(
    fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = ApiServer.delete

    async def killed(api: ApiServer, kind: Kind, name: str) -> None:
        if not name.startswith("mcs-probe-"):
            await delete(api, kind, name)

    async def try_network(chat: str) -> None:
        fake.forget_trials()
        async with open_manager(in_cluster(data_root)) as manager:
            await (await manager.session(ChatId("tester", chat))).exec("true")

    with monkeypatch.context() as patch:
        patch.setattr(ApiServer, "delete", killed)
        await try_network("first")
    (left,) = (name for name in fake.names("pods") if name.startswith("mcs-probe-"))
    await try_network("second")
    await fake.until(lambda: left not in fake.names("pods"))


async def test_a_cluster_without_policies_gives_no_sandbox(fake: Cluster, data_root: Path) -> None:
    fake.node.enforces_policies = False
    fake.forget_trials()
    error = await refusal(data_root)
    assert isinstance(error, InsecureSandbox)
    assert "does not enforce NetworkPolicies" in str(error)
    await fake.until(fake.is_empty)


def expression(key: str, operator: str, *values: str) -> dict[str, object]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": [*values]}]}


DNS = {"egress": [{"ports": [{"protocol": "UDP", "port": 53}]}]}


@pytest.mark.parametrize(
    ("selector", "rules", "opens"),
    [
        ({}, DNS, True),
        ({}, {"ingress": [{}]}, True),
        ({}, {}, False),
        ({"matchLabels": {"team": "blue"}}, DNS, True),
        ({"matchLabels": {"app": "another"}}, DNS, False),
        (expression("app", "In", "mcp-sandbox"), DNS, True),
        (expression("app", "Exists"), DNS, True),
        (expression("app", "NotIn", "mcp-sandbox"), DNS, False),
        (expression("app", "DoesNotExist"), DNS, False),
    ],
)
async def test_a_policy_that_opens_what_ours_close_is_named(
    fake: Cluster,
    data_root: Path,
    tmp_path: Path,
    selector: dict[str, object],
    rules: dict[str, object],
    opens: bool,
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text("metadata: {labels: {team: blue}}")
    spec = {"podSelector": selector, "policyTypes": ["Ingress", "Egress"], **rules}
    fake.do(fake.store.add, "networkpolicies", POLICY.body("baseline", {}, spec))
    async with open_backend("kubernetes", in_cluster(data_root, template=template)) as backend:
        try:
            with pytest.raises(InsecureSandbox, match="baseline") if opens else nullcontext():
                await backend.create(SandboxSpec(()))
        finally:
            fake.delete("networkpolicies", "baseline")
        await backend.create(SandboxSpec(()))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("spec: {hostNetwork: true}", "spec.hostNetwork: true"),
        (
            "spec: {containers: [{securityContext: {privileged: true}}]}",
            "spec.containers[0].securityContext.privileged: true",
        ),
        ("spec: {volumes: [{hostPath: {path: /}}]}", "spec.volumes[0].hostPath.path: /"),
        ("spec: {containers: [{command: [sh]}]}", "spec.containers[0].command[0]: sh"),
        ("spec: {serviceAccountName: admin}", "spec.serviceAccountName: admin"),
        ("spec: {hostUsers: true}", "spec.hostUsers: true"),
        ("metadata: {labels: {mcp-sandbox.network: open}}", "metadata.labels.mcp-sandbox.network"),
        ("runtimeClassName: gvisor", "runtimeClassName: gvisor"),
        ("[1]", "no mapping"),
        ("spec: {", "cannot be read"),
    ],
)
def test_a_template_that_would_weaken_a_pod_is_refused_by_name(
    tmp_path: Path, text: str, name: str
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_template(file)
    assert name in str(refused.value)


async def test_what_a_template_adds_is_in_the_pod(
    fake: Cluster, data_root: Path, tmp_path: Path
) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text("metadata: {labels: {team: a}}\nspec: {nodeSelector: {disk: fast}}\n")
    async with open_manager(in_cluster(data_root, template=str(file))) as manager:
        await (await manager.session(CHAT)).exec("true")
        (pod,) = fake.store.objects["pods"].values()
    assert pod["spec"]["nodeSelector"] == {"disk": "fast"}
    assert pod["metadata"]["labels"]["team"] == "a"


Weaken = Callable[[dict[str, Any]], object]
WEAKER: dict[str, Weaken] = {
    "privileged": lambda pod: own(pod)["securityContext"].update(privileged=True),
    "capabilities": lambda pod: own(pod)["securityContext"].update(capabilities={"add": ["ALL"]}),
    "a further capability": lambda pod: own(pod)["securityContext"]["capabilities"].update(
        add=["NET_ADMIN"]
    ),
    "unmasked /proc": lambda pod: own(pod)["securityContext"].update(procMount="Unmasked"),
    "writable root": lambda pod: own(pod)["securityContext"].pop("readOnlyRootFilesystem"),
    "root": lambda pod: pod["securityContext"].update(runAsUser=0),
    "seccomp": lambda pod: pod["securityContext"].update(seccompProfile={"type": "Unconfined"}),
    "SELinux": lambda pod: pod["securityContext"].update(seLinuxOptions={"type": "spc_t"}),
    "host network": lambda pod: pod.update(hostNetwork=True),
    "host processes": lambda pod: pod.update(hostPID=True),
    "account": lambda pod: pod.update(automountServiceAccountToken=True),
    "command": lambda pod: own(pod).update(command=["sh"]),
    "image": lambda pod: own(pod).update(image="other:1"),
    "memory": lambda pod: own(pod)["resources"]["limits"].update(memory="8Gi"),
    "sidecar": lambda pod: pod["containers"].append({"name": "other"}),
    "init": lambda pod: pod.update(initContainers=[{"name": "other"}]),
    "debugger": lambda pod: pod.update(ephemeralContainers=[{"name": "other"}]),
    "volume": lambda pod: pod["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
    "variable": lambda pod: own(pod)["env"].append({"name": "LD_PRELOAD", "value": "/x"}),
    "start code": lambda pod: own(pod).update(lifecycle={"postStart": {"exec": {}}}),
    "hosts": lambda pod: pod.update(hostAliases=[{"ip": "1.1.1.1", "hostnames": ["a"]}]),
}


def own(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["containers"][0]
    return found


@pytest.mark.parametrize("change", WEAKER.values(), ids=WEAKER)
def test_a_pod_that_came_out_otherwise_is_noticed(change: Weaken) -> None:
    render = Renderer(KubernetesConfig(), {}, b"key", 1)
    pod = render.pod("p", Made("image:1", "", Limits(), "none", {"A": "b"}, 60))
    live = copy.deepcopy(pod)
    default_pod(live)
    for each in (live["spec"], own(live["spec"])):
        each["securityContext"]["seLinuxOptions"] = {"level": "s0:c26,c5"}
    assert not find_weaker(pod["spec"], live["spec"])
    change(live["spec"])
    assert find_weaker(pod["spec"], live["spec"])


def test_what_is_noted_of_a_sandbox_cannot_be_put_elsewhere() -> None:
    render = Renderer(KubernetesConfig(), {}, b"key", 1)
    made = Made("image:1", "", Limits(), "none", {"A": "b"}, 60, labels={"user": "u"})
    notes = render.owner(VOLUME, "p", made)["metadata"]["annotations"]
    assert render.read("p", notes) == made
    assert render.read("other", notes) is None
    moved = {RECORD: notes[RECORD] + notes[LABELS], LABELS: "", SEAL: notes[SEAL]}
    assert render.read("p", moved) is None


@given(st.tuples(IDS, IDS), st.tuples(IDS, IDS))
def test_two_chats_never_share_a_name(one: tuple[str, str], other: tuple[str, str]) -> None:
    render = Renderer(KubernetesConfig(), {}, b"key", 1)
    named = [render.name({"user": user, "chat": chat}) for user, chat in (one, other)]
    assert (named[0] == named[1]) == (one == other)
    assert all(len(name) <= 63 and name == name.lower() and name[-1].isalnum() for name in named)


def test_names_that_differ_in_case_alone_are_two() -> None:
    render = Renderer(KubernetesConfig(), {}, b"key", 1)
    assert render.name({"user": "u", "chat": "A"}) != render.name({"user": "u", "chat": "a"})


async def test_chats_whose_names_are_nearly_alike_have_their_own_files(
    fake: Cluster, data_root: Path
) -> None:
    long = "x" * 127
    chats = [ChatId("tester", name) for name in ("Chat", "chat", f"{long}1", f"{long}2")]
    async with open_manager(in_cluster(data_root)) as manager:
        for chat in chats:
            await (await manager.session(chat)).exec(f"echo {chat.chat} > name")
        for chat in chats:
            assert (await (await manager.session(chat)).exec("cat *")).stdout == f"{chat.chat}\n"
        assert len(fake.names("persistentvolumeclaims")) == len(chats)
        with pytest.raises(InvalidArgument):
            await manager.session(ChatId("tester", "übung"))


async def test_two_data_roots_do_not_see_each_other(fake: Cluster, tmp_path: Path) -> None:
    async with open_manager(in_cluster(tmp_path / "one")) as manager:
        await (await manager.session(CHAT)).exec("true")
        async with open_backend("kubernetes", in_cluster(tmp_path / "two")) as other:
            assert await other.running() == []
