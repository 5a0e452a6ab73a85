"""Tools about what goes on between the calls."""

from functools import partial
from typing import Annotated, Literal

from mcp.types import CallToolResult
from pydantic import Field

from mcp_sandbox.config.models import CallsConfig
from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.runtime.processes import Stop
from mcp_sandbox.server.identity import Request, SessionFor
from mcp_sandbox.server.results import exec_result, process_list
from mcp_sandbox.server.tool import CHANGES, SandboxTool, build_tool, patience
from mcp_sandbox.server.tools.code import WAIT_S, Until, live_progress, waits
from mcp_sandbox.server.tools.parameters import Path
from mcp_sandbox.sessions.session import Session

_TAKES = {
    "list": (),
    "wait": ("id", "until", "tail"),
    "stop": ("id",),
}
Action = Literal["list", "wait", "stop"]


async def process(
    session: Session,
    request: Request,
    action: Action,
    *,
    id: Annotated[Path | None, Field(description="As the result of exec named it.")] = None,  # noqa: A002
    wait_s: float = WAIT_S,
    until: Until | None = None,
    tail: Annotated[int, Field(ge=1, le=2000, description="wait: last lines only.")] | None = None,
    signal: Annotated[Stop, Field(description="stop: for its process group.")] = "TERM",
    grace_s: Annotated[
        float, Field(ge=0, le=30, description="stop: seconds until its whole tree is killed.")
    ] = 5,
) -> CallToolResult:
    """Look after what exec and run_code have left running in the background.

    list: what runs, and what has ended lately. wait: until it ends, until a text is printed or
    wait_s is over; answers what was printed since the last look. stop: end it. You are told of
    each end without asking.
    """
    given = {"id": id, "until": until, "tail": tail}
    for name, value in given.items():
        if value is not None and name not in _TAKES[action]:
            raise InvalidArgument(f"{name} has no meaning with action={action}: leave it out")
    if action == "list":
        return process_list(await session.processes.list())
    if id is None:
        raise InvalidArgument(f"id is missing: action={action} needs it, action=list shows all")
    if action == "stop":
        return exec_result(await session.processes.stop(id, signal, grace_s=grace_s))
    async with live_progress(session, request) as on_output:
        result = await session.processes.wait(
            id,
            wait_s=wait_s,
            until=until,
            whole=tail is not None,
            on_output=on_output,
            leave=patience(request).leave,
        )
    return exec_result(result, tail=tail)


def process_tools(session_for: SessionFor, *, calls: CallsConfig) -> list[SandboxTool]:
    """The tool `process`."""
    tool = partial(build_tool, session_for=session_for, annotations=CHANGES)
    wait = {"wait_s": waits(calls.longest_wait)}
    return [tool(process, title="Processes in the background", bounds=wait)]
