"""Wrong and unusual calls of every tool: read as they are meant, or refused with a way out.

Most rows are made of the tools' own schemas, so that a new tool or parameter has them too.
"""

import json
import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Annotated, Any

import anyio
import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult
from pydantic import BaseModel, Field

from mcp_sandbox.server.tool import CHANGES, build_tool
from mcp_sandbox.sessions.session import Session
from tests.server.scripted import ScriptedSession, server_of, shipped_skills, text_of
from tests.server.test_real_sandbox import Tools, tools_of

Row = tuple[str, str, dict[str, Any], dict[str, Any] | str]
"""Tool, what is unusual, arguments given; arguments they are taken as, or words of the refusal."""

WAY_OUT = re.compile("must be |: give |did you mean |this tool takes |leave it out")
LEFT_OUT = object()


class Meant(str):
    """A text that a value is taken as, where other texts are words of a refusal."""

    __slots__ = ()


COMPANIONS = {
    ("skill_activate", "offset"): {"path": "a"},
    **{("process", name): {"action": "wait", "id": "a"} for name in ("until", "tail")},
}
"""What else has to be given with a parameter."""


class Recording(ScriptedSession):
    """Notes what reaches it, calls of skills too."""

    @property
    def skills(self) -> Any:
        return self


async def answer(*_: Any, **__: Any) -> None:
    return None


def schemas() -> dict[str, dict[str, Any]]:
    server = server_of(Recording(answer), shipped_skills(Path("/nonexistent")))
    return {tool.name: tool.input_schema for tool in anyio.run(server.list_tools)}


SCHEMAS = schemas()


