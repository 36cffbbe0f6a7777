"""New memory for tensors that are loaded: large ones each on its own, small ones together, all on huge pages.

Page faults, not bytes, dominate a load into new memory; private anonymous maps with MADV_HUGEPAGE take few of them.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from shardstore.errors import UnsupportedVersion
from shardstore.specs import DTYPES, TensorSpec

OWN = 1024 * 1024
"""Tensors of at least so many bytes get memory of their own."""
ARENA = 32 * 1024 * 1024
"""Small tensors share memory of at most so many bytes."""
_ALIGN = 64

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}


def torch_dtype(name: str) -> torch.dtype:
    """A dtype by its name in the index. Raises UnsupportedVersion where this torch does not have it."""
    found = TORCH_DTYPES.get(name)
    if found is None:
        raise UnsupportedVersion(f"this torch ({torch.__version__}) has no dtype {name!r}: use a newer one")
    return found


class Extent(NamedTuple):
    """A stored tensor that is wanted: its number, where its bytes begin in its file, how many, and what it is."""

    tensor: int
    offset: int
    nbytes: int
    spec: TensorSpec


def raw(nbytes: int) -> torch.Tensor:
    """`nbytes` of new zeroed memory as a uint8 tensor, private to this process."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there is no memory for {nbytes} bytes") from error
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def single(spec: TensorSpec) -> torch.Tensor:
    """A new tensor with memory of its own."""
    return shaped(raw(spec.nbytes), spec, 1)[0]


def shaped(memory: torch.Tensor, spec: TensorSpec, count: int) -> Sequence[torch.Tensor]:
    """`count` tensors of one spec, one after the other in `memory` (uint8, exactly filled).

    They are no views for autograd: each has a version counter of its own.
    """
    dtype = torch_dtype(spec.dtype)
    if not spec.nbytes:
        return [torch.empty(spec.shape, dtype=dtype) for _ in range(count)]
    typed = memory.view(dtype)
    if not spec.shape:
        return [one.reshape(()) for one in torch.unsafe_split(typed, 1)]
    rows, *rest = spec.shape
    return torch.unsafe_split(typed.view(count * rows, *rest), rows)


class Carved(NamedTuple):
    """New memory for neighbours in a file: where they begin there, how many bytes, the tensors that lie over them."""

    offset: int
    nbytes: int
    address: int
    tensors: Sequence[tuple[int, torch.Tensor]]


def carve(extents: Sequence[Extent]) -> Iterator[Carved]:
    """New memory for all extents of one file, which come in order of their offsets.

    Small neighbours lie in memory as they lie in the file, so one read fills many.
    """
    for large, group in itertools.groupby(extents, key=lambda e: e.nbytes >= OWN):
        if large:
            for extent in group:
                tensor = single(extent.spec)
                yield Carved(extent.offset, extent.nbytes, tensor.data_ptr(), [(extent.tensor, tensor)])
        else:
            yield from map(_together, _chunks(group))


_number, _spec = operator.itemgetter(0), operator.itemgetter(3)


def _chunks(extents: Iterable[Extent], most: int = ARENA) -> Iterator[list[Extent]]:
    """Neighbours without a gap between them that span about `most` bytes of the file."""
    chunk: list[Extent] = []
    for extent in extents:
        if chunk and (extent.offset != chunk[-1].offset + chunk[-1].nbytes or extent.offset - chunk[0].offset > most):
            yield chunk
            chunk = []
        chunk.append(extent)
    if chunk:
        yield chunk


def _together(chunk: list[Extent]) -> Carved:
    first, last = chunk[0], chunk[-1]
    nbytes = last.offset + last.nbytes - first.offset
    lead = first.offset % _ALIGN  # the file's data start is aligned to 64, so types stay aligned
    arena = raw(lead + nbytes)[lead:]
    return Carved(first.offset, nbytes, arena.data_ptr(), list(_shaped_runs(arena, chunk, first.offset)))


def _shaped_runs(memory: torch.Tensor, extents: Sequence[Extent], base: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Tensors over memory that holds gapless extents, the first of which lies at `base` of the file."""
    for spec, same in itertools.groupby(extents, key=_spec):
        run = list(same)
        begin = run[0].offset - base
        parts = shaped(memory[begin : begin + len(run) * run[0].nbytes], spec, len(run))
        yield from zip(map(_number, run), parts, strict=True)


def over(buffer: memoryview, extents: Sequence[Extent]) -> Iterator[tuple[int, torch.Tensor]]:
    """Number and tensor of every extent, over the memory of a mapped file."""
    whole = torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8)
    for chunk in _chunks(extents, most=len(buffer)):
        yield from _shaped_runs(whole[chunk[0].offset :], chunk, chunk[0].offset)
