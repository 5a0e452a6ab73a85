"""No way of asking leads a connection to where no rule lets it go."""

import re
import ssl
import struct

import anyio
import pytest

from tests.e2e.doors import (
    AT_PORT,
    BOUND,
    PLAIN,
    READ,
    TRAPS,
    Served,
    connect,
    in_bubblewrap,
    statuses,
    undisturbed,
)
from tests.world import METADATA, PRIVATE

pytestmark = [pytest.mark.timeout(120), in_bubblewrap]
LATER = "later.example.com"

# Loopback, a private address and the metadata service, as some resolver or parser would have them.
ADDRESSES = (
    *("127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0x7F.0.0.1"),
    *("0177.0.0.1", "017700000001", "0", "0.0.0.0", "127.0.0.1.", "localhost", "LOCALHOST."),
    *("[::1]", "::1", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::7f00:1]", "[::1%lo]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fd00::1]", "[fe80::1%25lo]", "[::ffff:0:7f00:1]"),
    *(PRIVATE, "0x0a010203", "167838211", "10.66051", "012.1.2.3", f"[::ffff:{PRIVATE}]"),
    *(METADATA, "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.254.43518", "::"),
    *(
        "\uff11\uff12\uff17.0.0.1",
        "127。0。0。1",
        "①②⑦.0.0.1",
        "loc\u0430lhost",
        "ⓛocalhost",
        "%6cocalhost",
    ),
)
# A host with a rule, with something beside it.
CONFUSIONS = tuple(
    each.format(PLAIN)
    for each in (
        *("{}\0.evil.example", "{}%00.evil.example", "127.0.0.1\0.{}", "127.0.0.1%00.{}"),
        *("user@{}", "{}@127.0.0.1", "{}:443@127.0.0.1", "127.0.0.1#@{}", "127.0.0.1#{}"),
        *(
            "{}#",
            "{}?x",
            "{}/",
            "{}\\",
            "\\{}",
            " {}",
            "{}\t",
            "{};x",
            "{},127.0.0.1",
            "{}..",
            ".{}",
        ),
        *(
            "[{}]",
            "{}:443:22",
            "{}:0",
            "{}:65536",
            "{}:+443",
            "{}:-1",
            "{}:0x1bb",
            "{}:\uff14\uff14\uff13",
        ),
        *("http://{}", "//{}", "*.{}", "{}\xad", "pl\xe4in.{}"),
        *("a" * 64 + ".{}", "a." * 126 + "{}", "{}.evil.example", "{}.localhost"),
    )
)


async def test_no_spelling_of_a_target_leads_to_a_place_without_a_rule(served: Served) -> None:
    forms = (*ADDRESSES, *CONFUSIONS)
    tunnels = [f"CONNECT {each}:443 HTTP/1.1\r\nHost: x\r\n\r\n" for each in forms]
    plain = [f"GET http://{each}/caught HTTP/1.1\r\nHost: {each}\r\n\r\n" for each in forms]
    # Of a URL, what comes after a `/` or a `?` is no part of the target.
    plain = [each for each in plain if f"http://{PLAIN}/" not in each and "?x" not in each]
    with undisturbed(served.world), served.world.hearing() as heard:
        said = [
            answer
            for heads in (tunnels, plain)
            for answer in await served.chat.knock(*map(str.encode, heads), most=200)
        ]
    passed = [
        (asked, answer[:100])
        for asked, answer, status in zip([*tunnels, *plain], said, statuses(said), strict=True)
        if not 400 <= status < 500
    ]
    assert not passed
    assert not heard


