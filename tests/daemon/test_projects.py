"""The folder of a client in its chat's sandbox, as the operator allows it."""

import json
import os
from pathlib import Path

import pytest

from tests.daemon.running import command, dialled, in_chat, place, running

BACKENDS = [
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder that everybody may write to: the rights of files hold for sandboxes, too."""
    folder = tmp_path / "project"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "main.py").write_text("print('hello')\n")
    (folder / "main.py").chmod(0o666)
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "a.log").write_text("")
    return folder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("access", ["none", "ro", "rw", "copy"])
async def test_the_folder_is_shown_as_the_operator_allows(
    access: str, backend: str, tmp_path: Path, project: Path
) -> None:
    where = place(tmp_path, backend)
    async with running(where, "--project-dir", access):
        async with in_chat(where, "c", project=str(project)) as client:
            listed = await client.exec("ls -A /project 2>&1")
            tried = await client.exec("(echo changed > /project/main.py) 2>&1; true")
            seen = await client.exec("cat /project/main.py 2>&1")
            said = (await client.call("sandbox_info"))["structuredContent"]["project"]
        (row,) = json.loads((await command(where, "ls", "--json")).out)
    assert row["folder"] == ("" if access == "none" else str(project))
    assert said.startswith("none: " if access == "none" else "/project: ")
    assert ("without .git and what" in said) == (access == "copy")
    assert ("`mcp-sandbox cp local/c:/project FOLDER`" in said) == (access == "copy")
    on_host = (project / "main.py").read_text()
    if access == "none":
        assert "No such file" in listed
    elif access == "ro":
        assert listed.split() == [".gitignore", "a.log", "main.py"]
        assert "Read-only file system" in tried
        assert (seen, on_host) == ("print('hello')\n", "print('hello')\n")
    elif access == "rw":
        assert listed.split() == [".gitignore", "a.log", "main.py"]
        assert (seen, on_host) == ("changed\n", "changed\n")
    else:
        assert listed.split() == [".gitignore", "main.py"]
        assert (seen, on_host) == ("changed\n", "print('hello')\n")


@pytest.mark.bubblewrap
async def test_another_folder_is_another_sandbox_with_the_same_files(
    tmp_path: Path, project: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "else.txt").touch()
    where = place(tmp_path, "bubblewrap")
    async with running(where, "--project-dir", "ro"):
        async with in_chat(where, "c", project=str(project)) as client:
            assert "main.py" in await client.exec("echo kept > note; ls /project")
        async with in_chat(where, "c") as client:
            assert "main.py" in await client.exec("ls /project")
        async with in_chat(where, "c", project=str(other)) as client:
            assert await client.exec("ls /project; cat note") == "else.txt\nkept\n"


@pytest.mark.bubblewrap
async def test_who_names_the_folder_as_the_user_does_is_told_where_it_is(
    tmp_path: Path, project: Path
) -> None:
    where = place(tmp_path, "bubblewrap")
    async with running(where, "--project-dir", "ro"):
        async with in_chat(where, "c", project=str(project)) as client:
            named = f"{project}/main.py of the user's machine is /project/main.py here"
            for tool, arguments in (
                ("read_file", {"path": f"{project}/main.py"}),
                ("grep", {"pattern": "x", "path": f"{project}/main.py"}),
                ("exec", {"command": f"cat '{project}/main.py'; exit 1"}),
                ("run_code", {"code": f"open('{project}/main.py')\n"}),
            ):
                assert named in str(await client.call(tool, **arguments)), tool
            said = str(await client.call("exec", command="true", cwd=str(project)))
            assert f"{project} of the user's machine is /project here" in said
            # What is only alike, what is there, and what did not fail.
            for command in (f"ls {project}s", "ls /project/x", f"ls {project}; true"):
                assert "machine is" not in str(await client.call("exec", command=command))
        async with in_chat(where, "alone") as client:
            said = (await client.call("sandbox_info"))["structuredContent"]["project"]
            assert said == "none: the client named no folder"
            for tool, arguments in (
                ("read_file", {"path": "/project/main.py"}),
                ("list_files", {"path": "/project"}),
                ("exec", {"command": "cd /project"}),
            ):
                told = str(await client.call(tool, **arguments))
                assert "there is no /project here: the client named no folder" in told


@pytest.mark.bubblewrap
async def test_what_must_stay_out_is_not_shown_and_the_chat_works(tmp_path: Path) -> None:
    where = place(tmp_path, "bubblewrap")
    (tmp_path / ".config" / "mcp-sandbox").mkdir(parents=True)
    async with running(where, "--project-dir", "rw") as daemon:
        for number, folder in enumerate((tmp_path, where.data, where.socket.parent, Path("/"))):
            async with in_chat(where, f"c{number}", project=str(folder)) as client:
                assert await client.exec("ls -d /project 2>/dev/null || echo none") == "none\n"
        await daemon.noted("works without its folder")


@pytest.mark.bubblewrap
async def test_the_agent_is_told_of_the_folder_and_cannot_name_another(
    tmp_path: Path, project: Path
) -> None:
    where = place(tmp_path, "bubblewrap")
    async with running(where, "--project-dir", "ro"), dialled(where) as client:
        assert (await client.greet(role="chat", chat="c", project=str(project)))["ok"]
        number = await client.request(
            "initialize",
            {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "raw", "version": "1"},
            },
        )
        said = (await client.answer(number))["result"]["instructions"]
        tools = (await client.answer(await client.request("tools/list", {})))["result"]["tools"]
    assert "at /project, if the client named one" in said
    assert "It is read-only" in said
    assert "does not see the user's files" not in said
    named = {name for tool in tools for name in tool["inputSchema"].get("properties", {})}
    assert not {"project", "mount", "image"} & named


STRANGER = 4321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of other users")


@as_root
@pytest.mark.bubblewrap
@pytest.mark.parametrize("on_the_way", [False, True])
async def test_a_folder_that_another_user_replaced_is_shown_when_a_person_accepts_it(
    on_the_way: bool, tmp_path: Path, project: Path
) -> None:
    """The link leads to a folder of the same user, so that nothing but its owner tells."""
    where, shared, secret = place(tmp_path, "bubblewrap"), tmp_path / "shared", tmp_path / "mine"
    (secret / "code").mkdir(parents=True)
    (secret / "code" / "secret.txt").touch()
    (shared / "team").mkdir(parents=True)
    named = shared / "team" / "code"
    project.rename(named)
    swapped, target = (named.parent, secret) if on_the_way else (named, secret / "code")
    async with running(where, "--project-dir", "ro") as daemon:
        async with in_chat(where, "c", project=str(named)) as client:
            assert "main.py" in await client.exec("ls /project")
            swapped.rename(tmp_path / "away")
            swapped.symlink_to(target)
            os.lchown(swapped, STRANGER, STRANGER)
            assert (await command(where, "stop", "c")).code == 0
            said = str(await client.call("exec", command="ls -d /project"))
            assert "cannot access" in said
            assert f"uid {STRANGER}" in said
            assert "`mcp-sandbox project accept local/c`" in said
            refused = await command(where, "project accept", "c")
            assert refused.code == 1
            assert "give --yes" in refused.err
            assert "cannot access" in await client.exec("ls -d /project")
            accepted = await command(where, "project accept", "c", "--yes")
            assert f"sees {secret / 'code'} for {named} from now on" in accepted.out, accepted.err
            assert await client.exec("ls /project") == "secret.txt\n"
            again = await command(where, "project accept", "c", "--yes")
            assert "no folder waits" in again.out
        assert daemon.process.returncode is None


@pytest.mark.bubblewrap
async def test_a_new_clone_by_the_same_user_is_shown_at_once(tmp_path: Path, project: Path) -> None:
    where = place(tmp_path, "bubblewrap")
    async with running(where, "--project-dir", "ro"):
        async with in_chat(where, "c", project=str(project)) as client:
            assert "main.py" in await client.exec("ls /project")
            project.rename(tmp_path / "away")
            project.mkdir()
            (project / "anew").touch()
            assert (await command(where, "stop", "c")).code == 0
            assert await client.exec("ls /project") == "anew\n"
