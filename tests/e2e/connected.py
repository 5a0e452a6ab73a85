"""A home in which `init` connects clients: through the relay, or over HTTP with a token."""

import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from mcp_sandbox.config import DockerConfig
from mcp_sandbox.config.environment import default_socket, having_variables
from tests.daemon.http import Served, serving
from tests.daemon.running import Place, command, control, place

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Home:
    """Where a user works. `reach`: what `init` is told of the server; `served`: over HTTP."""

    place: Place
    reach: Sequence[str] = ()
    token: Mapping[str, str] = field(default_factory=dict[str, str])
    served: Served | None = None

    @property
    def variables(self) -> dict[str, str]:
        known = {name: os.environ[name] for name in ("PATH", "DOCKER_HOST") if name in os.environ}
        return {**known, **self.token, "HOME": str(self.place.home)}

    async def init(self, client: str, folder: Path) -> str:
        """Connect the client in a folder; returns what is printed."""
        start = [sys.executable, "-m", "mcp_sandbox", "init", client, "--yes", "--no-check"]
        env = {**self.variables, "PYTHONPATH": str(ROOT)}
        done = await anyio.run_process([*start, *self.reach], cwd=folder, env=env)
        return done.stdout.decode()

    async def of_user(self, user: str) -> "Home":
        """The same with a token of this user."""
        assert self.served is not None
        _, secret = await self.served.token(user)
        return replace(self, token={"SANDBOX_TOKEN": secret})

    async def chats(self) -> list[dict[str, Any]]:
        """What the daemon knows of all chats."""
        found: list[dict[str, Any]] = (await control(self.place, "list"))["result"]["chats"]
        return found


@asynccontextmanager
async def by_relay(folder: Path, backend: str) -> AsyncGenerator[Home]:
    """The client starts a relay, which starts the daemon; that is asked to end.

    The settings are in a file: the Inspector gives its servers hardly any variables.
    """
    with having_variables({"HOME": str(folder)}):
        socket = default_socket()
    found = Place(folder, socket, folder / "data", backend)
    settings = folder / ".config" / "mcp-sandbox" / "mcp-sandbox.yaml"
    settings.parent.mkdir(parents=True)
    image = os.environ.get("MCP_SANDBOX_DOCKER__IMAGE", DockerConfig().image)
    docker = f"docker:\n  image: {image}\n"
    settings.write_text(f"backend: {backend}\ndata_dir: {found.data}\n{docker}")
    try:
        yield Home(found)
    finally:
        if found.socket.exists():
            # This waits until its process has gone.
            done = await command(found, "shutdown")
            assert done.code == 0, done.err


@asynccontextmanager
async def by_http(folder: Path, backend: str) -> AsyncGenerator[Home]:
    """A daemon serves on loopback, with tokens."""
    async with serving(place(folder, backend), limit_s=300) as served:
        home = Home(served.place, reach=("--http", served.url), served=served)
        yield await home.of_user("ann")
