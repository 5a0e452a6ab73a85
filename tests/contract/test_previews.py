"""What listens in a sandbox is reached from outside by who knows its name, on every backend."""

import base64
import hashlib
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp import Client

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.backends import local_socket
from mcp_sandbox.config import Config
from mcp_sandbox.config.sections import PreviewsConfig, WorkspaceConfig
from mcp_sandbox.egress.process import visitors
from mcp_sandbox.errors import Busy, InvalidArgument, NotFound, NotPermitted
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.contract.conftest import CHAT
from tests.server.scripted import one_chat

# A server of several ways to answer, by the path of the request; it knows no HTTP.
SERVER = """
import base64, hashlib, os, select, socket, sys, threading

go = threading.Event()

def answer(client):
    came = b""
    while b"\\r\\n\\r\\n" not in came:
        came += client.recv(65536)
    path = came.split()[1]
    if path == b"/echo":
        while True:
            client.sendall(came)
            came = client.recv(65536)
            if not came:
                break
        client.sendall(b"the end")
    elif path == b"/told":
        client.sendall(b"told")
        client.shutdown(socket.SHUT_WR)
        while not came.endswith(b"later"):
            came += client.recv(65536)
        go.set()
    elif path == b"/events":
        client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\n\\r\\n")
        client.sendall(b"data: 1\\n\\n")
        go.wait()
        client.sendall(b"data: 2\\n\\n")
    elif path == b"/go":
        go.wait() if b"wait" in came else go.set()
        client.sendall(b"gone")
    elif path == b"/socket":
        key = came.split(b"Sec-WebSocket-Key: ")[1].split()[0]
        digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        accept = base64.b64encode(digest)
        client.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\n"
            b"Connection: Upgrade\\r\\nSec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
        for _ in range(2):
            frame = client.recv(65536)
            mask, data = frame[2:6], frame[6:]
            plain = bytes(one ^ mask[at % 4] for at, one in enumerate(data))
            client.sendall(bytes([frame[0], len(plain)]) + plain)
    elif path == b"/much":
        left, piece, told = 100_000_000, b"x" * 65536, False
        client.setblocking(False)
        while left:
            if not told and not select.select([], [client], [], 0.7)[1]:
                told = True
                with open("stalled", "w") as file:
                    file.write(str(100_000_000 - left))
            select.select([], [client], [])
            left -= client.send(piece[:left])
    elif path == b"/die":
        client.sendall(b"last words")
        os.kill(os.getpid(), 9)
    elif path == b"/hold":
        client.sendall(b"held")
        client.recv(1)
    client.close()

address, port = sys.argv[1:]
family = socket.AF_INET6 if ":" in address else socket.AF_INET
with socket.socket(family) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, int(port)))
    listener.listen(128)
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.fixture
def manager(lasting: SessionManager) -> SessionManager:
    return lasting


@pytest.fixture
async def session(emptied: Session) -> AsyncGenerator[Session]:
    await emptied.write_file("serve.py", SERVER)
    yield emptied
    # No server and no preview of one test is seen by the next.
    await emptied.reset()


def free_port() -> int:
    """A port that is free here: without walls it is the sandbox's, too."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def served(session: Session, address: str = "127.0.0.1", port: int = 0) -> int:
    port = port or free_port()
    await session.exec(f"python3 serve.py {address} {port} >log 2>&1 &")
    return port


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[SocketStream]:
    port = urlsplit(url).port
    assert port
    with anyio.fail_after(30):
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            yield stream


def asked(url: str, path: str, *more: str) -> bytes:
    return "\r\n".join(
        [f"GET {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}", *more, "", ""]
    ).encode()


async def until_end(stream: SocketStream) -> bytes:
    came = bytearray()
    async for data in stream:
        came += data
    return bytes(came)


async def answer(url: str, request: bytes) -> bytes:
    """What comes until the other side ends, to who ends its side only after that."""
    async with connected(url) as stream:
        await stream.send(request)
        return await until_end(stream)


