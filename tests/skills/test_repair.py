"""Front matter is repaired without loss: what it means and every byte of the body stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.skills import front_matter
from mcp_sandbox.skills.parse import STANDARD, parse
from mcp_sandbox.skills.repair import CLIENT_FIELDS, repair
from tests.skills.corpus import CASES, Case, good

LEFT_TO_A_PERSON = {
    "name-mismatch", "name-too-long", "name-reserved", "no-description", "description-too-long",
    "compatibility-too-long", "body-too-long", "not-text", "metadata", "not-yes-or-no", "xml-tag",
    "control-character", "hidden-character", "line-ends", "spelling", "comment", "anchor",
}  # fmt: skip


def head(yaml: str, body: str = "# Body\n") -> bytes:
    return f"---\n{yaml}---\n{body}".encode()


def repaired(yaml: str, *, everything: bool = False) -> str:
    """Return the repaired fields of a skill in the folder `pdf`."""
    done = repair(head(yaml), "pdf", everything=everything)
    assert done.problem is None, done.problem
    text = done.data.decode()
    assert text.startswith("---\n")
    assert text.endswith("---\n# Body\n")
    return text.removeprefix("---\n").removesuffix("---\n# Body\n")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.folder_name[:40])
def test_any_skill_is_repaired_as_far_as_can_be_known(case: Case) -> None:
    done = repair(case.document, case.folder_name)
    if done.problem is not None:
        assert done.data == case.document
        assert not done.changes
        return
    again = repair(done.data, case.folder_name)
    assert (again.data, again.changes) == (done.data, ())
    before, after = (parse(data, case.folder_name) for data in (case.document, done.data))
    assert done.data[after.body_at :] == case.document[before.body_at :]
    left = {each.code for each in after.diagnostics}
    assert left <= LEFT_TO_A_PERSON | ({"unknown-field"} if done.kept else set())
    if after.front is not None:
        assert set(after.front.fields) <= {*STANDARD, *CLIENT_FIELDS}
    if before.front is not None and after.front is not None:
        assert after.front.description == before.front.description
        assert after.front.allowed_tools == before.front.allowed_tools


def test_what_is_in_order_stays_byte_for_byte() -> None:
    data = head("name:   pdf # as it is\n\n# remark\ndescription:  'It''s'\nmetadata:\n    a:  b\n")
    assert repair(data, "pdf").data == data
    windows = good("pdf").replace("\n", "\r\n").encode()
    assert repair(windows, "pdf").data == windows


def test_values_with_colons_are_quoted_where_they_stand() -> None:
    assert repaired("name: pdf\ndescription: Use when: it's a PDF\nlicense: MIT\n") == (
        "name: pdf\ndescription: 'Use when: it''s a PDF'\nlicense: MIT\n"
    )


def test_json_becomes_lines_and_keeps_its_types() -> None:
    yaml = 'name: pdf\ndescription: D.\nmetadata: {"a": {"b": [1, "1", null, true]}, "e": []}\n'
    assert repaired(yaml) == (
        "name: pdf\ndescription: D.\nmetadata:\n  a:\n    b:\n      - 1\n      - '1'\n"
        "      - null\n      - true\n  e: ''\n"
    )


def test_unknown_fields_move_below_metadata_with_their_types_and_remarks() -> None:
    yaml = (
        "name: pdf\n# semver?\nversion: 1.0\ndescription: D.\n# more\nmetadata:\n    version: '2'\n"
        "triggers:\n- a: 1\n  b: 'x'\n- |\n  text\nhomepage: https://example.org\n"
    )
    assert repaired(yaml) == (
        "name: pdf\ndescription: D.\n# more\n# semver?\nmetadata:\n  version: '2'\n"
        "  version-field: 1.0\n  triggers:\n    - a: 1\n      b: x\n    - |\n      text\n"
        "  homepage: https://example.org\n"
    )


def test_fields_named_like_arguments_of_the_library_are_fields_like_others() -> None:
    yaml = "name: pdf\ndescription: D.\ncontent: {a: b}\nhandler: c\nmetadata: {d: e}\n"
    assert repaired(yaml) == (
        "name: pdf\ndescription: D.\nmetadata:\n  d: e\n  content:\n    a: b\n  handler: c\n"
    )


def test_fields_that_clients_act_on_move_only_when_asked() -> None:
    yaml = "name: pdf\ndescription: D.\ndisable-model-invocation: true\n"
    done = repair(head(yaml), "pdf")
    assert (done.changes, done.kept) == ((), ("disable-model-invocation",))
    assert repaired(yaml, everything=True) == (
        "name: pdf\ndescription: D.\nmetadata:\n  disable-model-invocation: true\n"
    )


def test_all_fields_in_braces_become_lines() -> None:
    assert repaired('{"name": "pdf", "description": "Use: it", "x": 1}\n') == (
        "name: pdf\ndescription: 'Use: it'\nmetadata:\n  x: 1\n"
    )


def test_name_is_the_folders_where_that_can_be_a_name() -> None:
    assert repaired("name: PDF Tools\ndescription: D.\n").startswith("name: pdf\n")
    assert repaired("description: D.\n").startswith("name: pdf\n")
    assert b"name: my-skill\n" in repair(head("name: My_Skill\ndescription: D.\n"), "My Skill").data


def test_line_end_that_only_yaml_knows_does_not_hide_the_fence() -> None:
    text = repaired("name: pdf\nx: one\x85description: D.\n")
    assert text == "name: pdf\ndescription: D.\nmetadata:\n  x: one\n"
    assert repaired("description: D.\x85name: PDF\n") == "name: pdf\ndescription: D.\x85\n"


def test_line_ends_of_several_kinds_do_not_melt_into_one() -> None:
    data = b"---\r\nname: pdf\r...\n\ndescription: D.\r\n"
    assert repair(data, "pdf").data.endswith(b"---\n\ndescription: D.\r\n")


def test_lines_end_as_they_did() -> None:
    data = good("pdf", "version: 1\n").replace("\n", "\r\n").encode()
    done = repair(data, "pdf")
    assert done.changes
    assert b"\n" not in done.data.replace(b"\r\n", b"")


YAML_LINES = st.lists(
    st.sampled_from(
        [
            "name: pdf", "name: 'a: b'", "description: D", "description: a: b", "description: >",
            "  folded", "  - item", "- item", "metadata:", "metadata: {a: [1, {b: c}]}", "  k: v",
            "    deep: [x]", "tags: [a, b]", "# remark", "", "version: 1.10", "when: 2026-01-01",
            "allowed-tools: Bash(git: *), Read", "allowed-tools:", "x: \"a\\tb\\u200b\"", "  # r",
            "argument-hint: [a]", "y: on", "k: |2", "   text", "? q", ": v", "z: &a 1", "\u2028",
        ]
    ),
    max_size=14,
)  # fmt: skip


@given(YAML_LINES, st.sampled_from(["\n", "\r\n", "\r"]), st.binary(max_size=20), st.booleans())
def test_repair_never_fails_never_loses_and_is_done_once(
    lines: list[str], eol: str, body: bytes, everything: bool
) -> None:
    data = eol.join(["---", *lines, "---", ""]).encode() + body
    done = repair(data, "pdf", everything=everything)
    assert done.data.endswith(body)
    if done.problem is None:
        again = repair(done.data, "pdf", everything=everything)
        assert (again.data, again.changes, again.problem) == (done.data, (), None)
        values = front_matter.read(front_matter.text(front_matter.split(done.data))).values
        assert set(values) <= {*STANDARD, *(() if everything else CLIENT_FIELDS)}
