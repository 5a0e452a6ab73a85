"""The Claude command line, as of version 2.1.328."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mcp_sandbox.agents import events as told
from mcp_sandbox.agents.executor import Program, Run
from mcp_sandbox.agents.messages import Given
from mcp_sandbox.errors import Unsupported
from mcp_sandbox.sessions.session import Session

_QUIET = ("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER")
_ENVIRONMENT = {
    **dict.fromkeys((*_QUIET, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"), "1"),
    # Tools of the host are there from the first request on, and have more time than the host gives.
    "ENABLE_TOOL_SEARCH": "false",
    "MCP_CONNECTION_NONBLOCKING": "0",
    "MCP_TOOL_TIMEOUT": "90000",
}
# Another run may make the link at the same time. Prints the record of the conversation $1, if any.
_PREPARE = """
command -v claude >/dev/null || exit 127
if [ -d /opt/skills ] && ! [ -e .claude/skills -o -L .claude/skills ]; then
  mkdir -p .claude && ln -sT /opt/skills .claude/skills || [ -e .claude/skills ] || exit
fi
[ -z "$1" ] || find ~/.claude/projects -mindepth 2 -maxdepth 2 -name "$1.jsonl" 2>/dev/null
exit 0
"""
# What begins with a dash would be another option.
_Word = Annotated[str, Field(pattern=r"^[^-\x00][^\x00]*$")]


class _Arguments(Given):
    max_turns: int = Field(default=0, ge=0)
    permission_mode: Literal[
        "acceptEdits", "auto", "bypassPermissions", "manual", "dontAsk", "plan"
    ] = "bypassPermissions"
    allowed_tools: tuple[_Word, ...] = ()
    disallowed_tools: tuple[_Word, ...] = ()
    model: _Word | None = None
    max_budget_usd: float = Field(default=0, ge=0, allow_inf_nan=False)


class Claude:
    """Runs Claude, which may do all that its user inside may: the sandbox is the wall.

    In another mode than bypassPermissions it can run no program, as there is no person to ask.
    """

    name = "claude"
    image = "mcp-sandbox/claude:latest"
    protocols: Sequence[str] = ("anthropic",)

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._given = _Arguments.read(arguments, "the arguments of claude")
        self._has_record = False
        # So many characters of the text that is being said were told already.
        self._told = 0

    async def prepare(self, run: Run, session: Session) -> Iterable[told.Event]:
        script = ["/bin/sh", "-c", _PREPARE, "sh", run.resumed]
        result = await session.exec(script, timeout_s=60)
        if result.exit_code == 127:
            raise Unsupported(
                "there is no program claude in the sandbox: with docker, build an image that has "
                f"it (`mcp-sandbox images build claude`) and set docker.image to {self.image}; "
                "else set agents.programs to a folder that has bin/claude"
            )
        if not result.success:
            raise Unsupported(result.stderr.strip() or f"sh ended with {result.exit_code}")
        self._has_record = bool(result.stdout)
        if run.resumed and not self._has_record:
            return [told.Notice("no record of an earlier conversation is left: it begins anew")]
        return ()

    def command(self, run: Run) -> Program:
        talk, given = run.conversation, self._given
        # Both are the model service's, which would be a network.
        offline = () if run.online else ("WebSearch", "WebFetch")
        options: dict[str, tuple[object, ...]] = {
            "--input-format": ("stream-json",),
            "--output-format": ("stream-json",),
            "--permission-mode": (given.permission_mode,),
            "--resume" if self._has_record else "--session-id": (run.resumed,),
            "--system-prompt-file": (talk.system and f"{run.folder}/system.md",),
            # Else a conversation that goes on keeps its first instructions.
            "--system-prompt-snapshot": ("off",),
            "--mcp-config": (run.way.tools and f"{run.folder}/mcp.json",),
            "--max-turns": (given.max_turns,),
            "--max-budget-usd": (given.max_budget_usd,),
            "--model": (given.model or run.way.model,),
            "--allowed-tools": given.allowed_tools,
            "--disallowed-tools": (*given.disallowed_tools, *offline),
        }
        words = ["claude", "-p", "--verbose", "--include-partial-messages"]
        words += ["--strict-mcp-config"] if run.way.tools else []
        for option, values in options.items():
            words += [option, *map(str, values)] if any(values) else []
        content = [*(() if self._has_record else talk.history), *talk.prompt]
        said = {"type": "user", "message": {"role": "user", "content": content}}
        return Program(
            words,
            {**_ENVIRONMENT, "ANTHROPIC_BASE_URL": run.way.url, "ANTHROPIC_API_KEY": run.way.key},
            json.dumps(said).encode() + b"\n",
            {"system.md": talk.system.encode(), "mcp.json": run.way.tools},
        )

    def events(self, line: bytes) -> Iterable[told.Event]:
        return told.understood(line, self._events)

    def _events(self, said: Any) -> Iterator[told.Event]:  # noqa: ANN401 - JSON of a stranger
        match said:
            case {"type": "stream_event", "event": {"delta": {"text": text}}} if not _beside(said):
                event = told.Text(text, partial=True)
                self._told += len(text)
                yield event
            case {"type": "stream_event"} | {"type": "system", "subtype": "status"}:
                pass
            case {"type": "assistant" | "user", "message": {"content": [*blocks]}}:
                for block in blocks:
                    yield from self._block(block, beside=_beside(said))
            case {"type": "result", "is_error": is_error}:
                yield _completion(said, is_error)
            case {"type": "system", "subtype": "init", "session_id": session_id, "model": model}:
                yield told.Started(session_id, model)
            case {"type": "system", "subtype": "api_retry", "attempt": attempt}:
                why = f"{said.get('error_status')} ({said.get('error')})"
                yield told.Notice(f"the model service answered {why}: retry {attempt}")
            case {"type": "system", "subtype": "compact_boundary"}:
                yield told.Notice("the conversation had become too long, and was summed up")
            case {"type": "rate_limit_event", "rate_limit_info": {"status": status}}:
                yield told.Notice(f"limit of the model service: {status}")
            case _:
                raise ValueError("of an unknown type")

    def _block(self, block: Any, *, beside: bool) -> Iterator[told.Event]:  # noqa: ANN401 - see above
        match block:
            case {"type": "text", "text": text} if beside:
                yield told.Progress(text)
            case {"type": "text", "text": text}:
                rest, self._told = text[self._told :], 0
                if rest:
                    yield told.Text(rest)
            case {"type": "thinking" | "redacted_thinking"}:
                pass
            case {"type": "tool_use", "id": call, "name": name, "input": arguments}:
                yield told.ToolCall(call, name, arguments)
            case {"type": "tool_result", "tool_use_id": call}:
                content: Any = block.get("content", "")
                if not isinstance(content, str):
                    content = "\n".join(part.get("text", f"[{part['type']}]") for part in content)
                yield told.ToolResult(call, content, bool(block.get("is_error")))
            case _:
                yield told.Unknown(str(block["type"])[:80], json.dumps(block)[: told.SHOWN])


def _beside(said: dict[str, Any]) -> bool:
    """Whether a sub-agent says it."""
    return said.get("parent_tool_use_id") is not None


def _completion(said: dict[str, Any], is_error: bool) -> told.Completion:
    # A model error is told as a success that is an error.
    content = said.get("result") or "\n".join(said.get("errors") or ())
    word = said.get("terminal_reason") or said["subtype"]
    used: dict[str, Any] = said.get("usage") or {}
    made, cached = used.get("output_tokens") or 0, used.get("cache_read_input_tokens") or 0
    given = cached + sum(
        used.get(f"{kind}_tokens") or 0 for kind in ("input", "cache_creation_input")
    )
    return told.Completion(
        content,
        is_error=is_error,
        reason=f"{word}: {content}" if is_error else "",
        usage=told.Usage(given, made, given + made, cached),
        cost_usd=said.get("total_cost_usd"),
        turns=said.get("num_turns", 0),
        duration_ms=said.get("duration_ms", 0),
        session_id=said.get("session_id", ""),
    )
