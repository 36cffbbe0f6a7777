"""One save on its way: what goes into which file of which root, under one id."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardstore import header, tree
from shardstore.check import threads_of
from shardstore.errors import InvalidArgument, brief
from shardstore.events import Reporter
from shardstore.hashing import known
from shardstore.index import Contribution, FileEntry
from shardstore.memory import stream
from shardstore.plan import Shard, ShardOptions, Tensors, plan_shards, spread
from shardstore.saving.meshes import digest_of
from shardstore.specs import Box, Lazy, TensorSpec
from shardstore.storage import Store
from shardstore.transfer import HashedBody, put_all


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a checkpoint stands in its run: the run's id, the owner's epoch, the number of the save, its parent."""

    run: str
    owner: int
    seq: int
    parent: str | None


@dataclass(frozen=True, slots=True)
class Options:
    """How a state is saved, checked at construction.

    `threads`: None for what suits the stores, and a save in the `background`. `attempt`: the id, where the place was
    named by it already.
    """

    shards: ShardOptions
    step: int | None
    hash: str
    threads: int | None = None
    background: bool = False
    attempt: str | None = None
    lineage: Lineage | None = None

    def __post_init__(self) -> None:
        if self.step is not None and not (type(self.step) is int and 0 <= self.step < 2**63):
            raise InvalidArgument(f"step must be a whole number from 0 on, or None, not {brief(self.step)}")
        threads_of(self.threads)
        if type(self.hash) is not str or not known(self.hash):
            raise InvalidArgument(f"hash must be 'xxh3_128' or 'sha256', not {brief(self.hash)}")


def new_attempt() -> str:
    """A new attempt id: 16 hexadecimal digits that no seed can repeat."""
    return secrets.token_hex(8)


@dataclass(slots=True)
class Agreement:
    """What the ranks have agreed on. `flat`: this rank's state, with the ties of the group.

    `count`: of the tensors that they share; `numbers`: of this rank's among those. `owned`: the places in `flat.leaves`
    of what this rank writes. `roots`: their order. `united`: on rank 0 the state of all, where it is not `flat` itself.
    `shared`: places of split tensors that ranks with other states have as well, whose parts are to be compared.
    `late`: whether the structure is known only when all have written, since ranks have values of their own.
    `notes`: what a person should know.
    """

    attempt: str
    flat: tree.Flat
    count: int
    owned: list[int]
    numbers: Sequence[int]
    roots: list[int] = field(default_factory=lambda: [0])
    united: tree.Flat | None = None
    late: bool = False
    notes: list[str] = field(default_factory=list)
    shared: Sequence[int] = ()

    @classmethod
    def alone(cls, flat: tree.Flat, attempt: str | None) -> Agreement:
        """Of one process with itself."""
        count = len(flat.leaves)
        owned = [number for number in range(count) if number not in flat.aliases]
        return cls(attempt or new_attempt(), flat, count, owned, range(count), late=bool(flat.nodes))


class File(NamedTuple):
    """One file to be written. `start`: where its data begins, None for the meta; `tensors`: the numbers it holds."""

    root: int
    key: str
    body: HashedBody
    start: int | None
    tensors: list[int]


class Attempt:
    """The files of one save that this rank writes, planned at construction."""

    def __init__(
        self, agreed: Agreement, options: Options, roots: int, reporter: Reporter, *,
        rank: int = 0, size: int = 1,
    ) -> None:  # fmt: skip
        self.id, self._agreed, self._flat = agreed.attempt, agreed, agreed.flat
        self._options, self._reporter = options, reporter
        self._leaves = [*self._flat.leaves, *self._flat.own] if self._flat.own else self._flat.leaves
        self._paths = [leaf.path for leaf in self._leaves]
        self._specs = list(map(_held, self._leaves))
        stored = [*agreed.owned, *range(len(self._flat.leaves), len(self._leaves))]
        self._parts = {n: part.box for n in stored if (part := self._leaves[n].part) is not None}
        tensors = Tensors(self._paths, self._specs, stored, self._parts)
        shards = plan_shards(tensors, options.shards, self.id, rank, size)
        places = spread([tensors.bytes_of(shard.tensors) for shard in shards], roots, rank)
        self.files = [self._shard(shard, root) for shard, root in zip(shards, places, strict=True)]
        if rank == 0 and not agreed.late:
            self.files.append(meta_file(agreed.united or self._flat, self.id, options.hash, reporter))

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.body.nbytes for file in self.files)

    def write(self, stores: Sequence[Store]) -> None:
        """Write every file to its root, durably."""
        threads = threads_of(self._options.threads, stores, background=self._options.background)
        put_all([(stores[file.root], file.key, file.body) for file in self.files], threads)

    def contribution(self) -> Contribution:
        """What was written, for the index."""
        files = [written(file) for file in self.files]
        parts: dict[int, dict[int, Box]] = {}
        for at, file in enumerate(files):
            boxes = {place: self._parts[n] for place, n in enumerate(file.pieces) if n in self._parts}
            if boxes:
                parts[at] = boxes
            file.pieces = self._shared(file.pieces)
        own = [(leaf.path, leaf.spec) for leaf in self._flat.own]
        return Contribution(files, parts, self._flat.nodes, own, list(self._compared()))

    def _compared(self) -> Iterator[tuple[int, Box, str]]:
        """Number, box and digest of the parts that ranks with other states may have as well."""
        for number in self._agreed.shared:
            leaf = self._flat.leaves[number]
            if leaf.part is not None and leaf.tensor.numel():
                yield self._agreed.numbers[number], leaf.part.box, digest_of([leaf])

    def _shared(self, numbers: list[int]) -> list[int]:
        """Numbers that tensors have among all ranks; what this rank has of its own comes behind those."""
        known, here, count = self._agreed.numbers, len(self._flat.leaves), self._agreed.count
        if known == range(here) and here == count:
            return numbers
        return [known[number] if number < here else count + number - here for number in numbers]

    def _shard(self, shard: Shard, root: int) -> File:
        specs = [self._specs[number] for number in shard.tensors]
        head = header.build(zip(shard.names(self._paths), specs, strict=True))
        lazy, leaves = self._flat.lazy, self._leaves
        tensors = [lazy[number] if number in lazy else leaves[number].tensor for number in shard.tensors]
        nbytes = len(head) + sum(spec.nbytes for spec in specs)
        body = HashedBody(nbytes, _Chunks(head, tensors), self._options.hash, self._reporter)
        return File(root, shard.path, body, len(head), shard.tensors)


def meta_file(flat: tree.Flat, attempt: str, algorithm: str, reporter: Reporter | None = None) -> File:
    """The file with the structure."""
    meta = tree.dump_meta(flat, attempt)
    body = HashedBody(len(meta), lambda: [memoryview(meta)], algorithm, reporter)
    return File(0, f"state/meta-{attempt}.json", body, None, [])


def written(file: File) -> FileEntry:
    """What the index says of a file that was written."""
    root, key, body, start, numbers = file
    return FileEntry(key, body.nbytes, body.digest, body.blocks, start, numbers, root)


def _held(leaf: tree.Leaf) -> TensorSpec:
    """What of a tensor is here."""
    return leaf.spec if leaf.part is None else TensorSpec(leaf.spec.dtype, leaf.part.box.shape)


class _Chunks:
    """Header and tensors of one shard as buffers, anew at each call."""

    def __init__(self, head: bytes, tensors: list[torch.Tensor | Lazy]) -> None:
        self._head, self._tensors = head, tensors

    def __call__(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        yield from stream(self._tensors)
