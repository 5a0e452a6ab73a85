"""What `network: open` lets pods reach is what the proxy dials: one list says both."""

from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from mcp_sandbox.backends.kubernetes.network import policies
from tests.egress.test_addresses import NOT_PUBLIC, PUBLIC


def reaches(address: str) -> bool:
    """Whether the policy of `open` lets a pod reach an address by its blocks."""
    [spec] = [each["spec"] for each in policies() if each["metadata"]["name"].endswith("open")]
    blocks: list[Any] = [to["ipBlock"] for to in spec["egress"][0]["to"]]
    found = ip_address(address)
    return any(
        found in ip_network(block["cidr"])
        and not any(found in ip_network(each) for each in block["except"])
        for block in blocks
    )


@pytest.mark.parametrize("address", PUBLIC)
def test_a_pod_with_an_open_network_reaches_the_internet(address: str) -> None:
    assert reaches(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_it_reaches_nothing_that_the_proxy_does_not_dial(address: str) -> None:
    assert not reaches(address)


def test_what_a_block_leaves_out_is_within_it() -> None:
    """A cluster refuses a policy otherwise."""
    [spec] = [each["spec"] for each in policies() if each["metadata"]["name"].endswith("open")]
    for to in spec["egress"][0]["to"]:
        whole: Any = ip_network(to["ipBlock"]["cidr"])
        assert all(ip_network(each).subnet_of(whole) for each in to["ipBlock"]["except"])
