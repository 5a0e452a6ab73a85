"""The extension io.modelcontextprotocol/skills, asked as a host asks."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import text
from mcp import MCPError
from mcp.types import INVALID_PARAMS, BlobResourceContents, TextResourceContents

from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.server.skills.visible import canonicalize
from tests.server.skills.shelves import (
    EVERY_BYTE,
    SkillsClient,
    client_of,
    offering,
    write_skill,
)
from tests.web.clients import Web

GROW = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
while True:
    os.write(file, b"x")
"""
MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
FILES: Mapping[str, str | bytes] = {
    "references/deep/guide one.md": "# Guide\r\n\x00 \u2028 end",
    "assets/every.bin": EVERY_BYTE,
    "assets/logo.png": b"\x89PNG\r\n\x1a\n\x00",
    "scripts/run.py": "print('ä')\n",
    "100%.txt": "",
}


async def read(web: Web, uri: str, mode: str = "auto", user: str = "alice") -> tuple[str, bytes]:
    """The type and bytes of a resource."""
    async with client_of(web, mode, user) as client:
        (found,) = (await client.read_resource(uri)).contents
    assert found.uri == uri
    if isinstance(found, TextResourceContents):
        return found.mime_type or "", found.text.encode()
    assert isinstance(found, BlobResourceContents)
    return found.mime_type or "", base64.b64decode(found.blob)


def uris(entry: dict[str, Any]) -> list[str]:
    return [file["uri"] for file in entry["resources"]]


@MODES
async def test_the_manifest_names_every_file_and_what_is_read_has_its_digest(
    data_root: Path, tmp_path: Path, mode: str
) -> None:
    folder = write_skill(tmp_path / "a", "pdf", FILES)
    async with offering(data_root, tmp_path / "a") as web:
        async with client_of(web, mode) as client:
            (entry,) = await SkillsClient(client).all()
            answered = await SkillsClient(client).get(entry["uri"])
        assert entry["uri"] == "skill://assistant/pdf/SKILL.md"
        assert entry["frontmatter"] == {"name": "pdf", "description": "About pdf."}
        assert answered["skill"] == entry
        assert len(set(uris(entry))) == len(FILES) + 1
        for file in entry["resources"]:
            _, data = await read(web, file["uri"], mode)
            assert file["size"] == len(data)
            assert file["digest"] == "sha256:" + hashlib.sha256(data).hexdigest()
    assert "skill://assistant/pdf/references/deep/guide%20one.md" in uris(entry)
    assert "skill://assistant/pdf/100%25.txt" in uris(entry)
    assert (folder / "assets/every.bin").read_bytes() == EVERY_BYTE


async def test_each_file_has_the_type_of_its_content(data_root: Path, tmp_path: Path) -> None:
    write_skill(tmp_path / "a", "pdf", FILES)
    at = "skill://assistant/pdf/"
    async with offering(data_root, tmp_path / "a") as web:
        assert (await read(web, at + "SKILL.md"))[0] == "text/markdown"
        assert (await read(web, at + "assets/logo.png"))[0] == "image/png"
        assert (await read(web, at + "scripts/run.py"))[0] == "text/x-python"


async def test_results_say_how_long_they_hold_and_for_whom(data_root: Path, tmp_path: Path) -> None:
    write_skill(tmp_path / "a", "pdf", FILES)
    async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:
        host = SkillsClient(client)
        found = [
            await host.page(),
            await host.get("skill://assistant/pdf/SKILL.md"),
            await host.directory("skill://assistant/pdf"),
        ]
        extensions = client.server_capabilities.extensions
    kept = {"ttlMs": 0, "cacheScope": "private", "resultType": "complete"}
    assert [each | kept for each in found] == found
    assert extensions == {"io.modelcontextprotocol/skills": {"directoryRead": True}}


@pytest.mark.slow
async def test_a_skill_that_is_just_being_written_keeps_no_other_from_being_listed(
    data_root: Path, tmp_path: Path
) -> None:
    write_skill(tmp_path / "a", "quiet")
    busy = write_skill(tmp_path / "a", "busy", {"log": b"x" * 4_000_000}) / "log"
    # A process of its own writes as fast as we read.
    growing = subprocess.Popen([sys.executable, "-c", GROW, busy])
    try:
        async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:
            for _ in range(10):
                listed = await SkillsClient(client).all()
                assert "quiet" in {entry["frontmatter"]["name"] for entry in listed}
    finally:
        growing.kill()
        growing.wait()


