"""Figures of Python code, kept as files beside the long output; runs in the code's own process.

It imports nothing for them until the code itself imports matplotlib.
"""

from __future__ import annotations

import errno
import io
import os
import sys

from mcp_sandbox.runner.files import kept

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST, _MOST_SIDE, _MOST_BYTES = 100, 2000, 1024 * 1024
_TRIES = 5
_FULL = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)


def list_saved_figures(base: str) -> list[str]:
    """Return the paths of a call's pictures; user code may have put anything there."""
    found: list[str] = []
    while len(found) < _MOST:
        begin = f"{base}-{len(found) + 1}"
        path = next((p for p in (begin + ".png", begin + ".jpg") if os.path.lexists(p)), None)
        if path is None:
            break
        found.append(path)
    return found


class Figures:
    """The figures of a piece of code, or of one cell after another; `base`: see `kept.base_of`."""

    def __init__(self, base: str = "") -> None:
        self.base = base
        self._pid = os.getpid()

    def adapt(self, pyplot: Any) -> None:  # noqa: ANN401
        """Put our `show` into pyplot.

        MPLBACKEND would do that, too, but all programs that the code starts would inherit it.
        """

        def show(block: bool | None = None, **_more: object) -> None:
            # Windows that do not block stay open: what they show at the end counts.
            if block is not False:
                self._save_open()

        pyplot.show = show
        chosen: Any = sys.modules["matplotlib"].rcParams
        # A public query would choose a backend now, trying all that are installed.
        if isinstance(chosen, dict) and not isinstance(dict.get(chosen, "backend"), str):
            chosen["backend"] = "agg"

    def end(self) -> None:
        """Save the figures still open; does nothing in a forked child."""
        if os.getpid() == self._pid:
            self._save_open()

    def _save_open(self) -> None:
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        for number in pyplot.get_fignums() if pyplot else ():
            self.save(pyplot.figure(number))

    def save(self, figure: Any) -> None:  # noqa: ANN401
        """Save a matplotlib figure as PNG and close it; report failures on stderr."""
        try:
            self.keep(_draw_within_limits(figure), "png")
        except Exception as exc:  # noqa: BLE001 - the user's code draws it
            _say(f"a figure could not be drawn: {type(exc).__name__}: {exc}")
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close(figure)

    def keep(self, data: bytes, suffix: str) -> str | None:
        """Write a new file of this call; return its path, or None after a message on stderr."""
        for number in range(len(list_saved_figures(self.base)) + 1, _MOST + 1):
            path = f"{self.base}-{number}.{suffix}"
            try:
                with open(kept.create(path), "wb") as file:
                    file.write(data)
            except FileExistsError:
                continue
            except OSError as exc:
                kept.remove(path)
                full = "the workspace is full: delete files" if exc.errno in _FULL else exc
                _say(f"a figure could not be kept: {full}")
                return None
            return path
        _say(f"{_MOST} figures of this call are kept, and no more")
        return None


def _draw_within_limits(figure: Any) -> bytes:  # noqa: ANN401
    dots = min(figure.dpi, _MOST_SIDE / max(figure.get_size_inches()))
    for _ in range(_TRIES):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dots)
        data = buffer.getvalue()
        # A user's settings may add a margin. The sides follow a PNG's first 16 bytes.
        side = max(int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        if side <= _MOST_SIDE and len(data) <= _MOST_BYTES:
            break
        dots *= 0.95 * min(_MOST_SIDE / side, (_MOST_BYTES / len(data)) ** 0.5)
    return data


def _say(what: str) -> None:
    if sys.stderr:
        sys.stderr.write(f"{what}\n")
