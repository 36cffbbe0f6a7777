"""A store in a folder: of this machine's disks, or of a network file system.

A put is durable once it returns, as far as the file system keeps its word; readers see the old file or the new one.
Which file systems can be trusted with what is in `mounts`; how a conditional put stays exclusive is in `claims`.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from shardstore.errors import InvalidArgument, KeyMissing, StoreError, StoreUnavailable
from shardstore.storage import claims, mounts, posix, walk
from shardstore.storage.appending import Appender
from shardstore.storage.content import version_of
from shardstore.storage.folders import TRIES, Folders
from shardstore.storage.handles import Handles
from shardstore.storage.port import Blob, Body, Capabilities, Entry, check_key
from shardstore.storage.sharing import FileBody

DAY = 86_400.0
_BLINKS = (0.1, 0.4)

T = TypeVar("T")


class LocalStore:
    """Files below the folder `root`, which is made by the first put if only its last part is missing.

    `claim_age`: seconds after which a conditional put breaks the claim of another one that seems to have died.
    `claim_wait`: seconds for which it waits for the outcome of another one. `sleep` waits, in seconds.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        claim_age: float = 10.0,
        claim_wait: float = 2.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        path = os.fspath(root)
        if not isinstance(path, str):
            raise InvalidArgument(f"a path is text, not {type(path).__name__}: {path!r}")
        self.url = path
        self._folders = Folders(path, path)
        self._below = self._folders.shown().rstrip("/") + "/"
        self._handles = Handles(self._open)
        self._claim_age = claim_age
        self._claim_wait = claim_wait
        self._sleep = sleep
        self._kind_found: str | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Depends on the file system on which the root lies."""
        return mounts.capabilities(self._kind)

    @property
    def _kind(self) -> str:
        # No `functools.cached_property`: before Python 3.12 a mount that hangs would hold its lock for all stores.
        if self._kind_found is None:
            self._kind_found = mounts.file_system(self._folders.root)
        return self._kind_found

    # -- writing

    def prepare(self) -> None:
        """Nothing is to be found out: the file system is known."""

    def put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> None:
        """Write a file as the port says. If only the last flush of the folder fails, the new file is there already."""
        self._check_writable_key(key)
        if if_absent and if_match is not None:
            raise InvalidArgument("if_absent and if_match can't both hold")
        try:
            if if_absent or if_match is not None:
                claims.Exchange(self._folders, key, if_match, self._patience(), self.now).run(body)
            else:
                self._replace(key, body)
        finally:
            self._handles.drop(key)

    def _patience(self) -> claims.Patience:
        return claims.Patience(self._claim_age, self._claim_wait, self._sleep, mounts.coherent(self._kind))

    def _replace(self, key: str, body: Body) -> None:
        *parts, name = key.split("/")
        for _ in range(TRIES):
            with suppress(posix.FolderGone), self._folders.open(parts, make=True) as folder:
                _write(name, folder, body, self._shown(key))
                return
            self._folders.forget(parts)
        message = f"the folder of {self._shown(key)!r} is removed as often as it is made"
        raise StoreUnavailable(message, filename=self._shown(key))

    def delete(self, key: str) -> None:
        """Remove a file, durably, and the folders below the root that are empty then (on FUSE they stay)."""
        *parts, name = check_key(key).split("/")
        self._handles.drop(key)
        try:
            with self._folders.open(parts, flags=os.O_RDONLY) as folder:
                with suppress(FileNotFoundError), posix.failing("removing", self._shown(key)):
                    os.unlink(name, dir_fd=folder)
                posix.sync_folder(folder, self._shown(key))
        except KeyMissing:
            return
        if not mounts.is_fuse(self._kind):  # SeaweedFS removes a folder in which a file is just being made
            self._prune(parts)

    def _prune(self, parts: Sequence[str]) -> None:
        """Remove folders that are empty, from the inmost to below the root; the first that can't go ends it."""
        while parts:
            *parts, name = parts
            try:
                with self._folders.open(parts) as folder:
                    os.rmdir(name, dir_fd=folder)
            except OSError:
                return
            self._folders.forget([*parts, name])

    # -- reading

    def get(self, key: str, *, limit: int) -> Blob:
        """Read a whole small file; its version is the first half of its sha256."""
        fd = self._surely(lambda: self._open(check_key(key)))
        try:
            if not mounts.coherent(self._kind):
                posix.forget_pages(fd)
            data = posix.read_small(fd, limit, self._shown(key))
        finally:
            posix.close_quietly(fd)
        return Blob(data, version_of(data))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers from `offset` on. The file stays open until `close`, or a put or delete of its key."""
        with self._handles.borrow(check_key(key)) as fd:
            posix.read_at(fd, offset, buffers, self._shown(key))

    def map(self, key: str) -> memoryview:
        """A private map of a whole file: what is written to it stays in this process."""
        if not self.capabilities.mappable:
            message = f"{self._shown(key)!r} can't be mapped: {self.capabilities.why}"
            raise StoreError(message, filename=self._shown(key))
        fd = self._open(check_key(key))
        try:
            with posix.failing("mapping", self._shown(key)):
                if os.fstat(fd).st_size == 0:
                    return memoryview(bytearray())  # the system maps no empty file
                return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
        finally:
            posix.close_quietly(fd)

    def stat(self, key: str) -> Entry:
        """Size and time of one key. A link, a folder, a fifo or a device is there, but of the kind `other`."""
        return walk.entry(key, self._surely(lambda: self._lstat(check_key(key)), lambda: self._has_folder(key)))

    def _lstat(self, key: str) -> os.stat_result:
        *parts, name = key.split("/")
        with self._naming(key), self._folders.open(parts) as folder, posix.failing("looking at", self._shown(key)):
            return os.lstat(name, dir_fd=folder)

    def _has_folder(self, key: str) -> bool:
        """Whether there is a folder for a key. Nothing replaces folders: where there is none, nothing blinks."""
        try:
            with self._folders.open(key.split("/")[:-1]):
                return True
        except KeyMissing:
            return False

    def _surely(self, look: Callable[[], T], may_blink: Callable[[], bool] = lambda: True) -> T:
        """Look again before saying that something is missing, where a file may not be seen while it is replaced."""
        for seconds in _BLINKS if mounts.is_fuse(self._kind) else ():
            try:
                return look()
            except KeyMissing:
                if not may_blink():
                    raise
                self._sleep(seconds)
        return look()

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """All files whose key starts with `prefix`; an error in the midst of it is an error."""
        base = tuple(check_key(prefix.rpartition("/")[0]).split("/")) if "/" in prefix else ()
        found = ((walk.key_of(parts), info) for parts, info in walk.files(self._folders, base) if not _is_own(parts))
        return sorted(walk.entry(key, info) for key, info in found if key.startswith(prefix))

    def folders(self) -> Sequence[str]:
        """The folders directly below the root, but for the store's own; one scan, without a look at any of them."""
        try:
            with (
                self._folders.open([], flags=os.O_RDONLY) as fd,
                posix.failing("listing", self._folders.shown()),
                os.scandir(fd) as entries,
            ):
                found = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        except KeyMissing:
            return []
        return sorted(walk.key_of((name,)) for name in found if name != claims.FOLDER)

    def body(self, key: str) -> FileBody:
        """A file as a body for a put: a store on the same file system then shares its blocks, where that can be."""
        return FileBody(self._open(check_key(key)), self._shown(key))

    def appender(self, key: str) -> Appender:
        """A file, made if it is missing, to which bytes are appended. For logs of one writer, never for checkpoints."""
        self._check_writable_key(key)
        *parts, name = key.split("/")
        with self._folders.open(parts, make=True) as folder:
            return Appender(name, folder, self._shown(key))

    def _open(self, key: str) -> int:
        *parts, name = key.split("/")
        with self._naming(key), self._folders.open(parts) as folder:
            return posix.open_plain(name, folder, self._shown(key))

    @contextmanager
    def _naming(self, key: str) -> Iterator[None]:
        """What is missing is the key, whichever folder on the way to it is not there."""
        try:
            yield
        except KeyMissing:
            shown = self._shown(key)
            raise KeyMissing(f"{shown!r} does not exist", errno=errno.ENOENT, filename=shown) from None

    # -- the rest

    def now(self) -> float:
        """The clock of the file system, from a file made for that; where none can be made, that of this machine."""
        name = posix.temp_name("clock")
        try:
            with self._folders.open([]) as root:
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=root)
                try:
                    return os.fstat(fd).st_mtime
                finally:
                    posix.close_quietly(fd)
                    posix.remove_quietly(name, root)
        except OSError:
            return time.time()

    def close(self) -> None:
        """Close the files that were kept open for reading."""
        self._handles.drop()

    def unfinished(self) -> Sequence[Entry]:
        """Temporary files, of the living and the dead."""
        temps = ((walk.key_of(parts), info) for parts, info in walk.files(self._folders) if posix.is_temp(parts[-1]))
        found = (walk.entry(key, info) for key, info in temps)
        return sorted(each for each in found if each.kind == "file")

    def discard(self, key: str) -> None:
        """Remove a temporary file."""
        self.delete(key)

    def stale_temps(self, older_than: float = DAY) -> Sequence[Entry]:
        """Temporary files of dead writers: those not touched for `older_than` seconds, by the store's clock."""
        before = self.now() - older_than
        return [each for each in self.unfinished() if each.modified <= before]

    def remove_claims(self, older_than: float = DAY) -> None:
        """Remove the folders that conditional puts leave behind, where none was made for `older_than` seconds.

        Only for a root that is given up: while somebody may still put there, they keep the past from being repeated.
        """
        before = self.now() - older_than
        for folder in self._folders_in([claims.FOLDER]):
            for name in self._folders_in([claims.FOLDER, folder], before):
                self._prune([claims.FOLDER, folder, name])
        self._prune([claims.FOLDER])

    def give_up(self) -> None:
        """Remove the claims and all empty folders, the root included, as far as that can be. Nobody may write there.

        For a place whose files have been deleted; unlike `delete` on FUSE, too.
        """
        self.remove_claims(0.0)
        for folder in self._folders_in([]):
            self._prune([folder])
        with suppress(OSError):
            os.rmdir(self._folders.root)

    def _folders_in(self, parts: Sequence[str], before: float = float("inf")) -> Sequence[str]:
        """Names of the folders in a folder; none if one of its entries is newer than `before`."""
        shown = self._shown("/".join(parts))
        try:
            with (
                self._folders.open(parts, flags=os.O_RDONLY) as fd,
                posix.failing("listing", shown),
                os.scandir(fd) as entries,
            ):
                found = list(entries)
                young = any(each.stat(follow_symlinks=False).st_mtime > before for each in found)
                return [] if young else [each.name for each in found if each.is_dir(follow_symlinks=False)]
        except KeyMissing:
            return []

    def _check_writable_key(self, key: str) -> None:
        if _is_own(tuple(check_key(key).split("/"))):
            raise InvalidArgument(f"the file name {key!r} is reserved for temporary files and claims")

    def _shown(self, key: str) -> str:
        return self._below + key


def _is_own(parts: tuple[str, ...]) -> bool:
    """Whether a path belongs to the inner workings of this store, or of one whose root lies below."""
    return claims.FOLDER in parts or posix.is_temp(parts[-1])


def _write(name: str, folder: int, body: Body, shown: str) -> None:
    """Write a file anew, durably, and put it into the place of an old one at once."""
    temp = posix.temp_name(name)
    posix.write_synced(temp, folder, body, shown)
    try:
        posix.move_into_place(temp, name, folder, shown)
    except BaseException:
        posix.remove_quietly(temp, folder)
        raise
    posix.sync_folder(folder, shown)  # or the name might not survive a power loss
