"""What the proxy asks the server about one chat, as only that has keys, secrets and records."""

import os
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread

from mcp_sandbox.egress.process.mask import Header, Mask
from mcp_sandbox.egress.rules import EgressRule, read_rule
from mcp_sandbox.egress.targets import RefusedError, Target

Ask = Callable[..., Awaitable[dict[str, Any]]]
_LEAF_S, _MOST_LEAVES = 3600.0, 64


class Keeper:
    """Asks for one chat, by `ask`; secrets are `bound` to hosts by these rules."""

    def __init__(self, ask: Ask, bound: Sequence[EgressRule] = ()) -> None:
        self._ask, self._bound = ask, bound
        self._contexts: dict[Target, tuple[float, ssl.SSLContext]] = {}

    async def grants(self) -> Sequence[EgressRule]:
        """Return the rules that a person has made for the chat."""
        answer = await self._ask("grants")
        return [read_rule(each) for each in answer.get("grants", ())]

    def is_bound(self, target: Target) -> bool:
        """Return whether requests to the target may carry a secret."""
        return any(rule.covers(target) for rule in self._bound)

    async def fill(
        self, target: Target, headers: Sequence[Header]
    ) -> tuple[list[Header], Mask | None]:
        """Return the headers with values in place of placeholders, and the mask for the answer.

        Raises RefusedError: a value cannot be read.
        """
        if not self.is_bound(target):
            return list(headers), None
        answer = await self._asked("fill", target, headers=write_headers(headers))
        return read_headers(answer["headers"]), Mask(
            value.encode("latin-1") for value in answer["values"]
        )

    async def context(self, target: Target) -> ssl.SSLContext:
        """Return the TLS context to act as the server of this name.

        Raises RefusedError: no rule of the chat opens the target, or no certificate can be made.
        """
        now_s = anyio.current_time()
        made_s, known = self._contexts.get(target, (now_s, None))
        if known and made_s + _LEAF_S > now_s:
            return known
        answer = await self._asked("leaf", target)
        if len(self._contexts) >= _MOST_LEAVES:
            del self._contexts[next(iter(self._contexts))]
        leaf = answer["leaf"].encode("ascii")
        context = await anyio.to_thread.run_sync(_server_context, leaf)
        self._contexts[target] = now_s, context
        return context

    async def _asked(self, what: str, target: Target, **said: object) -> dict[str, Any]:
        answer = await self._ask(what, host=target.host, port=target.port, **said)
        if "refused" in answer:
            raise RefusedError(answer["refused"], answer["verdict"])
        return answer


def write_headers(headers: Sequence[Header]) -> list[list[str]]:
    """Return headers as they are told: their bytes as characters."""
    return [[name.decode("latin-1"), text.decode("latin-1")] for name, text in headers]


def read_headers(told: list[list[str]]) -> list[Header]:
    """Return headers that were told."""
    return [(name.encode("latin-1"), text.encode("latin-1")) for name, text in told]


def _server_context(leaf: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    # The library reads certificates only from files, so this file is in memory.
    with os.fdopen(os.memfd_create("leaf"), "wb") as stream:
        stream.write(leaf)
        stream.flush()
        context.load_cert_chain(f"/proc/self/fd/{stream.fileno()}")
    return context
