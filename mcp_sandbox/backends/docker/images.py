"""Builds, lists and checks the images of sandboxes, for `mcp-sandbox images`."""

import hashlib
import io
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import anyio
from anyio import to_thread
from anyio.streams.text import TextReceiveStream

from mcp_sandbox.backends.docker import client
from mcp_sandbox.backends.docker.client import EngineConnection, Image, connection_of
from mcp_sandbox.backends.docker.engine import build_again, is_gvisor, processors, security_options
from mcp_sandbox.backends.docker.spec import PYTHON, RUNNER_LABEL, Placement, container_body
from mcp_sandbox.backends.runner_copy import GITCONFIG, PACKAGE, runner_digest, runner_sources
from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.config import DockerConfig, proxy_variables, search_path
from mcp_sandbox.errors import BackendUnavailable, ConfigError, ImageMissing
from mcp_sandbox.models import SandboxId, SandboxSpec

BASE_NAME = "mcp-sandbox/debian"
BASE_TAG = "trixie"
_NODE = "node.sh"
_LIMIT_S = 1200
_REACHED = ("Acquire::http::Proxy", "Acquire::https::")
_SKIPPED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")
_FOLDERS = (PACKAGE / "_images", PACKAGE.parent / "images")
Progress = Callable[[str], None]
_CONTEXT_LABEL = "mcp-sandbox.context"
_PACKAGES_LABEL = "mcp-sandbox.packages"
_STAGE_LABEL = "mcp-sandbox.stage"
_ON_OURS = re.compile(r"^ARG BASE=mcp-sandbox/(\S+):latest$", re.MULTILINE)
_RUN_S = 60
# Prints one line of JSON: the first line of each tool's version output, null if it fails.
_CHECK = """
import glob, json, subprocess
found = {}
for path in sorted(glob.glob("/opt/mcp-sandbox/tools/*.txt")):
    for line in open(path):
        name, _, command = line.strip().partition(" ")
        if name and not name.startswith("#"):
            done = subprocess.run(["bash", "-o", "pipefail", "-c", command or name + " --version"],
                text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT)
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            found[name] = lines[0][:100] if done.returncode == 0 and lines else None
print(json.dumps(found))
"""


