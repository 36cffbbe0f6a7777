"""Bodies that are hashed while they are written, and the threads that write many of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shardstore.errors import StoreError
from shardstore.events import Reporter
from shardstore.hashing import BlockHasher
from shardstore.specs import BLOCK
from shardstore.storage.port import Store

SLICE = 1024 * 1024
"""Bytes hashed and then written while they are still in the processor's cache."""

T = TypeVar("T")
R = TypeVar("R")


class HashedBody:
    """A file's bytes, given by `chunks` anew at each try; hashed in the same memory that is then written.

    `digest` and `blocks` are those of the last complete pass.
    """

    def __init__(
        self,
        nbytes: int,
        chunks: Callable[[], Iterable[memoryview]],
        algorithm: str,
        reporter: Reporter | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.digest = b""
        self.blocks = b""
        self._chunks = chunks
        self._algorithm = algorithm
        self._reporter = reporter

    def __iter__(self) -> Iterator[memoryview]:
        hasher = BlockHasher(self._algorithm, BLOCK)
        at = 0
        for chunk in self._chunks():
            done = 0
            while done < len(chunk):
                size = min(SLICE, BLOCK - at % BLOCK)
                part = chunk[done : done + size]
                hasher.update(part)
                yield part
                done += len(part)
                at += len(part)
            if self._reporter:
                self._reporter.moved(len(chunk))
        if at != self.nbytes:
            raise StoreError(f"{self.nbytes} bytes were to be written, {at} came")
        self.digest, blocks = hasher.finish()
        self.blocks = b"".join(blocks)


def put_all(store: Store, bodies: Sequence[tuple[str, HashedBody]], threads: int) -> None:
    """Write every body under its key, the largest first. The first error stops what has not begun, and is raised."""

    def put(item: tuple[str, HashedBody]) -> None:
        store.put(item[0], item[1])

    in_parallel(put, sorted(bodies, key=lambda item: -item[1].nbytes), threads)


def in_parallel(work: Callable[[T], R], items: Sequence[T], threads: int) -> None:
    """Do `work` for every item, on this thread alone or on `threads` of them; returns when all have ended.

    After the first error no further item is begun; that error is raised.
    """
    if threads == 1 or len(items) <= 1:
        for item in items:
            work(item)
        return
    failed = threading.Event()
    source = iter(items)
    lock = threading.Lock()

    def drain() -> None:
        while not failed.is_set():
            with lock:
                item = next(source, failed)
            if item is failed:
                return
            try:
                work(item)  # type: ignore[arg-type]
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(min(threads, len(items)), "shardstore") as pool:
        futures = [pool.submit(drain) for _ in range(min(threads, len(items)))]
        try:
            errors = [future.exception() for future in futures]
        except BaseException:  # an interrupt: let the workers end before memory is given back
            failed.set()
            raise
    for error in errors:
        if error is not None:
            raise error
