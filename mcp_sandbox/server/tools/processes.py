"""Tools about what runs in the sandbox."""

from typing import Annotated
from urllib.parse import quote

from mcp.types import CallToolResult
from pydantic import AfterValidator, Field, StringConstraints

from mcp_sandbox.errors import NotPermitted
from mcp_sandbox.server.identity import Request, SessionFor
from mcp_sandbox.server.results import texts
from mcp_sandbox.server.tool import CHANGES, SandboxTool, build_tool
from mcp_sandbox.sessions.session import Session


def _beginning_at_the_root(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("begin with /, as in /index.html: the rest of the address is made here")
    return quote(path, safe="/?#[]@!$&'()*+,;=%:~")


Port = Annotated[int, Field(ge=1, le=65_535)]
UrlPath = Annotated[str, StringConstraints(max_length=2000), AfterValidator(_beginning_at_the_root)]
PreviewWait = Annotated[float, Field(ge=0, le=55)]


async def preview(
    session: Session, request: Request, port: Port, path: UrlPath = "/", wait_s: PreviewWait = 20
) -> CallToolResult:
    """Get an address at which the user's browser shows a web server that runs in this computer.

    Start the server in the background first. Waits until it listens on the port of 127.0.0.1.
    """
    if request.request_context.request is not None:
        raise NotPermitted(
            "there are no previews over HTTP: the address would be one of the sandbox server's "
            f"machine, not of the user's. Look yourself: curl http://127.0.0.1:{port}/ with exec"
        )
    address = await session.previews.open(port, wait_s=wait_s)
    said = f"{address}{path}\nGive the user this address: it opens in a browser on their machine, "
    said += f"as long as this sandbox lives. In here it is http://127.0.0.1:{port}{path}"
    return texts([said], {"address": address + path})


def process_tools(session_for: SessionFor) -> list[SandboxTool]:
    """The tool preview."""
    opens = CHANGES.model_copy(update={"destructive_hint": False, "idempotent_hint": True})
    return [build_tool(preview, session_for, title="Preview a web page", annotations=opens)]
