"""README and docs are true: commands parse, examples run, tables are what the code says."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client, StdioServerParameters
from mcp.types import TextContent, Tool
from typer.testing import CliRunner

from mcp_sandbox.app.chats import read_allowed_hosts
from mcp_sandbox.cli import cli
from mcp_sandbox.config import Config, DockerConfig, load_config
from mcp_sandbox.config.sources import KNOWN, LoadedConfig
from mcp_sandbox.doctor.attack_inside import ATTEMPTS
from mcp_sandbox.models import ChatId
from mcp_sandbox.workspace.layout import parse_aliases
from tests.e2e import npm
from tests.server.scripted import answering, server_of, shipped_skills
from tests.web.clients import served

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*.md"))}
TEXT = "\n".join([README, *PAGES.values()])
LINES = README.splitlines()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SPANS = re.findall(
    r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
)
SECTIONS = {key.split(".")[0] for key in KNOWN if "." in key}


def blocks(language: str) -> list[str]:
    found = [text for kind, text in BLOCKS if kind == language]
    assert found, language
    return found


def table(heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, without its two lines of head."""
    start = LINES.index(heading)
    first = next(n for n in range(start, len(LINES)) if LINES[n].startswith("|"))
    rows = list[list[str]]()
    for line in LINES[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def environment(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home), **more}


def python(*arguments: str, home: Path, **more: str) -> str:
    """What a Python program prints, which must succeed, in an empty home."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(home, **more),
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_first_command_and_its_proof_come_early() -> None:
    assert LINES.index("make demo") < 15
    assert LINES.index("Done: nothing was left running.") < 30
    assert len(LINES) <= 300


@pytest.mark.bubblewrap
def test_the_shown_run_is_what_the_demo_prints(tmp_path: Path) -> None:
    def plain(text: str) -> list[str]:
        without_times = re.sub(r"  \d+ ms$", "", text, flags=re.MULTILINE)
        return [line.strip("│ ") for line in without_times.splitlines()]

    folder = {"TMPDIR": str(tmp_path)}
    printed = iter(
        plain(
            python("-m", "mcp_sandbox", "demo", "--backend", "bubblewrap", home=tmp_path, **folder)
        )
    )
    shown = plain(blocks("text")[0])
    assert len(shown) > 8
    # Each search goes on where the last one ended, so the order counts too.
    assert [line for line in shown if line not in printed] == []


async def offered_tools(data_root: Path) -> Sequence[Tool]:
    server = server_of(answering(None), shipped_skills(data_root))
    with anyio.fail_after(10):
        async with Client(server) as client:
            return (await client.list_tools()).tools


def parameter(name: str, schema: dict[str, Any], *, required: bool) -> str:
    if required:
        return f"**{name}**"
    default = schema.get("default")
    return name if default is None else f"{name} = {json.dumps(default).strip(chr(34))}"


def tool_row(tool: Tool) -> str:
    required = tool.input_schema.get("required", [])
    parameters = [
        parameter(name, schema, required=name in required)
        for name, schema in tool.input_schema["properties"].items()
    ]
    assert tool.description is not None
    first = re.split(r"(?<=\.)\s", tool.description)[0].replace("\n", " ")
    return f"| `{tool.name}` | {', '.join(parameters) or '-'} | {first.replace('|', '/')} |"


async def test_the_tool_table_is_made_of_the_registered_tools(tmp_path: Path) -> None:
    expected = [tool_row(tool) for tool in await offered_tools(tmp_path)]
    start = LINES.index("## What the agent can do")
    shown = [line for line in LINES[start : start + 20] if line.startswith("| `")]
    assert shown == expected, "put these lines in README.md:\n" + "\n".join(expected)


@cache
def outcome_of_parsing(arguments: tuple[str, ...]) -> int:
    # --help keeps the command from running; options and their values are parsed all the same.
    at = 1 if arguments[0] == "shell" else len(arguments)
    return CliRunner().invoke(cli, [*arguments[:at], "--help", *arguments[at:]]).exit_code


def our_commands(text: str) -> Iterator[tuple[str, ...]]:
    """The arguments of each call of ours in a line of shell, other programs' calls around it."""
    for command in re.split(r"&&|;|\|", text.partition("#")[0]):
        words = shlex.split(command)
        ours = [n for n, word in enumerate(words) if Path(word).name == "mcp-sandbox"]
        if ours:
            arguments = words[ours[-1] + 1 :]
            end = arguments.index("--method") if "--method" in arguments else len(arguments)
            yield tuple(arguments[:end])


