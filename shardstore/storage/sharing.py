"""A file of a local store as a body. Where the file system can, its copy shares the blocks until one of them changes.

Source: ioctl_ficlone(2); btrfs, xfs, bcachefs and some network file systems know it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from shardstore.errors import StoreError, from_os_error

_FICLONE = 0x40049409
_SLICE = 1024 * 1024


class FileBody:
    """The content of an open file. Owns the descriptor; a context manager."""

    def __init__(self, fd: int, shown: str) -> None:
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._shown = shown

    def __iter__(self) -> Iterator[memoryview]:
        at = 0
        while at < self.nbytes:
            try:
                data = os.pread(self.fd, min(_SLICE, self.nbytes - at), at)
            except OSError as error:
                raise from_os_error(error, "reading", self._shown) from error
            if not data:
                raise StoreError(f"{self._shown!r} became shorter while it was copied", filename=self._shown)
            yield memoryview(data)
            at += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def share(body: object, target: int) -> bool:
    """Let an empty file share all blocks of a body that is a file; False where that can't be: then it is written."""
    if not isinstance(body, FileBody):
        return False
    try:
        fcntl.ioctl(target, _FICLONE, body.fd)
        return os.fstat(target).st_size == body.nbytes
    except OSError:
        return False
