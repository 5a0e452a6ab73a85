"""A program inside reaches its model through a door, and never holds the key."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from mcp_sandbox.agents.connectors import find_connector
from mcp_sandbox.agents.gateway import Gateway, open_gateway
from mcp_sandbox.config import ConnectorConfig, RunConfig
from mcp_sandbox.egress.settings import load_trusted
from mcp_sandbox.egress.ways_out import open_ways_out
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.session import Session
from tests.agents.service import (
    KEY,
    STREAM_HEAD,
    Service,
    a_service,
    chunk,
    lead,
    saying,
    told,
)
from tests.streams import everything

# What it asks, by its first argument; it prints what it gets.
PROGRAM = """
import http.client, json, os, socket, sys
port, token = int(sys.argv[2]), os.environ["MODEL_KEY"]

def ask(body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/messages", body, {"x-api-key": token})
    return connection.getresponse()

def hello():
    answer = ask(json.dumps({"messages": []}))
    print(answer.status, answer.read().decode())

def much():
    text = "x" * (20 << 20)
    answer = ask(json.dumps({"messages": text}))
    print(answer.status, len(answer.read()))

def too_much():
    # In chunks, so that its length is not known before.
    print(ask(iter([b"x" * (1 << 20)] * 33)).status)

def cut():
    try:
        print("whole", ask("{}").read())
    except http.client.IncompleteRead as error:
        print("cut off", error.partial.decode())

def leave():
    client = socket.create_connection(("127.0.0.1", port))
    lines = ("POST /v1/messages HTTP/1.1", "Host: x", "x-api-key: " + token, "Content-Length: 2")
    client.sendall("\\r\\n".join([*lines, "", "{}"]).encode())
    print("asked", len(client.recv(1)))

def refused():
    try:
        socket.create_connection(("127.0.0.1", port))
    except OSError as error:
        print(type(error).__name__)

globals()[sys.argv[1]]()
"""


@dataclass
class Inside:
    """A run in a chat, with the port of its way to the model."""

    session: Session
    gateway: Gateway
    port: int | str

    async def program(self, what: str, token: str = "") -> str:
        """What the program prints."""
        done = await self.session.exec(
            ["python3", "/workspace/program.py", what, str(self.port)],
            env={"MODEL_KEY": token or self.gateway.token},
            timeout_s=40,
        )
        return done.stdout + done.stderr


@pytest.fixture
async def service() -> AsyncGenerator[Service]:
    async with a_service() as running:
        yield running


@asynccontextmanager
async def a_run(session: Session, service: Service, folder: Path) -> AsyncGenerator[Inside]:
    key = folder / "key"
    await anyio.Path(key).write_text(KEY)
    await anyio.Path(key).chmod(0o600)
    given = {"url": service.url, "key": f"file:{key}"}
    connector = find_connector({"one": ConnectorConfig.model_validate(given)})
    await session.write_file("program.py", PROGRAM)
    with anyio.fail_after(50):
        chat = ChatId("tester", "contract")
        async with (
            open_ways_out(partial(load_trusted, None)) as ways_out,
            open_gateway(connector, chat=chat, limits=RunConfig(), ways_out=ways_out) as gateway,
        ):
            async with session.door(partial(lead, ways_out, gateway)) as port:
                yield Inside(session, gateway, port)


async def test_a_model_is_asked_with_the_key_that_is_nowhere_inside(
    emptied: Session, service: Service, tmp_path: Path
) -> None:
    async with a_run(emptied, service, tmp_path) as run:
        assert await run.program("hello") == '200 {"usage": {"output_tokens": 1}}\n'
        assert service.heard[0].headers["x-api-key"] == KEY
        assert KEY not in (await emptied.exec("env; cat /proc/[0-9]*/environ")).stdout
        found = await emptied.exec(
            "grep -rlaF marked-key-of-the-operator /workspace ~ /proc/[0-9]*/environ 2>/dev/null"
        )
        assert found.stdout == ""


async def test_a_token_is_of_use_in_its_own_run_alone(
    emptied: Session, service: Service, tmp_path: Path
) -> None:
    async with a_run(emptied, service, tmp_path) as run:
        async with a_run(emptied, service, tmp_path) as other:
            assert (await run.program("hello", other.gateway.token)).startswith("401 ")
            assert (await other.program("hello")).startswith("200 ")
        assert await other.program("refused") == "ConnectionRefusedError\n"
        assert (await run.program("hello", other.gateway.token)).startswith("401 ")
        assert (await run.program("hello")).startswith("200 ")
    assert len(service.heard) == 2


async def test_large_requests_and_answers_pass_whole_and_larger_ones_are_refused(
    emptied: Session, service: Service, tmp_path: Path
) -> None:
    service.answer = saying(b"y" * (20 << 20))
    async with a_run(emptied, service, tmp_path) as run:
        assert await run.program("much") == f"200 {20 << 20}\n"
        assert service.heard[0].body == {"messages": "x" * (20 << 20)}
        assert await run.program("too_much") == "413\n"
        assert len(service.heard) == 1


async def test_an_answer_that_breaks_off_is_seen_to_have_no_end(
    emptied: Session, service: Service, tmp_path: Path
) -> None:
    first = told(type="message_start")

    async def answer(stream: SocketStream) -> None:
        await stream.send(STREAM_HEAD + chunk(first))
        await stream.aclose()

    service.answer = answer
    async with a_run(emptied, service, tmp_path) as run:
        assert await run.program("cut") == f"cut off {first.decode()}\n"


async def test_a_program_that_ends_takes_its_requests_with_it(
    emptied: Session, service: Service, tmp_path: Path
) -> None:
    async def answer(stream: SocketStream) -> None:
        await stream.send(STREAM_HEAD + chunk(told(type="message_start")))
        await everything(stream)

    service.answer = answer
    async with a_run(emptied, service, tmp_path) as run:
        assert await run.program("leave") == "asked 1\n"
        with anyio.fail_after(5):
            await service.gone.wait()
