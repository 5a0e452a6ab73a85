import io
import re
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

import anyio
import docker
import pytest
from docker.errors import ImageNotFound

from mcp_sandbox.agents.executors import EXECUTORS
from mcp_sandbox.backends.docker import images
from mcp_sandbox.backends.docker.client import EngineConnection, build_image, connection_of
from mcp_sandbox.backends.docker.engine import Engine
from mcp_sandbox.backends.docker.images import (
    ImageBuilder,
    context_digest,
    context_tar,
    image_folder,
    image_folders,
    name_image,
    packages_of,
)
from mcp_sandbox.backends.runner_copy import digest_of, runner_digest, runner_sources
from mcp_sandbox.config import DockerConfig
from mcp_sandbox.errors import BackendUnavailable, ConfigError, ImageMissing
from tests.conftest import configured

BASE = configured("docker", Path("/")).docker
# What a person expects of a computer; agents that run inside come with an image of one's own.
TOOLS = [
    *("vim", "less", "tree", "ping", "netstat", "nslookup", "nc", "telnet", "zip", "unzip", "tar"),
    *("gzip", "htop", "ps", "sed", "awk", "grep", "git", "node", "npm", "python"),
    *("gcc", "g++", "make", "git-lfs", "file", "pkg-config"),
]
_ONLY_OF_BUILDS = re.compile(
    r"ca-bundle|^tmp/.|^opt/(programs|packages)|_cacache|/\.npm|npmrc$|\.package-lock\.json$|_logs/"
    r"|^var/lib/apt/lists/.|^var/cache/apt/.|^root/\.(npm|cache)"
)
MARK = b"MARK-OF-A-CERTIFICATE-AUTHORITY-5f0c"


def quiet(_line: str) -> None:
    return


@asynccontextmanager
async def temporary_image(name: str) -> AsyncGenerator[DockerConfig]:
    try:
        yield DockerConfig(image=name)
    finally:
        engine = docker.from_env()
        with suppress(ImageNotFound):
            engine.api.remove_image(name)
        engine.close()


def contents(image: str) -> Iterator[tuple[str, bytes]]:
    """Every file of every layer of an image, and its configuration, as the engine saves it."""
    engine = docker.from_env()
    with tempfile.TemporaryFile() as saved:
        saved.writelines(engine.api.get_image(image))
        engine.close()
        saved.seek(0)
        yield from saved_contents(saved)


def saved_contents(saved: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(fileobj=saved) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is None:
                continue
            if member.name.endswith("layer.tar") or member.name.startswith("blobs/"):
                yield from layer_contents(file.read())
            else:
                yield member.name, file.read()


def layer_contents(data: bytes) -> Iterator[tuple[str, bytes]]:
    if not tarfile.is_tarfile(io.BytesIO(data)):
        yield "configuration", data
        return
    with tarfile.open(fileobj=io.BytesIO(data)) as layer:
        for member in layer:
            file = layer.extractfile(member) if member.isreg() else None
            yield member.name, file.read() if file else b""


def test_context_holds_the_runner_the_relay_and_nothing_else_of_ours() -> None:
    with tarfile.open(fileobj=context_tar(image_folder("base"), None)) as tar:
        names = set(tar.getnames())
    assert {"Dockerfile", "packages.txt", "install.sh"} <= names
    ours = {name for name in names if name.startswith("mcp_sandbox/")}
    assert "mcp_sandbox/runner/__main__.py" in ours
    assert {name.split("/")[1] for name in ours} == {"runner", "relay"}
    assert all(name.endswith((".py", ".cjs")) for name in ours)


def test_digest_is_a_digest_and_stays_the_same() -> None:
    assert len(runner_digest()) == 64
    assert runner_digest() == digest_of(runner_sources())


def test_unknown_image_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="choose one of base"):
        image_folder("../base")


def test_unreadable_ca_bundle_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent cannot be read"):
        context_tar(image_folder("base"), tmp_path / "absent")


def test_packages_of_the_image_name_the_tools() -> None:
    packages = packages_of(image_folder("base"))
    assert {"python3", "python3-venv", "git", "ripgrep", "vim", "sqlite3"} <= set(packages)
    assert len(packages) == len(set(packages))


