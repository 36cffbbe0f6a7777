"""An opened checkpoint: its store, index and structure, and the reading of its blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

from shardstore import header, tree
from shardstore.check import find_index, need_roots, threads_of
from shardstore.errors import Damaged, InvalidArgument, KeyMissing, Superseded
from shardstore.events import Listener, Reporter, to_log
from shardstore.index import NAME, Index
from shardstore.plan import FileRead
from shardstore.run import resolve
from shardstore.storage import Entry, LocalStore, Store, Urls, close_all, open_roots, unwrap
from shardstore.transfer import Job, Outcome, Reader, in_parallel

_LATE = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Seconds between looks: an index that is there was written after its files, so they are there, too."""


class Missing(Damaged, FileNotFoundError):
    """A file that the index names is not there."""


class Source:
    """One checkpoint, opened for reading."""

    def __init__(
        self, url: Urls, *, expect: str | None = None, threads: int | None = None,
        listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        threads_of(threads)
        self._present: set[int] = set()
        if isinstance(url, str) and "@" in url:
            url = resolve(url, storage_options=storage_options, listener=listener)
        self.stores: Sequence[Store] = open_roots(url, storage_options=storage_options, listener=listener)
        try:
            self.stores, found = need_roots(self.stores)
            self.url = self.stores[0].url
            self.threads = threads_of(threads, self.stores)
            self.index: Index = found.index
            _authenticate(found.data, self.index, expect)
            self.reporter = Reporter("load", self.url, to_log if listener is None else listener)
            self.meta = tree.parse_meta(self._read_meta(), count=len(self.index.paths), file=self.meta_path)
            if self.meta.attempt != self.index.attempt:
                raise Damaged(f"{self.meta_path} belongs to another checkpoint", file=self.meta_path)
        except BaseException:
            self.close()
            raise

    def store(self, file: int) -> Store:
        """The store in which a file lies."""
        return self.stores[self.index.files[file].root]

    @property
    def meta_path(self) -> str:
        """The file with the structure."""
        return self.index.files[self.index.meta].path

    @contextlib.contextmanager
    def structuring(self) -> Iterator[None]:
        """While the structure is used: what is wrong with it is blamed on its file."""
        try:
            yield
        except Damaged as error:
            if error.file != "meta":
                raise
            raise Damaged(f"{self.meta_path}: {error}", file=self.meta_path) from None

    def _read_meta(self) -> memoryview:
        entry = self.index.files[self.index.meta]
        self.check_present([self.index.meta])
        data = memoryview(bytearray(entry.nbytes))
        if entry.nbytes:
            from shardstore import address

            self.read([FileRead(self.index.meta, [(0, address.of(data), len(data))])])
        return data

    def read(self, reads: Sequence[FileRead], buffer: Callable[[int], memoryview] | None = None) -> None:
        """Carry out reads. Raises Damaged, or Superseded where the checkpoint was replaced meanwhile."""
        reader = Reader(self.index, threads=self.threads, reporter=self.reporter, buffer=buffer)
        jobs = [self._job(read) for read in reads]
        try:
            reader.run(jobs)
        except KeyMissing as error:
            raise self._gone(error) from error
        except Damaged as error:
            error.outcome = reader.outcome  # type: ignore[attr-defined]
            raise

    def check_headers(self, numbers: Collection[int]) -> None:
        """Verify the blocks without tensor bytes of the files of which all tensors, by number, are loaded.

        A whole load finds a wrong bit in any byte, be it one that only other tools read.
        """
        reads = []
        for file, entry in enumerate(self.index.files):
            if entry.start is None:
                continue
            bare = entry.start if entry.nbytes > entry.start else entry.start + self.index.block - 1
            if bare >= self.index.block and set(numbers).issuperset(entry.pieces):
                reads.append(FileRead(file, before=bare // self.index.block))
        if reads:
            self.check_present(read.file for read in reads)
            self.read(reads)

    def check_present(self, files: Iterable[int]) -> None:
        """That files are there with their sizes, before anything is touched. Raises as `read` does."""
        numbers = [file for file in files if file not in self._present]
        # Where each look is a request, many are sent at once.
        in_parallel(self._check_one, numbers, self.threads if self.stores[0].capabilities.connections else 1)

    def _stat(self, file: int) -> Entry:
        """Look at a file that the index names, for some seconds where another machine's files may be seen late."""
        store, path = self.store(file), self.index.files[file].path
        shared = isinstance(unwrap(store), LocalStore) and not store.capabilities.mappable
        for seconds in _LATE if shared else ():
            try:
                return store.stat(path)
            except KeyMissing as error:
                if isinstance(self._gone(error, file), Superseded):
                    raise
                time.sleep(seconds)
        return store.stat(path)

    def _check_one(self, file: int) -> None:
        entry = self.index.files[file]
        try:
            found = self._stat(file)
        except KeyMissing as error:
            raise self._gone(error, file) from error
        if found.kind != "file" or found.nbytes != entry.nbytes:
            raise self._wrong_size(file, found.nbytes, found.kind)
        if self.store(file).capabilities.connections:
            self._present.add(file)  # where each look is a request, one is enough

    def _job(self, read: FileRead) -> Job:
        entry = self.index.files[read.file]
        return Job(self.store(read.file), read.file, entry, read.blocks(self.index.block), read.segments)

    def _wrong_size(self, file: int, nbytes: int, kind: str) -> Damaged:
        entry = self.index.files[file]
        if kind != "file":
            return Damaged(f"{entry.path} is no plain file", file=entry.path, tensors=self._tensors(file))
        first = memoryview(bytearray(min(nbytes, 64)))
        if nbytes:
            self.store(file).read_into(entry.path, 0, [first])
        return Damaged(
            f"{entry.path} has {nbytes} bytes, {entry.nbytes} were saved{header.looks_like(first)}",
            file=entry.path, tensors=self._tensors(file),
        )  # fmt: skip

    def _gone(self, error: KeyMissing, file: int | None = None) -> Damaged | Superseded:
        found = find_index(self.stores[0])
        path = self.index.files[file].path if file is not None else str(error.filename)
        named = found is not None and (file is None or any(entry.path == path for entry in found.index.files))
        if found is None or found.index.attempt != self.index.attempt or not named:  # the last after a migration
            return Superseded(f"{self.url} was replaced while it was read: load it again")
        tensors = self._tensors(file) if file is not None else ()
        return Missing(f"{path} is missing from {self.url}, though {NAME} names it", file=path, tensors=tensors)

    def _tensors(self, file: int) -> tuple[str, ...]:
        return tuple(self.index.paths[tensor] for tensor in self.index.files[file].pieces)

    def close(self) -> None:
        """Give back the stores' handles."""
        close_all(self.stores)


def _authenticate(data: bytes, index: Index, expect: str | None) -> None:
    if expect is None:
        return
    if index.hash != "sha256":
        raise InvalidArgument(
            f"expect= proves nothing for a checkpoint with {index.hash} digests: save with hash='sha256' for that"
        )
    if type(expect) is not str or sha256(data).hexdigest() != expect.strip().lower():
        raise Damaged(f"{NAME} is not the one that was expected: its sha256 is {sha256(data).hexdigest()}", file=NAME)


__all__ = ["Missing", "Outcome", "Source"]
