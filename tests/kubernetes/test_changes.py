"""What somebody has changed of a sandbox's objects with kubectl is noticed, and put right."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.errors import BackendUnavailable
from mcp_sandbox.models import ChatId
from tests.conftest import in_cluster
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.test_faults import CHAT, lost, pod_of, session_on


async def test_a_pod_that_somebody_changed_is_ended(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        pod = fake.store.objects["pods"][name]
        (container,) = pod["spec"]["containers"]
        changed = {"spec": {"containers": [{**container, "image": "other/image:1"}]}}
        told = await lost(session, lambda: fake.change("pods", name, changed))
        assert "somebody changed it in the cluster" in told
        assert (await session.exec("cat file")).stdout == "kept\n"
        (pod,) = fake.store.objects["pods"].values()
        assert pod["spec"]["containers"][0]["image"] != "other/image:1"
        other = {**container, "name": "skills", "image": "other/image:1", "resources": {}}
        beside = {"spec": {"ephemeralContainers": [other]}}
        told = await lost(session, lambda: fake.do(fake.store.set, "pods", pod_of(fake), beside))
        assert "somebody changed it in the cluster" in told


async def test_the_label_that_policies_choose_by_is_watched(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        news = {"metadata": {"labels": {"mcp-sandbox.network": "other"}}}
        told = await lost(session, lambda: fake.do(fake.store.set, "pods", name, news))
        assert "somebody changed it in the cluster" in told
        assert (await session.exec("cat file")).stdout == "kept\n"


Edit = Callable[[dict[str, Any], dict[str, Any]], object]
# At that time its controller would delete the sandbox, with its volume.
AT_A_TIME = {"shutdownTime": "2040-01-01T00:00:00Z", "shutdownPolicy": "Delete"}
EDITS: dict[str, Edit] = {
    "image": lambda pod, _: pod["spec"]["containers"][0].update(image="other/image:1"),
    "addition": lambda pod, _: pod["spec"].update(hostNetwork=True),
    "labels": lambda pod, _: pod["metadata"]["labels"].update({"mcp-sandbox.network": "open"}),
    "annotations": lambda pod, _: pod["metadata"]["annotations"].update(
        {"mcp-sandbox.record": "{}"}
    ),
    "time": lambda _, spec: spec.update(AT_A_TIME),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
async def test_a_sandbox_that_somebody_changed_is_ended_and_goes_on_as_it_was_made(
    fake: Cluster, data_root: Path, edit: Edit
) -> None:
    fake.has_sandboxes = ["v1beta1"]
    async with session_on(data_root) as session:
        name, sandboxes = pod_of(fake), fake.store.objects["sandboxes"]
        ours = sandboxes[name]["spec"]
        changed = deepcopy(ours)
        edit(changed["podTemplate"], changed)
        assert "somebody changed it" in await lost(
            session, lambda: fake.change("sandboxes", name, {"spec": changed})
        )
        # Not only when it is used again.
        assert not AT_A_TIME.items() & sandboxes[name]["spec"].items()
        assert (await session.exec("cat file")).stdout == "kept\n"
        assert sandboxes[name]["spec"] == ours


async def test_a_changed_template_ends_no_pod_that_alone_has_the_files(
    fake: Cluster, data_root: Path
) -> None:
    fake.has_sandboxes = ["v1beta1"]
    async with session_on(data_root, storage="backups") as session:
        name, sandboxes = pod_of(fake), fake.store.objects["sandboxes"]
        template = {"podTemplate": {"spec": {"hostNetwork": True}}}
        fake.change("sandboxes", name, {"spec": {**template, **AT_A_TIME}})
        await fake.until(lambda: not AT_A_TIME.items() & sandboxes[name]["spec"].items())
        assert (await session.exec("sleep 0.5; cat file")).stdout == "kept\n"
        # What its controller makes from it is.
        await lost(session, lambda: fake.delete("pods", name))
        assert (await session.exec("echo again")).stdout == "again\n"
        (pod,) = fake.store.objects["pods"].values()
        assert "hostNetwork" not in pod["spec"]


async def test_a_mode_that_somebody_changed_costs_no_file(fake: Cluster, data_root: Path) -> None:
    fake.has_sandboxes = ["v1beta1"]
    async with session_on(data_root) as session:
        name = pod_of(fake)
        suspended, woken = ({"spec": {"operatingMode": mode}} for mode in ("Suspended", "Running"))
        told = await lost(session, lambda: fake.change("sandboxes", name, suspended))
        assert "somebody deleted it in the cluster" in told
        fake.change("sandboxes", name, woken)
        assert (await session.exec("cat file")).stdout == "kept\n"
        assert len(fake.names("pods")) == 1


@pytest.mark.parametrize(
    ("note", "text"), [("labels", None), ("labels", "[]"), ("record", "{}"), ("seal", "\u00fc")]
)
async def test_notes_that_somebody_changed_cost_no_file_and_no_other_chat(
    fake: Cluster, data_root: Path, note: str, text: str | None
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        ours = fake.store.objects["persistentvolumeclaims"][name]["metadata"]["annotations"]
        news = {"metadata": {"annotations": {f"mcp-sandbox.{note}": text}}}
        fake.change("persistentvolumeclaims", name, news)
        await lost(session, lambda: fake.delete("pods", name))
        with pytest.raises(BackendUnavailable, match="somebody changed what is noted"):
            await session.exec("cat file")
        async with open_manager(in_cluster(data_root)) as other:
            assert (await (await other.session(ChatId("tester", "other"))).exec("true")).success
        fake.change("persistentvolumeclaims", name, {"metadata": {"annotations": ours}})
        async with open_manager(in_cluster(data_root)) as other:
            assert (await (await other.session(CHAT)).exec("cat file")).stdout == "kept\n"


async def test_a_sandbox_that_lost_its_labels_is_not_taken_for_another(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        owners = "sandboxes" if kind == "sandboxes" else "persistentvolumeclaims"
        ours = fake.store.objects[owners][name]["metadata"]["labels"]
        other = {"metadata": {"labels": {"mcp-sandbox.instance": "other"}}}
        fake.do(fake.store.set, owners, name, other)
        await lost(session, lambda: fake.delete("pods", name))
        with pytest.raises(BackendUnavailable, match="labelled as that of another data root"):
            await session.exec("cat file")
        fake.do(fake.store.set, owners, name, {"metadata": {"labels": ours}})
        assert (await session.exec("cat file")).stdout == "kept\n"
        assert len(fake.names("persistentvolumeclaims")) == 1