@pytest.mark.docker
async def test_check_finds_a_version_of_every_tool() -> None:
    versions = await images.check(BASE)
    assert [name for name, version in versions.items() if not version] == []
    assert versions.keys() >= {*TOOLS, "python3"}
    assert (versions["python3"] or "").startswith("Python 3.13.")
    assert (versions["node"] or "").startswith("v22.")


@asynccontextmanager
async def built_on_base(lines: str, folder: Path) -> AsyncGenerator[DockerConfig]:
    """An image of an operator's own: these lines on top of ours, with the files of a folder."""
    (folder / "Dockerfile").write_text(f"FROM {BASE.image}\n{lines}\n")
    context = await anyio.to_thread.run_sync(context_tar, folder, None)
    async with (
        temporary_image("mcp-sandbox/own-of-a-test:latest") as config,
        aclosing(connection_of(config)) as connection,
    ):
        await connection.call(build_image, context, config.image, {}, quiet)
        yield config


@pytest.mark.docker
async def test_an_operators_own_image_may_name_tools_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("# Ours.\n\nabsent\nown echo 1.0; echo more\n")
    async with built_on_base("COPY own.txt /opt/mcp-sandbox/tools/", tmp_path) as config:
        versions = await images.check(config)
    assert (versions["own"], versions["absent"]) == ("1.0", None)
    assert versions["bash"]


@pytest.mark.docker
async def test_an_image_that_names_no_tools_does_not_pass(tmp_path: Path) -> None:
    without = "USER root\nRUN rm -r /opt/mcp-sandbox/tools\nUSER 10001:10001"
    async with built_on_base(without, tmp_path) as config:
        with pytest.raises(BackendUnavailable, match="reports no tools"):
            await images.check(config)


@pytest.mark.docker
async def test_check_of_an_absent_image_says_what_to_run() -> None:
    with pytest.raises(ImageMissing, match="run: mcp-sandbox images build"):
        await images.check(DockerConfig(image="mcp-sandbox/absent:latest"))


@pytest.mark.docker
async def test_absent_image_of_the_operator_is_not_said_to_come_with_ours() -> None:
    with pytest.raises(ImageMissing, match="images build, and then build own:1 on top of it"):
        await images.check(DockerConfig(image="own:1"))


@pytest.mark.docker
async def test_list_tells_whether_an_image_holds_the_current_runner() -> None:
    rows = {row.name: row for row in await images.list_images(BASE)}
    assert rows[BASE.image].current
    assert 50 < rows[BASE.image].size_mb <= 650


@pytest.mark.docker
async def test_image_that_was_built_from_other_files_is_not_current(tmp_path: Path) -> None:
    async with built_on_base("LABEL mcp-sandbox.context=older", tmp_path) as config:
        rows = {row.name: row.current for row in await images.list_images(config)}
    assert not rows[config.image]
    assert rows[BASE.image]


def test_digest_of_an_image_is_another_when_what_is_below_it_is() -> None:
    folder = image_folder("claude")
    assert len({context_digest(folder, below) for below in ("", "one", "other")}) == 3


def test_every_agent_with_an_image_has_one_that_can_be_built() -> None:
    named = {each.image for each in EXECUTORS.values() if each.image}
    assert named <= {name_image(name) for name in image_folders()}


@pytest.mark.docker
async def test_build_on_an_absent_image_says_what_to_run() -> None:
    with pytest.raises(ImageMissing, match="no image absent:1"):
        await ImageBuilder(BASE, quiet).build("claude", base="absent:1")


