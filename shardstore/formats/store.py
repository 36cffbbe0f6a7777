"""Our own checkpoints under the port of formats: as lazy tensors that are verified as they are read, and written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from shardstore import tree
from shardstore.errors import ShardstoreError
from shardstore.events import to_log
from shardstore.formats.plain import Plain
from shardstore.formats.port import Foreign, Options
from shardstore.hashing import DEFAULT
from shardstore.index import NAME
from shardstore.loading.fresh import read_fresh, read_part
from shardstore.loading.source import Source
from shardstore.memory import load, owned, slices
from shardstore.plan import ShardOptions
from shardstore.run import split
from shardstore.saving import Options as SaveOptions
from shardstore.saving import save, save_flat
from shardstore.specs import Box, Lazy, Shape, TensorSpec
from shardstore.storage import close_all, open_roots, open_store
from shardstore.tree.restore import Restorer

_PART = 16 * 1024 * 1024
_SMALL = 64 * 1024 * 1024
"""Bytes of the smallest tensors of a checkpoint that are read together: each alone would cost a block of 4 MiB."""


class StoreFormat:
    """A checkpoint of shardstore. An optimizer's state comes by the names of its parameters, as `load` gives it."""

    name = "shardstore"

    def recognises(self, path: str) -> bool:
        """Whether an index lies there, or it is RUN@STEP."""
        if split(path) is not None:
            return True
        try:
            store = open_store(path)
            try:
                store.stat(NAME)
            finally:
                store.close()
        except ShardstoreError:
            return False
        return True

    def claims(self, path: str) -> bool:  # noqa: ARG002 - the port
        """A store is what is meant where nothing else is."""
        return True

    def read(self, path: str, options: Options) -> Foreign:
        """Open a checkpoint. Raises as `load` does."""
        opened = OpenedStore(path, options)
        with ExitStack() as files:
            files.callback(opened.source.close)
            opened.check()
            return Foreign(self.name, opened.source.url, opened.state(), step=opened.source.index.step,
                           flat=opened.flat(), files=files.pop_all())  # fmt: skip

    def write(self, state: Any, path: str, options: Options) -> None:
        """Save a state as a checkpoint."""
        save(state, path, step=options.step, group=None, listener=options.listener,
             storage_options=options.storage_options)  # fmt: skip


def save_again(flat: tree.Flat, url: str, options: Options) -> None:
    """Save a state just as it lies in another store."""
    stores = open_roots(url, storage_options=options.storage_options, listener=options.listener)
    try:
        save_flat(
            flat, stores, SaveOptions(ShardOptions(), options.step, DEFAULT), overwrite=False, single_writer=False,
            listener=to_log if options.listener is None else options.listener,
        )  # fmt: skip
    finally:
        close_all(stores)


class OpenedStore:
    """A checkpoint whose tensors are read when they are asked for."""

    def __init__(self, url: str, options: Options) -> None:
        self.source = Source(url, listener=options.listener, storage_options=options.storage_options)
        index = self.source.index
        small = _Small(self.source)
        stored = {number: StoredTensor(self.source, number, small) for number in index.located}
        self._lazy = {number: stored[index.resolve(number)] for number in range(len(index.paths))}

    def check(self) -> None:
        """That all files are there, and the blocks without tensor bytes are whole."""
        self.source.check_present(range(len(self.source.index.files)))
        self.source.check_headers(set(self.source.index.located))

    def state(self) -> Any:
        """The state with lazy tensors; arrays, sparse tensors and registered types are made at once."""
        with self.source.structuring():
            return _Plain(self.source.index.paths, self._lazy).node(self.source.meta.state)

    def flat(self) -> tree.Flat:
        """The same as it is stored, to be stored again just so."""
        index, meta = self.source.index, self.source.meta
        none = torch.empty(0, device="cpu")
        leaves = [tree.Leaf(path, spec, none) for path, spec in zip(index.paths, index.specs, strict=True)]
        lazy: dict[int, Lazy] = {number: self._lazy[number] for number in index.located}
        return tree.Flat(leaves, dict(index.aliases), meta.state, meta.flat, list(meta.left), lazy)


class StoredTensor(Lazy):
    """A tensor of a checkpoint. Every byte that it gives has been verified."""

    def __init__(self, source: Source, number: int, small: _Small) -> None:
        super().__init__(source.index.specs[number])
        self.source, self.number, self._small = source, number, small

    def buffers(self) -> Iterator[memoryview]:
        found = self._small.get(self.number)
        if found is not None:
            yield from slices(found)
            return
        for box in boxes(self.spec, _PART):
            yield owned(read_part(self.source, self.number, box))


class _Small:
    """The smallest tensors of a checkpoint, read together when the first of them is asked for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        sizes = np.array([source.index.sizes[number] for number in source.index.located], dtype=np.int64)
        numbers = np.array(list(source.index.located), dtype=np.int64)
        order = np.argsort(sizes, kind="stable")
        self._numbers = frozenset(numbers[order][np.cumsum(sizes[order]) <= _SMALL].tolist())
        self._tensors: dict[int, torch.Tensor] | None = None
        self._lock = threading.Lock()

    def get(self, number: int) -> torch.Tensor | None:
        """A small tensor, None for one that is not."""
        if number not in self._numbers:
            return None
        with self._lock:
            if self._tensors is None:
                self._tensors = read_fresh(self._source, self._numbers)
        return self._tensors[number]


def boxes(spec: TensorSpec, most: int) -> Iterator[Box]:
    """Parts of a tensor that cover it in row-major order, of at most `most` bytes where its shape allows."""
    yield from _boxes(spec.shape, spec.nbytes, most, ())


def _boxes(shape: Shape, nbytes: int, most: int, at: Shape) -> Iterator[Box]:
    if not nbytes:
        return
    if nbytes <= most or not shape:
        yield Box((*at, *(0,) * len(shape)), (*(1,) * len(at), *shape))
        return
    row = nbytes // shape[0]
    rows = most // row
    for begin in range(0, shape[0], max(1, rows)):
        if not rows:
            yield from _boxes(shape[1:], row, most, (*at, begin))
            continue
        count = min(rows, shape[0] - begin)
        yield Box((*at, begin, *(0,) * (len(shape) - 1)), (*(1,) * len(at), count, *shape[1:]))


class _Plain(Plain):
    """Makes the state with lazy tensors. What is made from tensors is made at once, tensor by tensor."""

    def __init__(self, paths: Any, lazy: dict[int, StoredTensor]) -> None:
        super().__init__(paths, lazy.__getitem__)  # type: ignore[arg-type] # leaves them as they are, see below
        self._loaded = Restorer(paths, lambda number: load(lazy[number]))

    def _sparse(self, node: Any) -> Any:
        return self._loaded.node(node)

    def _ndarray(self, node: Any) -> Any:
        return self._loaded.node(node)

    def _custom(self, node: Any) -> Any:
        return self._loaded.node(node)
