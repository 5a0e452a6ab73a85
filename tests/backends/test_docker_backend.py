import json
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import docker
import pytest

from mcp_sandbox.backends.docker import client
from mcp_sandbox.backends.docker.backend import DockerBackend
from mcp_sandbox.config import DockerConfig
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import Limits, Mount, SandboxId, SandboxSpec
from tests.backends.containers import backend_on, left_of, mounts, runtime_of, sandbox_of

pytestmark = pytest.mark.docker
CHECK = Path(__file__).with_name("inside.py")


@pytest.fixture
async def backend(data_root: Path) -> AsyncGenerator[DockerBackend]:
    async with backend_on(data_root) as backend:
        yield backend


@pytest.fixture
def spec(data_root: Path) -> SandboxSpec:
    return SandboxSpec(mounts=mounts(data_root), labels={"chat": "u/c"})


def inspect(name: str) -> dict[str, Any]:
    engine = docker.from_env()
    found: dict[str, Any] = engine.api.inspect_container(name)
    engine.close()
    return found


async def ended(backend: DockerBackend, sandbox_id: SandboxId) -> None:
    with anyio.fail_after(20):
        while sandbox_id in [row.id for row in await backend.running()]:
            await anyio.lowlevel.checkpoint()


async def test_probe_names_engine_runtime_and_image(backend: DockerBackend) -> None:
    assert re.fullmatch(r"Docker \S+ with runc runs mcp-sandbox/base:latest", await backend.probe())


async def test_created_sandbox_answers_and_is_listed_with_its_labels(
    backend: DockerBackend, spec: SandboxSpec
) -> None:
    async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
        result = await runtime.exec("echo $HOME; pwd; id -u")
        assert result.stdout.split() == ["/home/sandbox", "/workspace", str(uid())]
        [row] = await backend.running()
        assert (row.id, row.labels) == (sandbox.id, {"chat": "u/c"})
        assert re.fullmatch("mcs-[0-9a-f]{16}", sandbox.id)


def uid() -> int:
    return os.geteuid() or 10001


async def test_a_program_by_which_an_image_checks_its_health_is_not_run(
    data_root: Path, spec: SandboxSpec
) -> None:
    """The engine would run it beside the runner, with all variables of that, of any user's code."""
    name, engine = "mcp-sandbox/checked:test", docker.from_env()
    container = engine.api.create_container("mcp-sandbox/base:latest", command="x")
    check = "HEALTHCHECK --interval=1s CMD touch /workspace/checked"
    engine.api.commit(container, "mcp-sandbox/checked", "test", changes=check)
    engine.api.remove_container(container)
    try:
        async with backend_on(data_root, DockerConfig(image=name)) as backend:
            async with sandbox_of(backend, spec) as sandbox:
                found = inspect(sandbox.id)
                assert found["Config"]["Healthcheck"]["Test"] == ["NONE"]
                assert "Health" not in found["State"]
    finally:
        engine.api.remove_image(name)
        engine.close()


async def test_destroyed_sandbox_leaves_nothing_and_may_be_destroyed_again(
    backend: DockerBackend, spec: SandboxSpec, data_root: Path
) -> None:
    sandbox = await backend.create(spec)
    assert left_of(data_root) == [sandbox.id]
    await backend.destroy(sandbox.id)
    assert left_of(data_root) == []
    await backend.destroy(sandbox.id)
    assert await backend.running() == []


async def test_other_process_attaches_with_the_same_secret(
    backend: DockerBackend, spec: SandboxSpec, data_root: Path
) -> None:
    async with sandbox_of(backend, spec) as sandbox, backend_on(data_root) as other:
        attached = await other.attach(sandbox.id)
        assert attached.token == sandbox.token
        assert attached.facts == sandbox.facts
        async with runtime_of(attached) as runtime:
            assert (await runtime.exec("true")).success


