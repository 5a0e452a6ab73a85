"""Agent programs from npm for the sandboxes of a test, with a scripted model for their service."""

import os
from pathlib import Path

from mcp_sandbox.config import AgentsConfig, Config, ConnectorConfig
from tests.e2e import npm

KEY = "sk-marked-key-of-the-operator"
_PROGRAMS = {
    "claude": "@anthropic-ai/claude-code-linux-*/claude",
    "codex": "@openai/*/vendor/*/bin/codex",
}


def working(
    config: Config, name: str, npm_cache: Path, folder: Path, service: ConnectorConfig
) -> Config:
    """The place of a test, with the program, and the service as its only connector.

    Its key is kept in the folder. Pods have the program by an image, as nothing else is seen there.
    """
    key = folder / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    scripted = service.model_copy(update={"key": f"file:{key}"})
    more: dict[str, object] = {"connectors": {"scripted": scripted}}
    if config.backend == "kubernetes":
        image = os.environ.get("MCP_SANDBOX_CLAUDE_IMAGE", "mcp-sandbox/claude:latest")
        more["kubernetes"] = config.kubernetes.model_copy(update={"image": image})
        return config.model_copy(update=more)
    (program,) = npm.installed(name, npm_cache).parent.glob(_PROGRAMS[name])
    bin_folder = npm_cache / name / "agents" / "bin"
    bin_folder.mkdir(parents=True, exist_ok=True)
    if not (bin_folder / name).exists():
        os.link(program, bin_folder / name)
    agents = AgentsConfig(programs=bin_folder.parent, command=name)
    return config.model_copy(update={**more, "agents": agents})
