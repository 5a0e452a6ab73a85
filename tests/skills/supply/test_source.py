"""What people write is understood as one source, or refused with what to write instead."""

from pathlib import Path

import pytest

from mcp_sandbox.errors import InvalidArgument, UnusableSkill
from mcp_sandbox.skills.supply.fetch import GitSource, is_archive, parse_source

HUB = "https://github.com/owner/repo.git"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("owner/repo", GitSource(HUB)),
        ("owner/repo@v1", GitSource(HUB, "v1")),
        ("owner/repo/skills/pdf@v1", GitSource(HUB, "v1", "skills/pdf")),
        (HUB, GitSource(HUB)),
        (f"git+{HUB}@v1#subdirectory=skills/pdf", GitSource(HUB, "v1", "skills/pdf")),
        (f"{HUB}@feature/x#skills/pdf/", GitSource(HUB, "feature/x", "skills/pdf")),
        ("https://github.com/owner/repo/tree/main/a/b", GitSource(HUB, "main", "a/b")),
        ("https://example.org/pdf", GitSource("https://example.org/pdf")),
        ("https://example.org:8443/pdf@v1", GitSource("https://example.org:8443/pdf", "v1")),
        ("git@github.com:owner/repo.git", GitSource("ssh://git@github.com/owner/repo.git")),
        ("ssh://git@example.org/x.git@v1#a", GitSource("ssh://git@example.org/x.git", "v1", "a")),
        ("file:///srv/x.git", GitSource("file:///srv/x.git")),
    ],
)  # fmt: skip
def test_git_address_is_a_url_a_ref_and_a_path(
    text: str, source: GitSource, tmp_path: Path
) -> None:
    assert parse_source(text, tmp_path) == source
    assert parse_source(str(source), tmp_path) == source


def test_what_exists_here_is_a_folder_or_an_archive(tmp_path: Path) -> None:
    (tmp_path / "owner" / "repo").mkdir(parents=True)
    (tmp_path / "owner" / "repo" / "SKILL.md").touch()
    folder = tmp_path / "owner" / "repo"
    assert not is_archive(folder)
    assert parse_source("owner/repo", tmp_path) == folder
    assert parse_source("owner/repo/SKILL.md", tmp_path) == folder
    assert parse_source("./none", tmp_path) == tmp_path / "none"
    for name in ("pdf.zip", "pdf.skill", "/srv/PDF.ZIP"):
        assert parse_source(name, tmp_path) == tmp_path / name
        assert is_archive(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "", "-x", "--upload-pack=touch /tmp/x", "ext::sh -c id", "fd::17", "a b", "nothing",
        "http://example.org/x.git", "git://example.org/x.git", "git+http://example.org/x",
        "https://user:secret@example.org/x.git", "https://example.org/x?token=secret",
        "https://-oProxyCommand=id/x", "ssh://-oProxyCommand=id/x", "git@-oProxyCommand=id:x",
        "ssh://user:secret@example.org/x", "file://host/x", "https:///x", "https://example.org",
        f"{HUB}@--upload-pack=id", f"{HUB}@a:b", f"{HUB}@a..b", f"{HUB}@a b", f"{HUB}@+a",
        f"{HUB}@a^", "owner/repo@-x", "owner/re\0po", "owner/repo\n", "x" * 3000,
    ],
)  # fmt: skip
def test_what_git_could_take_for_something_else_is_no_source(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument):
        parse_source(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/pdf.zip",
        "https://github.com/owner/repo/archive/refs/heads/main.zip",
        "https://example.org/PDF.skill#pdf",
        "git+https://example.org/pdf.tar.gz",
        "file:///srv/pdf.tgz",
    ],
)
def test_an_archive_elsewhere_is_told_as_one(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is an archive: download it, then give the file"):
        parse_source(text, tmp_path)


@pytest.mark.parametrize("path", ["../x", "a/../..", "a//b", "a\\b"])
def test_path_that_leaves_the_repository_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableSkill):
        parse_source(f"{HUB}#{path}", tmp_path)
