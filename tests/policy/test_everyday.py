"""Ordinary commands of agents run without a question."""

import pytest

from mcp_sandbox.models import Network
from mcp_sandbox.policy import Decision, assess, decide
from tests.policy.corpus import FOLDER

COMMANDS = [line.replace("⏎", "\n") for line in (FOLDER / "everyday.txt").read_text().splitlines()]


def decided(network: Network) -> list[Decision]:
    graded = [assess(each, "bash", {"cwd": "/workspace"}) for each in COMMANDS]
    return [decide(each, "isolated", network, "bash") for each in graded]


@pytest.mark.parametrize(("network", "most"), [("none", 0), ("allowlist", 0), ("open", 3)])
def test_everyday_commands_are_hardly_ever_asked_about(network: Network, most: int) -> None:
    assert len(COMMANDS) >= 300
    verdicts = [each.verdict for each in decided(network)]
    assert verdicts.count("deny") == 0
    assert verdicts.count("ask") <= most
