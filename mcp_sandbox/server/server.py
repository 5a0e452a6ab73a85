"""The MCP server: its face to clients and the tools it offers."""

import os
from collections.abc import Callable, Coroutine, Mapping
from importlib import import_module
from typing import Any, get_type_hints
from urllib.parse import quote

from mcp.server import MCPServer, Server
from mcp.server.context import HandlerResult
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.request_state import RequestStateSecurity
from mcp.types import CallToolResult, Icon, InputRequiredResult, NotificationParams

from mcp_sandbox import __version__
from mcp_sandbox.config import CallsConfig
from mcp_sandbox.models import Network, ProjectAccess
from mcp_sandbox.server.errors import protocol_errors
from mcp_sandbox.server.identity import SessionFor, chat_bound
from mcp_sandbox.server.skills.changes import SkillChanges, with_tasks
from mcp_sandbox.server.skills.prompts import SkillPrompts
from mcp_sandbox.server.skills.resources import SkillResources
from mcp_sandbox.server.skills.visible import Disclosure, VisibleSkills
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.server.tool import TOOLS, offer
from mcp_sandbox.server.tools.code import code_tools
from mcp_sandbox.server.tools.files import FILE_TOOLS
from mcp_sandbox.server.tools.sandbox import NETWORK_TOOLS, SANDBOX_TOOLS, process_tools
from mcp_sandbox.server.tools.skills import SKILL_TOOLS
from mcp_sandbox.telemetry.calls import Count

# The SDK imports it whenever a server is made, which may be inside a running event loop.
import_module("rich.logging")

_WHAT = (
    "Your own Linux computer for this conversation: run Python, bash and JavaScript, build, test, "
    "analyse data, keep files. Use it whenever running something beats guessing. Files in "
    "/workspace stay for the whole conversation and after restarts; relative paths start there. "
    "run_code runs a program, exec a shell command; read_file, write_file, edit_file, list_files, "
    "glob and grep work on its files; sandbox_info says what is installed and which limits hold. "
    "What takes long goes on while you do other things: process waits for it, and you are told."
)
_FOLDER = (
    "It is not the user's machine: of the user's files it sees the project folder alone, at "
    "/project, if the client named one, which sandbox_info says"
)
_PROJECT: Mapping[ProjectAccess, str] = {
    "none": "It is not the user's machine: it does not see the user's files, and nothing you do in "
    "it can harm them.",
    "ro": f"{_FOLDER}. It is read-only: copy to /workspace what you want to change.",
    "rw": f"{_FOLDER}. What you change there is changed for the user.",
    "copy": f"{_FOLDER}. It is a copy without .git: what you change there stays here, and "
    "sandbox_info says how the user gets it.",
}
_UNSAFE = (
    "WARNING: isolation is switched off on this server. Code runs on the user's own machine, "
    "with the user's rights and files."
)
_NETWORK = {
    "none": "It has no network: nothing can be downloaded.",
    "allowlist": "It reaches allowed hosts alone, by a proxy; sandbox_info names them, and "
    "network_access asks the user for more.",
    "open": "It can reach the network: packages can be installed.",
}
_BEGUN = "notifications/initialized"
Answer = Callable[..., Coroutine[Any, Any, HandlerResult]]
# Sent with every answer to newer clients, so it is kept very small.
_ICON = (
    "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
    "<path fill='#d9a441' d='M1 2h14v9H1zM5 13h6v1H5z'/>"
    "<path stroke='#222' d='M3 4l3 2.5L3 9m4 0h4' fill='none'/></svg>"
)


class SandboxServer(MCPServer[dict[str, Any]]):
    """The MCP server of this package."""

    @property
    def core(self) -> Server[Any]:
        """What answers messages; transports.py feeds it."""
        return self._lowlevel_server

    def offer_skills(
        self, visible: VisibleSkills, resources: SkillResources, session_for: SessionFor
    ) -> None:
        """Answer with the caller's skills; the SDK's own would not know whose request it is."""
        core, changes = self.core, SkillChanges(visible)
        prompts = SkillPrompts(visible, session_for)
        answers: Mapping[str, Answer] = {
            "resources/list": resources.list,
            "resources/templates/list": resources.templates,
            "resources/read": resources.read,
            "resources/subscribe": changes.subscribe,
            "resources/unsubscribe": changes.unsubscribe,
            "subscriptions/listen": changes.listen,
            "prompts/list": prompts.list,
            "prompts/get": prompts.get,
            "completion/complete": prompts.complete,
        }
        for method, answer in answers.items():
            params = get_type_hints(answer)["params"]
            core.add_request_handler(method, params, protocol_errors(answer))
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
                f"There is no tool {clip(show_name(name), 60)!r}: {offer(name, known, TOOLS)}"
                f"the tools are {', '.join(known)}."
            )
        return await super().call_tool(name, arguments, context)


def build_server(  # noqa: PLR0913 - what the composition root knows
    session_for: SessionFor,
    *,
    network: Network = "none",
    project: ProjectAccess = "none",
    isolated: bool = True,
    count: Count | None = None,
    skills: VisibleSkills | None = None,
    calls: CallsConfig | None = None,
) -> SandboxServer:
    """Return the server with the core tools. It opens no session before a tool is called.

    `count` gets the record of every call that has ended. `skills` are those that it teaches.
    """
    about = [_WHAT, _PROJECT[project], _NETWORK[network]] if isolated else [_WHAT, _UNSAFE]
    warning, calls = "" if isolated else _UNSAFE, calls or CallsConfig()
    tools = [
        *code_tools(calls, note=warning),
        *process_tools(calls),
        *FILE_TOOLS,
        *SANDBOX_TOOLS,
        *(NETWORK_TOOLS if network == "allowlist" else ()),
        *(SKILL_TOOLS if skills else ()),
    ]
    ours = {"session_for": session_for, "count": count}
    resources = SkillResources(skills) if skills else None
    server = SandboxServer(
        "mcp-sandbox",
        title="Sandbox",
        description="Gives each chat its own Linux computer that remembers its files.",
        instructions=" ".join(about),
        version=__version__,
        icons=[Icon(src=f"data:image/svg+xml,{quote(_ICON)}", mime_type="image/svg+xml")],
        tools=[tool.model_copy(update=ours) for tool in tools],
        log_level="WARNING",
        extensions=[resources] if resources else [],
        middleware=[Disclosure(skills)] if skills else [],
        lifespan=with_tasks,
        # A key of this process: what it has asked ends with it.
        request_state_security=RequestStateSecurity(
            keys=[os.urandom(32)], bind_principal=chat_bound
        ),
    )
    if skills and resources:
        server.offer_skills(skills, resources, session_for)
    return server
