"""What is found in a root, whatever lies there."""

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mcp_sandbox.skills import scan as scanning
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.parse import ParsedSkill, parse
from mcp_sandbox.skills.scan import MAX_DOCUMENT_BYTES, ScanLimits, Scanner, SkillRoot
from tests.skills import corpus
from tests.skills.folders import codes, write_skill


def scan(folder: Path, **limits: int) -> Catalogue:
    return Scanner(SkillRoot("assistant", folder), limits=ScanLimits(**limits)).scan()


def uris(catalogue: Catalogue) -> list[str]:
    return [skill.uri.removeprefix("skill://assistant/") for skill in catalogue.skills]


def plant_pipe(path: Path) -> None:
    os.mkfifo(path)


def plant_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def plant_endless_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("making a device needs privileges")


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


@pytest.mark.parametrize(
    ("plant", "code"),
    [
        (plant_pipe, "not-a-file"),
        (plant_socket, "not-a-file"),
        (plant_endless_device, "not-a-file"),
        (Path.mkdir, "not-a-file"),
        (link_to("/dev/zero"), "link"),
        (link_to("nowhere"), "link"),
        (link_to("SKILL.md"), "link"),
        (link_to("README.md"), "link"),
    ],
)
def test_a_document_that_is_no_file_is_a_problem_and_is_not_opened(
    tmp_path: Path, plant: Callable[[Path], None], code: str
) -> None:
    write_skill(tmp_path / "good")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "README.md").write_text("---\nname: odd\ndescription: Odd.\n---\n")
    plant(tmp_path / "odd" / "SKILL.md")
    catalogue = scan(tmp_path)
    assert uris(catalogue) == ["good/SKILL.md"]
    assert codes(catalogue) == {"odd": [code]}
    assert catalogue.unusable == catalogue.problems


@pytest.mark.parametrize("spelling", ["skill.md", "Skill.md", "SKILL.MD", "sKiLl.Md"])
def test_every_spelling_of_the_document_is_found(tmp_path: Path, spelling: str) -> None:
    write_skill(tmp_path / "one", document=spelling)
    (skill,) = scan(tmp_path).skills
    assert (skill.uri, skill.document) == ("skill://assistant/one/SKILL.md", spelling)
    assert [(each.code, each.level) for each in skill.diagnostics] == [("spelling", "warning")]


def test_of_two_spellings_in_one_folder_the_right_one_counts_and_the_other_is_told(
    tmp_path: Path,
) -> None:
    write_skill(tmp_path / "one", description="Wrong.", document="skill.md")
    write_skill(tmp_path / "one", description="Right.")
    os.mkfifo(tmp_path / "one" / "SKILL.MD")
    (skill,) = scan(tmp_path).skills
    assert skill.front.description == "Right."
    (told,) = skill.diagnostics
    assert told.code == "several-documents"
    assert "skill.md" in told.reason
    assert "SKILL.MD" in told.reason


def test_every_folder_of_the_corpus_is_offered_or_a_problem(tmp_path: Path) -> None:
    corpus.write(tmp_path)
    catalogue = scan(tmp_path)
    offered = {skill.folder.name for skill in catalogue.skills}
    refused = {problem.folder.name for problem in catalogue.problems}
    assert offered == {case.folder_name for case in corpus.CASES if case.loads}
    assert refused == {case.folder_name for case in corpus.CASES if not case.loads}


def test_what_no_document_can_be_neither_hangs_the_search_nor_vanishes(tmp_path: Path) -> None:
    corpus.plant(tmp_path)
    catalogue = scan(tmp_path)
    assert uris(catalogue) == ["looping-folder/SKILL.md"]
    assert {*codes(catalogue), "looping-folder"} == set(corpus.UNREADABLE)


