"""Which tensor goes into which shard: pure, and the same on every run for the same state.

`balanced` packs the largest tensor first into the emptiest shard; `round_robin` deals tensors in the order of the
state; `by_group` keeps groups of tensors in files of their own. `docs/layouts.md` says when which is better.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from shardstore.errors import InvalidArgument, brief
from shardstore.header import RESERVED
from shardstore.patterns import matches
from shardstore.specs import DTYPES, TensorSpec

Layout: TypeAlias = Literal["balanced", "round_robin", "by_group"]
GroupBy: TypeAlias = Callable[[str], Hashable] | Sequence[str]

LAYOUTS: tuple[Layout, ...] = ("balanced", "round_robin", "by_group")
DEFAULT_GROUPS = ("*.weight", "*.bias")
WEIGHTS = "model/"
MAX_SHARDS = 99_999
_HEADER_ROW = 110  # bytes of a row in a header, without its name
_HEADER_BUDGET = 64_000_000
_SMALLEST, _LARGEST, _SHARES = 64 * 2**20, 4 * 2**30, 16


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How a state is split. At most one of `shards` (files in all) and `shard_bytes` (bytes a file) is given.

    With neither, a shard holds a sixteenth of the state, but 64 MiB at least and 4 GiB at most.
    """

    layout: Layout = "balanced"
    shards: int | None = None
    shard_bytes: int | None = None
    group_by: GroupBy | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InvalidArgument(f"layout must be one of {', '.join(LAYOUTS)}, not {brief(self.layout)}")
        if self.group_by is not None and self.layout != "by_group":
            raise InvalidArgument("group_by goes with layout='by_group' only")
        if not _groups_by(self.group_by):
            raise InvalidArgument(f"group_by must be a callable or a list of patterns, not {brief(self.group_by)}")
        if self.shards is not None and self.shard_bytes is not None:
            raise InvalidArgument("give shards or shard_bytes, not both")
        for name, value in (("shards", self.shards), ("shard_bytes", self.shard_bytes)):
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidArgument(f"{name} must be a whole number above 0, not {brief(value)}")
        if self.shards is not None and self.shards > MAX_SHARDS:
            raise InvalidArgument(f"shards must be at most {MAX_SHARDS}, not {brief(self.shards)}")


def _groups_by(group_by: GroupBy | None) -> bool:
    """Whether a value says how to group."""
    if group_by is None or callable(group_by) or isinstance(group_by, str):
        return True
    return isinstance(group_by, list | tuple) and all(isinstance(pattern, str) for pattern in group_by)


@dataclass(frozen=True, slots=True)
class Shard:
    """One file: its path, and the numbers of its tensors in the order of their bytes."""

    path: str
    tensors: list[int]
    weights: bool

    def names(self, paths: Sequence[str]) -> list[str]:
        """The names that its header shows: plain ones for weights, full paths for all others."""
        cut = len(WEIGHTS) if self.weights else 0
        return [paths[tensor][cut:] for tensor in self.tensors]


class Tensors:
    """The tensors that are to be stored: columns by number, and the numbers in question.

    `parts`: those that are parts of larger ones, and so no weights that other tools could use.
    """

    def __init__(
        self, paths: Sequence[str], specs: Sequence[TensorSpec], stored: Iterable[int], parts: Container[int] = ()
    ) -> None:
        self.paths, self.specs = paths, specs
        sizes = {spec: spec.nbytes for spec in set(specs)}
        self.sizes = [sizes[spec] for spec in specs]
        self.weights: list[int] = []
        self.others: list[int] = []
        for tensor in stored:
            path = paths[tensor]
            named = path.startswith(WEIGHTS) and path != WEIGHTS + RESERVED and tensor not in parts
            (self.weights if named else self.others).append(tensor)

    def bytes_of(self, tensors: Iterable[int]) -> int:
        return sum(map(self.sizes.__getitem__, tensors))


