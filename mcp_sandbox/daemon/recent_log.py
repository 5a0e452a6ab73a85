"""The last log lines of this process, kept for `mcp-sandbox logs`."""

import logging
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import count

_KEPT = 2000
_LONGEST = 4000


class RecentLog(logging.Handler):
    """Keeps the last lines, numbered from 1, in the form of the process's log."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = deque[tuple[int, str]](maxlen=_KEPT)
        self._numbers = count(1)
        shown = logging.getLogger().handlers
        if shown:
            self.setFormatter(shown[0].formatter)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((next(self._numbers), self.format(record)[:_LONGEST]))

    def after(self, number: int) -> Sequence[tuple[int, str]]:
        """The lines after that number, as far as they are kept."""
        # Other threads log, too.
        self.acquire()
        try:
            return [(at, line) for at, line in self._lines if at > number]
        finally:
            self.release()


@contextmanager
def recent_log() -> Generator[RecentLog]:
    """Keep what is logged while the block runs."""
    kept = RecentLog()
    logging.getLogger().addHandler(kept)
    try:
        yield kept
    finally:
        logging.getLogger().removeHandler(kept)
