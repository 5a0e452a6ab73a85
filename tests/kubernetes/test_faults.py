"""What goes wrong in a cluster is told with its cause, and costs no file that was written."""

import json
import subprocess
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.backends.kubernetes.backend import KubernetesBackend
from mcp_sandbox.backends.kubernetes.client import ApiServer
from mcp_sandbox.backends.kubernetes.objects import SANDBOX, VOLUME, Made
from mcp_sandbox.backends.kubernetes.watch import Row
from mcp_sandbox.backends.runner_copy import runner_digest
from mcp_sandbox.errors import BackendUnavailable, SandboxGone
from mcp_sandbox.models import ChatId, SandboxSpec
from mcp_sandbox.runtime import channel
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.backends.live import connected, made
from tests.conftest import in_cluster
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.store import Change

CHAT = ChatId("tester", "faults")
SPEC = replace(SandboxSpec(()), labels={"user": "tester", "chat": "faults"}, idle_s=60)


@asynccontextmanager
async def session_on(data_root: Path, **given: object) -> AsyncGenerator[Session]:
    async with open_manager(in_cluster(data_root, **given)) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo kept > file")
        yield session


@asynccontextmanager
async def backend_on(data_root: Path) -> AsyncGenerator[KubernetesBackend]:
    async with open_backend("kubernetes", in_cluster(data_root)) as backend:
        assert isinstance(backend, KubernetesBackend)
        yield backend


