"""The HTTP requests that are being served: how they are waited for, and how they are ended."""

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_sandbox.server.refusal import Refused

_FINISH_S = 1.0


def shutting_down() -> Refused:
    """What a request is told that comes, or still runs, when the server ends."""
    text = "the server is ending and takes no further request: try again in a moment"
    return Refused(HTTPStatus.SERVICE_UNAVAILABLE, text, retry_after_s=1)


@dataclass(eq=False)
class Open:
    """A request that is being served. A stream lasts as long as its client likes."""

    token_id: str | None
    is_stream: bool
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    why: Refused | None = None

    def end(self, why: Refused) -> None:
        """Cancel it, and let its client know why if nothing was answered yet."""
        if self.why is None:
            self.why = why
            self.scope.cancel()


class Flow:
    """Every request that is being served."""

    def __init__(self) -> None:
        self._open: set[Open] = set()
        self._left = anyio.Event()
        self._draining = False

    @property
    def token_ids(self) -> set[str]:
        """The tokens that requests came with which are still served."""
        return {entry.token_id for entry in self._open if entry.token_id is not None}

    async def serve(
        self, entry: Open, app: ASGIApp, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let the application answer a request, until it has or is told to end.

        Raises:
            Refused: it was ended before an answer began.
        """
        if self._draining:
            raise shutting_down()
        answer = _Answer(send)
        self._open.add(entry)
        try:
            with entry.scope:
                await app(scope, receive, answer.send)
            if entry.why is not None:
                await answer.finish(entry.why)
        finally:
            self._open.discard(entry)
            self._left.set()

    def end(self, why: Refused, which: Callable[[Open], bool]) -> None:
        """Cancel some of the requests."""
        for entry in [*self._open]:
            if which(entry):
                entry.end(why)

    async def drain(self, grace_s: float) -> None:
        """Take no further request, end the streams, and wait so long for the calls to finish."""
        self._draining = True
        self.end(shutting_down(), lambda entry: entry.is_stream)
        with anyio.move_on_after(grace_s):
            await self._wait_until_empty()

    async def close(self) -> None:
        """Take no further request and cancel every one that is left."""
        await self.drain(0)
        self.end(shutting_down(), lambda _: True)
        with anyio.move_on_after(_FINISH_S, shield=True):
            await self._wait_until_empty()

    async def _wait_until_empty(self) -> None:
        while self._open:
            self._left = anyio.Event()
            await self._left.wait()


class _Answer:
    """How far the answer to a request has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False
        self._done = False

    async def send(self, message: Message) -> None:
        self._begun = True
        self._done = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)

    async def finish(self, why: Refused) -> None:
        """End the answer where it is; what never began becomes the refusal."""
        if not self._begun:
            raise why
        if not self._done:
            with anyio.move_on_after(_FINISH_S, shield=True):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