def test_skills_inside_a_skill_are_listed_too(tmp_path: Path) -> None:
    write_skill(tmp_path / "outer")
    write_skill(tmp_path / "outer" / "parts" / "inner")
    write_skill(tmp_path / "group" / "other")
    assert uris(scan(tmp_path)) == [
        "outer/parts/inner/SKILL.md",
        "group/other/SKILL.md",
        "outer/SKILL.md",
    ]


def test_a_root_that_is_a_skill_itself_is_listed_with_those_inside(tmp_path: Path) -> None:
    write_skill(tmp_path / "one")
    assert uris(scan(tmp_path / "one")) == ["one/SKILL.md"]
    write_skill(tmp_path / "one" / "parts" / "two")
    assert uris(scan(tmp_path / "one")) == ["one/SKILL.md", "one/parts/two/SKILL.md"]


def test_skills_of_one_name_keep_uris_of_their_own(tmp_path: Path) -> None:
    write_skill(tmp_path / "pdf")
    write_skill(tmp_path / "office" / "pdf")
    write_skill(tmp_path / "reader", name="pdf")
    write_skill(tmp_path / "writer", name="pdf")
    assert uris(scan(tmp_path)) == [
        "pdf/SKILL.md",
        "reader/pdf/SKILL.md",
        "writer/pdf/SKILL.md",
        "office/pdf/SKILL.md",
    ]


def test_a_skill_with_the_name_of_a_folder_in_it_does_not_take_that_folders_uri(
    tmp_path: Path,
) -> None:
    write_skill(tmp_path / "a", name="b", description="Outer.")
    write_skill(tmp_path / "a" / "b", description="Inner.")
    found = {uri: skill.front.description for uri, skill in scan(tmp_path).by_uri.items()}
    assert found == {
        "skill://assistant/a/b/SKILL.md": "Inner.",
        "skill://assistant/a/_/b/SKILL.md": "Outer.",
    }


def test_names_that_a_uri_cannot_have_are_encoded(tmp_path: Path) -> None:
    write_skill(tmp_path / "größe %2e", name="größe %2e")
    write_skill(Path(os.fsdecode(os.fsencode(tmp_path) + b"/by\xfftes")), name="bytes")
    assert uris(scan(tmp_path)) == ["by%FFtes/bytes/SKILL.md", "gr%C3%B6%C3%9Fe%20%252e/SKILL.md"]


def test_what_is_said_of_names_that_are_no_text_is_text(tmp_path: Path) -> None:
    link = Path(os.fsdecode(os.fsencode(tmp_path) + b"/li\xffnk"))
    link.symlink_to("/etc")
    (told,) = scan(tmp_path).problems
    assert told.folder == link
    assert told.diagnostics[0].file == "li\\udcffnk"
    assert told.diagnostics[0].reason.encode()


@pytest.mark.parametrize("name", ["..", ".", "../../etc", "a/b", "/etc"])
def test_a_name_that_leads_elsewhere_is_a_problem(tmp_path: Path, name: str) -> None:
    write_skill(tmp_path / "one", name=name)
    catalogue = scan(tmp_path)
    assert catalogue.skills == ()
    assert "name-unusable" in codes(catalogue)["one"]


def test_folders_of_tools_are_not_searched_and_that_is_told(tmp_path: Path) -> None:
    write_skill(tmp_path / "one")
    write_skill(tmp_path / "node_modules" / "two")
    write_skill(tmp_path / "one" / ".git" / "three")
    write_skill(tmp_path / ".claude" / "skills" / "four")
    catalogue = scan(tmp_path)
    assert sorted(uris(catalogue)) == [".claude/skills/four/SKILL.md", "one/SKILL.md"]
    assert codes(catalogue) == {tmp_path.name: ["skipped"]}
    assert "node_modules and 1 more" in catalogue.problems[0].diagnostics[0].reason
    assert catalogue.unusable == ()


