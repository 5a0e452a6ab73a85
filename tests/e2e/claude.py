"""The Claude command line, with a scripted model: no request leaves the machine."""

import json
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio
from anyio.abc import Process

from tests.e2e.messages_api import Script, serving

NO_FURTHER_REQUESTS = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    # Whatever still wants to leave the machine finds nobody.
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}
SPOKEN_TO = ("--verbose", "--input-format", "stream-json", "--output-format", "stream-json")
_LIMIT_S = 50


@dataclass(frozen=True)
class Claude:
    """Starts the program in a project. `more`: variables that its servers need."""

    programs: Path
    project: Path
    home: Path
    more: Mapping[str, str]

    async def follow(self, script: Script, *options: str) -> None:
        """Have a conversation; it must end well and with the script's last words."""
        with serving(script) as address, anyio.fail_after(_LIMIT_S):
            done = await anyio.run_process(
                self._command(options), cwd=self.project, env=self._env(address), check=False
            )
        told = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, told
        assert done.stdout.decode().strip() == script.last_words, told

    @asynccontextmanager
    async def following(
        self, script: Script, *options: str, spoken_to: bool = False
    ) -> AsyncGenerator[Process]:
        """A conversation that goes on; it is killed at the end.

        Who is spoken to is sent messages as lines of JSON, and begins with the first.
        """
        with serving(script) as address:
            async with await anyio.open_process(
                self._command((*SPOKEN_TO, *options) if spoken_to else options),
                cwd=self.project,
                env=self._env(address),
                stdin=PIPE if spoken_to else DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
            ) as process:
                try:
                    yield process
                finally:
                    if process.returncode is None:
                        process.kill()

    def _command(self, options: tuple[str, ...]) -> list[str]:
        program = str(self.programs / "claude")
        return [program, "-p", "go", "--allowedTools", "mcp__sandbox", *options]

    def _env(self, address: str) -> dict[str, str]:
        return {**environment(self.home, address), **self.more}


def consent(project: Path) -> None:
    """Say what a person says when the program asks about the project's servers."""
    folder = project / ".claude"
    folder.mkdir()
    said = json.dumps({"enabledMcpjsonServers": ["sandbox"]})
    (folder / "settings.local.json").write_text(said)


def environment(home: Path, address: str) -> dict[str, str]:
    """Nothing of the caller's own account, and no other address than ours."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": "not-a-key",
        # Project servers connect in the background otherwise, and tools are shown by name only.
        "MCP_CONNECTION_NONBLOCKING": "0",
        # It begins without the servers that take longer, and on a busy machine they may.
        "MCP_CONNECT_TIMEOUT_MS": "40000",
        "MCP_TIMEOUT": "40000",
        "ENABLE_TOOL_SEARCH": "false",
        **NO_FURTHER_REQUESTS,
    }
