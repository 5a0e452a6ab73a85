"""Long work goes on between calls, and what the texts say about limits is so."""

import re

import anyio

from mcp_sandbox.config import Config
from mcp_sandbox.sessions.session import Session
from tests.shipped.conftest import learn, run
from tests.shipped.texts import SHIPPED, commands
from tests.test_readme import messages

NAME = "using-this-sandbox"
JOB = f"python3 /opt/skills/{NAME}/scripts/job.py"


async def test_every_command_works_as_written(session: Session) -> None:
    await learn(session, NAME)
    start, wait, list_and_stop, large = commands(NAME)
    assert "numbers started" in (await run(session, start)).stdout
    assert (await run(session, wait)).stdout == "1\n2\n3\n[numbers: done]\n"
    assert (await run(session, list_and_stop)).stdout.startswith("numbers: done: bash -c ")
    assert (await run(session, large)).stdout.endswith("99999\n")
    (usage,) = commands(NAME, "references/limits.md")
    assert "/workspace" in (await run(session, usage)).stdout


async def test_a_job_tells_how_it_goes_and_how_it_ended(session: Session) -> None:
    await learn(session, NAME)
    await run(session, f"{JOB} start long -- bash -c 'echo begun; sleep 300'")
    going = await run(session, f"{JOB} wait long --for 0.5", code=3)
    assert going.stdout == "begun\n[long: running]\n"
    again = await run(session, f"{JOB} start long -- true", code=2)
    assert "still runs" in again.stderr
    assert (
        await run(session, f"{JOB} stop long")
    ).stdout == "begun\n[long: failed (exit code 143)]\n"
    await run(session, f"{JOB} start bad -- bash -c 'echo no >&2; exit 7'")
    assert "[bad: failed (exit code 7)]" in (await run(session, f"{JOB} wait bad", code=1)).stdout
    assert "no program nosuch" in (await run(session, f"{JOB} start x -- nosuch", code=2)).stderr
    assert "no job y" in (await run(session, f"{JOB} wait y", code=2)).stderr
    assert "is no name" in (await run(session, f"{JOB} start ../x -- true", code=2)).stderr


async def test_a_job_is_lost_with_its_sandbox_and_its_output_is_kept(session: Session) -> None:
    await learn(session, NAME)
    await run(session, f"{JOB} start lost -- bash -c 'echo half; sleep 300'")
    with anyio.fail_after(20):
        while "half" not in (await session.exec("cat .jobs/lost/log")).stdout:
            await anyio.sleep(0.05)
    await session.reset()
    found = await run(session, f"{JOB} wait lost", code=1)
    assert found.stdout == "half\n[lost: lost]\n"


async def test_the_user_finds_the_files_where_the_text_says(
    session: Session, config: Config
) -> None:
    text = (SHIPPED / NAME / "SKILL.md").read_text(encoding="utf-8")
    place = re.search(r"~/.local/share/mcp-sandbox/(\S+/USER/chat-CHAT)`", text)
    assert place
    await session.write_file("outputs/result.txt", b"found")
    named = (await session.info()).chat
    folder = config.data_dir / place[1].replace("USER", named.user).replace("CHAT", named.chat)
    assert (folder / "outputs/result.txt").read_bytes() == b"found"


def test_the_messages_that_are_explained_are_ours() -> None:
    text = (SHIPPED / NAME / "references/limits.md").read_text(encoding="utf-8")
    first = " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    for shown in (
        "timed out after … s and was killed with all its processes",
        "killed: out of memory",
        "the workspace is full",
        "bytes left out here",
        "the sandbox had ended",
    ):
        assert shown in first
        known = messages().lower()
        assert all(part.strip() in known for part in shown.split("…")), shown
