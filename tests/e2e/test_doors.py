"""A sandbox with a list of hosts reaches these, by the way that is opened for it, and no other."""

import json
import re

import pytest

from tests.e2e.doors import (
    AT_PORT,
    CHAT,
    DATABASE,
    LOCAL,
    PLAIN,
    Served,
    connect,
    statuses,
    undisturbed,
)
from tests.world import CANARIES, METADATA, OTHER, PRIVATE, PUBLIC, PUBLIC6, World
from tests.world import DATABASE as DATABASE_AT

pytestmark = pytest.mark.timeout(120)
LATER = "later.example.com"


def test_a_canary_hears_whoever_comes(world: World) -> None:
    with world.hearing() as heard:
        for place in (f"127.0.0.1/{22}", f"{METADATA}/80", f"{PRIVATE}/443"):
            world.run("bash", "-c", f"exec 3<>/dev/tcp/{place}")
        world.run("curl", "-sS", "http://loopback.example.com/")
    assert sorted(each["at"] for each in heard if each["kind"] == "canary") == sorted(
        ["127.0.0.1:22", f"{METADATA}:80", f"{PRIVATE}:443", "127.0.0.1:80"]
    )
    assert {"kind": "name", "name": "loopback.example.com"} in heard


async def test_what_a_rule_names_is_reached_and_stays_end_to_end(served: Served) -> None:
    with undisturbed(served.world), served.world.hearing("http") as heard:
        said = await served.chat.bash(
            f"for url in https://{PLAIN}/a http://{PLAIN}/b https://{AT_PORT}/c http://{LOCAL}/d\n"
            'do curl -sS -d body "$url"; done\n'
            f"curl -sv https://{PLAIN}/ 2>&1 | grep issuer"
        )
    assert [each["path"] for each in heard] == ["/a", "/b", "/c", "/d", "/"]
    assert [each["name"] for each in heard[:3]] == [PLAIN, None, AT_PORT.partition(":")[0]]
    assert {each["body"] for each in heard[:4]} == {"body"}
    assert all(f'"path": "/{each}"' in said for each in "abcd")
    # The certificate that the client sees is the host's own.
    assert "trustme" in said


async def test_what_is_no_web_site_is_reached_too(served: Served) -> None:
    (said,) = await served.chat.knock([connect(DATABASE), b"select\n"])
    assert statuses([said]) == [200]
    assert said.endswith("\r\n\r\nSELECT\n")


async def test_what_no_rule_names_is_refused_and_the_result_says_who_can_allow_it(
    served: Served,
) -> None:
    with undisturbed(served.world), served.world.hearing() as heard:
        said = await served.chat.bash(
            f"for n in 1 2 3; do curl -sS https://{LATER}/; done 2>&1; curl -s http://{LATER}/"
        )
    assert not heard
    assert said.count("403") >= 3
    assert f"[network: refused {LATER}:443, 3 times: no rule allows it." in said
    assert f"mcp-sandbox egress allow {CHAT} {LATER}" in said
    assert "network:" not in await served.chat.bash("true")


async def test_what_is_refused_is_not_looked_up(served: Served) -> None:
    targets = ("gist.example.com:443", f"{PLAIN}:22", f"{PLAIN}.evil.example:443", AT_PORT[:-4])
    with undisturbed(served.world), served.world.hearing() as heard:
        said = await served.chat.knock(*map(connect, targets))
    assert statuses(said) == [403, 403, 403, 400]
    assert not heard


async def test_people_can_ask_which_rule_decides(served: Served) -> None:
    for target, code, why in (
        ("gist.example.com", 1, "deny"),
        (f"{PLAIN}:22", 1, "port"),
        (f"{PLAIN}.evil.example", 1, "no rule"),
        (PLAIN, 0, PLAIN),
    ):
        checked = await served.people("egress check", target)
        assert checked.code == code, checked
        assert why in checked.out + checked.err


_NO_ROUTE = """
import errno, json, os, socket, sys
from concurrent.futures import ThreadPoolExecutor
for name in [each for each in os.environ if "proxy" in each.lower()]:
    del os.environ[name]

def reached(place):
    kind, host, port = place
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, getattr(socket, kind)) as line:
            line.settimeout(1)
            line.connect((host, port))
            line.send(b"\\0" * 12)
            if kind == "SOCK_DGRAM" and not line.recv(1):
                return None
            return place
    except OSError:
        return None

def resolved(name):
    try:
        return socket.getaddrinfo(name, 443)
    except OSError:
        return None

places = json.loads(sys.argv[1])
with ThreadPoolExecutor(32) as pool:
    print(json.dumps([*filter(None, pool.map(reached, places))]))
print(json.dumps([each for each in sys.argv[2:] if resolved(each)]))
with open("/proc/net/dev") as file:
    print(json.dumps([line.split(":")[0].strip() for line in file if ":" in line]))
"""


