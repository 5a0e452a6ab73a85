"""`config set`: one setting is written, and all else in the file stays as it is."""

import json
import os
import stat
import textwrap
from pathlib import Path

import pytest

from mcp_sandbox.config import load_config, set_value
from mcp_sandbox.errors import ConfigError
from tests.test_cli import run


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No file of settings, and no variables that are some."""
    for name in [each for each in os.environ if each.startswith(("MCP_SANDBOX_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def put(file: Path, key: str, text: str) -> str:
    """Set it; return the file."""
    set_value(file, key, text, lambda _: None)
    return file.read_bytes().decode()


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "settings.yaml"
    file.write_bytes(textwrap.dedent(text).encode())
    return file


CASES = {
    "a value is replaced and its comments stay": (
        """
        # Mine.
        limits:
          memory:   4g  # for builds
          pids: 600

        network: none  # yet
        """,
        ("limits.memory", "8g"),
        """
        # Mine.
        limits:
          memory: 8g  # for builds
          pids: 600

        network: none  # yet
        """,
    ),
    "a new one comes last in its section": (
        """
        limits:
          # For builds.
          memory: 4g  # much
          # pids: 600
        # Of the network.
        network: none
        """,
        ("limits.pids", "700"),
        """
        limits:
          # For builds.
          memory: 4g  # much
          pids: 700
          # pids: 600
        # Of the network.
        network: none
        """,
    ),
    "one without a section comes last in the file": (
        "network: none\n# The end.\n",
        ("limits.pids", "700"),
        "network: none\nlimits.pids: 700\n# The end.\n",
    ),
    "a file of comments alone keeps them": (
        "# Nothing yet.\n# limits.pids: 512\n",
        ("limits.pids", "700"),
        "# Nothing yet.\n# limits.pids: 512\nlimits.pids: 700\n",
    ),
    "in braces": (
        "limits: {pids: 600}  # few\nsessions: {}\n",
        ("limits.memory", "8g"),
        "limits: {memory: 8g, pids: 600}  # few\nsessions: {}\n",
    ),
    "in empty braces": ("limits: {}\n", ("limits.cpus", "1"), "limits: {cpus: 1}\n"),
    "in a file of JSON": (
        '{"limits": {"pids": 600}, "network": "none"}',
        ("limits.pids", "700"),
        '{"limits": {"pids": 700}, "network": "none"}\n',
    ),
    "a section in a section": (
        "agents:\n    run:\n        max_requests: 5\n    command: claude\n",
        ("agents.run.timeout", "1h"),
        "agents:\n    run:\n        max_requests: 5\n        timeout: 1h\n    command: claude\n",
    ),
    "a list of lines is replaced, with comments around it": (
        """
        egress:
          allow:  # these
            - a.org  # mine
            - b.org
          # And those.
        network: allowlist
        """,
        ("egress.allow", '["c.org"]'),
        """
        egress:
          allow: ["c.org"]  # these
          # And those.
        network: allowlist
        """,
    ),
    "a list that is no deeper than its name": (
        "skills:\n  folders:\n  - /a\n  - /b\nnetwork: none\n",
        ("skills.folders", '["/c"]'),
        'skills:\n  folders: ["/c"]\nnetwork: none\n',
    ),
    "names with texts": ("env:\n  A: b\n", ("env", '{"A": "012"}'), 'env: {"A": "012"}\n'),
    "of several that are written the one that holds": (
        "limits:\n  pids: 600\nlimits.pids: 700\n",
        ("limits.pids", "800"),
        "limits:\n  pids: 600\nlimits.pids: 800\n",
    ),
    "a text of several lines": (
        "docker:\n  image: |\n    mine\n  # Last.\n",
        ("docker.image", "yours"),
        "docker:\n  image: yours\n  # Last.\n",
    ),
    "lines of Windows": (
        "limits:\r\n  pids: 600\r\nnetwork: none\r\n",
        ("limits.memory", "8g"),
        "limits:\r\n  pids: 600\r\n  memory: 8g\r\nnetwork: none\r\n",
    ),
    "a mark at the beginning": (
        "\ufefflimits.pids: 600\n",
        ("limits.pids", "700"),
        "\ufefflimits.pids: 700\n",
    ),
    "no last line end": ("network: none", ("limits.cpus", "1"), "network: none\nlimits.cpus: 1\n"),
    "between marks of a document": (
        "---\nnetwork: none\n...\n",
        ("network", "open"),
        "---\nnetwork: open\n...\n",
    ),
}


@pytest.mark.parametrize(("before", "given", "after"), CASES.values(), ids=CASES)
def test_one_setting_is_written_and_all_else_stays(
    before: str, given: tuple[str, str], after: str, tmp_path: Path
) -> None:
    file = written(tmp_path, before)
    assert put(file, *given) == textwrap.dedent(after)
    assert put(file, *given) == textwrap.dedent(after)


@pytest.mark.parametrize(
    ("key", "text", "line"),
    [
        ("limits.cpus", "1e3", "1e3"),
        ("limits.pids", "012345", '"012345"'),
        ("skills.shipped", "on", "on"),
        ("docker.image", "on", '"on"'),
        ("docker.image", "012", '"012"'),
        ("docker.image", "1e3", "1e3"),
        ("docker.image", "a # b", '"a # b"'),
        ("docker.image", "a: b", '"a: b"'),
        ("docker.image", "ä: \U0001f600", '"ä: \U0001f600"'),
        ("fleet.name", "", '""'),
        ("docker.image", "a\nnetwork: open", '"a\\nnetwork: open"'),
        ("workspace.size_limit", "1_000g", None),
    ],
)
def test_a_value_means_what_it_means_in_the_environment(
    key: str, text: str, line: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    if line is None:
        with pytest.raises(ConfigError, match="is not usable"):
            put(file, key, text)
        return
    assert put(file, key, text).splitlines()[-1] == f"{key}: {line}"
    monkeypatch.setenv(f"MCP_SANDBOX_{key.upper().replace('.', '__')}", text)
    meant = load_config().config
    monkeypatch.undo()
    assert load_config(file).config.model_dump(exclude={"data_dir"}) == meant.model_dump(
        exclude={"data_dir"}
    )


def test_a_path_is_meant_from_where_it_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    file = tmp_path / "settings.yaml"
    put(file, "data_dir", "data")
    put(file, "skills.folders", '["a", "~/b"]')
    config = load_config(file).config
    assert config.data_dir == tmp_path / "here" / "data"
    assert config.skills.folders == (tmp_path / "here" / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("limits.memry", "1g", "no setting 'limits.memry'; did you mean limits.memory?"),
        ("docker", "x", "no setting 'docker'; did you mean docker."),
        ("limits.pids", "many", "limits.pids 'many' (command line) is not usable: write a whole"),
        ("limits.cpus", "0", "limits.cpus '0' (command line) is not usable: write a number, more"),
        ("egress.allow", "a.org", "egress.allow: write it as JSON, a list, such as"),
        ("secrets", '{"A": "hunter2"}', "secrets.A (command line) is not usable: write"),
        ("storage.secret_key", "hunter2", "storage.secret_key (command line) is not usable"),
        ("fleet.redis", "hunter2", "fleet.redis (command line) is not usable"),
        ("env", '{"A=": "hunter2"}', "env (command line) is not usable"),
        ("env", '{"A": "hunter2"', "env: write it as JSON, names with texts"),
    ],
)
def test_what_no_server_would_start_with_is_refused_in_its_words(
    key: str, text: str, said: str, tmp_path: Path
) -> None:
    before = "# Mine.\nlimits:\n  pids: 600\n"
    file = written(tmp_path, before)
    with pytest.raises(ConfigError) as caught:
        put(file, key, text)
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert file.read_text() == before


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("limits:\n\tpids: 600\n", r"line 2: found character .* cannot start any token; correct"),
        ("limits: [\n", "is not valid YAML: line 2"),
        ("network: none\nnetwork: open\n", "line 2: network is set twice"),
        ("limits:\n  memry: 1g\n", "line 2: there is no setting 'limits.memry'"),
        ("limits:\n  cpus: none\n", r"limits.cpus 'none' \(.* line 2\) is not usable"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML: line 2"),
        ("limits: &a {cpus: &c 1, pids: 20}\npool: {size: *c}\n", r"no telling where limits.cpus"),
    ],
)
def test_a_file_that_is_not_understood_stays_as_it_is(
    before: str, said: str, tmp_path: Path
) -> None:
    file = written(tmp_path, before)
    with pytest.raises(ConfigError, match=said):
        put(file, "limits.cpus" if "&c" in before else "limits.pids", "700")
    assert file.read_text() == before


def test_a_wrong_value_is_mended_by_setting_it(tmp_path: Path) -> None:
    file = written(tmp_path, "limits:\n  pids: none\n")
    assert put(file, "limits.pids", "600") == "limits:\n  pids: 600\n"


def test_the_rules_of_the_policy_are_read_before_they_are_written_down(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- id: x\n")
    wrong = run("config", "set", "policy.rules", json.dumps([str(rules)]), home=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "rules.yaml:1: no rule" in wrong.stderr
    assert not (tmp_path / ".config").exists()


def test_a_linked_file_is_changed_where_it_lies_and_its_mode_is_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "settings.yaml", tmp_path / "link.yaml"
    real.parent.mkdir()
    real.write_text("network: none\n")
    real.chmod(0o640)
    link.symlink_to(real)
    put(link, "limits.pids", "600")
    assert link.is_symlink()
    assert real.read_text() == "network: none\nlimits.pids: 600\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert [each.name for each in real.parent.iterdir()] == ["settings.yaml"]


def test_a_file_that_others_may_change_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "network: none\n")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=r"others may write to .*chmod go-w"):
        put(file, "limits.pids", "600")


def test_set_makes_the_file_and_shows_the_setting_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / ".config" / "mcp-sandbox" / "mcp-sandbox.yaml"
    done = run("config", "set", "limits.pids", "600", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].split()[:5] == ["limits.pids", "600", str(path), "line", "2"]
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (
        0o600,
        0o700,
    )
    # One that is named, too; what goes before the file is said.
    named, more = tmp_path / "own.yaml", {"MCP_SANDBOX_LIMITS__PIDS": "800"}
    given = ("config", "set", "limits.pids", "700", "--json", "--config", str(named))
    shown = json.loads(run(*given, home=tmp_path, **more).stdout)["limits.pids"]
    assert (shown["value"], shown["source"]) == (800, "environment MCP_SANDBOX_LIMITS__PIDS")
    assert named.read_text().splitlines()[1:] == ["limits.pids: 700"]
    secret = run("config", "set", "env", '{"TOKEN": "hunter2"}', home=tmp_path)
    assert "(hidden)" in secret.stdout
    assert "hunter2" not in secret.stdout + secret.stderr
    assert "hunter2" in path.read_text()
    for words in ((), ("limits.pids",), ("limits.pids", "1", "2")):
        wrong = run("config", "set", *words, home=tmp_path)
        assert wrong.returncode == 2
        assert "`config set NAME VALUE`" in " ".join(wrong.stderr.split())
