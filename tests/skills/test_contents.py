"""Which files a skill has, and what reading them gives."""

import os
import subprocess
import threading
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.errors import Busy, TooLarge, UnknownSkill
from mcp_sandbox.skills import contents as contents_module
from mcp_sandbox.skills.contents import FileRead, gather, read_whole
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.skills.skill import Contents, Skill
from tests.skills.folders import CHAT, library, write_skill

MIB = 1024 * 1024


def paths(found: Contents) -> list[str]:
    return [file.path for file in found.files]


def left_out(found: Contents) -> list[str]:
    return sorted(each.file for each in found.diagnostics)


async def shelved(tmp_path: Path) -> tuple[SkillLibrary, Skill, Path]:
    """A library with one skill, the skill, and its folder."""
    folder = write_skill(tmp_path / "mine" / "one")
    shelves = library(tmp_path / "data", tmp_path / "mine")
    return shelves, (await shelves.catalogue(CHAT)).find("one"), folder


def test_the_digest_is_what_a_shell_says(tmp_path: Path) -> None:
    write_skill(tmp_path)
    for path in ("b/c", "b.txt", "b-c", "B", "ü", "line\nbreak", "back\\slash", "b/ d/e"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(path * 100)
    command = (
        r"find . -type f -printf '%P\0' | LC_ALL=C sort -z | xargs -0 sha256sum -z | sha256sum"
    )
    assert command in str(contents_module.__doc__)
    said = subprocess.check_output(command, shell=True, cwd=tmp_path, text=True)
    assert gather(tmp_path).contents.digest == f"sha256:{said.split()[0]}"


def test_the_digest_changes_with_any_byte_name_and_file(tmp_path: Path) -> None:
    write_skill(tmp_path)
    (tmp_path / "a").write_text("a")
    seen = {gather(tmp_path).contents.digest}
    for change in (
        lambda: (tmp_path / "a").write_text("b"),
        lambda: (tmp_path / "a").rename(tmp_path / "b"),
        (tmp_path / "c").touch,
        lambda: (tmp_path / "SKILL.md").write_text("other"),
    ):
        change()
        digest = gather(tmp_path).contents.digest
        assert digest not in seen
        seen.add(digest)


def test_files_are_told_apart_by_what_is_in_them_and_named_by_their_endings(tmp_path: Path) -> None:
    write_skill(tmp_path)
    files = {
        "a.ts": b"let a: string",
        "b.png": b"\x89PNG\r\n\x1a\n\0",
        "c.yaml": b"a: 1",
        "d": "größe".encode(),
        "e": b"\xff\xfe",
        "f.tar.gz": b"\x1f\x8b\0",
        "data:,g.md": b"# G",
        "empty.md": b"",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = {file.path: (file.mime, file.kind) for file in gather(tmp_path).contents.files}
    assert found == {
        "SKILL.md": ("text/markdown", "text"),
        "a.ts": ("text/typescript", "text"),
        "b.png": ("image/png", "binary"),
        "c.yaml": ("application/yaml", "text"),
        "d": ("text/plain", "text"),
        "e": ("application/octet-stream", "binary"),
        "f.tar.gz": ("application/gzip", "binary"),
        "data:,g.md": ("text/markdown", "text"),
        "empty.md": ("text/markdown", "text"),
    }


def test_skills_inside_belong_to_the_outer_one_and_leftovers_of_tools_to_none(
    tmp_path: Path,
) -> None:
    write_skill(tmp_path)
    write_skill(tmp_path / "parts" / "inner")
    for junk in (".git/config", "a/__pycache__/x.pyc", "node_modules/m/index.js", ".DS_Store"):
        (tmp_path / junk).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / junk).touch()
    found = gather(tmp_path).contents
    assert paths(found) == ["SKILL.md", "parts/inner/SKILL.md"]
    assert found.diagnostics == ()


def test_what_is_no_plain_file_is_left_out_and_told(tmp_path: Path) -> None:
    write_skill(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("SKILL.md")
    (tmp_path / "folder").symlink_to("/etc")
    (tmp_path / "broken").symlink_to("nowhere")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/by\xfftes")).touch()
    found = gather(tmp_path).contents
    assert paths(found) == ["SKILL.md"]
    assert left_out(found) == ["broken", "by\\udcfftes", "folder", "link", "pipe"]
    assert {each.code for each in found.diagnostics} == {"left-out"}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["files", "bytes", "sparse", "folders"])
def test_of_a_skill_over_a_limit_only_the_document_is_offered(tmp_path: Path, what: str) -> None:
    write_skill(tmp_path)
    if what == "files":
        for number in range(512):
            (tmp_path / str(number)).touch()
    if what == "bytes":
        for number in range(4):
            (tmp_path / str(number)).write_bytes(bytes(4 * MIB))
    if what == "sparse":
        (tmp_path / "huge").touch()
        os.truncate(tmp_path / "huge", 1 << 40)
    if what == "folders":
        for number in range(10_001):
            (tmp_path / str(number)).mkdir()
    found = gather(tmp_path).contents
    assert paths(found) == ["SKILL.md"]
    assert [each.code for each in found.diagnostics] == ["over-the-limit"]
    assert found.digest != gather(write_skill(tmp_path / "other")).contents.digest


def test_as_many_files_as_allowed_are_all_offered(tmp_path: Path) -> None:
    write_skill(tmp_path)
    for number in range(511):
        (tmp_path / str(number)).touch()
    found = gather(tmp_path).contents
    assert len(found.files) == 512
    assert found.diagnostics == ()


async def test_the_document_is_called_the_same_in_any_spelling(tmp_path: Path) -> None:
    folder = write_skill(tmp_path / "mine" / "one", document="Skill.md")
    shelves = library(tmp_path / "data", tmp_path / "mine")
    skill = (await shelves.catalogue(CHAT)).find("one")
    assert paths(await shelves.contents(skill)) == ["SKILL.md"]
    assert await shelves.read(skill, "SKILL.md") == (folder / "Skill.md").read_bytes()


async def test_only_files_that_changed_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counting(directory: int, path: str) -> FileRead:
        read.append(path)
        return read_whole(directory, path)

    monkeypatch.setattr(contents_module, "read_whole", counting)
    shelves, skill, folder = await shelved(tmp_path)
    for number in range(50):
        (folder / str(number)).write_text("a")
    await anyio.sleep(0.1)
    before = await shelves.contents(skill)
    read.clear()
    assert await shelves.contents(skill) == before
    assert read == []
    (folder / "7").write_text("b")
    after = await shelves.contents(skill)
    assert read == ["7"]
    assert after.digest != before.digest


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../two/SKILL.md",
        "a/../../two/SKILL.md",
        "a/../SKILL.md",
        "./SKILL.md",
        "a//b",
        "",
        "a/",
        "SKILL.md\0.txt",
        "%2e%2e/two/SKILL.md",
        "%252e%252e/two/SKILL.md",
        "..\\two\\SKILL.md",
        ".git/config",
        "a",
        "link",
        "linked/passwd",
        "pipe",
        "zero",
        "x" * 5000,
        "x/" * 3000 + "y",
        "\ud800",
    ],
)
async def test_a_path_that_is_none_of_a_skills_file_reads_nothing(
    tmp_path: Path, path: str
) -> None:
    shelves, skill, folder = await shelved(tmp_path)
    write_skill(tmp_path / "mine" / "two")
    (folder / "a").mkdir()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").touch()
    (folder / "link").symlink_to("../two/SKILL.md")
    (folder / "linked").symlink_to("/etc")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    with anyio.fail_after(5), pytest.raises(UnknownSkill):
        await shelves.read(skill, path)


