"""JSON text is changed at one place and stays as it was everywhere else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.clients import document
from mcp_sandbox.errors import ConfigError

Tree = dict[str, Any]
Indent = int | str | None
NAMES = ("mcpServers", "sandbox")
ENTRY = {"command": "/x/mcp-sandbox", "args": ["connect"]}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)
INDENTS = st.sampled_from([None, 0, 1, 2, 4, "\t"])


@given(whole=OBJECTS, servers=st.none() | OBJECTS, indent=INDENTS, entry=VALUES)
def test_a_value_is_added_and_nothing_else_changes(
    whole: Tree, servers: Tree | None, indent: Indent, entry: object
) -> None:
    if servers is not None:
        whole = {**whole, "mcpServers": servers}
    text = json.dumps(whole, indent=indent)
    expected = {**whole, "mcpServers": {**(whole.get("mcpServers") or {}), "sandbox": entry}}
    if not isinstance(whole.get("mcpServers", {}), dict):
        return
    changed = document.put(text, NAMES, entry)
    assert json.loads(changed) == expected
    assert list(json.loads(changed)) == list(expected)
    assert document.get(changed, NAMES) == entry


@given(whole=OBJECTS, servers=OBJECTS, indent=INDENTS)
def test_what_was_added_is_dropped_without_a_trace(
    whole: Tree, servers: Tree, indent: Indent
) -> None:
    servers.pop("sandbox", None)
    text = json.dumps({**whole, "mcpServers": servers}, indent=indent)
    dropped = document.drop(document.put(text, NAMES, ENTRY), NAMES)
    assert dropped == text if servers else json.loads(dropped) == json.loads(text)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            '{"mcpServers": {"a": {}}}',
            '{"mcpServers": {"a": {}, "sandbox": {"url": "u"}}}',
            id="one line",
        ),
        pytest.param(
            '{\r\n\t"mcpServers": {\r\n\t\t"a": {}\r\n\t}\r\n}\r\n',
            '{\r\n\t"mcpServers": {\r\n\t\t"a": {},\r\n\t\t"sandbox": {\r\n\t\t\t"url": "u"\r\n'
            "\t\t}\r\n\t}\r\n}\r\n",
            id="tabs and carriage returns",
        ),
        pytest.param(
            '{\n    "mcpServers": {}, "z": [1,2 ]\n}',
            '{\n    "mcpServers": {\n        "sandbox": {\n            "url": "u"\n        }\n    }'
            ', "z": [1,2 ]\n}',
            id="an empty object among odd spacing",
        ),
        pytest.param(
            '{\n  "a": 1.50\n}\n',
            '{\n  "a": 1.50,\n  "mcpServers": {\n    "sandbox": {\n      "url": "u"\n    }\n'
            "  }\n}\n",
            id="no servers yet",
        ),
        pytest.param(
            "{}\n",
            '{\n  "mcpServers": {\n    "sandbox": {\n      "url": "u"\n    }\n  }\n}\n',
            id="an empty file's object",
        ),
    ],
)
def test_the_style_of_the_file_is_kept(before: str, after: str) -> None:
    assert document.put(before, NAMES, {"url": "u"}) == after


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  // mine\n  "a": 1\n}', "line 2 is not plain JSON"),
        ('{"a": 1,}', "line 1 is not plain JSON"),
        ("[]", "holds no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits"),
    ],
)
def test_what_is_not_plain_json_is_refused_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        document.check(text)


def test_servers_that_are_not_an_object_are_refused() -> None:
    with pytest.raises(ConfigError, match="something else"):
        document.put('{"mcpServers": []}', NAMES, ENTRY)
