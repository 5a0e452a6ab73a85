"""Real relays before scripted daemons and bare sockets: what passes, and what becomes of calls."""

import json
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from tests.daemon.running import Place, place
from tests.relay.relays import (
    META,
    Relay,
    Scripted,
    accepted,
    bare_server,
    environment,
    line_from,
    relayed,
    scripted,
)

CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"_meta": META}}
LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {"_meta": META}}


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


@asynccontextmanager
async def joined(here: Place, *options: str) -> AsyncGenerator[tuple[Scripted, Relay]]:
    async with scripted(here) as daemon, relayed(here, "--chat", "c", *options) as relay:
        yield daemon, relay


def said_of(answer: dict[str, object]) -> str:
    error = answer["error"]
    assert isinstance(error, dict)
    assert error["code"] == -32000
    return str(error["message"])


async def test_first_line_says_who_asks(here: Place) -> None:
    options = ("--user", "ann", "--chat=one", "--project", "sub/..")
    async with scripted(here) as daemon:
        more = {"CLAUDE_CODE_SESSION_ID": "s-1", "MCP_SANDBOX_ENV": '{"A": "\\u00e4\\n"}'}
        async with relayed(here, *options, **more, ANTHROPIC_API_KEY="secret"):
            first = await daemon.noted("first")
    settings = {name: first.pop(name) for name in [*first] if name.startswith("MCP_SANDBOX_")}
    assert settings["MCP_SANDBOX_DATA_DIR"] == str(here.data)
    assert settings["MCP_SANDBOX_ENV"] == more["MCP_SANDBOX_ENV"]
    assert len(bytes.fromhex(first.pop("fresh"))) >= 8
    assert first.pop("version")
    assert first == {
        "mcp-sandbox": 1,
        "role": "chat",
        "user": "ann",
        "chat": "one",
        "session": "s-1",
        "project": str(here.home),
    }


async def test_unusual_names_and_a_project_from_the_environment_arrive_unchanged(
    here: Place,
) -> None:
    project = '/tmp/a "quoted" \\ folder/äö/\N{ROCKET}'
    async with scripted(here) as daemon:
        async with relayed(here, "--chat=", CLAUDE_PROJECT_DIR=project):
            first = await daemon.noted("first")
    assert (first["project"], first["chat"], first["session"]) == (project, None, None)


async def test_requests_of_both_eras_are_answered(here: Place) -> None:
    async with joined(here) as (_, relay):
        listed = await relay.answer(await relay.request("tools/list", {"_meta": META}))
        assert len(listed["result"]["tools"]) == 14
    async with joined(here) as (_, relay):
        await relay.initialize()
        assert await relay.exec("hello") == "hello"


async def test_killed_daemon_answers_its_open_calls_and_the_next_daemon_the_next_ones(
    here: Place,
) -> None:
    async with joined(here) as (daemon, relay):
        number = await relay.start_call("forever")
        await daemon.noted("call")
        await daemon.kill()
        reason = said_of(await relay.answer(number))
        assert "ended during this call" in reason
        assert "may or may not have run" in reason
        async with scripted(here) as second:
            number = await relay.start_call("next")
            assert await second.noted("call") == "next"
            answer = await relay.answer(number)
    assert answer["result"]["content"][0]["text"] == "next"


async def test_handshake_of_the_older_era_is_repeated_unseen(here: Place) -> None:
    async with joined(here) as (daemon, relay):
        await relay.initialize()
        number = await relay.start_call("forever")
        await daemon.noted("call")
        await daemon.kill()
        said_of(await relay.answer(number))
        async with scripted(here) as second:
            number = await relay.start_call("again")
            # The very next line: the second answer to `initialize` is not for the client.
            answer = await relay.receive()
            assert answer["id"] == number
            assert answer["result"]["content"][0]["text"] == "again"
            assert await second.noted("call") == "again"


