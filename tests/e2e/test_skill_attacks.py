"""Code in a sandbox can neither change nor replace nor hide the skills that it is shown."""

import hashlib
import re
from pathlib import Path

import pytest

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import (
    BUBBLEWRAP,
    DOCKER,
    GVISOR,
    WHOLE,
    attempt,
    on_bubblewrap,
    on_gvisor_if_whole,
    probe,
)
from tests.e2e.conftest import CHAT

VIEW = "/opt/skills"
SKILL = f"{VIEW}/pdf"
OTHER = ChatId("victim", "private")


def write(folder: Path, text: str) -> Path:
    place = folder / "pdf"
    (place / "scripts").mkdir(parents=True, exist_ok=True)
    (place / "SKILL.md").write_text(f"---\nname: pdf\ndescription: Does.\n---\nSays {text}.\n")
    (place / "scripts" / "run.sh").write_text(f"#!/bin/sh\necho {text}\n")
    return folder


def state(*folders: Path) -> dict[str, tuple[int, int, str]]:
    """Modes, owners and bytes of all that lies in folders of the host."""
    return {
        str(path): (
            path.lstat().st_mode,
            path.lstat().st_uid,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for folder in folders
        for path in sorted([folder, *folder.rglob("*")])
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "taught", "honest")


@pytest.fixture
def config(config: Config, folder: Path) -> Config:
    skills = SkillsConfig(folders=(folder,), shipped=False)
    return config.model_copy(update={"skills": skills})


@pytest.fixture
def places(config: Config, folder: Path) -> tuple[Path, ...]:
    """Where a skill lies on the host: the source, and what the chat is shown."""
    tree = config.data_dir / "sandbox" / "skills" / CHAT.user / f"chat-{CHAT.chat}"
    return folder, tree / "view"


@pytest.fixture
async def session(session: Session) -> Session:
    """A chat that has a skill."""
    got = await session.skills.activate("pdf")
    assert got.path_in_sandbox == SKILL
    return session


_ALTER = """
import ctypes, json, os, shutil, subprocess
libc = ctypes.CDLL(None, use_errno=True)
S, V = "/opt/skills/pdf", "/opt/skills"
F = S + "/SKILL.md"

def call(name, *args):
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), name)

def system(number, *args):
    found = libc.syscall(number, *args)
    if found < 0:
        raise OSError(ctypes.get_errno(), str(number))
    return found

def overwrite(path, flags):
    os.write(os.open(path, flags), b"tampered")

def through(directory, name):
    os.write(os.open(name, os.O_WRONLY, dir_fd=os.open(directory, os.O_PATH)), b"tampered")

def reopened(path):
    overwrite(f"/proc/self/fd/{os.open(path, os.O_RDONLY)}", os.O_RDWR)

def run(*command):
    subprocess.run(command, check=True, capture_output=True, timeout=10)

def beside():
    os.makedirs("/workspace/fake/pdf", exist_ok=True)
    open("/workspace/fake/SKILL.md", "w").write("tampered")
    return "/workspace/fake"

def swap(a, b):
    call("renameat2", -100, a.encode(), -100, b.encode(), 2)

def mount(source, target, flags):
    call("mount", source.encode(), target.encode(), b"none", ctypes.c_ulong(flags), None)

def as_root_of_my_own():
    call("unshare", 0x10000000 | 0x20000)
    mount("/workspace/fake", V, 4096)

def linked():
    os.link(F, "/workspace/stolen")
    open("/workspace/stolen", "a").write("tampered")

def linked_by_fd():
    fd = os.open(F, os.O_RDONLY)
    os.link(f"/proc/self/fd/{fd}", "/workspace/stolen2", follow_symlinks=True)

def cloned():
    tree = system(428, -100, V.encode(), 1 | 0x80000)
    system(429, tree, b"", -100, b"/workspace/fake", 4)

def by_handle():
    handle = ctypes.create_string_buffer(b"\\x80\\0\\0\\0" + bytes(132), 136)
    call("name_to_handle_at", -100, F.encode(), handle, ctypes.byref(ctypes.c_int()), 0)
    home = os.open("/workspace", os.O_RDONLY)
    fd = libc.open_by_handle_at(home, handle, os.O_RDWR)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "handle")
    os.write(fd, b"tampered")

def fallocated():
    libc.fallocate(os.open(F, os.O_RDONLY), 0, 0, 100) and system(-1)

def mapped():
    import mmap
    mmap.mmap(os.open(F, os.O_RDWR), 0)[0:4] = b"evil"

def copied_in():
    fd = os.open(F, os.O_RDONLY)
    import fcntl
    fcntl.ioctl(fd, 0x40049409, os.open(beside() + "/SKILL.md", os.O_RDONLY))

tries = {
    "write": lambda: overwrite(F, os.O_WRONLY),
    "append": lambda: overwrite(F, os.O_WRONLY | os.O_APPEND),
    "truncate on opening": lambda: os.open(F, os.O_RDONLY | os.O_TRUNC),
    "truncate": lambda: os.truncate(F, 0),
    "allocate": fallocated,
    "clone into": copied_in,
    "map": mapped,
    "write through a directory": lambda: through(S, "SKILL.md"),
    "open again": lambda: reopened(F),
    "write through a root in proc": lambda: overwrite("/proc/self/root" + F, os.O_WRONLY),
    "write through a root of pid 1": lambda: overwrite("/proc/1/root" + F, os.O_WRONLY),
    "write through a cwd": lambda: (os.chdir(S), overwrite("/proc/self/cwd/SKILL.md", os.O_RDWR)),
    "create": lambda: open(S + "/new", "x"),
    "create in the view": lambda: open(V + "/new", "x"),
    "make a skill": lambda: os.mkdir(V + "/evil"),
    "make a link": lambda: os.symlink("/workspace/fake", V + "/evil"),
    "make a node": lambda: os.mkfifo(V + "/fifo"),
    "chmod": lambda: os.chmod(F, 0o666),
    "chmod a directory": lambda: os.chmod(S, 0o777),
    "chmod the view": lambda: os.chmod(V, 0o777),
    "chown": lambda: os.chown(F, os.getuid(), os.getgid()),
    "utime": lambda: os.utime(F, (1, 1)),
    "set an attribute": lambda: os.setxattr(F, "user.evil", b"1"),
    "unlink": lambda: os.unlink(F),
    "remove": lambda: os.rmdir(S + "/scripts"),
    "remove a skill": lambda: shutil.rmtree(S),
    "remove the view": lambda: os.rmdir(V),
    "remove all": lambda: shutil.rmtree("/opt"),
    "rename in the skill": lambda: os.rename(F, S + "/OLD.md"),
    "rename out": lambda: os.rename(F, "/workspace/OLD.md"),
    "rename over": lambda: os.rename(beside() + "/SKILL.md", F),
    "rename over in one tree": lambda: os.rename(S + "/scripts/run.sh", F),
    "rename a skill": lambda: os.rename(S, V + "/old"),
    "rename the view": lambda: os.rename(V, "/opt/old"),
    "rename the parent": lambda: os.rename("/opt", "/workspace/old"),
    "exchange the parent": lambda: swap(beside(), "/opt"),
    "exchange the view": lambda: (
        os.makedirs("/opt/x", exist_ok=True), swap("/opt/x", V)),
    "exchange a skill": lambda: swap(beside() + "/pdf", S),
    "remove and make the parent": lambda: (
        os.rmdir("/opt"), os.makedirs(S)),
    "unlink the parent": lambda: os.unlink("/opt"),
    "link the skill out": linked,
    "link out by descriptor": linked_by_fd,
    "mount over": lambda: mount(beside(), V, 4096),
    "remount": lambda: mount("none", V, 32 | 4096),
    "mount a tmpfs": lambda: call(
        "mount", b"none", V.encode(), b"tmpfs", ctypes.c_ulong(0), None),
    "unmount": lambda: call("umount2", V.encode(), 2),
    "unmount the parent": lambda: call("umount2", b"/opt", 2),
    "own namespace": as_root_of_my_own,
    "own namespace by program": lambda: run(
        "unshare", "-rm", "mount", "--bind", beside(), V),
    "clone the mount": cloned,
    "set the mount's attributes": lambda: system(442, -100, V.encode(), 0, bytes(
        (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + bytes(16)), 32),
    "pivot": lambda: system(155, b"/workspace/fake", b"/workspace/fake"),
    "chroot": lambda: os.chroot(beside()),
    "open by handle": by_handle,
}
done = []
beside()
for name, attack in tries.items():
    child = os.fork()
    if child == 0:
        try:
            attack()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if os.waitpid(child, 0)[1] == 0:
        done.append(name)
print(json.dumps([done, len(tries), open(F).read(), sorted(os.listdir(V))]))
"""
_NAMES = re.findall(r'^    "([a-z ]+\'?[a-z ]*)": lambda', _ALTER, re.MULTILINE)
# Processes of its own may have a root of their own; they change nothing for anybody else.
_HARMLESS = {"own namespace", "own namespace by program", "chroot"}


async def test_nothing_of_a_skill_can_be_changed(
    session: Session, places: tuple[Path, ...], backend_name: str
) -> None:
    before = state(*places)
    done, tried, text, listed = await probe(session, _ALTER)
    allowed = _HARMLESS if backend_name == "docker-runsc" else set()
    assert set(done) <= allowed
    assert tried > 50
    assert text.endswith("Says honest.\n")
    assert listed == ["pdf"]
    assert state(*places) == before
    assert (await session.exec(f"sh {SKILL}/scripts/run.sh")).stdout == "honest\n"


@on_bubblewrap
async def test_the_attacks_do_change_what_is_the_chats_own(manager: SessionManager) -> None:
    session = await manager.session(CHAT)
    plain = _ALTER.replace("/opt", "/workspace/plain")
    make = "mkdir -p plain/skills/pdf/scripts; echo honest | tee plain/skills/pdf/SKILL.md "
    succeeded: set[str] = set()
    for name in _NAMES:
        # Each on a tree of its own: most of them destroy it.
        await session.exec(f"rm -rf plain old fake OLD.md; {make} plain/skills/pdf/scripts/run.sh")
        only = plain.replace("done = []", f"tries = {{{name!r}: tries[{name!r}]}}\ndone = []")
        result = await session.run_code(only)
        if f'[["{name}"]' in result.stdout or "FileNotFoundError" in result.stderr:
            succeeded.add(name)
    assert len(succeeded) > 30, set(_NAMES) - succeeded


@on_gvisor_if_whole
async def test_no_tool_changes_a_skill(session: Session, places: tuple[Path, ...]) -> None:
    before = state(*places)
    file = f"{SKILL}/SKILL.md"
    said = [
        await attempt(session.write_file(file, b"tampered")),
        await attempt(session.write_file(file, b"tampered", append=True)),
        await attempt(session.write_file(f"{SKILL}/new", b"tampered")),
        await attempt(session.edit_file(file, "honest", "tampered")),
        await attempt(session.delete_file(file)),
        await attempt(session.delete_file(SKILL, recursive=True)),
        await attempt(session.delete_file("/opt", recursive=True)),
        await attempt(session.move_file(file, "stolen")),
        await attempt(session.move_file(SKILL, "stolen-skill")),
        await attempt(session.move_file(VIEW, "stolen-view")),
        await attempt(session.move_file("/opt", "stolen-opt")),
    ]
    assert all(text.split(":")[0].isalpha() for text in said), said
    assert (await session.read_file(file)).data.endswith(b"Says honest.\n")
    assert state(*places) == before


@on_gvisor_if_whole
async def test_a_hard_link_does_not_lead_into_the_copy(session: Session) -> None:
    result = await session.exec(f"ln {SKILL}/SKILL.md stolen; ln -P {SKILL}/SKILL.md /tmp/stolen")
    assert result.exit_code != 0
    assert result.stderr.count("Invalid cross-device link") == 2


_PLANTS = {
    "a link to the host": "ln -s {treasure} {place}",
    "a link upwards": "ln -s ../../../../../../../../../..{treasure} {place}",
    "a link to the home": "ln -s /home/sandbox {place}",
    "a link to etc": "ln -s /etc {place}",
    "a link to nothing": "ln -s /workspace/nothing {place}",
    "a link to itself": "ln -s {place} {place}",
    "a file": "echo mine > {place}",
    "a pipe": "mkfifo {place}",
    "a closed directory": "mkdir {place}; echo mine > {place}/mine; chmod 0 {place}",
    "a skill": "mkdir -p {place}/pdf; echo mine > {place}/pdf/SKILL.md",
}
# The same code makes both links, on every backend.
_WAYS = [
    pytest.param("docker", ".claude/skills", marks=DOCKER.marks),
    pytest.param("docker-runsc", ".agents", marks=(*GVISOR.marks, WHOLE)),
    pytest.param("bubblewrap", ".claude", marks=BUBBLEWRAP.marks),
    pytest.param("bubblewrap", ".agents/skills", marks=BUBBLEWRAP.marks),
]

_LOOK = """
import json, os, stat
V, mine = "/opt/skills", 0
pending = ["/home/sandbox"]
while pending:
    folder = pending.pop()
    os.chmod(folder, 0o700)
    for name in os.listdir(folder):
        path = folder + "/" + name
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            pending.append(path)
        elif stat.S_ISREG(mode):
            mine += open(path).read() == "mine\\n"
print(json.dumps([open(V + "/pdf/SKILL.md").read()[-13:], sorted(os.listdir(V)), mine]))
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("backend_name", "place"), _WAYS, indirect=["backend_name"])
async def test_what_lies_in_the_way_of_the_links_stays_and_is_not_followed(
    config: Config, treasure: Path, place: str
) -> None:
    before = state(treasure)
    # Containers take their time to start, and a pipe that is made in gVisor ends with its sandbox.
    few = ("a link to the host", "a closed directory")
    plants = few if config.backend == "docker" else tuple(_PLANTS)
    chats = {plant: ChatId(f"mallory-{number}", "attack") for number, plant in enumerate(plants)}
    async with open_manager(config) as manager:
        for plant, chat in chats.items():
            command = _PLANTS[plant].format(treasure=treasure, place=f"~/{place}")
            session = await manager.session(chat)
            # An old gVisor knows no call by which `ls` looks at a file.
            look = f"find ~/{place} -maxdepth 0 -printf '%y %l %U %m'"
            clear = f"rm -rf ~/.claude ~/.agents; mkdir -p $(dirname ~/{place})"
            planted = await session.exec(f"{clear}; {command}; {look}")
            assert planted.success, (plant, planted)
            await session.reset()
            await session.skills.activate("pdf")
            assert (await session.exec(look)).stdout == planted.stdout
            mine = int("mine" in _PLANTS[plant])
            assert await probe(session, _LOOK) == ["Says honest.\n", ["pdf"], mine], plant
            await manager.stop(chat)
    assert state(treasure) == before


@on_gvisor_if_whole
async def test_two_chats_see_each_their_own_version(
    manager: SessionManager, session: Session, folder: Path
) -> None:
    write(folder, "other")
    other = await manager.session(OTHER)
    await other.skills.activate("pdf")
    command = f"sh {SKILL}/scripts/run.sh"
    assert (await other.exec(command)).stdout == "other\n"
    assert (await session.exec(command)).stdout == "honest\n"
    found = await session.exec("grep -rl other /workspace")
    assert found.stdout == ""