@pytest.mark.parametrize("name", ["mcs-0000000000000000", "../../etc", "", "mcs-0/../x"])
async def test_unknown_sandbox_is_gone(backend: DockerBackend, name: str) -> None:
    with pytest.raises(SandboxGone):
        await backend.attach(SandboxId(name))


async def test_data_roots_do_not_see_each_others_sandboxes(
    backend: DockerBackend, spec: SandboxSpec, tmp_path: Path
) -> None:
    async with sandbox_of(backend, spec) as sandbox, backend_on(tmp_path / "other") as other:
        assert await other.running() == []
        with pytest.raises(SandboxGone):
            await other.attach(sandbox.id)
        # A name that another data root's record does not back is not killed by mistake.
        await other.destroy(sandbox.id)
        assert [row.id for row in await backend.running()] == [sandbox.id]


async def test_secret_is_readable_on_the_host_by_the_server_alone(
    backend: DockerBackend, spec: SandboxSpec, data_root: Path
) -> None:
    async with sandbox_of(backend, spec) as sandbox:
        record = data_root / "sandbox" / "run" / sandbox.id
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (record, record / "token")}
        assert modes == {sandbox.id: 0o700, "token": 0o600}
        assert (record / "token").read_text() == sandbox.token.hex()


async def test_code_reaches_no_socket_of_the_runner_and_writes_nothing_beside_the_workspace(
    backend: DockerBackend, spec: SandboxSpec, data_root: Path
) -> None:
    async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
        run = data_root / "sandbox" / "run" / sandbox.id
        assert os.listdir(run / "shown") == ["hosts"]
        assert os.listdir(run / "sock") == ["runner.sock"]
        for attempt in ("rm -f hosts", "mv hosts x", "touch x", "chmod 777 .", "> hosts"):
            assert not (await runtime.exec(f"cd /run/mcp-sandbox && {attempt}")).success
        async with runtime_of(sandbox) as second:
            assert (await second.exec("true")).success


SERVER = """
import os, signal, sys, anyio
from pathlib import Path
from tests.backends.containers import backend_on, mounts
from mcp_sandbox.models import SandboxSpec

async def main(root):
    async with backend_on(root) as backend:
        print((await backend.create(SandboxSpec(mounts=mounts(root)))).id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main, Path(sys.argv[1]))
"""


async def test_another_server_reaches_the_runner_of_one_that_was_killed(
    backend: DockerBackend, data_root: Path
) -> None:
    died = await anyio.run_process([sys.executable, "-c", SERVER, str(data_root)], check=False)
    assert died.returncode == -signal.SIGKILL
    sandbox = await backend.attach(SandboxId(died.stdout.decode().strip()))
    try:
        async with runtime_of(sandbox) as runtime:
            assert (await runtime.exec("echo there")).stdout == "there\n"
    finally:
        await backend.destroy(sandbox.id)
    assert left_of(data_root) == []


async def test_container_is_closed_from_inside(backend: DockerBackend, spec: SandboxSpec) -> None:
    async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
        result = await runtime.run_code(CHECK.read_text(), "python", timeout_s=60)
        assert result.exit_code == 0, result.stderr
        problems = json.loads(result.stdout)
        assert problems == []
        assert sandbox.token.hex() not in result.stdout


async def test_limits_hold_inside(backend: DockerBackend, data_root: Path) -> None:
    limits = Limits(memory_mb=256, cpus=0.5, pids=40, shm_mb=2, tmp_mb=3, open_files=99, file_mb=5)
    spec = SandboxSpec(mounts=mounts(data_root), limits=limits)
    async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
        result = await runtime.exec(
            "df -k --output=size /tmp /dev/shm | tail -n +2; ulimit -n; ulimit -c; ulimit -f"
        )
        assert result.stdout.split() == ["3072", "2048", "99", "0", str(5 * 1024)]
        assert sandbox.facts.limits["memory"].startswith("256 MiB")
        assert sandbox.facts.limits["pids"] == "40 (cgroup)"
        big = await runtime.exec("head -c 400M /dev/zero | tail > /dev/null")
        assert not big.success
        many = await runtime.exec("for i in $(seq 100); do sleep 5 & done; wait", timeout_s=20)
        assert "fork" in many.stderr


