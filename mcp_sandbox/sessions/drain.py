"""The end of a server: no new call begins, those under way may finish."""

import anyio


class Drain:
    """Says whether it has begun, and hears whenever a call ends."""

    def __init__(self) -> None:
        self.begun = False
        self._ended = anyio.Event()

    def note(self) -> None:
        """A call has ended."""
        if self.begun:
            self._ended.set()

    async def next_end(self) -> None:
        """Return when a call has ended."""
        self._ended = anyio.Event()
        await self._ended.wait()
