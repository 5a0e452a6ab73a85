"""Tools that run something."""

from typing import Annotated

from mcp.types import CallToolResult, ToolAnnotations
from pydantic import Field

from mcp_sandbox.server.hints import hints
from mcp_sandbox.server.identity import Request, SessionFor
from mcp_sandbox.server.progress import live_progress
from mcp_sandbox.server.results import exec_result, with_news
from mcp_sandbox.server.tool import SandboxTool, build_tool
from mcp_sandbox.server.tools.parameters import Code, Env, LanguageName, Path, Text
from mcp_sandbox.sessions.session import Session

CodeTimeout = Annotated[float, Field(ge=1, le=300, description="Seconds until it is killed.")]
ExecTimeout = Annotated[float, Field(ge=1, le=3600, description="Seconds until it is killed.")]


async def run_code(
    session: Session,
    request: Request,
    code: Code,
    *,
    language: LanguageName = "python",
    timeout_s: CodeTimeout = 30,
) -> CallToolResult:
    """Run Python, bash or JavaScript code and see what it prints.

    Every call is a fresh process in /workspace: keep what you need in files. Use print() to see
    values. JavaScript takes import, require and top-level await. Answers stdout, stderr, a
    non-zero exit code and the files created or changed.
    """
    async with live_progress(request):
        result = await session.run_code(code, language, timeout_s=timeout_s)
    said = await hints(result, code, language)
    return with_news(exec_result(result, timeout_s=timeout_s), said)


async def exec_(
    session: Session,
    request: Request,
    command: Code,
    *,
    cwd: Annotated[Path | None, Field(description="Default: /workspace.")] = None,
    env: Annotated[Env, Field(description="Additional variables.")] = None,
    stdin: Text | None = None,
    timeout_s: ExecTimeout = 120,
) -> CallToolResult:
    """Run a bash command line: pipes, git, builds, tests, package managers.

    Each call is a new shell; cd and variables do not carry over. Answers stdout, stderr, a
    non-zero exit code and the files created or changed. Processes left in the background are not
    waited for.
    """
    async with live_progress(request) as on_output:
        result = await session.exec(
            command, cwd=cwd, env=env, stdin=stdin, timeout_s=timeout_s, on_output=on_output
        )
    said = await hints(result, command, "bash")
    return with_news(exec_result(result, timeout_s=timeout_s), said)


def code_tools(session_for: SessionFor, *, note: str) -> list[SandboxTool]:
    """run_code and exec; `note` is added to their descriptions."""
    runs_anything = ToolAnnotations(
        read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=True
    )
    return [
        build_tool(run_code, session_for, title="Run code", annotations=runs_anything, note=note),
        build_tool(exec_, session_for, title="Run a command", annotations=runs_anything, note=note),
    ]
