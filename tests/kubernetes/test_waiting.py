"""Who waits for a pod holds up no other chat, and is told in time why none begins."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, KubernetesConfig
from mcp_sandbox.errors import BackendUnavailable, CapacityReached, ImageMissing, OperatorError
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from tests.conftest import in_cluster
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import SetUp

logger = logging.getLogger(__name__)

PAUSED, CHAT = ChatId("tester", "paused"), ChatId("tester", "first")
# Clients give up a call after 60 s.
PATIENCE_S = 55.0
# What is known to be in vain is told long before a pod is given up.
AT_ONCE_S = 12.0
FULL = "0/3 nodes are available: 3 Insufficient memory"


def roomy(config: Config) -> Config:
    """Let the server have more sandboxes open than the cluster has places."""
    most = config.sessions.model_copy(update={"max_open": 64, "max_per_user": 64})
    return config.model_copy(update={"sessions": most})


async def refused(manager: SessionManager, chat: ChatId) -> OperatorError:
    with pytest.raises(OperatorError) as told:
        await (await manager.session(chat)).exec("true")
    return told.value


async def wait_beside(manager: SessionManager, fake: Cluster, chats: int) -> tuple[float, float]:
    """Return how long a paused chat takes to go on beside new ones, and the last of these."""
    took_s: list[float] = []

    async def begin(number: int) -> None:
        error = await refused(manager, ChatId("tester", f"new-{number}"))
        took_s.append(anyio.current_time() - began_s)
        assert isinstance(error, CapacityReached)

    began_s, found = anyio.current_time(), fake.store.objects["pods"]
    async with anyio.create_task_group() as tasks:
        for number in range(chats):
            tasks.start_soon(begin, number)
        # At least so many have been asked for, and wait.
        await fake.until(lambda: sum("-new-" in name for name in found) >= min(chats, 8))
        called_s = anyio.current_time()
        session = await manager.session(PAUSED)
        assert (await session.exec("cat file")).stdout == "kept\n"
        paused_s = anyio.current_time() - called_s
    assert len(took_s) == chats
    return paused_s, max(took_s)


async def pause_one(manager: SessionManager) -> None:
    session = await manager.session(PAUSED)
    await session.exec("echo kept > file")
    await manager.pause(PAUSED)


@pytest.mark.timeout(90)
async def test_a_paused_chat_goes_on_at_once_beside_many_that_wait_for_a_full_cluster(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(roomy(in_cluster(data_root, start_timeout="8s"))) as manager:
        await pause_one(manager)
        fake.node.full, fake.node.placed = FULL, "-paused-"
        paused_s, last_s = await wait_beside(manager, fake, 20)
        assert paused_s < 5
        # Less than two turns of waiting, whose removal takes a few seconds.
        assert last_s < 8 + 7
        await fake.until(lambda: len(fake.names("pods")) == 1)


@pytest.mark.whole
@pytest.mark.timeout(180)
async def test_twenty_new_chats_on_a_full_cluster_are_told_before_their_clients_give_up(
    fake: Cluster, data_root: Path
) -> None:
    fake.has_sandboxes = ["v1beta1"]
    async with open_manager(roomy(in_cluster(data_root))) as manager:
        await pause_one(manager)
        fake.node.full, fake.node.placed = FULL, "-paused-"
        paused_s, last_s = await wait_beside(manager, fake, 20)
    logger.info("goes on after %.1f s; the last is told after %.1f s", paused_s, last_s)
    assert paused_s < 5
    assert last_s < PATIENCE_S


@pytest.mark.timeout(90)
async def test_a_paused_chat_needs_nothing_of_a_quota_that_new_ones_have_used_up(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(roomy(in_cluster(data_root))) as manager:
        await pause_one(manager)
        fake.store.limited, fake.store.quota = "persistentvolumeclaims", 1
        with anyio.fail_after(AT_ONCE_S):
            async with anyio.create_task_group() as tasks:
                for number in range(10):
                    tasks.start_soon(refused, manager, ChatId("tester", f"new-{number}"))
                session = await manager.session(PAUSED)
                assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_network_that_is_tried_on_a_full_cluster_is_tried_once_for_all_that_wait(
    fake: Cluster, data_root: Path
) -> None:
    fake.forget_trials()
    fake.node.full = FULL
    async with open_manager(roomy(in_cluster(data_root, start_timeout="3s"))) as manager:
        told: list[OperatorError] = []

        async def begin(number: int) -> None:
            told.append(await refused(manager, ChatId("tester", f"new-{number}")))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for number in range(10):
                    tasks.start_soon(begin, number)
    assert all(isinstance(each, CapacityReached) and FULL in str(each) for each in told)
    tried = [path for path in fake.requests if "/mcs-canary-" in path]
    assert len(set(tried)) == 1


def template(text: str) -> Callable[[Path], dict[str, object]]:
    def write(folder: Path) -> dict[str, object]:
        (folder / "pod.yaml").write_text(text)
        return {"template": folder / "pod.yaml"}

    return write


@dataclass(frozen=True)
class Cause:
    """What is wrong in a cluster, or in the settings, and what is said of it."""

    says: str
    error: type[OperatorError] = BackendUnavailable
    breaks: Callable[[Cluster], None] = lambda _: None
    given: Callable[[Path], dict[str, object]] = lambda _: {}


def limit(plural: str, fake: Cluster) -> None:
    fake.store.limited, fake.store.quota = plural, len(fake.names(plural))


def refuse(why: str, fake: Cluster) -> None:
    fake.store.refusals["pods"] = why


def lack_users(fake: Cluster) -> None:
    fake.node.has_users = False


CAUSES = {
    "pods' quota": Cause(
        r"exceeded quota: q, .*mcp-sandbox stop", CapacityReached, partial(limit, "pods")
    ),
    "claims' quota": Cause(
        *(r"exceeded quota: q, .*mcp-sandbox stop", CapacityReached),
        partial(limit, "persistentvolumeclaims"),
    ),
    "class of volumes": Cause(
        r'"fast" not found.*kubernetes\.storage_class', given=lambda _: {"storage_class": "fast"}
    ),
    "class of runtimes": Cause(
        r'"gvisor" not found.*kubernetes\.template',
        breaks=partial(refuse, 'pod rejected: RuntimeClass "gvisor" not found'),
        given=template("spec: {runtimeClassName: gvisor}"),
    ),
    "class of priorities": Cause(
        r"no PriorityClass with name high was found.*kubernetes\.template",
        breaks=partial(refuse, "no PriorityClass with name high was found"),
        given=template("spec: {priorityClassName: high}"),
    ),
    "rules of the namespace": Cause(
        r"violates PodSecurity.*what refuses it",
        breaks=partial(refuse, 'violates PodSecurity "restricted:latest": seccompProfile'),
    ),
    "users of pods": Cause(
        r"does not support user namespaces.*take hostUsers out",
        breaks=lack_users,
        given=template("spec: {hostUsers: false}"),
    ),
    "filter of system calls": Cause(
        r"cannot load seccomp profile.*mcp-sandbox kubernetes seccomp",
        given=lambda _: {"seccomp_profile": "absent.json"},
    ),
    "name of the image": Cause(
        r"mcp-sandbox/none:none.*push the image",
        ImageMissing,
        given=lambda _: {"image": "mcp-sandbox/none:none"},
    ),
}


@pytest.mark.parametrize("name", CAUSES)
async def test_what_no_waiting_mends_is_told_at_once_with_what_mends_it(
    kind: str, fake: Cluster, data_root: Path, tmp_path: Path, name: str
) -> None:
    cause = CAUSES[name]
    async with open_manager(in_cluster(data_root)) as first:
        await (await first.session(CHAT)).exec("true")
        cause.breaks(fake)
        # Of one data root servers have the same settings.
        other = in_cluster(tmp_path / "other", **cause.given(tmp_path))
        async with open_manager(other) as manager:
            with anyio.fail_after(AT_ONCE_S):
                error = await refused(manager, ChatId("tester", "second"))
    assert isinstance(error, cause.error)
    assert re.search(cause.says, " ".join(str(error).split())), error


async def test_a_claim_whose_pool_is_not_whole_is_told_at_once(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    config = in_cluster(data_root, storage="backups", warm_pool="warm")
    await set_up(config, 1)
    fake.delete("sandboxtemplates", "warm")
    told: list[OperatorError] = []
    async with open_manager(config) as manager:
        await manager.list()

        async def begin(name: str) -> None:
            try:
                await (await manager.session(ChatId("tester", name))).exec("true")
            except OperatorError as exc:
                told.append(exc)

        with anyio.fail_after(AT_ONCE_S):
            async with anyio.create_task_group() as tasks:
                for name in ("one", "two"):
                    tasks.start_soon(begin, name)
    assert told
    assert all("not found" in str(each) and "manifests" in str(each) for each in told)


async def test_a_chat_that_met_a_quota_goes_on_as_soon_as_there_is_room(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root)) as manager:
        await pause_one(manager)
        fake.store.limited, fake.store.quota = "pods", 0
        for _ in range(2):
            with anyio.fail_after(AT_ONCE_S):
                assert "exceeded quota" in str(await refused(manager, PAUSED))
        assert not fake.names("pods")
        fake.store.quota = 100
        with anyio.fail_after(AT_ONCE_S):
            session = await manager.session(PAUSED)
            assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_chat_whose_pod_was_given_up_leaves_none_that_waits(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root, start_timeout="2s")) as manager:
        await pause_one(manager)
        fake.node.full = FULL
        assert FULL in str(await refused(manager, PAUSED))
        await fake.until(lambda: not fake.names("pods"))
        fake.node.full = ""
        session = await manager.session(PAUSED)
        assert (await session.exec("cat file")).stdout == "kept\n"


def test_a_pod_is_given_up_before_clients_give_up_unless_an_operator_says_so() -> None:
    assert KubernetesConfig().start_timeout == 45
    given: dict[str, Any] = {"start_timeout": "10m"}
    assert KubernetesConfig.model_validate(given).start_timeout == 600