async def test_a_call_is_never_sent_twice(here: Place) -> None:
    async with joined(here) as (daemon, relay):
        number = await relay.start_call("forever")
        await daemon.noted("call")
        await daemon.kill()
        await relay.answer(number)
        async with scripted(here) as second:
            await relay.start_call("other")
            assert await second.noted("call") == "other"


async def test_a_cancelled_call_gets_no_answer_when_the_daemon_goes(here: Place) -> None:
    async with joined(here) as (daemon, relay):
        number = await relay.start_call("forever")
        await daemon.noted("call")
        params = {"requestId": number}
        await relay.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params})
        await daemon.noted("cancelled")
        second = await relay.start_call("forever")
        await daemon.noted("call")
        await daemon.kill()
        assert (await relay.receive())["id"] == second
        await relay.close_input()
        assert await relay.ended() == ([], 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_the_relay_at_once_and_the_daemon_cancels_its_calls(
    here: Place, number: signal.Signals
) -> None:
    async with joined(here) as (daemon, relay):
        await relay.start_call("forever")
        await daemon.noted("call")
        relay.process.send_signal(number)
        assert await relay.process.wait() == 0
        assert await daemon.noted("cancelled") == "forever"


async def test_end_of_input_delivers_the_answers_and_cancels_what_does_not_end(
    here: Place,
) -> None:
    async with joined(here) as (daemon, relay):
        await relay.start_call("forever")
        number = await relay.request("tools/list", {"_meta": META})
        await relay.close_input()
        answers, code = await relay.ended()
        assert answers[0]["id"] == number
        assert code == 0
        assert await daemon.noted("cancelled") == "forever"


async def test_a_client_that_reads_no_more_ends_the_relay(here: Place) -> None:
    async with scripted(here) as daemon:
        with subprocess.Popen(
            here.command("connect"),
            env=environment(here),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as relay:
            assert relay.stdout
            await daemon.noted("first")
            relay.stdout.close()
            assert await to_thread.run_sync(partial(relay.wait, timeout=20)) == 0
        assert await daemon.noted("gone") is None


async def test_megabytes_pass_and_stay_known(here: Place) -> None:
    async with joined(here) as (daemon, relay):
        number = await relay.start_call("forever", stdin='"\\\n{[' * 1_500_000)
        await daemon.noted("call")
        await daemon.kill()
        assert "ended during this call" in said_of(await relay.answer(number))


async def test_a_line_that_the_daemon_left_half_written_never_reaches_the_client(
    here: Place,
) -> None:
    with bare_server(here) as server:
        async with relayed(here) as relay:
            connection = await to_thread.run_sync(accepted, server)
            with connection:
                await relay.send(CALL)
                await to_thread.run_sync(line_from, connection)
                connection.sendall(b'{"jsonrpc":"2.0","method":"x"}\n{"jsonrpc":"2.0","id":1,"re')
            assert (await relay.receive())["method"] == "x"
            assert "ended during this call" in said_of(await relay.receive())


async def test_an_open_question_for_the_tools_is_put_to_the_next_daemon_once(here: Place) -> None:
    with bare_server(here) as server:
        async with relayed(here) as relay:
            await relay.send(CALL)
            await relay.send(LIST)
            with await to_thread.run_sync(accepted, server) as first:
                for message in (CALL, LIST):
                    assert json.loads(await to_thread.run_sync(line_from, first)) == message
            assert said_of(answer := await relay.receive())
            assert answer["id"] == CALL["id"]
            with await to_thread.run_sync(accepted, server) as second:
                assert json.loads(await to_thread.run_sync(line_from, second)) == LIST
            assert said_of(answer := await relay.receive())
            assert answer["id"] == LIST["id"]


async def test_a_call_that_had_not_gone_out_whole_goes_to_the_next_daemon(here: Place) -> None:
    message = {**CALL, "filler": "x" * (4 << 20)}
    with bare_server(here) as server:
        async with relayed(here) as relay:
            connection = await to_thread.run_sync(accepted, server)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(relay.send, message)
                await to_thread.run_sync(connection.recv, 100_000)
                connection.close()
                second = await to_thread.run_sync(accepted, server)
                with second:
                    line = await to_thread.run_sync(line_from, second)
    assert json.loads(line) == message


async def test_an_overlong_message_is_cut_and_the_next_one_is_whole(here: Place) -> None:
    async with joined(here) as (_, relay):
        await relay.stream.send(b'{"jsonrpc":"2.0","id":"long","method":"' + b"x" * (34 << 20))
        await relay.stream.send(b"x" * (1 << 20) + b'"}\n')
        refused = await relay.answer("long")  # type: ignore[arg-type]
        assert "a message may have" in refused["error"]["message"]
        assert (
            "tools"
            in (await relay.answer(await relay.request("tools/list", {"_meta": META})))["result"]
        )


async def test_a_daemon_that_does_not_read_slows_the_client(here: Place) -> None:
    with bare_server(here) as server:
        async with relayed(here) as relay:
            with await to_thread.run_sync(accepted, server):
                with anyio.move_on_after(1) as limit:
                    while True:
                        await relay.send({"jsonrpc": "2.0", "method": "x" * 10_000})
                assert limit.cancelled_caught


async def test_a_client_that_does_not_read_slows_the_daemon(here: Place) -> None:
    line = json.dumps({"jsonrpc": "2.0", "method": "x" * 10_000}).encode() + b"\n"

    def flood(connection: socket.socket) -> None:
        connection.settimeout(1)
        with pytest.raises(TimeoutError):
            connection.sendall(line * 10_000)

    with bare_server(here) as server:
        async with relayed(here):
            with await to_thread.run_sync(accepted, server) as connection:
                await to_thread.run_sync(partial(flood, connection))


async def test_a_question_of_a_daemon_that_has_gone_is_withdrawn_and_its_answer_dropped(
    here: Place,
) -> None:
    question = b'{"jsonrpc":"2.0","id":7,"method":"elicitation/create"}\n'
    answer = {"jsonrpc": "2.0", "id": 7, "result": {"action": "accept"}}
    with bare_server(here) as server:
        async with relayed(here) as relay:
            with await to_thread.run_sync(accepted, server) as first:
                first.sendall(question)
                assert (await relay.receive())["id"] == 7
            withdrawn = await relay.receive()
            assert withdrawn["method"] == "notifications/cancelled"
            assert withdrawn["params"]["requestId"] == 7
            await relay.send(answer)
            await relay.send(CALL)
            with await to_thread.run_sync(accepted, server) as second:
                assert json.loads(await to_thread.run_sync(line_from, second)) == CALL


async def test_a_notification_alone_wakes_no_daemon(here: Place) -> None:
    with bare_server(here) as server:
        async with relayed(here) as relay:
            (await to_thread.run_sync(accepted, server)).close()
            server.close()
            await relay.send({"jsonrpc": "2.0", "method": "notifications/cancelled"})
            await relay.close_input()
            assert await relay.ended() == ([], 0)
    assert not here.socket.with_name("mcp.sock.start").exists()


async def test_no_start_says_what_to_do_and_fails(here: Place) -> None:
    async with relayed(here, "--no-start") as relay:
        said = await relay.said("\n")
        assert await relay.ended() == ([], 1)
    assert "no sandbox server is running" in said
    assert "`mcp-sandbox serve`" in said


async def test_refused_chat_is_answered_with_the_reason(here: Place) -> None:
    async with scripted(here), relayed(here, "--chat", "refused") as relay:
        number = await relay.request("tools/list", {})
        assert "no such chat; give another" in said_of(await relay.answer(number))
        assert "no such chat; give another" in await relay.said("\n")
        await relay.close_input()
        assert await relay.ended() == ([], 1)