async def test_front_matter_is_told_as_hosts_read_it(data_root: Path, tmp_path: Path) -> None:
    more = "version: 1.0\nok: true\nday: 2026-01-01\nnothing:\nlist: [1, 'two', on]\n"
    write_skill(tmp_path / "a", "pdf", more=more)
    async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:
        (entry,) = await SkillsClient(client).all()
    assert entry["frontmatter"] == {
        "name": "pdf",
        "description": "About pdf.",
        "version": 1,
        "ok": True,
        "day": "2026-01-01",
        "nothing": None,
        "list": [1, "two", "on"],
    }


async def test_what_hosts_would_refuse_is_not_listed_and_yet_answered(
    data_root: Path, tmp_path: Path
) -> None:
    write_skill(tmp_path / "a", "good")
    write_skill(tmp_path / "a", "Upper")
    write_skill(tmp_path / "a", "3000")
    colon = "---\nname: colon\ndescription: Use when: asked\n---\n"
    write_skill(tmp_path / "a", "colon", {"SKILL.md": colon})
    write_skill(
        tmp_path / "a", "mark", {"SKILL.md": "\ufeff---\nname: mark\ndescription: x\n---\n"}
    )
    async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:
        host = SkillsClient(client)
        assert [entry["frontmatter"]["name"] for entry in await host.all()] == ["good"]
        listed = {str(each.uri) for each in (await client.list_resources()).resources}
        for name in ("Upper", "3000", "colon", "mark"):
            uri = f"skill://assistant/{name}/SKILL.md"
            entry = (await host.get(uri))["skill"]
            assert entry["frontmatter"]["name"] == name
            assert uri in listed
            assert (await client.read_resource(uri)).contents


async def test_a_list_in_pages_has_every_skill_once_whatever_comes_and_goes(
    data_root: Path, tmp_path: Path
) -> None:
    for number in range(450):
        write_skill(tmp_path / "a", f"skill-{number:03}")
    async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:
        host = SkillsClient(client)
        first = await host.page()
        write_skill(tmp_path / "a", "added-before")
        (tmp_path / "a" / "skill-000" / "SKILL.md").unlink()
        second = await host.page(first["nextCursor"])
        third = await host.page(second["nextCursor"])
        assert "nextCursor" not in third
        with pytest.raises(MCPError, match="begin again") as caught:
            await host.page("no cursor")
    assert caught.value.error.code == INVALID_PARAMS
    entries = [*first["skills"], *second["skills"], *third["skills"]]
    assert [entry["frontmatter"]["name"] for entry in entries] == [
        f"skill-{number:03}" for number in range(450)
    ]


@pytest.mark.slow
async def test_large_manifests_make_shorter_pages_and_stay_whole(
    data_root: Path, tmp_path: Path
) -> None:
    names = [f"skill-{number}" for number in range(8)]
    for name in names:
        write_skill(tmp_path / "a", name, {f"data/{'x' * 100}-{each}": "" for each in range(500)})
    async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:
        host = SkillsClient(client)
        first = await host.page()
        entries = await host.all()
    assert 0 < len(first["skills"]) < len(names)
    assert [entry["frontmatter"]["name"] for entry in entries] == names
    assert {len(uris(entry)) for entry in entries} == {501}


async def test_skills_in_a_skill_are_its_files_and_skills_of_their_own(
    data_root: Path, tmp_path: Path
) -> None:
    outer = write_skill(tmp_path / "a", "outer")
    write_skill(outer / "parts", "inner", {"ref.md": "x"})
    async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:
        whole, inner = await SkillsClient(client).all()
    at = "skill://assistant/outer"
    assert uris(inner) == [f"{at}/parts/inner/SKILL.md", f"{at}/parts/inner/ref.md"]
    assert sorted(uris(whole)) == sorted([*uris(inner), f"{at}/SKILL.md"])


@MODES
async def test_directories_list_their_direct_children(
    data_root: Path, tmp_path: Path, mode: str
) -> None:
    outer = write_skill(tmp_path / "a", "outer", FILES)
    write_skill(outer / "parts", "inner")
    async with offering(data_root, tmp_path / "a") as web, client_of(web, mode) as client:
        host = SkillsClient(client)

        async def names(uri: str) -> dict[str, str]:
            found = (await host.directory(uri))["resources"]
            assert all(child["uri"].startswith(uri) for child in found)
            return {child["name"]: child["mimeType"] for child in found}

        folder = "inode/directory"
        assert await names("skill://") == {"assistant": folder}
        assert await names("skill://assistant") == {"outer": folder}
        assert await names("skill://assistant/outer") == {
            "100%.txt": "text/plain",
            "outer": "text/markdown",
            "assets": folder,
            "parts": folder,
            "references": folder,
            "scripts": folder,
        }
        assert await names("skill://assistant/outer/parts") == {"inner": folder}
        assert await names("skill://assistant/outer/references/deep") == {
            "guide one.md": "text/markdown"
        }
        for uri in ("skill://assistant/outer/SKILL.md", "skill://assistant/none", "skill://assis"):
            with pytest.raises(MCPError) as caught:
                await host.directory(uri)
            assert caught.value.error.code == INVALID_PARAMS


