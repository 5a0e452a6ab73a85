"""A reset does not wait for what earlier ones have thrown away, and nor does anybody else."""

import threading
from functools import partial
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.models import ChatId
from tests.conftest import configured

pytestmark = pytest.mark.bubblewrap


async def test_what_was_thrown_away_earlier_is_deleted_aside(data_root: Path) -> None:
    config, release = configured("bubblewrap", data_root), threading.Event()
    trash = data_root / "sandbox" / "trash"
    with anyio.fail_after(40):
        async with open_manager(config) as manager, anyio.create_task_group() as tasks:
            workspaces = manager._context.workspaces
            session = await manager.session(ChatId("tester", "often"))
            await session.write_file("first", b"")
            await session.reset(keep_files=False)
            # The trash is as busy as with many files.
            wait = lambda _name: not release.wait(30)  # noqa: E731
            tasks.start_soon(partial(workspaces.empty_trash, is_due=wait))
            await session.write_file("second", b"")
            await session.reset(keep_files=False)
            assert (await session.list_files()).total == 0
            new = await manager.session(ChatId("tester", "new"))
            assert (await new.exec("echo runs")).stdout == "runs\n"
            assert len([*trash.iterdir()]) == 2
            release.set()
            while len(left := await workspaces.trashed()) > 1:
                await anyio.lowlevel.checkpoint()
            assert (trash / left[0].name / "workspace" / "second").exists()
