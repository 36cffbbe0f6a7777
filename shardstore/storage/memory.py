"""A store in the memory of this process, for tests and for trying things out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from shardstore.errors import CheckpointExists, InvalidArgument, KeyMissing, StoreError
from shardstore.storage.content import version_of
from shardstore.storage.port import Blob, Body, Capabilities, Entry, check_key
from shardstore.storage.posix import exact, too_large, too_short

SCHEME = "memory://"
_WHY = "memory:// ends with the process, and has no files to map"


class _Tree:
    """All that is stored, by full path, with the time of its writing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.files: dict[str, tuple[bytearray, float]] = {}


_TREE = _Tree()


def reset() -> None:
    """Forget all that memory stores hold."""
    with _TREE.lock:
        _TREE.files.clear()


class MemoryStore:
    """What lies below `memory://...`. Stores of one process see each other as folders of one tree would."""

    def __init__(self, url: str) -> None:
        path = url.removeprefix(SCHEME)
        if path == url:
            raise InvalidArgument(f"{url!r} does not begin with {SCHEME}")
        path = path.strip("/")
        self.url = url
        self._below = check_key(path) + "/" if path else ""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exclusive=True, durable=False, mappable=False, why=_WHY)

    def prepare(self) -> None:
        """Nothing is to be found out."""

    def put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> None:
        if if_absent and if_match is not None:
            raise InvalidArgument("if_absent and if_match can't both hold")
        path, shown = self._path(key), self._shown(key)
        data = _collect(body, shown)
        with _TREE.lock:
            present = _TREE.files.get(path)
            if if_absent and present is not None:
                raise CheckpointExists(f"{shown!r} exists already")
            if if_match is not None and present is None:
                raise KeyMissing(f"{shown!r} does not exist any more", filename=shown)
            if if_match is not None and present is not None and version_of(present[0]) != if_match:
                raise CheckpointExists(f"{shown!r} has been replaced by somebody else meanwhile")
            _TREE.files[path] = (data, time.time())

    def get(self, key: str, *, limit: int) -> Blob:
        data = self._find(key)[0]
        if len(data) > limit:
            raise too_large(self._shown(key), len(data), limit)
        return Blob(bytes(data), version_of(data))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        data = memoryview(self._find(key)[0])
        wanted = sum(buffer.nbytes for buffer in buffers)
        if offset < 0 or any(buffer.readonly for buffer in buffers):
            raise InvalidArgument(f"{self._shown(key)!r} can't be read into these buffers from {offset} on")
        if wanted and offset + wanted > len(data):
            raise too_short(self._shown(key), offset, wanted, len(data))
        for buffer in buffers:
            if buffer.nbytes:
                buffer.cast("B")[:] = data[offset : offset + buffer.nbytes]
                offset += buffer.nbytes

    def map(self, key: str) -> memoryview:
        raise StoreError(f"{self._shown(key)!r} can't be mapped: {_WHY}", filename=self._shown(key))

    def stat(self, key: str) -> Entry:
        data, modified = self._find(key)
        return Entry(key, len(data), modified)

    def list(self, prefix: str = "") -> Sequence[Entry]:
        if "/" in prefix:
            check_key(prefix.rpartition("/")[0])
        start, cut = self._below + prefix, len(self._below)
        with _TREE.lock:
            found = [(path, len(data), at) for path, (data, at) in _TREE.files.items() if path.startswith(start)]
        return sorted(Entry(path[cut:], nbytes, at) for path, nbytes, at in found)

    def folders(self) -> Sequence[str]:
        return sorted({entry.key.partition("/")[0] for entry in self.list() if "/" in entry.key})

    def delete(self, key: str) -> None:
        with _TREE.lock:
            _TREE.files.pop(self._path(key), None)

    def unfinished(self) -> Sequence[Entry]:
        return ()

    def discard(self, key: str) -> None:
        """Nothing is ever unfinished."""

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        """Nothing to give back: what is stored stays until `reset`."""

    def _find(self, key: str) -> tuple[bytearray, float]:
        path = self._path(key)
        with _TREE.lock:
            found = _TREE.files.get(path)
        if found is None:
            raise KeyMissing(f"{self._shown(key)!r} does not exist", filename=self._shown(key))
        return found

    def _path(self, key: str) -> str:
        return self._below + check_key(key)

    def _shown(self, key: str) -> str:
        return f"{self.url.rstrip('/')}/{key}"


def _collect(body: Body, shown: str) -> bytearray:
    data = bytearray(body.nbytes)
    at = 0
    for view in exact(body, shown):
        data[at : at + len(view)] = view
        at += len(view)
    return data