async def test_what_http_has_beside_it_is_refused(served: Served) -> None:
    said = await served.chat.knock(
        *(
            f"{line}\r\nHost: {PLAIN}\r\n\r\n".encode()
            for line in (
                *(f"GET {scheme}://{PLAIN}/ HTTP/1.1" for scheme in ("https", "ftp", "ws", "file")),
                *("GET / HTTP/1.1", "OPTIONS * HTTP/1.1", f"GET http://{PLAIN}/"),
                *(
                    f"CONNECT {PLAIN} HTTP/1.1",
                    "PRI * HTTP/2.0",
                    "\x05\x01\x00",
                    "\x04\x01\x01\xbb",
                ),
            )
        )
    )
    assert not [each for each in statuses(said) if 200 <= each < 400], said


@pytest.mark.parametrize("host", TRAPS)
async def test_a_name_that_leads_inside_is_refused_with_the_reason(
    served: Served, host: str
) -> None:
    with undisturbed(served.world), served.world.hearing("http") as heard:
        said = await served.chat.bash(f"curl -sS https://{host}/; curl -s http://{host}/")
    assert not heard
    assert "403" in said
    assert re.search(rf"refused {host}:443: .*(public|address)", said), said


async def test_a_name_that_leads_elsewhere_at_the_next_look_up_is_refused(served: Served) -> None:
    fetch = "curl -sS -o /dev/null -w '%{http_code}\\n' http://rebind.example.com/"
    with undisturbed(served.world), served.world.hearing("name") as asked:
        said = await served.chat.bash(f"{fetch}; {fetch}")
    assert said.splitlines()[:2] == ["200", "403"]
    # What is judged is what is dialled: a connection asks once.
    assert len(asked) == 2


def hello(name: bytes | None, *, grease: bool = False, padding: int = 0, names: int = 1) -> bytes:
    """A ClientHello, as a client without OpenSSL might write it."""

    def sized(data: bytes, width: int) -> bytes:
        return len(data).to_bytes(width, "big") + data

    def extension(kind: int, data: bytes) -> bytes:
        return struct.pack("!H", kind) + sized(data, 2)

    extensions = extension(0x2A2A, b"") if grease else b""
    if name is not None:
        extensions += extension(0, sized((b"\0" + sized(name, 2)) * names, 2))
    extensions += extension(10, sized(struct.pack("!2H", 0x0017, 0x001D), 2))
    extensions += extension(13, sized(struct.pack("!4H", 0x0403, 0x0804, 0x0401, 0x0805), 2))
    extensions += extension(11, sized(b"\0", 1))
    if padding:
        extensions += extension(21, bytes(padding))
    if grease:
        extensions += extension(0x5A5A, b"\0")
    ciphers = struct.pack("!4H", 0x1A1A if grease else 0xC02F, 0xC02B, 0xC02F, 0xC030)
    body = b"\x03\x03" + bytes(range(32)) + sized(b"", 1) + sized(ciphers, 2) + b"\x01\0"
    message = b"\x01" + sized(body + sized(extensions, 2), 3)
    pieces = [message[at : at + 16_000] for at in range(0, len(message), 16_000)]
    return b"".join(b"\x16\x03\x01" + sized(each, 2) for each in pieces)


def real_hello(name: str) -> bytes:
    """What OpenSSL says first."""
    inside, outside = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(inside, outside, server_hostname=name).do_handshake()
    return outside.read()


_HOST = PLAIN.encode()
RIGHT = {
    "real": [real_hello(PLAIN)],
    "grease": [hello(_HOST, grease=True)],
    "capitals": [hello(_HOST.upper())],
    "bytewise": [bytes([each]) for each in hello(_HOST)],
    "large": [hello(_HOST, padding=15_000)[at : at + 999] for at in range(0, 15_999, 999)],
}
WRONG = {
    "other": hello(LATER.encode()),
    "none": hello(None),
    "twice": hello(_HOST, names=2),
    "empty": hello(b""),
    "longer": hello(_HOST + b".evil.example"),
    "nul": hello(_HOST + b"\0"),
    "not ascii": hello("plain.\xe4xample.com".encode()),
    "address": hello(b"127.0.0.1"),
    "too large": hello(_HOST, padding=17_000),
    "cut": hello(_HOST)[:60] + b"\x16\x03\x01\x00\x01\x00",
    "another record": b"\x17" + hello(_HOST)[1:],
    "endless records": b"\x16\x03\x01\x00\x00" * 4000,
    "http": f"GET / HTTP/1.1\r\nHost: {PLAIN}\r\n\r\n".encode(),
    "noise": bytes(range(255, -1, -1)) * 80,
}


