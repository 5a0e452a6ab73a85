"""Whatever lies in a workspace, every tool answers in bounded time and says something true."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, LimitsConfig
from mcp_sandbox.sessions.session import Session
from tests.conftest import configured
from tests.e2e.attacks import (
    attempt,
    on_bubblewrap,
    on_docker_if_whole,
    on_gvisor_if_whole,
    on_the_host_kernel,
    probe,
)
from tests.e2e.conftest import CHAT

_TOOL_S = 20

Tool = Callable[[Session, str], Awaitable[Any]]
TOOLS: dict[str, Tool] = {
    "read": lambda session, path: session.read_file(path),
    "list": lambda session, path: session.list_files(path, depth=10),
    "glob": lambda session, path: session.glob("**/*", path),
    "grep": lambda session, path: session.grep("x.*y", path),
    "edit": lambda session, path: session.edit_file(path, "a", "b"),
    "append": lambda session, path: session.write_file(path, b"more", append=True),
    "write": lambda session, path: session.write_file(path, b"new"),
    "move": lambda session, path: session.move_file(path, f"{path}-moved", overwrite=True),
    "back": lambda session, path: session.move_file(f"{path}-moved", path),
    "delete": lambda session, path: session.delete_file(path, recursive=True),
}


async def try_every_tool(session: Session, path: str) -> dict[str, str]:
    """What each tool said to a path."""
    said = {}
    for name, tool in TOOLS.items():
        with anyio.fail_after(_TOOL_S):
            said[name] = await attempt(tool(session, path))
    return said


@on_the_host_kernel
async def test_special_files_hold_no_tool_up(session: Session) -> None:
    made = (
        "import json, os, socket\n"
        "os.mkfifo('fifo'); os.symlink('fifo', 'to_fifo'); os.symlink('loop', 'loop')\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('socket')\n"
        "os.symlink('/dev/zero', 'zero'); os.symlink('/dev/random', 'random')\n"
        "os.symlink('/dev/tty', 'tty'); os.symlink('/proc/kmsg', 'kmsg')\n"
        "os.symlink('/proc/self/mem', 'mem'); os.symlink('.', 'here')\n"
        "made = []\n"
        "for kind in (0o060000, 0o020000):\n"
        "    try:\n"
        "        os.mknod('device', kind | 0o666, os.makedev(8, 0)); made.append(kind)\n"
        "    except OSError:\n"
        "        pass\n"
        "print(json.dumps(made))\n"
    )
    assert await probe(session, made) == []
    whole = await try_every_tool(session, ".")
    assert "fifo" in whole["list"]
    for name in ("fifo", "to_fifo", "socket", "loop", "zero", "random", "tty", "kmsg", "mem"):
        said = await try_every_tool(session, name)
        assert "data=b'" not in said["read"], said
    assert (await session.exec("echo fine")).stdout == "fine\n"


@pytest.fixture
async def roomy(backend_name: str, data_root: Path) -> AsyncGenerator[Session]:
    """A session whose files may be larger than usual."""
    limits = LimitsConfig(file_size=11 << 30)
    wide = configured(backend_name, data_root).model_copy(update={"limits": limits})
    async with open_manager(wide) as manager:
        yield await manager.session(CHAT)


@on_the_host_kernel
async def test_a_sparse_file_of_ten_gigabytes_is_no_burden(roomy: Session) -> None:
    result = await roomy.exec("truncate -s 10G sparse; printf end >> sparse; stat -c %s sparse")
    assert result.stdout == f"{10 * 2**30 + 3}\n", result
    with anyio.fail_after(_TOOL_S):
        assert (await roomy.info()).usage.used_bytes < 2**20
    said = await try_every_tool(roomy, "sparse")
    assert "10737418243" in said["list"] + said["read"]


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(150)
@on_the_host_kernel
async def test_a_hundred_thousand_entries_are_listed_in_part(session: Session) -> None:
    made = (
        "import os\nos.mkdir('many')\nfor n in range(100_000): os.close(os.open(f'many/{n}', 65))"
    )
    assert (await session.run_code(made, timeout_s=60)).success
    with anyio.fail_after(_TOOL_S):
        listing = await session.list_files("many", limit=50)
    assert (len(listing.entries), listing.truncated) == (50, True)
    assert (await session.exec("true")).changed_files in ((), None)
    with anyio.fail_after(_TOOL_S):
        assert (await session.info()).usage.files > 0
    await try_every_tool(session, "many")
    assert (await session.exec("ls")).stdout == ""


_DEEP = """
import os
for _ in range(4096):
    os.mkdir("d"); os.chdir("d")
open("bottom", "w").write("x y")
"""


@on_docker_if_whole
async def test_four_thousand_levels_are_walked_and_removed(session: Session) -> None:
    assert (await session.run_code(_DEEP)).success
    with anyio.fail_after(_TOOL_S):
        # A measurement that began before the last level was made may be the newest one.
        assert (await session.info()).usage.files > 0
    said = await try_every_tool(session, "d")
    assert "DeleteResult" in said["delete"], said
    assert (await session.run_code(_DEEP)).success
    with anyio.fail_after(_TOOL_S):
        await session.reset(keep_files=False)
    assert (await session.exec("ls -A")).stdout == ""


_NAMES = [
    b"\xff\xfe",
    b"new\nline",
    b"\x1b[31mred\x1b]0;title\x07",
    b"-rf",
    b" ",
    b"\xe2\x80\xae",
    b"`id`$(id)",
    b"a'b\"c",
    b"\\n",
    b"\x7f\x01",
    b"x" * 255,
    b"caf\xc3\xa9",
    b"*?[",
    b"~",
]


@on_gvisor_if_whole
async def test_every_name_can_be_listed_read_and_deleted(session: Session) -> None:
    made = f"import os\nfor name in {_NAMES!r}: open(os.path.join(b'.', name), 'w').write('x y')"
    assert (await session.run_code(made)).success
    listed = {entry.path for entry in (await session.list_files(".")).entries}
    globbed = set((await session.glob("*")).paths)
    assert len(listed) == len(_NAMES)
    assert len(globbed) == len(_NAMES)
    assert (await session.grep("x y")).files == len(_NAMES)
    for path in globbed:
        assert (await session.read_file(f"./{path}")).data == b"x y"
        assert (await session.delete_file(f"./{path}")).entries == 1
    assert (await session.exec("ls -A")).stdout == ""


_LONG_NAMES = r"""
import os
for _ in range(15):
    os.mkdir("\x01" * 250); os.chdir("\x01" * 250)
for n in range(25):
    open("\x01" * 240 + str(n), "w").close()
print("made")
"""


@on_bubblewrap
async def test_long_names_of_changed_files_do_not_make_a_result_untrue(session: Session) -> None:
    result = await session.run_code(_LONG_NAMES)
    assert (result.stdout, result.exit_code, result.signal) == ("made\n", 0, None)


@on_bubblewrap
async def test_a_call_that_is_too_large_hurts_no_other(session: Session) -> None:
    await session.exec("sleep 86398 & echo $!")
    with anyio.fail_after(3):
        assert "TooLarge" in await attempt(session.exec("true", env={"A": "\x01" * 60_000}))
    assert (await session.exec("pgrep -fc '[s]leep 86398'")).stdout == "1\n"


@on_bubblewrap
async def test_odd_modes_hide_no_file_from_the_meter(session: Session, config: Config) -> None:
    await session.exec("mkdir shut; head -c 3M /dev/urandom > shut/data; chmod 000 shut/data shut")
    with anyio.fail_after(_TOOL_S):
        assert (await session.info()).usage.used_bytes > 3 * 2**20
