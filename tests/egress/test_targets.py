"""What is a target, and what is none: every spelling that leads elsewhere is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_sandbox.egress.targets import RefusedError, Target, normalize_host, parse_target, split_url
from tests.egress.examples import some_or

ACCEPTED = [
    (b"api.example.com", "api.example.com"),
    (b"API.Example.COM", "api.example.com"),
    (b"api.example.com.", "api.example.com"),
    (b"_srv._tcp.example.com", "_srv._tcp.example.com"),
    (b"a-b.c--d.example", "a-b.c--d.example"),
    (b"-a.example", "-a.example"),
    (b"xn--bcher-kva.example", "xn--bcher-kva.example"),
    (b"1.2.3.4.example", "1.2.3.4.example"),
    (b"127.0.0.1.nip.example", "127.0.0.1.nip.example"),
    (b"0x7f.1.example", "0x7f.1.example"),
    (b"localhost", "localhost"),
    (b"localhost.", "localhost"),
    (b"host.internal", "host.internal"),
    (b"a.1e3", "a.1e3"),
    (b"a." + b"b" * 63, "a." + "b" * 63),
    (b".".join([b"a" * 49] * 5) + b".com", ".".join(["a" * 49] * 5) + ".com"),
]
REFUSED_HOSTS = [
    # Addresses, in every form that the C library or a browser takes.
    *(b"127.0.0.1", b"127.0.0.1.", b"127.1", b"127.0.1", b"2130706433", b"0177.0.0.1", b"0177.1"),
    *(b"017700000001", b"0x7f.1", b"0x7f000001", b"0X7F000001", b"0x7f.0x0.0x0.0x1", b"127.0x1"),
    *(b"0.0.0.0", b"0", b"00000000", b"0x", b"0x0", b"10.0.0.1", b"192.168.1.1", b"172.16.0.1"),
    *(b"169.254.169.254", b"169.254.43518", b"2852039166", b"0xa9fea9fe", b"025177524776"),
    *(b"100.100.100.200", b"168.63.129.16", b"255.255.255.255", b"1.2.3.4.5", b"999.999.999.999"),
    *(b"[::1]", b"[::]", b"[::ffff:127.0.0.1]", b"[::ffff:7f00:1]", b"[::ffff:0:7f00:1]"),
    *(
        b"[::7f00:1]",
        b"[64:ff9b::7f00:1]",
        b"[2002:7f00:1::]",
        b"[fe80::1%25eth0]",
        b"[fe80::1%lo]",
    ),
    *(b"[fd00:ec2::254]", b"[127.0.0.1]", b"[v1.x]", b"[::1", b"::1]", b"[]", b"[localhost]"),
    *(b"example.com.127", b"example.0x7f", b"a.0x7f000001."),
    # Names that another parser reads otherwise.
    *(b"", b".", b"..", b".example.com", b"example..com", b"example.com..", b"a.example.com\x00"),
    *(b"a.example.com\x00.evil.example", b"a.example.com%00", b"%6c%6f%63%61%6c", b"a%2eexample"),
    *(b"user@example.com", b"user:pw@example.com", b"allowed.example@127.0.0.1"),
    *(b"example.com\\", b"a\\@b.example", b"example.com#"),
    *(b"example.com ", b" example.com", b"exam ple.com", b"example.com\t", b"example.com\r"),
    *(b"example.com\n", b"example.com\r\nHost: b", b"example.com\x0b", b"example.com\x7f"),
    *("exämple.com".encode(), "exämple.com".encode("latin-1"), "\uff11\uff12\uff17.0.0.1".encode()),
    *("example。com".encode(), "ⓔxample.com".encode(), "exam\u00adple.com".encode(), b"\xff.com"),
    *("\u212a.example".encode(), "\u017f.example".encode(), "localhos\u200bt".encode()),
    *(b"*", b"*.example.com", b"a,b.example", b"a;b.example", b"a'b.example", b'"a.example"'),
    *(b"a!.example", b"$a.example", b"a=b.example", b"a+b.example", b"~a.example", b"(a).example"),
    *(b"a" * 64 + b".example", b"example." + b"a" * 64, b".".join([b"a" * 50] * 5)),
    *(b"http://example.com", b"file:", b":", b"a:b", b"::1", b"fe80::1"),
]
REFUSED_PORTS = [
    *(
        b"",
        b"0",
        b"00000",
        b"65536",
        b"99999",
        b"100000",
        b"000080",
        b"-1",
        b"+80",
        b"8_0",
        b"0x50",
    ),
    *(
        b"80 ",
        b" 80",
        b"80\n",
        b"8 0",
        b"80.0",
        b"1e3",
        b"http",
        "\uff18\uff10".encode(),
        "\u0668\u0660".encode(),
    ),
    *(b"80:80", b"80@b", b"80/", b"80#", b"80\x00", b"9" * 5000),
]


def test_the_tables_are_long_enough() -> None:
    assert len(set(REFUSED_HOSTS)) + len(set(REFUSED_PORTS)) >= 80


@pytest.mark.parametrize(("given_", "host"), ACCEPTED)
def test_a_name_has_one_spelling(given_: bytes, host: str) -> None:
    assert normalize_host(given_) == host
    assert parse_target(given_ + b":443") == Target(host, 443)
    assert parse_target(given_, 443) == Target(host, 443)
    assert split_url(b"http://" + given_ + b"/a?b") == (Target(host, 80), b"/a?b")


@pytest.mark.parametrize("host", REFUSED_HOSTS)
def test_what_is_no_name_is_no_target_of_connect(host: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_target(host + b":443")
    assert caught.value.verdict == "target"


@pytest.mark.parametrize("end", [b"/", b":80/", b"", b"?"])
@pytest.mark.parametrize("host", REFUSED_HOSTS)
def test_what_is_no_name_is_no_target_of_a_url(host: bytes, end: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        split_url(b"http://" + host + end)
    assert caught.value.verdict == "target"


@pytest.mark.parametrize("end", [b"/", b"?", b":80", b"/:443", b"?x@b.example"])
def test_what_only_a_url_may_hold_is_no_target_of_connect(end: bytes) -> None:
    assert split_url(b"http://a.example" + end)[0] == Target("a.example", 80)
    with pytest.raises(RefusedError):
        parse_target(b"a.example" + end + b":443")


@pytest.mark.parametrize("port", REFUSED_PORTS)
def test_what_is_no_port_is_refused(port: bytes) -> None:
    for default_port in (None, 80):
        with pytest.raises(RefusedError):
            parse_target(b"a.example:" + port, default_port)


@pytest.mark.parametrize("port", REFUSED_PORTS)
def test_what_is_no_port_is_refused_in_a_url(port: bytes) -> None:
    with pytest.raises(RefusedError):
        split_url(b"http://a.example:" + port.rstrip(b"/") + b"x/")


def test_connect_needs_a_port() -> None:
    with pytest.raises(RefusedError, match="port of 1 to 65535"):
        parse_target(b"a.example")


@pytest.mark.parametrize(
    ("url", "target", "path"),
    [
        (b"http://a.example", "a.example:80", b"/"),
        (b"HTTP://a.example/", "a.example:80", b"/"),
        (b"http://a.example?x=1", "a.example:80", b"/?x=1"),
        (b"http://a.example:8080/x//y?z@b:c/[", "a.example:8080", b"/x//y?z@b:c/["),
        (b"http://a.example//b.example/", "a.example:80", b"//b.example/"),
        (b"http://a.example./%00%0d%0a", "a.example:80", b"/%00%0d%0a"),
    ],
)
def test_a_url_is_a_target_and_what_to_ask_there(url: bytes, target: str, path: bytes) -> None:
    found, asked = split_url(url)
    assert (str(found), asked) == (target, path)


@pytest.mark.parametrize(
    "url",
    [
        *(b"", b"/", b"*", b"a.example:80", b"//a.example/", b"http:", b"http:/a.example/"),
        *(b"http:///a.example/", b"https://a.example/", b"ftp://a.example/", b"file:///etc/passwd"),
        *(b"http://a.example/#b", b"http://a.example/ b", b"http://a.example/\r\nHost: b"),
        *(b"http://a.example/\x00", b"http://a.example/\x7f", b"http://a.example/\xc3\xa4"),
        *(b"http://a.example\\@b.example/", b"http://a.example#@b.example/", b" http://a.example/"),
        *(b"http://a@b.example/", b"http://@b.example/", b"http://a.example\t/", b"http://:80/"),
        *(b"http://[::1]/", b"http://[::1]:80/", b"http://0x7f.1/", b"http://2130706433:80/"),
    ],
)
def test_what_is_no_plain_url_is_refused(url: bytes) -> None:
    with pytest.raises(RefusedError) as caught:
        split_url(url)
    assert caught.value.verdict == "target"


AUTHORITIES = st.one_of(
    st.binary(max_size=80),
    st.text("aZx019-_.:%[]@ \x00\u00e4", max_size=24).map(lambda text: text.encode()),
    st.builds(
        lambda labels, end: ".".join(labels).encode() + end,
        st.lists(st.text("abYZ019-_", min_size=1, max_size=70), min_size=1, max_size=5),
        st.sampled_from([b":443", b".:443", b":0", b":65535", b":65536", b":00080", b""]),
    ),
)


@some_or(20_000)
def test_what_is_matched_is_what_is_resolved(examples: int) -> None:
    accepted = 0

    @settings(max_examples=examples, deadline=None)
    @given(AUTHORITIES)
    def holds(authority: bytes) -> None:
        nonlocal accepted
        try:
            target = parse_target(authority)
        except RefusedError:
            return
        accepted += 1
        name, _, port = authority.rpartition(b":")
        assert target.host.encode() == name.lower().removesuffix(b".")
        assert target.port == int(port) > 0
        # It is its own and only spelling, also where another reader of names takes it.
        assert parse_target(str(target).encode()) == target
        assert target.host.encode("idna") == target.host.encode("ascii")

    holds()
    assert accepted > examples / 20


@some_or(20_000)
def test_any_bytes_after_the_scheme_are_a_target_or_refused(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(AUTHORITIES, st.binary(max_size=20))
    def holds(authority: bytes, path: bytes) -> None:
        try:
            target, asked = split_url(b"http://" + authority + path)
        except RefusedError:
            return
        assert (authority + path).lower().startswith(target.host.encode())
        assert asked.startswith(b"/")
        assert (authority + path).endswith(asked.removeprefix(b"/"))

    holds()