async def is_gone(url: str) -> bool:
    with anyio.fail_after(10):
        while True:
            try:
                async with connected(url):
                    await anyio.sleep(0.02)
            except OSError:
                return True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0"])
async def test_a_page_is_seen_from_outside(session: Session, address: str) -> None:
    if ":" in address and not (await session.exec("grep -q . /proc/net/if_inet6")).success:
        pytest.skip("it has no ::1")
    port = free_port()
    await session.write_file("site/index.html", "<p>from inside")
    serve = f"python3 -m http.server {port} --bind {address} --directory site"
    await session.exec(f"{serve} >log 2>&1 &")
    url = await session.previews.open(port)
    page = await answer(url, asked(url, "/"))
    assert page.startswith(b"HTTP/1.0 200 OK\r\n")
    assert page.endswith(b"\r\n\r\n<p>from inside")
    assert b"404" in await answer(url, asked(url, "/missing"))


async def test_the_same_port_has_the_same_address(session: Session) -> None:
    port, other = await served(session), await served(session)
    url = await session.previews.open(port)
    assert await session.previews.open(port) == url
    further = await session.previews.open(other)
    assert urlsplit(url).hostname != urlsplit(further).hostname
    assert (await session.info()).previews == {port: url, other: further}
    assert len(str(urlsplit(url).hostname).removesuffix(".localhost")) == 32


async def test_bytes_go_both_ways_untouched(session: Session) -> None:
    url = await session.previews.open(await served(session))
    # More than a head: what is sent with it, and what is sent later.
    head = asked(url, "/echo", "X-Odd:  two  spaces ", "x-odd: again")
    data = bytes(range(256)) * 8192
    async with connected(url) as stream:
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                await stream.send(head + data[:1000])
                await stream.send(data[1000:])
                await stream.send_eof()

            tasks.start_soon(send)
            assert await until_end(stream) == head + data + b"the end"


async def test_each_direction_ends_by_itself(session: Session) -> None:
    url = await session.previews.open(await served(session))
    async with connected(url) as stream:
        await stream.send(asked(url, "/told"))
        assert await until_end(stream) == b"told"
        await stream.send(b"later")
        assert await answer(url, asked(url, "/go", "X: wait")) == b"gone"


async def test_events_arrive_one_by_one(session: Session) -> None:
    url = await session.previews.open(await served(session))
    async with connected(url) as stream:
        await stream.send(asked(url, "/events"))
        lines = BufferedByteReceiveStream(stream)
        assert (await lines.receive_until(b"\r\n\r\n", 1000)).startswith(b"HTTP/1.1 200")
        assert await lines.receive_until(b"\n\n", 1000) == b"data: 1"
        assert await answer(url, asked(url, "/go")) == b"gone"
        assert await lines.receive_until(b"\n\n", 1000) == b"data: 2"


async def test_a_websocket_is_passed_on(session: Session) -> None:
    url = await session.previews.open(await served(session))
    key = base64.b64encode(b"sixteen bytes it")
    async with connected(url) as stream:
        more = ("Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {key.decode()}")
        await stream.send(asked(url, "/socket", *more))
        lines = BufferedByteReceiveStream(stream)
        head = await lines.receive_until(b"\r\n\r\n", 1000)
        accept = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        assert base64.b64encode(accept) in head
        for text in (b"hot", b"reload"):
            mask = b"\x01\x02\x03\x04"
            masked = bytes(one ^ mask[at % 4] for at, one in enumerate(text))
            await stream.send(bytes([0x81, 0x80 | len(text)]) + mask + masked)
            assert await lines.receive_exactly(2 + len(text)) == bytes([0x81, len(text)]) + text