HOSTILE = [
    "skill://assistant/pdf/../../secret",
    "skill://assistant/pdf/%2e%2e/%2e%2e/secret",
    "skill://assistant/pdf/%252e%252e/secret",
    "skill://assistant/pdf/..%2f..%2fsecret",
    "skill://assistant/pdf/references%2fguide.md",
    "skill://assistant/pdf//SKILL.md",
    "skill://assistant/pdf/SKILL.md/",
    "skill://assistant/pdf/SKILL.md?x",
    "skill://assistant/pdf/SKILL.md#x",
    "skill://assistant/pdf/SKILL.md%00",
    "skill://assistant/pdf/link",
    "skill://assistant/pdf/out/secret",
    "skill://assistant/pdf/pipe",
    "skill://assistant/pdf",
    "skill://user/pdf/SKILL.md",
    "skill:///etc/passwd",
    "skill:///",
    "skill://",
    "file:///etc/passwd",
    "skills://diagnostics/..",
    "%",
    "skill://" + "a/" * 5000,
    "skill://assistant/" + "a" * 10_000,
    "skill://assistant/pdf/\ud800".encode("utf-8", "replace").decode(),
]


@MODES
async def test_no_uri_leads_to_anything_but_the_files_of_skills(
    data_root: Path, tmp_path: Path, mode: str
) -> None:
    folder = write_skill(tmp_path / "a", "pdf", {"references/guide.md": "x"})
    (tmp_path / "secret").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "out").symlink_to(tmp_path)
    os.mkfifo(folder / "pipe")
    async with offering(data_root, tmp_path / "a") as web, client_of(web, mode) as client:
        for uri in HOSTILE:
            for ask in (client.read_resource, SkillsClient(client).get):
                with pytest.raises(MCPError) as caught:
                    await ask(uri)
                assert caught.value.error.code == INVALID_PARAMS, uri


async def test_the_same_uri_spelled_otherwise_is_the_same_file(
    data_root: Path, tmp_path: Path
) -> None:
    write_skill(tmp_path / "a", "pdf", FILES)
    async with offering(data_root, tmp_path / "a") as web:
        for path, other in (
            ("100%25.txt", "%31%30%30%25%2Etxt"),
            ("SKILL.md", "%53KILL.md"),
            ("references/deep/guide%20one.md", "ref%65rences/deep/guide one.md"),
        ):
            known = await read(web, f"skill://assistant/pdf/{path}")
            assert await read(web, f"skill://assistant/pdf/{other}") == known


async def test_users_see_their_own_skills_only(data_root: Path, tmp_path: Path) -> None:
    write_skill(data_root / "skills" / "alice", "private")
    uri = "skill://user/private/SKILL.md"
    async with offering(data_root) as web:
        for chat in ("work", None):
            async with client_of(web, user="alice", chat=chat) as client:
                assert [each["uri"] for each in await SkillsClient(client).all()] == [uri]
            async with client_of(web, user="bob", chat=chat) as client:
                assert await SkillsClient(client).all() == []
                for ask in (client.read_resource, SkillsClient(client).get):
                    with pytest.raises(MCPError):
                        await ask(uri)


async def test_what_is_wrong_with_skills_can_be_read(data_root: Path, tmp_path: Path) -> None:
    write_skill(tmp_path / "a", "broken", {"SKILL.md": "no front matter\n"})
    write_skill(tmp_path / "a", "Upper")
    async with offering(data_root, tmp_path / "a") as web:
        kind, data = await read(web, "skills://diagnostics")
    told = {each["code"]: each for each in json.loads(data)["problems"]}
    assert kind == "application/json"
    missing = told["no-front-matter"]
    assert (missing["folder"], missing["root"], missing["offered"]) == (
        "a/broken",
        "assistant",
        False,
    )
    assert told["refused-by-hosts"]["uri"] == told["name-case"]["uri"]
    assert told["name-case"]["uri"] == "skill://assistant/Upper/SKILL.md"
    assert str(tmp_path) not in data.decode()


@given(text())
def test_a_uri_has_one_spelling(uri: str) -> None:
    try:
        once = canonicalize(uri)
    except UnknownSkill:
        return
    assert canonicalize(once) == once
    assert once.count("/") >= uri.partition("://")[2].count("/")


async def test_of_a_root_that_is_absent_the_place_is_not_told(
    data_root: Path, tmp_path: Path
) -> None:
    async with offering(data_root, tmp_path / "secret" / "gone") as web:
        _, data = await read(web, "skills://diagnostics")
    (told,) = json.loads(data)["problems"]
    assert told["reason"] == "The folder secret/gone cannot be opened: No such file or directory."
