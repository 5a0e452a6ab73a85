"""A model service elsewhere is reached as this machine reaches the network, and over TLS alone."""

from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import trustme

from mcp_sandbox.agents.connectors import find_connector
from mcp_sandbox.agents.gateway import open_gateway
from mcp_sandbox.config import ConnectorConfig, EgressConfig, RunConfig
from mcp_sandbox.egress.settings import load_trusted
from mcp_sandbox.egress.ways_out import open_ways_out
from mcp_sandbox.errors import ConfigError
from tests.agents.service import CHAT, KEY, MESSAGE, a_run, a_service, listen, saying

AUTHORITY = trustme.CA()


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """The authority of a company, which no system trusts."""
    AUTHORITY.cert_pem.write_to_path(str(tmp_path / "company.pem"))
    return tmp_path / "company.pem"


async def test_a_service_that_the_companys_authority_vouches_for_gets_the_key(
    tmp_path: Path, bundle: Path
) -> None:
    egress = EgressConfig(ca_bundle=bundle)
    async with a_service(AUTHORITY) as service, a_run(tmp_path, service, egress=egress) as run:
        assert (await run.post()).json() == {"usage": {"output_tokens": 1}}
        (heard,) = service.heard
        assert (heard.headers["x-api-key"], heard.body) == (KEY, MESSAGE)


async def test_one_that_nobody_vouches_for_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_service(AUTHORITY) as service, a_run(tmp_path, service) as run:
        answer = await run.post()
        assert answer.status_code == 502
        assert "connector one failed: its TLS cannot be trusted" in answer.text
        assert not service.heard
    assert KEY not in caplog.text


async def test_a_bundle_that_cannot_be_read_is_told_before_the_run(tmp_path: Path) -> None:
    key = {"url": "https://a.example", "key": f"command: echo {KEY}"}
    connector = find_connector({"one": ConnectorConfig.model_validate(key)})
    load = partial(load_trusted, tmp_path / "missing.pem")
    async with open_ways_out(load) as ways_out:
        with pytest.raises(ConfigError, match=r"missing\.pem cannot be read: No such file"):
            async with open_gateway(connector, chat=CHAT, limits=RunConfig(), ways_out=ways_out):
                pytest.fail("it began")


async def test_the_proxy_of_this_machine_is_asked_for_the_way_and_sees_no_key(
    tmp_path: Path, bundle: Path
) -> None:
    asked, seen = [], bytearray()

    async def proxy(stream: Any) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += await stream.receive()
        asked.append(head.split(b"\r\n")[0].decode())
        async with await anyio.connect_tcp("localhost", int(service.url[-5:])) as way:
            await stream.send(b"HTTP/1.1 200 OK\r\n\r\n")
            async with stream, anyio.create_task_group() as tasks:
                tasks.start_soon(copy, way, stream)
                await copy(stream, way)
                tasks.cancel_scope.cancel()

    async def copy(source: Any, sink: Any) -> None:
        async for piece in source:
            seen.extend(piece)
            await sink.send(piece)

    async with a_service(AUTHORITY) as service, anyio.create_task_group() as tasks:
        port = await listen(tasks, proxy)
        egress = EgressConfig(ca_bundle=bundle, upstream_proxy=f"http://127.0.0.1:{port}")
        async with a_run(tmp_path, service, egress=egress) as run:
            assert (await run.post()).status_code == 200
        assert asked == [f"CONNECT {service.url.removeprefix('https://')} HTTP/1.1"]
        assert service.heard[0].headers["x-api-key"] == KEY
        assert len(seen) > 1000
        assert KEY.encode() not in seen
        tasks.cancel_scope.cancel()


async def test_a_proxy_that_refuses_is_told(tmp_path: Path, bundle: Path) -> None:
    async def proxy(stream: Any) -> None:
        async with stream:
            await stream.receive()
            await saying(b"no", "403 Forbidden")(stream)

    async with a_service(AUTHORITY) as service, anyio.create_task_group() as tasks:
        port = await listen(tasks, proxy)
        egress = EgressConfig(ca_bundle=bundle, upstream_proxy=f"http://127.0.0.1:{port}")
        async with a_run(tmp_path, service, egress=egress) as run:
            answer = await run.post()
            assert answer.status_code == 502
            assert "connector one failed: the proxy of this machine answers 403" in answer.text
        tasks.cancel_scope.cancel()
