"""Sandboxes whose files are in their pods alone, and such that wait in a warm pool."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.backends.base import ShowsSkills
from mcp_sandbox.config import Config, KubernetesConfig, StorageConfig
from mcp_sandbox.config.values import MIB
from mcp_sandbox.daemon.chats import ChatControl
from mcp_sandbox.doctor.machine import examine_cluster
from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    ConfigError,
    InsecureSandbox,
    SandboxGone,
)
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from tests.conftest import PROFILE, in_cluster
from tests.contract.test_allowed_hosts import HERE, allowing, web
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.conftest import SetUp
from tests.kubernetes.test_faults import SPEC, lost
from tests.kubernetes.test_refusals import soon_out_of_time

CHAT = ChatId("tester", "backed-up")
POOL = "warm"


@asynccontextmanager
async def manager_on(data_root: Path, **given: object) -> AsyncGenerator[SessionManager]:
    async with open_manager(in_cluster(data_root, storage="backups", **given)) as manager:
        yield manager


async def test_what_was_saved_is_in_the_next_pod(kind: str, fake: Cluster, data_root: Path) -> None:
    async with manager_on(data_root) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo saved > file; echo home > ~/note")
        assert len(fake.names("pods")) == 1
        assert not fake.names("persistentvolumeclaims")
        await manager.stop(CHAT)
        await fake.until(fake.is_empty)
        session = await manager.session(CHAT)
        assert (await session.exec("cat file ~/note")).stdout == "saved\nhome\n"
        assert len(fake.names("pods")) == 1


async def test_a_server_that_is_told_to_end_saves_its_chats_first(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    with anyio.CancelScope() as server:
        async with manager_on(data_root) as manager:
            await (await manager.session(CHAT)).exec("echo saved > file")
            server.cancel()
            await anyio.sleep_forever()
    async with manager_on(data_root) as manager:
        assert manager.saving
        assert await manager.saving.list(CHAT)
        assert await manager.size(CHAT) is None


async def test_a_pod_that_was_evicted_is_followed_by_one_with_the_last_backup(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with manager_on(data_root) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo saved > file")
        assert manager.saving
        await manager.saving.save(CHAT)
        await session.exec("echo later > file")
        (name,) = fake.names("pods")
        evict = partial(fake.do, fake.node.end_pod, name, "Evicted")
        assert "the next call says whether files are" in await lost(session, evict)
        told = await session.exec("cat file")
        assert told.stdout == "saved\n"
        assert len(fake.names("pods")) == 1


async def test_a_deleted_sandbox_with_its_files_is_followed_by_its_backup(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with manager_on(data_root) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo saved > file")
        assert manager.saving
        await manager.saving.save(CHAT)
        (name,) = fake.names("pods")
        plural = "sandboxes" if kind == "sandboxes" else "pods"
        told = await lost(session, partial(fake.delete, plural, name))
        assert "the next call says whether files are" in told
        assert (await session.exec("cat file")).stdout == "saved\n"
        assert any("Your files are as of" in each for each in await session.take_notices())


async def test_files_in_the_pod_meet_a_quota_that_is_told_at_once(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with manager_on(data_root) as manager:
        fake.store.quota = 0
        with anyio.fail_after(12), pytest.raises(CapacityReached, match="exceeded quota: q"):
            await (await manager.session(CHAT)).exec("true")


async def test_one_that_another_server_left_is_found_with_its_files(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    config = in_cluster(data_root, storage="backups")
    async with open_manager(config) as manager:
        await (await manager.session(CHAT)).exec("echo unsaved > file")
        (name,) = fake.names("pods")
        async with open_backend("kubernetes", config) as other:
            (info,) = await other.running()
            fake.away.set()
            # It may have the only copy of files, so it must not be taken for one that has ended.
            with pytest.raises(BackendUnavailable):
                await other.attach(info.id)
            fake.away.clear()
            # To end its pod would lose what it has.
            assert not await (await other.attach(info.id)).pause()
            assert fake.names("pods") == [name]


async def test_a_pod_that_another_template_made_is_saved_before_it_is_replaced(
    kind: str, fake: Cluster, data_root: Path, tmp_path: Path
) -> None:
    config = in_cluster(data_root, storage="backups")
    template = tmp_path / "template.yaml"
    template.write_text("metadata: {labels: {team: blue}}\nspec: {nodeSelector: {disk: fast}}\n")
    async with open_manager(config) as manager:
        await (await manager.session(CHAT)).exec("echo unsaved > file")
        async with open_backend("kubernetes", config) as backend:
            (info,) = await backend.running()
            changed = in_cluster(data_root, storage="backups", template=template)
            async with open_backend("kubernetes", changed) as other:
                assert (await other.running())[0].state == "running"
                await other.attach(info.id)
    async with open_manager(changed) as manager:
        session = await manager.session(CHAT)
        assert (await session.exec("cat file")).stdout == "unsaved\n"
        pods = fake.store.objects["pods"].values()
        assert [pod["metadata"]["labels"]["team"] for pod in pods] == ["blue"]


async def test_a_paused_chat_is_saved_and_comes_back(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with manager_on(data_root) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo kept > file")
        await manager.pause(CHAT)
        await fake.until(fake.is_empty)
        await manager.resume(CHAT)
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_pause_tells_what_it_has_ended_and_promises_no_process(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with manager_on(data_root) as manager:
        session = await manager.session(CHAT)
        await session.exec("sleep 1000", wait_s=0)

        async def control() -> SessionManager:
            return manager

        told = await ChatControl(control).commands["pause"]({"chat": CHAT.chat})
        assert (told["paused"], told["keeps_processes"]) == (True, False)
        await session.exec("true")
        notices = await session.take_notices()
        (why,) = [each for each in notices if "sleep 1000" in each]
        assert "it was paused, which ends what runs in it" in why
        assert "killed" not in why
        assert "same files" not in why


@pytest.mark.parametrize("is_new", [False, True])
async def test_what_a_pause_has_ended_is_told_as_such(
    kind: str, fake: Cluster, data_root: Path, is_new: bool
) -> None:
    async with manager_on(data_root) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo kept > file; sleep 1000 & sleep 0.2")
        await manager.pause(CHAT)
        # Nothing runs on, whatever becomes of this server.
        assert [row.background for row in await manager.list()] == [0]
        if not is_new:
            assert (await session.exec("cat file")).stdout == "kept\n"
            told = await session.take_notices()
    if is_new:
        async with manager_on(data_root) as manager:
            session = await manager.session(CHAT)
            assert (await session.exec("cat file")).stdout == "kept\n"
            told = await session.take_notices()
    (about,) = [text for text in told if "had ended" in text]
    assert "it was paused, which ends what runs in it" in about
    assert "sleep 1000" in about
    assert "killed" not in about


async def test_after_an_eviction_the_agent_hears_once_as_of_when_its_files_are(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    config = in_cluster(data_root, storage="backups")
    soon = config.storage.model_copy(update={"after": 0.2, "every": 0.2})
    async with open_manager(config.model_copy(update={"storage": soon})) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo saved > file")
        saving = manager.saving
        assert saving
        await saving.save(CHAT)
        (name,) = fake.names("pods")
        await lost(session, partial(fake.do, fake.node.end_pod, name, "Evicted"))
        saves = len(await saving.list(CHAT))
        # While nobody calls, what is due is tried a few times.
        with anyio.move_on_after(3):
            while len(await saving.list(CHAT)) == saves:
                await anyio.sleep(0.1)
        assert (await session.exec("cat file")).stdout == "saved\n"
        notices = await session.take_notices()
        assert sum("Your files are as of" in each for each in notices) == 1


@pytest.mark.timeout(90)
async def test_a_fast_writer_is_stopped_at_the_limit_and_saved_long_before_its_node_evicts_it(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    config = in_cluster(data_root, storage="backups")
    small = config.workspace.model_copy(update={"size_limit": 64 * MIB})
    fake.node.looks_s = 0.2
    async with open_manager(config.model_copy(update={"workspace": small})) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo kept > file")
        (name,) = fake.names("pods")
        told = await session.exec(_WRITE, timeout_s=30)
        assert "the workspace is full" in (told.killed_because or "")
        saving = manager.saving
        assert saving
        with anyio.fail_after(20):
            while not await saving.list(CHAT):
                await anyio.sleep(0.1)
        fake.delete("pods", name)
        await fake.until(fake.is_empty)
        # What is over the limit comes back, too.
        with suppress(SandboxGone):
            await session.exec("true")
        assert (await session.exec("cat file; ls | wc -l")).stdout.startswith("kept\n")
        assert (await session.exec("rm part-*; echo room > more; cat more")).stdout == "room\n"


# 200 MB a second.
_WRITE = """python3 -c '
import itertools, time
for number in itertools.count():
    open(f"part-{number}", "wb").write(bytes(20_000_000))
    time.sleep(0.1)