@pytest.fixture
def soon_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an API server less time than a pod has to begin."""
    for module in ("client", "watch"):
        monkeypatch.setattr(f"mcp_sandbox.backends.kubernetes.{module}.WAIT_S", 4.0)


def pod_of(fake: Cluster) -> str:
    (name,) = fake.names("pods")
    return name


async def saved_and_changed(manager: SessionManager) -> Session:
    session = await manager.session(CHAT)
    await session.exec("echo saved > file")
    assert manager.saving
    await manager.saving.save(CHAT)
    await session.exec("echo later > file")
    return session


async def lost(session: Session, strike: Callable[[], object]) -> str:
    """What a call says that runs while something is done to its sandbox."""
    async with anyio.create_task_group() as tasks:
        told: list[str] = []

        async def call() -> None:
            with pytest.raises(SandboxGone) as gone:
                await session.exec("touch began; sleep 60")
            told.append(str(gone.value))

        tasks.start_soon(call)
        while (await session.exec("test -e began")).exit_code != 0:
            await anyio.sleep(0.02)
        await anyio.to_thread.run_sync(strike)
    return told[0]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Evicted", "the cluster evicted it from its node"),
        ("NodeLost", "or lost the node"),
        ("OOMKilled", "it ran out of memory (2g)"),
    ],
)
async def test_a_pod_that_its_node_ended_is_told_and_its_files_stay(
    fake: Cluster, data_root: Path, reason: str, words: str
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        told = await lost(session, lambda: fake.do(fake.node.end_pod, name, reason))
        assert words in told
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_pod_that_the_cluster_took_off_its_node_is_told_and_its_files_stay(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    def drain() -> None:
        reason = {"status": "True", "reason": "EvictionByEvictionAPI"}
        conditions = [{"type": "DisruptionTarget", **reason}]
        fake.do(fake.store.set, "pods", name, {"status": {"conditions": conditions}})
        fake.delete("pods", name)

    async with session_on(data_root) as session:
        name = pod_of(fake)
        assert "the cluster evicted it from its node" in await lost(session, drain)
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_pod_deleted_by_hand_is_told_and_its_files_stay(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        told = await lost(session, lambda: fake.delete("pods", name))
        assert "somebody deleted it in the cluster" in told
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_of_a_sandbox_that_is_deleted_with_its_volume_no_files_are_promised(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    def delete() -> None:
        if kind == "sandboxes":
            fake.delete("sandboxes", name)
        else:
            fake.delete("persistentvolumeclaims", name)
            fake.delete("pods", name)

    async with open_manager(in_cluster(data_root)) as manager:
        session = await saved_and_changed(manager)
        name = pod_of(fake)
        told = await lost(session, delete)
        assert "somebody deleted it in the cluster" in told
        assert "the next call says whether files are" in told
        assert "kept" not in told
        assert "same files" not in told
        await fake.until(fake.is_empty)
        assert (await session.exec("cat file")).stdout == "saved\n"
        assert any("Your files are as of" in each for each in await session.take_notices())


async def test_of_one_that_is_deleted_between_calls_no_files_are_promised_either(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root)) as manager:
        session = await saved_and_changed(manager)
        await session.take_notices()
        name = pod_of(fake)
        fake.delete("sandboxes" if kind == "sandboxes" else "persistentvolumeclaims", name)
        if kind == "pods":
            fake.delete("pods", name)
        await fake.until(fake.is_empty)
        assert (await session.exec("cat file")).stdout == "saved\n"
        notices = await session.take_notices()
        assert any("this is a new one" in each for each in notices)
        assert not any("same files" in each for each in notices)


async def test_a_pod_deleted_by_force_is_told_though_nothing_cuts_its_stream(
    fake: Cluster, data_root: Path
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        told = await lost(session, lambda: fake.do(fake.store.drop, "pods", name))
        assert "somebody deleted it in the cluster" in told
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_container_that_was_killed_is_told_so_though_its_node_looks_late(
    fake: Cluster, data_root: Path
) -> None:
    fake.node.sees_after_s = 1.5
    async with session_on(data_root) as session:
        stop = ["docker", "kill", fake.node.container(pod_of(fake))]
        assert "the sandbox ended" in await lost(session, lambda: subprocess.run(stop, check=True))
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_pod_in_which_nothing_answers_is_ended_and_its_files_stay(
    kind: str, fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SILENT_S", "ASKED_S"):
        monkeypatch.setattr(channel, name, 0.5)
    async with session_on(data_root) as session:
        stop = ["docker", "kill", "--signal=STOP", fake.node.container(pod_of(fake))]
        assert "did not answer" in await lost(session, lambda: subprocess.run(stop, check=True))
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_a_chat_whose_claim_is_lost_goes_on_from_its_backup(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root)) as manager:
        session = await saved_and_changed(manager)
        name = pod_of(fake)
        if kind == "sandboxes":
            fake.delete("sandboxes", name)
        else:
            fake.delete("pods", name)
            fake.delete("persistentvolumeclaims", name)
        await fake.until(fake.is_empty)
        with suppress(SandboxGone):
            await session.exec("true")
        assert (await session.exec("cat file")).stdout == "saved\n"


async def test_a_volume_that_was_lost_while_nothing_ran_is_not_taken_for_the_chats_own(
    fake: Cluster, data_root: Path
) -> None:
    fake.has_sandboxes = ["v1beta1"]
    async with open_manager(in_cluster(data_root)) as manager:
        session = await saved_and_changed(manager)
        await manager.pause(CHAT)
        # Its controller makes another one.
        fake.store.ahead = timedelta(minutes=5)
        (claim,) = fake.store.objects["persistentvolumeclaims"].values()
        fake.delete("persistentvolumeclaims", claim["metadata"]["name"])
        await fake.until(lambda: claim["metadata"]["uid"] not in json.dumps(fake.store.objects))
        assert (await session.exec("cat file")).stdout == "later\n"


async def test_a_sandbox_that_was_deleted_without_what_it_owns_is_made_again_on_it(
    fake: Cluster, data_root: Path
) -> None:
    fake.has_sandboxes = ["v1beta1"]
    async with open_manager(in_cluster(data_root)) as manager:
        session = await saved_and_changed(manager)
        name = pod_of(fake)
        for plural, each in (("pods", name), ("persistentvolumeclaims", f"files-{name}")):
            fake.do(fake.store.set, plural, each, {"metadata": {"ownerReferences": None}})
        fake.delete("sandboxes", name)
        assert (await session.exec("cat file")).stdout == "later\n"
    await fake.until(lambda: not fake.names("pods"))
    async with open_manager(in_cluster(data_root)) as manager:
        assert (await (await manager.session(CHAT)).exec("cat file")).stdout == "later\n"
        assert len(fake.names("pods")) == len(fake.names("persistentvolumeclaims")) == 1


async def test_a_volume_that_somebody_deletes_while_it_is_used_is_saved_before_it_goes(
    fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root)) as manager:
        session = await saved_and_changed(manager)
        fake.delete("persistentvolumeclaims", pod_of(fake))
        assert (await session.exec("cat file")).stdout == "later\n"
    await fake.until(fake.is_empty)
    async with open_manager(in_cluster(data_root)) as manager:
        assert (await (await manager.session(CHAT)).exec("cat file")).stdout == "later\n"


async def test_a_chat_that_begins_again_at_once_has_nothing_of_the_removed_one(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root)) as manager:
        session = await manager.session(CHAT)
        await session.exec("echo old > file")
        await manager.pause(CHAT)
        fake.store.collected_s = 2
        await manager.remove(CHAT)
        session = await manager.session(CHAT)
        assert (await session.exec("cat file; echo new > file")).stdout == ""
        await manager.pause(CHAT)
        assert (await session.exec("cat file")).stdout == "new\n"


@pytest.mark.parametrize(
    ("calls", "every_s"),
    [(24, 0.6), pytest.param(500, 10.0, marks=(pytest.mark.whole, pytest.mark.timeout(300)))],
)
async def test_cut_streams_lose_no_process_and_repeat_no_call(
    fake: Cluster, data_root: Path, calls: int, every_s: float
) -> None:
    answered = cut = cuts = 0
    # So that the last of the calls comes after the third cut.
    between = int(calls / 3.2)
    async with session_on(data_root) as session:
        await session.exec("nohup sleep 300 > /dev/null 2>&1 & echo $! > pid")
        for number in range(calls):
            if number and number % between == 0:
                await anyio.to_thread.run_sync(fake.cut)
                cuts += 1
            try:
                await session.exec(f"echo {number} >> calls; sleep {every_s / between}")
                answered += 1
            except SandboxGone as exc:
                cut += "the connection to the sandbox was cut off" in str(exc)
        assert cut <= cuts >= 3
        assert answered + cut == calls
        lines = (await session.exec("cat calls")).stdout.split()
        assert len(lines) == len(set(lines)) >= answered
        assert (await session.exec("kill -0 $(cat pid)")).exit_code == 0
        assert len(fake.names("pods")) == 1


async def test_a_server_lost_while_a_pod_begins_again_costs_no_file(
    kind: str, fake: Cluster, data_root: Path, soon_gives_up: None
) -> None:
    async with session_on(data_root, start_timeout="5s") as session:
        name = pod_of(fake)
        uid = fake.store.objects["pods"][name]["metadata"]["uid"]

        def strike(change: Change) -> None:
            is_pod = change.plural == "pods" and change.found["metadata"]["uid"] != uid
            if is_pod and change.found["status"].get("phase") == "Running":
                fake.away.set()

        await lost(session, lambda: fake.delete("pods", name))
        fake.store.listeners.append(strike)
        with pytest.raises(BackendUnavailable, match=r"does not answer|not reached"):
            await session.exec("true")
        fake.store.listeners.remove(strike)
        fake.away.clear()
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_who_kills_everything_inside_cuts_the_stream_once(
    fake: Cluster, data_root: Path
) -> None:
    async with session_on(data_root) as session:
        name = pod_of(fake)
        with pytest.raises(SandboxGone, match="was cut off"):
            await session.exec("kill -9 -1; echo done")
        assert (await session.exec("cat file")).stdout == "kept\n"
        assert pod_of(fake) == name


async def test_repositories_and_archives_work_on_a_volume(fake: Cluster, data_root: Path) -> None:
    async with session_on(data_root) as session:
        told = await session.exec(
            "git init -q a && cd a && echo x >y && git add y && git commit -qm x && cd .. && "
            "git clone -q a b && tar cf t.tar -C b . && mkdir c && tar xf t.tar -C c && "
            "git -C c status --porcelain && echo clean"
        )
        assert told.stdout == "clean\n"


@pytest.mark.parametrize(
    "away_s", [1.5, pytest.param(300.0, marks=(pytest.mark.whole, pytest.mark.timeout(400)))]
)
async def test_while_the_server_is_away_open_chats_work_and_new_ones_are_told(
    fake: Cluster, data_root: Path, away_s: float, soon_gives_up: None
) -> None:
    fake.store.watch_s = 0.5
    async with open_manager(in_cluster(data_root, start_timeout="8s")) as manager:
        session, other = [await manager.session(ChatId("tester", chat)) for chat in "ab"]
        await session.exec("true")
        await other.exec("true")
        calls = len(fake.requests)
        fake.away.set()
        back_s = anyio.current_time() + away_s
        while anyio.current_time() < back_s:
            assert (await session.exec("echo here; sleep 0.2")).stdout == "here\n"
        # Only the two watches ask again, less and less often.
        assert len(fake.requests) - calls < 8 + away_s
        with pytest.raises(BackendUnavailable, match="does not answer"):
            await (await manager.session(ChatId("tester", "new"))).exec("true")
        # What nobody could see meanwhile is seen afterwards.
        lost_pod = next(name for name in fake.names("pods") if name.startswith("mcs-tester-b-"))
        fake.delete("pods", lost_pod)
        fake.away.clear()
        assert (await (await manager.session(ChatId("tester", "new"))).exec("true")).success
        with suppress(SandboxGone):
            await other.exec("true")
        assert (await other.exec("true")).success
        assert len(fake.names("pods")) == len(fake.names("persistentvolumeclaims")) == 3


async def test_a_storm_of_429_is_waited_out_and_makes_nothing_twice(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root)) as manager:
        await (await manager.session(CHAT)).exec("true")
        asked, began = len(fake.requests), anyio.current_time()
        fake.answers += [(429, {"Retry-After": "1"}), (429, {}), (503, {}), (500, {})] * 2
        async with anyio.create_task_group() as tasks:
            for number in range(4):
                session = await manager.session(ChatId("tester", f"storm-{number}"))
                tasks.start_soon(session.exec, "true")
        assert not fake.answers
        assert len(fake.requests) - asked <= 20 * (anyio.current_time() - began + 1)
        assert len(fake.names("pods")) == len(fake.names("persistentvolumeclaims")) == 5


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_cluster_whose_clock_is_wrong_changes_nothing(
    kind: str, fake: Cluster, data_root: Path, hours: int
) -> None:
    fake.store.ahead = timedelta(hours=hours)
    fake.forget_trials()
    async with session_on(data_root) as session:
        name = pod_of(fake)
        await lost(session, lambda: fake.delete("pods", name))
        assert (await session.exec("cat file")).stdout == "kept\n"
        assert len(fake.names("pods")) == len(fake.names("persistentvolumeclaims")) == 1


@pytest.mark.parametrize("bookmarks", [True, False])
async def test_a_watch_that_ends_or_is_too_old_begins_anew(
    fake: Cluster, data_root: Path, bookmarks: bool
) -> None:
    fake.store.watch_s, fake.store.bookmarks, fake.store.chunk = 0.2, bookmarks, 1
    async with backend_on(data_root) as backend, backend_on(data_root) as other:
        async with made(backend, SPEC) as sandbox:
            second = replace(SPEC, labels={"user": "tester", "chat": "second"})
            async with made(backend, second):
                fake.do(fake.store.compact)
                await other.running()
                assert await other.space.until(lambda: len([*other.space.sandboxes]) == 2, 20)
                fake.do(fake.store.compact)
                fake.delete("pods", sandbox.id)
                assert await sandbox.ending(within_s=20) == "deleted"


@pytest.fixture
def renew_token(
    fake: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Have the cluster and the file of credentials take another token."""
    file = tmp_path / "kubeconfig"
    file.write_text(fake.kubeconfig().read_text())
    monkeypatch.setenv("KUBECONFIG", str(file))

    def renew() -> None:
        file.write_text(file.read_text().replace(fake.token, "another"))
        fake.token = "another"

    return renew


