"""What a `SKILL.md` is read as, and what is said to be wrong with it."""

from mcp_sandbox.skills.parse import ParsedSkill, parse


def read(text: str | bytes, folder: str = "pdf") -> ParsedSkill:
    return parse(text if isinstance(text, bytes) else text.encode(), folder)


def codes(parsed: ParsedSkill) -> list[str]:
    return [each.code for each in parsed.diagnostics]


def test_an_ordinary_skill_is_read_without_a_word() -> None:
    data = b"---\nname: pdf\ndescription: Reads PDFs.\n---\n# PDF\n"
    parsed = read(data)
    assert parsed.front is not None
    assert (parsed.front.name, parsed.front.description) == ("pdf", "Reads PDFs.")
    assert parsed.diagnostics == ()
    assert data[parsed.body_at :] == b"# PDF\n"


def test_values_are_the_text_that_the_file_has() -> None:
    parsed = read("---\nname: on\ndescription: 3000\nmetadata:\n  a: ~\n  2: 1e3\n---\n", "on")
    assert parsed.front is not None
    assert parsed.front.fields == {
        "name": "on",
        "description": "3000",
        "metadata": {"a": "~", "2": "1e3"},
    }


def test_what_is_no_yaml_is_read_line_by_line_and_said_with_its_line() -> None:
    parsed = read(
        "---\nname: 'pdf'\ndescription: Use when: a PDF\n  is there\nmetadata:\n  a: b\n"
        "disable-model-invocation: true # for users\nlicense: >-\n  MIT\n---\n"
    )
    assert parsed.front is not None
    assert (parsed.front.name, parsed.front.description) == ("pdf", "Use when: a PDF is there")
    assert (parsed.front.license, parsed.front.metadata) == ("MIT", {})
    assert not parsed.front.model_invocable
    (found, unknown) = parsed.diagnostics
    assert (found.code, found.level, found.line) == ("yaml", "warning", 3)
    assert "mapping values are not allowed" in found.reason
    assert "Quote values that have a colon" in found.fix
    assert unknown.code == "unknown-field"


def test_a_skill_without_a_description_is_not_used() -> None:
    parsed = read("---\nname: pdf\n---\n")
    assert parsed.front is None
    assert codes(parsed) == ["no-description"]