@pytest.mark.docker
@pytest.mark.claude
@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(900)
async def test_images_of_an_agent_have_its_programs_and_no_trace_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    trusted = Path("/etc/ssl/certs/ca-certificates.crt")
    bundle.write_bytes(b"# " + MARK + b"\n" + (trusted.read_bytes() if trusted.exists() else b""))
    monkeypatch.setenv("ftp_proxy", "http://user:secret-of-the-proxy@127.0.0.1:1")
    builder = ImageBuilder(BASE, quiet, ca_bundle=bundle)
    async with (
        temporary_image("mcp-sandbox/claude-of-a-test:latest") as claude,
        temporary_image("mcp-sandbox/claude-full-of-a-test:latest") as full,
    ):
        await builder.build("claude", tag=claude.image, base=BASE.image)
        await builder.build("claude-full", tag=full.image, base=claude.image)
        rows = {row.name: row for row in await images.list_images(BASE)}
        assert rows[claude.image].current
        assert rows[full.image].current
        assert rows[claude.image].size_mb <= 900
        assert rows[full.image].size_mb <= 1200
        tools = await images.check(full)
        marked, odd = await anyio.to_thread.run_sync(traces, full.image)
        said = await anyio.to_thread.run_sync(history, full.image)
    assert [name for name, version in tools.items() if not version] == []
    assert tools.keys() >= {*TOOLS, "claude", "ccr", "go"}
    assert marked == []
    assert odd == []
    assert not re.search(r"https?:|registry|ca-bundle|proxy", said)


def traces(image: str) -> tuple[list[str], list[str]]:
    """The files with something of the machine in them, and those that only a build needs."""
    marked, odd = list[str](), list[str]()
    for path, data in contents(image):
        if MARK in data or b"secret-of-the-proxy" in data:
            marked.append(path)
        if data and _ONLY_OF_BUILDS.search(path):
            odd.append(path)
    return marked, odd


def history(image: str) -> str:
    engine = docker.from_env()
    said = cast(Any, engine.api).history(image)
    engine.close()
    return "\n".join(str(each["CreatedBy"]) for each in said)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_image_builds_without_a_trace_of_the_machine_it_was_built_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes(b"# " + MARK + b"\n")
    monkeypatch.setenv("http_proxy", "")
    monkeypatch.setenv("ftp_proxy", "http://user:secret-of-the-proxy@127.0.0.1:1")
    lines: list[str] = []
    own = DockerConfig(image="operators/own:1")
    async with temporary_image("mcp-sandbox/built-by-a-test:latest") as config:
        builder = ImageBuilder(own, lines.append, ca_bundle=bundle, from_packages=True)
        name = await builder.build(tag=config.image)
        assert name == config.image
        rows = {row.name: row.current for row in await images.list_images(config)}
        assert rows[name]
        assert own.image not in rows
        seen = dict(contents(name))
    assert any("Step" in line for line in lines)
    assert [path for path, data in seen.items() if MARK in data] == []
    assert [path for path, data in seen.items() if b"secret-of-the-proxy" in data] == []
    assert [path for path in seen if "ca-bundle.crt" in path or path.startswith("tmp/")] == []
    assert "etc/apt/apt.conf.d/99mmdebstrap" not in seen
    assert not any(path.endswith("EXTERNALLY-MANAGED") for path in seen)
    assert not any("/.npm" in path or "_cacache" in path for path in seen)
    assert any(path.startswith("opt/mcp-sandbox/") and path.endswith(".pyc") for path in seen)


@pytest.mark.docker
async def test_failed_step_of_a_build_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {BASE.image}\nRUN exit 7\n")
    context = await anyio.to_thread.run_sync(context_tar, tmp_path, None)
    connection = EngineConnection(lambda: Engine("unix:///var/run/docker.sock"))
    with pytest.raises(BackendUnavailable, match="returned a non-zero code: 7"):
        await connection.call(build_image, context, "mcp-sandbox/x", {}, quiet)
    await connection.aclose()


@pytest.mark.docker
async def test_build_on_a_base_that_cannot_be_pulled_names_the_way_without(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM registry.invalid/debian:trixie-slim\n")
    context = await anyio.to_thread.run_sync(context_tar, tmp_path, None)
    connection = EngineConnection(lambda: Engine("unix:///var/run/docker.sock"))
    with anyio.fail_after(50), pytest.raises(BackendUnavailable, match="--from-packages"):
        await connection.call(build_image, context, "mcp-sandbox/x", {}, quiet)
    await connection.aclose()
