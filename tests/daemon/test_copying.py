"""`cp`, between this machine and a chat's sandbox."""

import base64
import os
import signal
import stat
import tarfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from tests import forked
from tests.daemon.running import Client, Done, Place, command, in_chat, place, running
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR, UNSAFE, if_whole

BACKENDS = [BUBBLEWRAP, *(if_whole(place) for place in (DOCKER, UNSAFE, GVISOR))]


@asynccontextmanager
async def at_work(where: Place) -> AsyncGenerator[Client]:
    """A chat `a` that has a sandbox."""
    async with running(where), in_chat(where, "a") as client:
        await client.exec("true")
        yield client


async def copied(where: Place, *arguments: str | Path) -> None:
    done = await command(where, "cp", *map(str, arguments))
    assert done == Done(0, "", "")


async def refused(where: Place, *arguments: str | Path) -> str:
    done = await command(where, "cp", *map(str, arguments))
    assert done.code == 1
    assert done.err.startswith("error: ")
    return done.err


def tree_in(folder: Path) -> Path:
    """A folder with all that should be copied."""
    tree = folder / "tree"
    (tree / "deep" / ("n" * 90) / ("m" * 90)).mkdir(parents=True)
    (tree / "deep" / ("n" * 90) / ("m" * 90) / "far").write_text("away")
    (tree / "empty").mkdir(mode=0o750)
    (tree / "with space\nand line").write_text("odd")
    (tree / "grüße").write_text("ä")
    (tree / "-rf").write_text("a name")
    (tree / "large").write_bytes(os.urandom(3_000_001))
    (tree / "run").write_text("#!/bin/sh\necho ran\n")
    (tree / "run").chmod(0o755)
    (tree / "secret").write_text("s")
    (tree / "secret").chmod(0o600)
    return tree


