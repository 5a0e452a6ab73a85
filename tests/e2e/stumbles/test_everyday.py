"""An everyday session, of which no answer misleads or is empty."""

import pytest
from mcp.types import CallToolResult, ImageContent, TextContent

from tests.e2e.attacks import BUBBLEWRAP, DOCKER, WHOLE
from tests.e2e.stumbles.conftest import Agent
from tests.e2e.stumbles.everyday import SETTINGS, misleading, replay
from tests.e2e.stumbles.judging import Step, outcome


@pytest.mark.timeout(120)
@pytest.mark.parametrize("settings", [SETTINGS])
@pytest.mark.parametrize(
    "backend_name",
    [DOCKER, pytest.param("bubblewrap", marks=(*BUBBLEWRAP.marks, WHOLE))],
    indirect=True,
)
async def test_no_answer_of_an_everyday_session_misleads_or_is_empty(
    agent: Agent, backend_name: str
) -> None:
    answered = await replay(agent, backend_name)
    assert len(answered) >= 60
    assert not misleading(answered), "\n".join(misleading(answered))


@pytest.mark.parametrize(
    ("text", "refused", "fault"),
    [
        ("", False, "empty"),
        ("\x1b[1mx", False, "terminal codes"),
        ("x\n[the file is empty]", False, "a file that is not empty is called so"),
        ("x\n[binary: exec with xxd shows it]", False, "a hint names xxd, which is not there"),
        ("No such file", True, "an error without a way out"),
        ("x", False, "lacks /well/"),
        ("well, well: xxd", False, None),
    ],
)
def test_a_misleading_answer_is_recognised(text: str, refused: bool, fault: str | None) -> None:
    answer = CallToolResult(content=[TextContent(text=text, type="text")], is_error=refused)
    found = outcome(Step("exec", {}, ["well"]), {}, answer, 0.1, ["od"]).faults
    assert fault in found if fault else not found


def test_a_picture_that_was_not_to_be_sent_is_recognised() -> None:
    image = ImageContent(data="", mime_type="image/png", type="image")
    answer = CallToolResult(content=[TextContent(text="a.png", type="text"), image])
    assert outcome(Step("read_file", {}), {}, answer, 0.1, []).faults == ["an image was sent"]
