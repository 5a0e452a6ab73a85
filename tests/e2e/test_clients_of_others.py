"""What the agent programs of others show of our results: each as it is, and no one as an error."""

import json
import sys
from pathlib import Path

import anyio
import pytest

from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP
from tests.e2e.clients_of_others import CLIENTS, environment
from tests.e2e.endurance.places import Place
from tests.e2e.test_clients import all_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200), *BUBBLEWRAP.marks]
CALLS: list[tuple[str, dict[str, object], list[str]]] = [
    ("run_code", {"code": "print(6 * 7)"}, ["42"]),
    ("exec", {"command": "echo '[1]'"}, ["[1]"]),
    (
        "exec",
        {"command": "printf true; printf no >&2; exit 3"},
        ["true", "[stderr]", "no", "[exit code 3]"],
    ),
    ("write_file", {"path": "note", "content": "one\n"}, ["created note (4 bytes)"]),
    ("edit_file", {"path": "note", "old": "one", "new": "two"}, ["-one", "+two"]),
    ("exec", {"command": "sleep 4; echo '{\"slept\": 4}'"}, ['{"slept": 4}']),
    ("exec", {"command": "echo null; sleep 6", "wait_s": 1}, ["null"]),
    ("list_files", {}, []),
    ("read_file", {"path": "missing"}, []),
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in CLIENTS]
)
async def test_a_client_shows_each_result_and_only_an_error_as_one(
    name: str, tmp_path: Path, npm_cache: Path
) -> None:
    client, project = CLIENTS[name], tmp_path / "project"
    project.mkdir()
    own = ("--chat", name, "--data", str(tmp_path / "data"), "--backend", "bubblewrap")
    # Some kill their servers, whose sandboxes end themselves then.
    server = ("env", "MCP_SANDBOX_SESSIONS__ORPHANED=2s", sys.executable, "-m", "mcp_sandbox")
    calls = [(f"{client.prefix}{tool}", arguments) for tool, arguments, _ in CALLS]
    programs = npm.installed(name, npm_cache)
    with client.serve(calls) as address, anyio.fail_after(150):
        options, variables = client.start(tmp_path, address, (*server, "stdio", *own))
        done = await anyio.run_process(
            [str(programs / name), *options],
            cwd=project,
            env=environment(tmp_path, programs, variables),
            check=False,
        )
    place = Place(tmp_path / "data", "bubblewrap", set())
    assert await all_gone(place, "processes", "mounts") == {}
    told = (done.stdout + done.stderr).decode()
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    shown = [found for line in lines if (found := client.result(line))]
    assert len(shown) == len(CALLS), told
    assert [is_error for _, is_error in shown] == [tool == "read_file" for tool, *_ in CALLS], told
    for (text, _), (_, _, wanted) in zip(shown, CALLS, strict=True):
        assert set(wanted) <= set(text.splitlines()), (wanted, text)
    assert done.returncode == 0, told
