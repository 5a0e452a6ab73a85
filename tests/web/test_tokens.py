"""Tokens: made and revoked by the command line, asked for by a server."""

import json
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import pytest

from mcp_sandbox.errors import ConfigError, InvalidArgument, NotFound, StorageUnavailable
from mcp_sandbox.models import TokenGrant
from mcp_sandbox.web.tokens import TokenFile, Tokens
from tests.daemon.running import Done, ended

T = TypeVar("T")


def place(data_root: Path) -> Path:
    return data_root / "sandbox" / "tokens.json"


def ask(question: Callable[[str], Awaitable[T]], about: str) -> T:
    return anyio.run(question, about)


def cli(data_root: Path, *arguments: str, code: int = 0) -> Done:
    given = ["token", *arguments, "--data", str(data_root)]
    home = {"PATH": os.environ["PATH"], "HOME": str(data_root.parent)}
    done = anyio.run(partial(ended, given, env=home))
    assert done.code == code, done.err
    return done


def test_a_token_opens_its_user_until_it_is_revoked(data_root: Path) -> None:
    tokens = Tokens(data_root)
    assert ask(tokens.find, "mcs_anything") is None
    kept, secret = TokenFile(data_root).add("alice")
    assert ask(tokens.find, secret) == TokenGrant("alice", kept.id)
    assert ask(tokens.still_valid, kept.id)
    TokenFile(data_root).revoke(kept.id)
    assert ask(tokens.find, secret) is None
    assert not ask(tokens.still_valid, kept.id)


def test_an_expired_token_opens_nothing(data_root: Path) -> None:
    kept, secret = TokenFile(data_root).add("alice", 3600)
    tokens = Tokens(data_root)
    assert ask(tokens.find, secret) is not None
    content = json.loads(place(data_root).read_text())
    content["tokens"][0]["expires"] = time.time() - 1
    place(data_root).write_text(json.dumps(content))
    assert ask(tokens.find, secret) is None
    assert not ask(tokens.still_valid, kept.id)


@pytest.mark.parametrize("wrong", ["", "mcs_", "x" * 1_000_000, "\udc80", "mcs_" + "A" * 43])
def test_what_is_no_token_opens_nothing(data_root: Path, wrong: str) -> None:
    _, secret = TokenFile(data_root).add("alice")
    for attempt in (wrong, secret + "x", secret[:-1], secret.upper()):
        assert ask(Tokens(data_root).find, attempt) is None


def test_only_hashes_are_kept_and_nobody_else_reads_them(data_root: Path) -> None:
    _, secret = TokenFile(data_root).add("alice")
    assert secret not in place(data_root).read_text()
    assert secret.removeprefix("mcs_") not in place(data_root).read_text()
    assert place(data_root).stat().st_mode & 0o777 == 0o600


def test_tokens_made_at_once_are_all_kept(data_root: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: TokenFile(data_root).add(f"user{n}")[0], range(24)))
    assert sorted(made, key=lambda token: token.id) == sorted(
        TokenFile(data_root).read(), key=lambda token: token.id
    )


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version":1,"tokens":[{"id":"a"}]}', "\0" * 99]
)
def test_a_damaged_file_lets_nobody_in_and_is_not_replaced(data_root: Path, content: str) -> None:
    _, secret = TokenFile(data_root).add("alice")
    place(data_root).write_text(content)
    with pytest.raises(ConfigError, match="move it away"):
        ask(Tokens(data_root).find, secret)
    with pytest.raises(ConfigError):
        TokenFile(data_root).add("bob")
    assert place(data_root).read_text() == content


def test_a_file_that_others_can_change_lets_nobody_in(data_root: Path) -> None:
    _, secret = TokenFile(data_root).add("alice")
    place(data_root).chmod(0o666)
    with pytest.raises(StorageUnavailable, match="chmod go-w"):
        ask(Tokens(data_root).find, secret)


def test_a_link_in_the_files_place_is_not_followed(data_root: Path, tmp_path: Path) -> None:
    _, secret = TokenFile(data_root).add("alice")
    place(data_root).rename(tmp_path / "elsewhere")
    place(data_root).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageUnavailable):
        ask(Tokens(data_root).find, secret)


def test_an_id_may_be_shortened_while_it_is_clear(data_root: Path) -> None:
    file = TokenFile(data_root)
    ids = [file.add("alice")[0].id for _ in range(17)]
    first = next(a[0] for n, a in enumerate(ids) if a[0] in {b[0] for b in ids[n + 1 :]})
    with pytest.raises(InvalidArgument, match="several tokens"):
        file.revoke(first)
    for unknown in ("", "zz"):
        with pytest.raises(NotFound, match="token list"):
            file.revoke(unknown)
    assert file.revoke(ids[0][:7]).user == "alice"
    assert len(file.read()) == 16


def test_an_unusable_user_gets_no_token(data_root: Path) -> None:
    with pytest.raises(InvalidArgument, match="user id"):
        TokenFile(data_root).add("../root")
    assert not place(data_root).exists()


def test_the_command_line_makes_lists_and_revokes(data_root: Path) -> None:
    secret = cli(data_root, "add", "alice", "--expires", "30d").out.strip()
    assert ask(Tokens(data_root).find, secret) is not None
    (row,) = json.loads(cli(data_root, "list", "--json").out)
    assert (row["user"], row["expired"]) == ("alice", False)
    assert row["id"] in cli(data_root, "list").out
    assert secret not in cli(data_root, "list").out
    assert "revoked" in cli(data_root, "revoke", row["id"][:6]).out
    assert ask(Tokens(data_root).find, secret) is None
    assert "token list" in cli(data_root, "revoke", row["id"], code=1).err
    made = json.loads(cli(data_root, "add", "bob", "--scope", "control", "--json").out)
    assert ask(Tokens(data_root).find, made.pop("token")) == TokenGrant(
        "bob", made["id"], "control"
    )
    assert [made] == json.loads(cli(data_root, "list", "--json").out)


@pytest.mark.parametrize("time_", ["soon", "0", "-1d", "inf", "30"])
def test_a_lifetime_must_be_a_time(data_root: Path, time_: str) -> None:
    cli(data_root, "add", "alice", f"--expires={time_}", code=2)
    assert not place(data_root).exists()
