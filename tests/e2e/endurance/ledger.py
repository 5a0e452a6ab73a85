"""What one worker knows of its files: certain after an answer, one of several without one."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Possible:
    """A file that holds `base` and then none, a part or all of `tail`; absent without `base`."""

    base: bytes | None
    tail: bytes = b""

    def content(self, found: "Found | None") -> bytes | None:
        """The bytes that `found` must be if this is the case.

        Raises:
            LookupError: this is not the case.
        """
        if self.base is None or found is None:
            if self.base is None and found is None:
                return None
            raise LookupError
        whole = self.base + self.tail
        data = whole[: found.size]
        if found.size < len(self.base) or digest(data) != found.digest:
            raise LookupError
        return data


@dataclass(frozen=True)
class Found:
    """A file as it was seen: its size and the digest of its content."""

    size: int
    digest: str


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Ledger:
    """The files of one directory that nobody else changes."""

    def __init__(self) -> None:
        self._files: dict[str, list[Possible]] = {}
        # What was not answered and had not happened when it was looked for, but still may.
        self._late: dict[str, list[Possible]] = {}
        # Told of once; nothing more is known of them.
        self.given_up: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Files that may be there."""
        return [n for n, cases in self._files.items() if cases != [Possible(None)]]

    @property
    def certain(self) -> dict[str, bytes]:
        """Files whose content is known."""
        return {
            name: cases[0].base
            for name, cases in self._files.items()
            if len(cases) == 1 and cases[0].base is not None
        }

    @property
    def unsure(self) -> list[str]:
        return [name for name, cases in self._files.items() if len(cases) > 1]

    def content(self, name: str) -> bytes | None:
        """The content of a file that is certain; None when it is absent."""
        (case,) = self._files.get(name, [Possible(None)])
        return case.base

    def acknowledge(self, name: str, content: bytes | None) -> None:
        self._files[name] = [Possible(content)]
        self._late.pop(name, None)

    def doubt(self, name: str, further: Possible) -> None:
        """A change was sent and not answered: both states are possible."""
        self._files[name] = [*self._files.get(name, [Possible(None)]), further]

    def see(self, name: str, found: Found | None) -> str:
        """Compare with what was found, which is certain from now on; returns what is wrong.

        "" when all is well, "happened" when an unacknowledged change was done, "cut short" when
        it was done in part, "late" when it was done after it had been looked for, else a
        description of what should have been there.
        """
        if name in self.given_up:
            return ""
        cases = self._files.get(name, [Possible(None)])
        late = self._late.pop(name, [])
        for number, case in enumerate([*cases, *late]):
            try:
                data = case.content(found)
            except LookupError:
                continue
            self._files[name] = [Possible(data)]
            if number >= len(cases):
                return "late"
            if number == 0:
                self._late[name] = [*late, *cases[1:]]
                return ""
            whole = None if case.base is None else case.base + case.tail
            return "happened" if data == whole else "cut short"
        self._files.pop(name, None)
        self.given_up.add(name)
        return f"{name} is {_tell(found)}, not {' or '.join(map(_expected, cases))}"


def _tell(found: Found | None) -> str:
    return "absent" if found is None else f"{found.size} bytes {found.digest[:12]}"


def _expected(case: Possible) -> str:
    if case.base is None:
        return "absent"
    whole = case.base + case.tail
    return f"{len(case.base)}..{len(whole)} bytes {digest(whole)[:12]} {whole[:40]!r}"
