"""What goes on without its call, as an agent meets it: through the tools of a real daemon."""

import re
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.conftest import configured
from tests.contract.test_health import destroy
from tests.daemon.running import Client, Place, in_chat, listening, place, running, starting
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, UNSAFE, if_whole

BACKENDS = [BUBBLEWRAP, if_whole(DOCKER), if_whole(UNSAFE)]
LASTS = "touch begun; while [ ! -e go ]; do sleep 0.02; done; echo done > finished; echo out"


def text(result: Any) -> str:
    """All that a model reads of a result."""
    return "\n".join(block["text"] for block in result["content"])


def process_of(result: Any) -> str:
    name: str = result["_meta"]["mcp-sandbox/result"]["process"]
    return name


async def exists(client: Client, name: str) -> None:
    """Wait until a file is there."""
    with anyio.fail_after(20):
        while "no" in await client.exec(f"[ -e {name} ] && echo yes || echo no"):
            await anyio.sleep(0.02)


async def told(client: Client, words: str, tool: str = "exec", **arguments: object) -> str:
    """The news that says so, of the first result that has it; any may, that of the first too."""
    with anyio.fail_after(20):
        while True:
            said = text(await client.call(tool, **(arguments or {"command": "true"})))
            if words in said:
                return said
            await anyio.sleep(0.05)


async def cancel(client: Client, number: int, reason: str) -> None:
    params = {"requestId": number, "reason": reason}
    message = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}
    await client.send(message)


async def begun(client: Client, other: Client, command: str = LASTS) -> int:
    """The number of a call whose command has begun."""
    arguments = {"name": "exec", "arguments": {"command": command}}
    number = await client.request("tools/call", arguments)
    await exists(other, "begun")
    return number


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Place]:
    where = place(tmp_path_factory.mktemp("served"))
    async with running(where):
        yield where


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_long_command_is_followed_over_several_calls(tmp_path: Path, backend: str) -> None:
    where = place(tmp_path, backend)
    async with running(where), in_chat(where, "a") as client:
        first = await client.call("exec", command=f"echo hello; {LASTS}", wait_s=0.3)
        name = process_of(first)
        said = text(first)
        assert said.startswith("hello\n")
        assert re.search(rf"\[goes on as {name} after \d s, at most until \d\d:\d\d UTC; ", said)
        assert f"process action=wait id={name} waits for its end, action=stop ends it" in said
        assert not first.get("isError")
        assert "running" in text(await client.call("process", action="list"))
        still = text(await client.call("process", action="wait", id=name, wait_s=0.1))
        assert re.fullmatch(rf"\(nothing new .*\)\n\[goes on as {name} after \d s\]", still)
        await client.exec("touch go")
        last = text(await client.call("process", action="wait", id=name))
        assert last.startswith("out\n")
        assert f"[{name} has ended after" in last
        assert "exit code 0]" in last
        kept = first["_meta"]["mcp-sandbox/result"]["output_file"]
        assert "hello" in text(await client.call("read_file", path=kept))


async def test_a_server_is_started_by_the_text_that_it_prints(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "a") as client:
        server = "python3 -um http.server 0 --bind 127.0.0.1"
        up = await client.call("exec", command=server, until="Serving HTTP")
        assert "what was waited for is there" in text(up)
        stopped = text(
            await client.call("process", action="stop", id=process_of(up), signal="sigterm")
        )
        assert re.search(r"\[p\S+ has ended after \d s: stopped\]", stopped)


async def test_an_end_is_told_once_with_the_next_result_of_any_tool(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "a") as client:
        name = process_of(await client.call("exec", command=LASTS, wait_s=0))
        await exists(client, "begun")
        said = await told(client, name, "write_file", path="go", content="")
        assert re.search(rf"\[{name} \(touch begun; .*\) ended with exit code 0 after \d s; ", said)
        assert name not in text(await client.call("glob", pattern="*"))


async def test_only_the_last_lines_are_shown_to_who_asks_for_them(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "a") as client:
        name = process_of(await client.call("exec", command="seq 500; sleep 0.2", until="500\n"))
        last = await client.call("process", action="wait", id=name, tail=2)
        assert text(last).startswith("499\n500\n\n[")


@pytest.mark.parametrize("backend", BACKENDS)
async def test_work_goes_on_when_the_client_gives_up_by_its_time_limit(
    tmp_path: Path, backend: str
) -> None:
    where = place(tmp_path, backend)
    async with running(where), in_chat(where, "a") as client, in_chat(where, "a") as other:
        number = await begun(client, other)
        await cancel(client, number, "SdkError: Request timed out")
        said = await told(client, "exec, for which your client did not wait")
        assert re.search(r"\[goes on as p\d+-\w+ after \d s, ", said)
        folder = where.data / "sandbox" / "workspace" / "local" / "chat-a"
        (folder / "go").touch()
        said = await told(client, "ended with exit code 0")
        assert "touch begun" in said
        assert (folder / "finished").read_text() == "done\n"


async def test_nothing_is_left_of_what_a_person_interrupts(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "a") as client, in_chat(where, "a") as other:
        number = await begun(client, other, "touch begun; exec sleep 86391")
        await cancel(client, number, "AbortError: This operation was aborted")
        with anyio.fail_after(20):
            while "1\n" in await other.exec("pgrep -fc '^sleep 8639[1]'"):
                await anyio.sleep(0.02)


