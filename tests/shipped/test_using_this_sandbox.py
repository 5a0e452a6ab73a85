"""Long work goes on between calls, and what the texts say about limits is so."""

import re

from mcp import Client

from mcp_sandbox.config import Config
from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import on_docker_if_whole
from tests.server.scripted import text_of
from tests.shipped.conftest import META, call, run
from tests.shipped.texts import SHIPPED, calls, commands
from tests.test_readme import messages

NAME = "using-this-sandbox"


async def test_every_command_works_as_written(session: Session) -> None:
    (large,) = commands(NAME)
    assert (await run(session, large)).stdout.endswith("99999\n")
    (usage,) = commands(NAME, "references/limits.md")
    assert "/workspace" in (await run(session, usage)).stdout


@on_docker_if_whole
async def test_long_work_goes_on_and_is_found_again_as_written(client: Client) -> None:
    begin, wait, look, stop = calls(NAME)
    begun = ((await call(client, begin)).meta or {})[META]
    assert begun["running"]
    ended = await call(client, wait, id=begun["process"])
    assert "whole" in text_of(ended)
    assert begun["process"] in text_of(await call(client, look))
    endless = await call(client, {"tool": "exec", "command": "sleep 600", "wait_s": 0})
    stopped = await call(client, stop, id=(endless.meta or {})[META]["process"])
    assert not (stopped.meta or {})[META]["running"]


@on_docker_if_whole
async def test_the_user_finds_the_files_where_the_text_says(
    session: Session, config: Config
) -> None:
    text = (SHIPPED / NAME / "SKILL.md").read_text(encoding="utf-8")
    place = re.search(r"~/.local/share/mcp-sandbox/(\S+/USER/chat-CHAT)`", text)
    assert place
    await session.write_file("outputs/result.txt", b"found")
    named = (await session.info()).chat
    folder = config.data_dir / place[1].replace("USER", named.user).replace("CHAT", named.chat)
    assert (folder / "outputs/result.txt").read_bytes() == b"found"


def test_the_messages_that_are_explained_are_ours() -> None:
    text = (SHIPPED / NAME / "references/limits.md").read_text(encoding="utf-8")
    first = " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    for shown in (
        "timed out after … and was killed with all its processes",
        "killed: out of memory",
        "the workspace is full",
        "bytes left out here",
        "the sandbox had ended",
    ):
        assert shown in first
        known = messages().lower()
        assert all(part.strip() in known for part in shown.split("…")), shown
