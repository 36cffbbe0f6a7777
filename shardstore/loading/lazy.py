"""`open`: a checkpoint as a mapping of path to lazy tensor; a slice reads only the blocks that hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from shardstore import tree
from shardstore.errors import InvalidArgument
from shardstore.events import Listener
from shardstore.loading.fresh import read_fresh, read_part
from shardstore.loading.source import Source
from shardstore.memory import torch_dtype
from shardstore.specs import Box, Shape
from shardstore.storage import Urls


class LazyTensor:
    """A stored tensor. `t[...]` reads what is asked for, verified; `t[:]` or `t.load()` all of it."""

    def __init__(self, source: Source, number: int) -> None:
        self._source = source
        self._number = source.index.resolve(number)
        self.path = source.index.paths[number]
        spec = source.index.specs[number]
        self.dtype = torch_dtype(spec.dtype)
        self.shape = torch.Size(spec.shape)
        self.nbytes = spec.nbytes

    def load(self) -> torch.Tensor:
        """The whole tensor."""
        return read_fresh(self._source, {self._number})[self._number]

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Whole numbers, slices with steps from 1 on, and `...`. The rows of the first dimensions cost least."""
        origin, shape, rest = _box(key, tuple(self.shape), self.path)
        part = read_part(self._source, self._number, Box(origin, shape))
        return part[rest] if rest else part

    def __repr__(self) -> str:
        return f"LazyTensor({self.path!r}, {self.dtype}, {list(self.shape)})"


def _box(key: Any, sizes: Shape, path: str) -> tuple[Shape, Shape, tuple[Any, ...]]:
    """The box that holds what `key` asks for, and the indexing that is left to do in it."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if keys.count(Ellipsis) > 1 or len(keys) - keys.count(Ellipsis) > len(sizes):
        raise IndexError(f"too many indices for {path!r} of {len(sizes)} dimensions")
    at = keys.index(Ellipsis) if Ellipsis in keys else len(keys)
    filled = [slice(None)] * (len(sizes) - len(keys) + (Ellipsis in keys))
    keys = keys[:at] + filled + keys[at + 1 :]
    origin, shape, rest = [], [], []
    for one, size in zip(keys, sizes, strict=True):
        begin, extent, left = _range(one, size, path)
        origin.append(begin)
        shape.append(extent)
        rest.append(left)
    plain = all(left == slice(None) for left in rest)
    return tuple(origin), tuple(shape), () if plain else tuple(rest)


def _range(key: Any, size: int, path: str) -> tuple[int, int, Any]:
    if isinstance(key, slice):
        begin, end, step = key.indices(size)
        if step < 1:
            raise InvalidArgument(f"a slice of {path!r} needs a step of at least 1")
        extent = max(0, end - begin)
        return (begin if extent else 0), extent, slice(None, None, step) if step > 1 else slice(None)
    if isinstance(key, bool) or not hasattr(key, "__index__"):
        raise InvalidArgument(f"{path!r} takes whole numbers and slices, not {type(key).__name__}")
    at = key.__index__()
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of range for {path!r} with size {size}")
    return at % size, 1, 0


class Checkpoint(Mapping[str, LazyTensor]):
    """An opened checkpoint: path to lazy tensor, in the order of the state. A context manager."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._numbers: dict[str, int] | None = None
        self.url = source.url
        self.step = source.index.step
        self.attempt = source.index.attempt
        self.time = source.index.time
        self.nbytes = source.index.nbytes

    @property
    def _table(self) -> dict[str, int]:
        if self._numbers is None:
            self._numbers = dict(zip(self._source.index.paths, range(len(self)), strict=True))
        return self._numbers

    def __getitem__(self, path: str) -> LazyTensor:
        return LazyTensor(self._source, self._table[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.index.paths)

    def __len__(self) -> int:
        return len(self._source.index.paths)

    def __contains__(self, path: object) -> bool:
        return path in self._table

    def plain(self, only: str | tuple[str, ...] | None = None) -> Any:
        """The state without reading its tensors: where one stands, its lazy tensor does."""
        selection = tree.select(self._source.meta, self._source.index.paths, only)
        lazy = {number: LazyTensor(self._source, number) for number in selection.numbers}
        return tree.outline(selection, self._source.index.paths, lazy)

    def close(self) -> None:
        """Give back the files."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_checkpoint(
    url: Urls, *, expect: str | None = None, threads: int | None = None,
    listener: Listener | None = None, storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:  # fmt: skip
    """Open a checkpoint without reading its tensors. Raises as `load` does."""
    return Checkpoint(Source(url, expect=expect, threads=threads, listener=listener, storage_options=storage_options))
