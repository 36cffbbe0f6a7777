"""Ways to the folders below a root: opened part by part, without following a link, and made where they are missing."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardstore.errors import InvalidArgument, KeyMissing, StoreError, StoreUnavailable, from_os_error
from shardstore.storage import posix

TRIES = 64  # somebody may remove an empty folder as soon as it is made


class Folders:
    """The folders below one root. Remembers which of them have been flushed into their parents. Safe for threads."""

    def __init__(self, root: str, shown: str) -> None:
        if not root or "\0" in root:
            raise InvalidArgument(f"{root!r} is not a path")
        # Not normalised: `link/..` is not `.`. Made absolute, so that a later chdir does not move the store.
        self.root = os.path.join(os.getcwd(), root)
        self._shown = shown.rstrip("/") or "/"
        self._flushed: set[tuple[str, ...]] = set()
        self._lock = threading.Lock()

    def shown(self, *parts: str) -> str:
        """The path of something below the root, for messages."""
        return "/".join([self._shown.rstrip("/"), *parts]) if parts else self._shown

    @contextmanager
    def open(
        self, parts: Sequence[str], *, make: bool = False, flush: bool = True, flags: int = posix.PASS
    ) -> Iterator[int]:
        """An open folder; KeyMissing if it is not there and not to be made.

        With `make`, folders on the way are made, and flushed into their parents unless `flush` is False. FolderGone if
        one on the way is removed meanwhile.
        """
        flags = os.O_RDONLY if make else flags
        fd = self._root(flags, make=make)
        try:
            for depth in range(len(parts)):
                inner = self._inner(fd, tuple(parts[: depth + 1]), flags, make=make, flush=flush)
                fd, outer = inner, fd
                posix.close_quietly(outer)
            yield fd
        finally:
            posix.close_quietly(fd)

    def forget(self, parts: Sequence[str]) -> None:
        """A folder has been removed: when it is made again, it has to be flushed again."""
        with self._lock:
            self._flushed.discard(tuple(parts))

    def _root(self, flags: int, *, make: bool) -> int:
        shown = self.shown()
        try:
            try:
                fd = posix.open_root(self.root, flags)
            except FileNotFoundError:
                if not make:
                    raise
                self._make_root()
                fd = posix.open_root(self.root, flags)
        except StoreError:
            raise
        except OSError as error:
            raise from_os_error(error, "opening", shown) from error
        return fd

    def _make_root(self) -> None:
        """Make the last part of the root, not more: where a mount point is missing, its files must not go elsewhere."""
        parent = os.path.dirname(self.root.rstrip("/")) or "/"
        try:
            os.mkdir(self.root)
        except FileExistsError:
            return  # somebody else was faster, and flushes it
        except FileNotFoundError as error:
            why = f"because {parent!r} does not exist (an unmounted mount point?); make that folder first"
            message = f"{self.shown()!r} can't be made, {why}"
            raise StoreError(message, errno=errno.ENOENT, filename=self.shown()) from error
        try:
            fd = posix.open_root(parent, os.O_RDONLY)
        except PermissionError:
            return  # one may make folders there, but not open it: nothing can be flushed
        try:
            posix.sync_folder(fd, self.shown())
        finally:
            posix.close_quietly(fd)

    def _inner(self, outer: int, path: tuple[str, ...], flags: int, *, make: bool, flush: bool) -> int:
        shown = self.shown(*path)
        for _ in range(TRIES):
            try:
                fd = posix.open_folder(path[-1], outer, shown, flags)
            except FileNotFoundError as error:
                if not make:
                    raise KeyMissing(f"{shown!r} does not exist", errno=errno.ENOENT, filename=shown) from error
                _make(path[-1], outer, shown)
                continue
            if make and flush:
                self._flush(fd, outer, path, shown)
            return fd
        message = f"the folder {shown!r} is removed as often as it is made"
        raise StoreUnavailable(message, errno=errno.ENOENT, filename=shown)

    def _flush(self, fd: int, outer: int, path: tuple[str, ...], shown: str) -> None:
        """Flush the parent of a folder once, also where somebody else made it: they may not have come to that yet."""
        if path in self._flushed:
            return
        try:
            posix.sync_folder(outer, shown)
        except BaseException:
            posix.close_quietly(fd)
            raise
        with self._lock:
            self._flushed.add(path)


def _make(name: str, outer: int, shown: str) -> None:
    try:
        os.mkdir(name, dir_fd=outer)
    except FileExistsError:
        pass  # somebody else was faster, which is as good
    except FileNotFoundError:
        raise posix.FolderGone from None
    except OSError as error:
        raise from_os_error(error, "making the folder", shown) from error
