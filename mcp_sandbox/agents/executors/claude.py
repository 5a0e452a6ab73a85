"""The Claude command line, as of version 2.1.332."""

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, ClassVar, Literal

from pydantic import Field

from mcp_sandbox.agents import events as event_types
from mcp_sandbox.agents.executors.base import ModelAccess, Program, Run, Word
from mcp_sandbox.agents.messages import PromptInput
from mcp_sandbox.errors import InvalidArgument

_ENVIRONMENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    **dict.fromkeys(("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER"), "1"),
    # Tools of the host are there from the first request on, and have more time than the host gives.
    "ENABLE_TOOL_SEARCH": "false",
    "MCP_CONNECTION_NONBLOCKING": "0",
    "MCP_TOOL_TIMEOUT": "90000",
}
# Another run may make the link at the same time.
_PREPARE = """
if [ -d /opt/skills ] && ! [ -e .claude/skills -o -L .claude/skills ]; then
  mkdir -p .claude && ln -sT /opt/skills .claude/skills || [ -e .claude/skills ] || exit
fi
[ -z "$1" ] || python3 -ISc 'import glob, os, sys
print(max(glob.glob(sys.argv[1]), key=os.path.getmtime, default=""))
' ~/.claude/projects/"*/${1%-*}-*.jsonl" || true
"""
# The router, which asks a service of the other protocol, has the run's folder for its home.
_ROUTER = ".claude-code-router/config.json"
_ROUTED = """
command -v ccr >/dev/null || { echo "no program ccr, which openai connectors need" >&2; exit 127; }
port=$1; shift
HOME=$0 ccr start </dev/null >"$0/router.log" 2>&1 &
trap "kill -9 $!; wait $!" EXIT
until python3 -ISc "import socket; socket.create_connection(('127.0.0.1', $port))" 2>/dev/null; do
  kill -0 $! || { cat "$0/router.log" >&2; exit 1; }
  sleep 0.1
done
"$@"
"""


