"""The Claude command line, as of version 2.1.328."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mcp_sandbox.agents.events import (
    Completion,
    Event,
    Notice,
    Progress,
    Started,
    Text,
    ToolCall,
    ToolResult,
    Unknown,
    Usage,
)
from mcp_sandbox.agents.executor import Program, Run
from mcp_sandbox.agents.messages import Given
from mcp_sandbox.errors import Unsupported

# What begins with a dash would be another option.
_Word = Annotated[str, Field(pattern=r"^[^-\x00][^\x00]*$")]
_ENVIRONMENT = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    # Tools of the host: shown at once, there from the first request on, and with more time than
    # the host gives them.
    "ENABLE_TOOL_SEARCH": "false",
    "MCP_CONNECTION_NONBLOCKING": "0",
    "MCP_TOOL_TIMEOUT": "90000",
}
# Prints the record of the conversation $1, if there is one.
_PREPARE = """
command -v claude >/dev/null || exit 127
if [ -d /opt/skills ] && [ ! -e .claude/skills ] && [ ! -L .claude/skills ]; then
  mkdir -p .claude && ln -s /opt/skills .claude/skills || exit
fi
[ -z "$1" ] || find ~/.claude/projects -mindepth 2 -maxdepth 2 -name "$1.jsonl" 2>/dev/null
exit 0
"""
_SHOWN_BYTES = 200


class _Arguments(Given):
    """As options of the program; `max_turns` 0 = no limit."""

    max_turns: int = Field(default=0, ge=0)
    permission_mode: Literal[
        "acceptEdits", "auto", "bypassPermissions", "manual", "dontAsk", "plan"
    ] = "bypassPermissions"
    allowed_tools: tuple[_Word, ...] = ()
    disallowed_tools: tuple[_Word, ...] = ()
    model: _Word | None = None
    max_budget_usd: float = Field(default=0, ge=0, allow_inf_nan=False)


class Claude:
    """Claude, given all of a request by file and stdin.

    It may do whatever its user inside may: the sandbox is the wall, and with any other mode than
    bypassPermissions it can run no program that no person has allowed.
    """

    name = "claude"
    image = "mcp-sandbox/claude:latest"

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = _Arguments.read(arguments, "the arguments of claude")
        self._resumes = False
        # So many characters of the text that is being said were told already.
        self._told = 0

    async def prepare(self, run: Run) -> Iterable[Event]:
        script = ["/bin/sh", "-c", _PREPARE, "sh", run.resumed]
        result = await run.session.exec(script, timeout_s=60)
        if result.exit_code == 127:
            how = (
                f"`mcp-sandbox images build claude`, and docker.image: {self.image}"
                if run.session.backend == "docker"
                else "agents.programs, with a folder that has bin/claude"
            )
            raise Unsupported(f"there is no program claude in the sandbox; what brings it: {how}")
        if not result.success:
            raise Unsupported(result.stderr.strip() or f"sh ended with {result.exit_code}")
        self._resumes = bool(result.stdout)
        if run.resumed and not self._resumes:
            return [Notice("there is no record of an earlier conversation: this one begins anew")]
        return ()

    def command(self, run: Run) -> Program:
        talk, given, files = run.conversation, self._arguments, dict[str, bytes]()
        words = ["claude", "-p", "--verbose", "--include-partial-messages"]
        words += ["--input-format", "stream-json", "--output-format", "stream-json"]
        words += ["--permission-mode", given.permission_mode]
        if run.resumed:
            words += ["--resume" if self._resumes else "--session-id", run.resumed]
        if talk.system:
            files["system.md"] = talk.system.encode()
            words += ["--system-prompt-file", f"{run.folder}/system.md"]
            # Else a conversation that goes on keeps its first instructions.
            words += ["--system-prompt-snapshot", "off"]
        if run.tools:
            files["mcp.json"] = run.tools
            words += ["--strict-mcp-config", "--mcp-config", f"{run.folder}/mcp.json"]
        # The service would search, or answer for the page.
        offline = () if run.online else ("WebSearch", "WebFetch")
        for option, value in (
            ("--max-turns", [given.max_turns]),
            ("--max-budget-usd", [given.max_budget_usd]),
            ("--model", [given.model or run.way.model]),
            ("--allowed-tools", given.allowed_tools),
            ("--disallowed-tools", (*given.disallowed_tools, *offline)),
        ):
            words += [option, *map(str, value)] if any(value) else []
        content = [*(() if self._resumes else talk.history), *talk.prompt]
        said = {"type": "user", "message": {"role": "user", "content": content}}
        way = {"ANTHROPIC_BASE_URL": run.way.url, "ANTHROPIC_API_KEY": run.way.key}
        return Program(words, {**_ENVIRONMENT, **way}, json.dumps(said).encode() + b"\n", files)

    def events(self, line: bytes) -> Iterable[Event]:
        kind = ""
        try:
            said = json.loads(line)
            kind = "/".join(str(said[key])[:80] for key in ("type", "subtype") if key in said)
            events = list(self._events(said))
        # Whatever is not as it should be: what prints it is not to be trusted.
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            events = None
        if events is None:
            return [Unknown(kind, line[:_SHOWN_BYTES].decode("utf-8", "replace"))]
        return events

    def _events(self, said: Any) -> Iterator[Event]:  # noqa: ANN401 - JSON of a stranger
        match said:
            case {
                "type": "stream_event",
                "parent_tool_use_id": None,
                "event": {"delta": {"text": text}},
            }:
                event = Text(text, partial=True)
                self._told += len(text)
                yield event
            case {"type": "stream_event"} | {"type": "system", "subtype": "status"}:
                pass
            case {"type": "assistant" | "user", "message": {"content": [*blocks]}}:
                is_beside = bool(said.get("parent_tool_use_id"))
                for block in blocks:
                    yield from self._block(block, is_beside=is_beside)
            case {"type": "result"}:
                yield _completion(said)
            case {"type": "system", "subtype": "init", "session_id": session_id, "model": model}:
                yield Started(session_id, model)
            case {"type": "system", "subtype": "api_retry", "attempt": attempt}:
                status, error = said.get("error_status"), said.get("error")
                yield Notice(f"the model service answered {status} ({error}): retry {attempt}")
            case {"type": "system", "subtype": "compact_boundary"}:
                yield Notice("the conversation had become too long, and was summed up")
            case {"type": "rate_limit_event", "rate_limit_info": {"status": status}}:
                yield Notice(f"limit of the model service: {status}")
            case _:
                raise ValueError("of an unknown type")

    def _block(self, block: Any, *, is_beside: bool) -> Iterator[Event]:  # noqa: ANN401 - see above
        match block:
            case {"type": "text", "text": text} if is_beside:
                yield Progress(text)
            case {"type": "text", "text": text}:
                rest, self._told = text[self._told :], 0
                if rest:
                    yield Text(rest)
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": call, "name": name, "input": arguments}:
                yield ToolCall(call, name, arguments)
            case {"type": "tool_result", "tool_use_id": call}:
                is_error = bool(block.get("is_error"))
                yield ToolResult(call, _said(block.get("content", "")), is_error)
            case _:
                yield Unknown(str(block["type"])[:80], json.dumps(block)[:_SHOWN_BYTES])


def _said(content: Any) -> str:  # noqa: ANN401 - see above
    """The result of a tool as text."""
    if isinstance(content, str):
        return content
    return "\n".join(
        part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content
    )


def _completion(said: Any) -> Completion:  # noqa: ANN401 - see above
    # A model error is one, whatever the subtype says.
    is_error = said["is_error"]
    used: dict[str, Any] = said.get("usage") or {}
    content = said.get("result") or "\n".join(said.get("errors") or ())
    cached = used.get("cache_read_input_tokens") or 0
    created = used.get("cache_creation_input_tokens") or 0
    given, made = used["input_tokens"] + cached + created, used["output_tokens"]
    word = said.get("terminal_reason") or said["subtype"]
    return Completion(
        content,
        is_error=is_error,
        reason=f"{word}: {content}" if is_error else "",
        usage=Usage(given, made, given + made, cached),
        cost_usd=said.get("total_cost_usd"),
        turns=said.get("num_turns", 0),
        duration_ms=said.get("duration_ms", 0),
        session_id=said.get("session_id", ""),
    )
