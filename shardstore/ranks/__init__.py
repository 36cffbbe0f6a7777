"""The ranks that save or load together. One process is a world of size one and runs the same code."""

from __future__ import annotations

from typing import Any, Protocol

from shardstore.errors import InvalidArgument

ALL = object()
"""The default of `group`: all ranks where torch.distributed is initialised, else this process alone."""


class Ranks(Protocol):
    """What a save or a load needs of its peers. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes] | None:
        """Everybody's data in order of ranks, on rank 0; None elsewhere."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's data, everywhere."""


class Alone:
    """This process alone."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes] | None:
        """This process's data."""
        return [data]

    def broadcast(self, data: bytes | None) -> bytes:
        """The data itself."""
        return data or b""


def ranks_of(group: Any) -> Ranks:
    """The ranks of a process group; `None` is this process alone. Raises InvalidArgument for more than one rank."""
    if group is None:
        return Alone()
    import torch.distributed as dist

    if group is ALL and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    size = dist.get_world_size(None if group is ALL else group)
    if size == 1:
        return Alone()
    raise InvalidArgument(
        f"one checkpoint from {size} ranks is not there yet: let one rank save the whole state with group=None"
    )
