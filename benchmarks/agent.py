"""What an agent does in an hour, through relay and daemon, against SWE-ReX's server.

SWE-ReX (https://github.com/SWE-agent/SWE-ReX) runs in a container of our base image and is asked by
its own client; ours is asked by the SDK's.
"""

import importlib
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import docker
from docker.models.containers import Container
from mcp import Client

from benchmarks.client import NOOP, call
from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import Failed, engine_client, in_thread
from benchmarks.relays import relay_to_daemon
from mcp_sandbox.config import DockerConfig

_FILES = 40
_TOKEN = "benchmark"
_PORT = 8000
_CODE = "import json\nprint(json.dumps({'sum': sum(range(1000))}))"
_COMMANDS = (
    "git status --short",
    "python3 -c 'print(1)'",
    "ls src",
    "wc -l src/m1.py",
    "git log | cat",
)

Ask = Callable[[str, Mapping[str, object]], Awaitable[Any]]


@dataclass(frozen=True)
class Step:
    """One thing an agent does: a tool, and what SWE-ReX is asked for the same."""

    kind: str
    tool: str
    arguments: dict[str, object]
    theirs: Callable[[Ask], Awaitable[Any]]


def _text(number: int, value: int) -> str:
    body = "\n".join(f"def name_{number}_{n}(x):\n    return x + {n}\n" for n in range(30))
    return f"VALUE = {value}\n\n\n{body}"


def _path(number: int) -> str:
    return f"src/m{number}.py"


def _run(command: str) -> Callable[[Ask], Awaitable[Any]]:
    # Its way with a shell that stays open takes 100 ms longer.
    body = {"command": command, "shell": True, "check": True, "timeout": 30}
    return lambda ask: ask("execute", body)


def _read(number: int) -> Step:
    path = _path(number % _FILES)
    theirs = {"path": f"/workspace/{path}"}
    return Step("read", "read_file", {"path": path}, lambda ask: ask("read_file", theirs))


def _edit(number: int) -> Step:
    # Each file's number goes up by one for each time it is edited.
    path, value = _path(number % _FILES), number // _FILES
    old, new = f"VALUE = {value}\n", f"VALUE = {value + 1}\n"
    whole = f"/workspace/{path}"

    async def theirs(ask: Ask) -> None:
        text = (await ask("read_file", {"path": whole})).content
        if text.count(old) != 1:
            raise Failed(f"{path} has no {old!r}")
        await ask("write_file", {"path": whole, "content": text.replace(old, new)})

    return Step("edit", "edit_file", {"path": path, "old": old, "new": new}, theirs)


def _search(number: int) -> Step:
    if number % 3 == 2:
        found = _run("find . -name 'm1*.py'")
        return Step("search", "glob", {"pattern": "**/m1*.py"}, found)
    name = f"def name_{number % _FILES}_7"
    return Step("search", "grep", {"pattern": name}, _run(f"grep -rn '{name}' ."))


def _command(number: int) -> Step:
    command = _COMMANDS[number % len(_COMMANDS)]
    return Step("command", "exec", {"command": command}, _run(command))


def _code(_number: int) -> Step:
    theirs = _run(f"python3 -c {shlex.quote(_CODE)}")
    return Step("code", "run_code", {"code": _CODE}, theirs)


_KINDS = {"read": _read, "edit": _edit, "search": _search, "command": _command, "code": _code}
_SHARES = {"read": 60, "edit": 40, "search": 30, "command": 50, "code": 20}


def _hour(number: int) -> list[Step]:
    """200 steps in an order that is the same each time."""
    steps = [
        _KINDS[kind](number * share + n) for kind, share in _SHARES.items() for n in range(share)
    ]
    random.Random(1).shuffle(steps)
    return steps


class _Rex:
    """SWE-ReX's client, each call of which opens a connection."""

    def __init__(self, host: str) -> None:
        remote = importlib.import_module("swerex.runtime.remote")
        self._asked = importlib.import_module("swerex.runtime.abstract")
        self.runtime = remote.RemoteRuntime(host=f"http://{host}", port=_PORT, auth_token=_TOKEN)

    async def ask(self, name: str, arguments: Mapping[str, object]) -> Any:
        """Call a method with a request of these fields."""
        kinds = {"execute": "Command", "read_file": "ReadFileRequest"}
        kind = getattr(self._asked, kinds.get(name, "WriteFileRequest"))
        return await getattr(self.runtime, name)(kind(**arguments))


