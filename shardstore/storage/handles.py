"""Open files for reading, kept by key, so that a file that is read in thousands of blocks is opened once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardstore.storage import posix

CAP = 128  # far below the usual limit of 1,024 open files for a process


class _Handle:
    __slots__ = ("fd", "kept", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self.kept = False


class Handles:
    """File descriptors by key. One that is dropped is closed when its last reader has finished, never before."""

    def __init__(self, opener: Callable[[str], int], cap: int = CAP) -> None:
        self._open = opener
        self._cap = cap
        self._kept: dict[str, _Handle] = {}
        self._drops = 0
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self, key: str) -> Iterator[int]:
        """A descriptor for reading. After an error in the block it is not used again (NFS: stale handles)."""
        handle = self._take(key)
        try:
            yield handle.fd
        except OSError:
            self.drop(key)
            raise
        finally:
            self._give(handle)

    def _take(self, key: str) -> _Handle:
        with self._lock:
            handle = self._kept.get(key)
            if handle is not None:
                handle.users += 1
                return handle
            drops = self._drops
        handle = _Handle(self._open(key))
        with self._lock:
            # What was opened before a drop may be the old file; with the table full, it is closed after use.
            if drops == self._drops and key not in self._kept and len(self._kept) < self._cap:
                handle.kept = True
                self._kept[key] = handle
        return handle

    def _give(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            close = handle.users == 0 and not handle.kept
        if close:
            posix.close_quietly(handle.fd)

    def drop(self, *keys: str) -> None:
        """Forget these keys; without any, all of them."""
        with self._lock:
            self._drops += 1
            gone = [self._kept.pop(key) for key in keys or list(self._kept) if key in self._kept]
            for handle in gone:
                handle.kept = False
            idle = [handle.fd for handle in gone if handle.users == 0]
        for fd in idle:
            posix.close_quietly(fd)
