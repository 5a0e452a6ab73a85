"""An audit on a disk: several servers, sudden ends, full disks, old files."""

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread

from mcp_sandbox.audit import open_audit
from mcp_sandbox.audit.chain import ChainVerifier
from mcp_sandbox.audit.log import AuditWriter, events, verify
from mcp_sandbox.config import AuditConfig
from mcp_sandbox.errors import InvalidArgument, StorageUnavailable
from mcp_sandbox.models import ChatId

ROOT = Path(__file__).parents[2]
CHAT = ChatId("local", "a")


def settings(**given: object) -> AuditConfig:
    return AuditConfig.model_validate(given)


async def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = await to_thread.run_sync(lambda: [*events(folder)])
    return [told for _, told in found if kind in (None, told["kind"])]


async def checked(folder: Path) -> ChainVerifier:
    return await to_thread.run_sync(verify, folder)


async def problems(folder: Path) -> Sequence[str]:
    return (await checked(folder)).problems


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data" / "audit"


async def test_events_are_lines_between_a_servers_start_and_end(folder: Path) -> None:
    async with open_audit(folder, settings()) as audit:
        assert await audit.write("begun", user="local", chat="a", exit=None, level="low") == 2
        # On the file before write() returns.
        assert [each["kind"] for each in await lines(folder)] == ["server", "begun"]
    first, second, last = await lines(folder)
    assert (first["what"], last["what"]) == ("started", "ended")
    assert {name: second[name] for name in ("n", "user", "chat", "level")} == {
        "n": 2,
        "user": "local",
        "chat": "a",
        "level": "low",
    }
    assert "exit" not in second
    assert await problems(folder) == []
    assert (folder / "audit.jsonl").stat().st_mode & 0o777 == 0o600


async def test_an_audit_that_is_switched_off_leaves_nothing(folder: Path) -> None:
    async with open_audit(folder, settings(enabled=False)) as audit:
        assert await audit.write("begun") == 0
        audit.note("egress", CHAT, target="a:443")
    assert not folder.exists()
    assert (await checked(folder)).first == 0


@pytest.mark.parametrize("sync", ["batch", "each"])
async def test_many_tasks_write_one_chain(folder: Path, sync: str) -> None:
    async with open_audit(folder, settings(sync=sync)) as audit:

        async def write() -> None:
            for _ in range(20):
                await audit.write("begun")

        async with anyio.create_task_group() as tasks:
            for _ in range(32):
                tasks.start_soon(write)
    check = await checked(folder)
    assert (check.problems, check.head.n) == ([], 642)


async def test_two_servers_of_one_data_root_write_one_chain(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.audit.program", str(folder), "150"]
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(anyio.run_process, command)
    assert await problems(folder) == []
    assert len(await lines(folder, "begun")) == len(await lines(folder, "ended")) == 300
    assert len(list(folder.glob("audit-*.jsonl"))) >= 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "rounds", [pytest.param(3, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.whole)]
)
async def test_a_server_that_is_killed_has_recorded_what_it_answered(
    folder: Path, rounds: int
) -> None:
    pick, known = random.Random(rounds), 0
    for _ in range(rounds):
        command = [sys.executable, "-m", "tests.audit.program", str(folder), "0"]
        async with await anyio.open_process(command, stderr=None) as process:
            assert process.stdout
            said = await process.stdout.receive()
            with anyio.move_on_after(pick.uniform(0.01, 0.4)):
                while True:
                    said += await process.stdout.receive()
            process.kill()
            with suppress(anyio.EndOfStream):
                while True:
                    said += await process.stdout.receive()
        answered = said.split(b"\n")[1:-1]
        assert answered
        ended = (await lines(folder, "ended"))[known:]
        assert len(ended) >= len(answered)
        known += len(ended)
        assert all("is torn" in each for each in await problems(folder))
    async with open_audit(folder, settings()):
        assert await problems(folder) == []


async def test_a_torn_last_line_is_set_aside_and_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_audit(folder, settings()) as audit:
        await audit.write("begun")
    with (folder / "audit.jsonl").open("ab") as file:
        file.write(b'{"n":4,"time":"2026')
    assert "is torn" in (await problems(folder))[0]
    async with open_audit(folder, settings()):
        pass
    assert await problems(folder) == []
    (torn,) = await lines(folder, "torn")
    assert torn["bytes"] == 19
    assert (folder / torn["file"]).read_bytes() == b'{"n":4,"time":"2026'
    assert "damaged" in caplog.text


async def test_what_lies_in_the_place_of_a_file_is_set_aside_and_the_lines_are_missed(
    folder: Path,
) -> None:
    async with open_audit(folder, settings()) as audit:
        await audit.write("begun")
        (folder / "audit.jsonl").rename(folder / "gone")
        (folder / "audit.jsonl").mkdir()
        (folder / "audit.lock").unlink()
    async with open_audit(folder, settings()) as audit:
        (folder / "audit.jsonl").unlink()
        os.mkfifo(folder / "audit.jsonl")
        await audit.write("begun")
    assert len(list(folder.glob("audit.jsonl.damaged-*"))) == 2
    assert "is missing" in (await problems(folder))[0]


async def test_lines_that_are_taken_away_while_a_server_runs_are_missed(folder: Path) -> None:
    path = folder / "audit.jsonl"
    async with open_audit(folder, settings()) as audit:
        for _ in range(4):
            await audit.write("begun")
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
        await audit.write("begun")
        assert await problems(folder) == ["lines 3 to 5 are missing"]
        path.unlink()
        await audit.write("begun")
    assert (await problems(folder))[0].startswith("what line 7 follows is missing")


