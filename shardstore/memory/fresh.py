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
_STRUCTURE = 16

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
        return torch.empty(0, dtype=torch.uint8, device="cpu")
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
        return [torch.empty(spec.shape, dtype=dtype, device="cpu") for _ in range(count)]
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
            for bunch in _bunches(group):
                yield from _together(bunch)


_number, _spec = operator.itemgetter(0), operator.itemgetter(3)


def _bunches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Small tensors that share one arena: about ARENA bytes of them."""
    bunch: list[Extent] = []
    nbytes = 0
    for extent in extents:
        if nbytes > ARENA:
            yield bunch
            bunch, nbytes = [], 0
        bunch.append(extent)
        nbytes += extent.nbytes
    if bunch:
        yield bunch


def _aligned(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Neighbours without a gap, in which each tensor begins a multiple of 16 bytes after the first.

    The file aligns a tensor to its element; memory from an allocator is aligned for structures. Small tensors of bytes
    stand alone.
    """
    chunk: list[Extent] = []
    start = end = 0
    alone = False
    for extent in extents:
        was_alone, alone = alone, _is_state(extent)
        if chunk and (alone or was_alone or extent.offset != end or (extent.offset - start) % _STRUCTURE):
            yield chunk
            chunk = []
        if not chunk:
            start = extent.offset
        chunk.append(extent)
        end = extent.offset + extent.nbytes
    if chunk:
        yield chunk


def _is_state(extent: Extent) -> bool:
    """Whether a tensor may be the state of a generator, which torch reads from the start of its storage.

    `torch.set_rng_state` ignores a storage offset: given a part of a larger storage it fails, or ends the process.
    """
    return extent.spec.dtype == "uint8" and len(extent.spec.shape) == 1 and extent.nbytes < OWN


def _alone(extent: Extent) -> Carved:
    tensor = torch.empty(extent.spec.shape, dtype=TORCH_DTYPES[extent.spec.dtype], device="cpu")
    return Carved(extent.offset, extent.nbytes, tensor.data_ptr(), [(extent.tensor, tensor)])


def _together(bunch: list[Extent]) -> Iterator[Carved]:
    chunks = []
    for chunk in _aligned(bunch):
        if _is_state(chunk[0]):
            yield _alone(chunk[0])
        else:
            chunks.append(chunk)
    sizes = [chunk[-1].offset + chunk[-1].nbytes - chunk[0].offset for chunk in chunks]
    arena = raw(sum(-(-size // _ALIGN) * _ALIGN for size in sizes))
    at = 0
    for chunk, size in zip(chunks, sizes, strict=True):
        memory = arena[at : at + size]
        yield Carved(chunk[0].offset, size, memory.data_ptr(), list(_shaped_runs(memory, chunk, chunk[0].offset)))
        at += -(-size // _ALIGN) * _ALIGN


def _shaped_runs(memory: torch.Tensor, extents: Sequence[Extent], base: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Tensors over memory that holds gapless extents, the first of which lies at `base` of the file."""
    for spec, same in itertools.groupby(extents, key=_spec):
        run = list(same)
        begin = run[0].offset - base
        parts = shaped(memory[begin : begin + len(run) * run[0].nbytes], spec, len(run))
        yield from zip(map(_number, run), parts, strict=True)


def over(buffer: memoryview, extents: Sequence[Extent]) -> Iterator[tuple[int, torch.Tensor]]:
    """Number and tensor of every extent, over the memory of a mapped file.

    What lies at odd addresses there, or may be the state of a generator, is copied.
    """
    whole = (
        torch.frombuffer(buffer, dtype=torch.uint8) if len(buffer) else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    for chunk in _aligned(extents):
        begin, end = chunk[0].offset, chunk[-1].offset + chunk[-1].nbytes
        memory = whole[begin:end]
        if begin % _STRUCTURE or _is_state(chunk[0]):
            memory = memory.clone()
        yield from _shaped_runs(memory, chunk, begin)
