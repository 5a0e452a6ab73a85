import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
import typer
from typer.testing import CliRunner

from mcp_sandbox.cli import cli
from mcp_sandbox.errors import ConfigError
from tests.daemon.running import ended

ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}


def run(*arguments: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user would, with an empty home and nothing on stdin."""
    done = anyio.run(partial(ended, arguments, env={**ENVIRONMENT, "HOME": str(home), **more}))
    return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)


def test_help_names_every_command(tmp_path: Path) -> None:
    done = run("--help", home=tmp_path)
    assert done.returncode == 0
    for command in ("connect", "stdio", "config", "doctor", "demo", "images", "token"):
        assert command in done.stdout
    heads = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("╭")]
    assert heads == ["Options", "Chats", "The", "What", "Set"]


def command_lines(group: typer.Typer) -> Iterator[list[str]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield [command.name or command.callback.__name__.replace("_", "-")]
    for inner in group.registered_groups:
        assert inner.name is not None
        assert inner.typer_instance is not None
        yield [inner.name]
        yield from ([inner.name, *words] for words in command_lines(inner.typer_instance))


@pytest.mark.parametrize("words", [*command_lines(cli)], ids=" ".join)
def test_every_command_explains_itself(words: list[str]) -> None:
    """Square brackets in a help text are markup, and may be wrong."""
    for width in ("40", "80", "200"):
        result = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": width})
        assert result.exit_code == 0, result.output
        assert f"Usage: root {words[0]}" in result.output
        assert not {"{", "<bool>", "<str>", "list["} & {*result.output, *result.output.split()}
    assert not re.search(r"\[OPTIONS\] .*([a-z]|\[\[|\.\.\.\.)", result.output)
    if "--socket" in result.output:
        assert "--data" in result.output
        assert "--config" in result.output


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("help", "Did you mean `mcp-sandbox --help`?"),
        ("version", "Did you mean `mcp-sandbox --version`?"),
        ("exec", "Did you mean `mcp-sandbox shell`?"),
        ("logz", "Did you mean `mcp-sandbox logs`?"),
        ("audit help", "Did you mean `mcp-sandbox audit --help`?"),
        ("audit exec", "`mcp-sandbox audit --help` lists what there is."),
        ("init claude-code", "Did you mean `mcp-sandbox init claude`?"),
        ("init gemini", "what `mcp-sandbox init cursor --print` shows"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(given: str, meant: str) -> None:
    env = {"COLUMNS": "200"}
    done = CliRunner().invoke(cli, given.split(), env=env, prog_name="mcp-sandbox")
    assert done.exit_code == 2
    assert f"There is no `mcp-sandbox {given}`" in done.output
    assert meant in done.output


def test_the_daemon_of_a_data_folder_is_found_by_naming_that(tmp_path: Path) -> None:
    asked = [run("status", *more, home=tmp_path) for more in ((), ("--data", str(tmp_path / "d")))]
    assert [done.returncode for done in asked] == [3, 3]
    assert asked[0].stderr != asked[1].stderr
    (tmp_path / "wrong.yaml").write_text("limits: 1")
    wrong = run("ls", "--config", str(tmp_path / "wrong.yaml"), home=tmp_path)
    assert "wrong.yaml line 1" in wrong.stderr


@pytest.mark.parametrize(
    "words",
    ["shell a ls", "cp a:x -", "ls", "status", "audit show", "token list", "init cursor --print"],
)
def test_no_word_of_a_library_is_in_a_message(words: str, tmp_path: Path) -> None:
    """A home that is no folder is met at different places."""
    home = tmp_path / "home"
    home.write_text("")
    done = run(*words.split(), home=home)
    assert not {"Errno", "Traceback", "Input", "report"} & {*re.findall(r"\w+", done.stderr)}
    for wrong in (OSError(13, "Permission denied", "/x"), "Value error, Input should be text"):
        assert str(ConfigError(f"no: {wrong}")) in (
            "no: Permission denied: '/x'",
            "no: should be text",
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("token list", "no tokens"),
        ("audit show", "nothing was recorded yet"),
        ("ls", "no chats yet"),
    ],
)
def test_empty_lists_say_so(words: str, said: str, tmp_path: Path) -> None:
    done = run(*words.split(), home=tmp_path)
    assert (done.returncode, done.stdout.startswith(said)) == (0, True), done


def test_a_home_too_long_for_a_socket_gets_a_short_one_of_its_own(tmp_path: Path) -> None:
    sockets = set[Path]()
    for name in ("a" * 120, "b" * 120, "ö" * 60):
        (tmp_path / name).mkdir()
        asked = run("status", home=tmp_path / name)
        (path,) = re.findall(r"/tmp/mcp-sandbox-\d+/[\w-]+\.sock", asked.stderr)
        sockets.add(Path(path))
    assert len(sockets) == 3
    done = run("shell", "a", "ls", home=tmp_path / name, MCP_SANDBOX_BACKEND="unsafe-local")
    assert done.stderr == "error: no chat is called 'a': `mcp-sandbox ls` lists them\n"
    for left in Path(path).parent.glob(f"{Path(path).name}*"):
        left.unlink()
    with suppress(OSError):
        Path(path).parent.rmdir()


def test_version_is_the_one_of_the_package(tmp_path: Path) -> None:
    done = run("--version", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("mcp-sandbox 0.")


def test_unknown_option_is_a_usage_error(tmp_path: Path) -> None:
    done = run("config", "--nonsense", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--nonsense" in done.stderr


def test_unusable_chat_is_a_usage_error(tmp_path: Path) -> None:
    done = run("stdio", "--chat", "../other", home=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not usable" in " ".join(done.stderr.split())


def test_wrong_configuration_is_one_readable_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("limits:\n  memry: 1g\n")
    done = run("config", "--config", str(file), home=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: {file} line 2: there is no setting 'limits.memry'; did you mean limits.memory? "
        "`mcp-sandbox config` lists all settings\n"
    )


def test_unknown_backend_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = run("config", "--backend", "podman", home=tmp_path)
    assert done.returncode == 1
    assert "write auto or docker or bubblewrap or unsafe-local" in done.stderr


def test_configuration_as_json_names_every_source(tmp_path: Path) -> None:
    done = run("config", "--json", "--data", str(tmp_path / "data"), home=tmp_path)
    settings = json.loads(done.stdout)
    assert settings["data_dir"]["value"] == str(tmp_path / "data")
    assert settings["data_dir"]["source"] == "command line"
    assert settings["limits.memory"]["value"] == "2g"
    assert settings["limits.memory"]["source"] == "default"
    assert settings["limits.memory"]["help"]


def test_settings_are_shown_by_name_and_section_with_the_nearest_of_what_there_is_not(
    tmp_path: Path,
) -> None:
    asked = run("config", "limits", "network", "agents.run", "--json", home=tmp_path)
    shown = json.loads(asked.stdout)
    assert {"network", "limits.memory", "limits.pids", "agents.run.timeout"} <= {*shown}
    assert {key.split(".")[0] for key in shown} == {"network", "limits", "agents"}
    wrong = run("config", "limits", "memry", home=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "there is no setting 'memry'; did you mean limits.memory?" in wrong.stderr


def test_the_example_of_a_file_says_what_holds_without_one(tmp_path: Path) -> None:
    path = Path(run("config", "path", home=tmp_path).stdout.strip())
    assert path == tmp_path / ".config" / "mcp-sandbox" / "mcp-sandbox.yaml"
    usual = json.loads(run("config", "--json", home=tmp_path).stdout)
    path.parent.mkdir(parents=True)
    example = run("config", "example", home=tmp_path).stdout
    path.write_text(re.sub("^# ", "", example, flags=re.MULTILINE))
    set_ = json.loads(run("config", "--json", home=tmp_path).stdout)
    assert {key: each["value"] for key, each in set_.items()} == {
        key: each["value"] for key, each in usual.items()
    }
    assert {each["source"].split(" line")[0] for each in set_.values()} == {str(path)}
    other = run("config", "path", "--config", "x.yaml", home=tmp_path)
    assert other.stdout == "/x.yaml\n"


def test_configuration_as_a_table_has_a_line_for_each_setting(tmp_path: Path) -> None:
    done = run("config", home=tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    keys = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"setting", "data_dir", "limits.memory", "sessions.remove_after"} <= keys


def test_interrupt_before_the_server_listens_ends_it_without_a_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "mcp_sandbox", "stdio", "--data", str(tmp_path / "data")],
        env={**ENVIRONMENT, "HOME": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as server:
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=30)
    assert (output, errors) == (b"", b"")


@pytest.mark.docker
def test_image_is_listed_and_has_its_tools(tmp_path: Path) -> None:
    listed = json.loads(run("images", "list", "--json", home=tmp_path).stdout)
    assert "mcp-sandbox/base:latest" in [row["name"] for row in listed if row["current"]]
    checked = run("images", "check", "--json", home=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["ripgrep"].startswith("ripgrep")


@pytest.mark.docker
def test_image_without_our_runner_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "mcp-sandbox.yaml"
    file.write_text("docker:\n  image: mcp-sandbox/nothing:here\n")
    done = run("images", "check", "--config", str(file), home=tmp_path)
    assert done.returncode == 1
    assert "run: mcp-sandbox images build" in done.stderr


def with_secrets(folder: Path) -> tuple[str, ...]:
    """A configuration of two secrets, of which one source is not there."""
    (folder / "value").write_text("s3cret-token-of-the-operator\n")
    hosts = '["api.example.com", "*.example.org:8443"]'
    (folder / "secrets.yaml").write_text(
        f"secrets:\n  GOOD: {{from: 'file:{folder}/value', hosts: {hosts}, header: X-Key}}\n"
        f"  LOST: {{from: 'file:{folder}/absent', hosts: [api.example.com], users: [a, b]}}\n"
    )
    return "--config", str(folder / "secrets.yaml")


def test_secrets_are_listed_without_asking_their_sources(tmp_path: Path) -> None:
    done = run("secrets", "list", *with_secrets(tmp_path), home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["secret", "hosts", "header", "users", "value"],
        [
            *("GOOD", "api.example.com:443,", "*.example.org:8443", "x-key", "local"),
            *("not", "asked"),
        ],
        ["LOST", "api.example.com:443", "authorization", "a,", "b", "not", "asked"],
    ]


def test_check_of_secrets_tells_lengths_and_problems_and_never_a_value(tmp_path: Path) -> None:
    table = run("secrets", "check", *with_secrets(tmp_path), home=tmp_path)
    found = run("secrets", "check", "--json", *with_secrets(tmp_path), home=tmp_path)
    assert (table.returncode, found.returncode) == (1, 1)
    assert "28 bytes" in table.stdout
    assert "its file cannot be used: No such file or directory" in table.stdout
    assert [each["length"] for each in json.loads(found.stdout)] == [28, None]
    assert "s3cret" not in table.stdout + table.stderr + found.stdout + found.stderr
    (tmp_path / "secrets.yaml").write_text("{}")
    none = run("secrets", "check", "--config", str(tmp_path / "secrets.yaml"), home=tmp_path)
    assert (none.returncode, none.stdout) == (0, "there are no secrets in the configuration\n")
