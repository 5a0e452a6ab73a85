"""What an agent inside needs of the outside: its model's key, and tools of the host.

A program of the tests stands in for Claude: it does what its prompt says, in Python.
"""

import json
import resource
import secrets
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from anyio import to_thread

from mcp_sandbox.agents.events import Completion, HostTool
from mcp_sandbox.app.agents import open_agent
from mcp_sandbox.config import Config
from tests.agents.service import Service, a_service, saying
from tests.agents.test_run import PROGRAM, asked
from tests.daemon.running import command, place, running
from tests.e2e.attacks import on_bubblewrap, on_the_host_kernel
from tests.server import host_tools

KEY = f"sk-marked-{secrets.token_hex(16)}"
ASK = """
import os, urllib.request
head = {"x-api-key": os.environ["ANTHROPIC_API_KEY"]}
address = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
print(urllib.request.urlopen(urllib.request.Request(address, b"{}", head)).read(), flush=True)
input()
"""
# In two halves, so that it does not find itself.
SEARCH = f"""
needle = b"{KEY[:20]}" + b"{KEY[20:]}"
token = os.environ["ANTHROPIC_API_KEY"].encode()
found, looked, tokens = [], 0, 0
# It has asked, read what was answered, and is still there to be looked into.
user = subprocess.Popen([sys.executable, "-c", {ASK!r}], stdin=-1, stdout=-1)
answer = user.stdout.readline().decode()

def look(place, read):
    global looked, tokens
    try:
        data = read()
    except (OSError, ValueError, OverflowError):
        return
    looked += 1
    tokens += token in data
    if needle in data:
        found.append(place)

def file(place):
    descriptor = os.open(place, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(descriptor, 16 << 20)
    finally:
        os.close(descriptor)

for pid in {{*filter(str.isdigit, os.listdir("/proc"))}} - {{str(os.getpid())}}:
    for name in ("environ", "cmdline"):
        look(f"/proc/{{pid}}/{{name}}", lambda: file(f"/proc/{{pid}}/{{name}}"))
    try:
        parts = open(f"/proc/{{pid}}/maps").read().splitlines()
        memory = open(f"/proc/{{pid}}/mem", "rb", 0)
    except OSError:
        continue
    for part in parts:
        first, last = (int(each, 16) for each in part.split()[0].split("-"))
        look(f"{{pid}}: {{part}}", lambda: (memory.seek(first), memory.read(last - first))[1])
for top, folders, names in os.walk("/"):
    if top == "/":
        folders[:] = {{*folders}} - {{"proc", "sys", "dev", "usr"}}
    for name in names:
        look(f"{{top}}/{{name}}", lambda: file(f"{{top}}/{{name}}"))
user.kill()
end(json.dumps([found, looked, tokens, answer, token.decode()[::-1]]))
"""


@pytest.fixture
def settings(config: Config, tmp_path: Path) -> dict[str, Any]:
    """The place of the test, as a file of settings has it, with the program and a key."""
    program, key = tmp_path / "agents" / "bin" / "claude", tmp_path / "key"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    key.write_text(KEY)
    key.chmod(0o600)
    return {
        "data_dir": str(config.data_dir),
        "backend": config.backend,
        "docker": {"image": config.docker.image},
        "agents": {"programs": str(tmp_path / "agents")},
        "connectors": {"one": {"key": f"file:{key}"}},
    }


