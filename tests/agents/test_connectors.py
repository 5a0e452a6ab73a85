"""A connector is found by its name, and its key is read when it is used and shown nowhere."""

import os
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.agents.connectors import Connector, find_connector
from mcp_sandbox.config import ConnectorConfig, RunConfig
from mcp_sandbox.errors import ConfigError, InvalidArgument, OperatorError

KEY = "sk-marked-key-of-the-operator"


def settings(**connectors: dict[str, Any]) -> dict[str, ConnectorConfig]:
    return {name: ConnectorConfig.model_validate(each) for name, each in connectors.items()}


def connector(key: str = "", url: str = "https://api.example.com", **more: Any) -> Connector:
    return find_connector(settings(one={"url": url, "key": key, **more}))


def key_file(folder: Path, *, mode: int = 0o600) -> Path:
    file = folder / "the key"
    file.write_text(KEY + "\n")
    file.chmod(mode)
    return file


TWO = settings(
    work={"url": "https://a.example", "model": "big", "models": ["big", "small"]},
    router={"url": "https://b.example/api/v1", "protocol": "openai", "model": "x/y"},
)


@pytest.mark.parametrize(
    ("wanted", "default", "name", "model"),
    [
        ("work", "", "work", "big"),
        ("work/small", "", "work", "small"),
        ("", "router", "router", "x/y"),
        ("router/deepseek/v3", "work", "router", "deepseek/v3"),
    ],
)
def test_a_connector_is_meant_by_its_name_or_with_a_model(
    wanted: str, default: str, name: str, model: str
) -> None:
    found = find_connector(TWO, wanted, default)
    assert (found.name, found.model) == (name, model)


def test_the_only_connector_is_meant_when_none_is_named() -> None:
    assert connector().name == "one"


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("wrk", "there is no connector 'wrk'; there are work, router"),
        ("work/huge", "has no model 'huge'; it has big, small"),
        ("", "no connector is named, and agents.connector is empty: name work, router"),
    ],
)
def test_what_there_is_not_is_told_with_the_known_names(wanted: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        find_connector(TWO, wanted)


def test_without_connectors_the_line_to_add_is_told() -> None:
    with pytest.raises(InvalidArgument, match=r"configure `connectors: \{NAME: \{url, key\}\}`"):
        find_connector({})


@pytest.mark.parametrize(
    ("url", "protocol", "address"),
    [
        ("https://a.example/", "anthropic", "https://a.example/v1/messages"),
        ("https://a.example/anthropic", "anthropic", "https://a.example/anthropic/v1/messages"),
        ("https://a.example/v1", "openai", "https://a.example/v1/messages"),
        ("https://a.example/api/paas/v4/", "openai", "https://a.example/api/paas/v4/messages"),
    ],
)
def test_an_address_is_what_the_clients_of_its_protocol_take(
    url: str, protocol: str, address: str
) -> None:
    service = connector(url=url, protocol=protocol).service(RunConfig())
    assert service.address("/v1/messages") == address


async def test_a_key_comes_from_a_file_of_ours(tmp_path: Path) -> None:
    found = connector(f"file:{key_file(tmp_path)}")
    assert await found.key() == KEY.encode()
    key_file(tmp_path).write_text(KEY[::-1])
    assert await found.key() == KEY[::-1].encode()


async def test_a_key_comes_from_a_command() -> None:
    assert await connector(f"command: echo {KEY}").key() == KEY.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
async def test_a_file_that_others_can_read_is_refused_with_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    file = key_file(tmp_path, mode=mode)
    found = connector(f"file:{file}")
    with pytest.raises(OperatorError) as caught:
        await found.key()
    assert f"run `chmod 600 '{file}'`" in str(caught.value)
    file.chmod(0o600)
    assert await found.key() == KEY.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
async def test_a_file_of_another_user_is_refused_with_the_remedy(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    os.chown(file, 12345, 12345)
    with pytest.raises(OperatorError, match=r"run `chown 0 .+`"):
        await connector(f"file:{file}").key()


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("", r"connector one has no key: add `key: file:PATH`"),
        ("file:/nowhere/key", r"one in /nowhere/key cannot be read: its file .*: No such file"),
        ("file:/etc", r"one in /etc cannot be read: "),
        ("file:/dev/null", r"one in /dev/null cannot be read: "),
        ("command: false", "of connectors.one cannot be read: its command cannot be used"),
        ("command: echo short", "cannot be read: its value has 5 bytes"),
    ],
)
async def test_a_key_that_cannot_be_had_is_told_with_the_setting(key: str, words: str) -> None:
    with pytest.raises(OperatorError, match=words):
        await connector(key).key()


def test_a_command_that_cannot_be_understood_is_told() -> None:
    with pytest.raises(ConfigError, match=r"connectors\.one\.key is not usable"):
        connector("command: 'a")


async def test_no_repr_shows_the_key(tmp_path: Path) -> None:
    found = connector(f"file:{key_file(tmp_path)}")
    await found.key()
    assert KEY not in repr(found)
    assert KEY not in repr(vars(found))
