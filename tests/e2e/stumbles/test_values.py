"""Values that models send: read as they are meant, or refused with what works instead."""

from typing import Any

import pytest

from tests.e2e.stumbles.conftest import Agent


async def test_null_is_the_default_of_an_optional_parameter(agent: Agent) -> None:
    nothing = {"cwd": None, "env": None, "stdin": None, "timeout_s": None}
    assert await agent.told("exec", command="pwd", **nothing) == "/workspace\n"
    assert await agent.told("run_code", code="print(1)", language=None, timeout_s=None) == "1\n"
    await agent.told("write_file", path="a", content="x", encoding=None, append=None)
    assert await agent.told("read_file", path="a", offset=None, limit=None) == "     1\tx"


async def test_numbers_and_booleans_may_be_text(agent: Agent) -> None:
    await agent.told("write_file", path="d/a", content="1\n2\n3\n", append="false")
    assert (await agent.told("read_file", path="d/a", offset="2", limit="1")).startswith(
        "     2\t2"
    )
    assert await agent.told("delete_file", path="d", recursive="True")
    told = await agent.refused("list_files", limit="ten")
    assert told == 'limit must be a whole number from 1 to 10,000, not "ten".'


async def test_variables_may_be_numbers_and_booleans(agent: Agent) -> None:
    env = {"A": 1, "B": True, "C": 1.5, "D": None}
    assert await agent.told("exec", command='echo "$A $B $C ${D-unset}"', env=env) == (
        "1 true 1.5 unset\n"
    )


@pytest.mark.parametrize(
    "path",
    [
        "file:///workspace/d/a b.txt",
        "file:///workspace/d/a%20b.txt",
        "file://d/a b.txt",
        "'d/a b.txt'",
        '"d/a b.txt"',
        "`d/a b.txt`",
        "d/a b.txt\n",
        " d/a b.txt ",
    ],
)
async def test_the_file_that_is_meant_is_written_and_read(agent: Agent, path: str) -> None:
    await agent.told("write_file", path=path, content="x")
    assert await agent.told("exec", command="ls; ls d") == "d\na b.txt\n"
    assert await agent.told("read_file", path=path) == "     1\tx"


@pytest.mark.parametrize("home", ["$HOME", "${HOME}", "~", "'$HOME'", "file://$HOME"])
async def test_the_home_may_be_named_by_its_variable(agent: Agent, home: str) -> None:
    inside = f"{home[:-1]}/x'" if home.endswith("'") else f"{home}/x"
    await agent.told("write_file", path=inside, content="x")
    assert await agent.told("exec", command="cat ~/x") == "x"
    assert await agent.told("exec", command='[ "$PWD" = "$HOME" ] && echo yes', cwd=home) == "yes\n"
    assert (await agent.told("glob", pattern="x", path=home)).endswith("/x")
    assert (await agent.told("glob", pattern=inside)).endswith("/x")


async def test_a_file_that_is_really_named_so_is_reached(agent: Agent) -> None:
    make = "touch \"'a'\" 'b ' a b; mkdir \"'d'\" d file:; echo quoted > \"'a'\"; echo space > 'b '"
    await agent.told("exec", command=make)
    assert "quoted" in await agent.told("read_file", path="'a'")
    assert "space" in await agent.told("read_file", path="b ")
    assert await agent.told("exec", command="pwd", cwd="'d'") == "/workspace/'d'\n"
    assert "file:" in await agent.told("delete_file", path="file:")


async def test_a_glob_may_begin_anywhere(agent: Agent) -> None:
    await agent.told("exec", command="mkdir -p src; touch src/a.py /tmp/b.py ~/c.py")
    assert await agent.told("glob", pattern="/workspace/src/**/*.py") == "src/a.py"
    assert await agent.told("glob", pattern="/tmp/*.py") == "/tmp/b.py"
    assert (await agent.told("glob", pattern="~/*.py")).endswith("/c.py")
    assert await agent.told("glob", pattern="/src/*.py") == "src/a.py"


@pytest.mark.parametrize("fence", ["```python", "```", "~~~py"])
async def test_one_outer_fence_is_no_part_of_the_code(agent: Agent, fence: str) -> None:
    code = f"{fence}\nprint('''\n```\n''')\n{fence[:3]}\n"
    assert await agent.told("run_code", code=code) == "\n```\n\n"
    assert await agent.told("exec", command="```bash\necho 1\n```") == "1\n"


