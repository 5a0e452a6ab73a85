"""How many examples a property is tried with: some in each run, all with `--whole`."""

import pytest

SOME = 200


def some_or(most: int) -> pytest.MarkDecorator:
    """Give a test `examples`, 200 of them, or the most that are asked for once in a while."""
    whole = pytest.param(most, marks=[pytest.mark.whole, pytest.mark.timeout(600)])
    return pytest.mark.parametrize("examples", [SOME, whole])