async def test_more_processors_than_the_engine_has_become_all_of_them(
    backend: DockerBackend, data_root: Path
) -> None:
    engine = docker.from_env()
    processors = engine.info()["NCPU"]
    engine.close()
    spec = SandboxSpec(mounts=mounts(data_root), limits=Limits(cpus=1024))
    async with sandbox_of(backend, spec) as sandbox:
        said = f"{processors} (cgroup), all that the engine has"
        assert sandbox.facts.limits["cpus"] == said
        assert (await backend.attach(sandbox.id)).facts.limits["cpus"] == said


@pytest.mark.runsc
@pytest.mark.timeout(180)
async def test_gvisor_has_room_for_its_own_threads_beside_the_processes(data_root: Path) -> None:
    spec = SandboxSpec(mounts=mounts(data_root))
    async with (
        backend_on(data_root, DockerConfig(runtime="runsc")) as backend,
        sandbox_of(backend, spec) as sandbox,
        runtime_of(sandbox) as runtime,
    ):
        assert sandbox.facts.limits["pids"] == "4608 (cgroup), gVisor's own threads among them"
        many = "for i in $(seq 150); do sleep 60 & done; jobs -r | wc -l; kill $(jobs -p)"
        assert (await runtime.exec(many, timeout_s=40)).stdout == "150\n"
        assert (await runtime.exec("echo fine")).stdout == "fine\n"


async def test_sandbox_ends_itself_when_idle_and_leaves_no_container(
    backend: DockerBackend, data_root: Path
) -> None:
    spec = SandboxSpec(mounts=mounts(data_root), idle_s=0.2)
    sandbox = await backend.create(spec)
    await ended(backend, sandbox.id)
    with pytest.raises(SandboxGone):
        await backend.attach(sandbox.id)
    await backend.destroy(sandbox.id)
    assert left_of(data_root) == []


async def test_channel_to_an_ended_sandbox_says_that_it_is_gone(
    backend: DockerBackend, spec: SandboxSpec
) -> None:
    sandbox = await backend.create(spec)
    await backend.destroy(sandbox.id)
    with anyio.fail_after(15), pytest.raises(SandboxGone):
        await sandbox.open_channel()


def test_an_engine_may_tell_of_the_lack_of_memory_after_the_end() -> None:
    now = 10**18
    died = {"Action": "die", "timeNano": now, "Actor": {"Attributes": {"exitCode": "137"}}}
    starved = {"Action": "oom", "timeNano": now + 10**8}
    assert client._ending([died]) == (None, "killed")
    assert client._ending([died, starved]) == ("memory", "killed")
    assert client._ending([{"Action": "kill", "timeNano": now}, died]) == ("killed", "lost")


async def test_leftovers_of_a_killed_server_are_swept(
    backend: DockerBackend, spec: SandboxSpec, data_root: Path
) -> None:
    open_spec = SandboxSpec(mounts=spec.mounts, network="open")
    sandbox = await backend.create(open_spec)
    engine = docker.from_env()
    engine.api.remove_container(sandbox.id, force=True)
    engine.close()
    # A living server may be about to make the container of a young record.
    await backend.running()
    assert left_of(data_root) == [sandbox.id]
    note = data_root / "sandbox" / "run" / sandbox.id / "container"
    old = json.loads(note.read_text())
    note.write_text(json.dumps({**old, "made_s": old["made_s"] - 200}))
    await backend.running()
    assert left_of(data_root) == []