def test_what_lies_deeper_than_is_searched_is_told(tmp_path: Path) -> None:
    write_skill(tmp_path / "1/2/3/4/5/six")
    write_skill(tmp_path / "1/2/3/4/5/6/seven")
    catalogue = scan(tmp_path)
    assert uris(catalogue) == ["1/2/3/4/5/six/SKILL.md"]
    (told,) = catalogue.problems[0].diagnostics
    assert (told.code, told.file) == ("too-deep", "1/2/3/4/5/6/seven")


@pytest.mark.parametrize(
    ("limits", "offered", "code"),
    [
        ({"folders": 4}, 3, "too-many-folders"),
        ({"entries": 12}, 2, "too-many-entries"),
        ({"skills": 5}, 5, "too-many-skills"),
        ({"heads": 200}, 5, "too-many-skills"),
    ],
)
def test_what_goes_beyond_a_limit_is_left_out_and_told(
    tmp_path: Path, limits: dict[str, int], offered: int, code: str
) -> None:
    for number in range(10):
        write_skill(tmp_path / f"skill-{number}")
    catalogue = scan(tmp_path, **limits)
    assert len(catalogue.skills) == offered
    assert {each.code for one in catalogue.problems for each in one.diagnostics} == {code}


def test_a_document_that_no_model_could_read_is_a_problem(tmp_path: Path) -> None:
    write_skill(tmp_path / "one")
    os.truncate(tmp_path / "one" / "SKILL.md", 1 << 40)
    write_skill(tmp_path / "two", body="x" * (MAX_DOCUMENT_BYTES - 100))
    catalogue = scan(tmp_path)
    assert uris(catalogue) == ["two/SKILL.md"]
    assert "document-too-large" in codes(catalogue)["one"]


def test_a_root_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert codes(scan(tmp_path / "none")) == {"none": ["root-unreadable"]}
    (tmp_path / "file").touch()
    assert codes(scan(tmp_path / "file")) == {"file": ["root-unreadable"]}


def test_editing_one_of_thousands_reads_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counting(data: bytes, folder_name: str, document: str, *, size: int) -> ParsedSkill:
        read.append(folder_name)
        return parse(data, folder_name, document, size=size)

    monkeypatch.setattr(scanning, "parse", counting)
    for number in range(2000):
        write_skill(tmp_path / f"skill-{number}")
        os.utime(tmp_path / f"skill-{number}" / "SKILL.md", (0, 0))
    scanner = Scanner(SkillRoot("assistant", tmp_path))
    scanner.scan()
    before = scanner.scan()
    read.clear()
    assert scanner.scan() is before
    assert read == []
    write_skill(tmp_path / "skill-7", description="Does more.")
    after = scanner.scan()
    assert read == ["skill-7"]
    assert after.changed_since(before) == {"skill://assistant/skill-7/SKILL.md"}


def test_an_edit_is_seen_even_if_size_and_time_stay_the_same(tmp_path: Path) -> None:
    scanner = Scanner(SkillRoot("assistant", tmp_path))
    document = write_skill(tmp_path / "one", description="Does this.") / "SKILL.md"
    status = document.stat()
    assert scanner.scan().skills[0].front.description == "Does this."
    for words in ("Does that.", "Does what.", "Does this."):
        write_skill(tmp_path / "one", description=words)
        os.utime(document, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert scanner.scan().skills[0].front.description == words


def test_folders_that_come_and_go_and_move_are_noticed(tmp_path: Path) -> None:
    scanner = Scanner(SkillRoot("assistant", tmp_path))
    write_skill(tmp_path / "one")
    assert uris(scanner.scan()) == ["one/SKILL.md"]
    (tmp_path / "group").mkdir()
    os.rename(tmp_path / "one", tmp_path / "group" / "one")
    assert uris(scanner.scan()) == ["group/one/SKILL.md"]
    write_skill(tmp_path)
    root = tmp_path.name
    assert set(uris(scanner.scan())) == {f"{root}/SKILL.md", f"{root}/group/one/SKILL.md"}
    os.unlink(tmp_path / "SKILL.md")
    shutil.rmtree(tmp_path / "group")
    assert uris(scanner.scan()) == []