def plan_shards(tensors: Tensors, options: ShardOptions, attempt: str, rank: int = 0, size: int = 1) -> list[Shard]:
    """The shards that one of `size` ranks writes: weights first, then all other tensors. No tensors, no shards."""
    if options.shards is not None:
        options = replace(options, shards=-(-options.shards // size))
    classes = [numbers for numbers in (tensors.weights, tensors.others) if numbers]
    groups = [_groups(tensors, numbers, options) for numbers in classes]
    counts = iter(_counts([g for split in groups for g in split], tensors, options))
    planned: list[Shard] = []
    for numbers, split in zip(classes, groups, strict=True):
        bins = [b for group in split for b in _split(group, next(counts), tensors.sizes, options.layout)]
        weights = numbers is tensors.weights
        planned += [
            Shard(
                _name("model-" if weights else "state/", at * size + rank, len(bins) * size, attempt),
                _widest_first(members, tensors.specs),
                weights,
            )
            for at, members in enumerate(bins)
        ]
    return planned


def spread(sizes: Sequence[int], roots: int, rank: int = 0) -> list[int]:
    """The root of each shard of these sizes, in bytes: the largest first, always to the emptiest root.

    `rank`: whose shards these are; each begins with another root.
    """
    filled = [(0, turn) for turn in range(roots)]
    chosen = [0] * len(sizes)
    for shard in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        nbytes, turn = filled[0]
        chosen[shard] = (turn + rank) % roots
        heapq.heapreplace(filled, (nbytes + sizes[shard], turn))
    return chosen


def _name(prefix: str, at: int, count: int, attempt: str) -> str:
    return f"{prefix}{at + 1:05d}-of-{count:05d}-{attempt}.safetensors"


def _widest_first(members: list[int], specs: Sequence[TensorSpec]) -> list[int]:
    """Widest element first keeps every tensor aligned; then in the order of the state."""
    return sorted(members, key=lambda t: (-DTYPES[specs[t].dtype].itemsize, t))


def _groups(tensors: Tensors, numbers: list[int], options: ShardOptions) -> list[list[int]]:
    if options.layout != "by_group":
        return [numbers]
    key = _key(options.group_by if options.group_by is not None else DEFAULT_GROUPS)
    groups: dict[Hashable, list[int]] = {}
    for tensor in numbers:
        groups.setdefault(key(tensors.paths[tensor]), []).append(tensor)
    return list(groups.values())


def _key(group_by: GroupBy) -> Callable[[str], Hashable]:
    if callable(group_by):
        return group_by
    if isinstance(group_by, str):
        group_by = [group_by]

    def key(path: str) -> Hashable:
        name = path.partition("/")[2]
        return next((p for p in group_by if matches(p, path if "/" in p else name)), None)

    return key


def _counts(groups: list[list[int]], tensors: Tensors, options: ShardOptions) -> list[int]:
    """How many shards each group gets: at least one, never more than tensors, headers within the format's limit."""
    sizes = [tensors.bytes_of(group) for group in groups]
    if options.shards is not None:
        counts = _share(options.shards, sizes, [len(group) for group in groups])
    else:
        target = options.shard_bytes or min(max(sum(sizes) // _SHARES, _SMALLEST), _LARGEST)
        counts = [-(-size // target) for size in sizes]
    least = [-(-sum(len(tensors.paths[t]) + _HEADER_ROW for t in group) // _HEADER_BUDGET) for group in groups]
    return [max(1, low, min(n, len(group))) for n, low, group in zip(counts, least, groups, strict=True)]


def _share(total: int, sizes: list[int], most: list[int]) -> list[int]:
    """Deal `total` shards: one to each group, then always to the group whose shards are largest."""
    counts = [1] * len(sizes)
    heap = [(-size, at) for at, size in enumerate(sizes) if most[at] > 1]
    heapq.heapify(heap)
    for _ in range(total - len(sizes)):
        if not heap:
            break
        _, at = heapq.heappop(heap)
        counts[at] += 1
        if counts[at] < most[at]:
            heapq.heappush(heap, (-(sizes[at] // counts[at]), at))
    return counts


def _split(group: list[int], count: int, sizes: Sequence[int], layout: Layout) -> list[list[int]]:
    if count == 1:
        return [group]
    if layout == "round_robin":
        return [group[at::count] for at in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, at) for at in range(count)]  # bytes, tensors, which: empty tensors spread too
    for tensor in sorted(group, key=lambda t: -sizes[t]):
        filled, members, at = heap[0]
        bins[at].append(tensor)
        heapq.heapreplace(heap, (filled + sizes[tensor], members + 1, at))
    return bins
