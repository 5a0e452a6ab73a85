"""The command line of a person, against a real daemon."""

import json
import os
import signal
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from tests.daemon.running import command, control, dialled, in_chat, place, running


@pytest.mark.parametrize("name", ["status", "logs", "shutdown", "ls", "gc"])
async def test_without_the_daemon_that_was_named_a_command_says_how_to_start_one(
    tmp_path: Path, name: str
) -> None:
    done = await command(place(tmp_path), name)
    assert (done.code, done.out) == (3, "")
    assert "mcp-sandbox serve" in done.err
    assert "Traceback" not in done.err


async def test_a_stale_socket_is_no_daemon(tmp_path: Path) -> None:
    where = place(tmp_path)
    where.socket.parent.mkdir(mode=0o700)
    async with await anyio.create_unix_listener(where.socket):
        pass
    done = await command(where, "status")
    assert (done.code, done.out) == (3, "")


async def test_status_tells_of_the_daemon_and_its_calls(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon, in_chat(where, "a") as client:
        await client.exec("true")
        shown = await command(where, "status")
        assert shown.code == 0
        for text in (f"pid {daemon.process.pid}", str(where.data), "1 connected", "exec", "ago"):
            assert text in shown.out.replace("just now", "ago")
        told = json.loads((await command(where, "status", "--json")).out)
        assert (told["pid"], told["clients"]) == (daemon.process.pid, 1)


async def test_logs_show_the_last_lines(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "named-chat") as client:
        await client.exec("true")
        shown = await command(where, "logs")
        assert shown.code == 0
        assert "named-chat" in shown.out
        assert len((await command(where, "logs", "-n", "1")).out.splitlines()) == 1
        assert (await command(where, "logs", "-n", "0")).out == ""


async def test_logs_follow_until_interrupted(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "early") as early:
        await early.exec("true")
        async with await anyio.open_process(
            where.command("logs", "-f"),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=where.environment(),
        ) as process:
            assert process.stdout
            lines = BufferedByteReceiveStream(process.stdout)
            while b"early" not in await lines.receive_until(b"\n", 10_000):
                pass
            async with in_chat(where, "late") as late:
                await late.exec("true")
            while b"late" not in await lines.receive_until(b"\n", 10_000):
                pass
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0


async def test_following_shows_nothing_from_before_when_no_lines_are_wanted(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "early") as early:
        await early.exec("true")
        async with dialled(where) as person:
            asked = {"lines": 0, "follow": True}
            assert (await person.greet(role="control", command="logs", arguments=asked))["ok"]
            async with in_chat(where, "late") as late:
                await late.exec("true")
            while "late" not in (line := str(await person.receive())):
                assert "early" not in line


async def test_a_reader_that_leaves_is_not_taken_for_a_lost_daemon(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = await anyio.run_process(
                where.command("logs", "-f"),
                stdin=DEVNULL,
                stdout=writing,
                check=False,
                env=where.environment(),
            )
        finally:
            os.close(writing)
        assert done.returncode == 1
        assert b"daemon" not in done.stderr
        assert b"Traceback" not in done.stderr


async def test_following_the_log_ends_with_the_daemon(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon:
        async with await anyio.open_process(
            where.command("logs", "-f"), stdin=DEVNULL, env=where.environment()
        ) as process:
            assert process.stdout
            await process.stdout.receive()
            daemon.process.terminate()
            assert await process.wait() == 0
            assert await daemon.end() == 0


async def test_shutdown_returns_when_the_daemon_has_ended(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon:
        done = await command(where, "shutdown")
        assert done.code == 0
        assert f"pid {daemon.process.pid}" in done.out
        assert await daemon.end() == 0


async def test_shutdown_ends_a_daemon_that_does_not_reach_its_cluster(tmp_path: Path) -> None:
    store = {"endpoint": "http://127.0.0.1:9", "access_key": "env:KEY", "secret_key": "env:KEY"}
    more = {f"MCP_SANDBOX_STORAGE__{name.upper()}": value for name, value in store.items()}
    more |= {"MCP_SANDBOX_STORAGE__BUCKET": "chats", "KEY": "k" * 12, "KUBECONFIG": "/none"}
    where = place(tmp_path, "kubernetes", more)
    async with running(where) as daemon:
        assert "KUBECONFIG" in (await command(where, "ls")).err
        assert (await command(where, "shutdown")).code == 0
        assert await daemon.end() == 0


async def test_a_command_that_the_daemon_does_not_know_is_answered(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where):
        assert "status" in (await control(where, "nonsense"))["error"]
