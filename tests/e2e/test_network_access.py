"""An agent asks its user for hosts, and only what was allowed is reached."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.types import ElicitResult

from tests.daemon.test_consent import relayed
from tests.e2e.doors import PLAIN, Served, placed, served, undisturbed
from tests.server.scripted import text_of
from tests.world import World

pytestmark = [pytest.mark.timeout(120), pytest.mark.bubblewrap]
FETCH = "python3 -m pip download -q --no-input --retries 0 --index-url https://pypi.org/simple tiny"
SHOPS = ["pypi.org", "files.pythonhosted.org"]


@pytest.fixture
async def asking(world: World, tmp_path: Path) -> AsyncGenerator[Served]:
    egress = {"allow": [PLAIN], "deny": ["gist.example.com"]}
    where = placed(world, tmp_path, "bubblewrap", {"egress": egress, "secrets": {}})
    async with served(world, where, "bubblewrap") as found:
        yield found


async def fetched(client: Client) -> str:
    return text_of(await client.call_tool("exec", {"command": f"{FETCH} && ls *.whl"}))


async def test_a_user_allows_hosts_and_packages_come(asking: Served) -> None:
    asked = list[str]()

    async def ask(_context: object, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={})

    async def wanted(client: Client, *hosts: str, one: str = "", write: bool = False) -> str:
        given = {"hosts": one or hosts, "reason": "to install tiny", "write": write}
        return text_of(await client.call_tool("network_access", given))

    with undisturbed(asking.world):
        async with relayed(asking.place, "a", "auto", ask) as client:
            assert "network_access asks the user for it" in await fetched(client)
            assert "the user allows pypi.org" in await wanted(client, *SHOPS)
            assert "tiny-1.0-py3-none-any.whl" in await fetched(client)
            assert "allowed already" in await wanted(client, "pypi.org", PLAIN)
            for named in ("pypi.org", "https://pypi.org/simple/tiny", '["pypi.org"]'):
                assert await wanted(client, one=named) == "pypi.org: allowed already; connect again"
            assert len(asked) == 1
            assert asked[0].split("\n")[0] == f"Read from {', '.join(SHOPS)}?"
            assert "the user allows pypi.org to read and write" in await wanted(
                client, "pypi.org", write=True
            )
            # What no yes could help is not asked.
            for host in ("gist.example.com", "10.1.2.3", "host.internal", "*.example.com", "a\nb"):
                assert await wanted(client, host)
            assert len(asked) == 2
            many = [f"{'x' * 60}{number}.example.com" for number in range(10)]
            assert "the user allows" in await wanted(client, *many)
            assert all(len(line) <= 78 for line in asked[2].split("\n"))
            assert "hosts must be a list" in await wanted(client, *many, "one.example.com")
    listed = await asking.people("egress list", "a")
    assert "pypi.org" in listed.out
    assert "grant of the user" in listed.out