KILLED = """
import os, signal, sys, anyio
from pathlib import Path
from mcp_sandbox.backends.docker import client
from mcp_sandbox.models import SandboxSpec
from tests.backends.containers import backend_on, mounts

def create_and_die(api, name, body):
    api.create_container_from_config(body, name)
    os.kill(os.getpid(), signal.SIGKILL)

async def main(root):
    async with backend_on(root) as backend:
        await backend.create(SandboxSpec(mounts=mounts(root)))

client.launch = create_and_die
anyio.run(main, Path(sys.argv[1]))
"""


async def test_container_that_a_killed_server_never_started_is_removed(
    backend: DockerBackend, data_root: Path
) -> None:
    died = await anyio.run_process([sys.executable, "-c", KILLED, str(data_root)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(left_of(data_root)) == 1
    assert await backend.running() == []
    assert left_of(data_root) == []


async def test_record_of_another_backend_is_left_alone(
    backend: DockerBackend, data_root: Path
) -> None:
    foreign = data_root / "sandbox" / "run" / "mcs-00000000000000ff"
    foreign.mkdir(parents=True)
    os.utime(foreign, (0, 0))
    await backend.running()
    await backend.destroy(SandboxId(foreign.name))
    assert foreign.is_dir()


async def test_open_network_reaches_out_and_not_into_another_sandbox(
    backend: DockerBackend, data_root: Path
) -> None:
    spec = SandboxSpec(mounts=mounts(data_root), network="open")
    async with (
        sandbox_of(backend, spec) as one,
        sandbox_of(backend, spec) as two,
        runtime_of(one) as first,
        runtime_of(two) as second,
    ):
        address = (await second.exec("hostname -i")).stdout.strip()
        listen = (
            "import socket; s=socket.create_server(('', 9000)); print(1, flush=True); s.accept()"
        )
        async with anyio.create_task_group() as tasks:
            heard = anyio.Event()

            async def on_output(_stream: str, _data: bytes) -> None:
                heard.set()

            async def serve() -> None:
                await second.exec(["python3", "-c", listen], on_output=on_output, timeout_s=60)

            tasks.start_soon(serve)
            with anyio.fail_after(20):
                await heard.wait()
            tried = await first.exec(f"timeout 2 bash -c '</dev/tcp/{address}/9000'")
            assert not tried.success
            tasks.cancel_scope.cancel()
        gateway = await first.exec("cat /proc/net/route | wc -l")
        assert int(gateway.stdout) > 1
        assert one.facts.network.startswith("open:")
    assert left_of(data_root) == []


async def test_aliases_show_the_same_files(backend: DockerBackend, data_root: Path) -> None:
    own = mounts(data_root)
    alias = Mount(own[0].source, "/mnt/user-data/workspace")
    spec = SandboxSpec(mounts=(*own, alias))
    async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
        result = await runtime.exec("echo hi > a; cat /mnt/user-data/workspace/a")
        assert result.stdout == "hi\n"


async def test_ten_at_once_are_created_and_removed(
    backend: DockerBackend, spec: SandboxSpec, data_root: Path
) -> None:
    async def one() -> None:
        async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
            assert (await runtime.exec("true")).success

    with anyio.fail_after(50):
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(one)
    assert left_of(data_root) == []


async def test_cancelled_creation_leaves_nothing(
    backend: DockerBackend, spec: SandboxSpec, data_root: Path
) -> None:
    for delay in (0.0, 0.05, 0.15):
        with anyio.move_on_after(delay):
            sandbox = await backend.create(spec)
            await backend.destroy(sandbox.id)
        assert left_of(data_root) == []


async def test_inspection_shows_what_was_asked_for(
    backend: DockerBackend, spec: SandboxSpec
) -> None:
    async with sandbox_of(backend, spec) as sandbox:
        found = inspect(sandbox.id)
    host = found["HostConfig"]
    assert host["AutoRemove"]
    assert host["LogConfig"]["Type"] == "none"
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["NetworkMode"] == "none"
    assert found["Config"]["Image"].startswith("sha256:")
    assert "docker.sock" not in json.dumps(found)
