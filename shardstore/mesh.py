"""Which part of a tensor a rank holds: pure arithmetic on meshes and placements. No torch.

Source: the semantics of `torch.distributed.tensor` (Shard, Replicate and _StridedShard) and of `torch.chunk`, which
gives every rank the same number of rows, the last ones fewer or none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from shardstore.specs import Box, Shape


class Split(NamedTuple):
    """A mesh dimension over which dimension `dim` of the tensor is split.

    `after`: so many ranks of mesh dimensions further right split it before this one does (FSDP2 over tensor parallel).
    """

    dim: int
    after: int = 1


Placement: TypeAlias = Split | None
"""None: every rank along that mesh dimension holds the same."""


def part_of(shape: Shape, sizes: Sequence[int], at: Sequence[int], placements: Sequence[Placement]) -> Box:
    """The part that the rank at `at`, in a mesh of `sizes`, holds of a tensor of `shape`.

    An empty part lies at the end of its dimension. Raises ValueError for placements that make no sense.
    """
    origin, part = [0] * len(shape), list(shape)
    for mesh_dim in _order(sizes, placements):
        split = placements[mesh_dim]
        if split is None or not 0 <= split.dim < len(shape):
            raise ValueError(f"a tensor of {len(shape)} dimensions can't be split along {split}")
        rows = -(-part[split.dim] // sizes[mesh_dim])
        begin = min(at[mesh_dim] * rows, part[split.dim])
        origin[split.dim] += begin
        part[split.dim] = min(rows, part[split.dim] - begin)
    return Box(tuple(origin), tuple(part))


def _order(sizes: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The mesh dimensions that split something, in the order in which they do."""
    order: list[int] = []
    for mesh_dim in reversed(range(len(placements))):
        split = placements[mesh_dim]
        if split is not None:
            order.insert(_place(mesh_dim, split, order, sizes, placements), mesh_dim)
    return order


def _place(
    mesh_dim: int, split: Split, order: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement]
) -> int:
    """How far behind dimensions on its right a mesh dimension comes."""
    before = 1
    for place, other in enumerate(order):
        if before == split.after:
            return place
        there = placements[other]
        if there is not None and there.dim == split.dim:
            before *= sizes[other]
    if before != split.after:
        raise ValueError(f"no mesh dimensions right of {mesh_dim} have {split.after} ranks together")
    return len(order)


def places_of(sizes: Sequence[int], at: Sequence[int], placements: Sequence[Placement]) -> tuple[int, ...]:
    """The places, in the row-major list of a mesh's ranks, of those that hold the same part as the one at `at`."""
    free = [range(size) if split is None else [here] for size, here, split in zip(sizes, at, placements, strict=True)]
    steps = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    return tuple(sum(map(int.__mul__, point, steps)) for point in itertools.product(*free))
