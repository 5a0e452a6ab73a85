"""A server under load whose store is ruined again and again, and which is killed in the end."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.app import open_backend, open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId
from tests.conftest import configured

ROUNDS, RUINS_A_ROUND = 10, 5
ROOT = Path(__file__).parents[2]

SERVER = """
import random, sys, anyio
from pathlib import Path
from mcp_sandbox.app import open_manager
from mcp_sandbox.models import ChatId
from tests.contract.test_store_faults import quick

async def chat(manager, name, first):
    session = await manager.session(ChatId("u", name))
    for number in range(first, first + 10_000):
        await session.write_file(f"f{number}", str(number).encode())
        print(name, number, flush=True)
        await manager.list()

async def main():
    config = quick(Path(sys.argv[1]))
    async with open_manager(config) as manager, anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(chat, manager, name, int(sys.argv[2]))

anyio.run(main)
"""


def quick(data_root: Path) -> Config:
    """A place whose sandboxes end soon after their server."""
    config = configured("unsafe-local", data_root)
    sessions = config.sessions.model_copy(update={"orphaned": 1.0})
    return config.model_copy(update={"sessions": sessions})


def delete(path: Path) -> None:
    path.unlink(missing_ok=True)


def truncate(path: Path) -> None:
    if path.exists():
        os.truncate(path, random.randrange(path.stat().st_size + 1))


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(random.randrange(1, 50_000)))


def replace_by_garbage(path: Path) -> None:
    fresh = path.with_suffix(".garbage")
    fresh.write_bytes(os.urandom(8192))
    fresh.rename(path)


def delete_the_log(path: Path) -> None:
    path.with_name(path.name + "-wal").unlink(missing_ok=True)


RUINS = (delete, truncate, fill_with_garbage, replace_by_garbage, delete_the_log)


def one_round(data_root: Path, first: int) -> set[tuple[str, int]]:
    """What a server, whose store is ruined and which is killed, said it had written."""
    store = data_root / "sandbox" / "sessions.sqlite"
    command = [sys.executable, "-c", SERVER, str(data_root), str(first)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        said: list[bytes] = []
        for _ in range(RUINS_A_ROUND):
            said += [server.stdout.readline() for _ in range(random.randrange(1, 30))]
            random.choice(RUINS)(store)
        server.send_signal(signal.SIGKILL)
        said += server.stdout.read().splitlines(keepends=True)
    words = [line.split() for line in said if line.endswith(b"\n")]
    return {(name.decode(), int(number)) for name, number in words}


@pytest.mark.slow
async def test_whatever_becomes_of_the_store_every_written_file_stays(
    data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_root.mkdir()
    config = quick(data_root)
    written: set[tuple[str, int]] = set()
    with anyio.fail_after(55):
        for number in range(ROUNDS):
            written |= await to_thread.run_sync(one_round, data_root, number * 10_000)
        async with open_manager(config) as manager:
            assert {row.chat for row in await manager.list()} == {ChatId("u", n) for n in "abc"}
            assert (await manager.collect()).items == ()
        async with open_backend("unsafe-local", config) as backend:
            while await backend.running():
                await anyio.sleep(0.1)
    workspaces = data_root / "sandbox" / "workspace" / "u"
    lost = [
        (name, number)
        for name, number in written
        if (workspaces / f"chat-{name}" / f"f{number}").read_text() != str(number)
    ]
    assert lost == []
    aside = (data_root / "sandbox").glob("sessions.sqlite.corrupt-*Z")
    with capsys.disabled():
        sys.stdout.write(
            f"\n{ROUNDS} servers killed, store ruined {ROUNDS * RUINS_A_ROUND} times: "
            f"{len(written)} files written, {len(lost)} lost, {len(list(aside))} ruins kept\n"
        )