def test_every_command_of_ours_is_one() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    spans = [span for span in SPANS if re.match(r"(\S+=\S+ )?(\.venv/bin/)?mcp-sandbox ", span)]
    commands = [command for text in (*lines, *spans) for command in our_commands(text)]
    assert len(commands) >= 8
    assert [command for command in commands if outcome_of_parsing(command) != 0] == []
    assert outcome_of_parsing(("stdio", "--nonsense")) != 0


def test_shell_blocks_are_shell_and_their_make_targets_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks("sh"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True, timeout=10)
        assert set(re.findall(r"^make (\w+)", block, re.MULTILINE)) <= targets
    assert {span.removeprefix("make ") for span in SPANS if span.startswith("make ")} <= targets


def test_the_shown_client_files_are_what_init_writes() -> None:
    written = [
        json.loads(CliRunner().invoke(cli, ["init", client, "--print"]).stdout)
        for client in ("claude", "cursor", "vscode", "inspector")
    ]
    examples = [json.loads(block) for block in blocks("json") if '"command"' in block]
    assert examples
    for shown in examples:
        for servers in shown.values():
            assert Path(servers["sandbox"]["command"]).name == "mcp-sandbox"
            servers["sandbox"]["command"] = next(iter(written[0].values()))["sandbox"]["command"]
        assert shown in written


async def test_the_http_example_reaches_the_chat_that_it_names(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("json") if '"url"' in block]
    entry = json.loads(block)["mcpServers"]["sandbox"]
    assert entry["url"] == "http://127.0.0.1:8080/mcp"
    async with served(tmp_path / "data") as web:
        _, secret = await web.token("alice")
        token = entry["headers"]["Authorization"].replace("${SANDBOX_TOKEN}", secret)
        async with web.client("auto", {**entry["headers"], "Authorization": token}) as client:
            await client.call_tool("exec", {"command": "echo"})
    assert web.computers.chats == [ChatId("alice", "my-project")]


@pytest.mark.bubblewrap
async def test_the_skill_that_it_makes_is_offered_and_used(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("sh") if "SKILL.md" in block]
    assert len(block.splitlines()) <= 10
    programs = tmp_path / "programs"
    programs.mkdir()
    ours = programs / "mcp-sandbox"
    ours.write_text(f'#!/bin/sh\nexec {sys.executable} -m mcp_sandbox "$@"\n')
    ours.chmod(0o755)
    place = environment(tmp_path, PATH=f"{programs}:{os.environ['PATH']}", PYTHONPATH=str(ROOT))
    with anyio.fail_after(50):
        made = await anyio.run_process(
            ["bash", "-e", "-c", block], cwd=tmp_path, env=place, check=False
        )
        assert made.returncode == 0, made
        arguments = ["stdio", "--chat", "reader", "--backend", "bubblewrap"]
        server = StdioServerParameters(command=str(ours), args=arguments, env=place)
        async with Client(server) as client:
            assert "- money-tables: Write tables of money" in (client.instructions or "")
            got = await client.call_tool("skill_activate", {"name": "money-tables"})
            (text,) = got.content
            assert isinstance(text, TextContent)
            assert "Columns: date, supplier, net, VAT, gross." in text.text
            read = {"path": "/opt/skills/money-tables/SKILL.md"}
            assert not (await client.call_tool("read_file", read)).is_error


@pytest.mark.bubblewrap
def test_the_library_example_prints_what_it_says(tmp_path: Path) -> None:
    for number, block in enumerate(blocks("python")):
        compile(block, f"README block {number}", "exec")
    example, *_ = blocks("python")
    place = {"MCP_SANDBOX_BACKEND": "bubblewrap", "MCP_SANDBOX_DATA_DIR": str(tmp_path / "data")}
    said = re.findall(r"print\(.*\)  # (.*)", example)
    assert len(said) > 3
    printed = python("-W", "error", "-c", example, home=tmp_path, **place)
    assert printed.replace(",", "").split() == " ".join(said).replace(",", "").split()


