"""Local files of foreign formats: read in slices through reused memory, written durably under their final names."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Self

from shardstore.errors import CheckpointExists, Damaged, StoreError, from_os_error
from shardstore.events import Listener, Reporter, to_log
from shardstore.hashing import DEFAULT, new
from shardstore.memory import WINDOW, Windows
from shardstore.specs import Lazy, TensorSpec
from shardstore.storage import LocalStore, statx
from shardstore.storage.posix import forget_pages
from shardstore.transfer import HashedBody

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS}


class ForeignFile:
    """A file that is open for reading, with its size and the time of its last write. Links are followed, as hubs use.

    Whoever writes into it meanwhile makes reading fail: else the half of one checkpoint and the half of another came.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo must not block
            statx.refresh(self._fd)  # as it is by now, not as a network file system remembers it
            found = os.fstat(self._fd)
        except OSError as error:
            raise from_os_error(error, "opening", path) from error
        self.nbytes, self.written = found.st_size, found.st_mtime_ns

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer. Raises StoreError; Damaged where the file ends before."""
        at = 0
        while at < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[at:]], offset + at)
            except OSError as error:
                raise from_os_error(error, "reading", self.path) from error
            if not count:
                raise Damaged(f"{self.path} ends at {offset + at} bytes, more were expected", file=self.path)
            at += count
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """That nobody has written into it since it was opened, as far as the file system tells. Raises Damaged."""
        found = os.fstat(self._fd)
        if (found.st_size, found.st_mtime_ns) != (self.nbytes, self.written):
            raise Damaged(f"{self.path} was written to while it was read: try again when it is whole", file=self.path)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Some bytes; to be asked for only where the file's size allows it."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise Damaged(f"{self.path} ends at {self.nbytes} bytes, more were expected", file=self.path)
        data = bytearray(nbytes)
        self.read_into(offset, memoryview(data))
        return bytes(data)

    def slices(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """A part of the file, in slices of a few MiB."""
        windows = Windows()
        for at in range(offset, offset + nbytes, WINDOW):
            buffer = windows.empty(min(WINDOW, offset + nbytes - at))
            self.read_into(at, buffer)
            yield buffer
            del buffer  # or the window would never be free

    def opened(self) -> BinaryIO:
        """The same file for libraries, from its start; to be closed, and one at a time."""
        file = os.fdopen(os.dup(self._fd), "rb")
        file.seek(0)
        return file

    def forget(self) -> None:
        """Have it read anew from where it lies, not from this machine's memory."""
        forget_pages(self._fd)

    def close(self) -> None:
        """Give back the handle; more than once is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileTensor(Lazy):
    """A tensor whose bytes lie in a row in a file, little-endian and row-major."""

    def __init__(self, spec: TensorSpec, file: ForeignFile, offset: int) -> None:
        super().__init__(spec)
        self.file, self.offset = file, offset

    def buffers(self) -> Iterator[memoryview]:
        return self.file.slices(self.offset, self.nbytes)


class Stream(HashedBody):
    """The body of a file that is written: `nbytes` bytes, given by `chunks` anew at each try."""

    def __init__(self, nbytes: int, chunks: Callable[[], Iterable[memoryview]]) -> None:
        super().__init__(nbytes, chunks, DEFAULT)

    def report_to(self, reporter: Reporter) -> None:
        """Tell how it moves."""
        self._reporter = reporter


def put_file(path: str, body: Stream, *, overwrite: bool = False, listener: Listener | None = None) -> None:
    """Write one file: flushed and read back, and only then under its name.

    Raises CheckpointExists, StoreError, Damaged. With `overwrite` it replaces a file that is there: whoever looks sees
    the old one or the new one, whole.
    """
    folder, name = os.path.split(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise StoreError(f"writing {path!r} failed: the folder {folder!r} is not there", filename=path)
    if not overwrite:
        refuse_existing(path)
    reporter = Reporter("save", path, to_log if listener is None else listener)
    body.report_to(reporter)
    reporter.started(body.nbytes, 1)
    temp = f".{name[:200]}.{secrets.token_hex(8)}.part"
    store = LocalStore(folder)
    try:
        store.put(temp, body)
        try:
            read_back(os.path.join(folder, temp), body)
            _give_name(os.path.join(folder, temp), path, overwrite=overwrite)
        finally:
            store.delete(temp)  # which flushes the folder, too
    finally:
        store.close()
    reporter.finished()


def read_back(path: str, body: Stream) -> None:
    """That the disk has what was written. Raises Damaged."""
    with ForeignFile(path) as file:
        file.forget()
        if file.nbytes != body.nbytes or _digest(file) != body.digest:
            raise Damaged(f"{path} does not read back as it was written: the disk is failing, perhaps", file=path)


def _digest(file: ForeignFile) -> bytes:
    found = new(DEFAULT)
    for part in file.slices(0, file.nbytes):
        found.update(part)
    return found.digest()


def _give_name(temp: str, path: str, *, overwrite: bool) -> None:
    try:
        if overwrite:
            os.replace(temp, path)
        else:
            _link(temp, path)
    except OSError as error:
        raise from_os_error(error, "writing", path) from error


def refuse_existing(path: str) -> None:
    """Raise CheckpointExists where anything has that name."""
    if os.path.lexists(path):
        raise CheckpointExists(f"{path!r} is there already, and nothing is overwritten: choose another place")


def _link(temp: str, path: str) -> None:
    """Give a file its name, unless something has it by now."""
    try:
        os.link(temp, path)
    except FileExistsError:
        refuse_existing(path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        refuse_existing(path)
        os.rename(temp, path)
