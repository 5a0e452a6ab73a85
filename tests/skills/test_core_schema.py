"""Front matter as hosts read it: the values are those that their YAML reader printed."""

import json

import pytest

from mcp_sandbox.skills.front_matter import as_json, split
from mcp_sandbox.skills.front_matter import read as read_document
from mcp_sandbox.skills.skill import Json


def read(yaml: str) -> dict[str, Json]:
    return read_document(split(f"---\n{yaml}---\n".encode())).values


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("True", True),
        ("FALSE", False),
        ("tRue", "tRue"),
        ("~", None),
        ("", None),
        ("NULL", None),
        ("1.0", 1),
        ("+5", 5),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("0b11", "0b11"),
        ("1_000", "1_000"),
        ("1e3", 1000),
        (".5", 0.5),
        ("1.", 1),
        ("-0", 0),
        ("12:30:45", "12:30:45"),
        ("2026-01-01", "2026-01-01"),
        ("2026-01-01T10:00:00Z", "2026-01-01T10:00:00Z"),
        ("=", "="),
        ("'1'", "1"),
        ('"true"', "true"),
        ("|-\n  1", "1"),
        ("[1, '1', {a: ~}]", [1, "1", {"a": None}]),
        (".nan", ".nan"),
        ("-.inf", "-.inf"),
        ("1e999", "1e999"),
        ("1" * 400, "1" * 400),
    ],
)
def test_a_plain_scalar_means_what_the_core_schema_says(written: str, meant: object) -> None:
    assert as_json(read(f"field: {written}\n")) == {"field": meant}


def test_keys_become_text_as_hosts_make_them() -> None:
    fields = read("1: a\ntrue: b\n~: c\n1.50: d\n'2.50': e\n<<: {x: 1}\n")
    meant = {"1": "a", "true": "b", "": "c", "1.5": "d", "2.50": "e", "<<": {"x": 1}}
    assert as_json(fields) == meant


def test_whatever_it_says_is_json_without_extensions() -> None:
    fields = read("a: .inf\nb: [.nan, 1e400, 0x0, 1e-400]\nc: {d: 9e307}\n")
    assert json.dumps(as_json(fields), allow_nan=False)
