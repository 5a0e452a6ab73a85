"""The servers of a world: an echo, what is in stock, repositories; a database; canaries."""

import base64
import gzip
import json
import os
import select
import socket
import socketserver
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.world import GITS, SHOPS
from tests.world.heard import Heard
from tests.world.stock import Shelves

_PIECE = b"x" * 262_144


def serving(server: socketserver.BaseServer) -> None:
    """Serve in a thread that ends with the process."""
    threading.Thread(target=server.serve_forever, daemon=True).start()


class Site(ThreadingHTTPServer):
    """All web sites of the world on one address and port, told apart by Host."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], heard: Heard, shelves: Shelves) -> None:
        self.address_family = _family(address)
        super().__init__(address, _Request)
        self.heard, self.shelves = heard, shelves

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no event."""


class TlsSite(Site):
    """The same over TLS; the handshake is part of the connection's own thread."""

    def __init__(
        self, address: tuple[str, int], heard: Heard, shelves: Shelves, leaf: Path
    ) -> None:
        super().__init__(address, heard, shelves)
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._tls.load_cert_chain(leaf)
        self._tls.set_alpn_protocols(["http/1.1"])
        self._tls.sni_callback = self._greeted

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, peer = super().get_request()
        wrapped = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return wrapped, peer

    def _greeted(self, connection: Any, name: str | None, _: ssl.SSLContext) -> None:
        self.heard.note("hello", name=name)
        connection.asked_for = name


class _Request(BaseHTTPRequestHandler):
    server: Site
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: Any) -> None:
        return

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        body = self._body()
        self.host = (self.headers["Host"] or "").rpartition(":")[0] or self.headers["Host"] or ""
        self.server.heard.note(
            "http",
            host=self.headers["Host"],
            name=getattr(self.connection, "asked_for", None),
            port=self.server.server_address[1],
            method=self.command,
            path=self.path,
            headers=self.headers.items(),
            body=body[:4096].decode("latin-1"),
        )
        path, _, query = self.path.partition("?")
        page = self.server.shelves.pages.get((self.host, path))
        reads = self.command in ("GET", "HEAD")
        if page is not None and reads:
            self._say(page[1], ("Content-Type", page[0]))
        elif self.host in SHOPS and reads:
            self._say(b"not here\n", status=404)
        elif self.host in GITS and path.startswith("/demo.git/"):
            self._git(path, query, body)
        else:
            self._play(path, query, body)

    def _play(self, path: str, query: str, body: bytes) -> None:
        kind, _, rest = path[1:].partition("/")
        if kind == "said":
            self._said(rest)
        elif kind == "redirect":
            self._say(b"", ("Location", urllib.parse.unquote(query)), status=302)
        elif kind == "bytes":
            self._bytes(int(rest))
        elif kind == "endless":
            self._bytes(1 << 50)
        else:
            self._echo(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _say(self, body: bytes, *headers: tuple[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _echo(self, body: bytes) -> None:
        said = {
            "method": self.command,
            "host": self.headers["Host"],
            "path": self.path,
            "headers": self.headers.items(),
            "body": body[:4096].decode("latin-1"),
        }
        self._say(json.dumps(said).encode() + b"\n", ("Content-Type", "application/json"))

    def _bytes(self, count: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(count))
        self.end_headers()
        for start in range(0, count, len(_PIECE)):
            self.wfile.write(_PIECE[: count - start])

    def _said(self, form: str) -> None:
        """Give the Authorization header back, in one of the forms that a host might find."""
        value = self.headers.get("Authorization", "").encode()
        if form == "header":
            self._say(b"", ("X-Said", value.decode()))
        elif form == "location":
            where = f"https://{self.host}/?token={urllib.parse.quote(value)}"
            self._say(b"", ("Location", where), status=302)
        elif form == "gzip":
            self._say(gzip.compress(value), ("Content-Encoding", "gzip"))
        elif form == "bytewise":
            self._bytewise(value)
        else:
            self._say(dict(_forms(value))[form])

    def _bytewise(self, value: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for each in value:
            self.wfile.write(b"1\r\n%c\r\n" % each)
            self.wfile.flush()
            time.sleep(0.001)
        self.wfile.write(b"0\r\n\r\n")

    def _git(self, path: str, query: str, body: bytes) -> None:
        if "git-receive-pack" in self.path and "Authorization" not in self.headers:
            self._say(b"", ("WWW-Authenticate", "Basic realm=git"), status=401)
            return
        variables = {
            "PATH": os.environ["PATH"],
            "GIT_PROJECT_ROOT": str(self.server.shelves.repositories),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "REMOTE_USER": "tester" if "Authorization" in self.headers else "",
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
        }
        done = subprocess.run(
            ["git", "http-backend"], input=body, env=variables, capture_output=True, check=True
        )
        head, _, answer = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        status = int(headers.pop("Status", "200")[:3])
        self._say(answer, *headers.items(), status=status)


def _forms(value: bytes) -> Iterator[tuple[str, bytes]]:
    yield "plain", value
    yield "json", json.dumps(value.decode()).encode()
    yield "percent", "".join(f"%{each:02X}" for each in value).encode()
    for offset in range(3):
        yield f"base64-{offset}", base64.b64encode(b"-" * offset + value)
        yield f"urlsafe-{offset}", base64.urlsafe_b64encode(b"-" * offset + value)


class _Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self.address_family = _family(address)
        super().__init__(address, handler)


def database(address: tuple[str, int], heard: Heard) -> _Tcp:
    """Something that is no web site: gives back each line in capitals."""

    class Lines(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            heard.note("database")
            for line in self.rfile:
                self.wfile.write(line.upper())

    return _Tcp(address, Lines)


def canary(address: tuple[str, int], heard: Heard) -> _Tcp:
    """Writes down who comes, with the first bytes if there are any at once."""

    class Alarm(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            heard.note("canary", at=f"{address[0]}:{address[1]}")
            select.select([self.request], [], [], 0.2)

    return _Tcp(address, Alarm)


def _family(address: tuple[str, int]) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
