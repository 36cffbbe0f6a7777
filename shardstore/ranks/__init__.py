"""The ranks that save or load together, over nothing or over torch.distributed.

One process is a world of size one and runs the same code. All that ranks tell each other goes through `share`: every
rank does its work, rank 0 makes one answer of all results, and everybody gets it. An error anywhere is raised
everywhere, and nothing is pickled.
"""

from __future__ import annotations

from typing import Any

from shardstore.ranks.port import Alone, Answer, Ranks, Work

ALL = object()
"""The default of `group`: all ranks where torch.distributed is initialised, else this process alone."""


def ranks_of(group: Any, purpose: str = "save") -> Ranks:
    """The ranks of a process group; `None` is this process alone. Costs no communication.

    `purpose`: what is said under one never meets what is said under another, so that two threads may talk at once.
    Raises InvalidArgument for a group that this process is not in.
    """
    if group is None:
        return Alone()
    from shardstore.ranks.distributed import distributed

    return distributed(None if group is ALL else group, purpose)


__all__ = ["ALL", "Alone", "Answer", "Ranks", "Work", "ranks_of"]
