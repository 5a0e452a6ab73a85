"""Start of the runner: `python3 .../mcp_sandbox/runner/__main__.py`, settings by environment.

MCP_SANDBOX_TOKEN, MCP_SANDBOX_SOCKET, MCP_SANDBOX_WORKSPACE, MCP_SANDBOX_HOME, MCP_SANDBOX_IDLE_S,
MCP_SANDBOX_LIMITS, MCP_SANDBOX_PIDS and MCP_SANDBOX_OOM_SCORE are settings; commands see the
other variables, and each MCP_SANDBOX_ENV_NAME as NAME. Python must be started with `-I -S`
where others than the backend control its environment.

Otherwise the token comes, with the socket to listen on, through a socket of the server, whose
number or path is MCP_SANDBOX_STARTER; or it lies in the file MCP_SANDBOX_TOKEN_FILE, which is
then deleted. In both cases this process may be an ordinary Python: it begins without a secret,
and a fork of it becomes the warm interpreter: that takes half the time. Or it comes by a pipe
that is made at MCP_SANDBOX_TOKEN_PIPE, within MCP_SANDBOX_START_S seconds if that is set, to a
runner that is MCP_SANDBOX_RUNNER.
"""

from __future__ import annotations

import os
import sys

_PREFIX = "MCP_SANDBOX_"
_FOR_COMMANDS = "ENV_"
_KEPT = ("WORKSPACE", "HOME")
_MOST_TOKEN = 1024
_SOCKET = "/run/mcp-sandbox/runner.sock"
_SKILLS = "/opt/skills"
# Beside the package in an image: the digest of the runner in it.
_DIGEST = "runner.digest"
_AGENTS = (".claude", ".agents")


def main() -> None:
    """Hide, take the settings out of the environment, serve."""
    if not sys.flags.isolated:
        del sys.path[0]
    sys.path.insert(0, os.path.abspath(__file__).rsplit("/", 3)[0])
    from mcp_sandbox.runner.kernel import processes  # noqa: PLC0415

    settings, env = _divide(dict(os.environ))
    processes.limit(settings.get("LIMITS", ""), settings.get("OOM_SCORE"))
    # Before anything of the user runs: no process of the same user may read this one's memory.
    processes.hide_memory()
    processes.rename("mcp-sandbox")
    # The kernel's copy, to which the C library still points, is wiped: set the variables again.
    os.environ.clear()
    os.environ.update(env)
    os.environ.update({_PREFIX + k: v for k, v in settings.items() if k in _KEPT})
    from mcp_sandbox.runner.kernel import native  # noqa: PLC0415
    from mcp_sandbox.runner.workers import fork_server  # noqa: PLC0415

    unread = _unread_token(settings)
    # Clients wait until the rest has loaded; meanwhile the interpreter starts.
    listener = native.begin(settings.get("STARTER"), settings.get("SOCKET", _SOCKET))
    plain = not (sys.flags.isolated or fork_server.is_steered(env))
    fork = "TOKEN" not in settings and plain
    warm = fork_server.fork_interpreter(env) if fork else fork_server.start_interpreter(env)
    _finish_unpacking(settings.get("WORKSPACE", "/workspace"))
    _link_skills(settings.get("HOME", "/home/sandbox"))
    from mcp_sandbox.runner.files.kept import take_over  # noqa: PLC0415
    from mcp_sandbox.runner.wire.server import Server  # noqa: PLC0415

    take_over()
    if unread is not None:
        settings["TOKEN"] = os.read(unread, _MOST_TOKEN).decode().strip()
        os.close(unread)
    elif "TOKEN" not in settings:
        settings["TOKEN"], listener = native.take_over(listener)
    Server(settings, env, listener, warm).run()


def _divide(everything: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    settings: dict[str, str] = {}
    env: dict[str, str] = {}
    for name, value in everything.items():
        if not name.startswith(_PREFIX):
            env.setdefault(name, value)
        elif name.startswith(_PREFIX + _FOR_COMMANDS):
            env[name[len(_PREFIX + _FOR_COMMANDS) :]] = value
        else:
            settings[name[len(_PREFIX) :]] = value
    return settings, env


def _unread_token(settings: dict[str, str]) -> int | None:
    """Return an uninherited descriptor to read the token from; None if the environment has it."""
    if "TOKEN_FILE" in settings:
        path = settings["TOKEN_FILE"]
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        os.unlink(path)
        return file
    return _await_token(settings) if "TOKEN_PIPE" in settings else None


def _await_token(settings: dict[str, str]) -> int:
    """Wait at a pipe for the secret, if this is the version of the runner that is asked for."""
    import select  # noqa: PLC0415

    own = os.path.abspath(__file__).rsplit("/", 3)[0] + "/" + _DIGEST
    with open(own, encoding="utf-8") as file:
        if file.read() != settings["RUNNER"]:
            raise SystemExit("this is another version of the runner")
    path = settings["TOKEN_PIPE"]
    os.mkfifo(path, 0o600)
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    # Meanwhile it loads what the first call needs. Nothing of the chat runs before the secret is
    # read, or it could read that itself.
    import mcp_sandbox.runner.files.operations  # noqa: PLC0415
    import mcp_sandbox.runner.wire.server  # noqa: F401, PLC0415

    most_s = float(settings["START_S"]) if "START_S" in settings else None
    if not select.select([pipe], [], [], most_s)[0]:
        raise SystemExit("nobody started the runner")
    os.unlink(path)
    return pipe


def _finish_unpacking(workspace: str) -> None:
    """Finish what an earlier runner was killed in; see files/archive."""
    if os.path.lexists(f"{workspace}/.~mcp-unpacked"):
        from mcp_sandbox.runner.files.archive import finish_unpacking  # noqa: PLC0415

        try:
            finish_unpacking()
        except (OSError, RecursionError):
            # Something of the chat is in its way: start all the same.
            return


def _link_skills(home: str) -> None:
    """Link the skills into the homes of agents, unless something is there already."""
    if os.getpid() != 1 or not os.path.isdir(_SKILLS):
        return
    for agent in _AGENTS:
        folder = f"{home}/{agent}"
        try:
            # A link that the chat made is not followed. Nothing runs yet that could make one now.
            if not os.path.islink(folder):
                os.makedirs(folder, 0o755, exist_ok=True)
                os.symlink(_SKILLS, f"{folder}/skills")
        except OSError:
            # The chat has skills of its own there, or its disk is full: start all the same.
            continue


main()