async def test_who_does_not_know_the_name_is_not_let_in(session: Session) -> None:
    url = await session.previews.open(await served(session))
    name = str(urlsplit(url).netloc)
    for request in (
        f"GET / HTTP/1.1\r\nHost: {name[1:]}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: {name.removesuffix(name[-12:])}.example.org\r\n\r\n",
        "GET / HTTP/1.1\r\nAccept: */*\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: \r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: {name}\r\nHost: {name}\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: {name}\r\nhOST : other\r\n\r\n",
        f"GET / HTTP/1.1\r\nX: 1\nReferer: http://{name}/\r\nX-Host: {name}\r\n\r\n",
        f"GET http://other/ HTTP/1.1\r\nHost: {name}\r\n\r\n",
        f"GET http://{name}/ HTTP/1.1\r\nHost: other\r\n\r\n",
        f"CONNECT {name} HTTP/1.1\r\nHost: {name}\r\n\r\n",
        f"PRI * HTTP/2.0\r\nHost: {name}\r\n\r\n",
        f"Host: {name}\r\n\r\n",
        "\x16\x03\x01\x02\r\n\r\n",
    ):
        refused = await answer(url, request.encode())
        assert refused.startswith(b"HTTP/1.1 421 Misdirected Request\r\n"), request
        assert b"Connection: close" in refused
    assert (await answer(url, asked(url, "/go"))) == b"gone"
    assert (
        await answer(
            url, asked(url, "/go").replace(b"Host", b"hOsT").upper().replace(b"/GO", b"/go")
        )
        == b"gone"
    )


async def test_a_head_is_short(session: Session) -> None:
    url = await session.previews.open(await served(session))
    fits = asked(url, "/go", "X: " + "x" * (16 * 1024 - 100))
    assert len(fits) < 16 * 1024
    assert await answer(url, fits) == b"gone"
    for head in (asked(url, "/go", "X: " + "x" * 17 * 1024), b"x" * 17 * 1024, b"\n" * 1_000_000):
        assert (await answer(url, head)).startswith(b"HTTP/1.1 431 Request Header Fields Too Large")


async def test_a_head_must_come_soon_and_the_first_to_wait_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_in = list[bytes]()

    async def take(client: local_socket.SocketStream, began: bytes) -> None:
        await client.aclose()
        let_in.append(began)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"http://name.localhost:{listening.getsockname()[1]}"
        async with anyio.create_task_group() as tasks:
            found = visitors.Visitors({b"name.localhost": take})
            tasks.start_soon(found.serve, listening, tasks.start_soon)
            async with AsyncExitStack() as stack:
                slow = [await stack.enter_async_context(connected(url)) for _ in range(200)]
                assert await answer(url, asked(url, "/go")) == b""
                assert let_in == [asked(url, "/go")]
                with anyio.fail_after(5):
                    assert await until_end(slow[0]) == b""
                monkeypatch.setattr(visitors, "_HEAD_S", 0.2)
                for half in (b"", asked(url, "/go")[:-1]):
                    assert await answer(url, half) == b""
            tasks.cancel_scope.cancel()


async def test_a_server_that_dies_ends_its_connections_and_the_address_stays(
    session: Session,
) -> None:
    port = await served(session)
    url = await session.previews.open(port)
    async with connected(url) as held:
        await held.send(asked(url, "/hold"))
        assert await held.receive() == b"held"
        assert await answer(url, asked(url, "/die")) in (b"last words", b"")
        assert await until_end(held) == b""
    gone = b""
    with anyio.fail_after(10):
        # Until the last of its sockets is closed the kernel lets in one more, and hangs up.
        while not gone:
            gone = await answer(url, asked(url, "/go"))
    assert gone.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
    assert str(port).encode() in gone
    await served(session, port=port)
    assert await session.previews.open(port) == url
    assert await answer(url, asked(url, "/go")) == b"gone"


