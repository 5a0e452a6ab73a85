"""Requests that are read, of opened TLS and of plain HTTP: real clients, real servers, real TLS."""

import base64
import gzip
import hashlib
import os
import ssl
import subprocess
import threading
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme
from anyio.abc import SocketStream
from anyio.streams.tls import TLSStream

from tests.egress.world import CHAT, HOST, World, a_world, head
from tests.streams import everything

VALUE = "s3cret-value-0123456789"
FETCH = "application/x-git-upload-pack-request"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    async with a_world(tmp_path / "world") as made:
        yield made


class Web:
    """A server that answers each request by `answer` and keeps what it was asked."""

    def __init__(self, answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") -> None:
        self.answer = answer
        self.asked = list[bytes]()

    async def __call__(self, stream: Any) -> None:
        async with stream:
            try:
                await self._answer(stream)
                while b"close" not in self.answer.lower():
                    await self._answer(stream)
                if isinstance(stream, TLSStream):
                    await stream.unwrap()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                pass

    async def _answer(self, stream: Any) -> None:
        said = await head(stream)
        before, _, body = said.partition(b"\r\n\r\n")
        size = 0
        for line in before.lower().splitlines():
            if line.startswith(b"content-length:"):
                size = int(line.partition(b":")[2])
        while len(body) < size:
            body += await stream.receive()
        self.asked.append(before + b"\r\n\r\n" + body)
        await stream.send(self.answer.replace(b"ECHO", before))


async def opened(world: World, web: Any, **rule: Any) -> int:
    """The port of a server with TLS that may only be read."""
    port = await world.listen(web, tls=True)
    await world.allow({"host": HOST, "port": port, "private": True, "read": True, **rule})
    return port


async def inside(world: World, port: int, **context: Any) -> TLSStream:
    """A connection of a program that speaks TLS with the host, as it believes."""
    stream = await world.connect()
    await stream.send(f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
    assert (await head(stream)).startswith(b"HTTP/1.1 200 ")
    bundle = world.authority.bundle / "ca-certificates.crt"
    made = await anyio.to_thread.run_sync(lambda: ssl.create_default_context(cafile=bundle))
    return await TLSStream.wrap(stream, hostname=HOST, ssl_context=made, standard_compatible=False)


async def ask(world: World, port: int, said: bytes) -> bytes:
    """All that comes back for these bytes inside the opened TLS of the host."""
    with anyio.fail_after(10):
        async with await inside(world, port) as tls:
            await tls.send(said.replace(b"HOST", f"{HOST}:{port}".encode()))
            return await everything(tls)


@pytest.mark.parametrize("tls", [True, False])
async def test_only_reading_is_let_through(world: World, tls: bool) -> None:
    web = Web()
    port = await world.listen(web, tls=tls)
    await world.allow({"host": HOST, "port": port, "private": True, "read": True})
    url = f"http{'s' if tls else ''}://{HOST}:{port}/a/b"
    for method in ("GET", "OPTIONS"):
        assert await world.curl("-X", method, url) == "ok200"
    assert (await world.curl("-I", url)).endswith("200")
    for method in ("POST", "PUT", "PATCH", "DELETE", "PROPFIND", "TRACE", "get"):
        said = await world.curl("-X", method, "-d", "x=y", url)
        why = f"only reading is allowed there, not this {method}"
        assert said == f"network: refused {HOST}:{port}: {why}\n403"
    assert [each.split()[0] for each in web.asked] == [b"GET", b"OPTIONS", b"HEAD"]


@pytest.mark.parametrize(
    ("method", "path", "passes"),
    [
        ("POST", "/a/b.git/git-upload-pack", True),
        ("POST", "/~me/a+b@c/git-upload-pack", True),
        ("POST", "/git-upload-pack", True),
        ("POST", "/me/..a/discord.py/git-upload-pack", True),
        ("POST", "/a/upload.php/git-upload-pack", False),
        ("POST", "/a/upload.PHP5/x/git-upload-pack", False),
        ("POST", "/write.cgi/git-upload-pack", False),
        ("POST", "/write.aspx/git-upload-pack", False),
        ("POST", "/x/../git-upload-pack", False),
        ("POST", "/x/./git-upload-pack", False),
        ("POST", "/../git-upload-pack", False),
        ("POST", "//git-upload-pack", False),
        ("POST", "/a//b.git/git-upload-pack", False),
        ("POST", "a/git-upload-pack", False),
        ("POST", "/a/git-upload-pack?x", False),
        ("GET", "/a/b.git/info/refs?service=git-upload-pack", True),
        ("GET", "/a/b.git/info/refs?service=git-receive-pack", False),
        ("GET", "/a/b.git/info/refs?a=b&service=git%2dreceive-pack", False),
        ("POST", "/a/b.git/git-receive-pack", False),
        ("POST", "/a/b.git/git-receive-pack?/git-upload-pack", False),
        ("POST", "/write?/git-upload-pack", False),
        ("POST", "/write%3f/git-upload-pack", False),
        ("POST", "/write%00/git-upload-pack", False),
        ("POST", "/write%23/git-upload-pack", False),
        ("POST", "/write;/git-upload-pack", False),
        ("POST", "/write\\/git-upload-pack", False),
        ("POST", "/git-upload-packs", False),
        ("POST", "/git-upload-pack/", False),
        ("PUT", "/a/b.git/git-upload-pack", False),
    ],
)
async def test_git_may_fetch_and_not_push(
    world: World, method: str, path: str, passes: bool
) -> None:
    web = Web()
    port = await opened(world, web)
    body = "" if method == "GET" else f"Content-Type: {FETCH}\r\nContent-Length: 4\r\n"
    said = f"{method} {path} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n{body}\r\n"
    answer = await ask(world, port, said.encode() + b"0000"[: len(body)])
    status = 403 if path.startswith("/") else 400
    refused = f"HTTP/1.1 {status} network: refused ".encode()
    assert answer.startswith(b"HTTP/1.1 200" if passes else refused)
    assert bool(web.asked) == passes


def posted(*headers: str, body: bytes = b"0032want ") -> bytes:
    lines = ["POST /a.git/git-upload-pack HTTP/1.1", "Host: HOST", "Connection: close", *headers]
    if not any(each.startswith("Transfer") for each in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


TYPE = f"Content-Type: {FETCH}"
ZIP = "Content-Encoding: gzip"


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        (posted(TYPE), True),
        (posted(TYPE, body=b"0014command=ls-refs\n0000"), True),
        (posted(TYPE, ZIP, body=gzip.compress(b"0032want 0")), True),
        (posted(TYPE, "Transfer-Encoding: chunked", body=b"4\r\n0000\r\n0\r\n\r\n"), True),
        (posted(TYPE, "Transfer-Encoding: chunked", body=b"1\r\n0\r\n1\r\n0\r\n0\r\n\r\n"), False),
        (posted(TYPE, "Expect: 100-continue"), True),
        (posted(), False),
        (posted("Content-Type: application/x-www-form-urlencoded", body=b"a=b"), False),
        (posted("Content-Type: multipart/form-data; boundary=x", body=b"--x"), False),
        (posted(TYPE + "; x=y"), False),
        (posted(TYPE, "Content-Type: text/plain"), False),
        (posted("Content-Type: text/plain", TYPE), False),
        (posted(TYPE, body=b"a=b&c=d&e=f&g=h"), False),
        (posted(TYPE, body=b"0000&a=b"), False),
        (posted(TYPE, body=b"00aa=b want x"), False),
        (posted(TYPE, body=b""), False),
        (posted(TYPE, body=gzip.compress(b"0032want ")), False),
        (posted(TYPE, ZIP), False),
        (posted(TYPE, ZIP, body=gzip.compress(b"a=b&c=d&e=f&g=h")), False),
        (posted(TYPE, ZIP, ZIP, body=gzip.compress(b"0032want 0")), False),
        (posted(TYPE, "Content-Encoding: deflate"), False),
    ],
)
async def test_a_body_is_a_fetch_or_does_not_pass(world: World, said: bytes, passes: bool) -> None:
    web = Web()
    port = await opened(world, web)
    answer = await ask(world, port, said)
    if passes:
        assert b"HTTP/1.1 200" in answer
        assert web.asked
    else:
        assert b"HTTP/1.1 403 network: refused host.internal" in answer
        assert b"only reading is allowed there" in answer
        assert not web.asked


class Repositories(BaseHTTPRequestHandler):
    """The real git behind a web server, as hosters have it."""

    protocol_version = "HTTP/1.1"
    root: Path
    asked: list[tuple[str, str, str]]

    def log_message(self, *_: Any) -> None:
        return

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_GET(self) -> None:
        body, (path, _, query) = self._body(), self.path.partition("?")
        coding = self.headers.get("Content-Encoding", "")
        how = self.headers.get("Transfer-Encoding", coding)
        self.asked.append((self.command, path, how))
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", "http-backend"],
            input=body,
            env={
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(self.root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "REQUEST_METHOD": self.command,
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "CONTENT_LENGTH": str(len(body)),
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "HTTP_CONTENT_ENCODING": coding,
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            },
            capture_output=True,
            check=True,
        )
        told, _, answer = done.stdout.partition(b"\r\n\r\n")
        lines = dict(line.split(": ", 1) for line in told.decode().split("\r\n"))
        self.send_response(int(lines.pop("Status", "200")[:3]))
        for name, value in {**lines, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET  # noqa: N815


@pytest.mark.parametrize("version", [0, 2])
async def test_git_itself_clones_and_fetches_and_does_not_push(world: World, version: int) -> None:
    def git(*words: str, given: bytes = b"") -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *who, *words], input=given, check=True, capture_output=True)

    work, bare = str(world.folder / "work"), str(world.folder / "root" / "x.git")
    commits = b"".join(
        b"commit refs/heads/b%d\ncommitter a <a@b.c> %d +0000\ndata 1\nx\n" % (n, n)
        for n in range(1, 400)
    )

    def prepare() -> None:
        git("init", "-q", "--bare", bare)
        git("-C", bare, "fast-import", "--quiet", given=commits)
        git("-C", bare, "symbolic-ref", "HEAD", "refs/heads/b1")
        git("-C", bare, "config", "http.receivepack", "true")

    await anyio.to_thread.run_sync(prepare)
    kind = type("Kind", (Repositories,), {"root": world.folder / "root", "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        await world.allow({"host": HOST, "port": port, "private": True, "read": True})
        url, how = f"http://{HOST}:{port}/x.git", ["-c", f"protocol.version={version}"]
        for words in (
            ["clone", "-q", "--depth", "1", url, work],
            ["-C", work, "fetch", "-q", "origin", "+refs/heads/*:refs/remotes/origin/*"],
            ["-C", work, "fetch", "-q", "--unshallow"],
            ["clone", "-q", "--mirror", url, f"{work}2"],
            ["-c", "http.postBuffer=65536", "clone", "-q", "--mirror", url, f"{work}3"],
        ):
            done = await world.run("git", *how, *words)
            assert done.returncode == 0, done.stderr
        pushed = await world.run("git", *how, "-C", f"{work}2", "push", url, "b1:refs/heads/new")
        assert b"403" in pushed.stderr
        await anyio.to_thread.run_sync(server.shutdown)
    sent = {coding for method, _, coding in kind.asked if method == "POST"}  # type: ignore[attr-defined]
    assert sent == {"", "gzip", "chunked"}


CLEAN = b"GET / HTTP/1.1\r\nHost: HOST\r\n"


@pytest.mark.parametrize(
    ("said", "status", "why"),
    [
        (CLEAN + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, b"both"),
        (CLEAN + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400, b"whole"),
        (CLEAN + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, b"whole"),
        (b"GET / HTTP/1.1\r\nHost: HOST\r\nHost: HOST\r\n\r\n", 400, b"whole"),
        (b"GET / HTTP/1.1\r\nHost: other.example\r\n\r\n", 421, b"another Host"),
        (b"GET / HTTP/1.1\r\nHost: host.internal\r\n\r\n", 421, b"another Host"),
        (b"GET / HTTP/1.1\r\nHost: \xff\r\n\r\n", 400, b""),
        (b"GET / HTTP/1.1\r\n\r\n", 400, b"whole"),
        (b"GET https://HOST/ HTTP/1.1\r\nHost: HOST\r\n\r\n", 400, b"its path"),
        (b"GET http://other.example/ HTTP/1.1\r\nHost: HOST\r\n\r\n", 400, b"its path"),
        (b"GET /a#b HTTP/1.1\r\nHost: HOST\r\n\r\n", 400, b"its path"),
        (b"OPTIONS * HTTP/1.1\r\nHost: HOST\r\n\r\n", 400, b"its path"),
        (CLEAN + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400, b"upgrade"),
        (CLEAN + b"a: bbbbb\r\n" * 4000 + b"\r\n", 400, b""),
        (CLEAN + b"a: " + b"b" * 40_000 + b"\r\n\r\n", 400, b""),
        (CLEAN + b"a b: c\r\n\r\n", 400, b"whole"),
        (CLEAN + b"a: \x00\r\n\r\n", 400, b"whole"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, b""),
        (b"\x00\x01\x02" * 999 + b"\r\n\r\n", 400, b"whole"),
    ],
)  # fmt: skip
async def test_a_request_that_two_could_read_differently_is_refused(
    world: World, said: bytes, status: int, why: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    web = Web()
    answer = await ask(world, await opened(world, web), said)
    assert answer.startswith(b"HTTP/1.1 %d network: refused %s:" % (status, HOST.encode()))
    assert why in answer
    assert not web.asked
    assert not caplog.records


async def test_the_server_sees_one_clean_request(world: World) -> None:
    web = Web()
    port = await opened(world, web)
    untidy = (
        b"GET /a?b HTTP/1.1\nhost:HOST\nX-Folded: a\r\n  b\r\nProxy-Authorization: Basic eHg=\r\n"
        b"Connection: close, X-Folded\r\nX-HTTP-Method-Override: DELETE\r\nKeep-Alive: 5\r\n"
        b"X_Http_Method_Override: DELETE\r\n\r\n"
    )
    assert (await ask(world, port, untidy)).endswith(b"\r\n\r\nok")
    host = f"{HOST}:{port}".encode()
    assert web.asked == [b"GET /a?b HTTP/1.1\r\nHost: %s\r\nX-Folded: a b\r\n\r\n" % host]


async def test_each_request_of_a_connection_is_judged_by_itself(world: World) -> None:
    web = Web()
    port = await opened(world, web)
    second = b"POST /2 HTTP/1.1\r\nHost: HOST\r\nContent-Length: 0\r\n\r\n"
    said = await ask(world, port, CLEAN + b"\r\n" + second + CLEAN + b"\r\n")
    assert said.startswith(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 403 network: ")
    assert len(web.asked) == 1
    assert [each[1].partition(":")[0] for each in world.noted] == ["allowed", "rule"]


@pytest.mark.parametrize("method", [b"CONNECT", b"connect"])
async def test_no_tunnel_begins_where_a_request_went_before(world: World, method: bytes) -> None:
    web = Web()
    port = await world.listen(web)
    await world.allow(port)
    line = b" http://HOST/ HTTP/1.1\r\nHost: HOST\r\n\r\n"
    both = (b"GET" + line + method + line).replace(b"HOST", f"{HOST}:{port}".encode())
    with anyio.fail_after(10):
        said = await world.say(both)
    assert b"okHTTP/1.1 400 network: refused " in said
    assert len(web.asked) == 1


async def test_a_client_may_ask_again_by_the_same_connection(world: World) -> None:
    web = Web()
    port = await opened(world, web)
    url = f"https://{HOST}:{port}/"
    connects = "%{http_code} %{num_connects} "
    assert await world.curl("-w", connects, url, url, url) == "ok200 1 ok200 0 ok200 0 "
    web.answer = web.answer.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
    assert await world.curl(url, url, url) == "ok200" * 3


ANSWERS = {
    "chunked": (b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n1\r\n!\r\n0\r\nA: b\r\n\r\n", "ok!"),
    "until its end": (b"Connection: close\r\n\r\nok!", "ok!"),
    "nothing": (b"Content-Length: 0\r\n\r\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
@pytest.mark.parametrize("form", ANSWERS)
async def test_answers_of_every_form_arrive_whole(world: World, form: str, version: str) -> None:
    answer, shown = ANSWERS[form]
    port = await opened(world, Web(b"HTTP/1.1 200 OK\r\n" + answer))
    assert await world.curl(version, f"https://{HOST}:{port}/") == f"{shown}200"


async def test_what_no_program_inside_shall_act_on_is_left_out(world: World) -> None:
    hints = b"Alt-Svc: h3\r\nProxy-Authenticate: Basic\r\nUpgrade: h2\r\nX-Kept: yes\r\n"
    web = Web(b"HTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\nHTTP/1.1 200 OK\r\n" + hints)
    web.answer += b"Content-Length: 2\r\n\r\nok"
    said = await ask(world, await opened(world, web), CLEAN + b"Connection: close\r\n\r\n")
    assert said.splitlines()[:2] == [b"HTTP/1.1 200 OK", b"X-Kept: yes"]
    assert b"Alt-Svc" not in said
    assert b"Proxy-" not in said
    assert b"Upgrade" not in said


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "its answer is not whole"),
        (b"SSH-2.0-x\r\n\r\n", "its answer is not whole HTTP/1.1"),
        (b"close", "its answer is not whole"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "its answer is not whole"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000 + b"\r\n", "its answer is not whole"),
    ],
)
async def test_an_answer_that_is_none_is_told(world: World, answer: bytes, why: str) -> None:
    port = await opened(world, Web(answer))
    said = await world.curl(f"https://{HOST}:{port}/")
    assert said.startswith(f"network: refused {HOST}:{port}: ")
    assert why in said
    assert said.endswith("502")


async def test_an_answer_that_breaks_off_is_not_whole_for_the_client_either(world: World) -> None:
    cut = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 9\r\n\r\nok"
    port = await opened(world, Web(cut))
    done = await world.run("curl", "-sS", f"https://{HOST}:{port}/")
    assert done.returncode == 18


async def test_a_large_body_passes_both_ways(world: World) -> None:
    size = 20_000_000
    digest = hashlib.sha256()

    async def serve(stream: Any) -> None:
        async with stream:
            said = await head(stream)
            assert b"Expect: 100-continue" in said
            await stream.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = said.partition(b"\r\n\r\n")[2]
            came = len(body)
            digest.update(body)
            while came < size:
                data = await stream.receive()
                came += len(data)
                digest.update(data)
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(size // 100_000):
                await stream.send(bytes(100_000))

    port = await world.listen(serve, tls=True)
    # It is opened for its fetch alone.
    await world.allow({"host": HOST, "port": port, "private": True, "read": True})
    body = anyio.Path(world.folder / "body")
    beginning = b"0032want "
    await body.write_bytes((beginning + bytes(range(250)) * (size // 250))[:size])
    url, kind = f"https://{HOST}:{port}/git-upload-pack", f"Content-Type: {FETCH}"
    said = await world.curl(
        "--data-binary", f"@{body}", "-H", "Expect: 100-continue", "-H", kind, "-o", "/dev/null",
        "-w", "%{size_download} %{http_code}\n", url,
    )  # fmt: skip
    assert said.startswith(f"{size} 200\n")
    assert digest.digest() == hashlib.sha256(await body.read_bytes()).digest()


async def test_an_early_answer_ends_an_upload(world: World) -> None:
    async def serve(stream: Any) -> None:
        async with stream:
            await head(stream)
            answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbig!"
            await stream.send(answer)
            await everything(stream)

    port = await opened(world, serve)
    async with await inside(world, port) as tls:
        said = (
            f"POST /git-upload-pack HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Length: 9999\r\n"
            f"Content-Type: {FETCH}\r\n\r\n0032want "
        )
        await tls.send(said.encode() + bytes(5000))
        assert (await everything(tls)).endswith(b"big!")


async def test_a_certificate_that_this_machine_does_not_trust_is_told(world: World) -> None:
    async def serve(stream: SocketStream) -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        trustme.CA().issue_cert(HOST).configure_cert(context)
        async with stream:
            with pytest.raises((ssl.SSLError, anyio.BrokenResourceError)):
                await TLSStream.wrap(stream, server_side=True, ssl_context=context)

    port = await world.listen(serve)
    await world.allow({"host": HOST, "port": port, "private": True, "read": True})
    said = await world.curl(f"https://{HOST}:{port}/")
    assert "its TLS cannot be trusted: unable to get local issuer certificate" in said
    assert said.endswith("502")


async def test_a_program_that_does_not_trust_us_is_noted(world: World) -> None:
    port = await opened(world, Web())
    said = await world.curl("--cacert", f"{world.folder}/company.pem", f"https://{HOST}:{port}/")
    assert "unable to get local issuer certificate" in said
    [(_, why, *_)] = await world.until_noted()
    assert why.startswith("failed: its TLS is read by the proxy, and the program does not trust")


async def test_another_name_in_the_hello_is_refused(world: World) -> None:
    port = await opened(world, Web())
    done = await world.run(
        "openssl", "s_client", "-proxy", f"127.0.0.1:{world.port}", "-servername", "other.example",
        "-connect", f"{HOST}:{port}",
    )  # fmt: skip
    assert done.returncode != 0
    [(_, why, *_)] = await world.until_noted()
    assert why == "name: its TLS hello names another host"


def secret(hosts: str, command: str = f"echo {VALUE}") -> dict[str, Any]:
    return {"API_TOKEN": {"from": f"command: {command}", "hosts": [hosts]}}


FORMS = {
    "plain": VALUE.encode(),
    "Basic": base64.b64encode(f"me:{VALUE}".encode()),
}


@pytest.mark.parametrize("form", ["Bearer", "Basic", "X-Other", "path", "body"])
async def test_a_secret_goes_out_in_its_header_alone(tmp_path: Path, form: str) -> None:
    web, free = Web(), "*.example.com"
    async with a_world(tmp_path / "first", secrets=secret(free)) as unused:
        port = await unused.listen(web, tls=True)
        async with a_world(tmp_path / "world", secrets=secret(f"{HOST}:{port}")) as world:
            await world.allow(port)
            token = world.secrets.placeholders(CHAT)["API_TOKEN"]
            url, args = f"https://{HOST}:{port}/", ["-H", f"Authorization: Bearer {token}"]
            if form != "Bearer":
                args = ["-u", f"me:{token}"] if form == "Basic" else ["-H", f"X-Other: {token}"]
            if form == "path":
                args = [f"{url}?{token}"]
            if form == "body":
                args = ["-d", token]
            await world.curl(*args, *([] if form == "path" else [url]))
    [said] = web.asked
    shown = {"Bearer": f"Bearer {VALUE}".encode(), "Basic": FORMS["Basic"]}.get(
        form, token.encode()
    )
    assert shown in said
    assert (VALUE.encode() in said) == (form == "Bearer")


@pytest.fixture
async def bound(tmp_path: Path) -> AsyncGenerator[tuple[World, Web, str]]:
    """A host that gets a secret, what it answers, and the header with its placeholder."""
    web = Web(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    async with a_world(tmp_path / "servers") as servers:
        port = await servers.listen(web, tls=True)
        async with a_world(tmp_path / "world", secrets=secret(f"{HOST}:{port}")) as world:
            await world.allow(port)
            token = world.secrets.placeholders(CHAT)["API_TOKEN"]
            world.url = f"https://{HOST}:{port}/"
            yield world, web, f"Authorization: Bearer {token}"


async def test_what_a_bound_host_gives_back_is_masked(bound: tuple[World, Web, str]) -> None:
    world, web, header = bound
    body = VALUE.encode() + b"." + base64.b64encode(b"a" + VALUE.encode())
    head = b"HTTP/1.1 200 %s\r\nX-Echo: %s\r\nContent-Length: " % ((VALUE.encode(),) * 2)
    for answer in (
        head + b"%d\r\n\r\n" % len(body) + body,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"1\r\n%c\r\n" % each for each in body)
        + b"0\r\n\r\n",
    ):
        web.answer = answer
        said = await world.curl("-i", "--suppress-connect-headers", "-H", header, world.url)
        assert said.endswith("200")
        assert len(said.partition("\r\n\r\n")[2]) == len(body) + 3
        assert VALUE not in said
        assert base64.b64encode(b"a" + VALUE.encode()).decode() not in said
    assert VALUE.encode() in web.asked[0]


async def test_a_bound_host_is_asked_for_whole_answers_that_can_be_read(
    bound: tuple[World, Web, str],
) -> None:
    world, web, header = bound
    await world.curl("--compressed", "-r", "0-9", "-H", header, world.url)
    assert b"Accept-Encoding: identity\r\n" in web.asked[0]
    assert b"gzip" not in web.asked[0]
    assert b"range" not in web.asked[0].lower()
    web.answer = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx"
    said = await world.curl("-H", header, world.url)
    assert "its answer is compressed" in said
    assert said.endswith("502")


@pytest.mark.parametrize("command", ["false", "echo short"])
async def test_a_secret_that_cannot_be_had_is_told(tmp_path: Path, command: str) -> None:
    web = Web()
    async with a_world(tmp_path / "servers") as servers:
        port = await servers.listen(web, tls=True)
        given = secret(f"{HOST}:{port}", command)
        async with a_world(tmp_path / "world", secrets=given) as world:
            await world.allow(port)
            token = world.secrets.placeholders(CHAT)["API_TOKEN"]
            url = f"https://{HOST}:{port}/"
            said = await world.curl("-H", f"Authorization: Bearer {token}", url)
    assert "the secret API_TOKEN cannot be read" in said
    assert said.endswith("502")
    assert not web.asked


async def test_plain_http_inside_a_tunnel_is_read_likewise(world: World) -> None:
    port = await world.listen(Web())
    await world.allow({"host": HOST, "port": port, "private": True, "read": True})
    assert await world.curl("-p", f"http://{HOST}:{port}/") == "ok200"
    said = await world.curl("-p", "-d", "x", f"http://{HOST}:{port}/")
    assert said.endswith("only reading is allowed there, not this POST\n403")
