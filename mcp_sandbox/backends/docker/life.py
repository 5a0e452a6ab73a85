"""How a container is doing: paused, resumed, and what it died of."""

import time
from collections.abc import Iterable
from typing import Any, cast

import anyio
import docker
import requests
from docker import errors as docker_errors

from mcp_sandbox.backends.docker.client import Connection
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import Ending

# The engine tells of an end a moment after the connection has felt it.
_TOLD_S = 2.0
_ASK_AGAIN_S = 0.05
_KILLED = 128 + 9
# A process that the kernel ends for want of memory may be long in dying.
_SHORTLY_NS = 10 * 10**9


class Life:
    """The containers of one engine, by name."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def pause(self, name: str) -> None:
        """Stop all that runs in a container.

        Raises:
            SandboxGone: it does not run.
            BackendUnavailable: the engine cannot do it.
        """
        await self._switch(name, paused=True)

    async def resume(self, name: str) -> None:
        """Let all go on in a container; one that is not paused is fine.

        Raises:
            SandboxGone: it does not run.
        """
        await self._switch(name, paused=False)

    async def _switch(self, name: str, *, paused: bool) -> None:
        def work(api: docker.APIClient) -> None:
            try:
                if bool(_state(api, name)["Paused"]) == paused:
                    return
                (api.pause if paused else api.unpause)(name)
            except docker_errors.APIError as exc:
                if exc.status_code in (requests.codes.not_found, requests.codes.conflict):
                    raise SandboxGone(
                        f"sandbox {name} no longer runs; the next call starts a new one on the "
                        "same files"
                    ) from exc
                raise

        await self._call(work)

    async def ending(self, name: str, within_s: float) -> Ending | None:
        """What a container ended of; None if it still runs after `within_s`."""
        runs_until = anyio.current_time() + within_s
        told_until = runs_until + _TOLD_S
        while True:
            running, ending = await self._call(lambda api: _look(api, name))
            now = anyio.current_time()
            if ending or (running and now >= runs_until):
                return ending
            if now >= told_until:
                return "lost"
            await anyio.sleep(_ASK_AGAIN_S)


def _state(api: docker.APIClient, name: str) -> dict[str, Any]:
    return cast("dict[str, Any]", api.inspect_container(name)["State"])


def _look(api: docker.APIClient, name: str) -> tuple[bool, Ending | None]:
    """Whether it runs, and what it ended of as far as the engine says already."""
    try:
        state = _state(api, name)
    except docker_errors.NotFound:
        state = {"Running": False}
    if state["Running"]:
        return True, None
    filters = {"type": "container", "container": name, "event": ["oom", "kill", "die"]}
    # Only what has been: it is not waited for. The library's types know whole seconds only.
    until = cast("int", f"{time.time():.9f}")
    events = api.events(since=1, until=until, filters=filters, decode=True)
    try:
        return False, _ending(events)
    finally:
        events.close()


def _ending(events: Iterable[dict[str, Any]]) -> Ending | None:
    """From a container's own events; None when its end is not among them."""
    out_of_memory_at, killed = 0, False
    for event in events:
        if event["Action"] == "oom":
            out_of_memory_at = event["timeNano"]
        elif event["Action"] == "kill":
            killed = True
        elif event["Action"] == "die":
            code = int(event["Actor"]["Attributes"].get("exitCode", -1))
            starved = event["timeNano"] - out_of_memory_at < _SHORTLY_NS
            if code == _KILLED:
                return "memory" if starved and not killed else "killed"
            return "failed" if code else "ended"
    return None
