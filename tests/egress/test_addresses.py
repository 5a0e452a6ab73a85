"""Which addresses are dialled: those of the internet, and all of a name must be."""

import ast
import subprocess
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.egress.targets import RefusedError, Target, is_public, resolve_addresses

PUBLIC = [
    *(
        "1.1.1.1",
        "8.8.8.8",
        "93.184.215.14",
        "172.15.0.1",
        "172.32.0.1",
        "100.128.0.1",
        "192.1.0.1",
    ),
    *("168.63.129.15", "192.88.98.1", "198.20.0.1", "223.255.255.255"),
    *("2001:4860:4860::8888", "2606:4700:4700::1111", "2a00:1450:4001:82a::200e", "2003::1"),
    *("2001:200::1", "2001:db9::1", "2620:fe::fe", "3ffe::1", "2400:cb00::1"),
]
NOT_PUBLIC = [
    # This machine, its networks, links, and networks of carriers.
    *("0.0.0.0", "0.1.2.3", "127.0.0.1", "127.255.255.254", "10.0.0.1", "172.16.0.1", "172.31.9.9"),
    *("192.168.0.1", "169.254.169.254", "169.254.0.1", "100.64.0.1", "100.100.100.200"),
    # Metadata of clouds at addresses that are public by the registry.
    *("168.63.129.16", "192.0.0.192"),
    # Assignments of protocols, relays, benchmarks, documentation, multicast, broadcast, reserved.
    *("192.0.0.1", "192.0.0.9", "192.0.0.10", "192.0.0.170", "192.88.99.1", "192.88.99.2"),
    *("198.18.0.1", "198.19.255.255", "192.0.2.1", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "232.1.1.1", "233.252.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    # IPv6: this machine, links, sites, and what carries an IPv4 address in it.
    *(
        "::",
        "::1",
        "::2",
        "fe80::1",
        "fe80::1%lo",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
    ),
    *("ff0e::1", "::127.0.0.1", "::7f00:1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:8.8.8.8"),
    *("::ffff:0:7f00:1", "::ffff:0:808:808", "64:ff9b::7f00:1", "64:ff9b::808:808"),
    *("64:ff9b:1::7f00:1", "2002:7f00:1::", "2002:808:808::1", "2001::1", "2001:0:7f00:1::"),
    *("2001:1::1", "2001:10::1", "2001:20::1", "2001:1ff::1", "2001:db8::1", "3fff::1"),
    *("3fff:fff::1", "100::1", "5f00::1", "4000::1", "1fff::1", "fe00::1", "::1.1.1.1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_any_other_is_not(address: str) -> None:
    assert not is_public(ip_address(address))


@given(st.ip_addresses(v=6))
def test_no_address_of_ipv6_outside_the_internet_is_public(address: object) -> None:
    found = ip_address(str(address))
    assert not is_public(found) or found in ip_network("2000::/3")


@given(st.ip_addresses(v=4))
def test_no_ipv4_address_is_public_that_python_takes_for_a_local_one(address: object) -> None:
    found = ip_address(str(address))
    assert not is_public(found) or not (found.is_private or found.is_multicast or found.is_reserved)


async def test_names_of_this_machine_are_refused_before_they_are_dialled() -> None:
    with pytest.raises(RefusedError, match="not public") as caught:
        await resolve_addresses(Target("localhost", 80), private=False)
    assert caught.value.verdict == "address"
    # The reason tells the inside nothing of the network.
    assert not any(letter.isdigit() for letter in str(caught.value))


async def test_a_private_rule_reaches_them() -> None:
    assert "127.0.0.1" in await resolve_addresses(Target("localhost", 80), private=True)
    assert await resolve_addresses(Target("host.internal", 80), private=True) == [
        "127.0.0.1",
        "::1",
    ]


LOOK_UP = """
import sys, anyio
from mcp_sandbox.egress.targets import RefusedError, parse_target, resolve_addresses
for word in sys.argv[1:]:
    try:
        print(anyio.run(lambda: resolve_addresses(parse_target(word.encode()), private=False)))
    except RefusedError as exc:
        print(exc.verdict)
"""


@pytest.mark.bubblewrap
def test_every_address_of_a_name_must_be_public(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "1.1.1.1 public.example\n2606:4700::1 public.example\n10.0.0.1 private.example\n"
        "1.1.1.1 mixed.example\n::1 mixed.example\n1.1.1.1 a_b.-c.example\n"
    )
    mounted = 'mount --bind "$0" /etc/hosts && exec "$@"'
    names = ("public", "private", "mixed", "a_b.-c")
    found = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mounted, str(hosts), sys.executable, "-c", LOOK_UP]
        + [f"{name}.example:80" for name in names],
        capture_output=True,
        text=True,
        check=False,
    )
    public, *others = found.stdout.splitlines()
    assert sorted(ast.literal_eval(public)) == ["1.1.1.1", "2606:4700::1"], found.stderr
    assert others == ["address", "address", "['1.1.1.1']"]


async def test_a_name_without_an_address_is_told() -> None:
    with anyio.fail_after(40), pytest.raises(RefusedError, match="no address") as caught:
        await resolve_addresses(Target("nowhere.invalid", 80), private=False)
    assert caught.value.verdict == "failed"
