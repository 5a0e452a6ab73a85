"""Google's API of models on loopback that follows a script, as `openai_api` does."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, cast

from tests.e2e.messages_api import serve
from tests.e2e.openai_api import Script


@contextmanager
def serving(script: Script) -> Generator[str]:
    """Serve the script; yields the address."""
    with serve(script, _Answer) as address:
        yield address


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        script = cast("Script", cast("Any", self.server).script)
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        script.asked.append((dict(self.headers), request))
        parts = [part for turn in request.get("contents", ()) for part in turn.get("parts", ())]
        call = script.next_call(sum("functionResponse" in part for part in parts))
        # Without tools it is a question beside the conversation.
        said: dict[str, Any] = {"text": script.last_words}
        if call and request.get("tools"):
            said = {"functionCall": {"name": call[0], "args": json.loads(call[1])}}
        answer = {"content": {"role": "model", "parts": [said]}, "finishReason": "STOP"}
        self._say(json.dumps({"candidates": [answer]}))

    def _say(self, text: str) -> None:
        streams = "stream" in self.path
        data = f"data: {text}\r\n\r\n".encode() if streams else text.encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streams else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""
