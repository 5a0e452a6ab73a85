from collections.abc import AsyncGenerator
from pathlib import Path

import docker
import pytest

from mcp_sandbox.backends.docker.backend import DockerBackend
from mcp_sandbox.config import DockerConfig
from mcp_sandbox.errors import BackendUnavailable, ImageMissing, InsecureSandbox
from mcp_sandbox.models import Mount, SandboxSpec
from tests.backends.containers import backend_on, engine_on_tcp, left_of, mounts

pytestmark = pytest.mark.docker


@pytest.fixture
async def backend(data_root: Path) -> AsyncGenerator[DockerBackend]:
    async with backend_on(data_root) as backend:
        yield backend


@pytest.fixture
def spec(data_root: Path) -> SandboxSpec:
    return SandboxSpec(mounts=mounts(data_root))


async def test_absent_image_says_what_to_run(data_root: Path, spec: SandboxSpec) -> None:
    config = DockerConfig(image="mcp-sandbox/absent:latest")
    async with backend_on(data_root, config) as backend:
        with pytest.raises(ImageMissing, match="run: mcp-sandbox images build"):
            await backend.create(spec)
    assert left_of(data_root) == []


async def test_image_with_another_runner_says_what_to_run(
    data_root: Path, spec: SandboxSpec
) -> None:
    name = "mcp-sandbox/outdated:test"
    engine = docker.from_env()
    container = engine.api.create_container("mcp-sandbox/base:latest", command="x")
    engine.api.commit(
        container, "mcp-sandbox/outdated", "test", changes="LABEL mcp-sandbox.runner=old"
    )
    engine.api.remove_container(container)
    try:
        async with backend_on(data_root, DockerConfig(image=name)) as backend:
            with pytest.raises(ImageMissing, match="run: mcp-sandbox images build"):
                await backend.create(spec)
    finally:
        engine.api.remove_image(name)
        engine.close()


async def test_unknown_runtime_is_an_error_and_no_silent_default(
    data_root: Path, spec: SandboxSpec
) -> None:
    async with backend_on(data_root, DockerConfig(runtime="missing")) as backend:
        with pytest.raises(BackendUnavailable, match=r"daemon\.json"):
            await backend.create(spec)
    assert left_of(data_root) == []


async def test_absent_directory_is_an_error_that_speaks_of_remote_engines(
    backend: DockerBackend, data_root: Path
) -> None:
    spec = SandboxSpec(mounts=(Mount(data_root / "absent", "/workspace"),))
    with pytest.raises(BackendUnavailable, match="remote engine"):
        await backend.create(spec)
    assert left_of(data_root) == []


async def test_absent_engine_says_what_to_do(data_root: Path, spec: SandboxSpec) -> None:
    config = DockerConfig(host=f"unix://{data_root}/absent.sock")
    async with backend_on(data_root, config) as backend:
        with pytest.raises(BackendUnavailable, match="install and start Docker"):
            await backend.create(spec)


@pytest.mark.parametrize(
    ("field", "asked", "given"),
    [
        ("ReadonlyRootfs", b'"ReadonlyRootfs": true', b'"ReadonlyRootfs": null'),
        ("CapDrop", b'"CapDrop": ["ALL"]', b'"CapDrop": ["all"]'),
        ("PidsLimit", b'"PidsLimit": 512', b'"PidsLimit":   0'),
        ("SecurityOpt", b"no-new-privileges:true", b"no-new-privileges=true"),
        ("CgroupnsMode", b'"CgroupnsMode": "private"', b'"CgroupnsXode": "private"'),
    ],
)
async def test_engine_that_ignores_a_field_is_noticed_and_nothing_stays(
    data_root: Path, spec: SandboxSpec, field: str, asked: bytes, given: bytes
) -> None:
    async with (
        engine_on_tcp(rewrite=(asked, given)) as port,
        backend_on(data_root, DockerConfig(host=f"tcp://127.0.0.1:{port}")) as backend,
    ):
        with pytest.raises(InsecureSandbox, match=f"destroyed: {field} should be"):
            await backend.create(spec)
    assert left_of(data_root) == []
