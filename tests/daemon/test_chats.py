"""`ls`, `stop` and `rm`, against a real daemon."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.cli.options import narrowed, table, tell
from mcp_sandbox.daemon.chats import find_chat
from mcp_sandbox.errors import Ambiguous, InvalidArgument, NotFound
from mcp_sandbox.models import ChatId
from tests.daemon.running import command, in_chat, place, running

KNOWN = [ChatId("ann", "work"), ChatId("bob", "work"), ChatId("ann", "workshop"), ChatId("c", "x")]


@pytest.mark.parametrize(
    ("text", "meant"),
    [("x", "c/x"), ("c", "c/x"), ("works", "ann/workshop"), ("ann/work", "ann/work")],
)
def test_a_chat_is_found_by_its_name_else_by_how_it_begins(text: str, meant: str) -> None:
    assert str(find_chat(text, KNOWN)) == meant


def test_what_may_be_several_chats_is_none_of_them() -> None:
    with pytest.raises(Ambiguous, match="ann/work, bob/work"):
        find_chat("work", KNOWN)
    with pytest.raises(Ambiguous, match="2 others"):
        find_chat("a", [ChatId("u", f"a{number}") for number in range(12)])
    with pytest.raises(NotFound, match="mcp-sandbox ls"):
        find_chat("nothing", KNOWN)
    with pytest.raises(InvalidArgument):
        find_chat("", KNOWN)


async def test_ls_shows_every_chat_and_what_it_does(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where):
        assert (await command(where, "ls")).out == "no chats yet\n"
        async with in_chat(where, "first") as a, in_chat(where, "second", user="ann") as b:
            await a.exec("true")
            await b.request("tools/call", {"name": "exec", "arguments": {"command": "sleep 60"}})
            with anyio.fail_after(20):
                while True:
                    rows = json.loads((await command(where, "ls", "--json")).out)
                    if [(row["busy"], row["state"]) for row in rows] == [
                        (1, "running"),
                        (0, "running"),
                    ]:
                        break
        assert [(row["user"], row["chat"]) for row in rows] == [
            ("ann", "second"),
            ("local", "first"),
        ]
        shown = (await command(where, "ls")).out
        assert "local/first" in shown
        assert " now " in shown


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_list_has_a_line_for_each_row_and_never_cuts_the_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    long = f"local/{'n' * 60}"
    cells = [(long, *("running", "512 MiB", "17m", "1") * 2, "/srv/app")]
    columns = [f"column {number}" for number in range(len(cells[0]))]
    tell([], narrowed(table(*columns, rows=cells)), as_json=False)
    head, row, *more = capsys.readouterr().out.splitlines()
    assert not more
    assert row.split()[0] == long
    shown = len(re.findall(r"column \d", head))
    assert len(row.rstrip()) <= max(width, len(long) + 1)
    assert shown == {40: 1, 80: 2, 200: len(columns)}[width]


def sleeping(seconds: str) -> bool:
    """Whether a process of this machine, in any sandbox, sleeps for so long."""
    return subprocess.run(["pgrep", "-xf", f"sleep {seconds}"], check=False).returncode == 0


async def test_stop_ends_what_runs_and_keeps_the_files(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "chat-one") as client:
        await client.exec(f"echo kept > note; sleep 600.{os.getpid()} >/dev/null 2>&1 &")
        while not sleeping(f"600.{os.getpid()}"):
            await anyio.sleep(0.02)
        done = await command(where, "stop", "chat-o")
        assert (done.code, done.err) == (0, "")
        assert "local/chat-one: its sandbox has ended" in done.out
        while sleeping(f"600.{os.getpid()}"):
            await anyio.sleep(0.02)
        assert "had no sandbox" in (await command(where, "stop", "chat-one")).out
        assert await client.exec("cat note") == "kept\n"


async def test_what_was_done_with_chats_is_told_as_json_and_where_it_failed_too(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)
    async with running(where):
        for name in ("stop", "rm"):
            yes = ["--yes"] if name == "rm" else []
            none = await command(where, name, "--all", "--json", *yes)
            assert (none.code, json.loads(none.out)) == (0, [])
        for name in ("one", "two"):
            async with in_chat(where, name) as client:
                await client.exec("true")
        for stopped in (True, False):
            done = await command(where, "stop", "two", "one", "--json")
            rows = [{"chat": f"local/{name}", "stopped": stopped} for name in ("two", "one")]
            assert json.loads(done.out) == rows
        asked = await command(where, "rm", "one", "--json", stdin=b"n\n")
        assert (asked.code, asked.out.strip()) == (1, "")
        # The second time it is gone.
        removed = await command(where, "rm", "one", "one", "--yes", "--json")
        assert (removed.code, json.loads(removed.out)) == (
            1,
            [{"chat": "local/one", "removed": True}],
        )
        assert "'local/one'" in removed.err


async def test_several_chats_are_ended_and_removed_at_once_or_none_of_them(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where):
        assert (await command(where, "rm", "--all", "--yes")).out == "there is no chat to end\n"
        for name in ("one", "two", "three"):
            async with in_chat(where, name) as client:
                await client.exec("true")
        wrong = await command(where, "stop", "one", "unknown")
        assert (wrong.code, wrong.out) == (1, "")
        for neither in ((), ("one", "--all")):
            assert "name chats, or give --all" in (await command(where, "rm", *neither)).err
        stopped = await command(where, "stop", "thr", "local/one")
        assert stopped.out == "".join(
            f"local/{name}: its sandbox has ended; its files stay\n" for name in ("three", "one")
        )
        everything = await command(where, "stop", "--all")
        assert everything.out == "local/two: its sandbox has ended; its files stay\n"
        assert (await command(where, "stop", "--all")).out == "there is no sandbox to end\n"
        asked = await command(where, "rm", "one", "two", stdin=b"n\n")
        assert "Remove local/one, local/two with all files?" in asked.err
        assert (await command(where, "rm", "one", "two", "--yes")).code == 0
        assert (await command(where, "rm", "--all", stdin=b"y\n")).out.count("removed") == 1
        assert (await command(where, "ls")).out == "no chats yet\n"


async def test_looking_leaves_no_trace_in_the_audit_and_it_is_read_by_the_beginning_of_a_name(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)
    async with running(where):
        for name in ("alpha", "beta"):
            async with in_chat(where, name) as client:
                await client.exec(f"echo in-{name}")
    file, at = where.data / "sandbox" / "audit" / "audit.jsonl", ("--data", str(where.data))
    before = file.read_bytes()
    asked = [
        "ls",
        "trash list",
        "gc --dry-run",
        "approvals list",
        "approvals show zzzz",
        "backup list alpha",
    ]
    for words in (*asked, "egress check x.org", "egress list alpha"):
        await command(where, words, *at, asks=False)
    assert file.read_bytes() == before
    shown = await command(where, "audit show", "al", *at, asks=False)
    assert "in-alpha" in shown.out
    assert "in-beta" not in shown.out
    raw = await command(where, "audit show", "local/b", "--json", *at, asks=False)
    assert {json.loads(line)["chat"] for line in raw.out.splitlines()} == {"beta"}
    unknown = await command(where, "audit show", "gamma", *at, asks=False)
    assert (unknown.code, unknown.out) == (1, "")
    assert "no chat is called 'gamma'" in unknown.err


@pytest.mark.docker
async def test_a_person_pauses_and_resumes_a_chat(tmp_path: Path) -> None:
    where = place(tmp_path, "docker")
    async with running(where, limit_s=110), in_chat(where, "one") as client:
        await client.exec("sleep 600 >/dev/null 2>&1 &")
        assert "is paused" in (await command(where, "pause", "one")).out
        assert "paused" in (await command(where, "ls")).out
        assert "goes on" in (await command(where, "resume", "one")).out
        assert "was not paused" in (await command(where, "resume", "one")).out
        await command(where, "pause", "one")
        assert await client.exec("pgrep -c sleep") == "1\n"
        await command(where, "stop", "one")
        assert "it has no sandbox" in (await command(where, "pause", "one")).out


@pytest.mark.docker
async def test_a_shutdown_does_not_say_that_what_is_paused_runs_on(tmp_path: Path) -> None:
    where = place(tmp_path, "docker")
    async with running(where, limit_s=110) as daemon:
        async with in_chat(where, "one") as client:
            await client.exec("sleep 600 >/dev/null 2>&1 &")
        await command(where, "pause", "one")
        said = (await command(where, "shutdown")).out
        assert "local/one: 1 in the background is paused: `mcp-sandbox stop local/one`" in said
        assert await daemon.end() == 0
    async with running(where, limit_s=110):
        await command(where, "stop", "one")


async def test_rm_asks_and_then_moves_the_files_to_the_trash(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where), in_chat(where, "gone") as client:
        await client.exec("echo precious > note")
        refused = await command(where, "rm", "gone", stdin=b"n\n")
        assert refused.code == 1
        assert "local/gone" in refused.err
        assert "nothing was removed; --yes removes without asking" in refused.err
        assert await client.exec("cat note") == "precious\n"
        assert (await command(where, "rm", "gone", stdin=b"y\n")).code == 0
        assert (await command(where, "ls")).out == "no chats yet\n"
        assert "trash" in str(next(where.data.rglob("note")))
        assert "No such file" in await client.exec("cat note 2>&1; true")
        assert (await command(where, "rm", "gone", "--yes")).code == 0


@pytest.mark.bubblewrap
async def test_what_rm_and_resets_have_thrown_away_is_listed_and_comes_back(
    tmp_path: Path,
) -> None:
    own = {"MCP_SANDBOX_DATA_DIR": str(tmp_path / "data"), "MCP_SANDBOX_BACKEND": "bubblewrap"}
    where = place(tmp_path, "bubblewrap", own)
    note, leave = "cat note ~/kept 2>&1", {"keep_files": False}
    async with running(where), in_chat(where, "one") as client:
        assert (await command(where, "trash list")).out == "the trash is empty\n"
        unknown = await command(where, "trash restore", "one")
        assert unknown.code == 1
        assert "`mcp-sandbox trash list` lists them" in unknown.err
        await client.exec("echo first > note; echo home > ~/kept; chmod 500 .")
        told = (await command(where, "rm", "one", "--yes")).out
        assert "`mcp-sandbox trash restore local/one` brings it back" in told
        assert (await command(where, "trash restore", "one")).code == 0
        assert await client.exec(note) == "first\nhome\n"
        # What a reset threw away changes places with what has come since, as often as is asked.
        told = str(await client.call("sandbox_reset", **leave))
        assert "`mcp-sandbox trash restore local/one`" in told
        await client.exec("echo second > note; sleep 600 >/dev/null 2>&1 &")
        (listed,) = json.loads((await command(where, "trash list", "--json")).out)
        assert (listed["chat"], listed["size"] > 0) == ("local/one", True)
        for text in ("first", "second", "first"):
            assert "local/one: the files" in (await command(where, "trash restore", "one")).out
            assert await client.exec(f"{note}; pgrep -c sleep") == f"{text}\nhome\n0\n"
        # As another chat, whose they are then alone; the rest of the first one stays with it.
        await client.call("sandbox_reset", **leave)
        assert "local/two: the files" in (await command(where, "trash restore", "one", "two")).out
        async with in_chat(where, "two") as other:
            assert (
                await other.exec("echo more | tee -a note ~/kept; cat note")
                == "more\nfirst\nmore\n"
            )
        assert "No such file" in await client.exec("cat note 2>&1; true")
        homes = where.data / "sandbox" / "home" / "local"
        owners = {(homes / f"chat-{name}").stat().st_uid for name in ("one", "two")}
        assert len(owners) == 2 - bool(os.geteuid())
        await command(where, "rm", "two", "--yes")
        await command(where, "trash restore", "two", "three")
        async with in_chat(where, "three") as other:
            assert await other.exec("echo on >> note; cat note ~/kept") == "first\nmore\non\nmore\n"
        await client.exec("echo first > note")
        await command(where, "rm", "one", "--yes")
    # Without a server, too.
    assert "local/one" in (await command(where, "trash list", asks=False)).out
    assert (await command(where, "trash restore", "one", asks=False)).code == 0
    async with running(where), in_chat(where, "one") as client:
        assert await client.exec(note) == "first\nhome\n"


@pytest.mark.parametrize("name", ["stop", "pause", "resume", "rm", "shell"])
async def test_a_chat_that_nobody_knows_is_an_error(tmp_path: Path, name: str) -> None:
    where = place(tmp_path)
    async with running(where):
        done = await command(where, name, "nobody")
        assert done.code == 1
        assert "'nobody'" in done.err
        assert "mcp-sandbox ls" in done.err


async def test_gc_shows_what_is_due_and_why_and_then_removes_it(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_WORKSPACE__RETENTION": "1s"})
    async with running(where):
        async with in_chat(where, "old") as client:
            await client.exec("echo kept > note")
        await command(where, "stop", "old")
        with anyio.fail_after(20):
            while "local/old" not in (shown := await command(where, "gc", "--dry-run")).out:
                assert shown.code == 0, shown.err
        assert "1 would go" in shown.out
        assert "local/old" in (await command(where, "ls")).out
        report = json.loads((await command(where, "gc", "--json")).out)
        assert [item["what"] for item in report["items"]] == ["local/old"]
        assert (await command(where, "ls")).out == "no chats yet\n"
        assert "trash" in str(next(where.data.rglob("note")))
