"""Previews of all chats at one listener: which names lead where, and what never comes there."""

import os
import re
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest

from mcp_sandbox.app.chats import open_session
from mcp_sandbox.config.sections import PreviewsConfig
from tests.conftest import configured
from tests.contract.test_previews import answer, asked, connected, until_end
from tests.control.daemon import platform
from tests.daemon.http import serving
from tests.daemon.running import Client, Daemon, Place, command, in_chat, place, running
from tests.web.clients import http_client

BACKENDS = pytest.mark.parametrize(
    "backend", [pytest.param("docker", marks=pytest.mark.docker), "bubblewrap"]
)
LISTEN = "MCP_SANDBOX_PREVIEWS__LISTEN"
SHARED = {LISTEN: "127.0.0.1:0"}
UNKNOWN = b"There is no preview of this name, or not any more: ask for another.\n"
# It says who it is, echoes what is posted and, in capitals, what follows an upgrade.
SERVER = r"""
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Site(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/socket" and "Upgrade" in self.headers:
            self.send_response(101)
            self.send_header("Upgrade", self.headers["Upgrade"])
            self.send_header("Connection", "Upgrade")
            self.end_headers()
            self.wfile.write(b"hello")
            while data := self.rfile.read1():
                self.wfile.write(data.upper())
            self.close_connection = True
            return
        if self.path == "/events":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"first\n")
            self.rfile.read1()
            self.close_connection = True
            return
        head = self.headers["Host"], self.headers["Connection"], self.headers["X-Odd"]
        self.answer(f"{sys.argv[2]} {self.path} {head}".encode())
        if self.path == "/twice":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")

    def do_POST(self):
        self.answer(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Site).serve_forever()
"""


async def shown(client: Client, port: int) -> str:
    """The address of a preview, as the agent is told it."""
    told = await client.call("preview", port=port)
    text = str(told["content"][0]["text"])
    assert told["_meta"]["mcp-sandbox/result"]["address"] == text.splitlines()[0], text
    return text.splitlines()[0].removesuffix("/")


async def served(client: Client, says: str, port: int = 8000) -> str:
    await client.call("write_file", path="serve.py", content=SERVER)
    await client.exec(f"python3 serve.py {port} {says} >>log 2>&1 &")
    return await shown(client, port)


async def seen(url: str, path: str = "/") -> str:
    """What a browser sees, which looks for every *.localhost here."""
    parts = urlsplit(url)
    async with http_client(timeout=30) as http:
        found = await http.get(
            f"http://127.0.0.1:{parts.port}{path}", headers={"host": parts.netloc}
        )
    return found.text


async def gone(url: str) -> str:
    with anyio.fail_after(10):
        while "no preview of this name" not in (text := await seen(url)):
            await anyio.sleep(0.02)
    return text


@asynccontextmanager
async def ending(where: Place) -> AsyncGenerator[Daemon]:
    """A daemon whose sandboxes end with it, though something runs in their background."""
    async with running(where, limit_s=110) as daemon:
        yield daemon
        await command(where, "stop", "--all")


@asynccontextmanager
async def two_chats(tmp_path: Path) -> AsyncGenerator[tuple[Client, str, str]]:
    """The client of one chat, and the addresses of its server and of another chat's."""
    where = place(tmp_path, "bubblewrap", SHARED)
    async with ending(where), in_chat(where, "a") as a, in_chat(where, "b") as b:
        yield a, await served(a, "one"), await served(b, "two")


@BACKENDS
async def test_one_listener_shows_the_servers_of_all_chats_each_by_its_name(
    tmp_path: Path, backend: str
) -> None:
    where = place(tmp_path, backend, SHARED)
    async with (
        ending(where),
        in_chat(where, "a") as a,
        in_chat(where, "b") as b,
    ):
        urls = dict[str, str]()
        for client, port, text in ((a, 8000, "one"), (a, 8001, "two"), (b, 8000, "three")):
            await client.exec(f"mkdir -p {text}; echo {text} > {text}/index.html")
            serve = f"python3 -m http.server {port} --bind 127.0.0.1 --directory {text}"
            await client.exec(f"{serve} >/dev/null 2>&1 &")
            urls[text] = await shown(client, port)
            assert await shown(client, port) == urls[text]
        names, ports = zip(*(urlsplit(url).netloc.split(":") for url in urls.values()), strict=True)
        assert all(re.fullmatch(r"[0-9a-f]{32}\.localhost", name) for name in names)
        assert (len(set(names)), len(set(ports))) == (3, 1)
        assert {text: await seen(url) for text, url in urls.items()} == {
            text: f"{text}\n" for text in urls
        }
        info = await a.call("sandbox_info")
        assert info["structuredContent"]["previews"] == {"8000": urls["one"], "8001": urls["two"]}
        await a.call("sandbox_reset")
        assert await gone(urls["one"]) == await gone(urls["two"]) == UNKNOWN.decode()
        assert await seen(urls["three"]) == "three\n"


