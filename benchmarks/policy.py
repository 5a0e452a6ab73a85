"""Grading commands and code by their text, in this process."""

import itertools
import time

from benchmarks.measure import Goal, Measured, Row
from mcp_sandbox.policy import assess

_CALLS = 1000
_NUMBERS = itertools.count()
# What agents send, from short to long.
_SENT = (
    ("ls -la src", "bash"),
    ("git status && git diff --stat", "bash"),
    ("cd app && npm test 2>&1 | tail -n 50", "bash"),
    ("find . -name '*.pyc' -exec rm {} + ; echo done > log", "bash"),
    ("import json\nprint(json.dumps({'a': 1}))", "python"),
    ("import os\nfor f in os.listdir('.'):\n    print(f, open(f).read()[:80])", "python"),
    ("const fs = require('fs'); console.log(fs.readdirSync('.'))", "javascript"),
)


async def _grade(values: int) -> Measured:
    taken = []
    for _ in range(values):
        began = time.perf_counter()
        for number in range(_CALLS):
            code, language = _SENT[number % len(_SENT)]
            # A grade is remembered: each piece is another one.
            assess(f"{code} {next(_NUMBERS)}", language)
        taken.append(time.perf_counter() - began)
    return Measured(tuple(seconds / _CALLS * 1000 for seconds in taken), tuple(taken))


ROWS = (
    Row(
        "policy",
        f"grade {_CALLS} commands and pieces of code",
        "-",
        Goal(0.2, "ms"),
        _grade,
        pairs=10,
        calls=_CALLS,
    ),
)
