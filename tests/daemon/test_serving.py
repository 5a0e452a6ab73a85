"""Clients of a real daemon: their chats, and what becomes of them when it ends."""

import sys
from pathlib import Path

import anyio
import pytest

from tests.daemon.running import INITIALIZE, control, dialled, in_chat, listening, place, running
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, UNSAFE, if_whole
from tests.server.skills.taught import write_skill


@pytest.mark.parametrize("backend", [BUBBLEWRAP, if_whole(DOCKER), if_whole(UNSAFE)])
async def test_each_connection_works_in_its_own_chat(tmp_path: Path, backend: str) -> None:
    where = place(tmp_path, backend)
    async with running(where), in_chat(where, "a") as a, in_chat(where, "b") as b:
        assert await a.exec("echo of a > note.txt; ls") == "note.txt\n"
        assert "note.txt" not in await b.exec("echo none; ls")
        async with in_chat(where, "a") as again:
            assert await again.exec("cat note.txt") == "of a\n"


async def test_calls_of_many_connections_at_once_reach_the_right_chats(tmp_path: Path) -> None:
    where = place(tmp_path)

    async def work(chat: str) -> None:
        async with in_chat(where, chat) as client:
            for _ in range(3):
                assert await client.exec(f"echo {chat} >> note; sort -u note") == f"{chat}\n"

    async with running(where), anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(work, f"chat-{number}")


async def test_the_chat_is_the_named_one_else_the_session_else_the_folder(tmp_path: Path) -> None:
    where = place(tmp_path)
    said = {"chat": "c", "session": "s", "project": "/tmp/my project", "fresh": "0" * 16}
    found = list[str]()
    async with running(where):
        for name in ("chat", "session", "project", "fresh"):
            async with dialled(where) as client:
                found.append((await client.greet(role="chat", user="u", **said))["chat"])
            del said[name]
    assert found[:2] == ["u/c", "u/s"]
    assert found[2].startswith("u/dir-my-project-")
    assert found[3] == "u/fresh-0000000000000000"


async def test_a_client_that_hangs_up_ends_its_calls(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "a") as other:
        async with in_chat(where, "a") as client:
            await client.request(
                "tools/call",
                {"name": "exec", "arguments": {"command": "echo $$ > pid; exec sleep 600"}},
            )
            while not (pid := (await other.exec("cat pid; true")).strip()).isdigit():
                await anyio.sleep(0.01)
        while (await other.exec(f"kill -0 {pid} && echo runs; true")).startswith("runs"):
            await anyio.sleep(0.05)


async def test_shutdown_lets_a_running_call_finish_and_takes_no_new_one(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon, in_chat(where, "a") as client:
        number = await client.request(
            "tools/call",
            {"name": "exec", "arguments": {"command": "touch begun; sleep 1; echo ok"}},
        )
        async with in_chat(where, "a") as idle:
            while "begun" not in await idle.exec("ls; true"):
                await anyio.sleep(0.01)
            assert await control(where, "shutdown") == {"result": {}}
            assert await idle.hung_up() == b""
        late = await client.request("tools/call", {"name": "list_files", "arguments": {}})
        refused = await client.answer(late)
        assert "stopped or replaced" in refused["result"]["content"][0]["text"]
        assert (await client.answer(number))["result"]["content"][0]["text"] == "ok\n"
        assert await client.hung_up() == b""
        assert await daemon.end() == 0
        assert not where.socket.exists()


async def test_a_second_request_to_end_waits_for_no_call(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon, in_chat(where, "a") as client:
        await client.request("tools/call", {"name": "exec", "arguments": {"command": "sleep 600"}})
        daemon.process.terminate()
        await daemon.noted("the daemon ends: signal")
        daemon.process.terminate()
        assert await daemon.end() == 0


async def test_a_daemon_that_nobody_needs_ends_itself(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where, "--idle-exit", "1s") as daemon:
        async with in_chat(where, "a") as client:
            await client.exec("sleep 1.5; echo kept > note")
            assert daemon.process.returncode is None
        assert await daemon.end() == 0
        assert "the daemon ends: idle" in daemon.log
    assert not where.socket.exists()
    assert [path.read_text() for path in where.data.rglob("note")] == ["kept\n"]


async def test_a_daemon_that_is_ended_while_it_begins_ends(tmp_path: Path) -> None:
    where = place(tmp_path)
    for number in range(5):
        async with running(where) as daemon:
            await anyio.sleep(number * 0.1)
            daemon.process.terminate()
            assert await daemon.end() == 0, daemon.log


async def test_each_user_is_told_of_the_own_skills(tmp_path: Path) -> None:
    where = place(tmp_path)
    write_skill(tmp_path / "given", "for-all")
    for user in ("alice", "bob"):
        write_skill(where.data / "skills" / user, f"of-{user}")
    async with running(where, "--skills", str(tmp_path / "given")):
        for user, other in (("alice", "bob"), ("bob", "alice")):
            async with dialled(where) as client:
                assert (await client.greet(role="chat", user=user, chat="a"))["ok"]
                answer = await client.answer(await client.request("initialize", INITIALIZE))
                told = answer["result"]["instructions"]
                assert f"- of-{user}: " in told
                assert "- for-all: " in told
                assert f"of-{other}" not in told
                got = await client.call("skill_activate", name=f"of-{user}")
                assert "Do it well." in got["content"][0]["text"]
                refused = await client.call("skill_activate", name=f"of-{other}")
                assert refused["isError"]


async def test_one_machine_alone_loads_nothing_of_what_several_need(tmp_path: Path) -> None:
    where = place(tmp_path)
    serve = where.arguments("serve", "--data", str(where.data), "--backend", where.backend)
    command = [sys.executable, "-X", "importtime", "-m", "mcp_sandbox", *serve]
    with (tmp_path / "log").open("w+") as log:
        async with await anyio.open_process(
            [*command, "--http", "127.0.0.1:0"], stdout=log, stderr=log, env=where.environment()
        ) as daemon:
            await listening(where)
            async with in_chat(where, "a") as client:
                assert await client.exec("echo here") == "here\n"
            daemon.terminate()
            assert await daemon.wait() == 0
        log.seek(0)
        loaded = {line.rpartition("|")[2].strip() for line in log if line.startswith("import time")}
    assert {"mcp_sandbox.sessions.manager", "mcp_sandbox.web.guard"} <= loaded
    for each in ("redis", "obstore", "fastapi", "e2b", "mcp_sandbox.storage"):
        assert not any(name == each or name.startswith(f"{each}.") for name in loaded), each
