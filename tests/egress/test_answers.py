"""What a bound host answers comes without the value, wherever in the answer it puts it."""

import base64
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import h11
import pytest

from mcp_sandbox.config import SecretConfig
from mcp_sandbox.egress.process.http_requests import Peer, exchange
from mcp_sandbox.egress.secrets import Secrets
from mcp_sandbox.egress.ways_out import _pair
from tests.egress.world import CHAT, HOST, World, a_world, head

VALUE = b'tok/en+0123456789"~%41xyz'
BASE64, QUOTED = base64.b64encode(b"x" + VALUE), json.dumps(VALUE.decode()).encode()
ZIPPED = gzip.compress(VALUE)


def whole(body: bytes, *headers: bytes) -> bytes:
    lines = [b"HTTP/1.1 200 OK", *headers, b"Content-Length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + end


MASKED = {
    "body": whole(b"is " + VALUE + b" and " + QUOTED + b" and " + BASE64),
    "headers": whole(b"", b"Set-Cookie: a=" + VALUE, b"X-Other: " + BASE64),
    "reason": b"HTTP/1.1 200 " + VALUE + b"\r\nContent-Length: 0\r\n\r\n",
    "chunks": chunked(*(bytes((each,)) for each in VALUE)),
    "trailers": chunked(b"body", end=b"0\r\nX-Trailer: " + VALUE + b"\r\n\r\n"),
    "hints": b"HTTP/1.1 103 Early\r\nLink: " + VALUE + b"\r\n\r\n" + whole(b""),
    "continue": b"HTTP/1.1 100 " + VALUE + b"\r\nX: " + VALUE + b"\r\n\r\n" + whole(b""),
    "behind": whole(b"body") + VALUE,
}
REFUSED = {
    "gzip": whole(ZIPPED, b"Content-Encoding: gzip"),
    "gzip, then none": whole(ZIPPED, b"Content-Encoding: gzip", b"Content-Encoding: identity"),
    "gzip in a list": whole(ZIPPED, b"Content-Encoding: gzip, identity"),
    "gzip on the way": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    + b"%x\r\n%s\r\n0\r\n\r\n" % (len(ZIPPED), ZIPPED),
    "a part": whole(VALUE[:9]).replace(b"200 OK", b"206 Partial Content"),
    "other protocol": b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n" + VALUE,
    "no headers": b"HTTP/1.1 200 OK\r\n" + VALUE + b"\r\n\r\n",
    "no answer": VALUE + b"\r\n\r\n",
}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with a_world(tmp_path / "world") as made:
        yield made


async def answered(world: World, answer: bytes, value: bytes = VALUE) -> bytes:
    """What curl gets of an answer of a host that was sent the value."""
    heard = list[bytes]()

    async def serve(stream: Any) -> None:
        async with stream:
            heard.append(await head(stream))
            await stream.send(answer)
            # Until the proxy hangs up.
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()

    port = await world.listen(serve, tls=True)
    await world.allow(port)
    source = anyio.Path(world.folder / "value")
    await source.write_bytes(value)
    settings = {"from": f"file:{source}", "hosts": [f"{HOST}:{port}"]}
    secrets = Secrets({"TOKEN": SecretConfig.model_validate(settings)}, b"seed")
    world.secrets = secrets
    header = f"Authorization: Bearer {secrets.placeholders(CHAT)['TOKEN']}"
    done = await world.run("curl", "-sSi", "--raw", "-H", header, f"https://{HOST}:{port}/")
    assert b"Bearer " + value in heard[0]
    return done.stdout + done.stderr


@pytest.mark.parametrize("answer", MASKED)
async def test_the_value_is_masked_or_left_out(world: World, answer: str) -> None:
    said = await answered(world, MASKED[answer])
    assert b" 200 " in said
    assert not [form for form in (VALUE, QUOTED[1:-1], BASE64[4:-4]) if form in said]


@pytest.mark.parametrize("answer", REFUSED)
async def test_what_cannot_be_searched_is_refused(world: World, answer: str) -> None:
    said = await answered(world, REFUSED[answer])
    assert b" 502 " in said
    assert b"network: refused host.internal" in said
    assert ZIPPED not in said
    assert VALUE not in said


TOKEN = b"ghp_16C7e42F29~2c6912E7"


@pytest.mark.parametrize(
    "name",
    [
        TOKEN,
        TOKEN.lower(),
        TOKEN.upper(),
        b"X-" + TOKEN.title() + b"-Y",
        base64.b64encode(TOKEN).rstrip(b"="),
        base64.b64encode(TOKEN).rstrip(b"=").lower(),
        b"".join(b"%%%02x" % each for each in TOKEN),
        b"".join(b"%%%02X" % each for each in TOKEN.lower()),
    ],
)
async def test_the_value_as_a_headers_name_is_masked_in_any_case(world: World, name: bytes) -> None:
    said = await answered(world, whole(b"body", name + b": x", b"X-Other-Name: y"), TOKEN)
    assert b" 200 " in said
    assert b"X-Other-Name: y" in said
    # The digits at the ends of a value hold something of its neighbours.
    assert name.strip(b"Xx-Yy")[1:-2].lower() not in said.lower()
    assert b"*" * 20 in said


async def test_an_answer_that_is_there_before_its_request_is_passed_on() -> None:
    (near, asks), (far, answers) = _pair(), _pair()
    with asks, answers:
        asks.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        answers.sendall(whole(b"too busy"))
        async with near, far:
            client, server = Peer(near, h11.SERVER), Peer(far, h11.CLIENT)
            request = await client.head(first=True)
            assert request
            await exchange(client, server, [request], None, lambda: None)
        assert asks.recv(1000).endswith(b"\r\n\r\ntoo busy")
        assert answers.recv(1000).startswith(b"GET / HTTP/1.1\r\n")
