"""Whatever the process of the ways out sends, its server lives, and answers no more than it may."""

import json
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.config import EgressConfig, SecretConfig
from mcp_sandbox.egress.link import BROKEN, Files, Link, Rate
from mcp_sandbox.egress.secrets import Keys, Secrets
from mcp_sandbox.egress.settings import read_egress_rules
from mcp_sandbox.egress.targets import Target
from mcp_sandbox.egress.ways_out import Shares, Way, WaysOut, open_ways_out
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.runner.wire import protocol
from tests.egress.examples import some_or

CHAT = ChatId("local", "one")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda some: (
        st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=4), some, max_size=3)
    ),
    max_leaves=6,
)
KINDS = ["ready", "log", "open", "ended", "connection", "counts", "visitor", "answer", "leaf", "x"]
NAMES = ["n", "of", "ask", "fds", "port", "why", "busy", "line", "to", "word", "sums", "host"]
FRAMES = st.fixed_dictionaries(
    {"t": st.sampled_from(KINDS)},
    optional={name: st.sampled_from([0, 1, 2, -1]) | JSON for name in NAMES},
)


def frame(header: Any, payload: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return struct.pack(">II", len(head), len(payload)) + head + payload


async def heard(data: bytes, files: Sequence[int] = ()) -> list[str]:
    """What a server's end of the link makes of bytes that the other end sends before it ends."""
    ours, theirs = socket.socketpair()
    came = list[str]()

    def told(said: dict[str, Any], _: bytes, given: Files) -> None:
        came.append(said["t"])
        for each in given:
            each.close()

    async def asked(said: dict[str, Any]) -> dict[str, Any]:
        raise StorageUnavailable("the disk is full") if said["t"] == "leaf" else KeyError("n")

    socket.send_fds(theirs, [data], files)
    theirs.shutdown(socket.SHUT_WR)
    with anyio.fail_after(5), theirs:
        await Link(ours, told, asked).run()
    return came


@some_or(500)
def test_no_message_harms_the_server(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(st.lists(FRAMES, max_size=4), st.binary(max_size=20))
    def holds(frames: list[dict[str, Any]], end: bytes) -> None:
        anyio.run(heard, b"".join(map(frame, frames)) + end)
        ways_out = WaysOut.__new__(WaysOut)
        ways_out._ways, ways_out._ready = {1: Way("egress", {})}, anyio.Event()
        ways_out._lines = Rate(1, 1)
        for each in frames:
            try:
                ways_out._told(each, b"", [])
            except BROKEN:
                continue

    holds()


@pytest.mark.parametrize("count", [1, 5])
async def test_descriptors_that_belong_to_no_message_end_the_link(count: int) -> None:
    read, write = os.pipe()
    try:
        assert await heard(frame({"t": "log", "fds": 0, "line": "a"}), [read] * count) == []
    finally:
        os.close(read)
        os.close(write)


async def test_of_descriptors_that_are_no_sockets_none_stays_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = [ours.fileno(), read, theirs.fileno(), write]
        assert await heard(frame({"t": "log", "fds": 4, "line": "a"}), given) == []
    os.close(read)
    os.close(write)
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_question_that_cannot_be_answered_is_answered_so() -> None:
    ours, theirs = socket.socketpair()

    async def asked(_: dict[str, Any]) -> dict[str, Any]:
        raise StorageUnavailable("the disk is full")

    async with anyio.create_task_group() as tasks:
        server, client = Link(ours, lambda *_: None, asked), Link(theirs, lambda *_: None, asked)
        tasks.start_soon(server.run)
        tasks.start_soon(client.run)
        with anyio.fail_after(5):
            answer = await client.ask("leaf", n=1)
        assert answer["refused"] == "it cannot be answered: the disk is full"
        server.close()
        with anyio.fail_after(5), pytest.raises(anyio.BrokenResourceError):
            await client.ask("leaf", n=1)


async def nothing(_: dict[str, Any]) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    "asked",
    [
        {"headers": [["x", "\u00ff" * 21_830]]},
        {"ask": "x" * 130_000},
        {"n": "\U0010ffff" * 10_000},
    ],
)
async def test_an_answer_too_long_for_a_message_ends_nothing_but_the_link(
    asked: dict[str, Any],
) -> None:
    """It is as long as what was asked, or longer, as names in it were replaced by values."""

    async def answer(said: dict[str, Any]) -> dict[str, Any]:
        if "n" in said:
            return {1: {}}[said["n"]]
        return {"headers": said["headers"], "values": ["v" * 100]}

    ours, theirs = socket.socketpair()
    link = Link(ours, lambda *_: None, answer)
    question = frame({"t": "fill", "fds": 0, "ask": 1, **asked})
    theirs.settimeout(5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, partial(theirs.sendall, question))
        tasks.start_soon(link.run)
        said = await anyio.to_thread.run_sync(theirs.recv, 65536)
        # A question without a number is none.
        assert b"it cannot be answered: " in said or (not said and "ask" in asked)
        theirs.close()


async def test_who_asks_and_reads_no_answer_is_not_served_for_ever() -> None:
    async def long(_: dict[str, Any]) -> dict[str, Any]:
        return {"leaf": "x" * 3000}

    ours, theirs = socket.socketpair()
    link = Link(ours, lambda *_: None, long)
    questions = b"".join(frame({"t": "leaf", "fds": 0, "ask": n}) for n in range(20_000))

    def ask() -> None:
        with theirs, suppress(ConnectionError):
            theirs.sendall(questions)
            assert not theirs.recv(1 << 20), "all were taken"

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, ask)
        with anyio.fail_after(10):
            await link.run()
    assert len(link._going) <= 1024