async def test_nobody_else_is_told_the_name(session: Session) -> None:
    port = await served(session)
    url = await session.previews.open(port)
    number = urlsplit(url).port or 0
    # Browsers try ::1 first.
    with pytest.raises(OSError, match=r"in use|assign|not supported"):
        socket.create_server(("::1", number), family=socket.AF_INET6)
    with pytest.raises(OSError, match=r"refused|assign|not supported"):
        socket.create_connection(("::1", number))
    await session.reset()
    assert await is_gone(url)
    # A page that is still open asks for its server again and again, whoever that is now.
    with socket.create_server(("127.0.0.1", number)):
        await served(session, port=port)
        other = await session.previews.open(port)
    assert urlsplit(other).hostname != urlsplit(url).hostname
    assert await answer(other, asked(other, "/go")) == b"gone"


async def test_a_server_that_is_starting_is_waited_for(session: Session) -> None:
    port = free_port()
    await session.exec(
        "(until test -e begin; do sleep 0.02; done; "
        f"exec python3 serve.py 127.0.0.1 {port}) >log 2>&1 &"
    )
    async with anyio.create_task_group() as tasks:
        found = []

        async def open_it() -> None:
            found.append(await session.previews.open(port, wait_s=30))

        tasks.start_soon(open_it)
        await session.exec("touch begin")
    assert await answer(found[0], asked(found[0], "/go")) == b"gone"


async def test_where_nothing_listens_the_ports_are_named_that_are_listened_on(
    session: Session,
) -> None:
    port, other = await served(session), free_port()
    await session.previews.open(port)
    with pytest.raises(NotFound, match=rf"port {other} .* listen on: [\d, ]*\b{port}\b"):
        await session.previews.open(other, wait_s=0.1)
    # Other addresses are not tried, though something answers there.
    elsewhere = await served(session, "127.0.0.2")
    with pytest.raises(NotFound, match=rf"port {elsewhere} "):
        await session.previews.open(elsewhere, wait_s=1)
    assert list((await session.info()).previews) == [port]


@pytest.mark.parametrize("port", [0, -1, 65_536, 70_000])
async def test_a_port_that_cannot_be_is_refused(session: Session, port: int) -> None:
    with pytest.raises(InvalidArgument, match="from 1 to 65,535"):
        await session.previews.open(port, wait_s=0)
    assert (await session.exec("echo alive")).stdout == "alive\n"


async def test_a_chat_has_at_most_eight_previews(session: Session) -> None:
    ports = [free_port() for _ in range(9)]
    for port in ports:
        await served(session, port=port)
    for port in ports[:8]:
        await session.previews.open(port)
    with pytest.raises(Busy, match=f"8 ports .*{ports[7]}"):
        await session.previews.open(ports[8])
    assert await session.previews.open(ports[0])


async def test_a_preview_has_at_most_sixty_four_connections(session: Session) -> None:
    url = await session.previews.open(await served(session))
    async with anyio.create_task_group() as tasks, anyio.create_task_group() as opening:
        full = anyio.Event()

        async def hold() -> None:
            async with connected(url) as stream:
                await stream.send(asked(url, "/hold"))
                assert await stream.receive() == b"held"
                held.append(stream)
                if len(held) == 64:
                    full.set()
                await full.wait()
                await more.wait()

        held: list[SocketStream] = []
        more = anyio.Event()
        for _ in range(64):
            tasks.start_soon(hold)
        await full.wait()
        assert (await answer(url, asked(url, "/go"))).startswith(b"HTTP/1.1 503 ")
        # Nor do they hold up other calls.
        assert (await session.exec("echo alive")).stdout == "alive\n"
        more.set()
        opening.cancel_scope.cancel()
    with anyio.fail_after(10):
        while (await answer(url, asked(url, "/go"))) != b"gone":
            await anyio.sleep(0.02)


async def test_who_reads_slowly_holds_up_the_sender(session: Session) -> None:
    url = await session.previews.open(await served(session))
    async with connected(url) as stream:
        await stream.send(asked(url, "/much"))
        stalled = await session.exec("until test -s stalled; do sleep 0.02; done; cat stalled")
        # What lies in our hands and in the kernels' is a part of it.
        assert int(stalled.stdout) < 20_000_000
        total = 0
        async for data in stream:
            total += len(data)
    assert total == 100_000_000


