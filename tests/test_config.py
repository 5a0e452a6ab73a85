import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.config import AllowConfig, Config, LimitsConfig, load_config
from mcp_sandbox.config.values import parse_duration, parse_size, show_duration, show_size
from mcp_sandbox.errors import ConfigError


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home without a configuration file, and no setting variables."""
    for name in list(os.environ):
        if name.startswith(("MCP_SANDBOX_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mcp-sandbox.yaml"
    file.write_text(text)
    return file


def refused(file: Path | None = None, flags: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags)
    return str(caught.value)


def test_defaults_need_no_file(tmp_path: Path) -> None:
    loaded = load_config()
    assert loaded.config.backend == "auto"
    assert loaded.config.network == "none"
    assert loaded.config.data_dir == tmp_path / "home/.local/share/mcp-sandbox"
    assert {source for _, _, source, _ in loaded.rows()} == {"default"}


def test_every_setting_has_help() -> None:
    assert [key for key, _, _, text in load_config().rows() if not text] == []


def test_flags_win_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "backend: docker\nlimits:\n  pids: 100\n  cpus: 1\n  memory: 1g\n")
    monkeypatch.setenv("MCP_SANDBOX_LIMITS__PIDS", "200")
    monkeypatch.setenv("MCP_SANDBOX_LIMITS__CPUS", "1.5")
    loaded = load_config(file, {"limits.pids": 300, "network": None})
    assert loaded.config.limits == LimitsConfig(pids=300, cpus=1.5, memory=1 << 30)
    sources = {key: source for key, _, source, _ in loaded.rows()}
    assert sources["limits.pids"] == "command line"
    assert sources["limits.cpus"] == "environment MCP_SANDBOX_LIMITS__CPUS"
    assert sources["limits.memory"] == f"{file} line 5"
    assert sources["backend"] == f"{file} line 1"
    assert sources["network"] == "default"


def test_file_in_the_xdg_config_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "xdg/mcp-sandbox"
    folder.mkdir(parents=True)
    (folder / "mcp-sandbox.yaml").write_text("network: open\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert load_config().config.network == "open"


def test_file_named_by_the_environment_must_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_SANDBOX_CONFIG", str(tmp_path / "absent.yaml"))
    assert "cannot read the configuration file" in refused()


def test_data_directory_of_the_xdg_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert load_config().config.data_dir == tmp_path / "data/mcp-sandbox"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert load_config().config.data_dir == tmp_path / "home/.local/share/mcp-sandbox"


def test_empty_home_falls_back_to_the_password_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    assert load_config().config.data_dir.is_absolute()


def test_paths_in_the_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "data_dir: data\nskills: {folders: [one, /two, ~/three]}\n")
    monkeypatch.chdir("/")
    for path in (file, Path(os.path.relpath(file, "/"))):
        config = load_config(path).config
        assert config.data_dir == tmp_path / "data"
        home = tmp_path / "home/three"
        assert config.skills.folders == (tmp_path / "one", Path("/two"), home)


@pytest.mark.parametrize(
    ("name", "value"),
    [("DATA_DIR", "here"), ("DATA_DIR", ""), ("SKILLS__FOLDERS", '["a"]')],
)
def test_a_relative_path_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"MCP_SANDBOX_{name}", value)
    message = refused()
    assert f"MCP_SANDBOX_{name}" in message
    assert "absolute path" in message


def test_relative_data_directory_of_a_flag_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(flags={"data_dir": "here"}).config.data_dir == tmp_path / "here"
    assert load_config(flags={"data_dir": "~/there"}).config.data_dir == tmp_path / "home/there"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("limitss:\n  pids: 1\n", r"line 1: there is no setting 'limitss'; did you mean limits\?"),
        ("limits:\n  memry: 1g\n", r"line 2: .*did you mean limits\.memory\?"),
        ("memory: 1g\n", r"line 1: .*did you mean limits\.memory\?"),
        ("zzzzqqq: 1\n", r"line 1: there is no setting 'zzzzqqq'; remove it"),
        ("limits: 4\n", r"line 1: section 'limits' must hold"),
        ("- a\n", r"line 1: the file must hold"),
        ("network: none\nnetwork: open\n", r"line 2: network is set twice"),
        ("a: [\nb", r"not valid YAML: line 2"),
        (
            "backend: ocker\n",
            r"backend 'ocker' \(.* line 1\) is not usable: write auto or .*bubblewrap or",
        ),
        (
            "isolation_mode: sandbox-exec\n",
            r"line 1: isolation_mode is called `backend` here, .* macOS, .*bubblewrap.* docker on",
        ),
        ("isolation_mode: none\n", r"line 1: isolation_mode is .*, and its none unsafe-local;"),
        ("backend: sandbox-exec\n", r"backend 'sandbox-exec' \(.* macOS, .* Linux: write bubblewr"),
        ("limits:\n  memory: 2q\n", r"limits\.memory '2q' \(.* line 2\).*such as 512m or 2g"),
        ("sessions:\n  lifetime: soon\n", r"sessions\.lifetime 'soon'.*such as 90, 10m or 1h30m"),
        ("sessions:\n  lifetime: .nan\n", r"sessions\.lifetime nan.*not usable"),
        ("workspace:\n  cleanup: daily\n", r"workspace\.cleanup 'daily'.*such as 0 3 \* \* \*"),
        ("workspace:\n  cleanup: 0 0 30 2 *\n", r"workspace\.cleanup .*as cron does"),
        ("workspace:\n  retention: -1\n", r"workspace\.retention -1.*such as 90, .*at least 0s"),
        ("limits:\n  pids: -5\n", r"limits\.pids -5 .*write a whole number, at least 16$"),
        ("limits:\n  memory: 1m\n", r"limits\.memory '1m' .*such as 512m or 2g, at least 64m$"),
        ("pool:\n  size: 65\n", r"pool\.size 65 .*write auto or a whole number, .*at most 64$"),
        ("skills:\n  shipped: maybe\n", r"skills\.shipped 'maybe' .*write true or false$"),
        ("env: {PORT: 80}\n", r"^env\.PORT \(.* line 1\) .*write names with texts"),
        ("data_dir: [here]\n", r"data_dir \[.* line 1\).*write an absolute path$"),
        ("limits:\n  memory: !!python/name:os.system x\n", r"line 2: could not determine"),
        ("sandbox: {uid_range: 9-8}\n", r"sandbox\.uid_range .* line 1\).*write .* START-END"),
        ("sandbox: {uid_range: 0-8}\n", r"sandbox\.uid_range .*write .* START-END"),
        ("sandbox: {uid_range: 9-2147483647}\n", r"sandbox\.uid_range .*write .* START-END"),
        ("previews: {listen: 8081}\n", r"previews\.listen 8081 .*write HOST:PORT, such as 127.0.0"),
        ("previews: {listen: '8081'}\n", r"previews\.listen '8081' .*write HOST:PORT, such as"),
        ("previews: {url: a.test}\n", r"previews\.url 'a.test' .*write the address as https://"),
        ("env: {MCP_SANDBOX_TOKEN: x}\n", r"env \(.* line 1\).*'MCP_SANDBOX_TOKEN' cannot be"),
    ],
)
def test_wrong_file_is_refused_with_line_and_remedy(
    tmp_path: Path, text: str, expected: str
) -> None:
    message = refused(written(tmp_path, text))
    assert re.search(expected, message), message


def test_every_wrong_value_is_reported_at_once(tmp_path: Path) -> None:
    message = refused(written(tmp_path, "network: all\nlimits:\n  cpus: 0\n"))
    assert [line.split()[0] for line in message.splitlines()] == ["network", "limits.cpus"]


WRONG: tuple[object, ...] = (
    "",
    "soon",
    "NaN",
    "rel",
    -1,
    10**30,
    1.5,
    0,
    True,
    [],
    [1],
    [["a"]],
    {},
    {"a": 1},
    1e400,
)


@pytest.mark.parametrize("key", [key for key, _, _, _ in load_config().rows()])
def test_what_a_wrong_value_should_be_is_said_in_our_words(key: str) -> None:
    messages = []
    for value in WRONG:
        try:
            load_config(flags={key: value})
        except ConfigError as exc:
            messages += str(exc).splitlines()
    assert messages
    for message in messages:
        assert message.startswith((f"{key} ", f"{key}.")), message
        assert " (command line) is not usable: write " in message
        assert not re.search(r"[Ii]nput|valid|should|NoneType|pydantic|constrained", message)


@pytest.mark.parametrize(
    ("text", "endpoint", "expected"),
    [
        ("bucket: a", "", r"storage\.bucket 'a' .* line 1\) .*write all of storage\.endpoint"),
        ("bucket: a", "http://s3", r"line 1\) .*access_key and secret_key"),
        ("bucket: a", "s3:9000", r"storage\.endpoint 's3:9000' \(environment S3_ENDPOINT\).*https"),
        ("endpoint: s3:9000", "", r"storage\.endpoint 's3:9000' .* line 1\) .*https://HOST:PORT"),
        ("access_key: AKIA1234", "", r"access_key \(.* line 1\).* file:PATH .* env:NAME"),
        ("access_key: 'env:'", "", r"access_key \("),
    ],
)
def test_an_object_store_that_is_half_configured_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, endpoint: str, expected: str
) -> None:
    monkeypatch.setenv("S3_ENDPOINT", endpoint)
    message = refused(written(tmp_path, f"storage: {{{text}}}\n"))
    assert re.search(expected, message), message
    assert "AKIA" not in message


def test_unknown_variable_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SANDBOX_LIMITS__MEMRY", "1g")
    assert "did you mean MCP_SANDBOX_LIMITS__MEMORY?" in refused()


def test_variable_of_a_list_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SANDBOX_WORKSPACE__ALIASES", '["/mnt/user-data/workspace"]')
    assert load_config().config.workspace.aliases == ("/mnt/user-data/workspace",)
    monkeypatch.setenv("MCP_SANDBOX_WORKSPACE__ALIASES", "/mnt")
    assert "write it as JSON" in refused()


def test_sandbox_variables_are_never_shown(tmp_path: Path) -> None:
    loaded = load_config(written(tmp_path, "env:\n  API_KEY: secret-one\n"))
    assert loaded.config.env == {"API_KEY": "secret-one"}
    assert "secret-one" not in str(list(loaded.rows()))
    assert "secret-two" not in refused(written(tmp_path, "env:\n  'A B': secret-two\n"))


def test_no_variable_of_the_server_becomes_one_of_the_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    assert load_config().config.env == {}


def test_huge_file_is_refused(tmp_path: Path) -> None:
    assert "larger than 1 MiB" in refused(written(tmp_path, "#" * (1 << 20) + "\n"))


def test_configuration_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().backend = "docker"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("0", 0), ("1", 1), ("1k", 1024), ("512m", 512 << 20), ("1.5G", 3 << 29)),
        *(("2GiB", 2 << 30), ("10 GB", 10 << 30), ("12 bytes", 12), ("1b", 1)),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("1.5", 1.5), ("10m", 600), ("1h30m", 5400), ("2d", 172_800)),
        *(("250ms", 0.25), ("7 days", 604_800), ("1 week", 604_800), ("1 hour 30 mins", 5400)),
        *(("2 hrs", 7200), ("5 sec", 5), ("20 Minutes", 1200)),
    ],
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["7 dogs", "5 months", "1h90", "1m5x", "", "h", "1h -5m"])
def test_a_time_in_unknown_units_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("workspace.retention", "7", "write 7d or 7s"),
        ("audit.keep", "90", "write 90d or 90s"),
        ("audit.keep", "'90'", "write 90d or 90s"),
        ("workspace.user_quota", "10", "write 10m or 10b"),
        ("workspace.min_free", "1.5", "write 1.5m or 1.5b"),
        ("limits.memory", "2", "write 2m or 2b"),
    ],
)
def test_a_number_that_may_be_meant_in_days_or_megabytes_is_refused(
    tmp_path: Path, key: str, value: str, words: str
) -> None:
    section, _, name = key.partition(".")
    said = refused(written(tmp_path, f"{section}:\n  {name}: {value}\n"))
    assert said.startswith(f"{key} ")
    assert "line 2) is not usable: " + words in said


def test_a_large_number_without_a_unit_works_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path, "workspace:\n  retention: 1209600\n  user_quota: 0\n")
    assert load_config(file).config.workspace.retention == 14 * 86_400
    load_config(file)
    (warned,) = caplog.messages
    assert "workspace.retention 1209600" in warned
    assert "write 14d" in warned


def test_a_setting_that_is_gone_warns_once_and_where_it_protected_nothing_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("off", "warn"):
        file = written(tmp_path, f"skills:\n  narrow: '{value}'\n  shipped: false\n")
        assert not load_config(file).config.skills.shipped
        load_config(file)
    said = caplog.messages
    assert [each.partition(" (")[0][-6:] for each in said] == [" 'off'", "'warn'"]
    assert "line 2) is a setting no more: " in said[0]
    assert "policy.rules" in said[0]
    refusal = refused(written(tmp_path, "skills:\n  narrow: deny\n"))
    assert "skills.narrow 'deny'" in refusal
    assert "policy.rules" in refusal
    monkeypatch.setenv("MCP_SANDBOX_SKILLS__NARROW", "deny")
    assert "(environment MCP_SANDBOX_SKILLS__NARROW)" in refused()


@given(st.integers(0, 1 << 60))
def test_shown_sizes_are_read_back_exactly(size: int) -> None:
    assert parse_size(show_size(size)) == size


@given(st.integers(1, 10**5))
def test_shown_durations_are_read_back_exactly(seconds: float) -> None:
    assert parse_duration(show_duration(seconds)) == seconds


@given(st.text(max_size=30))
def test_any_text_is_a_size_or_a_clear_refusal(text: str) -> None:
    readable = True
    try:
        parse_size(text)
    except ValueError as exc:
        readable = "512m" in str(exc)
    assert readable


ALLOWED = """
network: allowlist
egress:
  allow: [packages, "*.example.org:8443", {host: db.example.lan, port: 5432, private: true}]
  deny: ["gist.example.com"]
  ca_bundle: %s
