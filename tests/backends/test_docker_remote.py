import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import anyio
import docker
import pytest
from anyio.abc import ByteStream

from mcp_sandbox.backends.docker.backend import DockerBackend, DockerSandbox
from mcp_sandbox.config import DockerConfig
from mcp_sandbox.errors import BackendUnavailable, SandboxGone
from mcp_sandbox.models import SandboxSpec
from tests.backends.containers import backend_on, engine_on_tcp, mounts, runtime_of, sandbox_of

pytestmark = pytest.mark.docker
SIZE = 20 * 1024 * 1024


def processes(sandbox: DockerSandbox) -> str:
    engine = docker.from_env()
    rows = engine.api.top(sandbox.id, ps_args="-eo pid,args")["Processes"]
    engine.close()
    return "\n".join(row[1] for row in rows or [])


async def work_through(backend: DockerBackend, data_root: Path) -> None:
    """Small and large data in both directions, several channels, nothing left after each."""
    spec = SandboxSpec(mounts=mounts(data_root))
    async with sandbox_of(backend, spec) as sandbox:
        async with runtime_of(sandbox) as one, runtime_of(sandbox) as two:
            with anyio.fail_after(60):
                data = bytes(range(256)) * (SIZE // 256)
                await one.files.write("big", data)
                assert await two.files.read("big") == data
                assert (await two.exec("id -u; pwd")).stdout.split()[1] == "/workspace"
                environments = await one.exec(
                    "cat /proc/[0-9]*/environ 2>/dev/null | grep -c MCP_SANDBOX_TOKEN"
                )
                assert environments.stdout.strip() == "0"
        with anyio.fail_after(20):
            while any(
                "relay/inside.py" in line
                for line in await anyio.to_thread.run_sync(processes, sandbox)
            ):
                await anyio.lowlevel.checkpoint()
        assert (await backend.attach(sandbox.id)).facts == sandbox.facts


async def test_engine_on_tcp_is_reached_through_the_relay(data_root: Path) -> None:
    async with (
        engine_on_tcp() as port,
        backend_on(data_root, DockerConfig(host=f"tcp://127.0.0.1:{port}")) as backend,
    ):
        await work_through(backend, data_root)


@pytest.mark.runsc
async def test_gvisor_is_reached_through_the_relay(data_root: Path) -> None:
    async with backend_on(data_root, DockerConfig(runtime="runsc")) as backend:
        await work_through_gvisor(backend, data_root)


async def work_through_gvisor(backend: DockerBackend, data_root: Path) -> None:
    spec = SandboxSpec(mounts=mounts(data_root))
    async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
        kernel = await runtime.exec("dmesg 2>/dev/null | head -1; cat /proc/version")
        assert "gVisor" in kernel.stdout
        assert "runsc" in sandbox.facts.isolation


def certificates(folder: Path) -> Path:
    """A CA, a certificate for 127.0.0.1 and one for the client, named as docker names them."""
    folder.mkdir()
    script = """
    set -e
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=ca \
        -addext keyUsage=keyCertSign -keyout ca-key.pem -out ca.pem
    for name in server client; do
        openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=$name \
            -keyout $name-key.pem -out $name.csr
        printf 'subjectAltName=IP:127.0.0.1' > ext
        openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca-key.pem -CAcreateserial -days 2 \
            -extfile ext -out $name.pem
    done
    mv client.pem cert.pem; mv client-key.pem key.pem
    """
    subprocess.run(["bash", "-c", script], cwd=folder, check=True, capture_output=True)
    return folder


async def test_engine_with_tls_is_reached_with_the_users_certificates(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = certificates(tmp_path / "certs")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    tls.load_cert_chain(folder / "server.pem", folder / "server-key.pem")
    tls.verify_mode = ssl.CERT_REQUIRED
    async with engine_on_tcp(tls=tls) as port:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(folder))
        async with backend_on(data_root) as backend:
            await work_through_tls(backend, data_root)


async def work_through_tls(backend: DockerBackend, data_root: Path) -> None:
    spec = SandboxSpec(mounts=mounts(data_root))
    async with sandbox_of(backend, spec) as sandbox, runtime_of(sandbox) as runtime:
        await runtime.files.write("big", bytes(SIZE))
        assert await runtime.files.read("big") == bytes(SIZE)


async def test_foreign_certificate_is_refused(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = certificates(tmp_path / "certs")
    foreign = certificates(tmp_path / "foreign")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(foreign / "server.pem", foreign / "server-key.pem")
    async with engine_on_tcp(tls=tls) as port:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(folder))
        async with backend_on(data_root) as backend:
            with pytest.raises(BackendUnavailable, match="certificate is not accepted"):
                await backend.probe()


async def drained(stream: ByteStream) -> None:
    with suppress(anyio.BrokenResourceError):
        async for _ in stream:
            continue


async def test_channel_through_the_relay_says_when_the_sandbox_has_gone(data_root: Path) -> None:
    spec = SandboxSpec(mounts=mounts(data_root))
    async with (
        engine_on_tcp() as port,
        backend_on(data_root, DockerConfig(host=f"tcp://127.0.0.1:{port}")) as backend,
    ):
        sandbox = await backend.create(spec)
        stream = await sandbox.open_channel()
        await backend.destroy(sandbox.id)
        with anyio.fail_after(20):
            await drained(stream)
        await stream.aclose()
        with pytest.raises(SandboxGone):
            await sandbox.open_channel()


async def test_engine_that_is_not_there_says_what_to_do(data_root: Path) -> None:
    async with engine_on_tcp() as port:
        pass
    async with backend_on(data_root, DockerConfig(host=f"tcp://127.0.0.1:{port}")) as backend:
        with pytest.raises(BackendUnavailable, match="nothing listens there"):
            await backend.probe()