async def test_an_open_connection_is_a_use_of_the_sandbox(
    manager: SessionManager, session: Session
) -> None:
    async def busy() -> int:
        return next(each.busy for each in await manager.list() if each.chat == CHAT)

    url = await session.previews.open(await served(session))
    async with connected(url) as stream:
        await stream.send(asked(url, "/hold"))
        await stream.receive()
        assert await busy() == 1
    with anyio.fail_after(10):
        while await busy():
            await anyio.sleep(0.02)


async def test_a_connection_keeps_no_server_if_files_become_too_many(config: Config) -> None:
    small = config.model_copy(update={"workspace": WorkspaceConfig(max_files=500)})
    async with open_manager(small) as manager:
        session = await manager.session(CHAT)
        await session.write_file("serve.py", SERVER)
        url = await session.previews.open(await served(session))
        async with connected(url) as stream:
            await stream.send(asked(url, "/hold"))
            assert await stream.receive() == b"held"
            fills = "while :; do for i in {1..10}; do : >$((n++)); done; sleep 0.02; done"
            await session.exec(f"({fills}) >/dev/null &")
            assert await until_end(stream) == b""
        await session.exec("true")
        (news,) = await session.take_notices()
        assert "filled the workspace" in news
        assert "serve.py" in news


async def test_a_preview_is_gone_with_its_sandbox(session: Session) -> None:
    port = await served(session)
    url = await session.previews.open(port)
    async with connected(url) as stream:
        await stream.send(asked(url, "/hold"))
        assert await stream.receive() == b"held"
        await session.reset()
        assert await until_end(stream) == b""
    assert await is_gone(url)
    assert (await session.info()).previews == {}
    with pytest.raises(NotFound):
        await session.previews.open(port, wait_s=0)
    await served(session, port=port)
    assert await session.previews.open(port) == url
    assert await answer(url, asked(url, "/go")) == b"gone"


async def test_a_preview_is_gone_with_its_server(config: Config) -> None:
    async with open_manager(config) as manager:
        session = await manager.session(CHAT)
        await session.write_file("serve.py", SERVER)
        url = await session.previews.open(await served(session))
        stream = await anyio.connect_tcp("127.0.0.1", urlsplit(url).port or 0)
        await stream.send(asked(url, "/hold"))
        assert await stream.receive() == b"held"
        started = anyio.current_time()
    # It was not waited for, as calls are.
    assert anyio.current_time() - started < 8
    async with stream:
        assert await until_end(stream) == b""
    assert await is_gone(url)


async def test_an_operator_may_switch_previews_off(config: Config) -> None:
    off = config.model_copy(update={"previews": PreviewsConfig(enabled=False)})
    async with open_manager(off) as manager:
        session = await manager.session(CHAT)
        with pytest.raises(NotPermitted, match=r"previews\.enabled"):
            await session.previews.open(8000, wait_s=0)


async def test_the_tool_gives_an_address_to_open(manager: SessionManager, session: Session) -> None:
    server = build_server(make_session_finder(one_chat(CHAT), manager.session))
    port = await served(session)
    async with Client(server) as client:
        said = await client.call_tool("preview", {"port": port, "path": "/a b?c=ü#d"})
        text = said.content[0].text  # type: ignore[union-attr]
        url = await session.previews.open(port)
        assert text.splitlines()[0] == f"{url}/a%20b?c=%C3%BC#d"
        info = await client.call_tool("sandbox_info", {})
        assert info.structured_content
        assert info.structured_content["previews"] == {str(port): url}
        closed = await client.call_tool("preview", {"port": free_port(), "wait_s": 0})
        assert closed.is_error
        assert str(port) in closed.content[0].text  # type: ignore[union-attr]
