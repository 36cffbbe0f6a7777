"""Which of the ranks that hold the same bytes writes them: pure, and the same on every rank without a word."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, MutableSequence
from typing import NamedTuple

TINY = 64 * 1024
"""Bytes below which replicas stay together in one file, so that a load need not open all of them."""


class Replica(NamedTuple):
    """Bytes that several ranks hold. `number`: the tensor's; `holders`: ranks, ascending."""

    number: int
    nbytes: int
    holders: tuple[int, ...]


def share_out(replicas: Iterable[Replica], loads: MutableSequence[int] | None = None) -> dict[int, int]:
    """Number of a tensor -> the rank that writes it: the largest first, always to the holder that has least to write.

    `loads`: bytes that each rank writes already; what is dealt is added. Without it, the same holders deal among
    themselves, so that it doesn't matter what else a rank knows of. Tiny ones of the same holders go together.
    """
    groups: dict[tuple[int, ...], list[Replica]] = {}
    for replica in replicas:
        groups.setdefault(replica.holders, []).append(replica)
    owners: dict[int, int] = {}
    for holders in sorted(groups):
        _deal(groups[holders], holders, [0] * (holders[-1] + 1) if loads is None else loads, owners)
    return owners


def _deal(group: list[Replica], holders: tuple[int, ...], loads: MutableSequence[int], owners: dict[int, int]) -> None:
    heap = [(loads[rank], rank) for rank in holders]
    heapq.heapify(heap)
    for replica in sorted(group, key=lambda replica: (-replica.nbytes, replica.number)):
        if replica.nbytes < TINY:
            continue
        load, rank = heap[0]
        owners[replica.number] = rank
        heapq.heapreplace(heap, (load + replica.nbytes, rank))
    load, home = heap[0]
    tiny = [replica for replica in group if replica.nbytes < TINY]
    owners.update((replica.number, home) for replica in tiny)
    for load, rank in heap:
        loads[rank] = load
    loads[home] += sum(replica.nbytes for replica in tiny)
