"""The proxy on real sockets: real clients, real servers on this machine's loopback."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.egress.world import HOST, World, a_world, head


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    async with a_world(tmp_path / "world") as made:
        yield made


async def hello(stream: Any) -> None:
    """A web server that tells the head of each request."""
    async with stream:
        try:
            while True:
                said = await head(stream)
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
                await stream.send(answer)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass


async def test_plain_http_reaches_an_allowed_host(world: World) -> None:
    port = await world.listen(hello)
    await world.allow(port)
    said = await world.curl(f"http://{HOST}:{port}/a?b=c")
    assert said.startswith(f"GET /a?b=c HTTP/1.1\r\nHost: {HOST}:{port}\r\n")
    assert said.endswith("200")
    assert "proxy" not in said.lower()
    [(target, why, sent, received)] = await world.until_noted()
    assert (target, why) == (f"{HOST}:{port}", "allowed")
    assert sent > 50
    assert received > 50


async def test_tunnel(world: World) -> None:
    port = await world.listen(hello, tls=True)
    await world.allow(port)
    said = await world.curl(f"https://{HOST}:{port}/a?b=c")
    assert said.startswith(f"GET /a?b=c HTTP/1.1\r\nHost: {HOST}:{port}\r\n")


async def test_the_client_reads_why_it_is_refused(world: World) -> None:
    tunnelled = await world.curl("https://later.example.com/")
    plain = await world.curl("http://later.example.com/")
    nonsense = await world.say(b"garbage\r\n\r\n")
    assert "CONNECT tunnel failed, response 403" in tunnelled
    assert plain == "network: refused later.example.com:80: no rule allows it\n403"
    assert nonsense.startswith(b"HTTP/1.1 400 network: refused a request: ")
    why = [(target, why.partition(":")[0]) for target, why, *_ in world.noted]
    named = [("later.example.com:443", "rule"), ("later.example.com:80", "rule")]
    assert why == [*named, ("None", "request")]


async def test_a_host_that_is_read_only_takes_no_post(world: World) -> None:
    port = await world.listen(hello, tls=True)
    await world.allow({"host": HOST, "port": port, "private": True, "read": True})
    url = f"https://{HOST}:{port}/a"
    assert (await world.curl(url)).startswith("GET /a HTTP/1.1\r\n")
    said = await world.curl("-d", "x", url)
    why = "only reading is allowed there, not this POST"
    assert said == f"network: refused {HOST}:{port}: {why}\n403"
    assert [each[1] for each in world.noted] == ["allowed", f"rule: {why}"]
