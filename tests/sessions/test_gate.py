"""The one way into a sandbox: whoever calls is counted and told of alike."""

import ast
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import Draining, NotFound
from mcp_sandbox.models import ChatId, TerminalEnd
from mcp_sandbox.runner.wire.terminal_frames import size
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.telemetry.metrics import Metrics
from tests.conftest import configured

PACKAGE = Path(__file__).parents[2] / "mcp_sandbox"
CHAT = ChatId("tester", "gate")
# What makes, looks after and ends a sandbox asks its runner these things alone.
CARE = {
    *("aclose", "background", "broken", "hello", "retire", "silent", "status", "wait_broken"),
    "watch_background",
}


@asynccontextmanager
async def session_of(config: Config, metrics: Metrics | None = None) -> AsyncGenerator[Session]:
    with anyio.fail_after(40):
        async with open_manager(config, count=metrics.count if metrics else None) as manager:
            yield await manager.session(CHAT)


async def shell(session: Session, *command: str) -> TerminalEnd:
    async def typed() -> AsyncGenerator[bytes]:
        yield size(24, 80)
        await anyio.sleep_forever()

    async def show(_data: bytes) -> None:
        return

    return await session.shell(typed(), show, args={"tty": False, "command": list(command)})


async def test_calls_of_a_program_and_of_a_shell_are_told_of_and_counted(
    data_root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mcp_sandbox")
    metrics = Metrics()
    async with session_of(configured("unsafe-local", data_root), metrics) as session:
        await session.exec("exit 3")
        await session.write_file("a", b"s3cret")
        with pytest.raises(NotFound):
            await session.read_file("absent")
        assert (await shell(session, "sh", "-c", "exit 4")).exit_code == 4
        await session.reset()
    told = [vars(record) for record in caplog.records if record.message == "call"]
    assert [(line["tool"], line["outcome"], line.get("exit_code")) for line in told] == [
        ("exec", "ok", 3),
        ("write_file", "ok", None),
        ("read_file", "caller_error", None),
        ("shell", "ok", 4),
        ("sandbox_reset", "ok", None),
    ]
    assert {(line["chat"], line["backend"]) for line in told} == {("tester/gate", "unsafe-local")}
    assert "s3cret" not in caplog.text
    counted = {each.tool: (each.calls, each.failed) for each in metrics.snapshot()}
    assert counted["read_file"] == (1, 1)
    assert counted["shell"] == (1, 0)
    assert sum(calls for calls, _ in counted.values()) == 5


async def test_a_program_writes_text_as_it_is(data_root: Path) -> None:
    async with session_of(configured("unsafe-local", data_root)) as session:
        written = await session.write_file("note.txt", "größer\n")
        await session.write_file("note.txt", "und mehr", append=True)
        assert written.written == 9
        assert (await session.exec("cat note.txt")).stdout == "größer\nund mehr"


async def test_no_call_enters_once_the_block_has_ended(data_root: Path) -> None:
    async with session_of(configured("unsafe-local", data_root)) as session:
        await session.write_file("a", b"kept")
    processes = session.processes
    for late in (
        session.read_file("a"),
        session.reset(),
        shell(session),
        session.exec("true", wait_s=0),
        processes.list(),
        processes.wait("p1-abc"),
        processes.stop("p1-abc"),
    ):
        with pytest.raises(Draining, match=r"`async with` block .* has ended.*open_session\(\)"):
            await late


def test_there_is_no_other_way_into_a_sandbox() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {what}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "relay"
        for what in entrances(ast.parse(path.read_text()))
    }
    assert found == {
        "sessions/gate.py: hold.open_sandbox",
        "sessions/gate.py: held.runtime.bounded",
        # The server's own: a chat's files go out, and into a sandbox that is for this alone.
        "sessions/saving.py: runtime.files",
        # The same where a chat's own sandbox holds them, whose skills are copied in, too.
        "sessions/sandbox/sandbox_files.py: runtime.files",
        "sessions/sandbox/sandbox_files.py: held.runtime.files",
        # They are given that of a call that has entered.
        "sessions/session.py: runtime.exec",
        "sessions/session.py: runtime.files",
        # An end is told once.
        "sessions/sandbox/chat_sandbox.py: self._held.runtime.processes.untold",
        "sessions/sandbox/chat_sandbox.py: self._held.runtime.processes.tell",
        "sessions/sandbox/chat_sandbox.py: held.runtime.processes.untold",
        # What leaves no process to save the files with is killed before its sandbox ends.
        "sessions/sandbox/context.py: self.runtime.exec",
        "sessions/sandbox/context.py: self.runtime.processes.list",
        "sessions/sandbox/context.py: self.runtime.processes.stop",
    }


def entrances(tree: ast.Module) -> Iterator[str]:
    """The uses of a sandbox beyond its care, but for those of a call that has `entered`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if isinstance(owner, ast.Attribute) and owner.attr == "processes":
            owner = owner.value
        whose = getattr(owner, "attr", getattr(owner, "id", ""))
        uses = whose == "runtime" and node.attr not in CARE | {"processes"}
        if node.attr == "open_sandbox" or uses:
            written = ast.unparse(node)
            if node.attr == "open_sandbox" or not written.startswith("entered."):
                yield written
