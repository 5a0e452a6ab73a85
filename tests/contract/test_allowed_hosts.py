"""What leaves a sandbox with allowed hosts, on every backend that has a wall."""

import re
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme
from anyio import to_thread
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSListener

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.audit.log import events
from mcp_sandbox.config import AllowConfig, Config, EgressConfig, SecretConfig
from mcp_sandbox.errors import ConfigError, NotFound
from mcp_sandbox.models import ChatId, Network
from mcp_sandbox.sessions.session import Session
from tests.conftest import configured

CHAT = ChatId("local", "allowed")
HERE = "host.internal"
SECRET = "s3cret-value-of-the-token"
# Takes the port as soon as the last server has left it.
TAKER = """
import socket, time
while True:
    try:
        taken = socket.create_server(("127.0.0.1", 17329))
        break
    except OSError:
        time.sleep(0.01)
open("taken", "w")
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def with_a_wall(request: pytest.FixtureRequest) -> None:
    if re.search("unsafe-local|holding|e2b", request.node.name):
        pytest.skip("it has no wall to put a door into, or is refused this network")


@dataclass
class Web:
    """Servers of this machine's loopback, and the heads that came to them."""

    authority: trustme.CA
    heads: list[str] = field(default_factory=list[str])
    plain: int = 0
    secure: int = 0
    other: int = 0

    async def answer(self, stream: ByteStream) -> None:
        """Answer one request with what it was."""
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head:
                head += await stream.receive()
            self.heads.append(head.decode())
            length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(head)
            await stream.send(b"HTTP/1.1 200 OK\r\n" + length + head)


@asynccontextmanager
async def web() -> AsyncGenerator[Web]:
    found = Web(trustme.CA())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.authority.issue_cert(HERE).configure_cert(context)
    async with AsyncExitStack() as stack:
        listeners = [
            await stack.enter_async_context(await anyio.create_tcp_listener(local_host="127.0.0.1"))
            for _ in range(3)
        ]
        ports = [each.extra(SocketAttribute.local_port) for each in listeners]
        found.plain, found.secure, found.other = ports
        async with anyio.create_task_group() as tasks:
            plain, secure, other = listeners
            encrypted = TLSListener(secure, context, standard_compatible=False)
            for each in (plain, encrypted, other):
                tasks.start_soon(each.serve, found.answer)
            try:
                yield found
            finally:
                tasks.cancel_scope.cancel()


def allowing(config: Config, servers: Web, folder: Path) -> Config:
    """What may be reached: the first two servers; the second gets a secret."""
    folder.mkdir(exist_ok=True)
    bundle, token = folder / "authority.pem", folder / "token"
    servers.authority.cert_pem.write_to_path(str(bundle))
    token.write_text(f"{SECRET}\n")
    rules = [AllowConfig(host=HERE, port=p, private=True) for p in (servers.plain, servers.secure)]
    egress = EgressConfig(allow=(*rules, "api.example.com"), ca_bundle=bundle)
    to = f"{HERE}:{servers.secure}"
    secret = SecretConfig.model_validate({"from": f"file:{token}", "hosts": [to]})
    given = {"network": "allowlist", "egress": egress, "secrets": {"API_TOKEN": secret}}
    return config.model_copy(update=given)


@asynccontextmanager
async def computer(config: Config, folder: Path) -> AsyncGenerator[tuple[Session, Web]]:
    with anyio.fail_after(50):
        async with web() as servers, open_manager(allowing(config, servers, folder)) as manager:
            yield await manager.session(CHAT), servers


async def recorded(config: Config, kind: str) -> list[dict[str, Any]]:
    """The lines of a kind in the audit."""
    found = await to_thread.run_sync(lambda: [*events(config.data_dir / "sandbox" / "audit")])
    return [told for _, told in found if told["kind"] == kind]


async def test_only_what_a_rule_allows_leaves(config: Config, tmp_path: Path) -> None:
    async with computer(config, tmp_path / "o") as (session, servers):
        reached = await session.exec(f"curl -sS http://{HERE}:{servers.plain}/a?b")
        assert "GET /a?b HTTP/1.1" in reached.stdout, reached
        assert await session.take_notices() == []
        refused = await session.exec(
            f"for port in {servers.other} {servers.plain}1; do curl -s http://{HERE}:$port; done;"
            f"curl -sS https://later.example.com; curl -s https://later.example.com;"
            f"unset -v HTTP_PROXY HTTPS_PROXY http_proxy https_proxy;"
            f"curl -s -m 5 http://127.0.0.1:{servers.plain} || curl -s -m 5 http://{HERE}:{servers.plain}"
        )
        assert not refused.success
        news = "\n".join(await session.take_notices())
        assert (
            "network: refused later.example.com:443, 2 times: no rule allows it. "
            "network_access asks the user for it, who can also type: "
            "mcp-sandbox egress allow allowed later.example.com" in news
        )
        assert f"{HERE}:{servers.other}" in news
        assert len(servers.heads) == 1
    told = await recorded(config, "egress")
    assert {each["target"] for each in told} >= {"later.example.com:443", f"{HERE}:{servers.other}"}


