"""Repositories are read through the real git, and nothing in them is run or followed."""

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mcp_sandbox.errors import SourceUnavailable, UnusableSkill
from mcp_sandbox.skills.supply.fetch import GitSource, fetch, open_repository

Git = Callable[..., str]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "skills" / "pdf" / "scripts").mkdir(parents=True)
    (folder / "skills" / "pdf" / "SKILL.md").write_text("---\nname: pdf\n---\n")
    script = folder / "skills" / "pdf" / "scripts" / "run.sh"
    script.write_bytes(b"#!/bin/sh\r\necho hi\r\n")
    script.chmod(0o755)
    return folder


@pytest.fixture
def run(repository: Path) -> Git:
    """Run git in the repository, committing everything first."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(repository.parent),
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b",
    }  # fmt: skip

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    return git


def commit(run: Git) -> str:
    run("add", "-A")
    run("commit", "-q", "-m", "x", "--allow-empty")
    return run("rev-parse", "HEAD")


def url(repository: Path) -> str:
    return f"file://{repository}"


def test_folder_of_a_commit_comes_as_it_was_committed(repository: Path, run: Git) -> None:
    first = commit(run)
    (repository / "skills" / "pdf" / "new").touch()
    second = commit(run)
    for ref, commit_id, count in (("", second, 3), (first, first, 2), ("main", second, 3)):
        with open_repository(GitSource(url(repository), ref)) as at_hand:
            assert at_hand.commit == commit_id
            tree = at_hand.tree("skills/pdf")
            assert len(tree) == count == len(at_hand.paths("skills"))
    assert tree["scripts/run.sh"].data == b"#!/bin/sh\r\necho hi\r\n"
    assert [path for path, file in tree.items() if file.executable] == ["scripts/run.sh"]


def test_nothing_of_the_repository_is_run(repository: Path, run: Git) -> None:
    witness = repository.parent / "witness"
    (repository / ".gitattributes").write_text("* filter=evil eol=crlf\n*.md export-ignore ident\n")
    (repository / ".lfsconfig").write_text("[lfs]\n\turl = file:///nowhere\n")
    (repository / ".gitmodules").write_text(
        f'[submodule "x"]\n\tpath = x\n\turl = !touch {witness}\n'
    )
    commit(run)
    run("config", "filter.evil.smudge", f"touch {witness}")
    run("config", "core.fsmonitor", f"touch {witness}")
    run("config", "uploadpack.packObjectsHook", f"touch {witness}; exec")
    for hook in ("post-checkout", "pre-auto-gc", "reference-transaction", "post-upload-pack"):
        file = repository / ".git" / "hooks" / hook
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\ntouch {witness}\n")
        file.chmod(0o755)
    with open_repository(GitSource(url(repository))) as at_hand:
        assert at_hand.tree("skills/pdf")["SKILL.md"].data == b"---\nname: pdf\n---\n"
    assert not witness.exists()


def test_link_in_the_skill_is_refused_and_one_beside_it_is_not(repository: Path, run: Git) -> None:
    (repository / "outside").symlink_to("/etc")
    commit(run)
    with open_repository(GitSource(url(repository))) as at_hand:
        assert len(at_hand.tree("skills/pdf")) == 2
    (repository / "skills" / "pdf" / "passwd").symlink_to("/etc/passwd")
    commit(run)
    with open_repository(GitSource(url(repository))) as at_hand:
        with pytest.raises(UnusableSkill, match="'passwd' is a link or a submodule"):
            at_hand.tree("skills/pdf")


def test_submodule_in_the_skill_is_refused(repository: Path, run: Git) -> None:
    head = commit(run)
    run("update-index", "--add", "--cacheinfo", f"160000,{head},skills/pdf/sub")
    run("commit", "-q", "-m", "x")
    with open_repository(GitSource(url(repository))) as at_hand:
        with pytest.raises(UnusableSkill, match="submodule"):
            at_hand.tree("skills/pdf")


def test_too_many_bytes_are_refused_before_they_are_read(repository: Path, run: Git) -> None:
    with (repository / "skills" / "pdf" / "large").open("wb") as stream:
        stream.truncate((16 << 20) + 1)
    commit(run)
    with open_repository(GitSource(url(repository))) as at_hand:
        with pytest.raises(UnusableSkill, match="larger than 16 MiB"):
            at_hand.tree("skills/pdf")


@pytest.mark.slow
def test_tree_that_is_endless_when_listed_is_refused(repository: Path, run: Git) -> None:
    blob = run("rev-parse", f"{commit(run)}:skills/pdf/SKILL.md")
    tree = ""
    for depth in range(8):
        kind = "040000 tree" if depth else "100644 blob"
        lines = "".join(f"{kind} {tree or blob}\t{name}\n" for name in "abcdefghijkl")
        done = subprocess.run(
            ["git", "-C", str(repository), "mktree"],
            input=lines, capture_output=True, text=True, check=True,
        )  # fmt: skip
        tree = done.stdout.strip()
    bomb = run("commit-tree", tree, "-m", "bomb")
    run("update-ref", "refs/heads/bomb", bomb)
    with open_repository(GitSource(url(repository), "bomb")) as at_hand:
        with pytest.raises(UnusableSkill, match="larger than any repository of skills"):
            at_hand.paths("")


def test_names_in_a_repository_cannot_move_the_cursor(repository: Path, run: Git) -> None:
    for name in ("a\x1b[2J", "b\udcff"):
        folder = repository / "skills" / name
        folder.mkdir()
        (folder / "SKILL.md").touch()
    commit(run)
    with pytest.raises(SourceUnavailable, match="has 3 skills") as caught:
        fetch(GitSource(url(repository)))
    assert str(caught.value).replace("\n", "").isprintable()
    (repository / "skills" / "pdf" / "c\x1b[2J").touch()
    commit(run)
    with pytest.raises(UnusableSkill, match="cannot be seen"):
        fetch(GitSource(url(repository), path="skills/pdf"))


@pytest.mark.parametrize(
    ("ref", "path", "says"),
    [
        ("none", "", "cannot get"),
        ("", "none", "no folder 'none'"),
        ("", "skills/pdf/SKILL.md", "file"),
    ],
)
def test_what_is_not_there_is_named(
    ref: str, path: str, says: str, repository: Path, run: Git
) -> None:
    commit(run)
    with pytest.raises(SourceUnavailable, match=says):
        with open_repository(GitSource(url(repository), ref)) as at_hand:
            at_hand.tree(path)


def test_nobody_is_asked_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SourceUnavailable, match="Look at the address"):
        with open_repository(GitSource(f"file://{tmp_path}/none")):
            pass
    assert list(tmp_path.iterdir()) == []


def test_git_that_takes_too_long_is_ended(repository: Path, run: Git) -> None:
    commit(run)
    with pytest.raises(SourceUnavailable, match="in time: look at the network"):
        with open_repository(GitSource(url(repository)), time_limit_s=0):
            pass


def test_missing_git_is_named_as_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceUnavailable, match="git is not installed: install it"):
        with open_repository(GitSource(f"file://{tmp_path}")):
            pass
