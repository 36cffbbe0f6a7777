"""Digests: of blocks while bytes pass by, of whole files, and of the index.

xxh3_128 finds damage and is far faster than any disk; it is no defence against somebody who can write to the store.
sha256 is. A digest is handled as raw bytes and shown as hexadecimal, in the canonical (big-endian) order of
`xxhsum -H2`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol, TypeAlias

import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview


class Hash(Protocol):
    """What hashlib and xxhash objects have in common. Both release the GIL for large inputs."""

    def update(self, data: Buffer, /) -> None: ...
    def digest(self) -> bytes: ...


DEFAULT = "xxh3_128"
_MAKERS: dict[str, Callable[[], Hash]] = {"xxh3_128": xxhash.xxh3_128, "sha256": hashlib.sha256}
DIGEST_BYTES = {"xxh3_128": 16, "sha256": 32}


def known(algorithm: str) -> bool:
    """Whether digests of this algorithm can be made and checked here."""
    return algorithm in _MAKERS


def new(algorithm: str) -> Hash:
    """A fresh hash object. `algorithm` must be known."""
    return _MAKERS[algorithm]()


def digest(algorithm: str, *buffers: Buffer) -> bytes:
    """The digest of the buffers, one after the other."""
    state = new(algorithm)
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


class BlockHasher:
    """Digests of a file that passes by in order: one for each block of `block` bytes, and one of the whole."""

    def __init__(self, algorithm: str, block: int) -> None:
        self._algorithm = algorithm
        self._block = block
        self._room = block
        self._current = new(algorithm)
        self._whole = new(algorithm)
        self._done: list[bytes] = []
        self.nbytes = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes. Fastest where `data` never crosses a block's end and fits in the cache."""
        self.nbytes += len(data)
        while len(data) >= self._room:
            self._take(data[: self._room])
            data = data[self._room :]
            self._close()
        if len(data):
            self._take(data)
            self._room -= len(data)

    def _take(self, data: memoryview) -> None:
        self._current.update(data)
        self._whole.update(data)

    def _close(self) -> None:
        self._done.append(self._current.digest())
        self._current = new(self._algorithm)
        self._room = self._block

    def block(self, data: memoryview) -> bytes:
        """Take one whole block and return its digest."""
        self.update(data)
        if self._room < self._block:  # the last one of a file may be short
            self._close()
        return self._done[-1]

    def finish(self) -> tuple[bytes, tuple[bytes, ...]]:
        """The digest of the whole, and those of the blocks, the last of which may be short."""
        if self._room < self._block:
            self._close()
        return self._whole.digest(), tuple(self._done)
