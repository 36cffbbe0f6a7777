"""One save on its way: what goes into which file of which root, under one id."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardstore import header, tree
from shardstore._version import __version__
from shardstore.check import Found, threads_of, utc_now
from shardstore.errors import InvalidArgument, brief
from shardstore.events import Reporter
from shardstore.hashing import known
from shardstore.index import FileEntry, Index
from shardstore.memory import stream
from shardstore.plan import Shard, ShardOptions, Tensors, plan_shards, spread
from shardstore.specs import TensorSpec
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

    `threads`: None for what suits the stores. `attempt`: the id, where the place was named by it already.
    """

    shards: ShardOptions
    step: int | None
    hash: str
    threads: int | None = None
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


class File(NamedTuple):
    """One file to be written. `start`: where its data begins, None for the meta; `tensors`: the numbers it holds."""

    root: int
    key: str
    body: HashedBody
    start: int | None
    tensors: list[int]


class Attempt:
    """The files of one save, planned at construction."""

    def __init__(self, flat: tree.Flat, options: Options, stores: Sequence[Store], reporter: Reporter) -> None:
        self.id = options.attempt or new_attempt()
        self._flat, self._options, self._stores, self._reporter = flat, options, stores, reporter
        self._paths, self._specs = [leaf.path for leaf in flat.leaves], [leaf.spec for leaf in flat.leaves]
        stored = (number for number in range(len(self._paths)) if number not in flat.aliases)
        tensors = Tensors(self._paths, self._specs, stored)
        shards = plan_shards(tensors, options.shards, self.id)
        roots = spread([tensors.bytes_of(shard.tensors) for shard in shards], len(stores))
        self.files = [self._shard(shard, root) for shard, root in zip(shards, roots, strict=True)]
        self.files.append(self._meta())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.body.nbytes for file in self.files)

    def write(self) -> None:
        """Write every file, durably."""
        threads = threads_of(self._options.threads, self._stores)
        put_all([(self._stores[file.root], file.key, file.body) for file in self.files], threads)

    def index(self, replaced: Found | None) -> Index:
        """The index of what was written."""
        files = [
            FileEntry(key, body.nbytes, body.digest, body.blocks, start, numbers, root)
            for root, key, body, start, numbers in self.files
        ]
        table: dict[TensorSpec, int] = {}
        kinds = [table.setdefault(spec, len(table)) for spec in self._specs]
        parent = replaced.index.attempt if replaced else None
        line = self._options.lineage or Lineage("", 0, replaced.index.seq + 1 if replaced else 0, parent)
        return Index(
            attempt=self.id, run=line.run or None, owner=line.owner, seq=line.seq, parent=line.parent,
            time=utc_now(), hash=self._options.hash, files=files, meta=len(files) - 1,
            paths=self._paths, table=list(table), kinds=kinds, aliases=self._flat.aliases, step=self._options.step,
            roots=len(self._stores),
            versions={"shardstore": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        )  # fmt: skip

    def _shard(self, shard: Shard, root: int) -> File:
        specs = [self._specs[number] for number in shard.tensors]
        head = header.build(zip(shard.names(self._paths), specs, strict=True))
        tensors = [self._flat.leaves[number].tensor for number in shard.tensors]
        nbytes = len(head) + sum(spec.nbytes for spec in specs)
        body = HashedBody(nbytes, _Chunks(head, tensors), self._options.hash, self._reporter)
        return File(root, shard.path, body, len(head), shard.tensors)

    def _meta(self) -> File:
        meta = tree.dump_meta(self._flat, self.id)
        body = HashedBody(len(meta), lambda: [memoryview(meta)], self._options.hash)
        return File(0, f"state/meta-{self.id}.json", body, None, [])


class _Chunks:
    """Header and tensors of one shard as buffers, anew at each call."""

    def __init__(self, head: bytes, tensors: list[torch.Tensor]) -> None:
        self._head, self._tensors = head, tensors

    def __call__(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        yield from stream(self._tensors)
