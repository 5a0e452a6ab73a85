"""The Codex command line, as of version 0.171; its model service speaks the Responses API."""

import json
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

from mcp_sandbox.agents import events as event_types
from mcp_sandbox.agents.executors.base import Program, Run, Word
from mcp_sandbox.agents.messages import PromptInput

# Each conversation has a home of its own, where its newest record is the last one.
_START = 'export CODEX_HOME=~/.codex/agents/"$0"; exec codex exec "$@"'
_PREPARE = """
mkdir -p ~/.codex/agents/"$1" && find ~/.codex/agents/"$1" -path '*/sessions/*.jsonl'
"""
_SETTINGS: dict[str, object] = {
    "model_provider": "host",
    "model_providers.host.name": "host",
    "model_providers.host.env_key": "OPENAI_API_KEY",
    "model_providers.host.wire_api": "responses",
    # It is the model service's, which would be a network.
    "web_search": "disabled",
    "features.multi_agent": False,
    "analytics.enabled": False,
    "check_for_update_on_startup": False,
}
_TOOLS = ("command_execution", "mcp_tool_call", "file_change")


class Codex(PromptInput):
    """Runs Codex with no sandbox of its own. Of its usage, the host's count is the run's alone."""

    name: ClassVar[str] = "codex"
    image: ClassVar[str] = ""
    protocols: ClassVar[Sequence[str]] = ("openai",)
    prepare: ClassVar[str] = _PREPARE

    model: Word | None = None
    _last: str = ""
    _thread: str = ""

    def command(self, run: Run) -> Program:
        talk, settings = run.conversation, _SETTINGS.copy()
        images = [
            b64decode(each["source"]["data"]) for each in talk.prompt if each["type"] == "image"
        ]
        files = {str(number): image for number, image in enumerate(images)}
        settings["model_providers.host.base_url"] = f"{run.way.url}/v1"
        if model := self.model or run.way.model:
            settings["model"] = model
        if talk.system:
            settings["model_instructions_file"] = f"{run.folder}/system.md"
        settings |= {f"mcp_servers.host.{key}": value for key, value in run.way.tools.items()}
        words = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        words += [f"--config={key}={json.dumps(value)}" for key, value in settings.items()]
        words += [f"--image={run.folder}/{name}" for name in files]
        words += ["resume", "--last", "-"] if run.record else ["-"]
        return Program(
            ["/bin/sh", "-c", _START, run.kept_as, *words],
            {"OPENAI_API_KEY": run.way.key},
            "\n\n".join(block["text"] for block in talk.prompt if block["type"] == "text").encode(),
            {"system.md": talk.system.encode(), **files},
        )

    def events(self, line: bytes) -> Iterable[event_types.Event]:
        return event_types.parse_line(line, self._events)

    def _events(self, message: Any) -> Iterator[event_types.Event]:  # noqa: ANN401 - JSON of a stranger
        match message:
            case {"type": "thread.started", "thread_id": thread}:
                yield event_types.Started(thread)
                self._thread = thread
            case {"type": "item.completed", "item": {"type": "agent_message", "text": text}}:
                yield event_types.Text(text)
                self._last = text
            case {"type": "item.started", "item": {"id": call, "type": kind}} if kind in _TOOLS:
                item = message["item"]
                known = {key: item[key] for key in ("command", "changes") if key in item}
                yield event_types.ToolCall(
                    call, item.get("tool", kind), item.get("arguments", known)
                )
            case {"type": "item.completed", "item": {"type": kind}} if kind in _TOOLS:
                yield _result(message["item"])
            case {"type": "error", "message": why} | {"item": {"type": "error", "message": why}}:
                yield event_types.Notice(why)
            case {"type": "turn.completed"}:
                yield event_types.Completion(self._last, turns=1, session_id=self._thread)
            case {"type": "turn.failed", "error": {"message": why}}:
                yield event_types.Completion(self._last, is_error=True, reason=f"api_error: {why}")
            case {"type": "turn.started"} | {"item": {"type": "reasoning" | "todo_list"}}:
                pass
            case _:
                raise ValueError("of an unknown type")


def _result(item: dict[str, Any]) -> event_types.ToolResult:
    parts = (item.get("result") or {}).get("content", ())
    text = "\n".join(part.get("text", f"[{part['type']}]") for part in parts)
    text = text or item.get("aggregated_output") or (item.get("error") or {}).get("message", "")
    return event_types.ToolResult(item["id"], text, item["status"] == "failed")
