"""The Codex command line, as of version 0.169, with a model service of the Responses API."""

import json
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mcp_sandbox.agents import events as told
from mcp_sandbox.agents.executor import Program, Run, Word
from mcp_sandbox.agents.messages import Given

# Conversations that are resumed have a home of their own, where the last is the only one.
_START = 'if [ -n "$0" ]; then export CODEX_HOME=~/.codex/agents/"$0"; fi; exec codex exec "$@"'
_ITEMS = ("command_execution", "mcp_tool_call", "file_change", "web_search")


class _Arguments(Given):
    model: Word | None = None


class Codex:
    """Runs Codex without its own sandbox, as it is in one.

    Its figures are those of the whole conversation, so the usage is what the host has counted.
    """

    name = "codex"
    image = ""
    protocols: Sequence[str] = ("openai",)
    prepare = """
[ -z "$1" ] || mkdir -p ~/.codex/agents/"$1" || exit
[ -z "$1" ] || find ~/.codex/agents/"$1"/sessions -name '*.jsonl' 2>/dev/null
exit 0
"""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._given = _Arguments.read(arguments, "the arguments of codex")
        self._last, self._called = "", set[str]()

    def command(self, run: Run) -> Program:
        talk = run.conversation
        said = [*(() if run.record else talk.history), *talk.prompt]
        images = [block["source"] for block in said if block["type"] == "image"]
        service = {"name": "host", "base_url": f"{run.way.url}/v1", "wire_api": "responses"}
        settings: dict[str, object] = {
            "model_provider": "host",
            **{f"model_providers.host.{key}": value for key, value in service.items()},
            "model_providers.host.env_key": "OPENAI_API_KEY",
            # It would be the model service's, which is a network.
            "web_search": "disabled",
            "features.multi_agent": False,
            "analytics.enabled": False,
            "check_for_update_on_startup": False,
        }
        if model := self._given.model or run.way.model:
            settings["model"] = model
        if talk.system:
            settings["model_instructions_file"] = f"{run.folder}/system.md"
        if run.way.tools:
            (server,) = json.loads(run.way.tools)["mcpServers"].values()
            settings |= {f"mcp_servers.host.{key}": value for key, value in server.items()}
        words = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        words += [] if run.resumed else ["--ephemeral"]
        for key, value in settings.items():
            words += ["-c", f"{key}={json.dumps(value)}"]
        words += [f"--image={run.folder}/{number}" for number, _ in enumerate(images)]
        words += ["resume", "--last", "-"] if run.record else ["-"]
        files = {str(number): b64decode(each["data"]) for number, each in enumerate(images)}
        return Program(
            ["/bin/sh", "-c", _START, run.resumed, *words],
            {"OPENAI_API_KEY": run.way.key},
            "\n\n".join(block["text"] for block in said if block["type"] == "text").encode(),
            {"system.md": talk.system.encode(), **files},
        )

    def events(self, line: bytes) -> Iterable[told.Event]:
        return told.understood(line, self._events)

    def _events(self, said: Any) -> Iterator[told.Event]:  # noqa: ANN401 - JSON of a stranger
        match said:
            case {"type": "thread.started", "thread_id": thread}:
                yield told.Started(thread)
            case {"type": "item.started" | "item.completed" as when, "item": item}:
                yield from self._item(item, done=when == "item.completed")
            case {"type": "turn.started" | "item.updated"}:
                pass
            case {"type": "error", "message": why}:
                yield told.Notice(why)
            case {"type": "turn.completed"}:
                yield told.Completion(self._last, turns=1)
            case {"type": "turn.failed", "error": {"message": why}}:
                yield told.Completion(self._last, is_error=True, reason=f"turn_failed: {why}")
            case _:
                raise ValueError("of an unknown type")

    def _item(self, item: Any, *, done: bool) -> Iterator[told.Event]:  # noqa: ANN401 - see above
        match item:
            case {"type": "agent_message", "text": text} if done:
                self._last = text
                yield told.Text(text)
            case {"type": "error", "message": why}:
                yield told.Notice(why)
            case {"type": kind, "id": call} if kind in _ITEMS:
                if call not in self._called:
                    self._called.add(call)
                    yield _call(item)
                if done:
                    yield _result(item)
            case {"type": "reasoning" | "todo_list" | "agent_message"}:
                pass
            case _:
                raise ValueError("of an unknown type")


def _call(item: Mapping[str, Any]) -> told.ToolCall:
    name = f"mcp__{item['server']}__{item['tool']}" if "tool" in item else item["type"]
    known = item.get("arguments") or {
        key: item[key] for key in ("command", "changes", "query") if key in item
    }
    return told.ToolCall(item["id"], name, known)


def _result(item: Mapping[str, Any]) -> told.ToolResult:
    found: Any = item.get("aggregated_output", "")
    if result := item.get("result"):
        found = "\n".join(part.get("text", f"[{part['type']}]") for part in result["content"])
    elif error := item.get("error"):
        found = error["message"]
    return told.ToolResult(item["id"], found, item.get("status") == "failed")