async def test_other_tasks_have_their_turn_while_many_messages_come() -> None:
    told, most, before = 0, 0, 0

    def count(*_: object) -> None:
        nonlocal told
        told += 1

    async def others() -> None:
        nonlocal most, before
        while told < 20_000:
            most, before = max(most, told - before), told
            await anyio.lowlevel.checkpoint()

    ours, theirs = socket.socketpair()
    link = Link(ours, count, nothing)
    lines = frame({"t": "log", "fds": 0, "line": "a"}) * 20_000
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, partial(theirs.sendall, lines))
        tasks.start_soon(link.run)
        with anyio.fail_after(20):
            await others()
        theirs.close()
    assert 0 < most <= 64


@pytest.fixture
def keys() -> Keys:
    given = {"from": "command: echo a-value-of-the-operator", "hosts": ["api.example.com"]}
    secrets = Secrets({"TOKEN": SecretConfig.model_validate(given)}, b"seed")

    async def leaf(host: str) -> bytes:
        return f"leaf of {host}".encode()

    allowed = EgressConfig(allow=("api.example.com", "other.example.com"), deny=())
    return Keys(read_egress_rules(allowed), leaf, secrets)


@pytest.mark.parametrize("what", ["leaf", "fill"])
@pytest.mark.parametrize("host", ["elsewhere.example.com", "example.com", "*", "", "10.0.0.1"])
async def test_nothing_is_given_for_a_host_without_a_rule(keys: Keys, what: str, host: str) -> None:
    said = {"t": what, "host": host, "port": 443, "headers": []}
    answer = await keys.answer(CHAT, (), said)
    assert answer == {"refused": "no rule allows it", "verdict": "rule"}


async def test_a_value_is_given_for_its_own_host_and_port_and_user_alone(keys: Keys) -> None:
    token = keys.secrets.placeholders(CHAT)["TOKEN"]
    said = {"t": "fill", "port": 443, "headers": [["authorization", f"Bearer {token}"]]}
    given = await keys.answer(CHAT, (), {**said, "host": "api.example.com"})
    assert given["values"] == ["a-value-of-the-operator"]
    for chat, host, port in (
        (CHAT, "other.example.com", 443),
        (CHAT, "api.example.com", 80),
        (ChatId("ann", "one"), "api.example.com", 443),
    ):
        told = await keys.answer(chat, (), {**said, "host": host, "port": port})
        assert told["values"] == []
        assert "a-value" not in json.dumps(told)


@some_or(300)
def test_no_question_gets_more_than_an_answer(keys: Keys, examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(st.sampled_from(["grants", "leaf", "fill", "x"]), JSON, JSON, JSON)
    def holds(what: str, host: object, port: object, headers: object) -> None:
        said = {"t": what, "host": host, "port": port, "headers": headers}
        try:
            answer = anyio.run(keys.answer, CHAT, (), said)
        except BROKEN:
            return
        assert "refused" in answer or "grants" in answer
        assert Target(str(host), 443).host not in ("api.example.com", "other.example.com")

    holds()


async def test_a_start_that_fails_is_told_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def trusted() -> bytes:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise StorageUnavailable("the bundle cannot be read")
        return b""

    async with open_ways_out(trusted) as ways_out:
        with anyio.fail_after(20):
            with pytest.raises(StorageUnavailable, match="the bundle cannot be read"):
                await ways_out.up()
            assert tries == 1


def test_a_frame_is_that_of_a_runner() -> None:
    header = {"t": "x", "fds": 0}
    assert [*protocol.Decoder().feed(frame(header, b"y"))] == [(header, b"y")]


def test_shares_are_given_back_in_whatever_order() -> None:
    shares, (one, two, other) = Shares(16), [ChatId("u", each) for each in ("one", "two", "other")]
    first, second, third = (shares.take(each) for each in (one, two, one))
    assert first.__enter__()
    assert second.__enter__()
    first.__exit__(None, None, None)
    assert third.__enter__()
    second.__exit__(None, None, None)
    with ExitStack() as stack:
        # A chat may have an eighth, and a user half.
        assert [stack.enter_context(shares.take(one)) for _ in range(2)] == [True, False]
        names = [ChatId("u", str(number // 2)) for number in range(8)]
        assert [stack.enter_context(shares.take(each)) for each in names].count(True) == 6
        assert not stack.enter_context(shares.take(other))
        assert stack.enter_context(shares.take(ChatId("v", "one")))
    third.__exit__(None, None, None)
    assert not shares._taken
