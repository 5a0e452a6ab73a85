"""Chat Completions and Responses on loopback that follow a script, as `messages_api` does."""

import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from tests.e2e.messages_api import serve

USED = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


@dataclass
class Script:
    """The tool calls to ask for, and the words after them; `asked` are heads and bodies."""

    calls: Sequence[tuple[str, Mapping[str, object]]]
    last_words: str
    asked: list[tuple[Mapping[str, str], dict[str, Any]]] = field(default_factory=list[Any])

    def next_call(self, heard: int) -> tuple[str, str] | None:
        """The name and arguments of the call after so many results, if there is one."""
        if heard >= len(self.calls):
            return None
        name, arguments = self.calls[heard]
        return name, json.dumps(arguments)


@contextmanager
def serving(script: Script) -> Generator[str]:
    """Serve the script; yields the address."""
    with serve(script, _Answer) as address:
        yield f"{address}/v1"


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        script = cast("Script", cast("Any", self.server).script)
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        script.asked.append((dict(self.headers), request))
        events = {"/v1/chat/completions": _chat, "/v1/responses": _responses}[self.path]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events(script, request)]
        self._say("".join(lines).encode(), "text/event-stream")

    def do_GET(self) -> None:
        self._say(b'{"data": []}', "application/json")

    def _say(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


def _chat(script: Script, request: dict[str, Any]) -> list[dict[str, Any]]:
    results = [each for each in request["messages"] if each["role"] == "tool"]
    call, word = script.next_call(len(results)), "tool_calls"
    if call:
        function = {"name": call[0], "arguments": call[1]}
        one = {"index": 0, "id": f"call_{len(results)}", "type": "function", "function": function}
        delta: dict[str, Any] = {"role": "assistant", "tool_calls": [one]}
    else:
        delta, word = {"role": "assistant", "content": script.last_words}, "stop"
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "scripted"}
    return [
        {**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": word}]},
        {**chunk, "choices": [], "usage": USED},
    ]


def _responses(script: Script, request: dict[str, Any]) -> list[dict[str, Any]]:
    results = [each for each in request["input"] if each.get("type") == "function_call_output"]
    item: dict[str, Any]
    if call := script.next_call(len(results)):
        group, _, name = call[0].rpartition(".")
        item = {"type": "function_call", "id": f"fc_{len(results)}", "name": name}
        item |= {"call_id": f"call_{len(results)}", "arguments": call[1]}
        item |= {"namespace": group} if group else {}
    else:
        text = {"type": "output_text", "text": script.last_words, "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "content": [text]}
    usage = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8}
    return [
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "resp_1", "usage": usage}},
    ]