async def test_who_names_no_preview_is_answered_404(tmp_path: Path) -> None:
    async with two_chats(tmp_path) as (_, url, _other):
        name, host = str(urlsplit(url).hostname), urlsplit(url).netloc
        label, number = name.removesuffix(".localhost"), urlsplit(url).port
        for head in (
            f"GET / HTTP/1.1\r\nHost: {label[1:]}.localhost:{number}",
            f"GET / HTTP/1.1\r\nHost: x.{host}",
            f"GET / HTTP/1.1\r\nHost: localhost:{number}",
            f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{number}",
            f"GET / HTTP/1.1\r\nHost: [::1]:{number}",
            f"GET / HTTP/1.1\r\nHost: :{number}",
            "GET / HTTP/1.1\r\nHost: ",
            "GET / HTTP/1.1\r\nAccept: */*",
            "GET / HTTP/1.0",
            f"GET / HTTP/1.1\r\nHost: {host}\r\nHost: {host}",
            f"GET / HTTP/1.1\r\nHost: other\r\nhOST : {host}",
            f"GET http://{host}/ HTTP/1.1\r\nHost: {host}",
            f"GET http://{host}/ HTTP/1.1\r\nHost: other",
            f"CONNECT {host} HTTP/1.1\r\nHost: {host}",
            f"PRI * HTTP/2.0\r\nHost: {host}",
            "PRI * HTTP/2.0",
        ):
            told = await answer(url, f"{head}\r\n\r\n".encode())
            assert told.startswith(b"HTTP/1.1 404 Not Found\r\n"), head
            assert told.endswith(b"\r\nConnection: close\r\n\r\n" + UNKNOWN), head
        long = await answer(url, f"GET / HTTP/1.1\r\nHost: {host}\r\nX: {'x' * 17_000}".encode())
        assert long.startswith(b"HTTP/1.1 431 ")
        broken = await answer(url, f"GET / HTTP/1.1\r\nHost: {host}\r\n: x\r\n\r\n".encode())
        assert broken.startswith(b"HTTP/1.1 400 ")
        for given in (host, host.upper(), name, f"{label}.preview.example.org:80", label):
            assert (await answer(url, asked(f"http://{given}", "/"))).startswith(b"HTTP/1.1 200 ")
        first = f"GET / HTTP/1.0\r\nHost: {host}\r\nX-Odd: 1\r\n\r\n"
        assert (await answer(url, first.encode())).endswith(f"one / ('{host}', None, '1')".encode())


async def test_a_request_for_another_preview_on_the_same_connection_reaches_neither(
    tmp_path: Path,
) -> None:
    async with two_chats(tmp_path) as (a, one, two):
        body = "Content-Length: 2"
        for first, end in (
            (asked(one, "/first"), b"one /first "),
            (asked(one, "/echo", body).replace(b"GET", b"POST") + b"hi", b"\r\n\r\nhi"),
        ):
            async with connected(one) as stream:
                await stream.send(first + asked(two, "/secret") + asked(one, "/later"))
                told = await until_end(stream)
            assert told.count(b"HTTP/1.1 ") == 1
            assert b"connection: close\r\n" in told.lower()
            assert end in told
        assert "secret" not in (log := await a.exec("cat log"))
        assert (log.count("/first"), log.count("/echo"), log.count("/later")) == (1, 1, 0)
        assert "two /next" in await seen(two, "/next")


async def test_what_a_server_sends_beyond_its_answer_goes_nowhere(tmp_path: Path) -> None:
    async with two_chats(tmp_path) as (_, url, _other):
        told = await answer(url, asked(url, "/twice"))
        assert told.startswith(b"HTTP/1.1 200 ")
        assert b"evil" not in told
        assert told.endswith(b"', None, None)")


