"""Agent programs of others as clients of ours: how each is started, and what it says of results.

Each has a scripted model on loopback, and prints what happens as lines of JSON.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e import claude, gemini_api, messages_api, openai_api

Call = tuple[str, Mapping[str, object]]
Start = tuple[Sequence[str], Mapping[str, str]]
_WORDS = "All done."


@dataclass(frozen=True)
class Client:
    """`prefix` is what it calls the tools of the server `sandbox` by.

    `start`: from home, address of the model and command of the server, its options and variables.
    `result`: what it shows of a result, and whether as an error, in a line that says so.
    """

    prefix: str
    serve: Callable[[Sequence[Call]], AbstractContextManager[str]]
    start: Callable[[Path, str, Sequence[str]], Start]
    result: Callable[[Any], tuple[str, bool] | None]


def environment(home: Path, programs: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Nothing of the caller's own, and no way off the machine."""
    path = f"{programs}:{os.environ['PATH']}"
    return {**claude.NO_FURTHER_REQUESTS, "HOME": str(home), "PATH": path, **more}


def _noted(file: Path, found: object) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))
    return str(file)


def _joined(blocks: str | Sequence[Mapping[str, Any]]) -> str:
    return blocks if isinstance(blocks, str) else "\n".join(each["text"] for each in blocks)


def _start_claude(home: Path, address: str, server: Sequence[str]) -> Start:
    servers = {"sandbox": {"command": server[0], "args": server[1:]}}
    config = _noted(home / "mcp.json", {"mcpServers": servers})
    options = ("--verbose", "--output-format", "stream-json", "--allowedTools", "mcp__sandbox")
    variables = claude.environment(home, address)
    own = {name: variables[name] for name in variables if name not in ("PATH", "HOME")}
    return ("-p", "go", *options, "--strict-mcp-config", "--mcp-config", config), own


def _claude_result(line: Any) -> tuple[str, bool] | None:
    match line:
        case {"type": "user", "message": {"content": [{"type": "tool_result"}, *_]}}:
            result = line["message"]["content"][0]
            return _joined(result["content"]), bool(result.get("is_error"))
    return None


def _start_codex(_: Path, address: str, server: Sequence[str]) -> Start:
    settings = {
        "model": "scripted",
        "model_provider": "host",
        "model_providers.host.name": "host",
        "model_providers.host.base_url": address,
        "model_providers.host.env_key": "SCRIPTED_KEY",
        "model_providers.host.wire_api": "responses",
        "analytics.enabled": False,
        "mcp_servers.sandbox.command": server[0],
        "mcp_servers.sandbox.args": server[1:],
        # Else it may begin without the server.
        "mcp_servers.sandbox.required": True,
    }
    given = (f"--config={name}={json.dumps(value)}" for name, value in settings.items())
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return ("exec", *options, *given, "go"), {"SCRIPTED_KEY": "scripted-key"}


def _codex_result(line: Any) -> tuple[str, bool] | None:
    match line:
        case {"item": {"type": "mcp_tool_call", "status": "completed" | "failed" as status}}:
            return _joined(line["item"]["result"]["content"]), status == "failed"
    return None


def _start_gemini(home: Path, address: str, server: Sequence[str]) -> Start:
    settings = {
        "mcpServers": {"sandbox": {"command": server[0], "args": server[1:], "trust": True}},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
    }
    _noted(home / ".gemini" / "settings.json", settings)
    own = {"GEMINI_API_KEY": "scripted-key", "GOOGLE_GEMINI_BASE_URL": address}
    own["GEMINI_CLI_TRUST_WORKSPACE"] = "true"
    return ("-p", "go", "--yolo", "-m", "gemini-2.5-flash", "--output-format", "stream-json"), own


def _gemini_result(line: Any) -> tuple[str, bool] | None:
    match line:
        case {"type": "tool_result", "status": status, "output": output}:
            return output, status != "success"
    return None


def _start_opencode(home: Path, address: str, server: Sequence[str]) -> Start:
    options = {"baseURL": address, "apiKey": "scripted-key"}
    service = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"scripted": {}}}
    settings = {
        "autoupdate": False,
        "share": "disabled",
        "model": "host/scripted",
        "small_model": "host/scripted",
        "provider": {"host": service},
        "mcp": {"sandbox": {"type": "local", "command": [*server], "timeout": 40_000}},
        "permission": "allow",
    }
    _noted(home / "project" / "opencode.json", settings)
    own = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS")
    return ("run", "--format", "json", "go"), {f"OPENCODE_DISABLE_{name}": "1" for name in own}


def _opencode_result(line: Any) -> tuple[str, bool] | None:
    match line:
        case {"type": "tool_use", "part": {"state": {"output": output}}}:
            return output, False
        case {"type": "tool_use", "part": {"state": {"error": error}}}:
            return error, True
    return None


def _start_copilot(home: Path, address: str, server: Sequence[str]) -> Start:
    servers = {"sandbox": {"command": server[0], "args": server[1:], "tools": ["*"]}}
    _noted(home / ".copilot" / "mcp-config.json", {"mcpServers": servers})
    own = {"BASE_URL": address, "API_KEY": "scripted-key", "TYPE": "openai"}
    variables = {f"COPILOT_PROVIDER_{name}": value for name, value in own.items()}
    variables |= {"COPILOT_MODEL": "scripted", "COPILOT_OFFLINE": "true"}
    return ("-p", "go", "--allow-all-tools", "--output-format", "json"), variables


def _copilot_result(line: Any) -> tuple[str, bool] | None:
    match line:
        case {"type": "tool.execution_complete", "data": {"success": success, "result": result}}:
            return result["content"], not success
    return None


def _by_openai(calls: Sequence[Call]) -> AbstractContextManager[str]:
    return openai_api.serving(openai_api.Script(calls, _WORDS))


CLIENTS: Mapping[str, Client] = {
    "claude": Client(
        "mcp__sandbox__",
        lambda calls: messages_api.serving(messages_api.Script(calls, _WORDS)),
        _start_claude,
        _claude_result,
    ),
    "codex": Client("mcp__sandbox.", _by_openai, _start_codex, _codex_result),
    "gemini": Client(
        "mcp_sandbox_",
        lambda calls: gemini_api.serving(openai_api.Script(calls, _WORDS)),
        _start_gemini,
        _gemini_result,
    ),
    "opencode": Client("sandbox_", _by_openai, _start_opencode, _opencode_result),
    "copilot": Client("sandbox-", _by_openai, _start_copilot, _copilot_result),
}
