"""How blocks are put together for one call of a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest

from shardstore.index import FileEntry
from shardstore.storage import Capabilities
from shardstore.transfer import Job
from shardstore.transfer.runs import lanes_of, runs_of
from shardstore.transfer.write import in_lanes

BLOCK = 1 << 22
REMOTE = Capabilities(exclusive=True, durable=True, mappable=False, read_bytes=2 * BLOCK, longest_read=8 * BLOCK)
LOCAL = Capabilities(exclusive=True, durable=True, mappable=True)


def job(blocks: Sequence[int], able: Capabilities = REMOTE, segments: Any = None, file: int = 0) -> Job:
    """Blocks of a file, by default with one segment over all of them."""
    segments = [(0, 0, 10_000 * BLOCK)] if segments is None else segments
    return Job(mock.Mock(capabilities=able), file, mock.Mock(spec=FileEntry), blocks, segments)


def sizes(*jobs: Job, threads: int = 4) -> list[int]:
    """The lengths of the runs, all of which are checked to give each block once, in order, and to have no gap."""
    found = list(runs_of(jobs, BLOCK, threads))
    assert [(one.file, number) for one, run in found for number in run] == [(j.file, n) for j in jobs for n in j.blocks]
    return [len(run) for _, run in found]


def test_runs_are_long_while_much_is_left_and_short_at_the_end():
    """So that few requests are made, and threads end together."""
    found = sizes(job(range(100)))
    assert found[0] == 8
    assert found == sorted(found, reverse=True)
    assert set(found[-4:]) <= {1, 2}
    assert len(found) < 100 // 2


def test_a_small_load_uses_all_threads():
    """One request for all of it would leave the other threads without work."""
    assert sizes(job(range(8))) == [2] * 4
    assert sizes(job(range(20)))[:2] == [5, 3]


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_what_is_left_counts_over_all_files(threads: int):
    """Many files are one load; a run never goes from one into the next."""
    found = sizes(*(job(range(10), file=file) for file in range(20)), threads=threads)
    assert found[0] == 8
    assert max(found) <= 8


def test_runs_end_at_gaps():
    """Only neighbours are fetched together."""
    assert sizes(job([0, 1, 2, 7, 8, 20])) == [2, 1, 2, 1]
    assert sizes(job([])) == []


def test_local_files_are_read_by_blocks():
    """A call costs nothing there."""
    assert sizes(job(range(50), LOCAL)) == [1] * 50


def test_runs_without_places_are_short():
    """What goes through a buffer, since its segments are small or none: the buffer stays as small as it was."""
    small = [(at, at, 1 << 15) for at in range(0, 100 * BLOCK, 1 << 15)]
    for segments in ([], small):
        assert set(sizes(job(range(100), segments=segments))) == {2}


def test_a_few_small_tensors_among_large_ones():
    """A run takes them along as long as its buffer stays small."""
    bare = 10, 11, 12, 40
    segments = [(number * BLOCK, 0, BLOCK) for number in range(100) if number not in bare]
    found = list(runs_of([job(range(100), segments=segments)], BLOCK, 4))
    assert max(len(run) for _, run in found) == 8
    assert all(len(set(run) & set(bare)) <= 2 for _, run in found)


def test_a_file_has_one_thread_where_that_is_fastest():
    """A program behind FUSE reads ahead for one reader: a file is one lane there, in order; elsewhere each run is."""
    fuse = Capabilities(exclusive=True, durable=False, mappable=False, sequential=True)
    for able, lanes in ((fuse, [[0, 1, 2, 5], [0, 1]]), (LOCAL, [[0], [1], [2], [5], [0], [1]])):
        jobs = [job([0, 1, 2, 5], able), job([0, 1], able, file=1)]
        found = lanes_of(jobs, BLOCK, 2)
        assert [[number for _, run in lane for number in run] for lane in found] == lanes
        assert all(len({one.file for one, _ in lane}) == 1 for lane in found)


def test_an_error_ends_lanes():
    """Nothing more begins in any lane, and the error comes out."""
    began: list[int] = []
    both = threading.Barrier(2)
    threads = threading.active_count()

    def work(item: int) -> None:
        began.append(item)
        both.wait(30)
        if item == 10:
            raise ZeroDivisionError
        while threading.active_count() > threads + 1:  # until the thread of the other lane has ended
            pass

    with pytest.raises(ZeroDivisionError):
        in_lanes(work, [[0, 1, 2], [10, 11], [20]], 2)
    assert sorted(began) == [0, 10]
