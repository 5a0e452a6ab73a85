import os
from dataclasses import replace
from pathlib import Path

import pytest

from mcp_sandbox.backends.sandbox_records import SandboxRecord, SandboxRecords, new_id
from mcp_sandbox.models import BackendName


def plant(top: Path) -> None:
    """What code in a sandbox could leave: too deep for a path, links out, closed directories."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.symlink("/etc", "link", dir_fd=here)
    os.close(here)
    (top / "closed" / "in" / "here").mkdir(parents=True)
    for name in ("closed/in/here", "closed/in", "closed"):
        (top / name).chmod(0)
    top.chmod(0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["docker", "bubblewrap"])
def test_a_record_goes_whatever_code_put_beside_the_socket(
    name: BackendName, tmp_path: Path
) -> None:
    records, sandbox_id = SandboxRecords(tmp_path, name), new_id()
    records.open(sandbox_id, SandboxRecord(name), shown={"hosts": "x"})
    assert (records.shown_directory(sandbox_id) / "hosts").read_text() == "x"
    plant(records.socket_directory(sandbox_id))
    records.forget(sandbox_id)
    assert Path("/etc/passwd").exists()
    assert records.all() == {}
    assert not records.directory(sandbox_id).exists()
    records.forget(sandbox_id)


@pytest.mark.parametrize("name", ["docker", "bubblewrap"])
@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"[]", b'{"backend": 1}', b"{"])
def test_a_damaged_record_is_that_of_a_dead_sandbox_and_hides_no_other(
    name: BackendName, garbage: bytes, tmp_path: Path
) -> None:
    records, damaged, whole = SandboxRecords(tmp_path, name), new_id(), new_id()
    for each in (damaged, whole):
        records.open(each, SandboxRecord(name, labels={"chat": "c"}))
    state = records.directory(damaged) / ("container" if name == "docker" else "state.json")
    state.write_bytes(garbage)
    found = records.all()
    assert (found[damaged].abandoned, found[damaged].labels) == (True, {})
    assert (found[whole].abandoned, found[whole].labels) == (False, {"chat": "c"})


def test_a_record_of_a_sandbox_to_come_stays_until_its_server_has_had_its_time(
    tmp_path: Path,
) -> None:
    record = SandboxRecord("docker")
    assert not record.given_up(180)
    assert replace(record, made_s=record.made_s - 200).given_up(180)
    assert not replace(record, made_s=record.made_s - 200).given_up()
    assert record.maker
    dead = replace(record.maker, started=record.maker.started + 1)
    assert replace(record, maker=dead).given_up()