def kind_of(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter's values, null apart."""
    kind: dict[str, Any] = schema.get("anyOf", [schema])[0]
    return kind


def right(schema: dict[str, Any]) -> Any:
    """A value that the parameter takes."""
    kind = kind_of(schema)
    text = kind["enum"][0] if "enum" in kind else "a"
    examples = {"string": text, "boolean": True, "object": {"A": "1"}}
    return examples.get(kind["type"], kind.get("minimum", 1))


def required(tool: str) -> dict[str, Any]:
    """The fewest arguments that the tool takes."""
    names = SCHEMAS[tool].get("required", [])
    return {name: right(SCHEMAS[tool]["properties"][name]) for name in names}


def mistakes(name: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What is unusual, the value, and what it is taken as or the words of its refusal."""
    kind = kind_of(schema)
    wrong = f"{name} must be "
    if "default" in schema:
        yield from (("null", None, LEFT_OUT), ("nothing", "", LEFT_OUT))
    else:
        yield "null", None, wrong
    nested: dict[str, Any] = {"a": {"b": {}}}
    if name in ("content", "stdin"):
        for what, given in (("a list", [1]), ("an object in an object", nested)):
            yield what, given, Meant(json.dumps(given, indent=2) + "\n")
    else:
        yield "a list", [1], wrong
        yield "an object in an object", nested, name
    yield from {
        "string": text_mistakes,
        "integer": number_mistakes,
        "number": number_mistakes,
        "boolean": boolean_mistakes,
        "object": object_mistakes,
    }[kind["type"]](wrong, kind)


def text_mistakes(wrong: str, kind: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield "a number", 5, wrong
    yield "a boolean", True, wrong
    if "enum" in kind:
        yield "an unknown name", "zzz", f"{wrong}one of {kind['enum'][0]}, "
    else:
        yield "too long", "a" * (kind["maxLength"] + 1), f"{wrong}text of "


def number_mistakes(wrong: str, kind: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    low, high = kind["minimum"], kind["maximum"]
    span = f"from {low:,} to {high:,.15g}, not "
    yield "text", str(high), high
    yield "text with a point", f" {low}.0 ", low
    yield "a word", "ten", f'{span}"ten".'
    yield "a boolean", True, f"{span}true."
    yield "a boolean as text", "true", f"{span}true."
    yield "too large", high + 1, f"{span}{high + 1}."
    yield "too large as text", str(high + 1), f"{span}{high + 1}."
    yield "too small", low - 1, f"{span}{low - 1}."
    yield "no number", "NaN", span
    if kind["type"] == "integer":
        yield "whole with a point", float(high), high
        yield "a fraction", low + 0.5, span


def boolean_mistakes(wrong: str, _: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from (("text", "true", True), ("Python's word", "False", False))
    yield from (("a word", "yes", f'{wrong}true or false, not "yes".'), ("a number", 1, wrong))


def object_mistakes(wrong: str, _: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield "numbers", {"A": 1, "B": 1.5, "C": 10**20}, {"A": "1", "B": "1.5", "C": "1" + "0" * 20}
    yield "booleans", {"A": True, "B": False}, {"A": "true", "B": "false"}
    yield "a null in it", {"A": "1", "B": None}, {"A": "1"}
    yield "text", '{"A": "1"}', {"A": "1"}
    yield "a line", "A=1", f"{wrong}an object with text values"


def rows() -> Iterator[Row]:
    for tool, schema in SCHEMAS.items():
        least, properties = required(tool), schema["properties"]
        takes = ", ".join(properties) or "no arguments"
        yield tool, "an unknown name", {**least, "zzz": 1}, f"this tool takes {takes}."
        for name, kind in properties.items():
            least = required(tool) | COMPANIONS.get((tool, name), {})
            without = {each: value for each, value in least.items() if each != name}
            misspelt = {**without, f"{name}x": right(kind)}
            yield tool, f"{name} misspelt", misspelt, f"did you mean {name}? this tool takes"
            if name in least:
                yield tool, f"{name} missing", without, f"{name} is missing: give "
            for what, given, taken in mistakes(name, kind):
                outcome = {**without, name: taken} if taken is not LEFT_OUT else without
                refused = isinstance(taken, str) and not isinstance(taken, Meant)
                yield tool, f"{name}: {what}", {**least, name: given}, taken if refused else outcome


ROWS = [*rows()]


@pytest.fixture(scope="module")
async def recording() -> AsyncGenerator[tuple[Client, Recording]]:
    session = Recording(answer)
    async with Client(server_of(session, shipped_skills(Path("/nonexistent")))) as client:
        yield client, session


@pytest.mark.parametrize(
    ("tool", "given", "outcome"), [pytest.param(r[0], *r[2:], id=f"{r[0]} {r[1]}") for r in ROWS]
)
async def test_a_generated_mistake_is_taken_as_meant_or_refused_with_a_way_out(
    recording: tuple[Client, Recording], tool: str, given: dict[str, Any], outcome: Any
) -> None:
    client, session = recording
    session.calls.clear()
    result = await client.call_tool(tool, given)
    calls = [*session.calls]
    if isinstance(outcome, str):
        assert result.is_error
        assert calls == []
        assert outcome in text_of(result)
        assert all(map(WAY_OUT.search, text_of(result).splitlines()))
        return
    await client.call_tool(tool, outcome)
    assert len(calls) == 1
    assert calls == session.calls[1:]
    assert str(calls) == str(session.calls[1:])


FILES = """
mkdir src "'d'"
echo one > f.txt; echo two > src/g.py; echo three > "'q'"; echo 4 > ~/h
"""
WORKS: list[tuple[str, dict[str, Any], str]] = [
    ("read_file", {"path": "file://f.txt"}, "one"),
    ("read_file", {"path": "file://src/%67.py"}, "two"),
    ("read_file", {"path": "'f.txt'"}, "one"),
    ("read_file", {"path": '"src/g.py"\n'}, "two"),
    ("read_file", {"path": "`f.txt`"}, "one"),
    ("read_file", {"path": "\tf.txt \r\n"}, "one"),
    ("read_file", {"path": "'q'"}, "three"),
    ("read_file", {"path": "$HOME/h"}, "4"),
    ("read_file", {"path": "${HOME}/h"}, "4"),
    ("read_file", {"path": "file://~/h"}, "4"),
    ("read_file", {"path": "'$HOME/h'"}, "4"),
    ("write_file", {"path": "file://new/n 1.txt ", "content": "x"}, "created new/n 1.txt"),
    ("write_file", {"path": "50%.txt", "content": "x"}, "created 50%.txt"),
    ("write_file", {"path": "z", "content": "a\0b"}, "created z (3 bytes)"),
    ("move_file", {"source": "'z'", "destination": " y\n"}, "moved z to y"),
    ("delete_file", {"path": "file://y"}, "deleted file y"),
    ("edit_file", {"path": "f.txt\n", "old": "one", "new": "1", "dry_run": "true"}, "+1"),
    ("list_files", {"path": "'src'"}, "src/g.py"),
    ("glob", {"pattern": "'*.py'"}, "src/g.py"),
    ("glob", {"pattern": "~/h"}, "/h"),
    ("glob", {"pattern": "${HOME}/*", "path": "src"}, "/h"),
    ("glob", {"pattern": "h", "path": "$HOME"}, "/h"),
    ("glob", {"pattern": "/src/*.py"}, "src/g.py"),
    ("grep", {"pattern": "two", "glob": '"*.py"'}, "g.py:1:two"),
    ("exec", {"command": "ls", "cwd": "src\n"}, "g.py"),
    ("exec", {"command": "cat h", "cwd": "~"}, "4"),
    ("exec", {"command": "cat h", "cwd": "${HOME}/"}, "4"),
    ("exec", {"command": "ls", "cwd": "file://src"}, "g.py"),
    ("exec", {"command": "ls", "cwd": "src/../src"}, "g.py"),
    ("exec", {"command": 'basename "$PWD"', "cwd": "'d'"}, "'d'"),
    ("exec", {"command": "echo 8", "description": "Prints 8"}, "8"),
    ("exec", {"command": "echo 8", "explanation": "", "is_background": False}, "8"),
    ("exec", {"command": "sleep 1; echo 8", "run_in_background": True}, "goes on as p"),
    ("run_code", {"code": "print(8)", "background": "false", "justification": "x"}, "8"),
    ("read_file", {"path": "f.txt", "description": "looks"}, "one"),
    ("write_file", {"path": "p.json", "content": {"a": "ä", "b": [1]}}, "was taken as JSON"),
    ("exec", {"command": "cat p.json"}, '{\n  "a": "ä",\n  "b": [\n    1\n  ]\n}'),
    ("exec", {"command": "cat", "stdin": [1]}, "stdin came as a list of 1 and was taken as JSON"),
    ("exec", {"command": "```sh\necho $((1 + 1))\n```"}, "2"),
    ("exec", {"command": "\n~~~\r\necho 1\n  ~~~  \n"}, "1"),
    ("exec", {"command": "echo `echo a`"}, "a"),
    ("exec", {"command": "$ ls"}, "'$ ' is for prompts and notebooks"),
    ("exec", {"command": "true\n!pip list"}, "'!pip' is for prompts and notebooks"),
    ("exec", {"command": "%cd src"}, "'%cd' is for prompts and notebooks"),
    ("run_code", {"code": "```\nprint(7)\n```"}, "7"),
    ("run_code", {"code": "````python\nprint('`')\n````"}, "`"),
    ("run_code", {"code": ">>> 1"}, "'>>> ' is for prompts and notebooks"),
    ("run_code", {"code": "%%time\n1"}, "'%%time' is for prompts and notebooks"),
    ("run_code", {"code": "1 + 1"}, "nothing was printed: show values with print()"),
    ("run_code", {"code": "echo 5", "language": "Shell"}, "5"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("read_file", {"path": "workspace/f.txt"}, "did you mean f.txt?"),
    ("read_file", {"path": "/repo/src/g.py"}, "did you mean src/g.py?"),
    ("read_file", {"path": "F.TXT"}, "did you mean f.txt?"),
    ("read_file", {"path": "src/*.py"}, "find names with glob"),
    ("read_file", {"path": "file:///nowhere/f"}, "Look with list_files or glob"),
    ("read_file", {"path": "a%00\0"}, "path: must not contain a NUL character: leave it out"),
    ("read_file", {"path": "file://a%00b"}, "give a usable path"),
    ("read_file", {"path": " \n "}, "give a usable path"),
    ("read_file", {"path": "src"}, "use list_files"),
    ("list_files", {"path": "f.txt"}, "use read_file"),
    ("delete_file", {"path": "*.txt"}, "use exec (rm, mv, cat)"),
    ("move_file", {"source": "*.txt", "destination": "src"}, "use exec (rm, mv, cat)"),
    ("exec", {"command": "ls", "cwd": "workspace/src"}, "did you mean src?"),
    ("exec", {"command": "ls", "cwd": "srcs"}, "did you mean src?"),
    ("exec", {"command": "ls", "cwd": "f.txt"}, "check the path"),
    ("exec", {"command": "a\0"}, "command: must not contain a NUL character: leave it out"),
    ("exec", {"command": "ls", "timeout_s": 600_000}, "Milliseconds? It is seconds: 600."),
    ("exec", {"command": "ls", "timeout_s": "9" * 5000}, "timeout_s must be a number from 1"),
    ("exec", {"command": "ls", "env": '{"a":' * 9999}, "env must be an object with text values"),
    ("exec", {"command": ["ls", "-l"]}, "command must be text"),
    ("exec", {"cmd": "ls"}, "did you mean command?"),
    ("exec", {"script": "ls"}, "did you mean command?"),
    ("exec", {"command": "ls", "workdir": "/"}, "did you mean cwd?"),
    ("exec", {"command": "ls", "timeout": 5}, "did you mean timeout_s?"),
    ("exec", {"command": "ls", "timeout_ms": 5000}, "did you mean timeout_s?"),
    ("exec", {"command": "ls", "run_in_background": "perhaps"}, "did you mean wait_s?"),
    ("exec", {"command": "ls", "dangerouslyDisableSandbox": True}, "this tool takes command"),
    ("read_file", {"path": "f.txt", "depiction": "x"}, "this tool takes path"),
    ("exec", {"command": "ls", "wait_s": 45_000}, "Milliseconds? It is seconds: 45."),
    ("exec", {"command": "ls", "wait_s": 0, "cwd": "nowhere"}, "cwd"),
    ("process", {"action": "wait", "bash_id": "p1-abc"}, "did you mean id?"),
    ("process", {"action": "stop", "shell_id": "p1-abc"}, "did you mean id?"),
    ("process", {"action": "wait", "id": "p1-abc", "lines": 5}, "did you mean tail?"),
    ("process", {"action": "wait", "id": "nosuch"}, "there is no process 'nosuch'; there are: "),
    ("process", {"action": "wait", "id": "p1-000"}, "is of an earlier sandbox of this chat"),
    ("process", {"action": "wait"}, "action=list shows all"),
    ("process", {"action": "list", "tail": 5}, "leave it out"),
    ("run_code", {"source": "1"}, "did you mean code?"),
    ("run_code", {"code": "1", "lang": "py"}, "did you mean language?"),
    ("run_code", {"code": "1", "language": "typescript"}, "write a file, then exec"),
    ("run_code", {"code": "1", "language": "c"}, "write a file, then exec"),
    ("read_file", {"file_path": "f.txt"}, "did you mean path?"),
    ("read_file", {"path": "f.txt", "view_range": [1, 2]}, "did you mean offset?"),
    ("write_file", {"path": "a", "file_text": ""}, "did you mean content?"),
    ("edit_file", {"path": "a", "old_str": "", "new_str": ""}, "did you mean old?"),
    ("edit_file", {"path": "a", "old_string": "", "new_string": ""}, "did you mean new?"),
    ("move_file", {"src": "a", "dst": "b"}, "did you mean destination?"),
    ("grep", {"regex": "a", "include": "*.py"}, "did you mean glob?"),
    ("glob", {"glob": "*"}, "did you mean pattern?"),
    ("list_files", {"directory": "."}, "did you mean path?"),
    ("preview", {"port": 0}, "port must be a whole number from 1 to 65,535, not 0."),
    ("preview", {"port": 70_000}, "port must be a whole number from 1 to 65,535, not 70000."),
    ("preview", {"port": 8000, "path": "http://localhost:8000/"}, "path: begin with /, as in"),
    ("preview", {"port": 8000, "path": "index.html"}, "path: begin with /, as in"),
    ("preview", {"port": 1, "wait_s": 0}, "nothing answers on port 1 of 127.0.0.1"),
    ("open_browser", {}, "did you mean preview?"),
    ("bash", {"command": "ls"}, "did you mean exec?"),
    ("Read", {"path": "a"}, "did you mean read_file?"),
    ("Write", {"path": "a"}, "did you mean write_file?"),
    ("Edit", {}, "did you mean edit_file?"),
    ("MultiEdit", {}, "did you mean edit_file?"),
    ("str_replace_editor", {}, "did you mean edit_file?"),
    ("LS", {}, "did you mean list_files?"),
    ("Grep", {}, "did you mean grep?"),
    ("Glob", {}, "did you mean glob?"),
    ("python", {}, "did you mean run_code?"),
    ("BashOutput", {}, "did you mean process?"),
    ("KillShell", {}, "did you mean process?"),
    ("TaskOutput", {}, "did you mean process?"),
    ("execute_code", {}, "did you mean run_code?"),
    ("mv", {}, "did you mean move_file?"),
    ("zzz", {}, "the tools are run_code, exec, "),
]


@pytest.fixture(scope="module")
async def tools(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Tools]:
    async with tools_of(tmp_path_factory.mktemp("data")) as tools:
        await tools.text("exec", command=FILES)
        yield tools


@pytest.mark.parametrize(("tool", "given", "said"), WORKS, ids=lambda part: str(part)[:60])
async def test_what_can_only_mean_one_thing_works(
    tools: Tools, tool: str, given: dict[str, Any], said: str
) -> None:
    assert said in await tools.text(tool, **given)


@pytest.mark.parametrize(("tool", "given", "said"), REFUSED, ids=lambda part: str(part)[:60])
async def test_the_rest_is_refused_with_a_way_out(
    tools: Tools, tool: str, given: dict[str, Any], said: str
) -> None:
    told = await tools.error(tool, **given)
    assert said in told
    assert len(told) < 700


class Edit(BaseModel):
    old: str


async def edit(
    session: Session,
    edits: Annotated[list[Edit], Field(max_length=3)],
    first: Edit,
    last: Edit | None = None,
    texts: list[dict[str, str]] | None = None,
) -> CallToolResult:
    raise NotImplementedError


OBJECTS: list[tuple[dict[str, Any], str]] = [
    ({}, "edits is missing: give a list of objects with 0 to 3 of them."),
    ({"edits": 5}, "edits must be a list of objects with 0 to 3 of them, not 5."),
    ({"edits": [{"old": 1}]}, "edits: the value of '0.old' must be text, not 1."),
    ({"edits": [{"new": "a"}]}, "edits: the value of '0.old' is missing in an object of 1."),
    ({"edits": ["a"]}, "edits: the value of '0' must be an object, not \"a\"."),
    ({"first": 5}, "first must be an object, not 5."),
    ({"last": [1]}, "last must be an object, not a list of 1."),
    ({"texts": 5}, "texts must be a list of objects, not 5."),
]


@pytest.mark.parametrize(("arguments", "says"), OBJECTS)
async def test_what_takes_objects_says_so(arguments: dict[str, Any], says: str) -> None:
    server = MCPServer("edits", tools=[build_tool(edit, title="Edit", annotations=CHANGES)])
    async with Client(server) as client:
        assert says in text_of(await client.call_tool("edit", arguments))


def test_every_tool_has_its_rows() -> None:
    assert len(ROWS) > 120
    assert len(SCHEMAS) == 16