secrets:
  API_TOKEN: {from: "command: pass show api", hosts: [api.example.com]}
  OTHER: {from: file:~/token, hosts: [a.example], header: X-Token, users: [alice]}
"""


def test_allowed_hosts_and_secrets_are_read(tmp_path: Path) -> None:
    loaded = load_config(written(tmp_path, ALLOWED % '""'))
    egress, secrets = loaded.config.egress, loaded.config.secrets
    database = AllowConfig(host="db.example.lan", port=5432, private=True)
    assert egress.allow == ("packages", "*.example.org:8443", database)
    assert egress.ca_bundle is None
    token = secrets["API_TOKEN"]
    assert (token.source, token.header) == ("command: pass show api", "authorization")
    assert token.users == ("local",)
    assert secrets["OTHER"].source == f"file:{tmp_path}/home/token"
    shown = next(value for key, value, _, _ in loaded.rows() if key == "secrets")
    assert isinstance(shown, dict)
    assert shown["API_TOKEN"]["from"] == "command: pass show api"
    beside = load_config(written(tmp_path, ALLOWED % "company.pem")).config
    assert beside.egress.ca_bundle == tmp_path / "company.pem"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("egress: {allow: packages}", "write a list such as"),
        ("egress: {allow: [{host: a.example, prt: 5}]}", "write a list such as"),
        ("egress: {allow: [{host: a.example, port: 0}]}", "write a list such as"),
        ("egress: {ca_bundle: 5}", "write an absolute path"),
        ("egress: {upstream_proxy: proxy.example:3128}", "as http://HOST:PORT"),
        ("egress: {upstream_proxy: 'http://me:pw@proxy.example:3128'}", "as http://HOST:PORT"),
        ("secrets: {A: {from: hunter2hunter2, hosts: [a.example]}}", "file:PATH or command:"),
        ("secrets: {A: {from: 'env:TOKEN', hosts: [a.example]}}", "file:PATH or command:"),
        ("secrets: {A: {from: 'command: ', hosts: [a.example]}}", "file:PATH or command:"),
        ("secrets: {A: {from: file:token, hosts: [a.example]}}", "write an absolute path"),
        ("secrets: {A: {from: file:/t, hosts: []}}", "write NAME: {"),
        ("secrets: {A: {from: file:/t, hosts: [a.example], header: 'a: b'}}", "write NAME: {"),
        ("secrets: {HOME: {from: file:/t, hosts: [a.example]}}", "use another name"),
        ("secrets: {A: hunter2hunter2}", "write NAME: {"),
        ("network: allowed", "write none or allowlist or open"),
    ],
)
def test_wrong_allowed_hosts_and_secrets_say_what_to_write(
    tmp_path: Path, text: str, words: str
) -> None:
    said = refused(written(tmp_path, text))
    assert words in said
    assert "hunter2" not in said


CONNECTED = """
connectors:
  work: {url: "https://api.example.com/anthropic/", key: "command: pass show model", model: big}
  here: {url: "http://127.0.0.1:8080/v1", key: file:~/key, protocol: openai, models: [a, b/c]}