def test_configuration_examples_are_accepted(tmp_path: Path) -> None:
    spans = [span for span in SPANS if span.partition(":")[0] in SECTIONS | KNOWN.keys() - {""}]
    whole = [span for span in spans if re.match(r"\w+: ", span)]
    assert len(whole) >= 4
    for number, block in enumerate((*whole, *blocks("yaml"))):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        config = load_config(file).config
        parse_aliases(config.workspace.aliases)
        read_allowed_hosts(config)


def test_the_image_example_ends_as_the_sandbox_user() -> None:
    ours = (ROOT / "images/base/Dockerfile").read_text().splitlines()
    for block in blocks("dockerfile"):
        lines = block.splitlines()
        assert lines[0] == f"FROM {DockerConfig().image}"
        assert lines[-1] == next(line for line in ours if line.startswith("USER "))


def test_the_agents_programs_are_those_of_the_image() -> None:
    listed = (ROOT / "images/claude/programs.txt").read_text().replace("ARCH", "x64").splitlines()
    (line,) = [block for block in blocks("sh") if block.startswith("npm install")]
    assert re.findall(r"@\S+@\S+", line) == [each for each in listed if each.startswith("@")]
    assert f"npm install --global --prefix ~/agents {npm.PACKAGES['codex']}" in SPANS


def test_settings_have_the_shown_defaults_and_meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    known = {
        key: (value, text)
        for key, value, _, text in LoadedConfig(Config(), {}, load_config(None).again).rows()
    }
    rows = table("## Configure")
    assert len(rows) == 10
    for name, default, meaning in rows:
        value, text = known[name.strip("`")]
        shown = value if isinstance(value, str) else json.dumps(value)
        home = str(Path.home())
        assert (default.strip("`"), meaning) == (shown.replace(home, "~"), text), name


def test_every_named_setting_exists() -> None:
    dotted = [re.match(r"(\w+)\.(\w+)", span) for span in SPANS]
    named = {match[0] for match in dotted if match and match[1] in SECTIONS}
    variables = {name.lower().replace("__", ".") for name in re.findall(r"MCP_SANDBOX_(\w+)", TEXT)}
    assert len(named) > 8
    assert named | variables <= KNOWN.keys()


def test_every_named_path_exists() -> None:
    starts = ("mcp_sandbox/", "tests/", "images/")
    paths = {span for span in SPANS if span.startswith(starts) and ":" not in span}
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert {f"docs/{name}" for name in PAGES} <= {*links}
    assert paths
    assert [path for path in (*paths, *links) if not (ROOT / path).exists()] == []


def test_every_promise_of_protection_has_a_test_that_holds() -> None:
    marks = {
        node.name: " ".join(ast.unparse(mark) for mark in node.decorator_list)
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    rows = table("## What it protects against")
    assert len(rows) > 10
    for against, _, proof in rows:
        name = proof.strip("`")
        assert name in marks, f"{against}: there is no {name}"
        weak = re.search(r"\b(gap|xfail|skip)\b", marks[name])
        assert not weak, f"{against}: {name} does not hold"


@cache
def messages() -> str:
    """Every text of the code, one a line, with … for the parts that vary."""
    texts = list[str]()
    for path in (ROOT / "mcp_sandbox").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
    return "\n".join(texts)


def test_every_explained_message_is_still_one_of_ours() -> None:
    rows = table("## When something fails")
    assert len(rows) > 10
    for shown, _, _ in rows:
        parts = [part.strip(" :,;") for part in shown.split("`")[1].split("…")]
        missing = [part for part in parts if part not in messages()]
        assert not missing, f"no message holds {missing}"


def test_what_the_page_on_security_says_is_tried_by_tests_and_attempts_that_exist() -> None:
    named = re.findall(r"`(test_\w+)`", PAGES["security.md"])
    exist = {
        name
        for file in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) > 30
    assert set(named) <= exist
    cells = [row.strip("| ").split(" | ") for row in PAGES["security.md"].splitlines()]
    scenarios = [cell for cell in cells if len(cell) == 4 and cell[1] in ("held", "n/a", "kernel")]
    assert len(scenarios) == 18
    attempts = {each for *_, tried in scenarios for each in re.findall(r"\*([^*]+)\*", tried)}
    assert len(attempts) > 9
    assert attempts <= {*ATTEMPTS}
    assert all(tried != "-" or verdict == "kernel" for _, verdict, _, tried in scenarios)