def seen(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Modes and contents of all that is below a folder."""
    return {
        str(path.relative_to(folder)): (
            stat.S_IMODE(path.lstat().st_mode),
            path.read_bytes() if path.is_file() else b"",
        )
        for path in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_folder_comes_in_and_goes_out_as_it_is(tmp_path: Path, backend: str) -> None:
    runtime = {"MCP_SANDBOX_DOCKER__RUNTIME": "runsc"} if backend == "docker-runsc" else {}
    where = place(tmp_path, backend.partition("-runsc")[0], more=runtime)
    tree = tree_in(tmp_path)
    async with at_work(where) as client:
        await copied(where, tree, "a:new")
        assert await client.exec("new/run && ls -A") == "ran\nnew\n"
        modes = await client.exec("find new/secret new/empty -printf '%m\\n'")
        assert modes == "600\n750\n"
        await copied(where, "a:/workspace/new", tmp_path / "back")
        assert seen(tmp_path / "back") == seen(tree)
        # Into folders that are there.
        await client.exec("mkdir sub")
        await copied(where, tree, "a:sub")
        (tmp_path / "here").mkdir()
        await copied(where, "a:sub/tree/deep", tmp_path / "here")
        assert seen(tmp_path / "here" / "deep") == seen(tree / "deep")
        assert await left_in(client) == 0


async def left_in(client: Client) -> int:
    """How many drafts there are in the sandbox."""
    return int(await client.exec("find /workspace $HOME . -name '.~mcp-*' | wc -l"))


async def test_single_files_get_the_name_or_the_folder_that_is_meant(tmp_path: Path) -> None:
    where = place(tmp_path)
    note, run = tmp_path / "note", tmp_path / "run"
    note.write_text("one")
    run.write_text("#!/bin/sh\necho ran\n")
    run.chmod(0o755)
    async with at_work(where) as client:
        await client.exec("mkdir sub 'sub/-x'")
        await copied(where, run, note, "a:")
        await copied(where, note, "a:sub/other")
        await copied(where, note, run, "a:sub/-x")
        await copied(where, run, "a:~/mine")
        shown = await client.exec("cat note sub/other sub/-x/note; sub/-x/run; ~/mine")
        assert shown == "oneoneoneran\nran\n"
        (tmp_path / "back").mkdir()
        await copied(where, "a:note", "a:~/mine", tmp_path / "back")
        await copied(where, "a:sub/-x/run", tmp_path / "again")
        assert (tmp_path / "back" / "note").read_text() == "one"
        for path in (tmp_path / "back" / "mine", tmp_path / "again"):
            assert path.read_text() == run.read_text()
            assert stat.S_IMODE(path.stat().st_mode) == 0o755
    # Of the script that copies a person sees no more than which files it was about.
    audit = await command(where, "audit show", "--data", str(where.data), asks=False)
    assert "sub/other" in audit.out
    assert "tar " not in audit.out


async def test_what_is_there_is_replaced_only_when_forced_and_folders_as_a_whole(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)
    (tmp_path / "note").write_text("new")
    (tmp_path / "folder" / "sub").mkdir(parents=True)
    (tmp_path / "kept").write_text("here")
    async with at_work(where) as client:
        await client.exec("echo -n old > note; mkdir -p full/folder/x; chmod 0 full/folder/x")
        assert "note in the sandbox is there: --force" in await refused(
            where, tmp_path / "note", "a:note"
        )
        assert await client.exec("cat note") == "old"
        await copied(where, "--force", tmp_path / "note", "a:note")
        assert await client.exec("cat note") == "new"
        given = tmp_path / "folder", "a:full"
        assert "folder in the sandbox is there: --force" in await refused(where, *given)
        assert await client.exec("ls -A full/folder") == "x\n"
        await copied(where, "-rf", *given)
        assert await client.exec("ls -A full full/folder") == "full:\nfolder\n\nfull/folder:\nsub\n"

        assert "kept is there: --force" in await refused(where, "a:note", tmp_path / "kept")
        assert (tmp_path / "kept").read_text() == "here"
        await copied(where, "-f", "a:note", tmp_path / "kept")
        assert (tmp_path / "kept").read_text() == "new"
        await client.exec("mkdir folder; touch folder/y")
        assert "folder is there: --force" in await refused(where, "a:folder", tmp_path)
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["sub"]
        await copied(where, "-R", "-f", "a:folder", tmp_path)
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["y"]
        # Half of a new folder is none: the old one stays.
        await with_tar(client, ROOT + member("f", bytes(5000))[:2000], "cat ~/tar")
        assert "no whole tar" in await refused(where, "-f", "a:folder", tmp_path)
        assert [path.name for path in (tmp_path / "folder").iterdir()] == ["y"]
        assert await left_in(client) == 0
    assert not list(tmp_path.glob(".~mcp-*"))


async def test_folders_that_are_not_there_are_made_on_both_sides(tmp_path: Path) -> None:
    where = place(tmp_path)
    (tmp_path / "note").write_text("one")
    async with at_work(where) as client:
        await copied(where, tmp_path / "note", "a:new/deep/other")
        await copied(where, tmp_path / "note", "a:~/more/")
        await copied(where, tmp_path / "note", tmp_path / "note", "a:both", "-f")
        shown = "cat new/deep/other ~/more/note both/note"
        assert await client.exec(shown) == "oneoneone"
        await copied(where, "a:new", tmp_path / "out" / "side")
        await copied(where, "a:both/note", f"{tmp_path}/box/")
    assert (tmp_path / "out" / "side" / "deep" / "other").read_text() == "one"
    assert (tmp_path / "box" / "note").read_text() == "one"


async def test_patterns_pipes_and_other_chats_are_taken(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with at_work(where) as client, in_chat(where, "b") as other:
        await client.exec("mkdir -p d; echo 1 >'d/a b.txt'; echo 2 >d/c.txt; echo 3 >'d/[x].txt'")
        await other.exec("true")
        await copied(where, "a:d/*.txt", tmp_path / "out")
        assert sorted(os.listdir(tmp_path / "out")) == ["[x].txt", "a b.txt", "c.txt"]
        await copied(where, "a:d/[x].txt", tmp_path / "literal")
        assert (tmp_path / "literal").read_text() == "3\n"
        assert "nothing in the sandbox matches a:d/*.no" in await refused(where, "a:d/*.no", "b:")

        await copied(where, "a:d", "b:from/a")
        await copied(where, "a:d/../d/?.txt", "b:")
        assert await other.exec("cat from/a/c.txt c.txt") == "2\n2\n"
        piped = await command(where, "cp", "-", "b:piped/here", stdin=b"\0given\n")
        assert piped == Done(0, "", "")
        assert await command(where, "cp", "b:piped/here", "-") == Done(0, "\0given\n", "")
        assert "is a folder" in await refused(where, "b:piped", "-")


async def test_cp_and_shell_start_a_daemon_that_ends_where_they_cannot_be_done(
    tmp_path: Path,
) -> None:
    where = place(tmp_path)
    async with at_work(where):
        pass
    settings = {"MCP_SANDBOX_BACKEND": where.backend, "MCP_SANDBOX_DATA_DIR": str(where.data)}
    where = replace(where, more=settings)
    (tmp_path / "note").write_text("one")
    for unknown in (["cp", str(tmp_path / "note"), "b:"], ["shell", "b", "ls"]):
        done = await command(where, *unknown)
        assert (done.code, "no chat is called 'b'" in done.err) == (1, True), done
        for looks in ("status", "ls", "logs"):
            assert (await command(where, looks)).code == (0 if looks == "logs" else 3)
    try:
        assert await command(where, "cp", str(tmp_path / "note"), "a:") == Done(0, "", "")
        assert await command(where, "shell", "a", "cat", "note") == Done(0, "one", "")
        # One that others use, too, goes on.
        assert (await command(where, "shell", "b", "ls")).code == 1
        assert (await command(where, "status")).code == 0
    finally:
        assert (await command(where, "shutdown", "--all")).code == 0


async def test_what_cannot_be_copied_is_told_in_a_sentence(tmp_path: Path) -> None:
    where = place(tmp_path)
    (tmp_path / "note").write_text("")
    os.mkfifo(tmp_path / "pipe")
    note = str(tmp_path / "note")
    for wrong in ([note, "other"], ["a:x", note, "y"], ["-", note], ["a:x", "-", "-"]):
        done = await command(where, "cp", *wrong)
        assert done.code == 2
        assert "one side is CHAT:PATH" in " ".join(done.err.split()), done.err
    assert "Missing argument" in (await command(where, "cp", note)).err
    async with at_work(where) as client:
        await client.exec("mkfifo pipe; touch closed; chmod 0 closed")
        assert "no chat is called 'b'" in await refused(where, note, "b:")
        assert "no chat is called 'b'" in await refused(where, "b:x", tmp_path / "new")
        assert "missing in the sandbox is no file or folder" in await refused(
            where, "a:missing", tmp_path / "new"
        )
        assert "is no file or folder" in await refused(where, "a:pipe", tmp_path / "new")
        assert "no file or folder" in await refused(where, tmp_path / "missing", "a:")
        assert "no file or folder" in await refused(where, tmp_path / "pipe", "a:")
        assert "none can be made" in await refused(where, note, "a:closed/note")
        assert "none can be made" in await refused(where, note, note, "a:/proc/new")
        assert "note: File exists" in await refused(where, "a:", tmp_path / "note" / "x")
        assert not (tmp_path / "new").exists()


@pytest.mark.bubblewrap
async def test_folders_that_may_not_be_written_to_come_in_and_can_be_given_up(
    tmp_path: Path,
) -> None:
    where = place(tmp_path, "bubblewrap")
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "file").write_text("")
    (tmp_path / "tree" / "sub").chmod(0o555)
    (tmp_path / "tree").chmod(0o555)
    async with at_work(where) as client:
        await copied(where, tmp_path / "tree", "a:")
        assert await client.exec("stat -c %a tree tree/sub") == "755\n555\n"
        await with_tar(client, b"", '/bin/tar "$@"; echo broken >&2; exit 2')
        assert await refused(where, tmp_path / "tree", "a:new") == "error: broken\n"
        while await left_in(client):
            await anyio.sleep(0.02)


async def test_links_and_devices_stay_where_they_are_and_are_counted(tmp_path: Path) -> None:
    where = place(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "file").write_text("content")
    (tmp_path / "in" / "link").symlink_to("file")
    os.mkfifo(tmp_path / "in" / "pipe")
    async with at_work(where) as client:
        # Inside, links lead to nothing that the sandbox could not reach by itself.
        await copied(where, tmp_path / "in", "a:")
        assert await client.exec("cat in/link; ls in") == "contentfile\nlink\n"
        await client.exec("cd in && ln -s / root && mkfifo pipe && ln file hard && chmod u+s file")
        done = await command(where, "cp", "a:in", str(tmp_path / "out"))
        assert done == Done(0, "", "a:in: left out 3 links and such\n")
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["file", "hard"]
        assert stat.S_IMODE((tmp_path / "out" / "file").stat().st_mode) == 0o644


def member(name: str, content: bytes = b"", **more: object) -> bytes:
    """A part of a tar."""
    head = tarfile.TarInfo(name)
    head.size = len(content)
    for key, value in more.items():
        setattr(head, key, value)
    data = head.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
    return data + content + bytes(-len(content) % 512)


async def with_tar(client: Client, content: bytes, script: str) -> None:
    """From now on the sandbox has a `tar` of its own, which finds the content in `~/tar`."""
    program = f"#!/bin/bash\n[[ $1 == --help ]] && exit\n{script}\n"
    await client.call("write_file", path="~/.local/bin/tar", content=program)
    data = base64.b64encode(content).decode()
    await client.call("write_file", path="~/tar", content=data, encoding="base64")
    assert await client.exec("chmod +x ~/.local/bin/tar; which tar | grep -c local/bin") == "1\n"


ROOT = member(".", type=tarfile.DIRTYPE, mode=0o755)
HOSTILE: Mapping[str, tuple[bytes, dict[str, bytes] | bytes, int]] = {
    "upwards": (ROOT + member("../up", b"x"), {}, 1),
    "absolute": (ROOT + member("/tmp/mcp-sandbox-up", b"x"), {}, 1),
    "upwards within": (ROOT + member("./a/../../up", b"x"), {}, 1),
    "empty names": (ROOT + member("./a//b", b"x") + member("./", b"x"), {}, 2),
    "deep": (ROOT + member("./" + "d/" * 900 + "f", b"x"), {}, 1),
    "no folder": (ROOT + member("./d/f", b"x"), {}, 1),
    "twice": (ROOT + member("f", b"1") + member("f", b"2"), {"f": b"1"}, 1),
    "a folder on a file": (
        ROOT + member("f", b"1") + member("f", type=tarfile.DIRTYPE) + member("f/g", b"2"),
        {"f": b"1"},
        2,
    ),
    "a file on a folder": (
        ROOT + member("d", type=tarfile.DIRTYPE) + member("d", b"2") + member("d/g", b"3"),
        {"d": b"", "d/g": b"3"},
        1,
    ),
    "through a link": (
        ROOT + member("l", type=tarfile.SYMTYPE, linkname="..") + member("l/up", b"x"),
        {},
        2,
    ),
    "a hard link": (ROOT + member("h", type=tarfile.LNKTYPE, linkname="/etc/passwd"), {}, 1),
    "a device": (ROOT + member("n", type=tarfile.CHRTYPE, devmajor=1, devminor=3), {}, 1),
    "a kind without name": (ROOT + member("f", b"1", type=tarfile.CONTTYPE), {"f": b"1"}, 0),
    "special modes": (ROOT + member("s", b"1", mode=0o7777), {"s": b"1"}, 0),
    "a file and more": (member("f", b"1") + member("../up", b"2"), b"1", 1),
}


BROKEN = {
    "nothing": b"",
    "no tar": b"tar: command not found" * 100,
    "no end of a content": ROOT + member("f", bytes(5000))[:2000],
    "gigantic": ROOT + member("f", size=1 << 60) + b"x" * 100_000,
    "less than nothing": ROOT + member("f", size=-512),
    "a bomb of headers": ROOT + member("f", type=tarfile.XHDTYPE, size=1 << 40) + bytes(1 << 20),
    "global headers": member("f", type=tarfile.XGLTYPE, size=1 << 40) + bytes(1 << 20),
    "a bomb of a name": ROOT + member("f", type=tarfile.GNUTYPE_LONGNAME, size=1 << 40),
    "names of names": ROOT + 5000 * member("f", b"name", type=tarfile.GNUTYPE_LONGNAME),
    "holes": ROOT + member("f", type=tarfile.GNUTYPE_SPARSE, size=1 << 40),
    "too long a part": ROOT + member("n" * 256, b"x"),
}


async def test_a_hostile_tar_makes_plain_things_below_a_new_folder(tmp_path: Path) -> None:
    where = place(tmp_path)
    (tmp_path / "below").mkdir()
    async with at_work(where) as client:
        for name, (content, made, left_out) in HOSTILE.items():
            await with_tar(client, content + bytes(1024), "cat ~/tar")
            new = tmp_path / "below" / name
            done = await command(where, "cp", "a:", str(new))
            told = f"a:: left out {left_out} links and such\n" if left_out else ""
            assert done == Done(0, "", told), name
            if isinstance(made, bytes):
                assert new.read_bytes() == made
            else:
                found = seen(new)
                assert found.pop(".")[0] == 0o755
                assert {path: data for path, (_, data) in found.items()} == made, name
                assert all(mode & 0o7000 == 0 for mode, _ in found.values())
    assert {path.name for path in (tmp_path / "below").iterdir()} == {*HOSTILE}
    assert not (tmp_path / "up").exists()


async def test_what_is_no_tar_or_may_take_all_memory_leaves_nothing(tmp_path: Path) -> None:
    where = place(tmp_path)
    (tmp_path / "below").mkdir()
    async with at_work(where) as client:
        for name, content in BROKEN.items():
            await with_tar(client, content, "cat ~/tar")
            error = await refused(where, "a:", tmp_path / "below" / "new")
            assert "report it" not in error, name
            assert os.listdir(tmp_path / "below") == [], name
        await with_tar(client, b"", "echo $'\\e[2Jbad' >&2; exit 2")
        assert await refused(where, "a:", tmp_path / "below" / "new") == "error: \ufffd[2Jbad\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_copy_out_that_is_broken_off_leaves_nothing(tmp_path: Path, number: int) -> None:
    where = place(tmp_path)
    (tmp_path / "below").mkdir()
    async with at_work(where) as client:
        content = ROOT + member("f", b"1") + member("g", bytes(1 << 20))[: 1 << 19]
        await with_tar(client, content, "cat ~/tar; echo $$ >~/pid; exec sleep 600")
        async with copying(where, "a:", str(tmp_path / "below" / "new")) as program:
            while not list((tmp_path / "below").glob(".~mcp-*/x/f")):
                await anyio.sleep(0.01)
            assert not (tmp_path / "below" / "new").exists()
            program.send_signal(number)
            assert await program.wait() != 0
        assert os.listdir(tmp_path / "below") == []
        while "alive" in await client.exec("kill -0 $(cat ~/pid) && echo alive; true"):
            await anyio.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_a_copy_in_that_is_broken_off_leaves_nothing(tmp_path: Path, number: int) -> None:
    where = place(tmp_path)
    tree = tree_in(tmp_path)
    async with at_work(where) as client:
        # It unpacks some, and does not come to an end.
        await with_tar(client, b"", 'head -c 100000 | /bin/tar "$@"; cat >/dev/null; sleep 600')
        async with copying(where, str(tree), "a:new") as program:
            while await client.exec("find .~mcp-*/x -type f 2>/dev/null | wc -l") == "0\n":
                await anyio.sleep(0.01)
            assert await client.exec("ls -d new 2>/dev/null | wc -l") == "0\n"
            program.send_signal(number)
            assert await program.wait() != 0
        while await left_in(client):
            await anyio.sleep(0.02)
        assert await client.exec("ls") == "(no output)"


async def test_what_has_no_room_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    where = place(tmp_path, more={"MCP_SANDBOX_WORKSPACE__SIZE_LIMIT": "2MiB"})
    tree = tree_in(tmp_path)
    async with at_work(where) as client:
        assert "the workspace is full" in await refused(where, tree, "a:")
        assert await client.exec("ls -A") == "(no output)"
        # Out of a full one it goes all the same.
        await client.exec("head -c 3M /dev/urandom >big")
        await copied(where, "a:big", tmp_path / "big")
        assert (tmp_path / "big").stat().st_size > 1 << 20


@pytest.mark.bubblewrap
async def test_what_cannot_be_read_is_told_and_nothing_is_copied(tmp_path: Path) -> None:
    where = place(tmp_path, "bubblewrap")
    async with at_work(where) as client:
        await client.exec("mkdir tree; touch tree/open tree/closed; chmod 0 tree/closed")
        done = await command(where, "cp", "a:tree", str(tmp_path / "new"))
        assert "Permission denied" in done.err
        assert not (tmp_path / "new").exists()


@asynccontextmanager
async def copying(where: Place, *arguments: str) -> AsyncGenerator[forked.Program]:
    """`cp` under way."""
    async with forked.start(
        where.arguments("cp", *arguments), env=where.environment(), cwd="/"
    ) as program:
        yield program
