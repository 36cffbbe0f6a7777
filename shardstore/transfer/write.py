"""Bodies that are hashed while they are written, and the threads that write many of them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from shardstore.errors import StoreError
from shardstore.events import Reporter
from shardstore.hashing import BlockHasher
from shardstore.specs import BLOCK
from shardstore.storage.port import Store

SLICE = 1024 * 1024
"""Bytes hashed and then written while they are still in the processor's cache."""

T = TypeVar("T")


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
            done = told = 0
            while done < len(chunk):
                size = min(SLICE, BLOCK - at % BLOCK)
                part = chunk[done : done + size]
                hasher.update(part)
                yield part
                done += len(part)
                at += len(part)
                if self._reporter and (at % BLOCK == 0 or done == len(chunk)):
                    self._reporter.moved(done - told)
                    told = done
        if at != self.nbytes:
            raise StoreError(f"{self.nbytes} bytes were to be written, {at} came")
        self.digest, blocks = hasher.finish()
        self.blocks = b"".join(blocks)


def put_all(files: Sequence[tuple[Store, str, HashedBody]], threads: int) -> None:
    """Write every body under its key, the largest first. The first error stops what has not begun, and is raised."""

    def put(file: tuple[Store, str, HashedBody]) -> None:
        store, key, body = file
        store.put(key, body)

    in_parallel(put, sorted(files, key=lambda file: -file[2].nbytes), threads)


def in_parallel(work: Callable[[T], object], items: Sequence[T], threads: int) -> None:
    """Do `work` for every item, on this thread alone or on `threads` of them; returns when all have ended.

    After the first error no further item is begun; that error is raised.
    """
    in_lanes(work, [[item] for item in items], threads)


def in_lanes(work: Callable[[T], object], lanes: Sequence[Sequence[T]], threads: int) -> None:
    """As `in_parallel`; what stands in one lane is done by one thread, in order."""
    if threads == 1 or len(lanes) <= 1:
        for lane in lanes:
            for item in lane:
                work(item)
        return
    crew = _Crew(work, lanes)
    # Plain threads: a pool takes no work any more once the main thread has ended, but a save may still run then.
    workers = [threading.Thread(target=crew.drain, name="shardstore") for _ in range(min(threads, len(lanes)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException:  # an interrupt: let the workers end before memory is given back
        crew.stop()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
        raise
    if crew.errors:
        raise crew.errors[0]


class _Crew(Generic[T]):
    """Threads that share lanes of items."""

    def __init__(self, work: Callable[[T], object], lanes: Sequence[Sequence[T]]) -> None:
        self.errors: list[BaseException] = []
        self._work = work
        self._waiting = collections.deque(lanes)
        self._stopped = threading.Event()  # not cleared lanes: some are under way

    def stop(self) -> None:
        """Let nothing more begin."""
        self._stopped.set()

    def drain(self) -> None:
        """Work until nothing is left, or something went wrong."""
        try:
            while not self._stopped.is_set():
                for item in self._waiting.popleft():
                    if self._stopped.is_set():
                        return
                    self._do(item)
        except IndexError:  # no lane is left
            return

    def _do(self, item: T) -> None:
        try:
            self._work(item)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            self.errors.append(error)
            self.stop()