async def test_a_watch_whose_token_has_expired_goes_on_with_the_next_one(
    fake: Cluster, data_root: Path, renew_token: Callable[[], None]
) -> None:
    fake.store.watch_s = 0.2
    async with backend_on(data_root) as backend, made(backend, SPEC) as sandbox:
        renew_token()
        asked = len(fake.requests)
        # Both watches have ended, and were refused.
        await fake.until(lambda: len(fake.requests) >= asked + 2)
        fake.delete("pods", sandbox.id)
        assert await sandbox.ending(within_s=20) == "deleted"


async def test_an_exec_whose_token_has_expired_is_asked_for_with_the_next_one(
    data_root: Path, renew_token: Callable[[], None]
) -> None:
    async with backend_on(data_root) as backend, made(backend, SPEC) as sandbox:
        renew_token()
        # The first was open since its start.
        for _ in range(2):
            await (await sandbox.open_channel()).aclose()


async def test_a_watch_that_a_proxy_cuts_amid_a_line_goes_on(
    fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cut(plural: str, query: Mapping[str, str]) -> AsyncGenerator[str]:
        monkeypatch.undo()
        yield '{"type": "MODIF'

    monkeypatch.setattr(fake.store, "watch", cut)
    async with backend_on(data_root) as backend, made(backend, SPEC) as sandbox:
        fake.delete("pods", sandbox.id)
        assert await sandbox.ending(within_s=20) == "deleted"


async def test_what_a_killed_server_had_begun_is_used_by_the_next(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with backend_on(data_root) as backend:
        # It was killed before its pod was made, or before the runner had its secret.
        render, config = backend.renderer, in_cluster(data_root)
        told = Made.of(SPEC, config.kubernetes.image, runner_digest())
        name = render.name(SPEC.labels)
        of = SANDBOX if kind == "sandboxes" else VOLUME
        fake.do(fake.store.add, of.plural, render.owner(of, name, told))
        async with open_manager(config) as manager:
            session = await manager.session(CHAT)
            assert (await session.exec("echo on > file; cat file")).stdout == "on\n"
        assert len(fake.names("persistentvolumeclaims")) == 1


async def test_two_servers_share_a_sandbox(kind: str, fake: Cluster, data_root: Path) -> None:
    async with backend_on(data_root) as one, backend_on(data_root) as other:
        async with made(one, SPEC) as sandbox, connected(sandbox) as runtime:
            await runtime.exec("echo first > file")
            async with connected(await other.attach(sandbox.id)) as second:
                assert (await second.exec("cat file")).stdout == "first\n"
            assert (await runtime.exec("echo on")).stdout == "on\n"
            # Not even one that believes the chat to be new makes a second one.
            assert (await other.create(SPEC)).token == sandbox.token
            assert len(fake.names("pods")) == len(fake.names("persistentvolumeclaims")) == 1
            assert (await runtime.exec("cat file")).stdout == "first\n"


async def test_servers_with_one_key_have_the_same_sandboxes(
    kind: str, fake: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARED", "a key of tests")
    one, other = (in_cluster(tmp_path / name, key="env:SHARED") for name in ("one", "other"))
    async with open_backend("kubernetes", one) as first, made(first, SPEC) as sandbox:
        async with open_backend("kubernetes", other) as second:
            assert (await second.attach(sandbox.id)).token == sandbox.token


async def test_a_paused_one_has_no_processes_and_keeps_its_files(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with backend_on(data_root) as backend:
        async with made(backend, SPEC) as sandbox, connected(sandbox) as runtime:
            await runtime.exec("echo kept > file")
            assert await sandbox.pause()
            assert fake.names("pods") == []
            assert [each.state for each in await backend.running()] == ["paused"]
            async with connected(await backend.attach(sandbox.id)) as again:
                assert (await again.exec("cat file")).stdout == "kept\n"


async def test_the_agent_is_told_what_a_pause_has_ended(
    kind: str, fake: Cluster, data_root: Path
) -> None:
    async with open_manager(in_cluster(data_root)) as manager:
        session = await manager.session(CHAT)
        await session.exec("sleep 1000", wait_s=0)
        await manager.pause(CHAT)
        await session.exec("true")
        (told,) = await session.take_notices()
        assert "paused" in told
        assert "sleep 1000" in told


@pytest.mark.parametrize("by", ["kubectl", "its node"])
async def test_what_ended_with_a_pod_is_told_though_no_server_saw_it(
    kind: str, fake: Cluster, data_root: Path, by: str
) -> None:
    config = in_cluster(data_root)
    async with open_manager(config, for_many=True) as lost_one:
        await (await lost_one.session(CHAT)).exec("echo kept > file; sleep 1000 & sleep 0.2")
        note = data_root / "sandbox" / "records" / CHAT.user / f"chat-{CHAT.chat}.seen"
        with anyio.fail_after(20):
            while not (note.exists() and "sleep 1000" in note.read_text()):
                await anyio.sleep(0.02)
        name = pod_of(fake)
        if by == "kubectl":
            fake.delete("pods", name)
        else:
            fake.do(fake.node.end_pod, name, "Evicted")
        # As if that had been killed before: it makes no call.
        async with open_manager(config) as manager:
            session = await manager.session(CHAT)
            assert (await session.exec("cat file")).stdout == "kept\n"
            (told,) = await session.take_notices()
            assert "had ended since the last call" in told
            assert "sleep 1000" in told


async def test_version_4_of_the_stream_works_too(fake: Cluster, data_root: Path) -> None:
    fake.protocols = ["v4.channel.k8s.io"]
    async with session_on(data_root) as session:
        assert (await session.exec("cat file")).stdout == "kept\n"


async def test_no_more_than_twenty_requests_a_second(fake: Cluster, data_root: Path) -> None:
    api = ApiServer(in_cluster(data_root).kubernetes)
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(50):
            tasks.start_soon(api.call, "GET", "/version")
    assert anyio.current_time() - began >= 1.4
    await api.aclose()


async def test_the_secret_is_in_no_object_and_no_environment(
    fake: Cluster, data_root: Path
) -> None:
    async with backend_on(data_root) as backend:
        async with made(backend, SPEC) as sandbox, connected(sandbox) as runtime:
            secret = sandbox.token.hex()
            assert secret not in json.dumps(fake.store.objects)
            seen = await runtime.exec(
                "cat /proc/*/environ /proc/*/cmdline 2>/dev/null; ls /run/mcp-sandbox"
            )
            assert secret not in seen.stdout
            assert seen.stdout.endswith("runner.sock\n")


async def test_a_fault_of_its_own_ends_the_server(
    fake: Cluster, data_root: Path, monkeypatch: pytest.MonkeyPatch, soon_gives_up: None
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async with open_manager(in_cluster(data_root)) as manager:
        await (await manager.session(CHAT)).exec("true")
    monkeypatch.setattr(Row, "of", fail)
    with anyio.fail_after(20), pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with open_manager(in_cluster(data_root)) as manager:
            await (await manager.session(CHAT)).exec("true")