'"""


async def test_without_an_object_store_it_is_refused(fake: Cluster, data_root: Path) -> None:
    config = in_cluster(data_root, storage="backups")
    config = config.model_copy(update={"storage": StorageConfig()})
    with pytest.raises(ConfigError, match="storage"):
        async with open_manager(config):
            pass


def test_a_warm_pool_needs_files_in_the_pod() -> None:
    for given in ({}, {"storage": "backups", "objects": "pod"}):
        with pytest.raises(ValidationError, match=r"write kubernetes.storage: backups"):
            KubernetesConfig.model_validate({"warm_pool": POOL, **given})


def configured(data_root: Path, **given: object) -> Config:
    return in_cluster(data_root, storage="backups", warm_pool=POOL, **given)


async def test_a_new_chat_gets_a_warm_sandbox_and_the_pool_another(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    config = configured(data_root)
    (warm,) = await set_up(config, 1)
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        assert (await session.exec("echo here > file; cat file")).stdout == "here\n"
        (claim,) = fake.store.objects["sandboxclaims"].values()
        assert claim["status"]["sandbox"]["name"] == warm
        assert not {"env", "volumeClaimTemplates"} & claim["spec"].keys()
        # Another server finds it by its claim.
        async with open_backend("kubernetes", config) as other:
            (info,) = await other.running()
            sandbox = await other.attach(info.id)
            assert isinstance(sandbox, ShowsSkills)
            await sandbox.show_skill("pdf", {"SKILL.md": b"text"})
        seen = await session.exec("cat /opt/skills/pdf/SKILL.md; touch /opt/skills/new")
        assert (seen.stdout, "Read-only file system" in seen.stderr) == ("text", True)
        await manager.stop(CHAT)
        await fake.until(lambda: not fake.names("sandboxclaims") and {*fake.names("pods")} - {warm})
        session = await manager.session(CHAT)
        assert (await session.exec("cat file")).stdout == "here\n"


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_claim_uses_the_exec_that_began_while_its_pod_waited(
    fake: Cluster, data_root: Path, set_up: SetUp, is_cut: bool
) -> None:
    config = configured(data_root)
    (warm,) = await set_up(config, 1)

    def reach_it() -> int:
        return sum(f"/{warm}/exec" in each.url.path for each in fake.execs)

    async with open_manager(config) as manager, open_backend("kubernetes", config) as other:
        for each in (manager.list, other.running):
            await each()
        await fake.until(lambda: reach_it() == 2)
        if is_cut:
            fake.cut()
            await fake.until(lambda: not fake.execs)
        session = await manager.session(CHAT)
        assert (await session.exec("echo on")).stdout == "on\n"
        assert sum(f"/{warm}/exec" in path for path in fake.requests) == 2 + is_cut
        # The other server leaves it.
        await fake.until(lambda: reach_it() == 1)


async def test_an_exec_that_is_refused_while_its_pod_waits_harms_nothing(
    fake: Cluster, data_root: Path, set_up: SetUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_sandbox.backends.kubernetes.backend._AHEAD_AGAIN_S", 0.1)
    config = configured(data_root)
    await set_up(config)
    async with open_manager(config) as manager:
        await manager.list()
        # The list of pods, and their watch.
        await fake.until(lambda: sum(path.endswith("/pods") for path in fake.requests) == 2)
        fake.away.set()
        (warm,) = await set_up(config, 1)
        await fake.until(lambda: any(f"/{warm}/exec" in path for path in fake.requests))
        fake.away.clear()
        # It is tried again, and so is one that is cut.
        await fake.until(lambda: fake.execs)
        fake.cut()
        await fake.until(lambda: not fake.execs)
        await fake.until(lambda: fake.execs)
        session = await manager.session(CHAT)
        assert (await session.exec("echo on")).stdout == "on\n"


async def test_allowed_hosts_are_reached_by_certificates_that_servers_of_one_key_share(
    fake: Cluster,
    data_root: Path,
    set_up: SetUp,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in ("KEY", "ANOTHER"):
        monkeypatch.setenv(key, key)
    async with web() as servers:

        def sharing(key: str, name: str) -> Config:
            config = configured(data_root / name, key=f"env:{key}")
            return allowing(config, servers, tmp_path / "web")

        def shown() -> object:
            ((_, found),) = fake.store.objects["configmaps"].items()
            return found["data"]

        ask, config = f"curl -sSf https://{HERE}:{servers.secure}/", sharing("KEY", "a")
        await set_up(config, 1)
        async with open_manager(config) as manager:
            # What waits in the pool begins with them: no chat is needed for that.
            await manager.list()
            await fake.until(lambda: fake.execs)
            session = await manager.session(CHAT)
            assert (await session.exec(ask)).success
            before = shown()
            await set_up(config, 1)
            async with open_manager(sharing("KEY", "b")) as second:
                assert (await (await second.session(ChatId("tester", "other"))).exec(ask)).success
                # It goes with its server.
                (_, claim) = fake.store.objects["sandboxclaims"].values()
                assert claim["status"]["sandbox"]["name"].startswith(POOL)
            # What the second server has put in its place is as good.
            assert shown() != before
            assert (await session.exec(ask)).success
        async with open_manager(sharing("ANOTHER", "c")) as stranger:
            with pytest.raises(BackendUnavailable, match="certificates of another data root"):
                await (await stranger.session(CHAT)).exec("true")


async def test_a_pod_that_begins_again_has_the_certificates_of_now(
    fake: Cluster, data_root: Path, tmp_path: Path
) -> None:
    async with web() as servers:
        config = allowing(in_cluster(data_root), servers, tmp_path / "web")
        ask = f"curl -sSf https://{HERE}:{servers.secure}/"
        for _ in range(2):
            async with open_manager(config) as manager:
                assert (await (await manager.session(CHAT)).exec(ask)).success
                await manager.pause(CHAT)
            # What shows them is deleted while nothing runs.
            (name,) = fake.names("configmaps")
            fake.delete("configmaps", name)


async def test_one_from_a_pool_that_is_set_no_more_goes_on_with_its_files(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    config = configured(data_root)
    await set_up(config, 1)
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo unsaved > file")
        async with open_manager(in_cluster(data_root, storage="backups")) as other:
            session = await other.session(CHAT)
            assert (await session.exec("cat file")).stdout == "unsaved\n"
            await other.stop(CHAT)
            await fake.until(lambda: not fake.names("sandboxclaims"))
            assert (await session.exec("cat file")).stdout == "unsaved\n"


async def test_what_a_killed_server_had_of_a_pool_that_is_set_no_more_ends(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    config = configured(data_root)
    await set_up(config, 1)
    async with open_backend("kubernetes", config) as backend:
        await backend.create(SPEC)
    assert fake.names("sandboxclaims")
    async with open_manager(in_cluster(data_root, storage="backups")):
        await fake.until(lambda: not fake.names("sandboxclaims"))


async def test_those_that_wait_are_made_anew_when_settings_change(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    (older,) = await set_up(configured(data_root), 1)
    config = configured(data_root, seccomp_profile=PROFILE)
    await set_up(config, 1)
    async with open_manager(config) as manager:
        assert (await (await manager.session(CHAT)).exec("echo on")).stdout == "on\n"
        (claim,) = fake.store.objects["sandboxclaims"].values()
        assert claim["status"]["sandbox"]["name"] != older


@pytest.mark.parametrize("why", ["empty", "outdated", "missing", "other limits"])
async def test_where_nothing_fits_the_chat_begins_cold(
    fake: Cluster, data_root: Path, set_up: SetUp, why: str
) -> None:
    config = configured(data_root)
    other = config.model_copy(update={"env": {"A": "b"}}) if why == "other limits" else config
    made = configured(data_root, image="other/image:1") if why == "outdated" else config
    if why != "missing":
        await set_up(made)
    async with open_manager(other) as manager:
        assert (await (await manager.session(CHAT)).exec("echo on")).stdout == "on\n"
        assert not fake.names("sandboxclaims")


async def test_a_warm_sandbox_that_somebody_weakened_is_ended(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    config = configured(data_root)
    await set_up(config)
    news = {"spec": {"podTemplate": {"spec": {"hostNetwork": True}}}}
    fake.change("sandboxtemplates", POOL, news)
    fake.change("sandboxwarmpools", POOL, {"spec": {"replicas": 1}})
    pools = fake.store.objects["sandboxwarmpools"]
    await fake.until(lambda: pools[POOL]["status"].get("readyReplicas"))
    (warm,) = fake.names("pods")
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        with pytest.raises(InsecureSandbox, match="hostNetwork"):
            await session.exec("true")
        await fake.until(lambda: warm not in fake.names("pods") and not fake.names("sandboxclaims"))


async def test_a_claim_that_comes_too_late_on_a_full_cluster_is_told_in_time(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    config = configured(data_root)
    await set_up(config, 2)
    told: list[str] = []
    async with soon_out_of_time(config) as manager:
        fake.node.full = "0/3 nodes are available: insufficient memory"

        async def call(name: str) -> None:
            try:
                await (await manager.session(ChatId("tester", name))).exec("true")
            except CapacityReached as exc:
                told.append(str(exc))

        async with anyio.create_task_group() as tasks:
            for name in ("one", "two", "three"):
                tasks.start_soon(call, name)
        assert fake.names("sandboxclaims")
    assert told
    assert all("insufficient memory" in each for each in told)


async def test_doctor_says_whether_the_pool_is_of_use(
    fake: Cluster, data_root: Path, set_up: SetUp
) -> None:
    config = configured(data_root)

    async def pool() -> tuple[str, str]:
        (check,) = [each for each in await examine_cluster(config) if each.name == "warm pool"]
        return check.status, check.found

    status, found = await pool()
    assert status == "warn"
    assert "begin cold" in found
    await set_up(config, 1)
    assert (await pool())[0] == "ok"
