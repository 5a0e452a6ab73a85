"""Links in the place of the runner's own folders lead it nowhere: the files of the user stay."""

import os
import stat
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.base import Backend
from mcp_sandbox.config import Config
from mcp_sandbox.errors import CallerError
from mcp_sandbox.models import Mount, SandboxSpec
from tests.backends.live import connected, made, spec_for
from tests.conftest import configured
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR, if_whole

pytestmark = pytest.mark.parametrize(
    "backend_name", [DOCKER, if_whole(GVISOR), BUBBLEWRAP], indirect=True
)
LONG_AGO = 1_000_000_000
DOT = (
    "class Dot:\n    def _repr_png_(self): return bytes.fromhex('89504e470d0a1a0a') + b'x' * 60\n"
    "display(Dot())"
)
OURS = "1d-0a1b2c.txt"


@pytest.fixture
async def backend(backend_name: str, data_root: Path) -> AsyncGenerator[Backend]:
    config: Config = configured(backend_name, data_root)
    assert config.backend != "auto"
    async with open_backend(config.backend, config) as opened:
        yield opened


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder of the user on the host, writable inside; all in it is old."""
    folder = tmp_path / "project"
    (folder / "output").mkdir(parents=True)
    (folder / "closed").mkdir(mode=0o750)
    for name in ("notes.txt", "build.sh", "build.sh.new", "output/kept.txt", f"output/{OURS}"):
        (folder / name).write_text(f"the user's {name}")
    (folder / OURS).write_text("the user's")
    for path in (folder, *folder.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, 10001, 10001)
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


@pytest.fixture
def spec(tmp_path: Path, project: Path) -> SandboxSpec:
    return spec_for(tmp_path, [Mount(project, "/project")])


def content(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file with its text, every folder, and the modes of both."""
    return {
        str(path.relative_to(folder)): (
            path.read_text() if path.is_file() else "",
            stat.S_IMODE(path.stat().st_mode),
        )
        for path in folder.rglob("*")
    }


async def empty_archive() -> AsyncGenerator[bytes]:
    yield bytes(1024)


@pytest.mark.parametrize(
    "plant",
    [
        "mkdir -p ~/.mcp-sandbox; ln -s /project ~/.mcp-sandbox/output",
        "mkdir -p /workspace/.mcp-sandbox; ln -s /project /workspace/.mcp-sandbox/output",
        "ln -s /project /workspace/.mcp-sandbox",
        "mkdir -p ~/.mcp-sandbox; ln -s /project ~/.mcp-sandbox/shells",
        "ln -s /project ~/.mcp-sandbox; mkdir -p /project/shells",
        "ln -s /project /workspace/.~mcp-unpacked",
        "ln -s /project/closed /workspace/.~mcp-unpacking",
        "ln -s /project/closed ~/.~mcp-unpacking",
        "mkdir -p /workspace/.mcp-sandbox; ln -s /project/new /workspace/.mcp-sandbox/.gitignore",
    ],
    ids=["output", "old", "outer", "shells", "home", "whole", "staged", "homes", "ignore"],
)
async def test_nothing_of_the_user_is_removed_or_changed_through_a_planted_link(
    backend: Backend, spec: SandboxSpec, project: Path, plant: str
) -> None:
    with anyio.fail_after(60):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            assert (await runtime.exec(plant)).success
        before = content(project)
        # In a new sandbox: what an earlier one left is finished at the start.
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            assert (await runtime.exec("seq 1 20000")).success
            assert (await runtime.run_code(DOT, "python", notebook="main")).success
            assert content(project) == before
            # In a shell, what is run may write there itself, but the runner does not begin it.
            with suppress(CallerError):
                await runtime.exec("echo in a shell", shell="build")
            assert (await runtime.files.unpack(empty_archive(), max_bytes=1)).entries == 0
    assert content(project) == before


async def test_only_what_the_runner_has_made_is_cleared_away(
    backend: Backend, spec: SandboxSpec, tmp_path: Path
) -> None:
    kept = tmp_path / "home" / ".mcp-sandbox" / "output"
    with anyio.fail_after(60):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            names = f"{OURS} 1d-0a1b2c-1.png results.txt 1d-report.txt 1d-0a1b2c.csv"
            old = f"cd ~/.mcp-sandbox/output && touch -d @{LONG_AGO} {names}"
            assert (await runtime.exec(f"mkdir -p ~/.mcp-sandbox/output; {old}")).success
            result = await runtime.exec("seq 1 20000")
    assert result.output_file
    assert sorted(path.name for path in kept.iterdir()) == sorted(
        ["results.txt", "1d-report.txt", "1d-0a1b2c.csv", Path(result.output_file).name]
    )


async def test_what_an_earlier_version_kept_in_the_workspace_moves_to_the_home(
    backend: Backend, spec: SandboxSpec
) -> None:
    kept = "1d-0a1b2c.txt 1d-0a1b2c-1.png"
    plant = (
        f"mkdir -p .mcp-sandbox/output; cd .mcp-sandbox; echo '*' > .gitignore; cd output; "
        f"echo long > {OURS}; echo picture > 1d-0a1b2c-1.png; touch -d '3 days ago' {kept}; "
        # An earlier start was killed while it copied.
        f"mkdir -p ~/.mcp-sandbox/output; echo lo > ~/.mcp-sandbox/output/{OURS}"
    )
    with anyio.fail_after(60):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            assert (await runtime.exec(plant)).success
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            assert (await runtime.exec("ls -A")).stdout == ""
            old = await runtime.files.read(f"/workspace/.mcp-sandbox/output/{OURS}")
            assert old == b"long\n"
            age = f"cd ~/.mcp-sandbox/output; find {kept} -mtime +1 -mtime -4 | wc -l"
            assert (await runtime.exec(age)).stdout == "2\n"
            # What a user has put there stays.
            assert (await runtime.exec(f"{plant}; ln -s /project 1d-0a1b2d.txt")).success
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            found = await runtime.exec("find .mcp-sandbox/output ! -type d")
            assert found.stdout == ".mcp-sandbox/output/1d-0a1b2d.txt\n"
