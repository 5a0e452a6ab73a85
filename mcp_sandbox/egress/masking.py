"""Blots out values in bytes that pass, each written in any of the usual ways. Pure."""

from collections.abc import Sequence


class Mask:
    """Values of 12 bytes and more of printable ASCII, and filler in their place."""

    def __init__(self, values: Sequence[bytes]) -> None:
        self._values = values

    def text(self, data: bytes) -> bytes:
        """Return a whole text with filler for each value in it, of the same length."""
        raise NotImplementedError

    def stream(self) -> "Masking":
        """Return what does the same to bytes that come in pieces."""
        return Masking(self)


class Masking:
    """One stream of bytes; all pieces that come out are as long as all that went in."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def feed(self, data: bytes) -> bytes:
        """Take a piece; return what can be told by now, without a beginning of a value."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Return the rest."""
        raise NotImplementedError
