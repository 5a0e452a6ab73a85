"""Reads the lines of an audit back, and checks them. Blocking."""

import fcntl
import json
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mcp_sandbox.audit.chain import Check, Head
from mcp_sandbox.audit.writer import CURRENT, retired
from mcp_sandbox.errors import StorageUnavailable


def verify(folder: Path, wanted: Head | None = None) -> Check:
    """Check every line of the audit in a folder, and that it has the given head.

    Raises:
        StorageUnavailable: it cannot be read.
    """
    check = Check(wanted)
    with _opened(folder) as files:
        for name, lines in files:
            check.see(name, lines)
        if files and CURRENT not in dict(files):
            check.problems.append(f"{CURRENT}, the last file, is missing")
    check.end()
    return check


def events(folder: Path, chat: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each line and its event, of one chat (CHAT or USER/CHAT) or all.

    Damaged lines are left out. Raises as `verify` does.
    """
    with _opened(folder) as files:
        for line in (line for _, lines in files for line in lines):
            with suppress(ValueError):
                told = dict(json.loads(line))
                if chat in (None, told.get("chat"), f"{told.get('user')}/{told.get('chat')}"):
                    yield str(line, "utf-8").rstrip("\n"), told


@contextmanager
def _opened(folder: Path) -> Generator[list[tuple[str, Iterator[bytes]]]]:
    """Open all files as they are at one moment, also while servers write."""
    try:
        with ExitStack() as stack:
            found = list[tuple[str, Iterator[bytes]]]()
            with ExitStack() as locked, suppress(FileNotFoundError):
                with suppress(FileNotFoundError):
                    lock = locked.enter_context((folder / "audit.lock").open("rb"))
                    fcntl.flock(lock, fcntl.LOCK_SH)
                for path in (*retired(folder), folder / CURRENT):
                    file = stack.enter_context(path.open("rb"))
                    found.append((path.name, _lines(file, path.stat().st_size)))
            yield found
    except OSError as exc:
        raise StorageUnavailable(
            f"the audit in {folder} cannot be read: {exc.strerror}. Read it as the user whose "
            "server writes it"
        ) from exc


def _lines(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (line := file.readline(size)):
        size -= len(line)
        yield line
