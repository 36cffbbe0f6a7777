"""A zip archive as a stream: records without compression, in the 64-bit form, their bytes aligned, CRCs after them.

Source: PKWARE's APPNOTE.TXT 6.3.10.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

_ALIGN = 64
_LOCAL = struct.Struct("<4s5H3L2H")
_LOCAL64 = struct.Struct("<2H2Q")
_PADDING = struct.Struct("<2H")
_AFTER = struct.Struct("<4sLQQ")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_CENTRAL64 = struct.Struct("<2H3Q")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_VERSION = 45  # needed for the 64-bit form
_FLAGS = 0x0808  # the CRC follows the bytes; names are UTF-8
_DATE = 0x21  # the 1st of January 1980: equal states make equal files
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_PAD_ID = 0x4246  # as torch names its padding


class Entry(NamedTuple):
    """One record: its name, its size, and its bytes, anew at each call."""

    name: str
    nbytes: int
    chunks: Callable[[], Iterable[memoryview]]


def archive_size(entries: Sequence[Entry]) -> int:
    """Bytes of the archive."""
    at = 0
    for entry in entries:
        at += len(_head(entry, at)) + entry.nbytes + _AFTER.size
    central = sum(_CENTRAL.size + len(entry.name.encode()) + _CENTRAL64.size for entry in entries)
    return at + central + _END64.size + _LOCATOR.size + _END.size


def archive(entries: Sequence[Entry]) -> Iterator[memoryview]:
    """The archive's bytes."""
    at, central = 0, bytearray()
    for entry in entries:
        head = _head(entry, at)
        yield memoryview(head)
        crc = 0
        for chunk in entry.chunks():
            crc = zlib.crc32(chunk, crc)
            yield chunk
        yield memoryview(_AFTER.pack(b"PK\x07\x08", crc, entry.nbytes, entry.nbytes))
        central += _listed(entry, crc, at)
        at += len(head) + entry.nbytes + _AFTER.size
    yield memoryview(bytes(central))
    yield memoryview(_ending(len(entries), at, len(central)))


def _head(entry: Entry, at: int) -> bytes:
    name = entry.name.encode()
    size = _LOCAL.size + len(name) + _LOCAL64.size + _PADDING.size
    padding = -(at + size) % _ALIGN
    extra = _LOCAL64.size + _PADDING.size + padding
    return b"".join([
        _LOCAL.pack(b"PK\x03\x04", _VERSION, _FLAGS, 0, 0, _DATE, 0, _FULL32, _FULL32, len(name), extra), name,
        _LOCAL64.pack(1, 16, entry.nbytes, entry.nbytes), _PADDING.pack(_PAD_ID, padding), bytes(padding),
    ])  # fmt: skip


def _listed(entry: Entry, crc: int, at: int) -> bytes:
    name = entry.name.encode()
    fixed = _CENTRAL.pack(
        b"PK\x01\x02", _VERSION, _VERSION, _FLAGS, 0, 0, _DATE, crc, _FULL32, _FULL32, len(name), _CENTRAL64.size,
        0, 0, 0, 0, _FULL32,
    )  # fmt: skip
    return fixed + name + _CENTRAL64.pack(1, 24, entry.nbytes, entry.nbytes, at)


def _ending(count: int, at: int, size: int) -> bytes:
    few = min(count, _FULL16)
    return b"".join([
        _END64.pack(b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, size, at),
        _LOCATOR.pack(b"PK\x06\x07", 0, at + size, 1),
        _END.pack(b"PK\x05\x06", 0, 0, few, few, _FULL32, _FULL32, 0),
    ])  # fmt: skip
