"""What the settings say of allowed hosts is judged before anything is served."""

from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import read_allowed_hosts
from mcp_sandbox.config import load_config
from mcp_sandbox.egress import settings
from mcp_sandbox.egress.authority import CertificateAuthority
from mcp_sandbox.errors import ConfigError
from tests.test_cli import run

DAMAGED = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "mcp-sandbox.yaml"
    file.write_text(f"data_dir: data\nnetwork: allowlist\nbackend: bubblewrap\n{text}\n")
    return file


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    (tmp_path / "empty.pem").touch()
    (tmp_path / "words.pem").write_text("no certificate\n")
    (tmp_path / "folder.pem").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('egress: {allow: ["*"]}', "'*' is no host for a rule: it is no host name; write HOST"),
        ('egress: {allow: ["*.com"]}', "'*.com' is too wide: write two labels or more"),
        ('egress: {allow: ["https://a.example"]}', "'https://a.example' is no host for a rule"),
        ("egress: {allow: [package]}", "'package' is no preset here (packages, git)"),
        ("egress: {allow: [10.0.0.1]}", "a host is reached by its name, not by an address"),
        ("egress: {allow: [a.example, 'a.example:80']}", "allow has a.example twice"),
        ("egress: {allow: [a.example], deny: [a.example]}", "deny refuses by a.example"),
        ('egress: {deny: ["*"]}', "'*' is no host for a rule"),
        ("egress: {allow: [{host: '*.a.example', port: 1, private: true}]}", "its one host and"),
        ("egress: {ca_bundle: nowhere.pem}", "nowhere.pem"),
        ("egress: {ca_bundle: empty.pem}", "empty.pem"),
        ("egress: {ca_bundle: words.pem}", "words.pem"),
        ("egress: {ca_bundle: folder.pem}", "folder.pem"),
        ("secrets: {TOKEN: {from: file:/t, hosts: ['*']}}", "TOKEN"),
        ("secrets: {TOKEN: {from: file:/t, hosts: [10.0.0.1]}}", "TOKEN"),
        ("secrets: {TOKEN: {from: 'command: \"', hosts: [a.example]}}", "TOKEN"),
    ],
)
def test_what_cannot_be_used_stops_the_start(bundles: Path, text: str, words: str) -> None:
    config = load_config(written(bundles, text), variables={}).config
    with pytest.raises(ConfigError) as caught:
        read_allowed_hosts(config)
    assert words in str(caught.value)


async def test_a_damaged_certificate_stops_the_start(tmp_path: Path) -> None:
    bundle = tmp_path / "damaged.pem"
    await anyio.Path(bundle).write_text(DAMAGED)
    with pytest.raises(ConfigError, match="certificate"):
        await CertificateAuthority.open(tmp_path / "authority", bundle)


def test_a_damaged_list_of_hosts_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (None, "packages: [", "ä"):
        file = tmp_path / "presets.yaml"
        if content:
            file.write_text(content)
        monkeypatch.setattr(settings, "_PRESETS", file)
        with pytest.raises(ConfigError, match="install mcp-sandbox again"):
            read_allowed_hosts(load_config(written(tmp_path, ""), variables={}).config)


def test_the_client_reads_the_sentence_and_no_traceback(tmp_path: Path) -> None:
    file = written(tmp_path, 'egress: {allow: ["*.com"]}')
    done = run("stdio", "--config", str(file), home=tmp_path)
    assert done.returncode != 0
    assert "'*.com' is too wide" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "data" / "sandbox" / "authority").exists()


@pytest.mark.parametrize("network", ["none", "open"])
def test_other_networks_ask_for_nothing_of_it(tmp_path: Path, network: str) -> None:
    file = written(tmp_path, 'egress: {allow: ["*"], ca_bundle: nowhere.pem}')
    config = load_config(file, {"network": network}, variables={}).config
    assert read_allowed_hosts(config) is None
