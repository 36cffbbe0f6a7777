"""A log on a local file system: a file of one writer that only grows."""

from __future__ import annotations

import os

from shardstore.storage import posix

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Appender:
    """Appends to a file in an open folder.

    What was written survives the death of the process, and after `flush` a power loss.
    """

    def __init__(self, name: str, folder: int, shown: str) -> None:
        self._shown = shown
        with posix.failing("opening", shown):
            self._fd = os.open(name, _FLAGS, 0o666, dir_fd=folder)
        try:
            posix.sync_folder(folder, shown)
        except BaseException:
            posix.close_quietly(self._fd)
            raise

    def write(self, data: bytes) -> None:
        """Append all bytes. After an error a part of them may be there."""
        rest = memoryview(data)
        while rest:
            with posix.failing("appending to", self._shown):
                rest = rest[os.write(self._fd, rest) :]

    def flush(self) -> None:
        """Have what was written survive a power loss."""
        with posix.failing("flushing", self._shown):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        posix.close_quietly(self._fd)
