"""An opened checkpoint: its store, index and structure, and the reading of its blocks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from shardstore import header, tree
from shardstore.check import default_threads, find_index, need_index
from shardstore.errors import Damaged, InvalidArgument, KeyMissing, Superseded
from shardstore.events import Listener, Reporter, to_log
from shardstore.index import NAME, Index
from shardstore.plan import FileRead
from shardstore.storage import Store, open_store
from shardstore.transfer import Job, Outcome, Reader


class Missing(Damaged, FileNotFoundError):
    """A file that the index names is not there."""


class Source:
    """One checkpoint, opened for reading."""

    def __init__(
        self, url: str | os.PathLike[str], *, expect: str | None = None, threads: int | None = None,
        listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if threads is not None and (type(threads) is not int or threads < 1):
            raise InvalidArgument(f"threads must be a whole number above 0, not {threads!r}")
        self.threads = threads or default_threads()
        self.store: Store = open_store(url, storage_options=storage_options, listener=listener)
        try:
            found = need_index(self.store)
            self.index: Index = found.index
            _authenticate(found.data, self.index, expect)
            self.reporter = Reporter("load", self.store.url, listener or to_log)
            self.meta = tree.parse_meta(self._read_meta(), count=len(self.index.paths), file=self._meta_path)
            if self.meta.attempt != self.index.attempt:
                raise Damaged(f"{self._meta_path} belongs to another checkpoint", file=self._meta_path)
        except BaseException:
            self.store.close()
            raise

    @property
    def _meta_path(self) -> str:
        return self.index.files[self.index.meta].path

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

    def check_present(self, files: Iterable[int]) -> None:
        """That files are there with their sizes, before anything is touched. Raises as `read` does."""
        for file in files:
            entry = self.index.files[file]
            try:
                found = self.store.stat(entry.path)
            except KeyMissing as error:
                raise self._gone(error, file) from error
            if found.kind != "file" or found.nbytes != entry.nbytes:
                raise self._wrong_size(file, found.nbytes, found.kind)

    def _job(self, read: FileRead) -> Job:
        entry = self.index.files[read.file]
        return Job(self.store, read.file, entry, read.blocks(self.index.block), read.segments)

    def _wrong_size(self, file: int, nbytes: int, kind: str) -> Damaged:
        entry = self.index.files[file]
        if kind != "file":
            return Damaged(f"{entry.path} is no plain file", file=entry.path, tensors=self._tensors(file))
        first = memoryview(bytearray(min(nbytes, 64)))
        if nbytes:
            self.store.read_into(entry.path, 0, [first])
        return Damaged(
            f"{entry.path} has {nbytes} bytes, {entry.nbytes} were saved{header.looks_like(first)}",
            file=entry.path, tensors=self._tensors(file),
        )  # fmt: skip

    def _gone(self, error: KeyMissing, file: int | None = None) -> Damaged | Superseded:
        found = find_index(self.store)
        if found is None or found.index.attempt != self.index.attempt:
            return Superseded(f"{self.store.url} was replaced while it was read: load it again")
        path = self.index.files[file].path if file is not None else str(error.filename)
        tensors = self._tensors(file) if file is not None else ()
        return Missing(f"{path} is missing from {self.store.url}, though {NAME} names it", file=path, tensors=tensors)

    def _tensors(self, file: int) -> tuple[str, ...]:
        return tuple(self.index.paths[tensor] for tensor in self.index.files[file].pieces)

    def close(self) -> None:
        """Give back the store's handles."""
        self.store.close()


def _authenticate(data: bytes, index: Index, expect: str | None) -> None:
    if expect is None:
        return
    if index.hash != "sha256":
        raise InvalidArgument(
            f"expect= proves nothing for a checkpoint with {index.hash} digests: save with hash='sha256' for that"
        )
    if sha256(data).hexdigest() != expect.strip().lower():
        raise Damaged(f"{NAME} is not the one that was expected: its sha256 is {sha256(data).hexdigest()}", file=NAME)


__all__ = ["Missing", "Outcome", "Source"]
