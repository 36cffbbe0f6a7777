"""Which part a rank holds, and which rank writes what: pure arithmetic, against torch's own and against brute force."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardstore.mesh import Placement, Split, part_of, places_of
from shardstore.plan.owners import TINY, Replica, share_out

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def dims_of(data: st.DataObject, shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[int | None]:
    """For every dimension of a mesh, the dimension of the tensor that it splits."""
    dim = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    return [data.draw(dim) for _ in sizes]


@given(shape=SHAPES, sizes=MESHES, data=st.data())
def test_parts_are_where_torch_has_them(shape: tuple[int, ...], sizes: tuple[int, ...], data: st.DataObject):
    """Shard and Replicate over any mesh, even or not.

    The shape is torch's at every rank, and so is the place of every part that is not empty.
    """
    dims = dims_of(data, shape, sizes)
    theirs = [Replicate() if dim is None else Shard(dim) for dim in dims]
    ours: list[Placement] = [None if dim is None else Split(dim) for dim in dims]
    for at in itertools.product(*map(range, sizes)):
        box = part_of(shape, sizes, at, ours)
        local, offset = _compute_local_shape_and_global_offset(shape, sizes, at, theirs)
        assert box.shape == tuple(local)
        if box.volume:
            assert box.origin == tuple(offset)
        assert box.inside(shape)


@given(shape=SHAPES, sizes=MESHES, data=st.data(), order=st.randoms(use_true_random=False))
def test_parts_in_any_order_of_splitting(
    shape: tuple[int, ...], sizes: tuple[int, ...], data: st.DataObject, order: Any
):
    """What FSDP2 over tensor parallelism makes (_StridedShard), uneven too.

    Exactly the elements that are left when the mesh dimensions split one after the other by torch.chunk.
    """
    dims = dims_of(data, shape, sizes)
    turns = [mesh_dim for mesh_dim, dim in enumerate(dims) if dim is not None]
    order.shuffle(turns)
    ours: list[Placement] = [None] * len(sizes)
    for place, mesh_dim in enumerate(turns):
        earlier = [other for other in turns[:place] if other > mesh_dim and dims[other] == dims[mesh_dim]]
        ours[mesh_dim] = Split(dims[mesh_dim] or 0, math.prod(sizes[other] for other in earlier))
    whole = torch.arange(math.prod(shape)).view(shape)
    same_dim_in_order = _order_is_told(turns, dims, sizes)
    for at in itertools.product(*map(range, sizes)):
        left = whole
        for mesh_dim in turns:
            left = _chunk(left, sizes[mesh_dim], at[mesh_dim], dims[mesh_dim] or 0)
        if same_dim_in_order:
            box = part_of(shape, sizes, at, ours)
            assert torch.equal(whole[box.slices], left)


def _order_is_told(turns: list[int], dims: list[int | None], sizes: tuple[int, ...]) -> bool:
    """Whether split factors can tell this order.

    Of mesh dimensions that split the same one, by the product of those on the right that come earlier, which sizes of 1
    or equal products leave open.
    """
    for mesh_dim in turns:
        same = [other for other in turns if dims[other] == dims[mesh_dim]]
        right = [other for other in same if other > mesh_dim]
        earlier = [other for other in right if turns.index(other) < turns.index(mesh_dim)]
        if sorted(right, key=turns.index)[: len(earlier)] != earlier or any(sizes[other] == 1 for other in right):
            return False
    return True


def _chunk(tensor: torch.Tensor, count: int, at: int, dim: int) -> torch.Tensor:
    """The part that torch.chunk gives to one of `count`; none where it makes fewer."""
    parts = torch.chunk(tensor, count, dim)
    return parts[at] if at < len(parts) else tensor.narrow(dim, tensor.shape[dim], 0)


def test_parts_where_torch_is_known_to_be_wrong():
    """7 rows over dp=3 and tp=2 (pytorch issues 168134, 161368): row 6 lies at (2, 1), whatever torch's offsets say."""
    placements: list[Placement] = [Split(0, 2), Split(0)]
    rows = {at: part_of((7, 4), (3, 2), at, placements) for at in itertools.product(range(3), range(2))}
    assert rows[2, 0].shape == (0, 4)
    assert (rows[2, 1].origin, rows[2, 1].shape) == ((6, 0), (1, 4))
    assert sum(box.shape[0] for box in rows.values()) == 7
    shape, _ = _compute_local_shape_and_global_offset(
        (7, 4), (3, 2), (2, 1), [_StridedShard(0, split_factor=2), Shard(0)]
    )
    assert tuple(shape) != rows[2, 1].shape  # where this fails, torch has been mended


