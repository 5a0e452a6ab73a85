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


def test_a_colon_that_is_not_quoted_is_read_and_said_with_its_line() -> None:
    parsed = read("---\nname: pdf\ndescription: Use when: a PDF is there\n---\n")
    assert parsed.front is not None
    assert parsed.front.description == "Use when: a PDF is there"
    assert [(each.code, each.line) for each in parsed.diagnostics] == [("unquoted", 3)]


def test_a_skill_without_a_description_is_not_used() -> None:
    parsed = read("---\nname: pdf\n---\n")
    assert parsed.front is None
    assert codes(parsed) == ["no-description"]
