"""Makes the Debian base of an image from packages, for machines that reach no image registry.

mmdebstrap installs into a tar file. It uses the Debian mirrors and the proxies that this
machine's own apt uses.
"""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio import to_thread
from anyio.streams.text import TextReceiveStream

from mcp_sandbox.config import search_path
from mcp_sandbox.errors import BackendUnavailable

BASE_NAME = "mcp-sandbox/debian"
BASE_TAG = "bookworm"
_SUITE = "bookworm"
_NODE = "nodejs"
_LIMIT_S = 1200
_SKIPPED = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")


def packages_of(folder: Path) -> list[str]:
    """The packages that an image names."""
    lines = (folder / "packages.txt").read_text().splitlines()
    return [*(line for line in lines if line and not line.startswith("#")), _NODE]


def packages_digest(folder: Path) -> str:
    """Tells whether a base was made of the same packages."""
    return hashlib.sha256("\n".join([_SUITE, *packages_of(folder)]).encode()).hexdigest()[:16]


async def make_base(folder: Path, tar: Path, progress: Callable[[str], None]) -> None:
    """Write a root directory with the packages of the image in `folder` to a tar file.

    Raises:
        BackendUnavailable: mmdebstrap is absent or failed.
    """
    program = shutil.which("mmdebstrap", path=search_path())
    if not program:
        raise BackendUnavailable(
            "an image from packages needs mmdebstrap: run: apt-get install mmdebstrap"
        )
    packages = await to_thread.run_sync(packages_of, folder)
    with anyio.fail_after(_LIMIT_S):
        command = [program, *await _options(packages), _SUITE, str(tar), *await _mirrors()]
        await _run(command, progress)


async def _options(packages: list[str]) -> list[str]:
    return [
        "--variant=minbase",
        f"--include={','.join(packages)}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _SKIPPED),
        *(f"--aptopt={line}" for line in await _apt_settings()),
        # Settings of this machine are no business of the image.
        '--customize-hook=rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap',
        '--customize-hook=rm -f "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap',
    ]


async def _apt_settings() -> list[str]:
    """How this machine's apt reaches its mirrors: proxies and certificate authorities."""
    dump = await _output(["apt-config", "dump"])
    wanted = ("Acquire::http::Proxy", "Acquire::https::")
    return [line for line in dump.splitlines() if line.startswith(wanted) and '""' not in line]


async def _mirrors() -> list[str]:
    """The Debian mirrors of this machine as lines of sources.list; none means Debian's own."""
    listing = await _output(
        [
            "apt-get",
            "indextargets",
            "--format",
            "$(ORIGIN) $(REPO_URI) $(CODENAME)",
            "Created-By: Packages",
        ]
    )
    rows = {tuple(line.split(" ")) for line in listing.splitlines() if line.startswith("Debian ")}
    return [
        f"deb {uri} {codename} main"
        for _, uri, codename in sorted(row for row in rows if len(row) == 3)
        if codename.removesuffix("-security").removesuffix("-updates") == _SUITE
    ]


async def _output(command: list[str]) -> str:
    """What a program of the package manager says, or nothing where there is none."""
    if not shutil.which(command[0], path=search_path()):
        return ""
    done = await anyio.run_process(command, check=False)
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


async def _run(command: list[str], progress: Callable[[str], None]) -> None:
    last = ""
    async with await anyio.open_process(command, stdin=None, stdout=None) as process:
        assert process.stderr is not None  # noqa: S101 - a pipe is the default
        async for text in TextReceiveStream(process.stderr, errors="replace"):
            for line in filter(None, map(str.strip, text.replace("\r", "\n").splitlines())):
                last = line
                progress(line)
    if process.returncode != 0:
        raise BackendUnavailable(
            f"mmdebstrap failed: {last}; check that `apt-get update` works on this machine"
        )