@given(shape=SHAPES, sizes=MESHES, data=st.data())
def test_parts_cover_a_tensor_and_their_holders_agree(
    shape: tuple[int, ...], sizes: tuple[int, ...], data: st.DataObject
):
    """Every element lies in one part; the ranks that `places_of` names hold the very same part, and no others do."""
    dims = dims_of(data, shape, sizes)
    ours: list[Placement] = [None if dim is None else Split(dim) for dim in dims]
    ranks = list(itertools.product(*map(range, sizes)))
    boxes = [part_of(shape, sizes, at, ours) for at in ranks]
    groups = {at: places_of(sizes, at, ours) for at in ranks}
    covered: Counter[int] = Counter()
    whole = torch.arange(math.prod(shape)).view(shape)
    for rank, at in enumerate(ranks):
        assert rank in groups[at]
        assert all(boxes[place] == boxes[rank] and groups[ranks[place]] == groups[at] for place in groups[at])
        if groups[at][0] == rank:
            covered.update(whole[boxes[rank].slices].flatten().tolist())
    assert covered == Counter(range(math.prod(shape)))


@pytest.mark.parametrize("placement", [Split(2), Split(-1), Split(0, 5)])
def test_placements_that_make_no_sense(placement: Split):
    """A dimension that the tensor hasn't got, and a split factor that no ranks make up, are errors."""
    with pytest.raises(ValueError, match=r"split|ranks"):
        part_of((4, 4), (2, 2), (0, 0), [placement, None])


REPLICAS = st.lists(
    st.tuples(st.one_of(st.integers(0, 5 * TINY), st.just(10**9)), st.sets(st.integers(0, 7), min_size=1)), max_size=40
)


@given(given_=REPLICAS)
def test_owners_are_holders_and_the_same_on_every_rank(given_: list[tuple[int, set[int]]]):
    """Each replica gets one owner, which holds it.

    The result depends neither on the order in which they are named nor on replicas of other holders; tiny ones of the
    same holders stay together.
    """
    replicas = [Replica(at, nbytes, tuple(sorted(holders))) for at, (nbytes, holders) in enumerate(given_)]
    owners = share_out(replicas)
    assert owners.keys() == set(range(len(replicas)))
    assert all(owners[replica.number] in replica.holders for replica in replicas)
    assert share_out(reversed(replicas)) == owners
    for rank in range(8):
        known = [replica for replica in replicas if rank in replica.holders]
        assert all(owners[number] == owner for number, owner in share_out(known).items())
    homes = {(replica.holders, owners[replica.number]) for replica in replicas if replica.nbytes < TINY}
    assert len(homes) == len({holders for holders, _ in homes})


def test_1024_ranks_share_the_work():
    """1,000 tensors over 1,024 ranks in HSDP of 32 x 32, beside 3,072 replicas on all.

    Every part is written by exactly one rank of those that hold it, and the rank with most to write has at most 1.1
    times the mean.
    """
    size, sizes, layout = 1024, (32, 32), [None, Split(0)]
    shapes = [(4096 + 64 * (at % 7), 512) for at in range(1000)]
    loads, written = [0] * size, Counter[tuple[int, Any]]()
    for column in range(32):  # whose 32 ranks hold the same parts, and so deal alike
        boxes = [part_of(shape, sizes, (5, column), layout) for shape in shapes]
        holders = places_of(sizes, (5, column), layout)
        assert holders == tuple(range(column, size, 32))
        owners = share_out(Replica(number, 4 * box.volume, holders) for number, box in enumerate(boxes))
        for number, owner in owners.items():
            loads[owner] += 4 * boxes[number].volume
            written[number, boxes[number].origin] += 1
    assert set(written.values()) == {1}
    assert len(written) == 1000 * 32
    assert sum(loads) == sum(4 * math.prod(shape) for shape in shapes)
    everybody = tuple(range(size))
    assert len(share_out([Replica(at, 8_000_000, everybody) for at in range(3 * size)], loads)) == 3 * size
    assert max(loads) <= 1.1 * sum(loads) / size
