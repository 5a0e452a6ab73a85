"""One daemon per data root and per socket, whatever became of the one before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.daemon.running import (
    Place,
    command,
    control,
    in_chat,
    listening,
    place,
    running,
    starting,
)


async def test_a_second_daemon_says_who_serves_the_data_root(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as first:
        async with starting(replace(where, socket=tmp_path / "s/other.sock")) as second:
            assert await second.end() == 1
        assert f"pid {first.process.pid}" in second.log
        assert f"--socket {where.socket}" in second.log


async def test_a_second_daemon_does_not_take_the_socket(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as first:
        async with starting(replace(where, data=tmp_path / "other")) as second:
            assert await second.end() == 1
        assert f"pid {first.process.pid}" in second.log
        assert "with `--data` a second one has a socket of its own" in second.log
        async with in_chat(where, "a") as client:
            assert await client.exec("echo here") == "here\n"


async def test_of_two_daemons_started_at_once_one_serves(tmp_path: Path) -> None:
    where = place(tmp_path)
    with anyio.fail_after(50):
        async with starting(where) as a, starting(where) as b:
            ended = list[int]()
            async with anyio.create_task_group() as tasks:

                async def note(daemon: object) -> None:
                    ended.append(await daemon.end())  # type: ignore[attr-defined]

                tasks.start_soon(note, a)
                tasks.start_soon(note, b)
                while not ended:
                    await anyio.sleep(0.01)
                assert ended == [1]
                async with in_chat(where, "a") as client:
                    assert await client.exec("echo here") == "here\n"
                await control(where, "shutdown")
            assert ended == [1, 0]


async def test_after_a_kill_the_next_daemon_takes_over_the_socket_and_the_files(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)
    async with running(where) as first, in_chat(where, "a") as client:
        await client.exec("echo kept > note")
        first.process.kill()
        await first.process.wait()
    assert where.socket.exists()
    async with starting(where) as second:
        await second.noted("backend unsafe-local")
        async with in_chat(where, "a") as client:
            assert await client.exec("cat note") == "kept\n"
        second.process.terminate()
        assert await second.end() == 0


async def test_a_daemon_that_hands_over_finishes_its_call_beside_the_new_one(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)
    async with running(where) as old, in_chat(where, "a") as client:
        slow = {"command": "touch begun; while [ ! -e done ]; do sleep 0.05; done; echo finished"}
        number = await client.request("tools/call", {"name": "exec", "arguments": slow})
        files = where.data / "sandbox" / "workspace" / "local" / "chat-a"
        while not (files / "begun").exists():
            await anyio.sleep(0.01)
        assert await control(where, "hand-over") == {"result": {}}
        async with running(where) as new:
            async with in_chat(where, "b") as other:
                assert await other.exec("echo in b") == "in b\n"
            assert old.process.returncode is None
            (files / "done").touch()
            answer = await client.answer(number)
            assert answer["result"]["content"][0]["text"] == "finished\n"
            assert await old.end() == 0
            assert where.socket.exists()
            assert new.process.returncode is None


@pytest.mark.parametrize("mode", [0o777, 0o703, 0o1777])
async def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    where = place(tmp_path)
    where.socket.parent.mkdir()
    where.socket.parent.chmod(mode)
    await refused(where, "chmod go-w")


async def test_what_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    where = place(tmp_path)
    where.socket.parent.mkdir(mode=0o700)
    where.socket.write_text("precious")
    await refused(where, "is no socket")
    assert where.socket.read_text() == "precious"


async def test_a_socket_on_which_another_program_listens_is_not_replaced(tmp_path: Path) -> None:
    where = place(tmp_path)
    where.socket.parent.mkdir(mode=0o700)
    async with await anyio.create_unix_listener(where.socket):
        await refused(where, "another program listens")


async def refused(where: Place, reason: str) -> None:
    with anyio.fail_after(30):
        async with starting(where) as daemon:
            assert await daemon.end() == 1
            assert reason in daemon.log, daemon.log


async def test_nobody_else_may_open_the_socket(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where):
        await listening(where)
        assert where.socket.stat().st_mode & 0o777 == 0o600
        assert where.socket.parent.stat().st_mode & 0o777 == 0o700


async def test_what_runs_in_the_background_outlives_every_daemon(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as first:
        async with in_chat(where, "a") as client:
            await client.exec("touch /tmp/unused; sleep 600 >/dev/null 2>&1 & echo $! > pid")
        assert await control(where, "hand-over") == {"result": {}}
        assert await first.end() == 0
    async with running(where) as second:
        await shown(where, background=1)
        second.process.kill()
        await second.process.wait()
    async with running(where) as third:
        await shown(where, background=1)
        assert (await command(where, "shutdown")).code == 0
        assert await third.end() == 0
    async with running(where):
        await shown(where, background=1)
        async with in_chat(where, "a") as client:
            assert (
                await client.exec("kill -0 $(cat pid) && echo lives; kill $(cat pid)") == "lives\n"
            )


async def test_a_sandbox_is_the_same_one_after_a_hand_over(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_SESSIONS__ORPHANED": "40s"})
    async with running(where) as old:
        async with in_chat(where, "a") as client:
            await client.exec("true")
        before = await shown(where, background=0)
        assert await control(where, "hand-over") == {"result": {}}
        assert await old.end() == 0
    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        assert (await shown(where, background=0))["sandbox"] == before["sandbox"]


async def shown(where: Place, *, background: int) -> Any:
    """The row of the one chat, once it has so many processes in the background."""
    while True:
        answer = await control(where, "list")
        rows = answer["result"]["chats"]
        if [(row["state"], row["background"]) for row in rows] == [("running", background)]:
            return rows[0]
        await anyio.sleep(0.05)
