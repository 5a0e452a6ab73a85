"""A value goes to its hosts in its header, and to nobody and nothing else."""

import base64
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import SecretConfig
from mcp_sandbox.egress.process.mask import FILLER, Header, Mask
from mcp_sandbox.egress.secrets import KEPT_S, Secrets, SecretState
from mcp_sandbox.egress.targets import RefusedError, Target
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import ChatId
from mcp_sandbox.telemetry import logs

VALUE = "s3cret-token/of+the=operator"
HOST = Target("api.example.com", 443)
CHAT = ChatId("local", "one")


def secret(source: str, *, hosts: Sequence[str] = (HOST.host,), **more: object) -> SecretConfig:
    return SecretConfig.model_validate({"from": source, "hosts": hosts, **more})


def in_file(folder: Path, value: str = VALUE + "\n") -> str:
    (folder / "value").write_text(value)
    return f"file:{folder / 'value'}"


def script(folder: Path, text: str) -> str:
    """A command that counts its starts in a file beside it."""
    program = folder / "program.py"
    program.write_text(
        f"import os, sys, time\nopen({str(folder / 'starts')!r}, 'a').write('x')\n{text}\n"
    )
    return f"command: {sys.executable} -I '{program}'"


def starts(folder: Path) -> int:
    file = folder / "starts"
    return len(file.read_text()) if file.exists() else 0


def secrets(source: str, **more: object) -> Secrets:
    return Secrets({"API_TOKEN": secret(source, **more)}, b"seed")  # type: ignore[arg-type]


def inside(found: Secrets, chat: ChatId = CHAT) -> bytes:
    return found.placeholders(chat)["API_TOKEN"].encode()


async def sent(found: Secrets, *headers: Header, target: Target = HOST) -> list[bytes]:
    filled, _ = await found.fill(CHAT, target, headers)
    return [value for name, value in filled if name != b"Accept-Encoding"]


async def test_the_placeholder_becomes_the_value_in_the_one_header(tmp_path: Path) -> None:
    found = secrets(in_file(tmp_path))
    mine, value = inside(found), VALUE.encode()
    given = [
        (b"Authorization", b"Bearer " + mine),
        (b"authorization", b"Basic " + base64.b64encode(b"user:" + mine)),
        (b"X-Other", mine),
        (b"Authorization", b"Basic not base64 " + mine),
    ]
    assert await sent(found, *given) == [
        b"Bearer " + value,
        b"Basic " + base64.b64encode(b"user:" + value),
        mine,
        b"Basic not base64 " + value,
    ]


async def test_another_header_can_be_named(tmp_path: Path) -> None:
    found = secrets(in_file(tmp_path), header="X-Api-Key")
    mine = inside(found)
    assert await sent(found, (b"x-api-key", mine), (b"authorization", mine)) == [
        VALUE.encode(),
        mine,
    ]


@pytest.mark.parametrize(
    "target",
    [
        Target("example.com", 443),
        Target("www.api.example.com", 443),
        Target("api.example.com.evil.example", 443),
        Target(HOST.host, 80),
        Target(HOST.host, 8443),
    ],
    ids=str,
)
async def test_other_hosts_and_ports_get_the_placeholder(tmp_path: Path, target: Target) -> None:
    found = secrets(in_file(tmp_path))
    header = (b"authorization", inside(found))
    assert await found.fill(CHAT, target, [header]) == ([header], [])
    assert not any(rule.covers(target) for rule in found.bound(CHAT))


async def test_a_named_port_and_subdomains_are_bound(tmp_path: Path) -> None:
    found = secrets(in_file(tmp_path), hosts=["api.example.com:8443", "*.example.org"])
    for target in (Target(HOST.host, 8443), Target("a.b.example.org", 443)):
        assert await sent(found, (b"authorization", inside(found)), target=target) == [
            VALUE.encode()
        ]
    assert not any(rule.covers(HOST) for rule in found.bound(CHAT))


async def test_a_chat_can_do_nothing_with_the_placeholder_of_another(tmp_path: Path) -> None:
    found = secrets(in_file(tmp_path))
    theirs = inside(found, ChatId("local", "two"))
    assert await sent(found, (b"authorization", theirs)) == [theirs]


