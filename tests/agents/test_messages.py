"""Messages become what a program is given, and what cannot be given is refused by its name."""

from typing import Any

import pytest

from mcp_sandbox.agents.messages import MOST_BYTES, read_conversation
from mcp_sandbox.errors import InvalidArgument, TooLarge

PICTURE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"},
}


def said(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "content": content}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_the_last_message_is_the_prompt_and_the_earlier_ones_are_told_by_role() -> None:
    talk = read_conversation(
        [
            said("system", "Be brief."),
            said("user", "What is 6 * 7?"),
            said("assistant", [text("42"), text("I am sure.")]),
            said("system", "Be polite."),
            said("user", "Thanks"),
        ]
    )
    assert talk.system == "Be brief.\n\nBe polite."
    assert talk.prompt == [
        text("## Conversation History:"),
        text("[user]: What is 6 * 7?"),
        text("[assistant]: 42\nI am sure."),
        text("Thanks"),
    ]


def test_one_message_has_no_history() -> None:
    talk = read_conversation([said("user", "go")])
    assert (talk.system, talk.prompt) == ("", [text("go")])


def test_images_stay_with_the_turn_that_they_belong_to() -> None:
    talk = read_conversation(
        [
            said("user", [PICTURE, text("this one")]),
            said("assistant", "A cat."),
            said("user", [text("and this"), PICTURE]),
        ]
    )
    assert talk.prompt[1:3] == [text("[user]: this one"), PICTURE]
    assert talk.prompt[-2:] == [text("and this"), PICTURE]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "last message must be one of the user"),
        ([said("system", "x")], "last message must be one of the user"),
        ([said("user", "x"), said("assistant", "y")], "last message must be one of the user"),
        ([said("user", " \n")], "last message must be one of the user"),
        ([said("user", [])], "messages.0.content: .*at least 1"),
        ([said("tool", "x")], "messages.0.role: .*'system', 'user' or 'assistant'"),
        ([said("user", [{"type": "audio"}])], "messages.0.content.0: .*'audio'.*'text', 'image'"),
        (
            [said("user", [{**text("x"), "citations": 1}])],
            "text.citations: Extra inputs are not permitted",
        ),
        ([{**said("user", "x"), "name": "Jo"}], "messages.0.name: Extra inputs are not permitted"),
        ([said("user", "a\0b")], "NUL character: remove it"),
        ([said("user", "\ud800")], "surrogates not allowed"),
        ([said("user", 5)], "messages.0.content"),
        ([said("system", [PICTURE]), said("user", "x")], "system message takes text alone"),
        ([said("user", [{**PICTURE, "source": {"type": "url", "url": "x"}}])], "'base64'"),
        ("hello", "messages"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(messages: Any, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        read_conversation(messages)


def test_what_no_service_would_take_is_refused_at_once() -> None:
    with pytest.raises(TooLarge, match="files of the workspace"):
        read_conversation([said("user", "x" * MOST_BYTES)])
