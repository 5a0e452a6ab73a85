"""Headers as pid 1 reads them: by the C scanner alone, on every Python that can run a runner."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEED = 20_261_128
# One text a line, in hex. It says what was found, or how it was refused.
READ = """
import sys
sys.path.insert(0, sys.argv[1])
from mcp_sandbox.runner.wire.protocol import Decoder, PREFIX, ProtocolError
assert "json" not in sys.modules
for line in sys.stdin:
    head = bytes.fromhex(line)
    try:
        ((header, _),) = Decoder().feed(PREFIX.pack(len(head), 0) + head)
        print("read", type(header).__name__)
    except ProtocolError:
        print("refused")
"""
BROKEN = [
    *(b"{", b"[", b'"', b'{"', b'{"t', b'{"t"', b'{"t":', b'{"t":"', b'{"t":"a"', b'{"t":"a",'),
    *(b"{,}", b"{1:2}", b'{"t":"\\', b'{"t":"\\u', b'{"t":"\\u12', b'{"t":"\\ud800', b"[1,", b"[,"),
    *(b'{"t":"\n"}', b'{"t":nul', b"-", b"", b" {}", b'{"t":"a"} ', b'{"t":"a"}{', b"\xff", b"{}"),
    *(b"NaN", b'{"t":Infinity}', b"[" * 60_000, b'{"t":' * 20_000, b'{"t":"a","n":' + b"9" * 9000),
]
WHOLE = b'{"t":"call","id":1,"op":"run","args":{"argv":["a","\\u00e9\\n"],"n":-1.5e3,"x":[null]}}'


def pythons() -> list[str]:
    """Those of this machine, each once."""
    named = [f"python3.{minor}" for minor in range(9, 20)]
    managed = sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python3"))
    known = [*filter(None, map(shutil.which, named)), *map(str, managed), sys.executable]
    found = {}
    for each in known:
        ask = [each, "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])"]
        said = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()
        if said and (int(said[0]), int(said[1])) >= (3, 9):
            found[".".join(said)] = each
    return [*found.values()]


def mutated() -> list[bytes]:
    """Whole headers with some bytes changed, left out or doubled."""
    dice, found = random.Random(SEED), []
    marks = b'{}[]",:\\0-eEtfnu \x00\x7f\xff'
    for _ in range(3000):
        text = bytearray(WHOLE)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(text))
            new = bytes(dice.choices(marks, k=dice.randint(0, 2)))
            text[at : at + dice.randint(0, 3)] = new
        found.append(bytes(text[: dice.randint(1, len(text))] if dice.random() < 0.3 else text))
    return found


@pytest.mark.parametrize("python", pythons())
def test_a_header_is_read_or_refused_whatever_it_holds(python: str) -> None:
    texts = [*BROKEN, *mutated(), WHOLE]
    done = subprocess.run(
        [python, "-I", "-S", "-c", READ, str(ROOT)],
        input="\n".join(text.hex() for text in texts),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()
    assert len(said) == len(texts)
    assert said[: len(BROKEN)] == ["refused"] * len(BROKEN)
    assert said[-1] == "read dict"
