"""The MCP server: its face to clients and the tools it offers."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any
from urllib.parse import quote

from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.message import SessionMessage
from mcp.types import CallToolResult, Icon, InputRequiredResult, NotificationParams

from mcp_sandbox import __version__
from mcp_sandbox.models import Network, ProjectAccess
from mcp_sandbox.server.identity import SessionFor
from mcp_sandbox.server.observer import CallCounter, Observer
from mcp_sandbox.server.skills.answers import answers
from mcp_sandbox.server.skills.changes import SkillChanges, declared, with_tasks
from mcp_sandbox.server.skills.disclosure import Disclosure
from mcp_sandbox.server.skills.extension import SkillsExtension
from mcp_sandbox.server.skills.visible import Visible
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.server.tools.code import code_tools
from mcp_sandbox.server.tools.files import file_tools
from mcp_sandbox.server.tools.sandbox import sandbox_tools
from mcp_sandbox.server.tools.skills import skill_tools
from mcp_sandbox.server.words import TOOLS, offered

# The SDK imports it whenever a server is made, which may be inside a running event loop.
import_module("rich.logging")

_WHAT = (
    "Your own Linux computer for this conversation: run Python, bash and JavaScript, build, test, "
    "analyse data, keep files. Use it whenever running something beats guessing. Files in "
    "/workspace stay for the whole conversation and after restarts; relative paths start there. "
    "run_code runs a program, exec a shell command; read_file, write_file, edit_file, list_files, "
    "glob and grep work on its files; sandbox_info says what is installed and which limits hold."
)
_APART = (
    "It is not the user's machine: it does not see the user's files, and nothing you do in it can "
    "harm them."
)
_PROJECT: Mapping[ProjectAccess, str] = {
    "none": _APART,
    "ro": "It is not the user's machine: of the user's files it sees the project folder alone, at "
    "/project, read-only. Copy to /workspace what you want to change.",
    "rw": "It is not the user's machine: of the user's files it sees the project folder alone, at "
    "/project. What you change there is changed for the user.",
    "copy": "It is not the user's machine: of the user's files it sees a copy of the project "
    "folder, at /project. What you change there stays here.",
}
_UNSAFE = (
    "WARNING: isolation is switched off on this server. Code runs on the user's own machine, "
    "with the user's rights and files."
)
_NETWORK = {
    "none": "It has no network: nothing can be downloaded.",
    "open": "It can reach the network: packages can be installed.",
}
_BEGUN = "notifications/initialized"
# Sent with every answer to newer clients, so it is kept very small.
_ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
    "<path fill='#d9a441' d='M1 2h14v9H1zM5 13h6v1H5z'/>"
    "<path stroke='#222' d='M3 4l3 2.5L3 9m4 0h4' fill='none'/></svg>"
)


class SandboxServer(MCPServer[dict[str, Any]]):
    """The MCP server of this package; transports.py feeds it."""

    async def serve(
        self,
        read_stream: MemoryObjectReceiveStream[SessionMessage | Exception],
        write_stream: MemoryObjectSendStream[SessionMessage],
    ) -> None:
        """Serve one client until it closes its side; running calls are cancelled then."""
        core = self._lowlevel_server
        await core.run(read_stream, write_stream, core.create_initialization_options())

    def http_sessions(self, *, max_body: int, idle_s: float) -> StreamableHTTPSessionManager:
        """The SDK's Streamable HTTP on this server; who may reach it is not its concern."""
        return StreamableHTTPSessionManager(
            self._lowlevel_server, max_request_body_size=max_body, session_idle_timeout=idle_s
        )

    def offer_skills(self, visible: Visible, session_for: SessionFor) -> None:
        """Answer requests about resources and prompts with the caller's skills."""
        core, changes = self._lowlevel_server, SkillChanges(visible)
        for method, params, answer in answers(visible, session_for, changes):
            core.add_request_handler(method, params, answer)
        core.add_notification_handler(_BEGUN, NotificationParams, changes.begin)

    async def call_tool(
        self,
        name: str,
        arguments: dict[str, Any],
        context: Context[dict[str, Any], Any] | None = None,
    ) -> CallToolResult | InputRequiredResult:
        """Call a tool; an unknown name is answered with the known ones."""
        if self._tool_manager.get_tool(name) is None:
            known = [tool.name for tool in self._tool_manager.list_tools()]
            raise ToolError(
                f"There is no tool {clip(show_name(name), 60)!r}: {offered(name, known, TOOLS)}"
                f"the tools are {', '.join(known)}."
            )
        return await super().call_tool(name, arguments, context)


def build_server(
    session_for: SessionFor,
    *,
    network: Network = "none",
    project: ProjectAccess = "none",
    isolated: bool = True,
    counter: CallCounter | None = None,
    skills: Visible | None = None,
) -> SandboxServer:
    """The server with the twelve core tools. It opens no session before a tool is called.

    `counter` is told of every call that has ended. `skills` are those that it teaches.
    """
    about = [_WHAT, _PROJECT[project], _NETWORK[network]] if isolated else [_WHAT, _UNSAFE]
    warning = "" if isolated else _UNSAFE
    observer = Observer(counter)
    tools = [
        *code_tools(session_for, note=warning),
        *file_tools(session_for),
        *sandbox_tools(session_for),
        *(skill_tools(session_for) if skills else ()),
    ]
    server = SandboxServer(
        "mcp-sandbox",
        title="Sandbox",
        description="Gives each chat its own Linux computer that remembers its files.",
        instructions=" ".join(about),
        version=__version__,
        icons=[Icon(src=f"data:image/svg+xml,{quote(_ICON)}", mime_type="image/svg+xml")],
        tools=[tool.observed_by(observer) for tool in tools],
        log_level="WARNING",
        extensions=[SkillsExtension(skills)] if skills else [],
        middleware=[declared, Disclosure(skills)] if skills else [],
        lifespan=with_tasks,
    )
    if skills:
        server.offer_skills(skills, session_for)
    return server
