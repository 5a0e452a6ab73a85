"""Builds, lists and checks the images that sandboxes start from: what `mcp-sandbox images` does."""

import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyio import to_thread

from mcp_sandbox.backends.docker.client import Connection, Containers, Images
from mcp_sandbox.backends.docker.complaints import build_again
from mcp_sandbox.backends.docker.engine import find_engine
from mcp_sandbox.backends.docker.image_context import context_tar, image_folder
from mcp_sandbox.backends.docker.machine import has_apparmor, is_gvisor, processors
from mcp_sandbox.backends.docker.packages import BASE_NAME, BASE_TAG, make_base, packages_digest
from mcp_sandbox.backends.docker.record import sandbox_user
from mcp_sandbox.backends.docker.spec import PYTHON, RUNNER_LABEL, Placement, container_body
from mcp_sandbox.backends.runner_sources import runner_digest
from mcp_sandbox.config import DockerConfig, docker_variables, home, proxy_variables
from mcp_sandbox.errors import BackendUnavailable, ImageMissing
from mcp_sandbox.models import SandboxId, SandboxSpec

Progress = Callable[[str], None]

_PACKAGES_LABEL = "mcp-sandbox.packages"
_STAGE_LABEL = "mcp-sandbox.stage"
_CHECK_S = 60
_TOOLS = (
    ("python3", "python3 --version"),
    ("pip", "pip --version"),
    ("venv", "python3 -m venv --help | head -1"),
    ("node", "node --version"),
    ("bash", "bash --version"),
    ("git", "git --version"),
    ("curl", "curl --version"),
    ("wget", "wget --version"),
    ("jq", "jq --version"),
    ("ripgrep", "rg --version"),
    ("sqlite3", "sqlite3 --version"),
    ("less", "less --version"),
    ("vim", "vi --version"),
    ("tree", "tree --version"),
    ("file", "file --version"),
    ("zip", "zip -h"),
    ("unzip", "unzip -v"),
    ("tar", "tar --version"),
    ("xz", "xz --version"),
    ("ps", "ps --version"),
    ("htop", "htop --version"),
    ("ping", "ping -V"),
    ("netstat", "netstat --version"),
    ("nslookup", "nslookup -version"),
    ("nc", "command -v nc"),
    ("telnet", "command -v telnet"),
)
_OPTIONAL = ("node",)


@dataclass(frozen=True)
class ImageRow:
    """An image of ours on the engine; `current` says that it holds this version's runner."""

    name: str
    id: str
    size_mb: int
    current: bool


@dataclass(frozen=True)
class Tool:
    """A program that the image should have; `version` is None when it does not work."""

    name: str
    version: str | None
    required: bool


async def build(
    name: str = "base",
    *,
    tag: str | None = None,
    ca_bundle: Path | None = None,
    from_packages: bool = False,
    progress: Progress,
    config: DockerConfig | None = None,
) -> str:
    """Build an image; returns its name. `progress` gets each line, from another thread.

    It is named `tag`, else as ours: never as the image of the configuration, which may be the
    operator's own.
    `from_packages` makes the Debian below it on this machine, where no registry can be reached.
    `ca_bundle` is used during the build alone and is in no layer of the image.

    Raises:
        ConfigError: no such image, or the CA bundle cannot be read.
        BackendUnavailable: the engine does not answer, or a step of the build failed.
    """
    config = config or DockerConfig()
    folder = await to_thread.run_sync(image_folder, name)
    connection = _connection(config)
    images = Images(connection)
    tag = tag or f"mcp-sandbox/{name}:latest"
    arguments = {**proxy_variables(), "RUNNER_DIGEST": await to_thread.run_sync(runner_digest)}
    try:
        if from_packages:
            arguments["BASE"] = await _base_from_packages(images, folder, progress)
        context = await to_thread.run_sync(context_tar, folder, ca_bundle)
        await images.build(context, tag, arguments, progress)
        await _remove_leftovers(images, stages=ca_bundle is not None)
    finally:
        await connection.aclose()
    return tag


async def list_images(config: DockerConfig | None = None) -> list[ImageRow]:
    """The images of ours that the engine has.

    Raises:
        BackendUnavailable: the engine does not answer.
    """
    connection = _connection(config or DockerConfig())
    digest = await to_thread.run_sync(runner_digest)
    try:
        found = await Images(connection).labelled(RUNNER_LABEL)
    finally:
        await connection.aclose()
    return [
        ImageRow(name, image.id, image.size // 1_000_000, image.labels[RUNNER_LABEL] == digest)
        for image in found
        for name in image.names
    ]


async def check(config: DockerConfig | None = None) -> list[Tool]:
    """Run the image once, as hardened as a sandbox, and ask each tool for its version.

    Raises:
        ImageMissing: the engine does not have it.
        BackendUnavailable: it does not answer, or the image does not run.
    """
    config = config or DockerConfig()
    connection = _connection(config)
    try:
        image = await Images(connection).find(config.image)
        info = await connection.info()
        place = Placement(
            name=SandboxId("check"),
            image=image.id,
            instance="check",
            token=secrets.token_hex(4),
            user=":".join(map(str, sandbox_user())),
            socket_directory=None,
            runtime=config.runtime,
            apparmor=has_apparmor(info),
            gvisor=is_gvisor(info, config.runtime),
            processors=processors(info),
        )
        body = container_body(SandboxSpec(mounts=()), place)
        body["Entrypoint"] = [PYTHON, "-I", "-S", "-c", _CHECK, *(line for _, line in _TOOLS)]
        body["HostConfig"] |= {"AutoRemove": False, "LogConfig": {"Type": "json-file"}}
        code, said = await Containers(connection).run(body, timeout_s=_CHECK_S)
    finally:
        await connection.aclose()
    versions = said.splitlines()
    if code != 0 or len(versions) != len(_TOOLS):
        raise BackendUnavailable(
            f"{config.image} does not run ({said[-300:].strip()!r}); {build_again(config.image)}"
        )
    return [
        Tool(name, version.strip() or None, name not in _OPTIONAL)
        for (name, _), version in zip(_TOOLS, versions, strict=True)
    ]


# One line for each command: the first line of what it says, or nothing when it fails.
_CHECK = """
import subprocess, sys
for command in sys.argv[1:]:
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    print(lines[0][:100] if done.returncode == 0 and lines else "")
"""


async def _base_from_packages(images: Images, folder: Path, progress: Progress) -> str:
    """The name of a Debian base made on this machine; one of the same packages is used again."""
    name = f"{BASE_NAME}:{BASE_TAG}"
    digest = await to_thread.run_sync(packages_digest, folder)
    try:
        if (await images.find(name)).labels.get(_PACKAGES_LABEL) == digest:
            progress(f"{name} is there already; remove it to have it made anew")
            return name
    except ImageMissing:
        progress(f"making {name} from Debian packages")
    with tempfile.TemporaryDirectory(prefix="mcp-sandbox-base-") as scratch:
        tar = Path(scratch) / "base.tar"
        await make_base(folder, tar, progress)
        progress("importing it into the engine")
        await images.load(tar, BASE_NAME, BASE_TAG, [f"LABEL {_PACKAGES_LABEL}={digest}"])
    return name


async def _remove_leftovers(images: Images, *, stages: bool) -> None:
    """Remove what the new image replaced, and on request the stage that it was made in."""
    for label in (RUNNER_LABEL, *((_STAGE_LABEL,) if stages else ())):
        for image in await images.labelled(label, dangling=True):
            await images.remove(image.id)


def _connection(config: DockerConfig) -> Connection:
    return Connection(lambda: find_engine(config.host, docker_variables(), home()))