async def test_bodies_events_and_upgrades_pass(tmp_path: Path) -> None:
    async with two_chats(tmp_path) as (_, url, _other):
        data = bytes(range(256)) * 8192
        head = asked(url, "/", f"Content-Length: {len(data)}").replace(b"GET", b"POST")
        assert (await answer(url, head + data)).endswith(b"\r\n\r\n" + data)
        async with connected(url) as stream:
            more = ("Connection: Upgrade", "Upgrade: shouting")
            await stream.send(asked(url, "/socket", *more))
            told = b""
            while not told.endswith(b"\r\n\r\nhello"):
                told += await stream.receive()
            assert told.startswith(b"HTTP/1.1 101 ")
            for word in (b"hot", b"reload"):
                await stream.send(word)
                assert await stream.receive() == word.upper()
            await stream.send_eof()
            assert await until_end(stream) == b""
        # One that stays with HTTP.
        assert b"'keep-alive, Upgrade'" in await answer(
            url, asked(url, "/", "Connection: keep-alive, Upgrade", "Upgrade: shouting")
        )
        async with connected(url) as stream:
            await stream.send(asked(url, "/events"))
            told = b""
            while b"first\n" not in told:
                told += await stream.receive()
            # Its server learns that the visitor has gone.
            await stream.send_eof()
            assert b"0\r\n\r\n" in await until_end(stream)


@pytest.mark.docker
async def test_a_visitor_resumes_a_paused_chat(tmp_path: Path) -> None:
    where = place(tmp_path, "docker", SHARED)
    async with ending(where), in_chat(where, "a") as client:
        url = await served(client, "one")
        for goes_on in (("ls",), ("resume", "a")):
            assert "is paused" in (await command(where, "pause", "a")).out
            await command(where, *goes_on)
            assert "one / " in await seen(url)
        assert await shown(client, 8000) == url


async def test_a_new_process_of_the_ways_out_knows_the_names(tmp_path: Path) -> None:
    where = place(tmp_path, "bubblewrap", SHARED)
    async with ending(where) as daemon, in_chat(where, "a") as client:
        url = await served(client, "one")
        children = Path(f"/proc/{daemon.process.pid}/task").glob("*/children")
        pids = [each for file in children for each in file.read_text().split()]
        (pid,) = (p for p in pids if b"egress.process" in Path(f"/proc/{p}/cmdline").read_bytes())
        os.kill(int(pid), signal.SIGKILL)
        assert "one / " in await seen(url)


async def test_a_taken_port_is_told_and_tried_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"127.0.0.1:{taken.getsockname()[1]}"
        where = place(tmp_path, "bubblewrap", {LISTEN: at})
        async with ending(where) as daemon, in_chat(where, "a") as client:
            said = f"previews.listen {at}: "
            await daemon.noted(said)
            told = await client.exec("true")
            assert said in told
            assert re.search(r"Address already in use.*: name another", told)
            taken.close()
            url = await served(client, "one")
            assert url.endswith(at.partition(":")[2])
            assert "one / " in await seen(url)


async def test_agents_over_http_and_platforms_are_told_the_address(tmp_path: Path) -> None:
    base = {**SHARED, "MCP_SANDBOX_PREVIEWS__URL": "https://previews.example.org"}
    form = r"https://[0-9a-f]{32}\.previews\.example\.org"
    (tmp_path / "mcp").mkdir()
    where = place(tmp_path / "mcp", more=base)
    async with serving(where) as http, http.client("ada") as client:
        serve = {"command": "python3 -m http.server 8641 >/dev/null 2>&1 &"}
        await client.call_tool("exec", serve)
        told = await client.call_tool("preview", {"port": 8641, "path": "/a"})
        assert re.match(form + "/a\n", told.content[0].text)  # type: ignore[union-attr]
        await command(where, "stop", "--all")
    async with platform(tmp_path, more=base) as here:
        session = (await here.prepare("site"))["id"]
        serve = {"command": "python3 -m http.server 8642 >/dev/null 2>&1 &"}
        await here.ask("POST", f"sandbox/{session}/exec", json=serve)
        url = await here.data("POST", f"sandbox/{session}/preview", json={"port": 8642})
        assert re.fullmatch(form, url["containerUrl"])
        told = await here.data("GET", f"sandbox/{session}/status")
        assert told["containerUrl"] == url["containerUrl"]
        await here.data("POST", f"sandbox/{session}/terminate")


async def test_a_program_beside_a_daemon_takes_none_of_its_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        previews = PreviewsConfig(listen=f"127.0.0.1:{number}")
        config = configured("bubblewrap", tmp_path).model_copy(update={"previews": previews})
        async with open_session(config=config) as session:
            await session.exec("python3 -m http.server 8000 >/dev/null 2>&1 &")
            url = await session.previews.open(8000)
            assert urlsplit(url).port != number
            assert "Directory listing" in await seen(url)
