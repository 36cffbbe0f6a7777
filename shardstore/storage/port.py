"""The store port: bytes by key, below one root. Every store keeps this contract; `tests/kit/contract.py` checks it.

Keys are relative `str` paths with `/`; `check_key` says which are allowed. All calls block, may come from many threads
at once, and raise only errors of `shardstore.errors`: `KeyMissing` where nothing has that name, `StoreUnavailable`
where the same call may be made again, `StoreError` where it may not, `CheckpointExists` where a condition did not hold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from shardstore.errors import InvalidArgument

MAX_KEY_BYTES = 1024
MAX_PART_BYTES = 255


@functools.lru_cache(maxsize=1024)
def check_key(key: str) -> str:
    """Return `key` if it can only mean one plain file below the root; raises InvalidArgument otherwise.

    Refused: empty, absolute, `.` or `..` or empty parts, backslashes, control characters, a drive (`C:`), text that is
    not UTF-8, parts over 255 bytes, keys over 1,024 bytes.
    """
    try:
        size = len(key.encode())
        parts = key.split("/")
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError:
        raise InvalidArgument(f"the file name {key!r} is not valid Unicode") from None
    bad = size > MAX_KEY_BYTES or longest > MAX_PART_BYTES
    bad = bad or any(part in {"", ".", ".."} for part in parts)
    bad = bad or "\\" in key or key[1:2] == ":" or any(ord(c) < 32 or ord(c) == 127 for c in key)  # noqa: PLR2004
    if bad:
        raise InvalidArgument(f"the file name {key[:80]!r} does not stay below the root of its checkpoint")
    return key


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can promise. Where one is False, `why` gives the reason, for people.

    `exclusive`: of many writers with `if_absent` (or the same `if_match`) at most one wins.
    `durable`: what `put` has written survives a power loss. `mappable`: `map` works and is safe.
    `read_bytes`, `longest_read`: bytes that one read should fetch at least, and at most. `connections`: calls at once
    that serve it best; None: one for each core. `sequential`: a file is read fastest by one thread, from its start on.
    """

    exclusive: bool
    durable: bool
    mappable: bool
    why: str = ""
    read_bytes: int = 4 * 1024 * 1024
    longest_read: int = 4 * 1024 * 1024
    connections: int | None = None
    sequential: bool = False


class Entry(NamedTuple):
    """One file. `modified`: seconds since 1970, by the store's own clock. `other`: a link, a folder, a fifo, ..."""

    key: str
    nbytes: int
    modified: float
    kind: Literal["file", "other"] = "file"


class Blob(NamedTuple):
    """A small file read whole, with a version: equal versions mean equal content."""

    data: bytes
    version: str


class Body(Protocol):
    """What is put. Iterating gives its bytes in order, and may be done again for another try.

    A buffer stays valid as long as it is referenced; a store holds only as many as it needs at once.
    """

    @property
    def nbytes(self) -> int: ...
    def __iter__(self) -> Iterator[memoryview]: ...


class Store(Protocol):
    """Bytes by key below one root."""

    url: str

    @property
    def capabilities(self) -> Capabilities: ...

    def prepare(self) -> None:
        """Find out, before a save writes anything, what only a request can tell; then `capabilities` is final."""

    def put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> None:
        """Write a whole file, durably, under its final name at once: readers see the old state or the new one.

        `if_absent`: only where nothing has that name. `if_match`: only where the present content has that version.
        Where the condition does not hold, raises CheckpointExists (`if_match` and nothing there: KeyMissing).
        Without a condition an existing file is replaced. A body that gives more or fewer bytes than it says is
        InvalidArgument. If the call fails, nothing has changed, except that a conditional put may raise
        StoreUnavailable for an answer that was lost.
        """

    def get(self, key: str, *, limit: int) -> Blob:
        """Read a whole small file, never from a cache. Over `limit` bytes: StoreError, without reading it."""

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill all writable buffers, in order, with the bytes from `offset` on; a file too short is a StoreError."""

    def map(self, key: str) -> memoryview:
        """A private, writable memory map of the whole file; only where `capabilities.mappable`."""

    def stat(self, key: str) -> Entry:
        """Size and time of one key, never from a cache. Follows no link."""

    def list(self, prefix: str = "") -> Iterable[Entry]:
        """Every entry whose key starts with `prefix`, in order of keys, at any depth; nothing if there is no root.

        Temporary files of this store's own are left out.
        """

    def folders(self) -> Sequence[str]:
        """The names of the folders directly below the root, in order; none if there is no root. Links are none.

        It looks into none of them, so that thousands cost one call.
        """

    def delete(self, key: str) -> None:
        """Remove one file; nothing of that name is fine. Folders that become empty below the root may go too."""

    def unfinished(self) -> Sequence[Entry]:
        """Files whose writing was begun and not ended: temporary files, uploads in parts; none where there are no such.

        `modified` says when they were last touched. A listing does not show them.
        """

    def discard(self, key: str) -> None:
        """Remove what `unfinished` shows under that key; nothing there is fine."""

    def now(self) -> float:
        """The store's own clock, in seconds since 1970, comparable with `Entry.modified`."""

    def close(self) -> None:
        """Give back handles. The store is not used afterwards."""


class Bytes:
    """A body of bytes that are in memory already."""

    def __init__(self, *buffers: bytes | bytearray | memoryview) -> None:
        self._buffers = [memoryview(b).cast("B") for b in buffers]
        self.nbytes = sum(map(len, self._buffers))

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._buffers)
