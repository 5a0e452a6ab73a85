"""The uris of skills and files, for names of any kind."""

import os
from urllib.parse import unquote_to_bytes, urlsplit

from hypothesis import given
from hypothesis import strategies as st

from mcp_sandbox.skills.skill import file_uri, skill_uri

NAMES = (
    st.binary(min_size=1, max_size=12)
    .map(os.fsdecode)
    .filter(lambda name: name not in {".", ".."} and not {"/", "\0"} & set(name))
)


@given(folders=st.lists(NAMES, max_size=4), name=NAMES, file=st.lists(NAMES, min_size=1))
def test_a_uri_says_exactly_which_names_lead_to_the_file(
    folders: list[str], name: str, file: list[str]
) -> None:
    skill = skill_uri("user", folders, name)
    found = file_uri(skill, "/".join(file))
    assert found.isascii()
    split = urlsplit(found)
    assert (split.scheme, split.netloc, split.query, split.fragment) == ("skill", "user", "", "")
    parts = [os.fsdecode(unquote_to_bytes(part)) for part in split.path.split("/")[1:]]
    assert parts == [*folders, name, *file]


@given(folders=st.lists(st.text(min_size=1), max_size=3), name=st.text(min_size=1))
def test_no_part_of_a_uri_has_a_slash_of_its_own(folders: list[str], name: str) -> None:
    uri = skill_uri("user", folders, name)
    assert uri.count("/") == len(("skill:", "", "user", *folders, name, "SKILL.md")) - 1