async def test_a_hello_to_the_host_that_was_asked_for_passes_as_it_is(served: Served) -> None:
    heads = [[connect(f"{PLAIN}:443"), *pieces] for pieces in RIGHT.values()]
    with served.world.hearing("hello") as heard:
        said = await served.chat.knock(*heads)
    answers = dict(zip(RIGHT, said, strict=True))
    # A record of the host's own: a ServerHello.
    bad = {name: each for name, each in answers.items() if "\r\n\r\n\x16\x03" not in each}
    assert not bad
    assert len(heard) == len(RIGHT)


@pytest.mark.parametrize("target", [f"{PLAIN}:443", AT_PORT])
async def test_any_other_hello_leaves_nothing(served: Served, target: str) -> None:
    wrong = WRONG if target.endswith(":443") else {"other": WRONG["other"], "none": WRONG["none"]}
    with served.world.hearing("hello") as heard, undisturbed(served.world):
        said = await served.chat.knock(*([connect(target), each] for each in wrong.values()))
    answers = dict(zip(wrong, said, strict=True))
    assert not [name for name, each in answers.items() if "\x16\x03" in each or "\x15\x03" in each]
    assert not heard


def smuggled(head: str, body: str = "") -> bytes:
    return f"{head}\r\n\r\n{body}".replace("\r\n", "\n").replace("\n", "\r\n").encode("latin-1")


def requests(start: str, host: str) -> dict[str, bytes]:
    """Requests that two parsers might read differently; `start` is before the path."""
    first = f"GET {start}/first HTTP/1.1\nHost: {host}"
    second = f"GET {start}/smuggled HTTP/1.1\nHost: {host}\n\n"
    chunked = f"0\n\n{second}"
    post = f"POST {start}/first HTTP/1.1\nHost: {host}"
    found = {
        "both lengths": smuggled(f"{post}\nContent-Length: 5\nTransfer-Encoding: chunked", chunked),
        "two lengths": smuggled(
            f"{post}\nContent-Length: 0\nContent-Length: {len(second)}", second
        ),
        "odd length": smuggled(f"{post}\nContent-Length: +0", second),
        "negative length": smuggled(f"{post}\nContent-Length: -1", second),
        "odd coding": smuggled(f"{post}\nTransfer-Encoding: xchunked", chunked),
        "two codings": smuggled(f"{post}\nTransfer-Encoding: chunked, identity", chunked),
        "space before colon": smuggled(f"{post}\nTransfer-Encoding : chunked", chunked),
        "two hosts": smuggled(f"{first}\nHost: {LATER}"),
        "fold": smuggled(f"{first}\nX-One: a\n b: {LATER}"),
        "nul": smuggled(f"{first}\nX-One: a\0b"),
        "many headers": smuggled(f"{first}\n" + "\n".join(f"X-{n}: y" for n in range(4000))),
        "long header": smuggled(f"{first}\nX-One: {'y' * 40_000}"),
        "upgrade": smuggled(f"{first}\nConnection: Upgrade\nUpgrade: websocket"),
        "in a header": smuggled(f"{first}\nX-One: a\rGET /smuggled HTTP/1.1"),
    }
    other = second.replace(host, LATER)
    return found | {
        "bare LF": f"{first}\n\n".encode(),
        "pipelined": smuggled(first, other),
        "no host": smuggled(f"GET {start}/smuggled HTTP/1.1", ""),
    }


