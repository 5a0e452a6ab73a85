"""The application below /api/: every answer is `{"data": …}` or a problem document."""

from collections.abc import Mapping
from typing import cast

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

from mcp_sandbox import __version__
from mcp_sandbox.control.lifecycle import Control, lifecycle
from mcp_sandbox.control.work import Json, problem, work
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.sessions.session import Session


def make_app(control: Control) -> FastAPI:
    """Return the API over `control`; the guard in front of it says whose each request is."""
    app = FastAPI(
        title="mcp-sandbox",
        version=__version__,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        default_response_class=Json,
    )
    app.include_router(lifecycle)
    app.include_router(work)
    app.state.control = control

    async def session(request: Request, session_id: str) -> Session:
        return await control.session(request.scope, session_id)

    app.state.session = session

    @app.exception_handler(SandboxError)
    async def tell(_: Request, exc: SandboxError) -> Response:
        return _problem(problem(exc))

    @app.exception_handler(RequestValidationError)
    async def tell_field(_: Request, exc: RequestValidationError) -> Response:
        first = exc.errors()[0]
        field = ".".join(map(str, first["loc"][1:])) or "the body"
        told = f"{field}: {first['msg']}"
        return _problem({"title": "InvalidArgument", "status": 400, "detail": told, "field": field})

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def tell_http(_: Request, exc: Exception) -> Response:
        found = cast("HTTPException", exc)
        told = "there is no such address or method: /api/openapi.json lists them"
        return _problem({"title": "NotFound", "status": found.status_code, "detail": told})

    return app


def _problem(told: Mapping[str, object]) -> Response:
    return Json(told, int(str(told["status"])), media_type="application/problem+json")