async def test_a_file_over_the_limit_is_not_read(tmp_path: Path) -> None:
    shelves, skill, folder = await shelved(tmp_path)
    (folder / "huge").touch()
    os.truncate(folder / "huge", 16 * MIB)
    assert len(await shelves.read(skill, "huge")) == 16 * MIB
    os.truncate(folder / "huge", 16 * MIB + 1)
    with pytest.raises(TooLarge):
        await shelves.read(skill, "huge")


async def test_a_file_swapped_for_a_link_again_and_again_never_shows_the_target(
    tmp_path: Path,
) -> None:
    shelves, skill, folder = await shelved(tmp_path)
    (folder / "a").write_text("mine")
    (tmp_path / "secret").write_text("secret")
    (folder / "b").symlink_to(tmp_path / "secret")
    enough = threading.Event()

    def swap() -> None:
        while not enough.is_set():
            for one, two in (("a", "c"), ("b", "a"), ("c", "b")):
                os.rename(folder / one, folder / two)

    swapping = threading.Thread(target=swap)
    swapping.start()
    seen = set()
    try:
        with anyio.fail_after(30):
            for _ in range(100):
                try:
                    seen.add(await shelves.read(skill, "a"))
                except (UnknownSkill, Busy):
                    continue
    finally:
        enough.set()
        swapping.join()
    assert seen <= {b"mine"}


async def test_a_file_is_read_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelves, skill, folder = await shelved(tmp_path)
    file, whole, later = folder / "a", contents_module._all, [b"B" * 9000, b"C" * 9000]
    file.write_bytes(b"A" * 9000)
    # Long enough for its time to tell of a change.
    await anyio.sleep(0.1)

    def rewritten_meanwhile(descriptor: int, path: str) -> bytes:
        before = whole(descriptor, path)
        if not later:
            return before
        file.write_bytes(news := later.pop(0))
        return news[:4096] + before[4096:]

    monkeypatch.setattr(contents_module, "_all", rewritten_meanwhile)
    assert await shelves.read(skill, "a") == b"C" * 9000
    later.extend(bytes([number]) * 9000 for number in range(100))
    with pytest.raises(Busy, match="keeps changing"):
        await shelves.read(skill, "a")


async def test_a_skill_that_is_gone_says_so(tmp_path: Path) -> None:
    shelves, skill, folder = await shelved(tmp_path)
    (folder / "SKILL.md").unlink()
    with pytest.raises(UnknownSkill, match="cannot be read any more"):
        await shelves.contents(skill)
    with pytest.raises(UnknownSkill):
        await shelves.read(skill, "SKILL.md")