async def assert_clean(served: Served, heads: dict[str, bytes], tls: str = "") -> dict[str, str]:
    """Send them; nothing but what was judged comes to the host that was asked for."""
    with served.world.hearing("http") as heard, undisturbed(served.world):
        said = await served.chat.knock(*heads.values(), tls=tls)
    odd = [
        each
        for each in heard
        if each["path"] != "/first"
        or (each["host"] or "").partition(":")[0] not in (PLAIN, READ, BOUND)
        or len([name for name, _ in each["headers"] if name.lower() == "host"]) != 1
        or {name.lower() for name, _ in each["headers"]} & {"upgrade", "x-0", "proxy-connection"}
    ]
    assert not odd
    return dict(zip(heads, said, strict=True))


async def test_no_request_carries_another_one_out(served: Served) -> None:
    said = await assert_clean(served, requests(f"http://{PLAIN}", PLAIN))
    for name in ("both lengths", "two lengths", "two hosts", "many headers", "odd coding"):
        assert 400 <= statuses([said[name]])[0] < 502, (name, said[name])


@pytest.mark.parametrize("host", [READ, BOUND])
async def test_no_request_inside_opened_tls_carries_another_one_out(
    served: Served, host: str
) -> None:
    said = await assert_clean(served, requests("", host), tls=host)
    for name in ("both lengths", "two lengths", "two hosts", "many headers", "odd coding"):
        assert 400 <= statuses([said[name]])[0] < 502, (name, said[name])
    assert re.findall(r"HTTP/1.1 (\d+)", said["pipelined"])[:2] == ["200", "421"]


