"""Carries out read plans: each block once, on threads, verified as it arrives.

Long segments are read straight into their memory; short ones, gaps, headers and padding go through a buffer of one
block per thread and reach their memory only after the block's digest was found right.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardstore import address
from shardstore.errors import Damaged, StoreError
from shardstore.events import Reporter
from shardstore.hashing import DIGEST_BYTES, new
from shardstore.index import Index
from shardstore.plan import Segment
from shardstore.transfer.runs import DIRECT, Job, lanes_of
from shardstore.transfer.write import SLICE, in_lanes

Move: TypeAlias = tuple[int, int, int]
"""To which address, from which, how many bytes."""


@dataclass(slots=True)
class Outcome:
    """What a reader found: blocks by file number. `done` are read and, unless in `bad`, right."""

    done: dict[int, list[int]] = field(default_factory=dict)
    bad: dict[int, list[int]] = field(default_factory=dict)


class Reader:
    """Reads the jobs of one checkpoint. With `keep_going`, bad blocks are collected; else the first ends the work."""

    def __init__(
        self, index: Index, *, threads: int, reporter: Reporter, keep_going: bool = False,
        buffer: Callable[[int], memoryview] | None = None,
    ) -> None:  # fmt: skip
        self._index = index
        self._threads = threads
        self._reporter = reporter
        self._keep_going = keep_going
        self._new_buffer = buffer or _untouched
        self._digest_bytes = DIGEST_BYTES[index.hash]
        self._local = threading.local()
        self._lock = threading.Lock()
        self.outcome = Outcome()

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Carry out all jobs. Raises Damaged at the first bad block unless `keep_going`."""
        lanes = lanes_of(jobs, self._index.block, self._threads)
        in_lanes(self._read, lanes, self._threads)
        if sum(len(run) for lane in lanes for _, run in lane) != sum(len(job.blocks) for job in jobs):
            raise StoreError("not all blocks that were wanted were read")  # memory of the others is not what was saved
        return self.outcome

    def _read(self, unit: tuple[Job, range]) -> None:
        """Read neighbouring blocks by one call; then check each, and move what is small to its place."""
        job, run = unit
        begin = run.start * self._index.block
        size = min(len(run) * self._index.block, job.entry.nbytes - begin)
        scratch, base = self._scratch(size)
        layouts = []
        for number in run:
            at = (number - run.start) * self._index.block
            length = min(self._index.block, size - at)
            layouts.append(self._layout(job, begin + at, scratch[at : at + length], base + at))
        with self._lock:
            self.outcome.done.setdefault(job.file, []).extend(run)
        if job.store.capabilities.mappable:  # a call costs little there
            begins = range(begin, begin + size, self._index.block)
            digests = [self._read_hashed(job, at, buffers) for at, (buffers, _) in zip(begins, layouts, strict=True)]
        else:
            job.store.read_into(job.entry.path, begin, [buffer for buffers, _ in layouts for buffer in buffers])
            digests = [self._hash(buffers) for buffers, _ in layouts]
        for number, (_, moves), digest in zip(run, layouts, digests, strict=True):
            self._check(job, number, digest, moves)
        self._reporter.moved(size)

    def _read_hashed(self, job: Job, begin: int, buffers: Sequence[memoryview]) -> bytes:
        """Read a block in slices, each hashed while it is in the processor's cache; returns the digest."""
        state = new(self._index.hash)
        for group, size in _slices(buffers):
            job.store.read_into(job.entry.path, begin, group)
            for buffer in group:
                state.update(buffer)
            begin += size
        return state.digest()

    def _check(self, job: Job, number: int, digest: bytes, moves: Sequence[Move]) -> None:
        if digest != job.entry.block_digest(number, self._digest_bytes):
            self._report(job, number)
            return
        for to, source, nbytes in moves:
            address.move(to, source, nbytes)

    def _hash(self, buffers: Sequence[memoryview]) -> bytes:
        state = new(self._index.hash)
        for buffer in buffers:
            state.update(buffer)
        return state.digest()

    def _layout(self, job: Job, begin: int, scratch: memoryview, base: int) -> tuple[list[memoryview], list[Move]]:
        """The buffers that a block is read into, and the moves that follow when it is right.

        `scratch`, at address `base`, has the block's size and takes what is not read straight into its place.
        """
        size = len(scratch)
        buffers: list[memoryview] = []
        moves: list[Move] = []
        at = 0  # up to here buffers cover the block
        for offset, to, nbytes in _within(job.segments, begin, size):
            if nbytes < DIRECT:
                moves.append((to, base + offset, nbytes))
                continue
            if offset > at:
                buffers.append(scratch[at:offset])
            buffers.append(address.view(to, nbytes))
            at = offset + nbytes
        if at < size:
            buffers.append(scratch[at:size])
        return buffers, moves

    def _scratch(self, size: int) -> tuple[memoryview, int]:
        """This thread's buffer, and its address."""
        found: tuple[memoryview, int] | None = getattr(self._local, "scratch", None)
        if found is None or len(found[0]) < size:
            buffer = self._new_buffer(size)
            found = self._local.scratch = (buffer, address.of(buffer))
        return found

    def _report(self, job: Job, number: int) -> None:
        with self._lock:
            self.outcome.bad.setdefault(job.file, []).append(number)
        if not self._keep_going:
            raise damaged(self._index, job.file, [number])


def _untouched(nbytes: int) -> memoryview:
    """A buffer that takes room only where it is written to: most of a block goes past it."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _slices(buffers: Sequence[memoryview]) -> Iterator[tuple[list[memoryview], int]]:
    """The buffers in groups of at most SLICE bytes, and how many bytes each has; long ones are cut."""
    group: list[memoryview] = []
    filled = 0
    for buffer in buffers:
        at, end = 0, len(buffer)
        while at < end:
            size = min(SLICE - filled, end - at)
            group.append(buffer[at : at + size])
            at += size
            filled += size
            if filled == SLICE:
                yield group, filled
                group, filled = [], 0
    if group:
        yield group, filled


def _within(segments: Sequence[Segment], begin: int, size: int) -> Iterator[Segment]:
    """The parts of sorted segments that lie in a block, with offsets from its start."""
    end = begin + size
    first = bisect_right(segments, (begin, -1, -1))
    if first and segments[first - 1][0] + segments[first - 1][2] > begin:
        first -= 1
    for number in range(first, len(segments)):
        offset, to, nbytes = segments[number]
        if offset >= end:
            return
        low, high = max(offset, begin), min(offset + nbytes, end)
        yield low - begin, to + low - offset, high - low


def damaged(index: Index, file: int, blocks: Sequence[int]) -> Damaged:
    """The error for bad blocks of a file, with the tensors that lie in them."""
    entry = index.files[file]
    tensors = index.tensors_in(file, blocks)
    where = f"block {blocks[0]}" if len(blocks) == 1 else f"blocks {', '.join(map(str, blocks[:8]))}"
    what = _some(tensors) if tensors else "the structure" if file == index.meta else "the header only"
    return Damaged(
        f"{entry.path} is damaged in {where} (of 4 MiB, from 0): {what}",
        file=entry.path, blocks=tuple(blocks), tensors=tuple(tensors),
    )  # fmt: skip


def _some(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
