"""Functions of the C library, through the C half of `ctypes`.

Its Python half would take two milliseconds to load, in every sandbox twice.
"""

from __future__ import annotations

import _ctypes
import os


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]  # noqa: SLF001 - what ctypes builds on
    _type_ = "i"


class Address(_ctypes._SimpleCData):  # type: ignore[type-arg]  # noqa: SLF001
    """A place in our memory; as an argument a plain number would be cut to 32 bits."""

    _type_ = "P"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


class _Program:
    """This program with the libraries that it has loaded."""

    _handle = _ctypes.dlopen(None, os.RTLD_NOW)  # type: ignore[arg-type]


_program = _Program()


def function(name: str) -> _Function:
    """A C function that returns an int.

    Raises:
        AttributeError: the C library has none of this name.
    """
    return _Function((name, _program))  # type: ignore[arg-type]


def room_for_int() -> object:
    """An argument for a function that gives a number back through a pointer."""
    return _ctypes.byref(_Int())


def last_error() -> int:
    """Why the last call failed, as an errno."""
    return _ctypes.get_errno()


def wipe(start: int, size: int) -> None:
    """Put zeros into our memory."""
    function("memset")(Address(start), 0, Address(size))


def wipe_environment() -> None:
    """Empty the environment as the kernel shows it and as C code would hand it on."""
    first = environ = Address.from_address(_ctypes.dlsym(_Program._handle, "environ")).value  # noqa: SLF001
    length = function("strlen")
    while environ and (variable := Address.from_address(environ).value):
        wipe(variable, length(Address(variable)))
        environ += _ctypes.sizeof(Address)
    if first:
        # Emptied strings would be handed on as variables without a name.
        Address.from_address(first).value = None
