"""Tools about the sandbox itself, what goes on in it between calls, and the hosts it reaches."""

import re
from typing import Annotated, Literal
from urllib.parse import quote

from mcp.types import CallToolResult
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from mcp_sandbox.config.sections import CallsConfig
from mcp_sandbox.errors import InvalidArgument, NotPermitted
from mcp_sandbox.server import results
from mcp_sandbox.server.identity import Request, is_over_http
from mcp_sandbox.server.text import show
from mcp_sandbox.server.tool import (
    CHANGES,
    READS,
    Path,
    SandboxTool,
    Text,
    build_tool,
    find_client_timeout,
)
from mcp_sandbox.server.tools.code import WAIT_S, Until, live_progress, shown, waits
from mcp_sandbox.sessions.session import Session


def _without_path(host: object) -> object:
    """Return the HOST:PORT of an address such as https://HOST:PORT/PATH."""
    return address[1] if isinstance(host, str) and (address := _ADDRESS.match(host)) else host


_ADDRESS = re.compile(r"(?:https?|wss?|git|ssh)://(?:[^/?#@]{0,200}@)?([^/?#@]{1,260})")
Host = Annotated[
    str, BeforeValidator(_without_path), StringConstraints(min_length=1, max_length=260)
]
Hosts = Annotated[
    list[Host],
    Field(min_length=1, max_length=10, description="HOST or HOST:PORT; without a port 80 and 443."),
]
Reason = Annotated[
    str, Field(min_length=1, max_length=400, description="Why, in a few words for the user.")
]


async def network_access(
    session: Session,
    hosts: Hosts,
    reason: Reason,
    write: Annotated[bool, Field(description="Also upload and change, not only read.")] = False,
) -> CallToolResult:
    """Ask the user to let this computer reach hosts, when a connection was refused.

    Name at once all that the task needs: a package often comes from other hosts than its index.
    """
    return results.texts([show(await session.network_access(hosts, reason, write=write))], {})


_ASKS = CHANGES.model_copy(update={"destructive_hint": False, "open_world_hint": True})
NETWORK_TOOLS = [build_tool(network_access, title="Ask for network access", annotations=_ASKS)]


async def sandbox_info(session: Session) -> CallToolResult:
    """Describe this computer: languages and tools found, network, limits, disk space."""
    return results.format_sandbox(await session.info())


async def sandbox_reset(
    session: Session,
    keep_files: Annotated[bool, Field(description="false: also empty /workspace.")] = True,
) -> CallToolResult:
    """Start this computer anew: kills every process and clears /tmp. Files are kept by default."""
    return results.texts([show(await session.reset(keep_files=keep_files))], {})


_RESETS, _INFO = CHANGES.model_copy(update={"idempotent_hint": True}), results.SandboxInfoReport
SANDBOX_TOOLS = [
    build_tool(sandbox_info, title="Describe the sandbox", annotations=READS, output=_INFO),
    build_tool(sandbox_reset, title="Reset the sandbox", annotations=_RESETS),
]


def _beginning_at_the_root(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("begin with /, as in /index.html: the rest of the address is made here")
    return quote(path, safe="/?#[]@!$&'()*+,;=%:~")


Port = Annotated[int, Field(ge=1, le=65_535)]
UrlPath = Annotated[str, StringConstraints(max_length=2000), AfterValidator(_beginning_at_the_root)]
PreviewWait = Annotated[float, Field(ge=0, le=55)]
_TAKES = {
    "list": (),
    "wait": ("id", "until", "tail"),
    "input": ("id", "text", "key", "until"),
    "stop": ("id",),
}
Action = Literal["list", "wait", "input", "stop"]


async def process(
    session: Session,
    request: Request,
    action: Action,
    *,
    id: Annotated[Path | None, Field(description="As exec or list named it.")] = None,  # noqa: A002
    wait_s: float = WAIT_S,
    until: Until | None = None,
    tail: Annotated[int, Field(ge=1, le=2000, description="wait: last lines only.")] | None = None,
    text: Annotated[Text | None, Field(description="input: to be typed.")] = None,
    key: Annotated[Path | None, Field(description="input: then a key: enter, up, ctrl-c.")] = None,
    signal: Annotated[Path, Field(description="stop: for its process group.")] = "TERM",
    grace_s: Annotated[
        float, Field(ge=0, le=30, description="stop: seconds until its whole tree is killed.")
    ] = 5,
) -> CallToolResult:
    """Look after what exec and run_code have left running in the background.

    list: what runs, by & or setsid too, and what has ended lately. wait: until it ends, until a
    text is printed or wait_s is over; answers what was printed since the last look. input: type on
    the terminal of what exec started with tty=true, and see its screen once it rests, or until a
    text is printed. stop: end it. You are told of each end without asking.
    """
    for name, value in {"id": id, "until": until, "tail": tail, "text": text, "key": key}.items():
        if value is not None and name not in _TAKES[action]:
            raise InvalidArgument(f"{name} has no meaning with action={action}: leave it out")
    if action == "list":
        return results.format_processes(await session.processes.list())
    if id is None:
        raise InvalidArgument(f"id is missing: action={action} needs it, action=list shows all")
    if action == "stop":
        ended = await session.processes.stop(id, signal, grace_s=grace_s)
        return results.format_exec(await shown(ended), known=True)
    async with live_progress(session, request) as on_output:
        result = await session.processes.wait(
            id,
            wait_s=wait_s,
            until=until,
            whole=tail is not None,
            typed=(text or "", key) if action == "input" else None,
            on_output=on_output,
            leave=find_client_timeout(request).leave,
        )
    return results.format_exec(await shown(result), tail=tail or 0, known=True)


async def preview(
    session: Session, request: Request, port: Port, path: UrlPath = "/", wait_s: PreviewWait = 20
) -> CallToolResult:
    """Get an address at which the user's browser shows a web server that runs in this computer.

    Start the server in the background first. Waits until it listens on the port of 127.0.0.1.
    """
    if is_over_http(request) and not session.previews.has_listener:
        raise NotPermitted(
            "there are no previews over HTTP: without previews.listen the address would be of the "
            f"server's machine alone. Look yourself: curl http://127.0.0.1:{port}/ with exec"
        )
    address = await session.previews.open(port, wait_s=wait_s)
    text = f"{address}{path}\nGive the user this address: it opens in a browser on their machine, "
    text += f"as long as this sandbox lives. In here it is http://127.0.0.1:{port}{path}"
    return results.texts([text], {"address": address + path})


def process_tools(calls: CallsConfig) -> list[SandboxTool]:
    """Return the tools process and preview."""
    wait = {"wait_s": waits(calls.longest_wait)}
    opens = CHANGES.model_copy(update={"destructive_hint": False, "idempotent_hint": True})
    return [
        build_tool(process, title="Processes in the background", annotations=CHANGES, bounds=wait),
        build_tool(preview, title="Preview a web page", annotations=opens),
    ]
