"""Single steps on a POSIX file system, each with an error that names the path. Policy is in `local` and `claims`.

Names are relative to an open folder (`dir_fd`), so that no part of a key is ever resolved twice, or through a link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType

from shardstore.errors import InvalidArgument, StoreError, StoreUnavailable, from_os_error
from shardstore.storage import statx
from shardstore.storage.port import Body
from shardstore.storage.sharing import share

# Through folders one may pass without being allowed to list them; where the system has no O_PATH, one may not.
PASS = getattr(os, "O_PATH", os.O_RDONLY)
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
_PLAIN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a plain file",
}
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP}
_MAX_BUFFERS = 1024  # IOV_MAX of Linux
_MAX_NAME_IN_TEMP = 200  # leaves room for the rest within the 255 bytes of a file name
_TEMP = re.compile(r"\..*-[0-9a-f]{16}\.tmp", re.DOTALL)


class failing:  # noqa: N801  reads as a phrase: `with failing("reading", path):`
    """Turns an OSError of the block into one of ours, which says what was being done to which path."""

    def __init__(self, doing: str, shown: str) -> None:
        self._doing = doing
        self._shown = shown

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError) and not isinstance(error, StoreError):
            raise from_os_error(error, self._doing, self._shown) from error


def temp_name(name: str) -> str:
    """A new, hidden name for a file that is to become `name`. From `secrets`: a seeded `random` repeats itself."""
    short = name.encode()[:_MAX_NAME_IN_TEMP].decode(errors="ignore")
    return f".{short}-{secrets.token_hex(8)}.tmp"


def is_temp(name: str) -> bool:
    """Whether a file name was made by `temp_name`."""
    return _TEMP.fullmatch(name) is not None


def kind_of(mode: int) -> str:
    """What a file is, for people, from its `st_mode`."""
    return _KINDS.get(stat.S_IFMT(mode), "a device")


def _not_a(wanted: str, name: str, folder: int, shown: str, error: OSError) -> StoreError:
    """The error for something that could not be opened as what it must be; says what lies there instead."""
    try:
        found = kind_of(os.lstat(name, dir_fd=folder).st_mode)
    except OSError:
        return from_os_error(error, "opening", shown)
    return StoreError(f"{shown!r} is {found}, where {wanted} must be", errno=error.errno, filename=shown)


def open_folder(name: str, folder: int, shown: str, flags: int) -> int:
    """Open a folder that lies in another one. Follows no link. FileNotFoundError (the builtin) if it is not there."""
    try:
        return os.open(name, flags | _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise
        if error.errno in {errno.ENOTDIR, errno.ELOOP}:
            raise _not_a("a folder", name, folder, shown, error) from error
        raise from_os_error(error, "opening", shown) from error


def open_root(path: str, flags: int) -> int:
    """Open a root, which may be reached through links. Raises OSError as it comes."""
    return os.open(path, flags | _FOLDER)


def open_plain(name: str, folder: int, shown: str) -> int:
    """Open a plain file for reading; a link, folder, fifo or device is refused, without waiting for its other end."""
    try:
        fd = os.open(name, _PLAIN, dir_fd=folder)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENXIO}:
            raise _not_a("a plain file", name, folder, shown, error) from error
        raise from_os_error(error, "opening", shown) from error
    try:
        mode = os.fstat(fd).st_mode
    except OSError as error:
        os.close(fd)
        raise from_os_error(error, "opening", shown) from error
    if stat.S_ISREG(mode):
        return fd
    close_quietly(fd)
    raise StoreError(f"{shown!r} is {kind_of(mode)}, where a plain file must be", errno=errno.EINVAL, filename=shown)


class FolderGone(Exception):
    """A signal within this package: the folder in which something was to be made was removed since it was opened."""


def write_synced(name: str, folder: int, body: Body, shown: str) -> None:
    """Write a new file and flush it to the device; if that fails, the file is removed.

    Raises FolderGone, before the body is touched, if the folder has been removed.
    """
    doing = f"writing {body.nbytes} bytes to"
    try:
        fd = os.open(name, _NEW, 0o666, dir_fd=folder)  # the umask applies: colleagues may read as the user wants it
    except FileNotFoundError:
        raise FolderGone from None
    except OSError as error:
        raise from_os_error(error, doing, shown) from error
    try:
        _fill(fd, body, shown, doing)
    except BaseException:
        remove_quietly(name, folder)
        raise


def _fill(fd: int, body: Body, shown: str, doing: str) -> None:
    try:
        if not share(body, fd):
            _write_all(fd, body, shown, doing)
        with failing(doing, shown):
            os.fsync(fd)  # if it fails, the kernel forgets the pages: the file is written anew, never flushed again
    except BaseException:
        close_quietly(fd)
        raise
    with failing(doing, shown):
        os.close(fd)  # NFS and quotas report late errors here


def _write_all(fd: int, body: Body, shown: str, doing: str) -> None:
    """Write what the body yields, over short writes, and check that it is as much as the body said."""
    total = 0
    for view in exact(body, shown):
        rest = view
        while len(rest):
            with failing(doing, shown):
                written = os.write(fd, rest)
            if written == 0:
                raise StoreError(f"{doing} {shown!r} failed: the system took no byte after {total}", filename=shown)
            total += written
            rest = rest[written:]


def exact(body: Body, shown: str) -> Iterator[memoryview]:
    """The buffers of a body as bytes; raises InvalidArgument if they hold more or fewer than the body said."""
    total = 0
    for buffer in body:
        view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
        total += len(view)
        if total > body.nbytes:
            break
        yield view
    if total != body.nbytes:
        found = "more" if total > body.nbytes else total
        raise InvalidArgument(f"the body for {shown!r} says {body.nbytes} bytes, but gives {found}")


def sync_folder(folder: int, shown: str) -> None:
    """Flush a folder, so that the names in it survive a power loss."""
    try:
        os.fsync(folder)
    except OSError as error:
        # Some FUSE, SMB and 9p mounts know no fsync of folders, and offer nothing in its place.
        if error.errno not in _NO_FOLDER_SYNC:
            raise from_os_error(error, "flushing the folder of", shown) from error


def move_into_place(temp: str, name: str, folder: int, shown: str) -> None:
    """Give a finished temporary file its final name, at once, in the same folder."""
    try:
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileNotFoundError as error:
        message = f"the temporary file for {shown!r} has gone, or an answer of the server was lost"
        raise StoreUnavailable(message, errno=errno.ENOENT, filename=shown) from error
    except OSError as error:
        raise from_os_error(error, "putting into place", shown) from error


def remove_quietly(name: str, folder: int) -> bool:
    """Remove a file; returns whether it was there and is gone. For cleaning up, where the first error matters more."""
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


def close_quietly(fd: int) -> None:
    """Close what was only read, or after a failure: there is nothing to lose by it, or an error to report already."""
    with suppress(OSError):
        os.close(fd)


def forget_pages(fd: int) -> None:
    """Have the size and the content of a file read anew from where it lies, not from this machine's memory."""
    statx.refresh(fd)
    with suppress(OSError):  # advice: not every system takes it
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_small(fd: int, limit: int, shown: str) -> bytes:
    """All bytes of an open file. Over `limit`: StoreError, without reading it."""
    with failing("reading", shown):
        size = os.fstat(fd).st_size
        if size > limit:
            raise too_large(shown, size, limit)
        data = bytearray(size)
    read_at(fd, 0, [memoryview(data)], shown)
    return bytes(data)


