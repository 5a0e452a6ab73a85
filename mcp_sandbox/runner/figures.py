"""Figures of Python code, kept as files beside the long output; works in the code's own process.

Nothing is imported for them before the code itself imports matplotlib.
"""

from __future__ import annotations

import errno
import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FOLDER = ".mcp-sandbox"
MOST = 100
"""So many pictures of one call are kept."""
MOST_SIDE, MOST_BYTES = 2000, 1024 * 1024
_TRIES = 5
_FULL = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)


def base_of(workspace: str, name: str) -> str:
    """How the paths of all files begin that are kept of the call of this name."""
    return os.path.join(workspace, FOLDER, "output", name)


def saved(base: str) -> list[str]:
    """The paths of the pictures of a call; user code may have put anything there."""
    found: list[str] = []
    while len(found) < MOST:
        begin = f"{base}-{len(found) + 1}"
        # The usual call has none: two looks must do.
        path = next((p for p in (begin + ".png", begin + ".jpg") if os.path.lexists(p)), None)
        if path is None:
            break
        found.append(path)
    return found


class Figures:
    """The figures of one piece of code, or of one cell after another. `base`: see `base_of`."""

    def __init__(self, base: str = "") -> None:
        self._pid = os.getpid()
        self.begin(base)

    def begin(self, base: str) -> None:
        """From now on what is kept belongs to another call."""
        self._base = base
        self._pictures = 0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ANN401
        """Find pyplot as the other finders of `sys.meta_path` do, and put our `show` into it.

        MPLBACKEND would do that, too, but all programs that the code starts would inherit it.
        """
        if name != "matplotlib.pyplot":
            return None
        spec: Any
        others = (each for each in sys.meta_path if each is not self)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if loader := spec and spec.loader:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:  # noqa: ANN401
                _choose_backend()
                execute(module)
                # A function: pyplot gives it attributes.
                module.show = lambda block=None, **_more: self._show(block)

            loader.exec_module = exec_module
        return spec

    def _show(self, block: bool | None) -> None:
        """Show all open figures and close them, as their windows would be.

        Unless it blocks, the windows stay: what they show in the end counts.
        """
        if block is not False:
            self._save_open()

    def end(self) -> None:
        """Save what is still open, in the process that has begun with it."""
        if os.getpid() == self._pid:
            self._save_open()

    def _save_open(self) -> None:
        pyplot: Any = sys.modules.get("matplotlib.pyplot")
        if pyplot:
            for number in pyplot.get_fignums():
                self.save(pyplot.figure(number))

    def save(self, figure: Any) -> None:  # noqa: ANN401
        """Keep a figure of matplotlib as a PNG and close it; what fails is told on stderr."""
        try:
            self.keep(_drawn(figure), "png")
        except Exception as exc:  # noqa: BLE001 - the user's code draws it
            _say(f"a figure could not be drawn: {type(exc).__name__}: {exc}")
        if pyplot := sys.modules.get("matplotlib.pyplot"):
            pyplot.close(figure)

    def keep(self, data: bytes, suffix: str) -> str | None:
        """Write a new file of this call; its path, or None, and stderr says why."""
        try:
            os.makedirs(os.path.dirname(self._base), exist_ok=True)
            return self._write(data, suffix)
        except OSError as exc:
            full = "the workspace is full: delete files" if exc.errno in _FULL else exc.strerror
            _say(f"a figure could not be kept: {full}")
            return None

    def _write(self, data: bytes, suffix: str) -> str:
        # Processes that the code has forked count on their own: the next free number it is.
        for number in range(self._pictures + 1, MOST + 1):
            path = f"{self._base}-{number}.{suffix}"
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(path, flags, 0o644)
            except FileExistsError:
                continue
            self._pictures = self._pictures if suffix == "html" else number
            try:
                with open(file, "wb") as stream:
                    stream.write(data)
            except OSError:
                os.unlink(path)
                self._pictures = self._pictures if suffix == "html" else number - 1
                raise
            return path
        raise OSError(errno.EMFILE, f"{MOST} have been kept of this call")


def _choose_backend() -> None:
    """Draw in memory, unless the code has chosen something else before it imports pyplot."""
    chosen: Any = sys.modules["matplotlib"].rcParams
    try:
        # Read through its own class it would choose by itself, trying all that is installed.
        if not isinstance(dict.__getitem__(chosen, "backend"), str):
            chosen["backend"] = "agg"
    except (KeyError, TypeError):
        return


def _drawn(figure: Any) -> bytes:  # noqa: ANN401
    """A figure as PNG with so few dots an inch that it fits."""
    dots = min(figure.dpi, MOST_SIDE / max(figure.get_size_inches()))
    for _ in range(_TRIES):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dots)
        data = buffer.getvalue()
        # Settings of the user may add a margin; its sides follow a PNG's first 16 bytes.
        side = max(int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
        if side <= MOST_SIDE and len(data) <= MOST_BYTES:
            break
        dots *= 0.95 * min(MOST_SIDE / side, (MOST_BYTES / len(data)) ** 0.5)
    return data


def _say(what: str) -> None:
    if sys.stderr:
        sys.stderr.write(f"{what}\n")
