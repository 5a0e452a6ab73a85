"""What a skill declares is read, whatever its author has written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.skills.declared import DECLARING, find_missing, read_declared
from mcp_sandbox.skills.skill import FrontMatter, Json

NOTHING = FrontMatter("pdf", "Does.", {})


def names(**files: str) -> list[str]:
    """Return the names that files declare; `requirements` is requirements.txt."""
    paths = {"requirements": "requirements.txt", "package": "package.json"}
    given = {paths[name]: text.encode() for name, text in files.items()}
    return [each.name for each in read_declared(NOTHING, given)]


def test_lines_of_requirements_are_distributions_and_others_are_left_out() -> None:
    text = (
        "PyYAML\nrequests[socks] >= 2.0, <3  # why\n  lxml==5 \\\n    --hash=sha256:0\n"
        "tomli; python_version < '3.11'\n-r other.txt\n-e .\n./local\n"
        "git+https://example.org/x.git\nhttps://example.org/y.whl\nacme @ https://e.org/z\n# no\n"
    )
    assert names(requirements=text) == ["PyYAML", "requests", "lxml", "acme"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"dependencies": {"docx": "1", "@a/b": "2"}, "devDependencies": {}}', ["docx", "@a/b"]),
        ('{"dependencies": {"a\\n[Trust me]": "1", "$(x)": "2", "../up": "3"}}', []),
        ('{"dependencies": ["a"]}', []),
        ("[]", []),
        ("{", []),
        ("[" * 50_000, []),
    ],
)
def test_dependencies_of_a_package_are_packages_of_node(text: str, found: list[str]) -> None:
    assert names(package=text) == found


def test_commands_are_what_metadata_requires_and_what_stands_between_backticks() -> None:
    metadata: dict[str, Json] = {
        "clawdbot": {"requires": {"bins": ["jq", "a b"], "env": ["KEY"]}, "bins": ["no"]},
        "requires": {"bins": "git, curl"},
    }
    said = "Needs `jq`, `pdftotext`, a `GITHUB_TOKEN` and `rm -rf x`."
    front = FrontMatter("pdf", "Does.", {}, compatibility=said, metadata=metadata)
    found = [(each.name, each.where) for each in read_declared(front, {})]
    assert found == [
        ("jq", "metadata"),
        ("git", "metadata"),
        ("curl", "metadata"),
        ("pdftotext", "compatibility"),
    ]


@given(st.dictionaries(st.sampled_from(DECLARING), st.binary(max_size=200)), st.text(max_size=80))
def test_whatever_is_written_gives_names_on_one_line(files: dict[str, bytes], said: str) -> None:
    front = FrontMatter("pdf", "Does.", {}, compatibility=said)
    for each in read_declared(front, files):
        assert each.name.isprintable()
        assert " " not in each.name


def test_an_answer_that_does_not_fit_the_question_is_none() -> None:
    needs = read_declared(NOTHING, {"requirements.txt": b"a\nb\n"})
    assert [each.name for each in find_missing(needs, "[true, false]")] == ["b"]
    for answer in ("[true]", "[true, 0]", "{}", "", "[true, false, true]"):
        with pytest.raises(ValueError):  # noqa: PT011 - of pydantic, or of zip
            find_missing(needs, answer)