def packages_of(folder: Path) -> list[str]:
    """Return the Debian packages that an image names."""
    lines = (folder / "packages.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def packages_digest(folder: Path) -> str:
    """Return a digest of the packages that a base is made of."""
    parts = [BASE_TAG, *packages_of(folder), (folder / _NODE).read_text()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


async def make_base(folder: Path, tar: Path, progress: Progress) -> None:
    """Write a root directory with an image's packages to a tar file; raise BackendUnavailable."""
    for program in ("mmdebstrap", "npm"):
        if not shutil.which(program, path=search_path()):
            raise BackendUnavailable(
                f"an image from packages needs {program}: run: apt-get install mmdebstrap npm"
            )
    packages = ",".join(await to_thread.run_sync(packages_of, folder))
    with tempfile.TemporaryDirectory(prefix="mcp-sandbox-") as scratch, anyio.fail_after(_LIMIT_S):
        # A folder below: its mode becomes that of /usr/local, and `scratch` is private.
        node = f"{scratch}/node"
        await _run(["sh", str(folder / _NODE), node], progress)
        settings = await _output("apt-config", "dump")
        form = "$(ORIGIN) $(REPO_URI) $(CODENAME)"
        listing = await _output("apt-get", "indextargets", "--format", form, "Created-By: Packages")
        options = [
            "--variant=minbase",
            f"--include={packages}",
            *(f"--dpkgopt=path-exclude={pattern}" for pattern in _SKIPPED),
            # This machine's settings to reach the mirrors: proxies, certificate authorities.
            *(
                f"--aptopt={line}"
                for line in settings
                if line.startswith(_REACHED) and '""' not in line
            ),
            f"--customize-hook=sync-in {node} /usr/local",
            # The image must not keep settings of this machine.
            '--customize-hook=rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap',
            '--customize-hook=rm -f "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap',
        ]
        await _run(["mmdebstrap", *options, BASE_TAG, str(tar), *_mirrors(listing)], progress)


def _mirrors(listing: list[str]) -> list[str]:
    """Return this machine's Debian mirrors as lines of sources.list; none means Debian's own."""
    rows = {tuple(line.split(" ")) for line in listing if line.startswith("Debian ")}
    return [
        f"deb {uri} {codename} main"
        for _, uri, codename in sorted(row for row in rows if len(row) == 3)
        if codename.removesuffix("-security").removesuffix("-updates") == BASE_TAG
    ]


async def _output(*command: str) -> list[str]:
    """Return the lines that a program prints; none if it is not installed or fails."""
    if not shutil.which(command[0], path=search_path()):
        return []
    done = await anyio.run_process(command, check=False)
    return done.stdout.decode(errors="replace").splitlines() if done.returncode == 0 else []


async def _run(command: list[str], progress: Progress) -> None:
    last = ""
    async with await anyio.open_process(command, stdin=None, stdout=None) as process:
        assert process.stderr is not None  # noqa: S101 - a pipe is the default
        async for text in TextReceiveStream(process.stderr, errors="replace"):
            for line in filter(None, map(str.strip, text.replace("\r", "\n").splitlines())):
                last = line
                progress(line)
    if process.returncode != 0:
        raise BackendUnavailable(
            f"{command[0]} failed: {last}; check that apt-get and npm can download packages here"
        )


def image_folders() -> dict[str, Path]:
    """Return the folders of the images that can be built, by name."""
    # Of two folders of one name, that of the first root is used. That of the server has no tools.
    files = [file for root in reversed(_FOLDERS) for file in root.glob("*/tools.txt")]
    return {file.parent.name: file.parent for file in files}


def image_folder(name: str) -> Path:
    """Return the folder of an image that can be built; raise ConfigError if there is none."""
    known = image_folders()
    if name not in known:
        raise ConfigError(f"there is no image {name!r}: choose one of {', '.join(sorted(known))}")
    return known[name]


def _find_base_name(folder: Path) -> str | None:
    found = _ON_OURS.search((folder / "Dockerfile").read_text())
    return found and found[1]


def context_tar(folder: Path, ca_bundle: Path | None) -> io.BytesIO:
    """Return the build context; raise ConfigError if the CA bundle cannot be read. Blocks."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for path in sorted(folder.iterdir()):
            _add(tar, path.name, path.read_bytes())
        _add(tar, "gitconfig", GITCONFIG)
        for source in runner_sources():
            _add(tar, f"mcp_sandbox/{source.relative_to(PACKAGE)}", source.read_bytes())
        if ca_bundle:
            try:
                _add(tar, "ca-bundle.crt", ca_bundle.read_bytes())
            except OSError as exc:
                raise ConfigError(
                    f"the CA bundle {ca_bundle} cannot be read ({exc.strerror}): "
                    "give a file of certificates"
                ) from exc
    target.seek(0)
    return target


def context_digest(folder: Path, below: str = "") -> str:
    """Return a digest of an image's files and of `below`, the digest of its base. Blocks."""
    return hashlib.sha256(context_tar(folder, None).getvalue() + below.encode()).hexdigest()


def _current_digest(folder: Path) -> str:
    below = _find_base_name(folder)
    return context_digest(folder, _current_digest(image_folder(below)) if below else "")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    # Owned by root and dated zero, so that the same sources give the same layer.
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    entry.mode = 0o644
    tar.addfile(entry, io.BytesIO(data))


@dataclass(frozen=True)
class ImageRow:
    """An image of this project on the engine; `current`: built from this version's files."""

    name: str
    id: str
    size_mb: int
    current: bool


@dataclass(frozen=True)
class ImageBuilder:
    """Builds images. `progress` gets each line, from another thread.

    `from_packages` makes their Debian base on this machine, for use where no registry is reachable.
    `ca_bundle` is used during a build only and is in no layer of the image.
    """

    config: DockerConfig
    progress: Progress
    ca_bundle: Path | None = None
    from_packages: bool = False

    async def build(
        self, name: str = "base", *, tag: str | None = None, base: str | None = None
    ) -> str:
        """Build an image; return its name.

        It is named `tag`, else mcp-sandbox/NAME:latest: never as the configured image, which may
        be the operator's own. It is built on `base`, else on the usual one; if that is an image of
        this project and not current, it is built first.

        Raises ConfigError for an unknown image or an unreadable CA bundle, ImageMissing for an
        absent `base`, else BackendUnavailable.
        """
        folder = await to_thread.run_sync(image_folder, name)
        tag, below = tag or name_image(name), await to_thread.run_sync(_find_base_name, folder)
        if below and not base:
            base = await self._current(below)
        async with aclosing(connection_of(self.config)) as connection:
            if self.from_packages and not base:
                base = await _base_from_packages(connection, folder, self.progress)
            made_of = await connection.call(client.find_image, base) if below and base else None
            digest = made_of.labels.get(_CONTEXT_LABEL, "") if made_of else ""
            arguments = {
                **proxy_variables(),
                **({"BASE": base} if base else {}),
                **({} if below else {"RUNNER_DIGEST": await to_thread.run_sync(runner_digest)}),
                "CONTEXT_DIGEST": await to_thread.run_sync(context_digest, folder, digest),
            }
            context = await to_thread.run_sync(context_tar, folder, self.ca_bundle)
            await connection.call(client.build_image, context, tag, arguments, self.progress)
            await self._clear(connection)
        return tag

    async def _current(self, name: str) -> str:
        """Return the full name of an image; build it if it is absent or not current."""
        if any(
            row.current and row.name == name_image(name) for row in await list_images(self.config)
        ):
            return name_image(name)
        self.progress(f"building {name_image(name)} first")
        return await self.build(name)

    async def _clear(self, connection: EngineConnection) -> None:
        """Remove replaced images, and build stages that have read the certificates."""
        for label in (RUNNER_LABEL, *((_STAGE_LABEL,) if self.ca_bundle else ())):
            for image in await connection.call(client.labelled_images, label, dangling=True):
                await connection.call(client.remove_image, image.id)


def name_image(name: str) -> str:
    """Return the name on the engine of an image that this project builds."""
    return f"mcp-sandbox/{name}:latest"


async def list_images(config: DockerConfig) -> list[ImageRow]:
    """Return this project's images on the engine; raise BackendUnavailable."""
    digests = await to_thread.run_sync(
        lambda: {_current_digest(folder) for folder in image_folders().values()}
    )
    async with aclosing(connection_of(config)) as connection:
        found = await connection.call(client.labelled_images, RUNNER_LABEL)

    return [
        ImageRow(name, each.id, each.size // 1_000_000, each.labels.get(_CONTEXT_LABEL) in digests)
        for each in found
        for name in each.names
    ]


async def check(config: DockerConfig) -> dict[str, str | None]:
    """Run the image once, as hardened as a sandbox, and return each tool's version by name.

    The image itself lists its tools; the version of one that does not work is None. Raises
    ImageMissing, and BackendUnavailable if the image does not run.
    """
    async with aclosing(connection_of(config)) as connection:
        image = await connection.call(client.find_image, config.image)
        place = find_place(image, "check", config.runtime, await connection.info())
        code, said = await run_once(connection, place, _CHECK)
    try:
        found = json.loads(said.strip().rpartition("\n")[2])
    except ValueError:
        found = None
    if code != 0 or not found:
        raise BackendUnavailable(
            f"{config.image} reports no tools ({said[-300:].strip()!r}); "
            f"{build_again(config.image)}"
        )
    return cast("dict[str, str | None]", found)


def find_place(image: Image, instance: str, runtime: str, info: dict[str, Any]) -> Placement:
    """Return a placement without network and name, on the engine that `info` describes."""
    return Placement(
        name=SandboxId("unnamed"),
        image=image.id,
        instance=instance,
        user=":".join(map(str, sandbox_user())),
        runtime=runtime,
        apparmor="apparmor" in security_options(info),
        gvisor=is_gvisor(info, runtime),
        processors=processors(info),
    )


async def run_once(
    connection: EngineConnection, place: Placement, *program: str
) -> tuple[int, str]:
    """Run a Python program, as hardened as a sandbox; return exit code and what it printed."""
    body = container_body(SandboxSpec(mounts=()), place)
    body["Entrypoint"] = [PYTHON, "-I", "-S", "-c", *program]
    body["HostConfig"] |= {"AutoRemove": False, "LogConfig": {"Type": "json-file"}}
    return await connection.call(client.run, body, timeout_s=_RUN_S)


async def _base_from_packages(
    connection: EngineConnection, folder: Path, progress: Progress
) -> str:
    """Make a Debian base, unless one of the same packages exists; return its name."""
    name = f"{BASE_NAME}:{BASE_TAG}"
    digest = await to_thread.run_sync(packages_digest, folder)
    try:
        if (await connection.call(client.find_image, name)).labels.get(_PACKAGES_LABEL) == digest:
            progress(f"{name} is there already; remove it to have it made anew")
            return name
    except ImageMissing:
        progress(f"making {name} from Debian packages")
    with tempfile.TemporaryDirectory(prefix="mcp-sandbox-base-") as scratch:
        tar = Path(scratch) / "base.tar"
        await make_base(folder, tar, progress)
        progress("importing it into the engine")
        changes = [f"LABEL {_PACKAGES_LABEL}={digest}"]
        await connection.call(client.load_image, tar, BASE_NAME, BASE_TAG, changes)
    return name
