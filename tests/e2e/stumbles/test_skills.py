"""What an agent is told of skills."""

import json

import pytest

from tests.e2e.stumbles.conftest import Agent


@pytest.mark.parametrize("query", ["merge two PDF files", "git rebase", "play a song"])
async def test_a_task_that_no_skill_is_for_finds_none_and_says_what_to_do(
    agent: Agent, query: str
) -> None:
    found = json.loads(await agent.told("skills_list", query=query))
    assert found["skills"] == []
    assert "skills_list without query lists all" in found["omitted"][0]


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("review my branch", "code-review"),
        ("statistiks of a csv file", "python-data-analysis"),
        ("give feedback on a PR", "code-review"),
        ("pip install has no network", "using-this-sandbox"),
    ],
)
async def test_a_task_that_a_skill_is_for_finds_it(agent: Agent, query: str, name: str) -> None:
    found = json.loads(await agent.told("skills_list", query=query))
    assert found["skills"][0]["name"] == name


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ("Code Review", "the nearest is 'code-review'"),
        ("data_analysis", "the nearest is 'python-data-analysis'"),
        ("html", "the nearest is 'web-page-preview'"),
        ("PDF", "there are (code-review, python-data-analysis, skill-authoring"),
    ],
)
async def test_an_unknown_skill_is_answered_with_the_nearest_or_with_those_there_are(
    agent: Agent, asked: str, nearest: str
) -> None:
    assert nearest in await agent.refused("skill_activate", name=asked)


LIMITS = [
    ("mount -t tmpfs x /mnt", "must be superuser"),
    ("date -s 2020-01-01", "Operation not permitted"),
    ("head -c 5M /dev/zero > big; rm -f big", "File size limit exceeded"),
    ('python3 -c \'open("big", "wb").truncate(5 << 20)\'', "File too large"),
    ("curl -sS http://example.com", "Could not resolve host"),
    ("touch /usr/x", "Read-only file system"),
]


@pytest.mark.parametrize("settings", [{"limits": {"file_size": "4m"}}])
async def test_limits_are_as_the_skill_tells_them(agent: Agent) -> None:
    limits = await agent.told(
        "skill_activate", name="using-this-sandbox", path="references/limits.md"
    )
    for command, message in LIMITS:
        assert f"`{message}" in limits
        assert message in await agent.told("exec", command=command)


async def test_ports_that_the_skill_advises_are_allowed(agent: Agent) -> None:
    code = "import socket\nsocket.socket().bind(('127.0.0.1', 8000))\nprint('bound')"
    assert "bound" in await agent.told("run_code", code=code)
