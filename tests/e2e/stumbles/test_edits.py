import base64

from tests.e2e.stumbles.conftest import Agent


async def write(agent: Agent, data: bytes) -> None:
    content = base64.b64encode(data).decode()
    await agent.told("write_file", path="f", content=content, encoding="base64")


async def edited(agent: Agent, data: bytes, old: str, new: str, *, every: bool = False) -> bytes:
    """What becomes of a file of `data`."""
    await write(agent, data)
    await agent.told("edit_file", path="f", old=old, new=new, replace_all=every)
    return base64.b64decode(await agent.told("exec", command="base64 -w0 f"))


async def refusal(agent: Agent, data: str, old: str) -> str:
    await write(agent, data.encode())
    said = await agent.refused("edit_file", path="f", old=old, new="new")
    assert base64.b64encode(data.encode()).decode() in await agent.told(
        "exec", command="base64 -w0 f"
    )
    return said


async def test_the_newline_that_the_last_line_lacks_is_bridged(agent: Agent) -> None:
    assert await edited(agent, b"a\nb", "b\n", "b\nc\n") == b"a\nb\nc"
    assert await edited(agent, b"a\r\nb", "a\nb\n", "a\nc\n") == b"a\r\nc"


async def test_mixed_line_ends_are_bridged_and_lines_that_stay_keep_theirs(agent: Agent) -> None:
    mixed = b"a\r\nb\nc\r\nd\n"
    assert await edited(agent, mixed, "a\nb\nc\n", "a\nnew\nb\nc\n") == b"a\r\nnew\nb\nc\r\nd\n"
    assert await edited(agent, mixed, "b\nc\nd", "b\nd") == b"a\r\nb\nd\n"
    both = b"x\r\ny\nx\ny\r\n"
    await write(agent, both)
    assert "beginning in lines 1, 3" in await agent.refused(
        "edit_file", path="f", old="x\ny\n", new="z\n"
    )
    assert await edited(agent, both, "x\ny", "x\nz", every=True) == b"x\r\nz\nx\nz\r\n"


async def test_characters_that_look_alike_are_named_with_their_line(agent: Agent) -> None:
    for inside, given, said in (
        ("x\nfoo\u00a0bar\n", "foo bar", "line 2 has U+00A0 NO-BREAK SPACE where old has U+0020"),
        ("x\ncafe\u0301 = 1\n", "caf\u00e9 = 1", "line 2 has U+0065 LATIN SMALL LETTER E U+0301"),
        ("caf\u00e9 = 1\n", "cafe\u0301 = 1", "where old has U+0065 LATIN SMALL LETTER E U+0301"),
        (
            "x = \u201chi\u201d\n",
            'x = "hi"',
            "U+201C LEFT DOUBLE QUOTATION MARK where old has U+00",
        ),
        ("a\u200bb = 1\n", "ab = 1", "line 1 has U+200B ZERO WIDTH SPACE"),
        ("a = 1  \nb = 2\n", "a = 1\nb = 2", "line 1 has U+0020 SPACE where old has its end"),
        ("def f():\n\treturn 1\n", "def f():\n    return 1", "line 2 has U+0009 where old has U+"),
    ):
        assert said in await refusal(agent, inside, given)


async def test_the_nearest_lines_are_those_most_alike_as_a_whole(agent: Agent) -> None:
    # One line is there as it was given, but in another function.
    text = (
        "def first(items):\n    total = compute_the_sum(items)\n    return total\n\n"
        "def second(values):\n    total = compute_the_sum(values)\n    return round(total, 2)\n"
    )
    old = "def second(values):\n    total = compute_the_sum(items)\n    return round(total)\n"
    said = await refusal(agent, text, old)
    assert "The nearest are lines 5 to 7;" in said
    assert "Almost" not in said


async def test_a_second_place_that_is_as_near_is_shown_too(agent: Agent) -> None:
    text = "".join(f"def {name}(a):\n    b = a + 1\n    return b\n\n" for name in ("one", "two"))
    said = await refusal(agent, text, "def twx(a):\n    b = a + 2\n    return b\n")
    assert "The nearest are lines 5 to 7;" in said
    assert "Almost as near are lines 1 to 3;" in said


async def test_line_numbers_in_old_are_recognised(agent: Agent) -> None:
    shown = "     2\tsecond = 2\n     3\tthird = 3\n"
    said = await refusal(agent, "first = 1\nsecond = 2\nthird = 3\n", shown)
    assert "without the line numbers that read_file shows: leave them out" in said


async def test_escapes_in_old_are_recognised(agent: Agent) -> None:
    said = await refusal(agent, 'a = "1"\nb = 2\n', 'a = \\"1\\"\\nb')
    assert "without a \\ before n, t or" in said