def test_placeholders_last_and_belong_to_user_chat_and_folder(tmp_path: Path) -> None:
    settings = {"A": secret(in_file(tmp_path), users=["alice", "bob"])}
    chats = [ChatId("alice", "c"), ChatId("bob", "c"), ChatId("alice", "d")]
    made = [
        Secrets(settings, seed).placeholders(chat)["A"] for seed in (b"1", b"2") for chat in chats
    ]
    again = [Secrets(settings, b"1").placeholders(chat)["A"] for chat in chats]
    assert len(set(made)) == 6
    assert made[:3] == again
    assert all(len(each) == len("mcps_A_") + 32 for each in made)


def test_other_users_have_neither_placeholder_nor_value(tmp_path: Path) -> None:
    found, other = secrets(in_file(tmp_path)), ChatId("alice", "one")
    assert found.placeholders(other) == {}
    assert found.bound(other) == []


async def test_answers_of_bound_hosts_are_masked_before_a_placeholder_was_used(
    tmp_path: Path,
) -> None:
    found = secrets(script(tmp_path, f"print({VALUE!r})"))
    for _ in range(3):
        _, values = await found.fill(CHAT, HOST, [])
        assert Mask(values).text(b"is " + VALUE.encode()) == b"is " + FILLER * len(VALUE)
    assert starts(tmp_path) == 1


async def test_a_source_that_fails_fails_no_request_without_a_placeholder(tmp_path: Path) -> None:
    found = secrets(script(tmp_path, "sys.exit(1)"))
    for _ in range(3):
        headers, values = await found.fill(CHAT, HOST, [(b"authorization", b"none")])
        assert headers == [(b"authorization", b"none"), (b"Accept-Encoding", b"identity")]
        assert values == []
    assert starts(tmp_path) == 1


async def test_a_file_is_read_at_each_use(tmp_path: Path) -> None:
    found = secrets(in_file(tmp_path))
    for value in ("the-first-value", "the-second-value"):
        in_file(tmp_path, value)
        assert await sent(found, (b"authorization", inside(found))) == [value.encode()]


async def test_a_command_is_asked_once_by_all_who_wait_and_later_not_at_all(tmp_path: Path) -> None:
    found = secrets(script(tmp_path, f"time.sleep(0.2); print({VALUE!r})"))
    header = (b"authorization", inside(found))
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(sent, found, header)
    assert await sent(found, header) == [VALUE.encode()]
    assert starts(tmp_path) == 1


async def test_a_command_is_asked_again_after_five_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = secrets(script(tmp_path, f"print({VALUE!r})"))
    await sent(found, (b"authorization", inside(found)))
    assert KEPT_S == 300
    (bound,) = found._all
    bound.source._asked_at -= KEPT_S
    await sent(found, (b"authorization", inside(found)))
    assert starts(tmp_path) == 2


async def test_a_failure_is_told_to_all_who_wait_and_not_kept(tmp_path: Path) -> None:
    found = secrets(script(tmp_path, f"time.sleep(0.2); print({VALUE!r}); sys.exit(3)"))
    refused = list[str]()

    async def use() -> None:
        with pytest.raises(RefusedError, match="ended with 3") as caught:
            await sent(found, (b"authorization", inside(found)))
        refused.append(str(caught.value))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(use)
    assert starts(tmp_path) == 1
    script(tmp_path, f"print({VALUE!r})")
    assert await sent(found, (b"authorization", inside(found))) == [VALUE.encode()]
    assert set(refused) == {
        "the secret API_TOKEN cannot be read: its command cannot be used: it ended with 3; run it "
        "in a terminal to see why. A person must look: mcp-sandbox secrets check"
    }


async def test_no_shell_reads_the_command_and_only_the_last_newline_is_cut(tmp_path: Path) -> None:
    found = secrets("command: printf '%s\\n' '$(id); two  spaces `x`'")
    assert await sent(found, (b"authorization", inside(found))) == [b"$(id); two  spaces `x`"]


async def test_a_command_has_the_environment_of_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENTS_OWN_KEY", "no business of others")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    shown = "sorted(n for n in os.environ if n in ('CLIENTS_OWN_KEY', 'XDG_RUNTIME_DIR'))"
    found = secrets(script(tmp_path, f"print({shown}, os.getcwd())"))
    assert await sent(found, (b"authorization", inside(found))) == [b"['XDG_RUNTIME_DIR'] /"]


