"""No tool and no code reaches the host, its secrets, its services or another chat."""

import os
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.config import Config
from mcp_sandbox.errors import StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import (
    BUBBLEWRAP,
    DOCKER,
    GVISOR,
    attempt,
    on_bubblewrap,
    on_the_host_kernel,
    probe,
)

OTHER = ChatId("victim", "private")


async def test_no_link_leads_out_of_the_sandbox(session: Session, treasure: Path) -> None:
    secret = (treasure / "secret").read_text()
    await session.exec(
        f"ln -s {treasure} absolute; ln -s ../../../../../..{treasure} upward\n"
        f"ln -s /proc/self/root{treasure} own_root; ln -s /proc/1/root{treasure} first_root\n"
        f"ln -s /proc/self/cwd/../../..{treasure} own_cwd; ln -s /proc/self/fd opened\n"
        f"ln {treasure}/secret hard; ln -s {treasure}/secret file"
    )
    shown: list[str] = []
    for link in ("absolute", "upward", "own_root", "first_root", "own_cwd", f"..{treasure}"):
        path = f"{link}/secret"
        shown += [
            await attempt(session.read_file(path)),
            await attempt(session.list_files(link)),
            await attempt(session.glob("*", link)),
            await attempt(session.grep("[0-9a-f]{32}", link)),
            await attempt(session.write_file(path, b"tampered", append=True)),
            await attempt(session.write_file(path, b"tampered")),
            await attempt(session.edit_file(path, secret[:8], "tampered")),
            await attempt(session.move_file(path, f"stolen-{link[:3]}")),
            await attempt(session.delete_file(path)),
            await attempt(session.delete_file(f"{link}/", recursive=True)),
            await attempt(session.exec(f"cat {path}; echo tampered >> {path}")),
        ]
    shown.append(await attempt(session.read_file("hard")))
    shown.append(await attempt(session.read_file("file")))
    # The edit names eight digits itself; the rest could come only from the file.
    assert not [text for text in shown if secret[8:] in text]
    assert sorted(path.name for path in treasure.iterdir()) == ["secret"]
    assert (treasure / "secret").read_text() == secret


_SWAP = """
import contextlib, os, sys, time
end = time.monotonic() + 1.5
steps = [
    lambda: os.makedirs("real", exist_ok=True),
    lambda: open("real/secret", "w").write("harmless"),
    lambda: os.rename("real", "door"),
    lambda: os.rename("door", "real"),
    lambda: os.symlink(sys.argv[1], "door"),
    lambda: os.unlink("door"),
    lambda: os.symlink("/proc/1/root" + sys.argv[1], "door"),
    lambda: os.unlink("door"),
]
while time.monotonic() < end:
    for step in steps:
        with contextlib.suppress(OSError):
            step()
"""


@on_the_host_kernel
async def test_a_link_swapped_in_during_a_call_leads_nowhere(
    session: Session, treasure: Path
) -> None:
    secret = (treasure / "secret").read_text()
    await session.write_file("swap.py", _SWAP.encode())
    ended = anyio.Event()
    shown: list[str] = []

    async def swap() -> None:
        result = await session.exec(["python3", "swap.py", str(treasure)], timeout_s=20)
        assert result.exit_code == 0, result
        ended.set()

    with anyio.fail_after(40):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(swap)
            while not ended.is_set():
                shown += [
                    await attempt(session.read_file("door/secret")),
                    await attempt(session.write_file("door/secret", b"tampered", append=True)),
                    await attempt(session.list_files("door", depth=2)),
                    await attempt(session.grep("[0-9a-f]{32}", "door")),
                    await attempt(session.move_file("door/secret", "stolen", overwrite=True)),
                    await attempt(session.write_file("door/secret", b"tampered")),
                    await attempt(session.delete_file("door", recursive=True)),
                ]
    assert len(shown) > 40
    assert not [text for text in shown if secret in text]
    assert (treasure / "secret").read_text() == secret
    assert sorted(path.name for path in treasure.iterdir()) == ["secret"]


