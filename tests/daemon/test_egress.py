"""`egress`: what a person sees of allowed hosts and changes, with a daemon and without one."""

import json
from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from mcp_sandbox.app.chats import open_session
from mcp_sandbox.cli import cli
from mcp_sandbox.config import load_config
from tests.daemon.running import command, in_chat, place, running, starting

ALLOWED = {
    "MCP_SANDBOX_NETWORK": "allowlist",
    "MCP_SANDBOX_EGRESS__ALLOW": '["git", "api.example.com"]',
    "MCP_SANDBOX_EGRESS__DENY": '["gist.example.com"]',
}


async def test_a_person_sees_what_was_refused_and_allows_it_to_a_running_sandbox(
    tmp_path: Path,
) -> None:
    where = place(tmp_path, "bubblewrap", ALLOWED)
    async with running(where) as daemon, in_chat(where, "a") as client:

        async def asked() -> str:
            told = await client.call("exec", command="curl -s http://later.example.com")
            return "\n".join(each["text"] for each in told["content"])

        way = "mcp-sandbox egress allow a later.example.com --read"
        assert f"network_access asks the user for it, who can also type: {way}]" in await asked()
        refused = await command(where, "egress allow", "a", "later.example.com")
        assert (refused.code, "type it on a terminal, or give --yes" in refused.err) == (1, True)
        how = ("--yes", "--for", "2h")
        allowed = await command(where, "egress allow", "a", "later.example.com", *how)
        assert (allowed.code, allowed.err) == (0, "")
        assert "local/a: later.example.com is allowed until " in allowed.out
        # Its name has no address here, which is looked up only for who may connect.
        assert "its name has no address" in await asked()
        listed = (await command(where, "egress list", "a")).out
        for text in ("never gist.example.com", "api.example.com", "preset git", "grant of "):
            assert text in listed
        (seen,) = json.loads((await command(where, "egress list", "a", "--json")).out)["places"]
        assert (seen["name"], seen["refused"]) == ("later.example.com:80", 2)
        assert (await command(where, "egress deny", "a", "later.example.com")).code == 0
        assert "no rule allows it" in await asked()
        again = await command(where, "egress deny", "a", "later.example.com")
        assert (again.code, "has no grant of later.example.com" in again.err) == (1, True)
        await daemon.noted("egress chat=local/a target=later.example.com:80")


async def test_a_question_about_hosts_that_are_allowed_by_now_waits_no_more(tmp_path: Path) -> None:
    where, names = place(tmp_path, "bubblewrap", ALLOWED), ("one.example.com", "two.example.com")

    async def waiting() -> list[str]:
        found = json.loads((await command(where, "approvals list", "--json")).out)
        return [each["effect"].partition(" one")[0] for each in found if each["state"] == "open"]

    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        for write, reason in ((False, "to look"), (False, "to see"), (True, "to push")):
            given = {"hosts": names, "reason": reason, "write": write}
            assert "there is no answer yet" in str(await client.call("network_access", **given))
        for number, name in enumerate(names):
            assert len(await waiting()) == 3
            await command(where, "egress allow", "a", name, "--yes", *["--read"][number:])
        assert await waiting() == ["Reach, and write to,"]
        await command(where, "egress allow", "a", names[0], "--yes")
        assert await waiting() == []


CHECKED = {
    "gist.example.com": "gist.example.com:443 is refused: egress.deny names",
    "elsewhere.example.com:80": "elsewhere.example.com:80 is refused: no rule allows it",
    "api.example.com:22": "no rule allows port 22",
    "api.example.com": "api.example.com:443 is allowed: egress.allow names",
    "granted.example.com": "is allowed: grant of ",
}


def test_without_a_daemon_rules_are_told_and_grants_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"DATA_DIR": str(tmp_path / "d"), "BACKEND": "bubblewrap", "SOCKET": f"{tmp_path}/s"}
    for name, value in {**ALLOWED, **{f"MCP_SANDBOX_{key}": v for key, v in more.items()}}.items():
        monkeypatch.setenv(name, value)
    config = load_config(None).config

    async def begin() -> None:
        async with open_session("a", config=config) as session:
            await session.write_file("a", "")

    anyio.run(begin)
    allow = ["egress", "allow", "a", "granted.example.com", "--read", "--yes"]
    assert CliRunner().invoke(cli, allow).exit_code == 0
    here = CliRunner().invoke(cli, ["egress", "allow", "a", "host.internal:8080", "--yes"])
    assert "private: true" in repr(here.exception)
    for host, why in CHECKED.items():
        found = CliRunner().invoke(cli, ["egress", "check", host, "--chat", "a"])
        assert (found.exit_code, why in found.stdout) == ("allowed" not in why, True), found


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("EGRESS__ALLOW", '["*.com"]', "is too wide"),
        ("EGRESS__CA_BUNDLE", "/nonexistent.pem", "cannot be read"),
        ("EGRESS__UPSTREAM_PROXY", "ftp://a", "is not usable"),
        ("BACKEND", "unsafe-local", "unsafe-local has none"),
    ],
)
async def test_a_daemon_does_not_start_with_hosts_that_it_cannot_judge(
    tmp_path: Path, name: str, value: str, word: str
) -> None:
    backend = value if name == "BACKEND" else "bubblewrap"
    where = place(tmp_path, backend, {**ALLOWED, f"MCP_SANDBOX_{name}": value})
    with anyio.fail_after(20):
        async with starting(where) as daemon:
            assert await daemon.end() == 1
    assert word in daemon.log
    assert "Traceback" not in daemon.log


async def test_without_allowed_hosts_there_is_nothing_to_allow(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_SECRETS": SECRETS})
    async with running(where) as daemon, in_chat(where, "a") as client:
        await client.exec("true")
        allowed = await command(where, "egress allow", "a", "later.example.com", "-y")
        assert (allowed.code, "set network to allowlist" in allowed.err) == (1, True)
        await daemon.noted("secrets do nothing with network: none")


SECRETS = '{"TOKEN": {"from": "file:/nonexistent", "hosts": ["api.example.com"]}}'
