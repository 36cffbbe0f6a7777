"""A store on any fsspec file system, within what all of them have: whole files, ranges, listings.

Nothing here is exclusive, so a checkpoint is committed only on the caller's word that nobody else writes there.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from shardstore.errors import InvalidArgument, KeyMissing, StoreError, StoreUnavailable
from shardstore.storage.port import Blob, Body, Capabilities, Entry, check_key
from shardstore.storage.posix import exact, too_large


class FsspecStore:
    """Files below a URL of any fsspec file system. `options` are those of the file system."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import fsspec.core

        self.url = url
        fresh = {"skip_instance_cache": True, "use_listings_cache": False}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **{**fresh, **options})
        except (ImportError, ValueError, TypeError) as error:
            raise InvalidArgument(f"{url!r} can't be opened: {error}") from error
        self._root = root.rstrip("/")

    @property
    def capabilities(self) -> Capabilities:
        """No promise but that a put that returned can be read."""
        why = f"fsspec does not say what {self._fs.protocol} promises"
        return Capabilities(exclusive=False, durable=False, mappable=False, why=why)

    def prepare(self) -> None:
        """Nothing can be found out."""

    def put(self, key: str, body: Body, *, if_absent: bool = False, if_match: str | None = None) -> None:
        """Write a file. A file that breaks off may be seen, cut; conditions are refused."""
        path = self._path(key)
        if if_absent or if_match is not None:
            raise InvalidArgument(
                f"{self.url} has no conditional put: say single_writer=True if nobody else writes there"
            )
        with self._failing(f"writing {body.nbytes} bytes to", path):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._fs.open(path, "wb") as file:
                    for buffer in exact(body, path):
                        file.write(buffer)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(path)
                raise

    def get(self, key: str, *, limit: int) -> Blob:
        """Read a small file; its version is the first half of its sha256."""
        from shardstore.storage.content import version_of

        path = self._path(key)
        entry = self.stat(key)
        if entry.nbytes > limit:
            raise too_large(path, entry.nbytes, limit)
        with self._failing("reading", path):
            data = bytes(self._fs.cat_file(path)) if entry.nbytes else b""
        return Blob(data, version_of(data))

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers by one range."""
        path = self._path(key)
        total = sum(buffer.nbytes for buffer in buffers)
        if offset < 0 or any(buffer.readonly for buffer in buffers):
            raise InvalidArgument(f"{path!r} can't be read into these buffers from {offset} on")
        if not total:
            return  # some file systems take an empty range for the whole file
        with self._failing("reading", path):
            data = memoryview(self._fs.cat_file(path, start=offset, end=offset + total))
        if len(data) != total:
            raise StoreError(
                f"{path!r}: {total} bytes from {offset} on were asked for, {len(data)} came", filename=path
            )
        at = 0
        for buffer in buffers:
            buffer.cast("B")[:] = data[at : at + buffer.nbytes]
            at += buffer.nbytes

    def map(self, key: str) -> memoryview:
        """Files of fsspec can't be mapped."""
        raise StoreError(f"{self._path(key)!r} can't be mapped: {self.capabilities.why}")

    def stat(self, key: str) -> Entry:
        """Size and time of one file."""
        path = self._path(key)
        with self._failing("looking at", path):
            return _entry(key, self._fs.info(path))

    def list(self, prefix: str = "") -> Sequence[Entry]:
        """Every file whose key starts with `prefix`."""
        with self._failing("listing", self._root):
            try:
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return []
        start = len(self._root) + 1
        entries = (_entry(path[start:], info) for path, info in found.items() if path.startswith(self._root + "/"))
        return sorted(entry for entry in entries if entry.key.startswith(prefix))

    def folders(self) -> Sequence[str]:
        """The folders below the root, where the file system has such; what an object store shows as them, elsewhere."""
        with self._failing("listing", self._root):
            try:
                found = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        paths = (each["name"].rstrip("/") for each in found if each["type"] == "directory")
        return sorted(path.rpartition("/")[2] for path in paths if path != self._root)

    def delete(self, key: str) -> None:
        """Remove one file; nothing of that name is fine."""
        path = self._path(key)
        with contextlib.suppress(KeyMissing), self._failing("removing", path):
            self._fs.rm_file(path)

    def unfinished(self) -> Sequence[Entry]:
        """Fsspec does not say."""
        return ()

    def discard(self, key: str) -> None:
        """Nothing is shown as unfinished."""

    def now(self) -> float:
        """The clock of this machine: fsspec knows no other."""
        return time.time()

    def close(self) -> None:
        """Nothing is kept open."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextmanager
    def _failing(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, InvalidArgument):
            raise
        except FileNotFoundError as error:
            raise KeyMissing(f"{path!r} does not exist", errno=errno.ENOENT, filename=path) from error
        except PermissionError as error:
            raise StoreError(
                f"{doing} {path!r} failed: permission is denied", errno=error.errno, filename=path
            ) from error
        except Exception as error:  # every file system raises errors of its own
            raise StoreUnavailable(f"{doing} {path!r} failed: {error}", filename=path) from error


_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def _entry(key: str, info: Mapping[str, Any]) -> Entry:
    when: Any = next((info[name] for name in _TIMES if name in info), None)
    if hasattr(when, "timestamp"):
        seconds = float(when.timestamp())
    else:  # what has no time never counts as old
        seconds = float(when) if isinstance(when, (int, float)) else time.time()
    return Entry(key, int(info.get("size") or 0), seconds, "file" if info.get("type") == "file" else "other")