async def test_a_full_file_is_followed_by_the_next_and_removed_when_it_is_old(
    folder: Path,
) -> None:
    async with open_audit(folder, settings(max_file="64k")) as audit:
        for _ in range(500):
            await audit.write("begun", arguments="x" * 200)
    full = sorted(folder.glob("audit-*.jsonl"))
    assert len(full) >= 3
    assert await problems(folder) == []
    assert max(path.stat().st_size for path in full) < (64 << 10) + 1000
    for path in full[:2]:
        os.utime(path, (0, 0))
    async with open_audit(folder, settings(keep="30d")):
        with anyio.fail_after(10):
            while full[1].exists():
                await anyio.sleep(0.01)
    check = await checked(folder)
    assert check.problems == []
    assert check.notes == [f"lines 1 to {check.first - 1} were removed, as audit.keep says"]
    full[2].unlink()
    assert "is missing" in (await problems(folder))[0]


async def test_a_file_that_is_gone_in_the_middle_or_at_the_end_is_missed(folder: Path) -> None:
    async with open_audit(folder, settings(max_file="64k")) as audit:
        for _ in range(500):
            await audit.write("begun", arguments="x" * 200)
    _, middle, *_ = sorted(folder.glob("audit-*.jsonl"))
    middle.rename(folder / "elsewhere")
    assert any("are missing" in each for each in await problems(folder))
    (folder / "elsewhere").rename(middle)
    assert await problems(folder) == []
    (folder / "audit.jsonl").unlink()
    assert await problems(folder) == ["audit.jsonl, the last file, is missing"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


async def test_what_a_full_or_read_only_disk_cannot_record_does_not_run(small_disk: Path) -> None:
    async with open_audit(small_disk, settings()) as audit:

        async def fill() -> None:
            for _ in range(1000):
                await audit.write("begun", arguments="x" * 200)

        with pytest.raises(StorageUnavailable, match=r"No space.*does not run"):
            await fill()
        assert await problems(small_disk) == []
        await anyio.run_process(["mount", "-o", "remount,size=1m", str(small_disk)])
        assert await audit.write("begun")
    assert await problems(small_disk) == []
    await anyio.run_process(["mount", "-o", "remount,ro", str(small_disk)])
    with pytest.raises(StorageUnavailable, match="Read-only"):
        async with open_audit(small_disk, settings()):
            pytest.fail("it was opened")


async def test_with_go_on_what_cannot_be_recorded_runs_and_is_warned_of_once(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_audit(small_disk, settings(on_error="go_on")) as audit:
        for _ in range(400):
            await audit.write("begun", arguments="x" * 200)
    assert caplog.text.count("is not recorded") == 1
    assert await problems(small_disk) == []


async def test_an_error_of_the_block_comes_out_as_it_is(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="mine") as caught:
        async with open_audit(folder, settings()):
            raise InvalidArgument("mine") from ValueError("why")
    assert isinstance(caught.value.__cause__, ValueError)
    with anyio.move_on_after(0):
        async with open_audit(folder, settings(sync="each")):
            await anyio.sleep_forever()
    assert (await lines(folder))[-1]["what"] == "ended"
    assert await problems(folder) == []


async def test_what_is_repeated_is_one_line_and_a_count(folder: Path) -> None:
    async with open_audit(folder, settings()) as audit:
        for number in range(1000):
            audit.note("egress", CHAT, target="evil.example:443")
            audit.note("egress", CHAT, target=f"{number}.example:443")
        audit.note("secret", CHAT, name="TOKEN", target="api.example:443")
    told = await lines(folder, "egress")
    assert len(told) < 40
    evil = [each.get("times", 1) for each in told if each.get("target") == "evil.example:443"]
    assert evil in ([1000], [1, 999])
    assert sum(each.get("times", 1) for each in told) == 2000
    assert [each["name"] for each in await lines(folder, "secret")] == ["TOKEN"]


async def test_the_head_is_in_the_log_every_hour_and_at_the_end(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "mcp_sandbox")
    monkeypatch.setattr("mcp_sandbox.audit.log._HOUR_S", 0.01)

    def heads() -> list[str]:
        return [vars(each)["head"] for each in caplog.records if each.message == "audit"]

    async with open_audit(folder, settings()):
        with anyio.fail_after(10):
            while not heads():
                await anyio.sleep(0.01)
        first = str((await checked(folder)).head)
    assert heads()[0] == first != heads()[-1] == str((await checked(folder)).head)


def test_a_line_that_would_have_to_wait_is_not_waited_for(folder: Path) -> None:
    ours, other = AuditWriter(folder, 1 << 20), AuditWriter(folder, 1 << 20)
    assert ours.append("begun", {}, wait=False) == (0, 0)
    assert ours.append("begun", {}, wait=True)[0] == 1
    assert ours.append("begun", {}, wait=False)[0] == 2
    assert other.append("begun", {}, wait=True)[0] == 3
    assert ours.append("begun", {}, wait=False) == (0, 0)
    assert ours.append("begun", {}, wait=True)[0] == 4
    ours.close()
    other.close()
    assert json.loads((folder / "audit.jsonl").read_text().splitlines()[-1])["n"] == 4