@on_the_host_kernel
@pytest.mark.parametrize("level", ["workspace", "workspace/mallory", "home/mallory", "trash"])
async def test_the_host_follows_no_link_that_took_a_directorys_place(
    session: Session, config: Config, treasure: Path, level: str
) -> None:
    await session.write_file("mine", b"mine")
    (treasure / "chat-attack").mkdir()
    before = sorted(path.name for path in treasure.rglob("*"))
    state = treasure.stat()
    place = config.data_dir / "sandbox" / level
    aside = place.with_name(f"{place.name}-aside")
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        place.rename(aside)
    place.symlink_to(treasure)

    async def reset_and_use() -> None:
        await session.reset(keep_files=False)
        await session.exec("touch leaked")

    with pytest.raises(StorageUnavailable):
        await reset_and_use()
    assert sorted(path.name for path in treasure.rglob("*")) == before
    assert (treasure.stat().st_mode, treasure.stat().st_uid) == (state.st_mode, state.st_uid)
    assert (treasure / "chat-attack").stat().st_uid == os.getuid()
    place.unlink()
    if aside.exists():
        aside.rename(place)


@on_the_host_kernel
async def test_a_workspace_that_became_a_link_is_refused(
    session: Session, config: Config, treasure: Path
) -> None:
    await session.write_file("mine", b"mine")
    await session.reset()
    place = config.data_dir / "sandbox/workspace/mallory/chat-attack"
    place.rename(place.with_name("aside"))
    place.symlink_to(treasure)
    for call in (session.exec("touch leaked"), session.info(), session.reset(keep_files=False)):
        with pytest.raises(StorageUnavailable):
            await call
    assert sorted(path.name for path in treasure.iterdir()) == ["secret"]


_HUNT = """
import ctypes, json, os, re
needles = [
    form for each in {tokens!r} for token in [each[::-1]]
    for form in (token.encode(), token.upper().encode(), bytes.fromhex(token))
]
me, found, looked = os.getpid(), [], 0

def look(path, data):
    global looked
    looked += 1
    if any(needle in data for needle in needles):
        found.append(path)

def memory(pid):
    with open(f"/proc/{{pid}}/maps") as maps, open(f"/proc/{{pid}}/mem", "rb", 0) as mem:
        for line in maps:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            if " r" in line and end - start < 1 << 28:
                try:
                    mem.seek(start)
                    look(f"/proc/{{pid}}/mem", mem.read(end - start))
                except (OSError, OverflowError, ValueError):
                    pass

for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    for name in ("environ", "cmdline", "stat", "auxv"):
        try:
            look(f"/proc/{{pid}}/{{name}}", open(f"/proc/{{pid}}/{{name}}", "rb").read())
        except OSError:
            pass
    if pid != me:
        try:
            memory(pid)
        except OSError:
            pass
        try:
            for fd in os.listdir(f"/proc/{{pid}}/fd"):
                fd = os.open(f"/proc/{{pid}}/fd/{{fd}}", os.O_RDONLY | os.O_NONBLOCK)
                look(f"/proc/{{pid}}/fd/{{fd}}", os.read(fd, 1 << 20))
                os.close(fd)
        except OSError:
            pass
for folder, _, names in os.walk("/"):
    if folder.startswith(("/proc", "/sys", "/usr", "/dev")):
        continue
    for name in names:
        try:
            fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NONBLOCK)
            look(os.path.join(folder, name), os.read(fd, 1 << 20))
            os.close(fd)
        except OSError:
            pass
print(json.dumps([found, looked]))
"""


@pytest.mark.parametrize("backend_name", [DOCKER, GVISOR, BUBBLEWRAP], indirect=True)
async def test_the_token_and_the_servers_secrets_are_nowhere_inside(
    session: Session, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "feedface" * 8)
    await session.read_file("/etc/passwd")
    await session.exec("true")
    (record,) = (config.data_dir / "sandbox" / "run").glob("*/token")
    # Reversed, so that the searching program does not find itself.
    needles = [record.read_text().strip()[::-1], ("feedface" * 8)[::-1]]
    found, looked = await probe(session, _HUNT.format(tokens=needles))
    assert found == []
    assert looked > 10
    for path in ("/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/proc/1/mem"):
        assert record.read_text().strip() not in await attempt(session.read_file(path))


@on_bubblewrap
async def test_ids_that_would_name_other_places_are_refused(manager: SessionManager) -> None:
    for user, chat in (
        ("..", "x"),
        ("a/b", "x"),
        ("a", "../b"),
        ("a", "x\0"),
        ("", "x"),
        ("a", "é"),
    ):
        with pytest.raises(ValueError, match="is not usable"):
            await manager.session(ChatId(user, chat))