agents:
  connector: work
  run: {max_requests: 20, timeout: 10m}
"""


def test_connectors_and_agents_are_read_and_only_the_keys_place_is_shown(tmp_path: Path) -> None:
    loaded = load_config(written(tmp_path, CONNECTED))
    work, here = loaded.config.connectors["work"], loaded.config.connectors["here"]
    assert (work.url, work.model) == ("https://api.example.com/anthropic", "big")
    assert (here.key, here.models) == (f"file:{tmp_path}/home/key", ("a", "b/c"))
    agents = loaded.config.agents
    assert (agents.connector, agents.run.max_requests, agents.run.timeout) == ("work", 20, 600.0)
    shown = {key: (value, source) for key, value, source, _ in loaded.rows()}
    assert shown["agents.run.timeout"][0] == "10m"
    assert "line 7" in shown["agents.run.max_requests"][1]
    told = shown["connectors"][0]
    assert isinstance(told, dict)
    assert told["work"]["key"] == "command: pass show model"


def test_a_variable_sets_what_a_run_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SANDBOX_AGENTS__RUN__MAX_REQUESTS", "7")
    assert load_config().config.agents.run.max_requests == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("connectors: {a: {url: 'https://a.example', key: hunter2}}", "file:PATH or command:"),
        ("connectors: {a: {url: 'https://a.example', key: 'env:KEY'}}", "file:PATH or command:"),
        ("connectors: {a: {url: 'https://me:hunter2@a.example'}}", "https://HOST/PATH"),
        ("connectors: {a: {url: 'https://a.example?key=hunter2'}}", "https://HOST/PATH"),
        ("connectors: {a: {url: 'http://a.example'}}", "http:// for this machine alone"),
        ("connectors: {a: {url: 'http://127.0.0.1.a.example'}}", "https://HOST/PATH"),
        ("connectors: {a: {key: file:/hunter2}}", "write NAME: {"),
        ("connectors: {a/b: {url: 'https://a.example'}}", "write NAME: {"),
        ("agents: {run: {timeout: 10 parsecs}}", "agents.run.timeout '10 parsecs'"),
        ("agents: {run: {max_requests: 0}}", "write a whole number, at least 1"),
        ("agents: {run: 5}", "section 'agents.run' must hold"),
    ],
)
def test_wrong_connectors_and_agents_say_what_to_write(
    tmp_path: Path, text: str, words: str
) -> None:
    said = refused(written(tmp_path, text))
    assert words in said
    assert "line 1" in said
    assert "hunter2" not in said
