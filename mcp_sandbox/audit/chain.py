"""The chain of an audit: writes a line, and finds lines that were changed.

A line is a JSON object that begins with `n`, `time` and `kind` and ends with `prev`, the hash of
the line before, and `hash`: SHA-256, in hex, of the line's bytes without `,"hash":"…"`, from `{` to
`}`. Pure.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256

Fields = Mapping[str, object]

_LONGEST = 4096  # characters of one text in a line
_HASH = b"[0-9a-f]{64}"
_LINE = re.compile(
    rb'\{"n":(\d{1,18}),"time":"([^"]{1,40})","kind":"([^"]{1,40})".*,"prev":"(%b)"'
    rb',"hash":"(%b)"\}\n' % (_HASH, _HASH)
)
_TAIL = len(',"hash":""}\n') + 64
_encoded = json.JSONEncoder(separators=(",", ":"), default=str).encode


@dataclass(frozen=True)
class ChainHead:
    """The number and hash of a line, by which all lines up to it are known."""

    n: int
    hash: str

    def __str__(self) -> str:
        return f"{self.n}:{self.hash}"

    @classmethod
    def of(cls, text: str) -> "ChainHead":
        """Parse what `str` returns; raises ValueError."""
        if not (found := re.fullmatch(r"(\d{1,18}):([0-9a-f]{64})", text.strip(), re.ASCII)):
            raise ValueError("write a head as N:HASH, as `audit head` prints it")
        return cls(int(found[1]), found[2])


START = ChainHead(0, "0" * 64)
"""The head before the first line."""


def make_line(head: ChainHead, kind: str, fields: Fields) -> tuple[bytes, ChainHead]:
    """Return the line that follows the head, with the present time, and the new head.

    Fields that are None are left out; long texts are cut.
    """
    n, now = head.n + 1, datetime.now(UTC).isoformat(timespec="milliseconds")
    present = {
        key: value[:_LONGEST] if isinstance(value, str) else value
        for key, value in fields.items()
        if value is not None
    }
    line = {"n": n, "time": now, "kind": kind, **present, "prev": head.hash}
    body = _encoded(line).encode()
    digest = sha256(body).hexdigest()
    return b'%b,"hash":"%b"}\n' % (body[:-1], digest.encode()), ChainHead(n, digest)


def read_sealed_head(line: bytes) -> ChainHead | None:
    """Return the head that a line states, if the line is as it was written."""
    found = _LINE.fullmatch(line)
    if found and _digest(line) == str(found[5], "ascii"):
        return ChainHead(int(found[1]), str(found[5], "ascii"))
    return None


def find_last_sealed(data: bytes) -> tuple[ChainHead | None, int]:
    """Return the head of the last line that is as it was written, and where that line ends."""
    end = len(data)
    while (end := data.rfind(b"\n", 0, end) + 1) > 0:
        start = data.rfind(b"\n", 0, end - 1) + 1
        if head := read_sealed_head(data[start:end]):
            return head, end
        end = start
    return None, 0


def _digest(line: bytes) -> str:
    return sha256(line[:-_TAIL] + b"}").hexdigest()


@dataclass
class ChainVerifier:
    """The result of checking all lines; `problems` say what was changed, `notes` are harmless.

    `wanted` is a head that was kept elsewhere: the chain must hold it.
    """

    wanted: ChainHead | None = None
    first: int = 0
    head: ChainHead = START
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    _before: set[str] = field(default_factory=set[str])  # Hashes that the next line may follow.
    _time: bytes = b""
    _unread: bool = False
    _front: ChainHead = START
    _removed: set[str] = field(default_factory=lambda: {str(START)})

    def see(self, name: str, lines: Iterable[bytes]) -> None:
        for at, line in enumerate(lines, 1):
            if found := _LINE.fullmatch(line):
                self._look(line, *found.groups())
            elif line.endswith(b"\n"):
                self._unread = True
                self.problems.append(f"line {self.head.n + 1} ({name}:{at}) is not one of an audit")
            else:
                self.problems.append(
                    f"line {self.head.n + 1} ({name}:{at}) is torn, as by a power cut, or was "
                    "changed; the next server sets it aside, and says so in the audit"
                )

    def _look(self, line: bytes, *found: bytes) -> None:
        number, time, kind, prev, stated = found
        n, before, computed = int(number), self.head, _digest(line)
        if not self.first:
            self.first = n
            self.head = before = self._front = ChainHead(n - 1, str(prev, "ascii"))
            self._before = {before.hash}
        if computed.encode() != stated:
            # What a changed line states counts for nothing.
            n, time, kind = before.n + 1, self._time, b""
            self.problems.append(f"line {n} was changed")
        elif n <= before.n:
            what = "is there again" if n == before.n else "stands too late"
            self.problems.append(f"line {n} {what}, after line {before.n}")
            return
        elif n > before.n + 1 and not self._unread:
            gone = (
                f"line {n - 1} is" if n == before.n + 2 else f"lines {before.n + 1} to {n - 1} are"
            )
            self.problems.append(f"{gone} missing")
        elif str(prev, "ascii") not in self._before and not self._unread:
            self.problems.append(f"line {n} does not follow line {n - 1} as that is now")
        elif time < self._time:
            self.notes.append(f"line {n} is dated before line {n - 1}: the clock was set back")
        if self.wanted and n == self.wanted.n and self.wanted.hash != computed:
            self.problems.append(f"line {n} is another than the head that you keep says")
        if kind == b"removed":
            # The hash may be right of what is no JSON: who writes here can compute it.
            with suppress(ValueError, RecursionError):
                fields = json.loads(line)
                self._removed.add(f"{fields.get('until')}:{fields.get('head')}")
        self.head, self._before = ChainHead(n, computed), {computed, str(stated, "ascii")}
        self._time, self._unread = time, False

    def end(self) -> None:
        if str(self._front) not in self._removed:
            self.problems.append(
                f"what line {self._front.n + 1} follows is missing, and no line says that "
                "`audit.keep` removed it"
            )
        elif self._front.n:
            self.notes.append(f"lines 1 to {self._front.n} were removed, as audit.keep says")
        if self.wanted and self.wanted.n > self.head.n:
            gone = f"lines {self.head.n + 1} to {self.wanted.n} are"
            self.problems.append(f"{gone} missing from the end, by the head that you keep")
        elif self.wanted and self.wanted.n == self._front.n != 0 and self.wanted != self._front:
            self.problems.append(f"line {self.wanted.n} was another than the head that you keep")
        elif self.wanted and self.wanted.n < self._front.n:
            self.notes.append(f"line {self.wanted.n}, of the head that you keep, was removed")
