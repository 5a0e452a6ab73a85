"""Which host a TLS client asks for, of real clients and of hostile bytes."""

import shutil
import socket
import ssl
import subprocess
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.egress.process.proxy import LARGEST, read_server_name
from mcp_sandbox.egress.targets import RefusedError
from tests.egress.examples import some_or


def vector(data: bytes, size: int) -> bytes:
    return len(data).to_bytes(size) + data


def sni(*names: bytes, kind: int = 0) -> bytes:
    return b"\0\0" + vector(vector(b"".join(bytes([kind]) + vector(n, 2) for n in names), 2), 2)


def message(*extensions: bytes, ciphers: bytes = b"\x13\x01") -> bytes:
    """A ClientHello without its record."""
    body = b"\x03\x03" + bytes(32) + vector(bytes(32), 1) + vector(ciphers, 2) + vector(b"\0", 1)
    return b"\x01" + vector(body + (vector(b"".join(extensions), 2) if extensions else b""), 3)


def records(whole: bytes, size: int = LARGEST) -> bytes:
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    return b"".join(b"\x16\x03\x01" + vector(piece, 2) for piece in pieces)


def of_python(host: str | None, *, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = context.maximum_version = oldest
    context.set_alpn_protocols(["h2", "http/1.1"])
    out = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=host).do_handshake()
    return out.read()


GREASE = b"\x0a\x0a\0\0"
PADDING = b"\0\x15" + vector(bytes(9000), 2)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_host_of_pythons_client_is_read(version: ssl.TLSVersion) -> None:
    assert read_server_name(of_python("API.example.com", oldest=version)) == "api.example.com"


@pytest.mark.parametrize(
    "command",
    [
        ["openssl", "s_client", "-connect", "{}", "-servername", "api.example.com"],
        ["curl", "-sk", "--max-time", "5", "--connect-to", "::{}", "https://api.example.com/"],
    ],
    ids=["openssl", "curl"],
)
def test_the_host_of_other_clients_is_read(command: list[str]) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"no {command[0]} here")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        client = [word.replace("{}", place) for word in command]
        nothing = subprocess.DEVNULL
        with subprocess.Popen(client, stdin=nothing, stdout=nothing, stderr=nothing) as running:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                data = b""
                while (host := read_server_name(data)) is None:
                    piece = connection.recv(1)
                    assert piece, data
                    data += piece
            running.wait(10)
    assert host == "api.example.com"


@pytest.mark.parametrize("size", [2, 3, 5, 100])
def test_a_hello_in_several_records_and_pieces_is_read_once_it_is_whole(size: int) -> None:
    data = records(message(GREASE, sni(b"a.example"), GREASE), size)
    for end in range(len(data)):
        assert read_server_name(data[:end]) is None
    assert read_server_name(data) == "a.example"
    assert read_server_name(data + b"\x17\x03\x03 what follows") == "a.example"


@pytest.mark.parametrize(
    "hello",
    [
        message(
            GREASE, sni(b"a.example"), b"\x1a\x1a" + vector(b"\0", 2), ciphers=b"\x2a\x2a\x13\x01"
        ),
        message(PADDING, sni(b"A.Example.")),
        message(sni(b"a.example"), PADDING),
    ],
    ids=["grease", "after padding", "before padding"],
)
def test_what_a_parser_does_not_know_is_passed_over(hello: bytes) -> None:
    assert read_server_name(records(hello)) == "a.example"
    assert read_server_name(records(hello, 512)) == "a.example"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (records(message()), "names no host"),
        (records(message(GREASE)), "names no host"),
        (of_python(None), "names no host"),
        (records(message(sni(b"a.example", b"b.example"))), "several"),
        (records(message(sni(b"a.example"), sni(b"a.example"))), "several"),
        (records(message(sni(b"a.example", kind=1))), "several"),
        (records(message(sni())), "malformed"),
        (records(message(sni(b""))), "cannot be one"),
        (records(message(sni(b"127.0.0.1"))), "cannot be one"),
        (records(message(sni("ä.example".encode()))), "cannot be one"),
        (records(message(sni(b"a.example\0.b.example"))), "cannot be one"),
        (records(message(sni(b"a" * 300))), "cannot be one"),
        (records(message(b"\0\0" + vector(b"", 2))), "malformed"),
        (records(message(b"\0\0\0")), "malformed"),
        (records(b"\x01" + vector(message(sni(b"a.example"))[4:] + b"x", 3)), "malformed"),
        (records(b"\x01" + vector(b"\x03\x03", 3)), "malformed"),
        (records(b"\x02" + vector(bytes(40), 3)), "is none"),
        (records(b"\x01\0\x40\0"), "larger than 16 KiB"),
        (records(b"\x01\xff\xff\xff"), "larger than 16 KiB"),
        (b"\x16\x03\x01\0\0", "malformed"),
        (b"\x16\x03\x01\x40\x01", "malformed"),
        (records(message(sni(b"a.example")), 1), "too many records"),
        (b"\x16\x02", "is none"),
        (b"\x80\x2e\x01\x03\x01", "is none"),
        (b"\x15\x03\x01\0\x02\x02\x28", "is none"),
        (b"GET / HTTP/1.1\r\n", "is none"),
        (b"SSH-2.0-OpenSSH", "is none"),
        (b"\0", "is none"),
    ],
)
def test_other_beginnings_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(RefusedError, match=words) as caught:
        read_server_name(data)
    assert caught.value.verdict == "name"
    # And not before it is sure: no shorter part of it is taken for a host.
    for end in range(min(len(data), 200)):
        try:
            assert read_server_name(data[:end]) is None
        except RefusedError:
            break


def test_the_largest_hello_is_read_and_none_that_is_larger() -> None:
    fixed = len(message(sni(b"a.example"), b"\0\x15" + vector(b"", 2)))
    fitting = message(sni(b"a.example"), b"\0\x15" + vector(bytes(LARGEST - fixed), 2))
    assert len(fitting) == LARGEST
    assert read_server_name(records(fitting, 1 << 10)) == "a.example"
    larger = message(sni(b"a.example"), b"\0\x15" + vector(bytes(LARGEST - fixed + 1), 2))
    with pytest.raises(RefusedError, match="larger than 16 KiB"):
        read_server_name(records(larger, 1 << 10)[:50])


PIECES = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=300).map(lambda body: records(b"\x01" + vector(body, 3), 100)),
    st.lists(st.binary(max_size=40), max_size=6).map(lambda found: records(message(*found), 90)),
    st.tuples(st.integers(0, 120), st.binary(max_size=4)).map(
        lambda change: (
            (whole := records(message(GREASE, sni(b"a.example"), GREASE)))[: change[0]]
            + change[1]
            + whole[change[0] + len(change[1]) :]
        )
    ),
)


@some_or(10_000)
def test_random_hellos_name_targets_or_are_refused_in_bounded_memory(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(PIECES)
    def holds(data: bytes) -> None:
        try:
            host = read_server_name(data)
        except RefusedError:
            return
        assert host is None or host.encode() in data.lower()

    holds()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for hello in (
            records(message(PADDING, sni(b"a.example")), 300),
            b"\x16\x03\x01\x40\0\x01\0\x3f\xf0",
        ):
            for end in range(0, len(hello), 50):
                read_server_name(hello[:end])
        assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()
