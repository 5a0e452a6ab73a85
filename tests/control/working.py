"""The API over HTTP, in front of real sandboxes without walls."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import uvicorn
from fastapi import FastAPI
from starlette.types import Scope

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.control.work import answer_problem, work
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.web.clients import http_client


@dataclass(frozen=True)
class Working:
    """A client in one chat, `http`, whose addresses are below that of its session."""

    url: str
    session_id: str
    http: httpx2.AsyncClient
    manager: SessionManager

    async def exec(self, command: str, **more: Any) -> Any:
        """The last line of the answer to a command."""
        response = await self.http.post("exec", json={"command": command, **more})
        assert response.status_code == 200, response.text
        return json.loads(response.text.splitlines()[-1])

    async def stdout(self, command: str, **more: Any) -> str:
        text: str = (await self.exec(command, **more))["data"]["stdout"]
        return text


@asynccontextmanager
async def working(data: Path, **settings: Any) -> AsyncGenerator[Working]:
    app = FastAPI()
    app.include_router(work)

    app.add_exception_handler(SandboxError, answer_problem)
    given = {"policy": {"profile": "off"}, **settings}
    config = Config.model_validate({"data_dir": data, "backend": "unsafe-local", **given})
    with anyio.fail_after(50):
        async with open_manager(config) as manager:

            async def session(_: Scope, name: str) -> Session:
                return await manager.session(ChatId("local", name), judged=True)

            @app.get("/api/sandbox/{name}/status")
            async def status(name: str) -> dict[str, Any]:
                rows = [each for each in await manager.list() if each.chat.chat == name]
                found = rows[0].sandbox_id if rows else None
                return {
                    "data": {
                        "sessionId": name,
                        "status": "running" if found else "warm",
                        "providerSandboxId": found,
                        "provider": "unsafe-local",
                    }
                }

            app.state.control = SimpleNamespace(session=session)
            server = uvicorn.Server(
                uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
            )
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.serve)
                while not server.started:
                    await anyio.sleep(0.01)
                port = server.servers[0].sockets[0].getsockname()[1]
                url = f"http://127.0.0.1:{port}"
                async with http_client(base_url=f"{url}/api/sandbox/work/", timeout=30) as http:
                    yield Working(url, "work", http, manager)
                server.should_exit = True
            for listener in server.servers:
                listener.close()
