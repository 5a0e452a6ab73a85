"""The way of one run to its model.

The program inside knows a token, and the process that serves the way asks for the key here.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, fields

import anyio
import h11

from mcp_sandbox.agents.connectors import Connector
from mcp_sandbox.config import RunConfig
from mcp_sandbox.egress.link import HUNG_UP
from mcp_sandbox.egress.process.gateway import Counts, Service
from mcp_sandbox.egress.process.http_requests import Peer
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.egress.ways_out import Way, WaysOut
from mcp_sandbox.errors import OperatorError
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.call import JsonObject
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

_SILENT_S = 600.0
_SHOWN_BYTES = 2000


@asynccontextmanager
async def open_gateway(
    connector: Connector,
    *,
    chat: ChatId,
    limits: RunConfig,
    ways_out: WaysOut,
    silent_s: float = _SILENT_S,
) -> AsyncGenerator["Gateway"]:
    """Open a proxy from a run to a model service while the block lasts.

    A service that sends nothing for `silent_s` seconds is given up, and so is a client that takes
    longer for a request.

    Raises OperatorError: the key cannot be read, or the ways out cannot be used.
    """
    await connector.key()
    await ways_out.up()
    gateway = Gateway(connector, connector.service(limits, silent_s), chat, ways_out)
    async with ways_out.open(gateway.way):
        try:
            yield gateway
        finally:
            with anyio.move_on_after(1, shield=True):
                gateway.take_counts(await ways_out.ask("counts", gateway.way))
            event(logger, "model", chat=str(chat), to=connector.name, **asdict(gateway.counts))


class Gateway:
    """The way out of one run. Inside, `token` replaces the key; it is valid only here."""

    def __init__(
        self, connector: Connector, service: Service, chat: ChatId, ways_out: WaysOut
    ) -> None:
        self.token, self.counts = service.token, Counts()
        self._connector, self._ways_out = connector, ways_out
        said = {"chat": [chat.user, chat.chat], "service": asdict(service), "counts": {}}
        self.way = Way("gateway", said, lambda told, *_: self.take_counts(told), self._answer)

    def take_counts(self, told: JsonObject) -> None:
        """Take the counts that the process has told."""
        if told:
            self.counts = Counts(**{each.name: int(told[each.name]) for each in fields(Counts)})
            # A process that is started again goes on from there.
            self.way.said["counts"] = asdict(self.counts)

    async def _answer(self, _: JsonObject) -> JsonObject:
        try:
            return {"key": (await self._connector.key()).decode("ascii")}
        except OperatorError as exc:
            logger.warning("%s", exc)
            return {"refused": "the key cannot be read; the operator must correct it"}

    async def ask(
        self, what: str, body: bytes, take: Callable[[bytes], Awaitable[None]]
    ) -> tuple[int, str]:
        """Ask for this process, with the same checks and limits; return status and error.

        `what` is METHOD PATH, and `take` gets the answer's bytes.
        """
        status, error = 0, b""
        async with await self._ways_out.connect(self.way) as line:
            client, (method, _, path) = Peer(line, h11.CLIENT), what.partition(" ")
            headers = {"host": "model", "authorization": f"Bearer {self.token}"}
            headers |= {"anthropic-version": "2023-06-01", "content-length": str(len(body))}
            request = h11.Request(method=method, target=path, headers=[*headers.items()])
            try:
                await client.send(request, h11.Data(body), h11.EndOfMessage())
                events = list[h11.Event]()
                while not events or not isinstance(events[-1], h11.EndOfMessage):
                    events = await client.events()
                    for came in events:
                        if isinstance(came, h11.Response):
                            status = came.status_code
                        elif isinstance(came, h11.Data) and status == 200:
                            await take(bytes(came.data))
                        elif isinstance(came, h11.Data):
                            error = (error + came.data)[:_SHOWN_BYTES]
            except (*HUNG_UP, RefusedError) as exc:
                return status or 502, str(exc)
        return status, error.decode("utf-8", "replace")