async def test_work_goes_on_when_the_daemon_is_stopped_in_a_call(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_SERVE__GRACE": "0.2s"})
    async with running(where) as daemon, in_chat(where, "a") as client:
        async with in_chat(where, "a") as other:
            number = await begun(client, other)
        daemon.process.terminate()
        answer = await client.answer(number)
        name = process_of(answer["result"])
        assert await daemon.end() == 0
    async with running(where), in_chat(where, "a") as client:
        said = await told(client, "ended with exit code 0", command="touch go")
        assert f"[{name} (touch begun" in said


async def test_only_what_was_let_go_outlives_a_daemon_that_is_killed(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_SESSIONS__ORPHANED": "60s"})
    async with starting(where) as daemon:
        await listening(where)
        async with in_chat(where, "a") as client, in_chat(where, "a") as other:
            name = process_of(await client.call("exec", command="sleep 1.5; exit 7", wait_s=0))
            await begun(client, other, "touch begun; exec sleep 86392")
            daemon.process.send_signal(signal.SIGKILL)
            await daemon.end()
    async with running(where), in_chat(where, "a") as client:
        assert f"[{name} (sleep 1.5; exit 7) ended with exit code 7" in await told(client, name)
        assert await client.exec("pgrep -fc '^sleep 8639[2]'") == "0\n"


async def test_what_ended_after_its_daemon_was_killed_is_told_by_the_next(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_SESSIONS__ORPHANED": "60s"})
    note = where.data / "sandbox" / "records" / "local" / "chat-a.seen"
    async with starting(where) as daemon:
        await listening(where)
        async with in_chat(where, "a") as client:
            await client.exec("sleep 86393 >/dev/null 2>&1 & echo begun")
            with anyio.fail_after(20):
                while not (note.exists() and "sleep 86393" in note.read_text()):
                    await anyio.sleep(0.02)
            daemon.process.send_signal(signal.SIGKILL)
            await daemon.end()
    await destroy(configured(where.backend, where.data))
    async with running(where), in_chat(where, "a") as client:
        said = text(await client.call("exec", command="echo new"))
        assert said.startswith(
            "new\n\n[The sandbox had ended since the last call; this is a new one"
        )
        assert "Ended in the background: sleep 86393 (pid " in said
        assert text(await client.call("exec", command="echo again")) == "again\n"


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_dialogue_with_a_program_is_answered_by_its_screen(
    tmp_path: Path, backend: str
) -> None:
    where = place(tmp_path, backend)
    async with running(where), in_chat(where, "a") as client:
        asks = "read -p 'Which colour? ' colour; printf '\\033[2J\\033[H%s it is\\n' $colour; cat"
        begun = await client.call("exec", command=asks, tty=True, until="? ")
        name = process_of(begun)
        assert text(begun).startswith(
            f"Which colour? \n[what was waited for is there; it goes on as {name}"
        )
        typed = await client.call("process", action="input", id=name, text="green", key="enter")
        assert text(typed).startswith(f"green it is\n[goes on as {name}")
        assert "(screen)" in text(await client.call("process", action="list"))
        looked = await client.call("process", action="wait", id=name, wait_s=0)
        assert text(looked).startswith("green it is\n[goes on as")
        ended = await client.call("process", action="input", id=name, key="ctrl-d")
        assert text(ended).startswith(f"green it is\n[{name} has ended after")
        lines = await client.call("exec", command="seq 60; read -p '? '", tty=True, until="?")
        assert text(lines).startswith("1\n2\n")
        name = process_of(lines)
        typed = await client.call("process", action="input", id=name, text="yes", key="enter")
        assert text(typed).startswith(f"yes\n\n[{name} has ended after")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"action": "wait"}, "id is missing"),
        ({"action": "wait", "id": "p1-xyz"}, "ended with it; there are"),
        ({"action": "wait", "id": "nothing"}, "there is no process 'nothing'"),
        ({"action": "stop", "id": "p1", "tail": 3}, "tail has no meaning with action=stop"),
        ({"action": "list", "until": "x"}, "until has no meaning with action=list"),
        ({"action": "restart", "id": "p1"}, "action must be one of list, wait, input, stop"),
        ({"action": "wait", "id": "p1", "text": "x"}, "text has no meaning with action=wait"),
        ({"action": "input", "id": "p1", "key": ["f1"]}, "key must be text of 1 to"),
        ({"action": "input", "id": "p1", "text": "x"}, "there is no process 'p1'"),
        ({"action": "wait", "id": "p1", "wait_s": 56}, "wait_s must be a number from 0 to 55"),
        ({"action": "wait", "id": "p1", "wait_s": -1}, "wait_s must be a number from 0 to 55"),
        ({"action": "wait", "id": "p1", "tail": 0}, "tail must be a whole number from 1 to 2,000"),
        ({"action": "wait", "id": "p1", "until": "x" * 201}, "until must be text of 1 to 200"),
    ],
)
async def test_what_makes_no_sense_is_refused_with_what_does(
    served: Place, given: dict[str, object], words: str
) -> None:
    async with in_chat(served, "a") as client:
        answer = await client.call("process", **given)
    assert answer["isError"]
    assert words in text(answer)