def _install(target: Path, *options: str) -> None:
    """Install SWE-ReX in a folder. Blocks."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
    done = subprocess.run(
        [*command, *options, "swe-rex", "aiohttp"], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Failed(f"SWE-ReX cannot be installed: {done.stderr.strip()[-300:]}")


def _serve(folder: Path, engine: docker.DockerClient) -> Container:
    """Start SWE-ReX's server in a container. Blocks."""
    # The container's user reads what is here.
    folder.chmod(0o755)
    image = DockerConfig().image
    said = engine.containers.run(image, ["python3", "-V"], remove=True, entrypoint="")
    version = ".".join(said.decode().split()[1].split(".")[:2])
    _install(folder / "inside", "--python-version", version, "--only-binary=:all:")
    _install(folder / "client")
    container = engine.containers.run(
        image,
        ["python3", "-m", "swerex.server", "--auth-token", _TOKEN, "--port", str(_PORT)],
        entrypoint="",
        detach=True,
        environment={"PYTHONPATH": "/rex", "HOME": "/tmp"},
        volumes={str(folder / "inside"): {"bind": "/rex", "mode": "ro"}},
        working_dir="/workspace",
        tmpfs={"/workspace": "uid=10001,exec"},
        remove=True,
    )
    container.reload()
    return container


@asynccontextmanager
async def _rex() -> AsyncGenerator[_Rex]:
    with tempfile.TemporaryDirectory() as scratch, engine_client() as engine:
        folder = Path(scratch)
        container = await in_thread(partial(_serve, folder, engine))
        # Behind our own packages, which both sides use.
        sys.path.append(str(folder / "client"))
        try:
            (network,) = container.attrs["NetworkSettings"]["Networks"].values()
            rex = _Rex(network["IPAddress"])
            with anyio.fail_after(30):
                while not await rex.runtime.is_alive(timeout=1):  # noqa: ASYNC110  it is polled
                    await anyio.sleep(0.1)
            yield rex
        finally:
            sys.path.remove(str(folder / "client"))
            with anyio.CancelScope(shield=True):
                await in_thread(container.kill)


_SET_UP = "git init -q . && git add -A && git -c user.name=a -c user.email=a commit -qm first"


@asynccontextmanager
async def _connected() -> AsyncGenerator[Client]:
    """The SDK's client, connected through the relay to a daemon of its own."""
    async with relay_to_daemon("docker") as relay, Client(relay) as client:
        yield client


@asynccontextmanager
async def _agents() -> AsyncGenerator[tuple[Client, _Rex]]:
    """Both sides, with the same repository in their workspaces."""
    async with _connected() as client, _rex() as rex:
        for number in range(_FILES):
            path, text = _path(number), _text(number, 0)
            await call(client, "write_file", path=path, content=text)
            await rex.ask("write_file", {"path": f"/workspace/{path}", "content": text})
        await call(client, "exec", command=_SET_UP)
        await _run(_SET_UP)(rex.ask)
        yield client, rex


async def _ours(client: Client, steps: Callable[[], list[Step]]) -> None:
    for step in steps():
        await call(client, step.tool, **step.arguments)


async def _theirs(rex: _Rex, steps: Callable[[], list[Step]]) -> None:
    for step in steps():
        await step.theirs(rex.ask)


async def _compare(make: Callable[[int], list[Step]], pairs: int) -> Measured:
    def counted() -> Callable[[], list[Step]]:
        numbers = iter(range(1_000_000))
        return lambda: make(next(numbers))

    async with _agents() as (client, rex):
        mine, other = counted(), counted()
        return await times_slower(
            clocked(partial(_ours, client, mine)), clocked(partial(_theirs, rex, other)), pairs
        )


def _one(kind: str, number: int) -> list[Step]:
    return [_KINDS[kind](number)]


async def _path_against_noop(pairs: int) -> Measured:
    async with _connected() as client, Client(NOOP) as other:
        await call(client, "write_file", path="small.txt", content="small\n")

        async def ours() -> None:
            await call(client, "read_file", path="small.txt")
            await call(client, "exec", command="true")

        async def theirs() -> None:
            await call(other, "noop", command="true")
            await call(other, "noop", command="true")

        return await times_slower(clocked(ours), clocked(theirs), pairs)


def _kind_row(kind: str, ours: str, theirs: str) -> Row:
    run: Callable[[int], Awaitable[Measured]] = partial(_compare, partial(_one, kind))
    return Row(f"agent-{kind}", f"{ours}, call by call in turn", theirs, Goal(1), run, pairs=100)


ROWS = (
    Row(
        "path",
        "relay and daemon: read_file of a small file and exec true, docker",
        "MCP client: twice a tool that does nothing",
        Goal(1.5),
        _path_against_noop,
        pairs=200,
        calls=2,
    ),
    Row(
        "agent-hour",
        "relay and daemon: 200 operations of an agent, docker",
        "SWE-ReX's server in a container: the same",
        Goal(0.65),
        partial(_compare, _hour),
        pairs=7,
        calls=200,
    ),
    _kind_row("read", "relay and daemon: read_file", "SWE-ReX: read_file"),
    _kind_row("edit", "relay and daemon: edit_file", "SWE-ReX: read_file and write_file"),
    _kind_row("search", "relay and daemon: grep and glob", "SWE-ReX: grep and find by its execute"),
    _kind_row("command", "relay and daemon: exec of short commands", "SWE-ReX: by its execute"),
    _kind_row("code", "relay and daemon: run_code", "SWE-ReX: python3 -c by its execute"),
)
