"""The proxy that programs inside speak to: CONNECT and HTTP/1.1 with whole URLs, nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anyio.abc import ByteStream

from mcp_sandbox.egress.authority import Authority
from mcp_sandbox.egress.rules import Rule, Rules, Verdict
from mcp_sandbox.egress.secrets import Secrets
from mcp_sandbox.egress.targets import RefusedError, Target
from mcp_sandbox.models import ChatId

Note = Callable[[Target | None, Verdict | RefusedError, int, int, float], None]
"""Told once a connection to a target, and once a refusal: bytes out, bytes in, milliseconds."""


@dataclass(frozen=True)
class Way:
    """Whose connections these are, and what they may."""

    chat: ChatId
    grants: Callable[[], Sequence[Rule]]
    note: Note


def refusal(target: Target | None, why: Verdict | RefusedError, times: int = 1) -> str:
    """Return the sentence that a client reads in the answer, and the agent in its news."""
    often = f", {times} times" if times > 1 else ""
    reason = why.reason if isinstance(why, Verdict) else str(why)
    return f"refused {target or 'a request'}{often}: {reason}"


class Proxy:
    """One for all sandboxes of a server.

    Raises:
        ConfigError: `upstream` is no http://HOST:PORT.
    """

    def __init__(
        self, rules: Rules, authority: Authority, secrets: Secrets, *, upstream: str = ""
    ) -> None:
        raise NotImplementedError

    async def serve(self, stream: ByteStream, way: Way) -> None:
        """Serve one connection to its end, whatever comes."""
        raise NotImplementedError