async def test_no_route_leads_out_beside_it(served: Served) -> None:
    hosts = {PUBLIC, PUBLIC6, OTHER, DATABASE_AT[0], "172.17.0.1", "127.0.0.53", "8.8.8.8"}
    ports = {22, 53, 80, 443, 5432}
    places = [
        [kind, host, port]
        for host in sorted(hosts | set(CANARIES))
        for port in sorted(ports)
        for kind in ("SOCK_STREAM", "SOCK_DGRAM")
    ]
    with undisturbed(served.world), served.world.hearing() as heard:
        await served.chat.call("write_file", path="no_route.py", content=_NO_ROUTE)
        said = await served.chat.bash(
            f"python3 no_route.py '{json.dumps(places)}' {PLAIN} {LATER} example.com"
        )
        direct = await served.chat.bash(
            f"curl -sS --noproxy '*' -m 3 https://{PLAIN}/ || echo refused $?"
        )
    reached, resolved, devices = map(json.loads, said.splitlines()[:3])
    assert not reached
    assert not resolved
    assert devices == ["lo"]
    assert "refused" in direct
    assert not heard


async def test_what_a_person_allows_holds_at_once_in_the_sandbox_that_runs(served: Served) -> None:
    chat, name = served.chat, CHAT
    fetch = f"curl -sS -o /dev/null -w '%{{http_code}}\\n' https://{LATER}/ 2>&1"
    begun = await chat.bash("nohup sleep 4321 >/dev/null 2>&1 & echo $! > pid; hostname; cat pid")
    assert "403" in await chat.bash(fetch)
    allowed = await served.people("egress allow", name, LATER, "--yes", "--for", "1d")
    assert allowed.code == 0, allowed
    assert (await chat.bash(fetch)).startswith("200\n")
    listed = await served.people("egress list", name)
    assert LATER in listed.out, listed
    async with served.other("stranger") as stranger:
        assert "403" in await stranger.bash(fetch)
    denied = await served.people("egress deny", name, LATER)
    assert denied.code == 0, denied
    assert "403" in await chat.bash(fetch)
    ended = await chat.bash("kill -0 $(cat pid) && hostname; cat pid; kill $(cat pid)")
    assert ended.splitlines()[:2] == begun.splitlines()[:2]


async def test_what_a_person_allows_reads_alone_if_they_say_so(served: Served) -> None:
    name = CHAT
    await served.chat.bash("true")
    allowed = await served.people("egress allow", name, LATER, "--yes", "--read")
    assert allowed.code == 0, allowed
    code = f"curl -s -o /dev/null -w '%{{http_code}}\\n' https://{LATER}/"
    said = await served.chat.bash(f"{code}; {code} -d body")
    assert said.splitlines()[:2] == ["200", "403"]
    assert (await served.people("egress deny", name, LATER)).code == 0


async def test_a_grant_opens_no_private_address(served: Served) -> None:
    host = "inner.example.net"
    await served.chat.bash("true")
    allowed = await served.people("egress allow", CHAT, host, "--yes")
    assert allowed.code == 0, allowed
    with undisturbed(served.world):
        said = await served.chat.bash(f"curl -sS https://{host}/ 2>&1")
    assert "403" in said
    assert f"refused {host}:443" in said
    refused = await served.people("egress allow", CHAT, "10.1.2.3", "--yes")
    assert refused.code != 0


async def test_people_see_rules_refusals_and_bytes(served: Served) -> None:
    await served.chat.bash(
        f"curl -s https://{PLAIN}/bytes/100000 >/dev/null; curl -s https://never.example.com/"
    )
    listed = (await served.people("egress list", CHAT)).out
    assert PLAIN in listed
    assert re.search(r"never\.example\.com(:443)?", listed)


async def test_the_agent_is_told_which_network_it_has(served: Served) -> None:
    told = json.dumps(await served.chat.client.call("sandbox_info"))
    assert "allowlist" in told or PLAIN in told
