"""A Messages API on loopback that follows a script: one tool call after the other, then a text."""

import json
import secrets
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

Heard = dict[int, str]
Arguments = Mapping[str, object] | Callable[[Heard], Mapping[str, object]]


@dataclass(frozen=True)
class Fault:
    """How one request is answered instead: with an error, late, or with a stream that is cut off.

    `until` is waited for before anything is said; a cut stream has its first event only.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    until: threading.Event | None = None
    cut: bool = False


@dataclass
class Script:
    """The tool calls to ask for, and what was heard of each: the texts of its result.

    Arguments may be made of what was heard before. `told` is all that the model was given with the
    last request.
    What a conversation held before, when it is resumed, is not of this script. `at_each_step` is
    called in a thread before each answer, and may wait, such as for another script. The first
    requests meet the `faults`, one each. `asked` are the headers and bodies of all.
    """

    calls: Sequence[tuple[str, Arguments]]
    last_words: str
    heard: Heard = field(default_factory=Heard)
    told: str = ""
    at_each_step: Callable[[], object] = lambda: None
    faults: list[Fault] = field(default_factory=list[Fault])
    asked: list[tuple[Mapping[str, str], str]] = field(default_factory=list[Any])
    _mark: str = field(default_factory=lambda: f"toolu_{secrets.token_hex(4)}_")

    def next_block(self, request: dict[str, Any]) -> dict[str, Any]:
        """The content block that answers a request."""
        offered = {tool.get("name") for tool in request.get("tools", ())}
        if self.calls[0][0] not in offered:
            # A question beside the conversation, such as one for a title.
            return {"type": "text", "text": "ok"}
        results = [
            block
            for message in request["messages"]
            if isinstance(message["content"], list)
            for block in message["content"]
            if block["type"] == "tool_result" and block["tool_use_id"].startswith(self._mark)
        ]
        self.told = json.dumps(request, ensure_ascii=False)
        self.heard.update(enumerate(map(_text, results)))
        self.at_each_step()
        if len(results) == len(self.calls):
            return {"type": "text", "text": self.last_words}
        name, arguments = self.calls[len(results)]
        return {
            "type": "tool_use",
            "id": f"{self._mark}{len(results)}",
            "name": name,
            "input": arguments(self.heard) if callable(arguments) else arguments,
        }


def _text(result: dict[str, Any]) -> str:
    content = result["content"]
    return content if isinstance(content, str) else "".join(b.get("text", "") for b in content)


@contextmanager
def serving(script: Script) -> Generator[str]:
    """Serve the script; yields the address."""
    with serve(script, _Answer) as address:
        yield address


@contextmanager
def serve(script: object, answer: type[BaseHTTPRequestHandler]) -> Generator[str]:
    """Have requests answered, by a handler that finds the script at its server."""
    server = _Server(("127.0.0.1", 0), answer)
    server.script = script
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    script: object


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        script = cast("Script", cast("_Server", self.server).script)
        body = self.rfile.read(int(self.headers["content-length"]))
        request = json.loads(body)
        script.asked.append((dict(self.headers), body.decode()))
        if self.path.partition("?")[0] != "/v1/messages" or "messages" not in request:
            self._refuse()
            return
        fault = script.faults.pop(0) if script.faults else Fault()
        if fault.until:
            fault.until.wait()
        if fault.status != 200:
            self._refuse(fault.status, fault.headers)
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        events = _events({"type": "text", "text": ""} if fault.cut else script.next_block(request))
        for event in events[:1] if fault.cut else events:
            self._chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        if fault.cut:
            self.close_connection = True
        else:
            self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def do_GET(self) -> None:
        self._refuse()

    def do_HEAD(self) -> None:
        self._refuse()

    def _refuse(self, status: int = 404, headers: Mapping[str, str] | None = None) -> None:
        error = {"type": "scripted_error", "message": f"the script says {status}"}
        said = json.dumps({"type": "error", "error": error}).encode()
        self.send_response(status)
        for name, value in {"content-length": str(len(said)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(said)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


def _events(block: dict[str, Any]) -> list[dict[str, Any]]:
    """The stream of a message that holds this one block."""
    usage = {"input_tokens": 1, "output_tokens": 1}
    message: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant"}
    message |= {"model": "scripted", "content": [], "usage": usage}
    message |= {"stop_reason": None, "stop_sequence": None}
    if block["type"] == "text":
        empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        reason = "end_turn"
    else:
        text = json.dumps(block["input"])
        empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
        reason = "tool_use"
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": empty},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]