async def test_a_secret_goes_to_its_host_and_never_comes_in(config: Config, tmp_path: Path) -> None:
    async with computer(config, tmp_path / "o") as (session, servers):
        url = f"https://{HERE}:{servers.secure}/"
        sent = 'curl -sS -H "Authorization: Bearer $API_TOKEN"'
        found = await session.exec(
            f'{sent} {url}; {sent} http://{HERE}:{servers.plain}/; curl -sS "{url}?$API_TOKEN";'
            f"env; cat /proc/*/environ; grep -r {SECRET} /workspace ~ /tmp /etc 2>/dev/null"
        )
        told = (await session.info()).network
        assert "API_TOKEN is a placeholder, which becomes the secret on its way in the" in told
        assert f"header authorization of HTTPS requests to {HERE}:{servers.secure}" in told
        to_host, in_clear, in_url = servers.heads
        assert f"Bearer {SECRET}\r\n" in to_host
        for head in (in_clear, in_url):
            assert "mcps_API_TOKEN_" in head
            assert SECRET not in head
        assert "mcps_API_TOKEN_" in found.stdout
        assert SECRET not in found.stdout + found.stderr
        await session.exec(f": {SECRET}")
    (used,) = await recorded(config, "secret")
    assert (used["name"], used["target"]) == ("API_TOKEN", f"{HERE}:{servers.secure}")
    *_, last = await recorded(config, "begun")
    assert last["arguments"] == '{"command": ": %s"}' % ("*" * len(SECRET))


async def test_grants_hold_in_the_sandbox_that_runs_and_go_with_the_files(
    config: Config, tmp_path: Path
) -> None:
    async with web() as servers:
        config = allowing(config, servers, tmp_path / "o")
        async with open_manager(config) as manager, open_manager(config) as other:
            session, egress = await manager.session(CHAT), other.egress
            assert egress
            # Also before it has anything.
            await egress.allow(CHAT, "first.example.com", read=False, by="me", for_s=60)
            assert "first.example.com" in (await session.info()).network
            assert await session.take_notices() == []

            async def news() -> str:
                assert not (await session.exec("curl -sf http://nowhere.example.com")).success
                return "\n".join(await session.take_notices())

            assert "mcp-sandbox egress allow allowed nowhere.example.com" in await news()
            (before,) = await manager.list()
            await egress.allow(CHAT, "*.example.com", read=True, by="me", for_s=60)
            assert "its name has no address" in await news()
            assert "*.example.com (read only)" in (await session.info()).network
            await egress.deny(CHAT, "*.example.com")
            assert "no rule allows it" in await news()
            with pytest.raises(NotFound, match="egress list allowed"):
                await egress.deny(CHAT, "*.example.com")
            await egress.allow(CHAT, "nowhere.example.com", read=False, by="me", for_s=60)
            await egress.allow(CHAT, "other.example.com", read=False, by="me", for_s=0.0)
            grants = [grant.host for grant in await egress.grants(CHAT)]
            assert grants == ["first.example.com", "nowhere.example.com"]
            (after,) = await manager.list()
            assert before.sandbox_id == after.sandbox_id
            await session.reset()
            assert "its name has no address" in await news()
            await session.reset(keep_files=False)
            assert "no rule allows it" in await news()


async def test_the_way_out_is_there_after_a_pause_and_from_the_next_server(
    config: Config, backend_name: str, tmp_path: Path
) -> None:
    async with web() as servers:
        config = allowing(config, servers, tmp_path / "o")
        ask = f"curl -sSf http://{HERE}:{servers.plain}/"
        async with open_manager(config, for_many=True) as second:
            async with open_manager(config, for_many=True) as first:
                session = await first.session(CHAT)
                assert (await session.exec(f"sleep 86370 & {ask}")).success
                if backend_name.startswith("docker"):
                    assert await first.pause(CHAT)
                    assert (await session.exec(ask)).success
                session = await second.session(CHAT)
                assert (await session.exec(ask)).success
            assert (await session.exec(ask)).success
            assert await session.take_notices() == []
        async with open_manager(config) as third:
            assert (await (await third.session(CHAT)).exec(f"{ask}; pkill sleep")).success


async def test_who_takes_the_port_inside_harms_its_own_chat_until_it_leaves_it(
    config: Config, tmp_path: Path
) -> None:
    async with web() as servers:
        config = allowing(config, servers, tmp_path / "o")
        ask = f"curl -sSf http://{HERE}:{servers.plain}/"
        async with open_manager(config, for_many=True) as first:
            session = await first.session(CHAT)
            await session.write_file("taking.py", TAKER)
            await session.exec("python3 taking.py", wait_s=0)
        with anyio.fail_after(20):
            while not [*(await anyio.to_thread.run_sync(partial(found, config, "taken")))]:
                await anyio.sleep(0.02)
        async with open_manager(config) as second:
            session = await second.session(CHAT)
            assert not (await session.exec(f"{ask} -m 0.5")).success
            assert "nothing leaves this computer" in "\n".join(await session.take_notices())
            await session.exec("pkill -f [t]aking.py; while pgrep -f [t]aking.py; do :; done")
            assert (await session.exec(ask)).success


def found(config: Config, name: str) -> list[Path]:
    return [*config.data_dir.rglob(f"workspace/**/{name}")]


@pytest.mark.parametrize("network", ["none", "open"])
async def test_with_other_networks_nothing_of_it_is_there(
    config: Config, network: Network, tmp_path: Path
) -> None:
    async with web() as servers:
        config = allowing(config, servers, tmp_path / "o")
        async with open_manager(config.model_copy(update={"network": network})) as manager:
            session = await manager.session(CHAT)
            said = (await session.exec("env")).stdout
        for word in ("17329", "API_TOKEN", "ca-certificates"):
            assert word not in said
        assert not (config.data_dir / "sandbox" / "authority").exists()


async def test_what_has_no_wall_gets_no_door(tmp_path: Path) -> None:
    config = configured("unsafe-local", tmp_path / "data")
    with pytest.raises(ConfigError, match="unsafe-local has none"):
        async with open_manager(config.model_copy(update={"network": "allowlist"})):
            pass
