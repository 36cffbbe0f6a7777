"""Memory by address: what a tensor's `data_ptr()` names, as a buffer, without torch.

A buffer made here does not keep its memory alive: whoever makes one holds the owner for as long.
"""

from __future__ import annotations

import ctypes
from typing import cast

_READ_WRITE = 0x200  # PyBUF_WRITE, from CPython's object.h

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]

move = ctypes.memmove
"""`move(to, source, nbytes)`: copy between addresses; what they name must be that large."""


def view(address: int, nbytes: int) -> memoryview:
    """A writable buffer over `nbytes` bytes at `address`."""
    return cast("memoryview", _view(address, nbytes, _READ_WRITE)) if nbytes else memoryview(bytearray())


def of(buffer: memoryview) -> int:
    """The address of a writable, non-empty buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