async def test_each_request_to_a_host_that_may_be_read_is_judged(served: Served) -> None:
    get = f"GET /first HTTP/1.1\nHost: {READ}"
    writes = {
        f"{method} after GET": smuggled(get, f"{method} /smuggled HTTP/1.1\nHost: {READ}\n\n")
        for method in ("POST", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT")
    }
    push = "GET /demo.git/info/refs?service=git-receive-pack HTTP/1.1"
    writes["push"] = smuggled(f"{push}\nHost: {READ}")
    writes["encoded push"] = smuggled(f"{push.replace('service', '%73ervice')}\nHost: {READ}")
    writes["pack"] = smuggled(f"POST /demo.git/git-receive-pack HTTP/1.1\nHost: {READ}")
    said = await assert_clean(served, writes, tls=READ)
    for name, answer in said.items():
        last = re.findall(r"HTTP/1.1 (\d+)", answer)[-1:]
        assert last, (name, answer)
        assert last[0][0] == "4", (name, answer)


@pytest.mark.parametrize(
    "where", [f"http://{METADATA}/", "http://127.0.0.1/", f"https://{LATER}/", "https://[::1]/"]
)
async def test_a_redirect_is_followed_by_the_client_alone_and_judged_again(
    served: Served, where: str
) -> None:
    with undisturbed(served.world), served.world.hearing("http") as heard:
        said = await served.chat.bash(
            f"for via in {PLAIN} {READ}; do "
            f"curl -gsSL --noproxy '' -w '%{{http_code}} ' https://$via/redirect?{where}; done"
        )
    assert [each["path"].partition("?")[0] for each in heard] == ["/redirect"] * 2
    assert "200" not in said


_CROWD = """
import socket, time
kept = [socket.socket() for _ in range(400)]
for line in kept:
    line.setblocking(False)
    line.connect_ex(("127.0.0.1", 17329))
print("crowded", flush=True)
time.sleep(60)
"""
_GREEDY = """
import socket, sys, time
host = sys.argv[1]
lines = []
for number in range(20):
    line = socket.create_connection(("127.0.0.1", 17329), 10)
    line.sendall(f"GET http://{host}/endless HTTP/1.1\\r\\nHost: {host}\\r\\n\\r\\n".encode())
    lines.append(line)
slow = socket.create_connection(("127.0.0.1", 17329), 10)
print("greedy", flush=True)
try:
    while True:
        slow.send(b"x")
        time.sleep(1)
except OSError:
    pass
time.sleep(30)
"""


async def test_a_crowd_that_says_or_reads_nothing_stops_nobody(served: Served) -> None:
    pid = served.daemon.process.pid
    async with served.other("crowd") as crowd:
        await crowd.call("write_file", path="crowd.py", content=_CROWD)
        await crowd.call("write_file", path="greedy.py", content=_GREEDY)
        before = _resident_mb(pid)
        begun = await crowd.bash(
            f"python3 greedy.py {PLAIN} >greedy 2>&1 & echo $! > pids; "
            "python3 crowd.py >crowd 2>&1 & echo $! >> pids; "
            "until grep -q crowded crowd; do sleep 0.05; done; cat greedy crowd"
        )
        assert "greedy" in begun
        with anyio.fail_after(5):
            assert (await crowd.bash("echo fine")).startswith("fine")
            # Another chat has ways out of its own.
            assert '"path": "/a"' in await served.chat.bash(f"curl -sS https://{PLAIN}/a")
        assert _resident_mb(pid) - before < 64
        with anyio.fail_after(20):
            await crowd.bash("kill $(cat pids)")
            fetch = f"curl -s -m 5 -w '%{{http_code}}' -o /dev/null http://{PLAIN}/a"
            while "200" not in await crowd.bash(f"{fetch}; true"):
                await anyio.sleep(0.1)
            while _connected(served.world.pid):
                await anyio.sleep(0.1)


_SILENT = """
import socket, time
lines = []
for number in range(100):
    line = socket.create_connection(("127.0.0.1", 17329), 10)
    line.sendall(f"CONNECT silent{number}.example.org:8443 HTTP/1.0\\r\\n\\r\\n".encode())
    lines.append(line)
print("asked", flush=True)
time.sleep(20)
"""


async def test_names_whose_servers_are_silent_keep_no_other_chat_waiting(served: Served) -> None:
    async with served.other("patient") as patient:
        await patient.call("write_file", path="silent.py", content=_SILENT)
        with served.world.hearing("name") as asked:
            await patient.bash(
                "python3 silent.py > asked 2>&1 & echo $! > pid; "
                "until [ -s asked ]; do sleep 0.05; done; sleep 1"
            )
            assert '"path": "/a"' in await served.chat.bash(f"curl -sS https://{PLAIN}/a")
        await patient.bash("kill $(cat pid)")
    # A look-up of theirs takes 2 s; there is room for 64 in all.
    assert 8 <= sum(each["name"].startswith("silent") for each in asked) < 48


def _resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS:")) / 1024


def _connected(pid: int) -> int:
    """How many connections are established in the world."""
    with open(f"/proc/{pid}/net/tcp") as file:
        return sum(line.split()[3] == "01" for line in file)


async def test_code_that_kills_and_replaces_harms_itself_alone(served: Served) -> None:
    with undisturbed(served.world):
        said = await served.chat.bash(
            "echo mine > /etc/ssl/certs/ca-certificates.crt; rm -rf /etc/ssl/certs; "
            "mv /etc/ssl/certs /etc/ssl/old; ls /etc/ssl/certs; "
            "python3 -c 'import socket; socket.create_server((\"127.0.0.1\", 17329))'"
        )
        await served.chat.bash("kill -9 -1")
        again = await served.chat.bash(f"curl -sS https://{PLAIN}/a")
    assert "ca-certificates.crt" in said
    assert "in use" in said
    assert '"path": "/a"' in again


async def test_nothing_that_was_thrown_at_it_shows_in_the_log(served: Served) -> None:
    host = "last.example.org"
    await served.chat.bash(f"curl -s https://{host}:8443/caught?caught")
    with anyio.fail_after(10):
        while host not in served.daemon.log:
            await anyio.sleep(0.01)
    for text in ("Traceback", "ERROR", "caught", "/first", "smuggled"):
        assert text not in served.daemon.log, text