def digest_of(fd: int, shown: str) -> str:
    """The sha256 of an open file's content, in hexadecimal."""
    with failing("reading", shown), os.fdopen(os.dup(fd), "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_at(fd: int, offset: int, buffers: Sequence[memoryview], shown: str) -> None:
    """Fill the buffers, in order, from `offset` on, over short reads; a file that ends too early is a StoreError."""
    if offset < 0:
        raise InvalidArgument(f"{shown!r} has no byte {offset}")
    todo = [buffer for buffer in buffers if buffer.nbytes]
    start = offset
    first = 0
    while first < len(todo):
        batch = todo[first : first + _MAX_BUFFERS]
        got = _read_some(fd, batch, offset, shown)
        if got == 0:
            wanted = offset - start + sum(buffer.nbytes for buffer in todo[first:])
            raise too_short(shown, start, wanted, offset)
        offset += got
        for buffer in batch:
            if got < buffer.nbytes:
                todo[first] = buffer.cast("B")[got:]
                break
            got -= buffer.nbytes
            first += 1


def _read_some(fd: int, buffers: Sequence[memoryview], offset: int, shown: str) -> int:
    try:
        return os.preadv(fd, buffers, offset)
    except OSError as error:
        raise from_os_error(error, "reading", shown) from error
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(f"{shown!r} can't be read into these buffers from {offset} on: {error}") from error


def too_short(shown: str, offset: int, wanted: int, size: int) -> StoreError:
    """The error for a file that ends before the last byte that was asked for."""
    message = f"{shown!r} ends at byte {size}, but {wanted} bytes from {offset} on were asked for: it is cut short"
    return StoreError(message, filename=shown)


def too_large(shown: str, size: int, limit: int) -> StoreError:
    """The error for a file that is to be read whole, and is larger than it may be."""
    message = f"{shown!r} holds {size} bytes, more than the {limit} that are allowed there"
    return StoreError(message, errno=errno.EFBIG, filename=shown)