@on_the_host_kernel
async def test_the_key_is_nowhere_but_in_the_requests_to_its_service(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    seen = list[str]()

    async def answer(stream: Any) -> None:
        seen.append(await to_thread.run_sync(_inspected, settings))
        await saying(json.dumps({"you sent": service.heard[-1].headers}).encode())(stream)

    async with a_service() as service:
        service.answer = answer
        more = {"MCP_SANDBOX_CONFIG": str(_written(settings, service, tmp_path))}
        where = place(tmp_path, settings["backend"], more)
        async with running(where) as daemon:
            done = await command(where, "agent run", "--json", SEARCH)
            assert done.code == 0, done
            status = await command(where, "status", "--json")
            config = await command(where, "config", "--json", asks=False)
            assert f"file:{tmp_path}/key" in config.out
            seen += [*done[1:], *status[1:], *config[1:]]
        seen.append(daemon.log)
    last = json.loads(done.out.splitlines()[-1])
    assert (last["type"], last["is_error"]) == ("Completion", False), last
    found, looked, tokens, answered, token = json.loads(last["content"])
    assert not found
    assert looked > 100
    assert tokens > 1, "the memory of a process could be read"
    assert "*" * len(KEY) in answered
    assert [each.headers["x-api-key"] for each in service.heard] == [KEY]
    seen += await to_thread.run_sync(_kept, where.data)
    assert "model" in daemon.log
    assert not [text for text in seen if KEY in text or token[::-1] in text]


def _written(settings: dict[str, Any], service: Service, folder: Path) -> Path:
    settings["connectors"]["one"]["url"] = service.url
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder / "settings.yaml"


def _inspected(settings: dict[str, Any]) -> str:
    """What the engine tells of its sandboxes, of whose output it keeps nothing. Blocks."""
    if settings["backend"] != "docker":
        return ""
    import docker

    engine = docker.from_env()
    try:
        found = engine.containers.list(filters={"label": "app=mcp-sandbox"}, ignore_removed=True)
        # Other tests have theirs on the same engine, such as the pods of a cluster.
        known = [each.attrs for each in found if settings["data_dir"] in json.dumps(each.attrs)]
        assert {each["HostConfig"]["LogConfig"]["Type"] for each in known} == {"none"}
        return json.dumps(known)
    finally:
        engine.close()


def _kept(folder: Path) -> list[str]:
    files = [each for each in folder.rglob("*") if each.is_file()]
    return [each.read_bytes().decode("latin-1") for each in files]


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("sums__long", {"size": 100_000_000}),
    ("flood", {}),
    ("garbage", {}),
    ("sums__babble", {}),
    ("sums__add", {"a": 2, "b": 3}),
    ("sums__die", {}),
    ("fine", {"text": "still here"}),
]
CALL = """
with open(sys.argv[sys.argv.index("--mcp-config") + 1]) as file:
    host = json.load(file)["mcpServers"]["host"]
peer = subprocess.Popen([host["command"], *host["args"]], stdin=-1, stdout=-1)

def ask(method, **params):
    line = {"jsonrpc": "2.0", "id": method, "method": method, "params": params}
    peer.stdin.write(json.dumps(line).encode() + b"\\n")
    peer.stdin.flush()
    return json.loads(peer.stdout.readline())["result"]

ask("initialize", protocolVersion="2025-06-18", capabilities={},
    clientInfo={"name": "a", "version": "1"})
results = [ask("tools/call", name=name, arguments=given) for name, given in CALLS]
end(json.dumps([host["args"][-1], *(each["content"][0]["text"] for each in results)]))
"""


def calling(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """A prompt: call these tools of the host, and end with the socket and what they answered."""
    return f"CALLS = {calls}\n{CALL}"


@on_bubblewrap
async def test_whatever_a_tool_of_the_host_does_is_an_error_of_that_call_and_the_run_goes_on(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    tools = {"sums": ["long", "babble", "add", "die"], "host": ["flood", "garbage", "fine"]}
    servers = [{"server_id": name, "tools": each} for name, each in tools.items()]
    file = tmp_path / "assistants" / "caller" / "assistant.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(yaml.safe_dump({"sandbox": {}, "mcp": {"servers": servers}}))
    commands = {"flood": ["cat", "/dev/zero"], "garbage": ["echo", "{no json"], "fine": ["cat"]}
    settings["agents"]["folders"] = [str(file.parents[1])]
    settings["bridge"] = {
        "servers": {"sums": {"command": [sys.executable, host_tools.__file__]}},
        "processes": {name: {"command": each} for name, each in commands.items()},
    }
    settings["connectors"]["one"]["url"] = "http://127.0.0.1:9"
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with open_agent("caller", config=Config.model_validate(settings)) as agent:
        events = [each async for each in agent.stream(asked(calling(CALLS)))]
    last = events[-1]
    assert isinstance(last, Completion)
    assert not last.is_error, last
    _, *said = json.loads(last.content)
    died, fine = said[-2:]
    assert [each.split(";")[0] for each in said[:3]] == [
        *("sums__long failed", "flood failed", "garbage failed")
    ]
    assert said[3:5] == ["said", "5"]
    assert (died.split(";")[0], json.loads(fine)) == ("sums__die failed", {"text": "still here"})
    heard = [(each.name, each.is_error) for each in events if isinstance(each, HostTool)]
    failing = ("sums__long", "flood", "garbage", "sums__die")
    assert heard == [(name, name in failing) for name, _ in CALLS]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 64 << 10


@on_bubblewrap
async def test_of_two_runs_at_once_each_has_its_tools_of_the_host(settings: dict[str, Any]) -> None:
    settings["bridge"] = {"path": "/tmp/yao.sock"}
    settings["connectors"]["one"]["url"] = "http://127.0.0.1:9"
    ended: list[Completion] = []
    came = 0
    both = anyio.Event()

    async def meet() -> str:
        nonlocal came
        came += 1
        if came == 2:
            both.set()
        await both.wait()
        return "met"

    async with open_agent(config=Config.model_validate(settings), tools=[meet]) as agent:

        async def run() -> None:
            ended.append(await agent.execute(asked(calling([("meet", {})]))))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            tasks.start_soon(run)
    (first, *one), (second, *other) = sorted(json.loads(each.content) for each in ended)
    assert one == other == ["met"]
    assert first == "/tmp/yao.sock"
    assert second.startswith("/tmp/yao.sock.")
