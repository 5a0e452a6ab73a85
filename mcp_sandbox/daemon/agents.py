"""A coding agent at work in a chat for a person: what it does is told as it happens."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict

from mcp_sandbox.agents.messages import MOST_BYTES
from mcp_sandbox.agents.run import Agent
from mcp_sandbox.daemon.acceptor import Connection
from mcp_sandbox.daemon.client import JsonObject
from mcp_sandbox.daemon.daemon import while_connected
from mcp_sandbox.errors import SandboxError, TooLarge

_GIVEN = ("assistant", "chat", "connector", "timeout_s")


class Agents:
    """The conversation `agent`; `opening` opens one as `open_agent` does."""

    def __init__(self, opening: Callable[..., AbstractAsyncContextManager[Agent]]) -> None:
        self._opening = opening
        self._in_use = set[str]()

    async def agent(self, arguments: JsonObject, connection: Connection) -> None:
        """Have an agent do what a prompt of `size` bytes says, or `check` what it has.

        It ends when the client hangs up. Raises TooLarge.
        """
        if (size := int(arguments["size"])) > MOST_BYTES:
            raise TooLarge(f"the prompt has {size:,} bytes; at most {MOST_BYTES:,} can be sent")
        prompt = (await connection.receive_exactly(size)).decode(errors="replace")
        given = {name: arguments[name] for name in _GIVEN if arguments.get(name)}
        async with while_connected(connection):
            try:
                async with self._opening(**given) as agent:
                    result: JsonObject = {}
                    if arguments.get("check"):
                        result = await agent.check()
                    else:
                        agent.in_use = self._in_use
                        await _run(agent, prompt, bool(arguments.get("resume")), connection)
                await connection.tell({"result": result})
            except SandboxError as exc:
                await connection.tell({"error": str(exc)})


async def _run(agent: Agent, prompt: str, resume: bool, connection: Connection) -> None:
    asked = [{"role": "user", "content": prompt}]
    async with aclosing(agent.stream(asked, resume=resume)) as events:
        async for event in events:
            await connection.tell({"event": {"type": type(event).__name__, **asdict(event)}})
