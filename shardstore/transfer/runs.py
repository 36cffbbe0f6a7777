"""Which neighbouring blocks one call of a store fetches: pure.

Where a call is a request, long ones cost less of both ends. The last of a load are short, so that all threads end
together; and short are those whose bytes need a buffer, so that it stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardstore.index import FileEntry
from shardstore.plan import Segment
from shardstore.storage.port import Store

DIRECT = 64 * 1024
"""Segments of at least so many bytes in a block are read without a detour."""


@dataclass(frozen=True, slots=True)
class Job:
    """Blocks of one file, in order, and the segments that they fill."""

    store: Store
    file: int
    entry: FileEntry
    blocks: Sequence[int]
    segments: Sequence[Segment] = ()


def lanes_of(jobs: Sequence[Job], block: int, threads: int) -> list[list[tuple[Job, range]]]:
    """The runs of all jobs: those of a file together where its store wants one thread for it, else each for itself."""
    lanes: list[list[tuple[Job, range]]] = []
    last: Job | None = None
    for job, run in runs_of(jobs, block, threads):
        if job is last and job.store.capabilities.sequential:
            lanes[-1].append((job, run))
        else:
            lanes.append([(job, run)])
        last = job
    return lanes


def runs_of(jobs: Sequence[Job], block: int, threads: int) -> Iterator[tuple[Job, range]]:
    """All blocks of all jobs, in runs of neighbours.

    A run has at least as many blocks as the store's `read_bytes`; more, up to its `longest_read`, as long as every
    thread would get as much of what is left, and as no more than `read_bytes` of it lack a place of their own.
    """
    left = sum(len(job.blocks) for job in jobs)
    for job in jobs:
        able = job.store.capabilities
        least, most = (max(1, nbytes // block) for nbytes in (able.read_bytes, able.longest_read))
        placed = _placed(job, block) if most > least else {}
        at = 0
        while at < len(job.blocks):
            size = max(least, min(most, left // threads))
            end = _end(job.blocks, at, size, least, placed, block)
            yield job, range(job.blocks[at], job.blocks[end - 1] + 1)
            left -= end - at
            at = end


def _end(blocks: Sequence[int], at: int, size: int, least: int, placed: dict[int, int], block: int) -> int:
    """Where the run that begins at `at` ends."""
    homeless = 0
    for end in range(at + 1, min(at + size, len(blocks))):
        homeless += block - placed.get(blocks[end - 1], 0)
        within = end - at < least or homeless + block - placed.get(blocks[end], 0) <= least * block
        if blocks[end] != blocks[end - 1] + 1 or not within:
            return end
    return min(at + size, len(blocks))


def _placed(job: Job, block: int) -> dict[int, int]:
    """By block, how many of its bytes are read straight into their place."""
    placed: dict[int, int] = {}
    for offset, _, nbytes in job.segments:
        for number in range(offset // block, (offset + nbytes - 1) // block + 1) if nbytes >= DIRECT else ():
            size = min(offset + nbytes, (number + 1) * block) - max(offset, number * block)
            if size >= DIRECT:
                placed[number] = placed.get(number, 0) + size
    return placed
