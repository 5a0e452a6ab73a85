"""Every form of a target, said to the real proxy: nothing on this machine hears of it."""

import os
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.egress.process.keeper import Keeper
from mcp_sandbox.egress.process.proxy import ProxiedConnection, Proxy
from mcp_sandbox.egress.rules import EgressRule, EgressRules
from mcp_sandbox.egress.targets import Target
from tests.egress.examples import some_or
from tests.egress.test_targets import REFUSED_HOSTS, REFUSED_PORTS
from tests.egress.world import CHAT, HOST, World, a_world
from tests.streams import everything


class Inside(ByteStream):
    """A client that sends these bytes, in pieces, and no more."""

    def __init__(self, data: bytes, piece: int) -> None:
        self._pieces = [data[at : at + piece] for at in range(0, len(data), piece)][::-1]
        self.answer = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if not self._pieces:
            raise anyio.EndOfStream
        return self._pieces.pop()

    async def send(self, item: bytes) -> None:
        self.answer += item

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        pass


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    async with a_world(tmp_path / "world") as made:
        yield made


async def answer(world: World, data: bytes) -> bytes:
    """What the proxy answers to a client that says no more."""
    async with await world.connect() as stream:
        await stream.send(data)
        await stream.send_eof()
        return await everything(stream)


def requests(place: bytes) -> list[bytes]:
    return [
        b"CONNECT %s HTTP/1.1\r\nHost: a.example\r\n\r\n" % place,
        b"GET http://%s/ HTTP/1.1\r\nHost: a.example\r\n\r\n" % place,
        b"GET http://%s HTTP/1.0\r\n\r\n" % place,
    ]


async def test_no_form_of_an_address_or_odd_name_leads_anywhere(world: World) -> None:
    heard = list[str]()

    async def canary(stream: Any) -> None:
        async with stream:
            heard.append("somebody")

    port = await world.listen(canary)
    await world.allow(port, f"a.example:{port}", f"*.example.com:{port}", f"example.com:{port}")
    limiter = anyio.CapacityLimiter(32)
    taken = list[bytes]()

    async def say(request: bytes) -> None:
        async with limiter:
            said = await answer(world, request)
            if not said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 ")):
                taken.append(request + b" -> " + said)

    places = [b"%s:%d" % (host, port) for host in REFUSED_HOSTS]
    places += [b"%s:%s" % (HOST.encode(), each) for each in REFUSED_PORTS if each]
    async with anyio.create_task_group() as tasks:
        for place in places:
            for request in requests(place):
                tasks.start_soon(say, request)
    assert taken == []
    assert heard == []
    assert {each[1].partition(":")[0] for each in world.noted} <= {"target", "request", "rule"}


async def test_the_same_machine_hears_of_an_allowed_one(world: World) -> None:
    reached = anyio.Event()

    async def canary(stream: Any) -> None:
        async with stream:
            reached.set()

    port = await world.listen(canary)
    await world.allow(port)
    await answer(world, requests(b"%s:%d" % (HOST.encode(), port))[0])
    with anyio.fail_after(5):
        await reached.wait()


async def test_a_name_of_this_machine_is_refused_though_a_rule_allows_it(world: World) -> None:
    world.proxy.rules = EgressRules((EgressRule("localhost", frozenset({world.port})),))
    said = await answer(world, requests(b"localhost:%d" % world.port)[0])
    assert said.startswith(b"HTTP/1.1 403 network: refused localhost")
    assert b"its name leads to an address that is not public" in said
    assert [each[1].partition(":")[0] for each in world.noted] == ["address"]


async def test_a_refusal_names_the_target_of_its_own_request(world: World) -> None:
    async def server(stream: Any) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 204 No Content\r\n\r\n")
            await everything(stream)

    port = await world.listen(server)
    await world.allow(port)
    async with await world.connect() as stream:
        await stream.send(
            b"GET http://%s:%d/ HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % ((HOST.encode(), port) * 2)
        )
        assert (await stream.receive()).startswith(b"HTTP/1.1 204")
        await stream.send(b"GET http://127.0.0.1/ HTTP/1.1\r\nHost: a.example\r\n\r\n")
        await stream.send_eof()
        said = await everything(stream)
    assert said.startswith(b"HTTP/1.1 400 network: refused a request: a host is reached by its")
    noted = await world.until_noted(2)
    assert sorted(each[0] for each in noted) == ["None", str(Target(HOST, port))]


METHODS = st.sampled_from([b"CONNECT", b"GET", b"POST", b"OPTIONS", b"x"])
PLACES = st.sampled_from([b"host.internal:1", b"a.example:443", b"[::1]:80", b"a.example/", b"/"])
FIRST = st.one_of(
    st.builds(lambda way, place: b"%s %s HTTP/1.1" % (way, place), METHODS, PLACES),
    st.builds(lambda way, place: b"%s http://%s HTTP/1.1" % (way, place), METHODS, PLACES),
    st.binary(max_size=40),
)
HEADERS = [
    *(b"Host: a.example", b"Host: host.internal:1", b"Connection: keep-alive", b"Upgrade: h2c"),
    *(b"Content-Length: 5", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"5\r\nabcde"),
    *(b"Transfer-Encoding: gzip", b"Expect: 100-continue", b" folded", b"A: " + b"a" * 9000, b""),
]
LINES = st.lists(st.one_of(st.sampled_from(HEADERS), st.binary(max_size=20)), max_size=4)
HEADS = st.builds(
    lambda first, host, lines, end: end.join([first, host, *lines, b"", b""]),
    FIRST,
    st.sampled_from(HEADERS[:2]),
    LINES,
    st.sampled_from([b"\r\n", b"\r\n", b"\n", b"\r", b"\0"]),
)


async def no_grants(what: str, **_: object) -> dict[str, Any]:
    return {what: []}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@some_or(10_000)
def test_random_heads_of_targets_are_answered_or_refused_in_bounded_memory(
    examples: int, caplog: pytest.LogCaptureFixture
) -> None:
    unused: Any = None
    # Nothing listens there: what passes the rules is dialled.
    rules = EgressRules((EgressRule("host.internal", frozenset({1}), private=True),))
    proxy = Proxy(rules, unused)
    words, heads = set[bytes](), list[tuple[bytes, int]]()

    async def serve(clients: Iterable[Inside]) -> None:
        for inside in clients:
            with anyio.fail_after(5):
                await ProxiedConnection(
                    proxy, inside, CHAT, Keeper(no_grants), lambda *_: None
                ).serve()

    @settings(max_examples=examples, deadline=None)
    @given(HEADS, st.integers(1, 40))
    def holds(data: bytes, piece: int) -> None:
        inside = Inside(data, piece)
        anyio.run(serve, [inside])
        assert not inside.answer or inside.answer.startswith(b"HTTP/1.1 "), inside.answer
        words.add(inside.answer[9:12])
        heads.append((data, piece))
        assert [each.getMessage() for each in caplog.records] == []

    holds()
    # Hypothesis itself remembers what it has tried.
    before = resident_bytes()
    anyio.run(serve, (Inside(*head) for head in heads))
    assert resident_bytes() - before < 20 << 20
    assert {b"400", b"403", b"502"} <= words
