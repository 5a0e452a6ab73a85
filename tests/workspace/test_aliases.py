"""Aliases become mounts, links in a folder of ours, or links in the workspace."""

from pathlib import Path

import pytest

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import ChatId, Mount
from mcp_sandbox.workspace.layout import alias_mounts, parse_aliases, plan

CHAT = ChatId("ann", "c1")
WORKSPACE = Path("/data/workspace")
FOLDERS = Path("/data/alias")


def test_the_workspace_elsewhere_is_a_mount_of_it() -> None:
    planned = plan(CHAT, ["/mnt/{user}/{chat}"])
    assert alias_mounts(planned, WORKSPACE, FOLDERS) == (Mount(WORKSPACE, "/mnt/ann/c1"),)


def test_a_directory_elsewhere_is_a_link_in_a_read_only_folder() -> None:
    planned = plan(
        CHAT,
        [
            "/mnt/user-data/workspace",
            "/mnt/user-data/uploads=uploads",
            "/mnt/user-data/outputs=outputs",
        ],
    )
    (folder,) = planned.folders
    assert folder.links == (("outputs", "/workspace/outputs"), ("uploads", "/workspace/uploads"))
    assert folder.mount_points == ("workspace",)
    assert planned.directories == ("outputs", "uploads")
    assert alias_mounts(planned, WORKSPACE, FOLDERS) == (
        Mount(FOLDERS / folder.name, "/mnt/user-data", read_only=True),
        Mount(WORKSPACE, "/mnt/user-data/workspace"),
    )


@pytest.mark.parametrize(
    ("template", "link"),
    [
        ("/workspace/{user}/chat-{chat}", ("ann/chat-c1", "..")),
        ("/workspace/a/b/c", ("a/b/c", "../..")),
        ("/workspace/self", ("self", ".")),
        ("/workspace/in/box=uploads", ("in/box", "../uploads")),
    ],
)
def test_an_alias_in_the_workspace_is_a_relative_link(template: str, link: tuple[str, str]) -> None:
    planned = plan(CHAT, [template])
    assert planned.inner_links == (link,)
    assert alias_mounts(planned, WORKSPACE, FOLDERS) == ()


def test_nothing_below_the_workspace_is_ever_the_source_of_a_mount() -> None:
    planned = plan(CHAT, ["/mnt/a/x=x", "/mnt/b", "/srv/c/y=y", "/workspace/q/r=x"])
    for mount in alias_mounts(planned, WORKSPACE, FOLDERS):
        assert mount.source == WORKSPACE or mount.source.parent == FOLDERS


def test_folders_with_other_content_have_other_names() -> None:
    one, two = (plan(CHAT, [f"/mnt/a/x={name}"]).folders[0].name for name in ("x", "y"))
    assert one != two
    assert one == plan(ChatId("other", "chat"), ["/srv/a/x=x"]).folders[0].name


@pytest.mark.parametrize(
    "template",
    [
        "",
        "/",
        "relative",
        "//mnt",
        "/mnt/",
        "/mnt/../etc",
        "/mnt/./x",
        "/mnt/a b",
        "/mnt/a\0b",
        "/mnt/a,b",
        "/mnt/a:b",
        "/opt/skills",
        "/mnt/{other}",
        "/mnt/ü",
        "/etc",
        "/etc/x=y",
        "/usr/local",
        "/proc/x",
        "/run/mcp-sandbox",
        "/home/sandbox",
        "/tmp/x",
        "/opt/mcp-sandbox",
        "/{user}",
        "/workspace",
        "/workspace=x",
        "/mnt=x",
        "/mnt/x=",
        "/mnt/x=..",
        "/mnt/x=a/b",
        "/mnt/x=/etc",
    ],
)
def test_an_alias_that_could_do_harm_is_refused_with_a_reason(template: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: .{20,}"):
        parse_aliases([template])


@pytest.mark.parametrize(
    "templates", [("/mnt/a", "/mnt/a"), ("/mnt/a", "/mnt/a/b=c"), ("/mnt/a/b", "/mnt/a")]
)
def test_aliases_in_one_another_are_refused(templates: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lie in one another"):
        parse_aliases(templates)