async def test_a_slow_command_is_killed_with_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_sandbox.egress.secrets.SOURCE_S", 0.3)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Its child holds the pipe open for as long as it lives.
    found = secrets(f"command: sh -c 'sleep 60 > {fifo} & sleep 60; echo {VALUE}'")
    number = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with anyio.fail_after(10):
            with pytest.raises(RefusedError, match="did not answer within"):
                await sent(found, (b"authorization", inside(found)))
            await anyio.wait_readable(number)
            assert os.read(number, 1) == b""
    finally:
        os.close(number)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "its value has 0 bytes, and only 12 to 4096 can be masked"),
        ("short", "its value has 5 bytes"),
        ("x" * 4097, "its value has over 4096 bytes"),
        ("x" * 1_000_000, "its value has over 4096 bytes"),
        ("two lines\nof text", "not one line of printable ASCII"),
        ("two newlines at its end\n\n", "not one line of printable ASCII"),
        ("carriage return\r\n", "not one line of printable ASCII"),
        ("a space at its end ", "without spaces around it"),
        ("not ASCII: ümlaut", "not one line of printable ASCII"),
    ],
)
async def test_a_value_that_cannot_be_used_is_refused(
    tmp_path: Path, value: str, problem: str
) -> None:
    for source in (in_file(tmp_path, value), f"command: cat '{tmp_path / 'value'}'"):
        found = secrets(source)
        with anyio.fail_after(10):
            (state,) = await found.check()
        assert problem in state.problem
        assert state.length is None
        with pytest.raises(RefusedError) as caught:
            await sent(found, (b"authorization", inside(found)))
        assert problem in str(caught.value)
        assert caught.value.verdict == "secret"


async def test_a_source_that_is_none_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for source, problem in (
        (f"file:{tmp_path / 'absent'}", "No such file"),
        (f"file:{tmp_path}", "Is a directory"),
        (f"file:{fifo}", "its value has 0 bytes"),
        (f"command: {VALUE}", "No such file"),
        (f"command: {tmp_path}", "Permission denied"),
    ):
        with anyio.fail_after(5):
            (state,) = await secrets(source).check()
        assert problem in state.problem
        assert VALUE not in state.problem


async def test_check_tells_the_length_and_no_more(tmp_path: Path) -> None:
    found = secrets(in_file(tmp_path))
    hosts = ("api.example.com:443",)
    state = SecretState("API_TOKEN", hosts, "authorization", ("local",))
    assert found.states() == [state]
    assert (await found.check())[0].length == len(VALUE)


@pytest.mark.parametrize("host", ["10.0.0.1", "*.com", "packages", "a b", "api.example.com:80"])
def test_a_host_that_is_none_is_an_error_of_the_configuration(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match=r"secrets\.API_TOKEN: "):
        secrets(in_file(tmp_path), hosts=[host])


def test_a_command_that_is_none_is_an_error_without_its_text() -> None:
    with pytest.raises(ConfigError, match=r"secrets\.API_TOKEN: No closing quotation") as caught:
        secrets(f"command: echo '{VALUE}")
    assert VALUE not in "".join(traceback.format_exception(caught.value))


async def test_no_repr_shows_a_value(tmp_path: Path) -> None:
    found = secrets(in_file(tmp_path))
    _, values = await found.fill(CHAT, HOST, [(b"authorization", inside(found))])
    assert VALUE not in repr((found, found.bound(CHAT), Mask(values)))


async def test_log_lines_show_no_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = secrets(in_file(tmp_path))
    await sent(found, (b"authorization", inside(found)))
    root, logger = logging.getLogger(), logging.getLogger("mcp_sandbox.test")
    before = root.handlers[:], root.level
    try:
        for kind in ("text", "json"):
            logs.configure(kind)
            with logs.masked(found.masked):
                logs.event(logger, "said", what=f"a {VALUE} \udcff")
                logger.error("failed with %s", VALUE, exc_info=ValueError(VALUE))
            logger.warning("after %s", VALUE)
    finally:
        root.handlers, root.level = before
    shown = capsys.readouterr().err
    assert shown.count(VALUE) == 2
    assert shown.count("*" * len(VALUE)) == 6