class Claude(PromptInput):
    """Runs Claude, which may do all that its user inside may: the sandbox is the wall.

    In another mode than bypassPermissions it can run no program, as there is no person to ask; the
    host's tools that its assistant names are allowed in each.
    """

    name: ClassVar[str] = "claude"
    image: ClassVar[str] = "mcp-sandbox/claude:latest"
    protocols: ClassVar[Sequence[str]] = ("anthropic", "openai")
    prepare: ClassVar[str] = _PREPARE

    max_turns: int = Field(default=0, ge=0)
    permission_mode: Literal[
        "acceptEdits", "auto", "bypassPermissions", "manual", "dontAsk", "plan"
    ] = "bypassPermissions"
    allowed_tools: tuple[Word, ...] = ()
    disallowed_tools: tuple[Word, ...] = ()
    model: Word | None = None
    max_budget_usd: float = Field(default=0, ge=0, allow_inf_nan=False)
    # So many characters of the text that is being said were told already.
    _told: int = 0

    def command(self, run: Run) -> Program:
        talk, model = run.conversation, self.model or run.way.model
        # The records of a conversation have ids that begin alike.
        session = PurePosixPath(run.record).stem or run.kept_as[:24] + secrets.token_hex(6)
        tools = [f"mcp__host__{each}" for each in run.way.tool_names]
        # Both are the model service's, which would be a network.
        offline = () if run.way.online else ("WebSearch", "WebFetch")
        options: dict[str, tuple[object, ...]] = {
            "--input-format": ("stream-json",),
            "--output-format": ("stream-json",),
            "--permission-mode": (self.permission_mode,),
            "--resume" if run.record else "--session-id": (session,),
            "--system-prompt-file": (talk.system and f"{run.folder}/system.md",),
            # Else a conversation that goes on keeps its first instructions.
            "--system-prompt-snapshot": ("off",),
            "--max-turns": (self.max_turns,),
            "--max-budget-usd": (self.max_budget_usd,),
            "--model": (model,),
            "--allowed-tools": (*self.allowed_tools, *tools),
            "--disallowed-tools": (*self.disallowed_tools, *offline),
        }
        words = ["claude", "-p", "--verbose", "--include-partial-messages"]
        for option, values in options.items():
            words += [option, *map(str, values)] if any(values) else []
        request = {"type": "user", "message": {"role": "user", "content": talk.prompt}}
        url, files = run.way.url, {"system.md": talk.system.encode()}
        if run.way.tools:
            words += ["--strict-mcp-config", "--mcp-config", f"{run.folder}/mcp.json"]
            files["mcp.json"] = json.dumps({"mcpServers": {"host": run.way.tools}}).encode()
        if run.way.protocol == "openai":
            if not model:
                raise InvalidArgument("the router has to be told a model: add it to the connector")
            port = 20_000 + secrets.randbelow(10_000)
            url = f"http://127.0.0.1:{port}"
            files[_ROUTER] = _build_router_settings(run.way, port, model)
            words = ["/bin/sh", "-c", _ROUTED, run.folder, str(port), *words]
        return Program(
            words,
            {**_ENVIRONMENT, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": run.way.key},
            json.dumps(request).encode() + b"\n",
            files,
        )

    def events(self, line: bytes) -> Iterable[event_types.Event]:
        return event_types.parse_line(line, self._events)

    def _events(self, message: Any) -> Iterator[event_types.Event]:  # noqa: ANN401 - JSON of a stranger
        match message:
            case {"type": "stream_event", "event": {"delta": {"text": text}}} if (
                not _is_by_sub_agent(message)
            ):
                event = event_types.Text(text, partial=True)
                self._told += len(text)
                yield event
            case {"type": "stream_event"} | {"type": "system", "subtype": "status"}:
                pass
            case {"type": "assistant" | "user", "message": {"content": [*blocks]}}:
                for block in blocks:
                    yield from self._block(block, beside=_is_by_sub_agent(message))
            case {"type": "result", "is_error": is_error}:
                yield _completion(message, is_error)
            case {"type": "system", "subtype": "init", "session_id": session_id, "model": model}:
                yield event_types.Started(session_id, model)
            case {"type": "system", "subtype": "api_retry", "attempt": attempt}:
                why = f"{message.get('error_status')} ({message.get('error')})"
                yield event_types.Notice(f"the model service answered {why}: retry {attempt}")
            case {"type": "system", "subtype": "compact_boundary"}:
                yield event_types.Notice("the conversation had become too long, and was summed up")
            case {"type": "rate_limit_event", "rate_limit_info": {"status": status}}:
                yield event_types.Notice(f"limit of the model service: {status}")
            case _:
                raise ValueError("of an unknown type")

    def _block(self, block: Any, *, beside: bool) -> Iterator[event_types.Event]:  # noqa: ANN401 - see above
        match block:
            case {"type": "text", "text": text} if beside:
                yield event_types.Progress(text)
            case {"type": "text", "text": text}:
                rest, self._told = text[self._told :], 0
                if rest:
                    yield event_types.Text(rest)
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": call, "name": name, "input": arguments}:
                yield event_types.ToolCall(call, name, arguments)
            case {"type": "tool_result", "tool_use_id": call}:
                content: Any = block.get("content", "")
                if not isinstance(content, str):
                    content = "\n".join(part.get("text", f"[{part['type']}]") for part in content)
                yield event_types.ToolResult(call, content, bool(block.get("is_error")))
            case _:
                yield event_types.Unknown(
                    str(block["type"])[:80], json.dumps(block)[: event_types.SHOWN]
                )


def _build_router_settings(way: ModelAccess, port: int, model: str) -> bytes:
    place = {"name": "host", "api_base_url": f"{way.url}/v1/chat/completions"}
    service = {**place, "api_key": way.key, "models": [model]}
    ours = {"PORT": port, "APIKEY": way.key, "LOG": False, "NON_INTERACTIVE_MODE": True}
    return json.dumps(
        {**ours, "Providers": [service], "Router": {"default": f"host,{model}"}}
    ).encode()


def _is_by_sub_agent(message: dict[str, Any]) -> bool:
    return message.get("parent_tool_use_id") is not None


def _completion(message: dict[str, Any], is_error: bool) -> event_types.Completion:
    # A model error is told as a success that is an error.
    content = message.get("result") or "\n".join(message.get("errors") or ())
    word = message.get("terminal_reason") or message["subtype"]
    return event_types.Completion(
        content,
        is_error=is_error,
        reason=f"{word}: {content}" if is_error else "",
        cost_usd=message.get("total_cost_usd"),
        turns=message.get("num_turns", 0),
        session_id=message.get("session_id", ""),
    )
