"""The proxy on real sockets: real clients, real servers on this machine's loopback."""

import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteStream
from anyio.streams.tls import TLSAttribute, TLSStream
from cryptography import x509

from mcp_sandbox.egress.process import proxy
from mcp_sandbox.egress.process.keeper import Keeper
from mcp_sandbox.egress.process.proxy import ProxiedConnection
from mcp_sandbox.egress.rules import EgressRule
from mcp_sandbox.models import ChatId
from tests.egress.world import AUTHORITY, HOST, World, a_world, granted, head
from tests.streams import everything


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


async def echo(stream: SocketStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send(data)
        await stream.send_eof()


async def tunnel(world: World, port: int, host: str = HOST) -> SocketStream:
    stream = await world.connect()
    await stream.send(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert (await head(stream)).startswith(b"HTTP/1.1 200 ")
    return stream


def client_hello(name: str | None) -> bytes:
    out = ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    tls = context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return out.read()


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


async def test_tls_stays_end_to_end_through_a_tunnel(world: World) -> None:
    port = await world.listen(hello, tls=True)
    await world.allow(port)
    stream = await tunnel(world, port)
    context = ssl.create_default_context(cadata=AUTHORITY.cert_pem.bytes().decode())
    tls = await TLSStream.wrap(
        stream, hostname=HOST, ssl_context=context, standard_compatible=False
    )
    async with tls:
        await tls.send(b"GET / HTTP/1.1\r\n\r\n")
        assert (await head(tls)).startswith(b"HTTP/1.1 200")
        theirs = tls.extra(TLSAttribute.peer_certificate_binary)
    assert theirs
    issuer = x509.load_der_x509_certificate(theirs).issuer
    assert issuer == x509.load_pem_x509_certificate(AUTHORITY.cert_pem.bytes()).subject
    [noted] = await world.until_noted()
    assert noted[:2] == (f"{HOST}:{port}", "allowed")


async def test_the_client_reads_why_it_is_refused(world: World) -> None:
    tunnelled = await world.curl("https://later.example.com/")
    plain = await world.curl("http://later.example.com/")
    python = "import urllib.request as r; r.urlopen('https://later.example.com/')"
    shown = await world.run("python3", "-c", python)
    assert "CONNECT tunnel failed, response 403" in tunnelled
    assert plain == "network: refused later.example.com:80: no rule allows it\n403"
    said = b"Tunnel connection failed: 403 network: refused later.example.com:443: no rule"
    assert said in shown.stderr
    why = [(target, why.partition(":")[0]) for target, why, *_ in world.noted]
    secure = ("later.example.com:443", "rule")
    assert why == [secure, ("later.example.com:80", "rule"), secure]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"GET https://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"GET http://u:p@a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"GET http://a.example/ HTTP/1.1\r\n\r\n", 400),
        (b"GET http://a.example/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"CONNECT a.example HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"CONNECT a.example:99999 HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"CONNECT a.example:\xb2\xb2 HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"CONNECT [::1]:22 HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
        (b"CONNECT a.example:22 HTTP/1.1\r\nHost: a.example\r\n\r\n", 403),
        (b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", 403),
        (b"HEAD http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", 403),
        (b"GET http://a.example/ HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 400),
        (b"GET http://a.example/ HTTP/1.1\r\nHost: a\r\n" + b"x: yyyy\r\n" * 4000 + b"\r\n", 400),
        (b"G" * 40_000, 400),
        (b"GET http://a.example/" + b"a" * 8200 + b" HTTP/1.1\r\nHost: a.example\r\n\r\n", 414),
        (b"GET http://" + b"a" * 30_000 + b"/# HTTP/1.1\r\nHost: a.example\r\n\r\n", 414),
        (b"GET http://" + b"a" * 8000 + b"/# HTTP/1.1\r\nHost: a.example\r\n\r\n", 400),
    ],
)
async def test_what_cannot_be_judged_is_refused(
    world: World, said: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with anyio.fail_after(5):
        answer = await world.say(said)
    assert answer.startswith(b"HTTP/1.1 %d network: refused " % status)
    assert len(world.noted) == 1
    assert not caplog.records


async def test_a_port_of_a_rule_is_the_only_one(world: World) -> None:
    port, other = await world.listen(echo), await world.listen(echo)
    await world.allow(port)
    said = await world.say(f"CONNECT {HOST}:{other} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert b"403 network: refused " in said
    assert f"no rule allows port {other} of this host".encode() in said


async def test_each_request_of_a_connection_is_judged(world: World) -> None:
    port, other = await world.listen(hello), await world.listen(hello)
    await world.allow(port)
    asked = "GET http://{0}/{1} HTTP/1.1\r\nHost: {0}\r\n\r\n"
    here = [asked.format(f"{HOST}:{port}", number) for number in (1, 2)]
    said = await world.say("".join([*here, asked.format(f"{HOST}:{other}", 3)]).encode())
    assert said.index(b"GET /1 ") < said.index(b"GET /2 ") < said.index(b"403 network: refused")
    assert [each[1][:7] for each in world.noted] == ["allowed", "allowed", "rule: n"]


async def test_a_grant_and_its_end_hold_from_the_next_connection_on(world: World) -> None:
    before = await world.curl("http://later.example.com/")
    world.grants.append(granted("later.invalid"))
    [*_, during] = (await world.curl("http://later.invalid/")).splitlines()
    world.grants.clear()
    after = await world.curl("http://later.invalid/")
    assert (before[-3:], during, after[-3:]) == ("403", "502", "403")


async def test_bytes_pass_both_ways_at_once_and_each_way_ends_by_itself(world: World) -> None:
    port = await world.listen(echo)
    await world.allow(port)
    blob = bytes(range(256)) * 40_000
    async with await tunnel(world, port) as stream, anyio.create_task_group() as tasks:

        async def send() -> None:
            await stream.send(blob)
            await stream.send_eof()

        tasks.start_soon(send)
        assert await everything(stream) == blob
    [(_, why, sent, received)] = await world.until_noted()
    assert (why, sent, received) == ("allowed", len(blob), len(blob))


async def test_a_server_that_speaks_first_is_heard(world: World) -> None:
    async def greet(stream: SocketStream) -> None:
        async with stream:
            await stream.send(b"220 ready\r\n")
            await everything(stream)

    port = await world.listen(greet)
    await world.allow(port)
    async with await tunnel(world, port) as stream:
        assert await stream.receive() == b"220 ready\r\n"


@pytest.mark.parametrize("name", ["other.example", None])
async def test_tls_that_names_another_host_never_leaves(world: World, name: str | None) -> None:
    came = list[bytes]()

    async def listening(stream: SocketStream) -> None:
        async with stream:
            came.append(await everything(stream))

    port = await world.listen(listening)
    await world.allow(port)
    async with await tunnel(world, port) as stream:
        await stream.send(client_hello(name))
        assert await everything(stream) == b""
    [(_, why, *_)] = await world.until_noted()
    assert why.startswith("name: its TLS hello names ")
    assert came in ([], [b""])


async def test_a_hello_may_come_byte_by_byte(world: World) -> None:
    port = await world.listen(echo)
    await world.allow(port)
    said = client_hello(HOST)
    async with await tunnel(world, port) as stream:
        for at in range(len(said)):
            await stream.send(said[at : at + 1])
        answer = b""
        while len(answer) < len(said):
            answer += await stream.receive()
    assert answer == said


async def test_random_tls_ends_the_tunnel_and_nothing_else(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    port = await world.listen(echo)
    await world.allow(port)
    async with await tunnel(world, port) as stream:
        await stream.send(b"\x16\x03\x01\x02\x00" + bytes(range(256)) * 4)
        assert await everything(stream) == b""
    assert not caplog.records
    assert "200" in await world.curl("-o", "/dev/null", f"http://{HOST}:{await web(world)}/")


async def web(world: World) -> int:
    port = await world.listen(hello)
    await world.allow(port)
    return port


async def test_what_cannot_be_reached_is_told(world: World) -> None:
    port = await world.listen(hello)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as gone:
        nobody = gone.extra(anyio.abc.SocketAttribute.local_port)
    await world.allow(nobody, "nowhere.invalid", port)
    assert "502" in await world.curl(f"https://{HOST}:{nobody}/")
    said = await world.curl(f"http://{HOST}:{nobody}/")
    assert (
        said == f"network: refused {HOST}:{nobody}: it cannot be reached: Connection refused\n502"
    )
    assert "its name has no address" in await world.curl("http://nowhere.invalid/")


@pytest.mark.parametrize("more", ["", "pipelined"])
async def test_a_client_that_vanishes_takes_its_server_along(
    world: World, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_ENDING_S", 0.5)
    ended = anyio.Event()

    async def silent(stream: SocketStream) -> None:
        async with stream:
            await head(stream)
            with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                await stream.receive()
            ended.set()

    port = await world.listen(silent)
    await world.allow(port)
    async with await world.connect() as stream:
        asked = f"GET http://{HOST}:{port}/ HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n{more}"
        await stream.send(asked.encode())
        await stream.send_eof()
    with anyio.fail_after(20):
        await ended.wait()


async def test_a_client_that_has_said_all_gets_its_answer(world: World) -> None:
    port = await world.listen(hello)
    await world.allow(port)
    asked = f"GET http://{HOST}:{port}/ HTTP/1.1\r\nHost: {HOST}:{port}\r\n\r\n"
    async with await world.connect() as stream:
        await stream.send(asked.encode() * 2)
        await stream.send_eof()
        assert (await everything(stream)).count(b"200 OK") == 2


async def test_an_endless_body_that_is_not_read_stops(world: World) -> None:
    sent = 0

    async def endless(stream: SocketStream) -> None:
        nonlocal sent
        async with stream:
            while True:
                await stream.send(bytes(65536))
                sent += 65536

    port = await world.listen(endless)
    await world.allow(port)
    async with await tunnel(world, port) as stream:
        await stream.receive(1)
        before = -1
        with anyio.fail_after(10):
            while before != sent:
                before = sent
                await anyio.sleep(0.3)
        # What the buffers of three sockets hold.
        assert sent < 32 << 20


@pytest.mark.parametrize("read", [False, True])
async def test_a_proxy_of_this_machine_is_gone_through(tmp_path: Path, read: bool) -> None:
    async with a_world(tmp_path / "outer") as outer:
        secure, plain = await outer.listen(hello, tls=True), await outer.listen(hello)
        await outer.allow(secure, plain)
        upstream = f"http://127.0.0.1:{outer.port}"
        async with a_world(tmp_path / "inner", upstream=upstream) as inner:
            # Not private: the name is judged here, and looked up there.
            named = [f"{HOST}:{secure}", f"{HOST}:{plain}", "other.example:443"]
            for host, _, port in (each.partition(":") for each in named):
                inner.grants.append(EgressRule(host, frozenset({int(port)}), read=read))
            insecure = () if read else ("-k",)
            assert "200" in await inner.curl(*insecure, f"https://{named[0]}/")
            assert "200" in await inner.curl(f"http://{named[1]}/")
            assert "refused" in await inner.curl("-v", "https://other.example/")
            assert {each[0] for each in outer.noted} == set(named)


async def test_over_a_share_a_connection_is_refused_or_the_longest_idle_one_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.proxy.most = 16
    asked = b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"
    async with await world.connect() as first, await world.connect() as second:
        with anyio.fail_after(5):
            while len(world.proxy.open) < 2:
                await anyio.lowlevel.checkpoint()
        assert b"503 network: refused a request: too many" in await world.say(asked)
        monkeypatch.setattr(proxy, "_ENDING_S", 0)
        assert b" 403 " in await world.say(asked)
        # It had been idle for longer than the other.
        assert await everything(first) == b""
        await second.send(asked)
        assert b" 403 " in await everything(second)


async def test_who_has_most_makes_room_for_another_chat_at_once(world: World) -> None:
    world.proxy.most = 32
    asked = b"GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n"
    async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
        for number in range(4):
            chat = ChatId("local", f"idle{number}")
            for _ in range(4):
                ends = await world.pair(stack)
                keeper = Keeper(world.answer)
                held = ProxiedConnection(world.proxy, ends, chat, keeper, world.note)
                tasks.start_soon(held.serve)
        with anyio.fail_after(5):
            while len(world.proxy.open) < 16:
                await anyio.lowlevel.checkpoint()
            # All that the user may have is idle, and none of it for long.
            assert b" 403 " in await world.say(asked)
        assert len(world.proxy.open) == 15
        tasks.cancel_scope.cancel()


def asking_again() -> ssl.SSLContext:
    """A server's context that takes one group, which clients do not offer at first."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert(HOST).configure_cert(context)
    context.set_ecdh_curve("secp384r1")
    return context


class Counting:
    """A server with TLS that says how often it saw a hello, and which host the last named."""

    def __init__(self) -> None:
        self.raw = b""

    async def __call__(self, stream: Any) -> None:
        class Seen(BufferedByteStream):
            async def receive(seen, max_bytes: int = 65536) -> bytes:  # noqa: N805
                data = await super().receive(max_bytes)
                self.raw += data
                return data

        async with stream:
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError, ssl.SSLError):
                await self._echo(Seen(stream))

    async def _echo(self, stream: Any) -> None:
        async with await TLSStream.wrap(
            stream,
            server_side=True,
            ssl_context=asking_again(),
            standard_compatible=False,
        ) as tls:
            while data := await tls.receive():
                await tls.send(data)


def hellos(raw: bytes) -> int:
    """How many hellos there are in records of TLS."""
    found = 0
    while raw:
        end = 5 + int.from_bytes(raw[3:5])
        found += raw[0] == 22 and raw[5] == 1
        raw = raw[end:]
    return found


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_may_send_its_hello_again(world: World, version: ssl.TLSVersion) -> None:
    server = Counting()
    port = await world.listen(server)
    await world.allow(port)
    trusted = ssl.create_default_context()
    AUTHORITY.configure_trust(trusted)
    trusted.maximum_version = version
    size = 1 << 20
    for _ in range(2):
        async with await tunnel(world, port) as stream:
            with anyio.fail_after(10):
                tls = await TLSStream.wrap(
                    stream, hostname=HOST, ssl_context=trusted, standard_compatible=False
                )
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(tls.send, bytes(size))
                    came = 0
                    while came < size:
                        came += len(await tls.receive())
    again = version is ssl.TLSVersion.TLSv1_3
    first = server.raw[: 1 << 14]
    assert hellos(first[: first.index(b"\x17\x03\x03")]) == (2 if again else 1)


@pytest.mark.parametrize(
    "options",
    [
        ["-groups", "X25519:P-384"],
        ["-groups", "P-384"],
        ["-tls1_2"],
        ["-no_middlebox", "-groups", "X25519:P-384"],
    ],
    ids=" ".join,
)
async def test_openssl_says_its_hello_as_it_likes(world: World, options: list[str]) -> None:
    port = await world.listen(Counting())
    await world.allow(port)
    where = ["-proxy", f"127.0.0.1:{world.port}", "-connect", f"{HOST}:{port}"]
    command = ["openssl", "s_client", *where, "-servername", HOST, "-quiet", *options]
    with anyio.fail_after(20):
        async with await anyio.open_process(command) as process:
            assert process.stdin
            assert process.stdout
            await process.stdin.send(b"hello\n")
            assert await process.stdout.receive() == b"hello\n"
            process.kill()


async def first_hello(stream: SocketStream, name: str) -> tuple[ssl.SSLObject, Any, Any]:
    """Send what a client says first."""
    context = ssl.create_default_context()
    came, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(came, out, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    await stream.send(out.read())
    return client, came, out


@pytest.mark.parametrize("how", ["when asked", "at once"])
async def test_a_second_hello_for_another_host_never_leaves(world: World, how: str) -> None:
    other = HOST.replace("host", "hose").encode()
    server = Counting()
    port = await world.listen(server)
    await world.allow(port)
    async with await tunnel(world, port) as stream:
        client, came, out = await first_hello(stream, HOST)
        if how == "at once":
            await stream.send(client_hello(other.decode()))
        else:
            with anyio.fail_after(5):
                came.write(await stream.receive())
            with pytest.raises(ssl.SSLWantReadError):
                client.do_handshake()
            second = out.read()
            assert HOST.encode() in second
            await stream.send(second.replace(HOST.encode(), other))
        with anyio.fail_after(5), suppress(anyio.BrokenResourceError):
            await everything(stream)
    noted = await world.until_noted(2)
    assert "name: its TLS hello names another host" in [each[1] for each in noted]
    assert other not in server.raw


async def test_a_hello_behind_another_in_its_record_never_leaves(world: World) -> None:
    server = Counting()
    port = await world.listen(server)
    await world.allow(port)
    first, second = client_hello(HOST)[5:], client_hello("hose.internal")[5:]
    both = first + second
    async with await tunnel(world, port) as stream:
        with anyio.fail_after(5), suppress(anyio.BrokenResourceError):
            await stream.send(b"\x16\x03\x01" + len(both).to_bytes(2) + both)
            await everything(stream)
    [noted] = await world.until_noted()
    assert noted[1] == "name: its TLS hello is not the last message of its record"
    assert not server.raw
