"""The tools over a real runner, through a real MCP client."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.server.text import MAX_TEXT_BYTES, count_bytes
from tests.conftest import configured
from tests.server.scripted import one_chat, text_of

META = "mcp-sandbox/result"


class Tools:
    """Calls tools by name, in this process."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def result(self, tool: str, **arguments: Any) -> Any:
        return await self.client.call_tool(tool, arguments)

    async def text(self, tool: str, **arguments: Any) -> str:
        result = await self.result(tool, **arguments)
        assert not result.is_error, text_of(result)
        return text_of(result)

    async def error(self, tool: str, **arguments: Any) -> str:
        result = await self.result(tool, **arguments)
        assert result.is_error
        return text_of(result)


@asynccontextmanager
async def tools_of(data_root: Path, *, mode: Any = "auto") -> AsyncGenerator[Tools]:
    chat = one_chat(ChatId("tester", "one"))
    with anyio.fail_after(40):
        async with open_manager(configured("unsafe-local", data_root)) as manager:
            server = build_server(make_session_finder(chat, manager.session), isolated=False)
            async with Client(server, mode=mode) as client:
                yield Tools(client)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_code_runs_and_what_it_did_is_told(data_root: Path, mode: str) -> None:
    async with tools_of(data_root, mode=mode) as tools:
        result = await tools.result(
            "run_code",
            code="import sys\nprint(6 * 7)\nprint('no', file=sys.stderr)\n"
            "open('new.txt', 'w').write('x')\nsys.exit(3)",
        )
        assert [block.text for block in result.content] == [
            "42\n",
            "[stderr]\nno\n",
            "[exit code 3]\n[files created or changed: new.txt]",
        ]
        assert not result.is_error
        assert result.meta[META]["exit_code"] == 3


async def test_bash_gets_its_input_and_variables(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        told = await tools.text("exec", command='cat; echo "$A"', stdin="in\n", env={"A": "b"})
        assert told == "in\nb\n"


async def test_a_file_is_written_read_edited_found_moved_and_deleted(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        await tools.text("write_file", path="src/a.py", content="x = 1\ny = 2\n")
        assert await tools.text("read_file", path="src/a.py") == "     1\tx = 1\n     2\ty = 2"
        assert "+x = 10" in await tools.text("edit_file", path="src/a.py", old="1", new="10")
        assert "a.py:1:x = 10" in await tools.text("grep", pattern="^x", glob="*.py")
        assert "a.py" in await tools.text("glob", pattern="**/*.py")
        listing = (await tools.result("list_files", path="src")).structured_content
        assert [(e["name"], e["type"], e["size"]) for e in listing["entries"]] == [
            ("src/a.py", "file", 13)
        ]
        await tools.text("move_file", source="src/a.py", destination="b.py")
        await tools.text("delete_file", path="src", recursive=True)
        listed = await tools.result("exec", command="ls")
        assert listed.content[0].text == "b.py\n"


async def test_a_missing_file_is_an_error_that_says_what_to_do(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        assert "no such file" in await tools.error("read_file", path="nope")
        await tools.text("write_file", path="a", content="first line\n")
        assert "first line" in await tools.error("edit_file", path="a", old="first lien", new="x")


async def test_the_whole_of_a_long_output_can_be_read(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        result = await tools.result("exec", command="seq 1 1000000")
        told = text_of(result)
        assert count_bytes(told) <= MAX_TEXT_BYTES
        head, _, rest = told.partition("\n[… ")
        last = int(head.split()[-1])
        _, _, offset = rest.partition(" offset=")
        page = await tools.text(
            "read_file",
            path=result.meta[META]["output_file"],
            offset=int(offset.split()[0]),
            limit=2,
        )
        assert page.split()[1] == str(last + 1)


async def test_a_call_over_its_time_ends_with_what_it_printed(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        told = await tools.text("exec", command="echo begun; sleep 100", timeout_s=1)
        assert told.startswith("begun\n")
        assert "[timed out after 1 s" in told


async def test_cancelling_a_call_kills_its_whole_tree(data_root: Path) -> None:
    """The protocol forbids an answer to a cancelled request; the next call is answered."""
    begun = anyio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if "begun" in str(message):
            begun.set()

    async with tools_of(data_root, mode="legacy") as tools:

        async def endless() -> None:
            command = "setsid sleep 7654321 & (sleep 7654321 &) ; echo begun; sleep 7654321"
            await tools.client.call_tool(
                "exec", {"command": command}, progress_callback=on_progress
            )

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(endless)
            await begun.wait()
            tasks.cancel_scope.cancel()
        left = "while pgrep -f 'sleep 765432[1]' >/dev/null; do sleep 0.05; done; echo gone"
        assert await tools.text("exec", command=left, timeout_s=20) == "gone\n"


async def test_live_output_is_reported_while_the_command_runs(data_root: Path) -> None:
    heard: list[str] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append(str(message))

    async with tools_of(data_root, mode="legacy") as tools:
        result = await tools.client.call_tool(
            "exec",
            {"command": "echo first; sleep 0.5; echo second"},
            progress_callback=on_progress,
        )
        assert text_of(result) == "first\nsecond\n"
        assert heard[0] == "first"


async def test_the_sandbox_describes_itself(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        info = (await tools.result("sandbox_info")).structured_content
        assert info["chat"] == "tester/one"
        assert info["backend"] == "unsafe-local"
        assert info["programs"]["python3"].startswith("3.")
        assert info["workspace"]["path"] == "/workspace"


async def test_a_reset_keeps_files_unless_told_otherwise(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        await tools.text("write_file", path="a", content="kept")
        await tools.text("sandbox_reset")
        assert await tools.text("exec", command="cat a") == "kept"
        await tools.text("sandbox_reset", keep_files=False)
        assert await tools.text("exec", command="ls -A") == "(no output)"


async def test_the_next_result_tells_once_that_the_sandbox_had_ended(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        await tools.text("exec", command="sleep 86377 & sleep 0.2")
        async with open_backend("unsafe-local", configured("unsafe-local", data_root)) as backend:
            (info,) = await backend.running()
            await backend.destroy(info.id)
        # A client that shows the structured part of a result only would never tell.
        await tools.text("list_files")
        result = await tools.result("exec", command="echo new")
        assert [block.text.splitlines()[0][:30] for block in result.content] == [
            "new",
            "[The sandbox had ended since t",
        ]
        assert "sleep 86377" in text_of(result)
        assert "had ended" not in await tools.text("exec", command="echo again")


async def test_a_terminal_is_answered_as_its_screen_once_it_is_drawn_on(data_root: Path) -> None:
    async with tools_of(data_root) as tools:
        draws = r"printf 'one\ntwo\033[1;3Hmore\033[31m\n\n\nlast\n'; exit 3"
        text = await tools.text("exec", command=draws, tty=True)
        assert text == "onmore\ntwo\n\nlast\n[exit code 3]"
        flood = await tools.text("exec", command="seq 100000", tty=True)
        assert flood.startswith("1\n2\n")
        assert re.search(
            r"\n\[… [\d,]+ bytes left out here; .*\n.*\n99999\n100000\n$", flood, re.DOTALL
        )
        assert "stdin" in await tools.error("exec", command="cat", tty=True, stdin="x")