@pytest.mark.parametrize(
    ("tool", "given"),
    [
        ("exec", {"command": "$ ls"}),
        ("exec", {"command": "!ls"}),
        ("exec", {"command": "%pip install x"}),
        ("exec", {"command": ">>> x"}),
        ("run_code", {"code": "$ ls"}),
        ("run_code", {"code": "import os\n!ls"}),
        ("run_code", {"code": "%pip install x"}),
        ("run_code", {"code": ">>> x = 1"}),
        ("run_code", {"code": "$ ls", "language": "javascript"}),
    ],
)
async def test_prompts_and_notebook_commands_get_one_hint(
    agent: Agent, tool: str, given: dict[str, Any]
) -> None:
    *_, hint = (await agent.told(tool, **given)).splitlines()
    assert "is for prompts and notebooks: leave it out" in hint


async def test_code_that_prints_nothing_is_told_how_to_show_values(agent: Agent) -> None:
    told = await agent.told("run_code", code="x = 1\nx")
    assert told == "(no output)\n[nothing was printed: show values with print()]"
    told = await agent.told("run_code", code="1 + 1", language="js")
    assert "console.log()" in told
    assert await agent.told("exec", command="true") == "(no output)"
    assert "printed" not in await agent.told("run_code", code="open('a', 'w').write('x')")


@pytest.mark.parametrize(
    ("tool", "given", "ours"),
    [
        ("exec", {"cmd": "ls"}, "command"),
        ("exec", {"command": "ls", "workdir": "."}, "cwd"),
        ("edit_file", {"path": "a", "old_string": "x", "new": "y"}, "old"),
        ("edit_file", {"path": "a", "old": "x", "new_string": "y"}, "new"),
        ("move_file", {"source": "a", "dst": "b"}, "destination"),
        ("grep", {"pattern": "a", "include": "*.py"}, "glob"),
        ("read_file", {"file_path": "a"}, "path"),
        ("exec", {"zzz": "ls"}, "command"),
    ],
)
async def test_a_parameter_of_other_agents_is_answered_with_ours(
    agent: Agent, tool: str, given: dict[str, Any], ours: str
) -> None:
    assert f": did you mean {ours}? this tool takes " in await agent.refused(tool, **given)


async def test_a_tool_of_other_agents_is_answered_with_ours(agent: Agent) -> None:
    for theirs, ours in [("bash", "exec"), ("Read", "read_file"), ("Edit", "edit_file")]:
        told = await agent.refused(theirs)
        assert told.startswith(f"There is no tool '{theirs}': did you mean {ours}? the tools are")


@pytest.mark.parametrize("language", ["typescript", "c"])
async def test_an_unknown_language_is_answered_with_what_works(agent: Agent, language: str) -> None:
    told = await agent.refused("run_code", code="1", language=language)
    assert "language must be one of python, bash, javascript" in told
    assert "write a file, then exec gcc" in told


async def test_milliseconds_are_recognised(agent: Agent) -> None:
    told = await agent.refused("exec", command="true", timeout_s=600_000)
    assert told.endswith("not 600000. Milliseconds? It is seconds: 600.")


async def test_a_nul_is_refused_with_a_way_out_or_written(agent: Agent) -> None:
    for tool, name in [("read_file", "path"), ("exec", "command"), ("run_code", "code")]:
        told = await agent.refused(tool, **{name: "a\0b"})
        assert told.startswith(f"{name}: must not contain a NUL character: leave it out")
    await agent.told("write_file", path="a", content="a\0b")
    assert await agent.told("exec", command="wc -c < a") == "3\n"


async def test_a_glob_for_a_path_is_answered_with_what_takes_one(agent: Agent) -> None:
    await agent.told("write_file", path="a.txt", content="x")
    told = await agent.refused("delete_file", path="*.txt")
    assert "no pattern: find names with glob, or use exec (rm, mv, cat)" in told


async def test_a_path_with_too_much_in_front_is_answered_with_the_right_one(agent: Agent) -> None:
    await agent.told("write_file", path="src/f.txt", content="x")
    for path in ("workspace/src/f.txt", "/home/user/project/src/f.txt", "/src/f.txt"):
        assert "did you mean src/f.txt?" in await agent.refused("read_file", path=path)
    assert "did you mean src?" in await agent.refused("exec", command="ls", cwd="workspace/src")
