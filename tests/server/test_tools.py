"""What a client sees of the tools, through a real MCP client in this process."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp.types import Implementation

from mcp_sandbox import errors
from mcp_sandbox.config import CallsConfig
from mcp_sandbox.models import ExecResult, FileContent, Listing, WriteResult
from mcp_sandbox.server.server import build_server
from tests.server.scripted import ScriptedSession, answering, failing, server_of, text_of

TABLE = {
    "run_code": {
        "code": None,
        "language": "python",
        "notebook": "null",
        "wait_s": 45,
        "timeout_s": "null",
    },
    "exec": {
        "command": None,
        "cwd": "null",
        "env": "null",
        "stdin": "null",
        "shell": "null",
        "tty": False,
        "wait_s": 45,
        "until": "null",
        "timeout_s": "null",
    },
    "process": {
        "action": None,
        "id": "null",
        "wait_s": 45,
        "until": "null",
        "tail": "null",
        "text": "null",
        "key": "null",
        "signal": "TERM",
        "grace_s": 5,
    },
    "preview": {"port": None, "path": "/", "wait_s": 20},
    "read_file": {"path": None, "offset": 1, "limit": 2000},
    "write_file": {"path": None, "content": None, "encoding": "utf-8", "append": False},
    "edit_file": {"path": None, "old": None, "new": None, "replace_all": False, "dry_run": False},
    "list_files": {"path": ".", "depth": 1, "limit": 500, "hidden": True},
    "glob": {"pattern": None, "path": ".", "limit": 500},
    "grep": {
        "pattern": None,
        "path": ".",
        "glob": "null",
        "ignore_case": False,
        "context": 0,
        "limit": 200,
    },
    "delete_file": {"path": None, "recursive": False},
    "move_file": {"source": None, "destination": None, "overwrite": False},
    "sandbox_info": {},
    "sandbox_reset": {"keep_files": True},
}
MINIMAL: dict[str, dict[str, Any]] = {
    "run_code": {"code": "1"},
    "exec": {"command": "true"},
    "process": {"action": "list"},
    "read_file": {"path": "a"},
    "write_file": {"path": "a", "content": ""},
    "edit_file": {"path": "a", "old": "x", "new": ""},
    "list_files": {},
    "glob": {"pattern": "*"},
    "grep": {"pattern": "x"},
    "delete_file": {"path": "a"},
    "move_file": {"source": "a", "destination": "b"},
    "preview": {"port": 8000},
    "sandbox_info": {},
    "sandbox_reset": {},
}
READ_ONLY = {"read_file", "list_files", "glob", "grep", "sandbox_info"}
STRUCTURED = {"list_files", "sandbox_info"}
DONE = ExecResult(stdout="42\n", stderr="", exit_code=0, duration_ms=1)


async def call(session: ScriptedSession, tool: str, arguments: dict[str, Any]) -> Any:
    with anyio.fail_after(10):
        async with Client(server_of(session)) as client:
            return await client.call_tool(tool, arguments)


async def refusal(tool: str, arguments: dict[str, Any]) -> str:
    """The text of a call that must be refused before the session hears of it."""
    session = answering(None)
    result = await call(session, tool, arguments)
    assert result.is_error
    assert session.calls == []
    return text_of(result)


async def listed() -> list[Any]:
    async with Client(server_of(answering(None))) as client:
        return (await client.list_tools()).tools


async def test_the_tool_table_is_the_promised_one() -> None:
    table = {}
    for tool in await listed():
        required = tool.input_schema.get("required", [])
        table[tool.name] = {
            name: None if name in required else ("null" if p["default"] is None else p["default"])
            for name, p in tool.input_schema["properties"].items()
        }
        assert tool.input_schema["additionalProperties"] is False
    assert table == TABLE


async def test_limits_of_the_parameters_are_in_the_schema() -> None:
    tools = {tool.name: tool.input_schema["properties"] for tool in await listed()}
    for tool in ("run_code", "exec"):
        limit = tools[tool]["timeout_s"]["anyOf"][0]
        assert (limit["minimum"], limit["maximum"]) == (1, 86_400)
    for tool in ("run_code", "exec", "process"):
        wait = tools[tool]["wait_s"]
        assert (wait["minimum"], wait["maximum"], wait["default"]) == (0, 55, 45)
    assert "Default: 2m," in tools["run_code"]["timeout_s"]["anyOf"][0]["description"]
    assert "Default: 1h," in tools["exec"]["timeout_s"]["anyOf"][0]["description"]
    assert tools["list_files"]["depth"]["maximum"] == 10
    assert tools["run_code"]["language"]["enum"] == ["python", "bash", "javascript"]


async def test_the_limits_that_are_set_are_in_the_schema_and_hold() -> None:
    calls = CallsConfig(timeout=600, code_timeout=5, longest_wait=20)
    session = answering(DONE)
    async with Client(server_of(session, calls=calls)) as client:
        tools = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        refused = await client.call_tool("exec", {"command": "true", "wait_s": 21})
        await client.call_tool("exec", {"command": "true"})
    for tool in ("run_code", "exec", "process"):
        wait = tools[tool]["properties"]["wait_s"]
        assert (wait["maximum"], wait["default"]) == (20, 20)
    assert "Default: 5s," in str(tools["run_code"])
    assert "Default: 10m," in str(tools["exec"])
    assert text_of(refused) == "wait_s must be a number from 0 to 20, not 21."
    assert [kwargs["wait_s"] for _, _, kwargs in session.calls] == [20]


async def test_tools_cost_few_tokens() -> None:
    seen = [
        {"name": t.name, "description": t.description, "input_schema": t.input_schema}
        for t in await listed()
    ]
    # About four characters a token.
    assert len(json.dumps(seen)) < 10_500


async def test_every_tool_has_a_title_a_description_and_honest_annotations() -> None:
    for tool in await listed():
        assert tool.title
        assert len(tool.description) > 20
        assert tool.annotations.read_only_hint is (tool.name in READ_ONLY)
        assert tool.annotations.open_world_hint is (tool.name in {"run_code", "exec"})
        if tool.name in READ_ONLY:
            assert tool.annotations.destructive_hint is False


async def test_only_tools_that_answer_with_data_have_an_output_schema() -> None:
    assert {tool.name for tool in await listed() if tool.output_schema} == STRUCTURED


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_server_says_what_it_is_for_before_any_tool_is_seen(mode: str) -> None:
    with anyio.fail_after(10):
        async with Client(server_of(answering(None)), mode=mode) as client:
            assert "Linux computer" in str(client.instructions)
            assert "no network" in str(client.instructions)
            assert client.server_info
            assert client.server_info.icons
            assert client.server_info.title == "Sandbox"
            assert client.server_info.icons[0].src.startswith("data:image/svg+xml,")


async def test_without_isolation_the_instructions_and_the_tools_warn() -> None:
    async def session_for(_request: Any) -> Any:
        raise AssertionError

    async with Client(build_server(session_for, isolated=False)) as client:
        tools = {tool.name: tool.description for tool in (await client.list_tools()).tools}
        assert "user's own machine" in str(client.instructions)
        assert "not the user's machine" not in str(client.instructions)
        assert "WARNING" in str(tools["run_code"])
        assert "WARNING" in str(tools["exec"])


async def test_results_that_are_text_have_no_structured_content() -> None:
    result = await call(answering(DONE), "run_code", {"code": "print(42)"})
    assert (text_of(result), result.structured_content) == ("42\n", None)
    assert result.meta["mcp-sandbox/result"]["exit_code"] == 0


@pytest.mark.parametrize("mode", ["auto", "legacy"])
@pytest.mark.parametrize(
    ("client", "told"),
    [
        ("claude-code", lambda text: [text, "[stderr]\nno", "[exit code 3]"]),
        # It parses the first text, and takes no other JSON than objects.
        (
            "gemini-cli-mcp-client",
            lambda text: [f"[stdout]\n{text}", "[stderr]\nno", "[exit code 3]"],
        ),
        # It joins the texts with nothing between them, and writes JSON anew.
        (
            "copilot-cli",
            lambda text: [f"[stdout]\n{text.strip()}\n", "[stderr]\nno\n", "[exit code 3]\n"],
        ),
    ],
)
async def test_each_client_gets_the_output_so_that_it_can_show_it(
    client: str, told: Callable[[str], list[str]], mode: Any
) -> None:
    info = Implementation(name=client, version="1")
    for printed in ("42\n", "true", "[1]", '"a"', "null", "-1e3", '{"a": 1}'):
        session = answering(replace(DONE, stdout=printed, stderr="no", exit_code=3))
        async with Client(server_of(session), client_info=info, mode=mode) as agent:
            result = await agent.call_tool("exec", MINIMAL["exec"])
        assert [each.text for each in result.content if each.type == "text"] == told(printed)


async def test_what_is_no_json_and_what_is_data_stays_as_it_is() -> None:
    gemini = Implementation(name="gemini-cli-mcp-client", version="1")
    listing = Listing("/workspace", (), 0, truncated=False)
    for tool, answer in (("exec", replace(DONE, stdout="1 2")), ("list_files", listing)):
        heard = list[Any]()
        for info in (gemini, None):
            async with Client(server_of(answering(answer)), client_info=info) as agent:
                heard.append((await agent.call_tool(tool, MINIMAL[tool])).content)
        assert heard[0] == heard[1]


async def test_a_listing_is_structured() -> None:
    session = answering(Listing("/workspace", (), 0, truncated=False))
    result = await call(session, "list_files", {})
    assert result.structured_content == {
        "path": "/workspace",
        "entries": [],
        "total": 0,
        "truncated": False,
    }


@pytest.mark.parametrize("tool", TABLE)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            errors.NotFound("no file a\x1b: look with list_files"),
            "no file a␛: look with list_files",
        ),
        (errors.ImageMissing("no image: build it"), "A person must fix this"),
        (errors.CapacityReached("32 sandboxes are open"), "Try again later"),
        (errors.SandboxGone("it died"), "The next call gets a new sandbox; processes"),
        (errors.CutOff("it was cut"), "The next call gets the same sandbox"),
        (errors.Unreachable("no answer"), "left as they are. Call again in a moment"),
        (errors.SandboxError("plain"), "plain"),
        (RuntimeError("secret"), "The sandbox server itself failed (RuntimeError)"),
        (ExceptionGroup("g", [errors.NotFound("inner")]), "inner"),
        (ExceptionGroup("g", [KeyError(1), KeyError(2)]), "(ExceptionGroup)"),
    ],
)
async def test_every_tool_answers_every_failure_with_text(
    tool: str, error: Exception, said: str
) -> None:
    result = await call(failing(error), tool, MINIMAL[tool])
    assert result.is_error
    assert said in text_of(result)
    assert "secret" not in text_of(result)
    assert "Error executing tool" not in text_of(result)


async def test_an_unexpected_error_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "mcp_sandbox"):
        await call(failing(RuntimeError("secret")), "exec", {"command": "x"})
    assert any(r.exc_info and "secret" in str(r.exc_info[1]) for r in caplog.records)


async def test_a_sandbox_that_cannot_be_opened_is_told_too() -> None:
    async def session_for(_request: Any) -> Any:
        raise errors.BackendUnavailable("no engine answers at unix:///x: start it")

    with anyio.fail_after(10):
        async with Client(build_server(session_for)) as client:
            result = await client.call_tool("exec", {"command": "true"})
    assert result.is_error
    assert text_of(result).startswith("no engine answers at unix:///x: start it\nA person must")


async def test_an_error_meant_for_the_client_stays_one() -> None:
    session = failing(MCPError(code=-32000, message="not for the model"))
    with anyio.fail_after(10):
        async with Client(server_of(session)) as client:
            with pytest.raises(MCPError, match="not for the model"):
                await client.call_tool("exec", {"command": "x"})


async def test_a_giant_error_message_is_cut() -> None:
    result = await call(failing(errors.NoMatch("x" * 100_000)), "edit_file", MINIMAL["edit_file"])
    assert len(text_of(result)) < 10_000


async def test_arguments_reach_the_session_as_given() -> None:
    session = answering(DONE)
    arguments = {
        "command": "make",
        "cwd": "src",
        "env": {"A": "1"},
        "stdin": '{"not": "parsed"}',
        "shell": "build",
        "wait_s": 0,
        "until": "ready",
        "timeout_s": 5,
    }
    await call(session, "exec", arguments)
    method, args, kwargs = session.calls[0]
    assert (method, args) == ("exec", ("make",))
    assert kwargs == {
        "cwd": "src",
        "env": {"A": "1"},
        "stdin": '{"not": "parsed"}',
        "shell": "build",
        "wait_s": 0,
        "until": "ready",
        "timeout_s": 5,
        "tty": False,
        "on_output": None,
    }


@pytest.mark.parametrize(
    ("alias", "language"),
    [
        ("sh", "bash"),
        ("shell", "bash"),
        ("js", "javascript"),
        ("node", "javascript"),
        ("py", "python"),
        ("Python", "python"),
        ("bash", "bash"),
    ],
)
async def test_common_names_of_languages_are_understood(alias: str, language: str) -> None:
    session = answering(DONE)
    await call(session, "run_code", {"code": "1", "language": alias})
    ((method, args, _),) = session.calls
    assert (method, args) == ("run_code", ("1", language))


async def test_what_is_not_given_is_left_to_the_settings() -> None:
    session = answering(DONE)
    await call(session, "run_code", {"code": "1"})
    how = {"notebook": None, "timeout_s": None, "wait_s": 45, "on_output": None}
    assert session.calls[0][2] == how


async def test_base64_content_is_decoded_and_wrong_base64_is_refused() -> None:
    session = answering(WriteResult("/workspace/a", 3, created=True))
    arguments = {"path": "a", "content": "AA\nH/", "encoding": "base64"}
    await call(session, "write_file", arguments)
    assert session.calls[0][1] == ("a", b"\x00\x01\xff")
    wrong = {"path": "a", "content": "no base64!", "encoding": "base64"}
    assert "content is not base64" in await refusal_of_value("write_file", wrong)


async def refusal_of_value(tool: str, arguments: dict[str, Any]) -> str:
    result = await call(answering(None), tool, arguments)
    assert result.is_error
    return text_of(result)


async def test_whole_numbers_may_have_a_point() -> None:
    session = answering(FileContent("/workspace/a", "text", "text/plain", 0, b""))
    await call(session, "read_file", {"path": "a", "offset": 3.0})
    assert session.calls[0][2] == {"offset": 3, "limit": 2000}


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("run_code", {}, "code is missing: give text of 1 to 1,048,576 characters."),
        (
            "run_code",
            {"code": "1", "timeout": 3},
            "There is no parameter 'timeout': did you mean timeout_s? "
            "this tool takes code, language, notebook, wait_s, timeout_s.",
        ),
        ("sandbox_info", {"x": 1}, "There is no parameter 'x': this tool takes no arguments."),
        ("run_code", {"code": 5}, "code must be text of 1 to 1,048,576 characters, not 5."),
        (
            "run_code",
            {"code": "1", "language": "ruby"},
            'language must be one of python, bash, javascript, not "ruby".',
        ),
        (
            "run_code",
            {"code": "1", "timeout_s": True},
            "timeout_s must be a number from 1 to 86,400, not true.",
        ),
        ("run_code", {"code": "1", "timeout_s": 86_401}, "from 1 to 86,400, not 86401."),
        ("run_code", {"code": "1", "timeout_s": "5s"}, 'from 1 to 86,400, not "5s".'),
        ("exec", {"command": "x", "timeout_s": -1}, "from 1 to 86,400, not -1."),
        ("exec", {"command": "x", "timeout_s": 10**400}, "timeout_s must be a number"),
        ("exec", {"command": "x", "wait_s": 56}, "wait_s must be a number from 0 to 55, not 56."),
        ("exec", {"command": "x", "wait_s": -1}, "wait_s must be a number from 0 to 55, not -1."),
        ("exec", {"command": "x", "wait_s": "NaN"}, "wait_s must be a number from 0 to 55, not "),
        ("exec", {"command": "x", "until": "a" * 201}, "until must be text of 1 to 200 characters"),
        ("process", {"action": "wait"}, "id is missing: action=wait needs it, action=list shows"),
        ("process", {"action": "stop"}, "id is missing: action=stop needs it, action=list shows"),
        ("process", {"action": "kill"}, "action must be one of list, wait, input, stop, not "),
        (
            "process",
            {"action": "wait", "id": "p1-a", "tail": 0},
            "tail must be a whole number from",
        ),
        (
            "process",
            {"action": "stop", "id": "p1-a", "grace_s": 31},
            "grace_s must be a number from",
        ),
        (
            "process",
            {"action": "stop", "id": "p1-a", "until": "ready"},
            "until has no meaning with action=stop: leave it out",
        ),
        (
            "exec",
            {"command": "x", "env": {"A": [1]}},
            "env: the value of 'A' must be text, not a list",
        ),
        ("exec", {"command": "x", "env": {"A=B": "1"}}, "cannot be a variable's name"),
        ("exec", {"command": "x", "env": {"A": "\0"}}, "without NUL"),
        ("exec", {"command": "x", "env": {"A": "\udc80"}}, "env: the value of 'A' must be text"),
        ("exec", {"command": "x", "env": ["A"]}, "an object with text values, not a list"),
        ("exec", {"command": ""}, "command must be text"),
        ("read_file", {"path": "a", "offset": 0}, "offset must be a whole number from 1 to"),
        ("read_file", {"path": "a", "offset": 1.5}, "offset must be a whole number from 1 to"),
        ("read_file", {"path": "a", "limit": 10**30}, "limit must be a whole number from 1 to"),
        ("read_file", {"path": "a", "limit": False}, "limit must be a whole number from 1 to"),
        ("read_file", {"path": "a\0b"}, "path: must not contain a NUL character: leave it out"),
        (
            "read_file",
            {"path": "a\udc80"},
            'path must be text of 1 to 4,096 characters, not "a\\udc80".',
        ),
        ("read_file", {"path": "a" * 5000}, "path must be text of 1 to 4,096 characters"),
        ("read_file", {"path": None}, "path must be text of 1 to 4,096 characters, not null."),
        ("list_files", {"hidden": "yes"}, 'hidden must be true or false, not "yes".'),
        ("glob", {"pattern": {"a": {}}}, "not an object of 1."),
    ],
)
async def test_wrong_arguments_get_one_readable_sentence(
    tool: str, arguments: dict[str, Any], said: str
) -> None:
    text = await refusal(tool, arguments)
    assert said in text
    assert "\n" not in text


async def test_each_problem_gets_its_own_sentence() -> None:
    text = await refusal("run_code", {"lang": "py", "timeout_s": 0})
    assert len(text.splitlines()) == 3


async def test_huge_code_is_refused_without_repeating_it() -> None:
    text = await refusal("run_code", {"code": "x" * 10_000_000})
    assert "not 10,000,000 characters beginning with 'xxx" in text
    assert len(text) < 300


async def test_an_unknown_tool_is_answered_with_the_known_ones() -> None:
    text = await refusal("run_python", {})
    assert text.startswith("There is no tool 'run_python': did you mean run_code? the tools are")


async def test_live_output_goes_out_as_progress() -> None:
    told: list[str | None] = []
    heard = anyio.Event()

    async def answer(*_: Any, on_output: Any, **__: Any) -> ExecResult:
        await on_output("stdout", b"step 0\rstep 1\nst")
        await on_output("stdout", b"ep 2 \x1b[0m\xe2\x82")
        await heard.wait()
        return DONE

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)
        heard.set()

    with anyio.fail_after(10):
        async with Client(server_of(ScriptedSession(answer)), mode="legacy") as client:
            result = await client.call_tool("exec", {"command": "x"}, progress_callback=on_progress)
    assert text_of(result) == "42\n"
    assert told == ["step 1\nstep 2 "]


@pytest.mark.parametrize("tool", ["exec", "run_code", "process"])
async def test_who_waits_for_the_sandbox_itself_is_told_so(tool: str) -> None:
    told: list[str | None] = []
    heard = anyio.Event()

    async def answer(*_: Any, **__: Any) -> ExecResult:
        await heard.wait()
        return DONE

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)
        heard.set()

    session = ScriptedSession(answer)
    session.is_open = False
    arguments = {"action": "wait", "id": "p1-abc"} if tool == "process" else MINIMAL[tool]
    with anyio.fail_after(10):
        async with Client(server_of(session), mode="legacy") as client:
            result = await client.call_tool(tool, arguments, progress_callback=on_progress)
    assert text_of(result).startswith("42\n")
    assert str(told[0]).startswith("the sandbox is being made (")


async def test_an_error_is_readable_also_while_progress_is_reported() -> None:
    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        """Nothing is reported before the call fails."""

    with anyio.fail_after(10):
        async with Client(
            server_of(failing(errors.Busy("too many calls"))), mode="legacy"
        ) as client:
            result = await client.call_tool("exec", {"command": "x"}, progress_callback=on_progress)
    assert text_of(result) == "too many calls"
